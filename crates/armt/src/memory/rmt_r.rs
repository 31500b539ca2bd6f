//! RMT-R (Kuratov et al. 2024): RMT that looks back at everything it has ever written.
//!
//! ```text
//! M: the last layer's outputs, normed, of the w memory tokens after the last segment;   P: those of all segments, M among them
//! q = W_q ln_q(M);   k = W_k ln_kv(P);   v = W_v ln_kv(P)
//! Y = M + W_o softmax(q k^T / sqrt(d)) v;   R = Y + W_2 act(W_1 ln_mlp(Y))          biases left out here; act is the backbone's
//! a segment is [M; R | its tokens | M]
//! ```
//!
//! Before the first segment the 2 w learned tokens stand where M and R would, and the first w of them where M would. As in RMT what is kept goes
//! through the top, so segments cannot overlap; unlike RMT's it grows, by w d numbers a segment: the state is P.
//!
//! Keys and values of P are never made: q k^T is (q W_k) ln_kv(P)^T but for a number that all of a query's scores have in common, which softmax
//! does not see (so the bias of k has no gradient), and a v is (a ln_kv(P)) W_v^T + b_v because the weights a sum to one. A segment then costs
//! w numbers for each number of P and not d. The published code has dropout of 0.1 here; there is none.

use std::ops::Range;

use armt_engine::ops::{self, Linear};
use armt_engine::{Param, Tape, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{expect_tokens, keys_of, read};
use super::{Memory, MemoryKind, Settings, Step};
use crate::backbone::architecture::Mlp;
use crate::backbone::{Architecture, Around, Backbone};
use crate::error::Result;
use crate::state::{Begins, Extent, LayerState, PartLayout, PartType, State, StateLayout};
use crate::weights::{EntryList, Fill, Maker};

pub(super) const KIND: MemoryKind = MemoryKind { name: "rmt_r", settings: read::<RmtR> };

/// Added to the variance in this memory's norms.
const EPS: f32 = 1e-5;

/// RMT-R's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmtR {
    /// w, the memory tokens that a segment writes. It reads twice as many: those, and what was found for them.
    pub tokens: usize,
}

impl Settings for RmtR {
    fn kind(&self) -> &'static str {
        KIND.name
    }

    fn around(&self) -> Around {
        Around { before: self.tokens.saturating_mul(2), after: self.tokens, wrapped: false }
    }

    fn check(&self, _: &Architecture) -> Result<()> {
        expect_tokens(self.tokens)
    }

    fn keys(&self) -> Map<String, Value> {
        keys_of(self)
    }

    fn build(&self, make: &mut Maker, a: &Architecture, _: usize) -> Result<Box<dyn Memory>> {
        let d = a.width;
        let projections = [
            Projection::new(make, "q_proj", [d, d])?,
            Projection::new(make, "k_proj", [d, d])?,
            Projection::new(make, "v_proj", [d, d])?,
            Projection::new(make, "o_proj", [d, d])?,
            Projection::new(make, "fc_1", [d, 4 * d])?,
            Projection::new(make, "fc_2", [4 * d, d])?,
        ];
        let norm = |make: &mut Maker, name: &'static str| {
            let gain = make.param(&format!("{name}.gain"), &[d], Fill::Value(1.0))?;
            Ok::<_, crate::Error>(Norm { name, gain, bias: make.param(&format!("{name}.bias"), &[d], Fill::Value(0.0))? })
        };
        let norms = [norm(make, "ln_q")?, norm(make, "ln_kv")?, norm(make, "ln_mlp")?];
        Ok(Box::new(RmtRMemory { tokens: self.tokens, width: d, mlp: a.mlp, projections, norms }))
    }
}

/// A linear layer, `[in, out]`. That of the keys is only ever used the other way round, and is kept so.
struct Projection {
    name: &'static str,
    weight: Param,
    bias: Param,
}

impl Projection {
    fn new(make: &mut Maker, name: &'static str, [input, output]: [usize; 2]) -> Result<Self> {
        let fill = Fill::Uniform(1.0 / (input as f64).sqrt());
        let weight = make.param(&format!("{name}.weight"), &[input, output], fill)?;
        Ok(Projection { name, weight, bias: make.param(&format!("{name}.bias"), &[output], fill)? })
    }

    /// x W + b (+ residual).
    fn of(&self, tape: &Tape, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let with = Linear { bias: Some(&tape.param(&self.bias)), residual, ..Linear::default() };
        Ok(ops::linear(x, &tape.param(&self.weight), with)?)
    }
}

