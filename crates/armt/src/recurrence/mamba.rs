//! Mamba (Gu and Dao 2023), as Hugging Face's `MambaForCausalLM` has it. No attention and no positions; each layer keeps S `[E, N]` and the last
//! K - 1 inputs of its convolution.
//!
//! ```text
//! h = rms_norm(x);   [x'; z] = W_in h;   u = silu(conv(x'))       conv_silu       E = expand d channels, K weights each
//! [r; B; C] = W_x u;   Delta = softplus(W_dt r + b_dt);   A = -exp(A_log)
//! S_t = exp(Delta_t A) o S_(t-1) + Delta_t u_t B_t;   y_t = (S_t C_t + D u_t) o silu(z_t)       gated_scan
//! x <- x + W_out y
//! ```
//!
//! A text can be cut anywhere: state and convolution go on from one segment to the next, and so do their gradients. Padding changes neither.
//! The scan, the step sizes' bias, A_log and D are f32 whatever the type of the computation. Fresh weights are those of the published code of
//! the paper's time: uniform within 1 / sqrt(inputs), A_log = ln(1 .. N), D = 1, step sizes from 0.001 to 0.1.

use std::ops::Range;
use std::sync::Arc;

use armt_engine::ops::{self, ConvSilu, GatedScan, Linear};
use armt_engine::{Param, Tape, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    FreshTokens, Inputs, OpenSegment, RecurrenceKind, Recurrent, Sizes, StepContext, TokenByToken, begin_layers, expect_no_memory,
    lean,
};
use crate::backbone::families::fields::Fields;
use crate::compute::Compute;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::state::{Begins, Count, Extent, LayerState, PartLayout, State, StateLayout};
use crate::weights::{Entry, EntryList, FileTensor, Fill, Layout, Maker};

pub(super) const KIND: RecurrenceKind =
    RecurrenceKind { model_type: "mamba", check: |config| shape_of(config).map(|_| ()), build, describe };

/// What the computation needs of a configuration.
#[derive(Clone, Copy, Debug)]
struct MambaSizes {
    vocab: usize,
    layers: usize,
    /// d.
    width: usize,
    /// E.
    inner: usize,
    /// N.
    state: usize,
    /// K.
    conv: usize,
    /// R, the size of r.
    rank: usize,
    eps: f32,
    /// Whether W_in and W_out have biases.
    biased: bool,
    /// Whether the convolution has a bias.
    conv_biased: bool,
    tied: bool,
    /// Spread of fresh embeddings.
    init: f64,
    step: Step,
}

/// How fresh step sizes are drawn.
#[derive(Clone, Copy, Debug)]
struct Step {
    least: f64,
    most: f64,
    floor: f64,
    scale: f64,
}

fn shape_of(config: &Config) -> Result<MambaSizes> {
    expect_no_memory(config, "Mamba")?;
    let c = Fields(&config.backbone);
    let act = c.text_or("hidden_act", "silu")?;
    if act != "silu" && act != "swish" {
        return Err(Error::config("hidden_act", "silu", act));
    }
    let width = c.size("hidden_size")?;
    let rank = match c.get("time_step_rank") {
        None => width.div_ceil(16),
        Some(value) if value == "auto" => width.div_ceil(16),
        Some(_) => c.size("time_step_rank")?,
    };
    let conv = c.size_or("conv_kernel", 4)?;
    if conv < 2 {
        return Err(Error::config("conv_kernel", "at least 2", conv));
    }
    let expand = c.size_or("expand", 2)?;
    let inner = c.size_or("intermediate_size", expand.saturating_mul(width))?;
    let shape = MambaSizes {
        vocab: c.size("vocab_size")?,
        layers: c.size("num_hidden_layers")?,
        width,
        inner,
        state: c.size_or("state_size", 16)?,
        conv,
        rank,
        eps: c.number_or("layer_norm_epsilon", 1e-5)? as f32,
        biased: c.flag_or("use_bias", false)?,
        conv_biased: c.flag_or("use_conv_bias", true)?,
        tied: c.flag_or("tie_word_embeddings", true)?,
        init: c.number_or("initializer_range", 0.1)?,
        step: Step {
            least: c.number_or("time_step_min", 0.001)?,
            most: c.number_or("time_step_max", 0.1)?,
            floor: c.number_or("time_step_floor", 1e-4)?,
            scale: c.number_or("time_step_scale", 1.0)?,
        },
    };
    if !(shape.eps >= 0.0 && shape.eps.is_finite()) {
        return Err(Error::config("layer_norm_epsilon", "a number of at least 0", shape.eps));
    }
    let Step { least, most, floor, .. } = shape.step;
    if !(floor > 0.0 && least > 0.0 && most >= least && most.is_finite()) {
        return Err(Error::config("time_step_min", "step sizes above 0, the least not above the most", least));
    }
    Ok(shape)
}