struct Norm {
    name: &'static str,
    gain: Param,
    bias: Param,
}

impl Norm {
    fn of(&self, tape: &Tape, x: &Tensor) -> Result<Tensor> {
        Ok(ops::layer_norm(x, &tape.param(&self.gain), &tape.param(&self.bias), EPS)?)
    }
}

struct RmtRMemory {
    tokens: usize,
    width: usize,
    mlp: Mlp,
    /// q, k, v, o, and the two of the feed-forward part.
    projections: [Projection; 6],
    /// Of queries, of keys and values, and before the feed-forward part.
    norms: [Norm; 3],
}

impl RmtRMemory {
    /// R `[B, w, d]` for M `[B, w, d]` among P `[B, p, d]`.
    fn retrieved(&self, tape: &Tape, m: &Tensor, p: &Tensor) -> Result<Tensor> {
        let ([q, k, v, o, fc_1, fc_2], [ln_q, ln_kv, ln_mlp]) = (&self.projections, &self.norms);
        let past = ln_kv.of(tape, p)?; // [B, p, d]
        let queries = ops::matmul(&q.of(tape, &ln_q.of(tape, m)?, None)?, &tape.param(&k.weight))?; // q W_k [B, w, d]
        let scores = ops::scale(&ops::matmul_nt(&queries, &past)?, 1.0 / (self.width as f32).sqrt())?; // [B, w, p]
        let found = v.of(tape, &ops::matmul(&ops::softmax(&scores)?, &past)?, None)?;
        let y = o.of(tape, &found, Some(m))?;
        let inner = fc_1.of(tape, &ln_mlp.of(tape, &y)?, None)?;
        let inner = match self.mlp {
            Mlp::Gelu => ops::gelu(&inner)?,
            Mlp::GeluErf => ops::gelu_erf(&inner)?,
            Mlp::SwiGlu => ops::silu(&inner)?,
        };
        fc_2.of(tape, &inner, Some(&y))
    }
}

impl Memory for RmtRMemory {
    fn layout(&self) -> StateLayout {
        let shape = vec![Extent::Texts, Extent::Segments(self.tokens), Extent::Size(self.width)];
        let memory = PartLayout { name: "memory", shape, dtype: PartType::Computed };
        StateLayout { kind: KIND.name, parts: vec![memory], begins: Begins::Absent }
    }

    fn params(&self) -> Vec<&Param> {
        let projections = self.projections.iter().flat_map(|p| [&p.weight, &p.bias]);
        projections.chain(self.norms.iter().flat_map(|n| [&n.gain, &n.bias])).collect()
    }

    fn entries<'a>(&'a self, list: &mut EntryList<'a>) {
        for (i, Projection { name, weight, bias }) in self.projections.iter().enumerate() {
            match i {
                1 => list.whole(format!("{name}.weight"), weight),
                _ => list.turned(format!("{name}.weight"), weight),
            }
            list.whole(format!("{name}.bias"), bias);
        }
        for Norm { name, gain, bias } in &self.norms {
            list.whole(format!("{name}.weight"), gain);
            list.whole(format!("{name}.bias"), bias);
        }
    }

    fn begin(&self, _: &Tape, _: &State, _: Range<usize>, _: Option<usize>) -> Result<Vec<Tensor>> {
        Ok(Vec::new())
    }

    fn step(&self, step: &Step<'_>, x: &Tensor, memory: LayerState) -> Result<(Tensor, LayerState)> {
        Ok((step.block(x)?, memory))
    }

    fn through_top(&self) -> bool {
        true
    }

    /// [M; R], `[B, 2 w, d]`.
    fn tokens_from_top(&self, tape: &Tape, carried: &[Tensor]) -> Result<Tensor> {
        let [p] = carried else { return Err(crate::Error::Unsupported("RMT-R carries one tensor through the top".into())) };
        let m = ops::narrow(p, 1, p.dims()[1] - self.tokens, self.tokens)?;
        Ok(ops::concat(&[&m, &self.retrieved(tape, &m, p)?], 1)?)
    }

    fn to_top(&self, tape: &Tape, backbone: &Backbone, h: &Tensor, carried: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let (t, w) = (h.dims()[1], self.tokens);
        let m = backbone.head.normed(tape, &backbone.architecture, &ops::narrow(h, 1, t - w, w)?)?;
        let all: Vec<&Tensor> = carried.iter().chain([&m]).collect();
        Ok(vec![ops::concat(&all, 1)?])
    }

    /// What is carried grows with every segment.
    fn has_fixed_steps(&self) -> bool {
        false
    }
}