/// A fresh Mamba of a recipe: the paper's small one unless changed.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Fresh {
    /// Layers.
    layers: usize,
    /// d.
    width: usize,
    /// N, numbers of state for each channel.
    state: usize,
    /// K, tokens that the convolution sees.
    conv: usize,
    /// Channels are so many times the width.
    expand: usize,
    /// Whether the embedding is the output head too.
    tied: bool,
}

impl Default for Fresh {
    fn default() -> Self {
        Fresh { layers: 4, width: 128, state: 32, conv: 4, expand: 2, tied: true }
    }
}

fn describe(keys: Value, tokens: FreshTokens) -> Result<Value> {
    let fresh: Fresh = serde_json::from_value(keys).map_err(|e| Error::config("model", "the keys of a mamba", e))?;
    let Fresh { layers, width, state, conv, expand, tied } = fresh;
    Ok(json!({"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": tokens.vocab, "eos_token_id": tokens.end,
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": expand.saturating_mul(width), "expand": expand,
        "state_size": state, "conv_kernel": conv, "time_step_rank": width.div_ceil(16), "tie_word_embeddings": tied}))
}

/// Parameters of all layers, stacked; matrices as `[L, in, out]`.
struct Layers {
    norm: Param,                // [L, d]
    input: Param,               // W_in [L, d, 2 E]
    input_bias: Option<Param>,  // [L, 2 E]
    conv: Param,                // [L, E, K]
    conv_bias: Option<Param>,   // [L, E]
    project: Param,             // W_x [L, E, R + 2 N]
    step: Param,                // W_dt [L, R, E]
    step_bias: Param,           // [L, E]
    a_log: Param,               // [L, E, N]
    d: Param,                   // [L, E]
    output: Param,              // W_out [L, E, d]
    output_bias: Option<Param>, // [L, d]
    shape: MambaSizes,
}

struct Mamba {
    embed: Param, // [V, d]
    layers: Arc<Layers>,
    norm: Param,         // [d]
    head: Option<Param>, // [V, d]
    compute: Arc<Compute>,
}

fn build(config: &Config, make: &mut Maker) -> Result<Box<dyn Recurrent>> {
    let shape = shape_of(config)?;
    let MambaSizes { vocab, layers: l, width: d, inner: e, state: n, conv: k, rank, .. } = shape;
    let within = |inputs: usize| Fill::Uniform(1.0 / (inputs as f64).sqrt());
    let embed = make.param("embed", &[vocab, d], Fill::Normal(shape.init))?;
    let optional = |there: bool, make: &mut Maker, name: &str, shape: &[usize], fill: Fill| {
        there.then(|| make.param(name, shape, fill)).transpose()
    };
    let layers = Layers {
        norm: make.param("norm.gain", &[l, d], Fill::Value(1.0))?,
        input: make.matrices(|make| make.param("in.weight", &[l, d, 2 * e], within(d)))?,
        input_bias: optional(shape.biased, make, "in.bias", &[l, 2 * e], Fill::Value(0.0))?,
        conv: make.param("conv.weight", &[l, e, k], within(k))?,
        conv_bias: optional(shape.conv_biased, make, "conv.bias", &[l, e], within(k))?,
        project: make.param("project.weight", &[l, e, rank + 2 * n], within(e))?,
        step: make.param("step.weight", &[l, rank, e], Fill::Uniform(shape.step.scale / (rank as f64).sqrt()))?,
        step_bias: make.in_f32(|make| make.made("step.bias", &[l, e], 1, |_, random| step_bias(shape.step, random.uniform())))?,
        a_log: make.in_f32(|make| make.made("a_log", &[l, e, n], 0, |i, _| ((i % n + 1) as f32).ln()))?,
        d: make.in_f32(|make| make.param("d", &[l, e], Fill::Value(1.0)))?,
        output: make.matrices(|make| make.param("out.weight", &[l, e, d], within(e)))?,
        output_bias: optional(shape.biased, make, "out.bias", &[l, d], Fill::Value(0.0))?,
        shape,
    };
    let norm = make.param("last_norm.gain", &[d], Fill::Value(1.0))?;
    let head = optional(!shape.tied, make, "head", &[vocab, d], within(d))?;
    Ok(Box::new(Mamba { embed, layers: Arc::new(layers), norm, head, compute: make.compute().clone() }))
}

/// The bias whose softplus is a step size, drawn evenly on a scale of logarithms.
fn step_bias(step: Step, share: f64) -> f32 {
    let size = (share * (step.most.ln() - step.least.ln()) + step.least.ln()).exp().max(step.floor);
    (size + (-(-size).exp_m1()).ln()) as f32
}

impl Layers {
    fn params(&self) -> Vec<&Param> {
        let Layers { norm, input, conv, project, step, step_bias, a_log, d, output, .. } = self;
        let (input_bias, conv_bias, output_bias) = (&self.input_bias, &self.conv_bias, &self.output_bias);
        let mut all = vec![norm, input];
        all.extend(input_bias);
        all.push(conv);
        all.extend(conv_bias);
        all.extend([project, step, step_bias, a_log, d, output]);
        all.extend(output_bias);
        all
    }

    /// Some layers on x `[n, B, T, d]` with their S and the tails of their convolutions. Gives x, S and tails after.
    fn run(&self, tape: &Tape, layers: &Range<usize>, [x, s, tail]: [&Tensor; 3], seen: Option<&Tensor>) -> Result<Vec<Tensor>> {
        let MambaSizes { rank, eps, .. } = self.shape;
        let rows = |param: &Param| tape.param_rows(param, layers.clone());
        let some = |param: &Option<Param>| param.as_ref().map(rows).transpose();
        let h = ops::rms_norm(x, &rows(&self.norm)?, eps)?;
        let bias = some(&self.input_bias)?;
        let with = Linear { bias: bias.as_ref(), ..Linear::default() };
        let both = tape.linear_rows(&h, &self.input, layers.clone(), with)?; // [n, B, T, 2 E]
        let (weight, bias) = (rows(&self.conv)?, some(&self.conv_bias)?);
        let (u, gate, tail) = ops::conv_silu(ConvSilu { x: &both, weight: &weight, bias: bias.as_ref(), tail, seen })?;
        let shared = ops::linear(&u, &rows(&self.project)?, Linear::default())?; // [n, B, T, R + 2 N]
        let r = ops::narrow(&shared, 3, 0, rank)?;
        let delta = ops::linear(&r, &rows(&self.step)?, Linear::default())?; // [n, B, T, E]
        let (y, s) = ops::gated_scan(GatedScan {
            u: &u,
            delta: &delta,
            bias: &rows(&self.step_bias)?,
            a_log: &rows(&self.a_log)?,
            d: &rows(&self.d)?,
            shared: &shared,
            gate: &gate,
            state: s,
            seen,
        })?;
        let bias = some(&self.output_bias)?;
        let out = Linear { bias: bias.as_ref(), residual: Some(x), room: true, ..Linear::default() };
        Ok(vec![tape.linear_rows(&y, &self.output, layers.clone(), out)?, s, tail])
    }
}

impl Recurrent for Mamba {
    fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    fn sizes(&self) -> Sizes {
        let MambaSizes { layers, width, vocab, .. } = self.layers.shape;
        Sizes { layers, width, vocab }
    }

    fn layout(&self) -> StateLayout {
        let MambaSizes { layers, inner, state, conv, .. } = self.layers.shape;
        let of = |a: usize, b: usize| vec![Extent::Size(layers), Extent::Texts, Extent::Size(a), Extent::Size(b)];
        let parts = vec![PartLayout::f32("ssm", of(inner, state)), PartLayout::f32("conv", of(conv - 1, inner))];
        StateLayout { kind: KIND.model_type, parts, begins: Begins::Zero }
    }

    fn embed(&self, tape: &Tape, inputs: &Inputs, segments: Range<usize>, _: &[Tensor]) -> Result<Tensor> {
        Ok(ops::embedding(&tape.param(&self.embed), &inputs.ids(segments)?)?)
    }

    fn begin(&self, _: &Tape, state: &State, layers: Range<usize>, _: Option<usize>) -> Result<LayerState> {
        begin_layers(state, layers)
    }

    fn step(
        &self,
        context: StepContext<'_>,
        layers: Range<usize>,
        x: &Tensor,
        mut state: LayerState,
    ) -> Result<(Tensor, LayerState)> {
        let rows = state.rows(&layers);
        let (s, tail) = (ops::rows(&state.tensors[0], rows.clone())?, ops::rows(&state.tensors[1], rows.clone())?);
        let own = self.layers.clone();
        let mut after = lean(context, &[x, &s, &tail], move |tape, [x, s, tail], seen| own.run(tape, &layers, [x, s, tail], seen))?;
        let y = after.remove(0);
        state.replace(&rows, after)?;
        Ok((y, state))
    }

    fn end(&self, _: &Tape, state: LayerState, counts: Vec<Count>) -> Result<State> {
        self.layout().state(state.tensors, counts)
    }

    fn normed(&self, tape: &Tape, h: &Tensor) -> Result<Tensor> {
        Ok(ops::rms_norm(h, &tape.param(&self.norm), self.layers.shape.eps)?)
    }

    fn output_table(&self) -> &Param {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    fn params(&self) -> Vec<&Param> {
        let mut all = vec![&self.embed];
        all.extend(self.layers.params());
        all.push(&self.norm);
        all.extend(&self.head);
        all
    }

    fn entries(&self) -> Vec<Entry<'_>> {
        let w = self.layers.as_ref();
        let MambaSizes { layers, width: d, inner: e, state: n, conv: k, rank, .. } = w.shape;
        let mut list = EntryList::new(layers);
        list.whole("backbone.embeddings.weight".into(), &self.embed);
        for l in 0..layers {
            let layer = format!("backbone.layers.{l}.");
            let columns = |columns: usize| Layout::Columns { from: 0, columns };
            let mut add =
                |name: &str, param, shape: &[usize], layout| list.layer(format!("{layer}{name}"), param, l, shape.to_vec(), layout);
            add("norm.weight", &w.norm, &[d], Layout::Plain);
            add("mixer.A_log", &w.a_log, &[e, n], Layout::Plain);
            add("mixer.D", &w.d, &[e], Layout::Plain);
            add("mixer.conv1d.weight", &w.conv, &[e, 1, k], Layout::Plain);
            w.conv_bias.iter().for_each(|bias| add("mixer.conv1d.bias", bias, &[e], Layout::Plain));
            add("mixer.in_proj.weight", &w.input, &[2 * e, d], columns(2 * e));
            w.input_bias.iter().for_each(|bias| add("mixer.in_proj.bias", bias, &[2 * e], Layout::Plain));
            add("mixer.x_proj.weight", &w.project, &[rank + 2 * n, e], columns(rank + 2 * n));
            add("mixer.dt_proj.weight", &w.step, &[e, rank], columns(e));
            add("mixer.dt_proj.bias", &w.step_bias, &[e], Layout::Plain);
            add("mixer.out_proj.weight", &w.output, &[d, e], columns(d));
            w.output_bias.iter().for_each(|bias| add("mixer.out_proj.bias", bias, &[d], Layout::Plain));
        }
        list.whole("backbone.norm_f.weight".into(), &self.norm);
        self.head.iter().for_each(|head| list.whole("lm_head.weight".into(), head));
        // As older files have it.
        list.alias(|name| if name.contains("embeddings") { vec![name.replace("embeddings", "embedding")] } else { Vec::new() });
        list.into_entries()
    }

    fn open<'a>(&'a self, state: &State) -> Result<Box<dyn OpenSegment + 'a>> {
        Ok(Box::new(TokenByToken::new(self, state)?))
    }

    fn plain(&self) -> Option<Vec<FileTensor<'_>>> {
        Some(self.entries().into_iter().map(FileTensor::whole).collect())
    }
}
