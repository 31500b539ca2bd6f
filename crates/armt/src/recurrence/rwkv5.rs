//! RWKV-5.2 (Peng et al. 2024, "Eagle"). No attention and no positions; each layer keeps S `[H, N, N]`, and the last normed inputs of its two
//! halves.
//!
//! ```text
//! x = ln0(embedding)
//! h = ln1(x);   m_i = mu_i h_t + (1 - mu_i) h_(t-1)      for r, k, v, g: the token shift
//! r, k, v = W m;   g = silu(W_g m_g);   w = exp(-exp(time_decay));   u = time_faaaa
//! y_t = r_t (S_(t-1) + u k_t v_t);   S_t = w S_(t-1) + k_t v_t                        wkv5
//! x <- x + W_o (group_norm(y) o g)                                                    a norm for each head
//! h = ln2(x);   x <- x + sigmoid(W_r m_r) o W_v relu(W_k m_k)^2                       mixed with h_(t-1) likewise
//! ```
//!
//! A text can be cut anywhere: states go on from one segment to the next, and so do their gradients. Padding changes neither. The recurrence,
//! time_decay and time_faaaa are f32 whatever the type of the computation. Halving the weights of every sixth layer (`rescale_every`), which
//! f16 needs, is left out. Fresh weights are those of the authors' training code.

use std::ops::Range;
use std::sync::Arc;

use armt_engine::ops::{self, Linear, TokenMix, Wkv5};
use armt_engine::{Param, Tape, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::orthogonal::orthogonal;
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
    RecurrenceKind { model_type: "rwkv5", check: |config| shape_of(config).map(|_| ()), build, describe };

/// What the computation needs of a configuration.
#[derive(Clone, Copy, Debug)]
struct Rwkv5Sizes {
    vocab: usize,
    layers: usize,
    /// C.
    width: usize,
    /// N.
    head: usize,
    /// Inner width of the second half.
    inner: usize,
    eps: f32,
    /// The eps of the heads' norm.
    head_eps: f32,
}

/// The value of the first of two names that is there: Hugging Face's, and that of the authors' code.
fn either(c: &Fields<'_>, name: &str, other: &str) -> Result<usize> {
    if c.get(name).is_none() && c.get(other).is_some() { c.size(other) } else { c.size(name) }
}

fn shape_of(config: &Config) -> Result<Rwkv5Sizes> {
    expect_no_memory(config, "RWKV-5")?;
    let c = Fields(&config.backbone);
    for (key, own) in [("model_version", "5_2"), ("version", "5.2")] {
        let version = c.text_or(key, own)?;
        if version != own {
            return Err(Error::config(key, &format!("{own}: other versions of RWKV have other tensors"), version));
        }
    }
    let (width, head) = (either(&c, "hidden_size", "n_embd")?, c.size_or("head_size", 64)?);
    if !width.is_multiple_of(head) {
        return Err(Error::config("head_size", &format!("a divisor of the width {width}"), head));
    }
    let attention = c.size_or("attention_hidden_size", width)?;
    if attention != width {
        return Err(Error::config("attention_hidden_size", &width.to_string(), attention));
    }
    let divisor = c.number_or("head_size_divisor", 8.0)?;
    let eps = c.number_or("layer_norm_epsilon", c.number_or("ln_eps", 1e-5)?)?;
    // y / divisor normed with an eps is y normed with a larger one.
    let head_eps = c.number_or("ln_x_eps", eps * divisor * divisor)?;
    if !(eps >= 0.0 && head_eps >= 0.0 && head_eps.is_finite()) {
        return Err(Error::config("layer_norm_epsilon", "a number of at least 0", eps));
    }
    let usual = (width.saturating_mul(7) / 2 / 32 * 32).max(1);
    Ok(Rwkv5Sizes {
        vocab: c.size("vocab_size")?,
        layers: either(&c, "num_hidden_layers", "n_layer")?,
        width,
        head,
        inner: if c.get("n_ffn").is_some() { c.size("n_ffn")? } else { c.size_or("intermediate_size", usual)? },
        eps: eps as f32,
        head_eps: head_eps as f32,
    })
}

/// A fresh RWKV-5 of a recipe: the size of the paper's small models unless changed.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Fresh {
    /// Layers.
    layers: usize,
    /// C.
    width: usize,
    /// N, the size of a head.
    head: usize,
    /// Inner width of the second half; by default 3.5 times the width, in multiples of 32.
    inner: Option<usize>,
}

impl Default for Fresh {
    fn default() -> Self {
        Fresh { layers: 4, width: 128, head: 64, inner: None }
    }
}

fn describe(keys: Value, tokens: FreshTokens) -> Result<Value> {
    let fresh: Fresh = serde_json::from_value(keys).map_err(|e| Error::config("model", "the keys of an rwkv5", e))?;
    let Fresh { layers, width, head, inner } = fresh;
    Ok(json!({"model_type": "rwkv5", "architectures": ["Rwkv5ForCausalLM"], "vocab_size": tokens.vocab, "eos_token_id": tokens.end,
        "num_hidden_layers": layers, "hidden_size": width, "attention_hidden_size": width, "head_size": head, "head_size_divisor": 8,
        "intermediate_size": inner, "tie_word_embeddings": false}))
}

/// A layer norm's gain and bias.
struct Norm {
    gain: Param,
    bias: Param,
}

impl Norm {
    fn new(make: &mut Maker, name: &str, shape: &[usize]) -> Result<Self> {
        let gain = make.param(&format!("{name}.gain"), shape, Fill::Value(1.0))?;
        Ok(Norm { gain, bias: make.param(&format!("{name}.bias"), shape, Fill::Value(0.0))? })
    }
}

/// Parameters of all layers, stacked; matrices as `[L, in, out]`.
struct Layers {
    norms: [Norm; 2],       // ln1, ln2 [L, C]
    mix: [Param; 4],        // mu of k, v, r, g [L, C]
    decay: Param,           // time_decay [L, C]
    bonus: Param,           // time_faaaa [L, C]
    project: [Param; 4],    // W of r, k, v, g [L, C, C]
    heads: Norm,            // ln_x [L, C]
    output: Param,          // W_o [L, C, C]
    second_mix: [Param; 2], // mu of k, r [L, C]
    second: [Param; 3],     // W_k [L, C, F], W_r [L, C, C], W_v [L, F, C]
    /// The convolution that is the token shift: (1, 0) for every channel, `[L, C, 2]`.
    shift: Tensor,
    /// Gain and bias of the heads' norm before those of each channel: ones and zeros, `[N]`.
    plain: [Tensor; 2],
    shape: Rwkv5Sizes,
}

struct Rwkv5 {
    embed: Param, // [V, C]
    first: Norm,  // ln0 [C]
    layers: Arc<Layers>,
    last: Norm,  // ln_out [C]
    head: Param, // [V, C]
    compute: Arc<Compute>,
}

fn build(config: &Config, make: &mut Maker) -> Result<Box<dyn Recurrent>> {
    let shape = shape_of(config)?;
    let Rwkv5Sizes { vocab, layers: l, width: c, inner: f, .. } = shape;
    let embed = make.param("embed", &[vocab, c], Fill::Uniform(1e-4))?;
    let first = Norm::new(make, "first_norm", &[c])?;
    // From 0 in the first layer to 1 in the last, and from 1 towards 0.
    let up = move |i: usize| (i / c) as f64 / (l.max(2) - 1) as f64;
    let down = move |i: usize| 1.0 - (i / c) as f64 / l as f64;
    let channel = move |i: usize| (i % c) as f64 / c as f64;
    let along = move |i: usize| (i % c) as f64 / (c.max(2) - 1) as f64;
    let mu =
        |make: &mut Maker, name: &str, f: &dyn Fn(usize) -> f64| make.made(&format!("mix.{name}"), &[l, c], 0, |i, _| f(i) as f32);
    let even = |i: usize| channel(i).powf(down(i));
    let mix = [
        mu(make, "k", &even)?,
        mu(make, "v", &|i| even(i) + 0.3 * up(i))?,
        mu(make, "r", &|i| channel(i).powf(down(i) / 2.0))?,
        mu(make, "g", &|i| channel(i).powf(down(i) / 2.0))?,
    ];
    let second_mix = [mu(make, "second_k", &even)?, mu(make, "second_r", &even)?];
    let decay = |i: usize, _: &mut _| (-6.0 + 5.0 * along(i).powf(0.7 + 1.3 * up(i))) as f32;
    let bonus = |i: usize, _: &mut _| (up(i) * (1.0 - along(i)) + 0.1 * (((i % c + 1) % 3) as f64 - 1.0)) as f32;
    let matrix = |make: &mut Maker, name: &str, [input, output]: [usize; 2], gain: f64| {
        let drawn = |random: &mut _| orthogonal(random, l, input, output, gain);
        make.matrices(|make| make.drawn(&format!("{name}.weight"), &[l, input, output], drawn))
    };
    let zeros = |make: &mut Maker, name: &str, shape: [usize; 2]| {
        make.matrices(|make| make.param(&format!("{name}.weight"), &[l, shape[0], shape[1]], Fill::Value(0.0)))
    };
    let heads = Norm {
        gain: make.made("heads.gain", &[l, c], 0, |i, _| ((1.0 + (i / c) as f64) / l as f64).powf(0.7) as f32)?,
        bias: make.param("heads.bias", &[l, c], Fill::Value(0.0))?,
    };
    let layers = Layers {
        norms: [Norm::new(make, "norm1", &[l, c])?, Norm::new(make, "norm2", &[l, c])?],
        mix,
        decay: make.in_f32(|make| make.made("decay", &[l, c], 0, decay))?,
        bonus: make.in_f32(|make| make.made("bonus", &[l, c], 0, bonus))?,
        project: [
            matrix(make, "r", [c, c], 1.0)?,
            matrix(make, "k", [c, c], 0.1)?,
            matrix(make, "v", [c, c], 1.0)?,
            matrix(make, "g", [c, c], 0.1)?,
        ],
        heads,
        output: zeros(make, "out", [c, c])?,
        second_mix,
        second: [
            matrix(make, "second.k", [c, f], (f as f64 / c as f64).sqrt().max(1.0))?,
            zeros(make, "second.r", [c, c])?,
            zeros(make, "second.v", [f, c])?,
        ],
        shift: constant(make.compute(), &[l, c, 2], |i| ((i + 1) % 2) as f32)?,
        plain: [constant(make.compute(), &[shape.head], |_| 1.0)?, constant(make.compute(), &[shape.head], |_| 0.0)?],
        shape,
    };
    let last = Norm::new(make, "last_norm", &[c])?;
    let gain = 0.5 * (vocab as f64 / c as f64).sqrt().max(1.0);
    let head = make.drawn("head", &[vocab, c], |random| orthogonal(random, 1, vocab, c, gain))?;
    Ok(Box::new(Rwkv5 { embed, first, layers: Arc::new(layers), last, head, compute: make.compute().clone() }))
}

impl Layers {
    fn params(&self) -> Vec<&Param> {
        let Layers { norms: [a, b], mix, decay, bonus, project, heads, output, second_mix, second, .. } = self;
        let mut all: Vec<&Param> = mix.iter().chain(second_mix).collect();
        all.extend([&heads.gain, &heads.bias, &a.gain, &a.bias, &b.gain, &b.bias, decay, bonus]);
        all.extend(project);
        all.push(output);
        all.extend(second);
        all
    }

    /// What is mixed of h `[n, B, T, C]` and the token before by each mu, and the last of h, from the last before.
    fn mixed<const M: usize>(
        &self,
        h: &Tensor,
        last: &Tensor,
        mu: [Tensor; M],
        seen: Option<&Tensor>,
    ) -> Result<([Tensor; M], Tensor)> {
        let shift = ops::rows(&self.shift, 0..h.dims()[0])?;
        let (mixed, last) = ops::token_mix(TokenMix { x: h, last, shares: &mu.each_ref(), shift: &shift, seen })?;
        let count = mixed.len();
        Ok((mixed.try_into().map_err(|_| Error::input(format!("{M} mixes"), count))?, last))
    }

    /// Each head's values normed, with a gain and a bias for each channel.
    fn head_norm(&self, y: &Tensor, gain: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let ([one, zero], n) = (&self.plain, self.shape.head);
        let heads = ops::reshape(y, [y.elements() / n, n])?;
        let normed = ops::reshape(&ops::layer_norm(&heads, one, zero, self.shape.head_eps)?, y.shape())?;
        Ok(ops::add(&ops::mul(&normed, &each_row(gain)?)?, &each_row(bias)?)?)
    }

    /// Some layers on x `[n, B, T, C]` with their S and the last inputs of their halves. Gives x and these after.
    fn run(
        &self,
        tape: &Tape,
        layers: &Range<usize>,
        [x, s, last1, last2]: [&Tensor; 4],
        seen: Option<&Tensor>,
    ) -> Result<Vec<Tensor>> {
        let rows = |param: &Param| tape.param_rows(param, layers.clone());
        let norm =
            |x: &Tensor, norm: &Norm| Ok::<_, Error>(ops::layer_norm(x, &rows(&norm.gain)?, &rows(&norm.bias)?, self.shape.eps)?);
        let linear = |x: &Tensor, w: &Param| Ok::<_, Error>(tape.linear_rows(x, w, layers.clone(), Linear::default())?);
        let h = norm(x, &self.norms[0])?;
        let [mu_k, mu_v, mu_r, mu_g] = &self.mix;
        let mu = [rows(mu_k)?, rows(mu_v)?, rows(mu_r)?, rows(mu_g)?];
        let ([for_k, for_v, for_r, for_g], last1) = self.mixed(&h, last1, mu, seen)?;
        let [w_r, w_k, w_v, w_g] = &self.project;
        let (y, s) = ops::wkv5(Wkv5 {
            r: &linear(&for_r, w_r)?,
            k: &linear(&for_k, w_k)?,
            v: &linear(&for_v, w_v)?,
            decay: &rows(&self.decay)?,
            bonus: &rows(&self.bonus)?,
            state: s,
            seen,
        })?;
        let gate = ops::silu(&linear(&for_g, w_g)?)?;
        let y = ops::mul(&self.head_norm(&y, &rows(&self.heads.gain)?, &rows(&self.heads.bias)?)?, &gate)?;
        let x = tape.linear_rows(&y, &self.output, layers.clone(), Linear { residual: Some(x), ..Linear::default() })?;
        let h = norm(&x, &self.norms[1])?;
        let [mu_k, mu_r] = &self.second_mix;
        let ([for_k, for_r], last2) = self.mixed(&h, last2, [rows(mu_k)?, rows(mu_r)?], seen)?;
        let [w_k, w_r, w_v] = &self.second;
        let k = ops::relu(&linear(&for_k, w_k)?)?;
        let out = linear(&ops::mul(&k, &k)?, w_v)?;
        let x = ops::add(&x, &ops::mul(&ops::sigmoid(&linear(&for_r, w_r)?)?, &out)?)?;
        Ok(vec![x, s, last1, last2])
    }
}

/// Numbers that never change, in the type of the computation.
fn constant(compute: &Compute, shape: &[usize], value: impl Fn(usize) -> f32) -> Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
    Ok(Tensor::from_f32_slice(&values, shape, compute.dtype(), compute.device())?)
}

/// A parameter `[n, C]` for every row of `[n, B, T, C]`.
fn each_row(param: &Tensor) -> Result<Tensor> {
    Ok(ops::reshape(param, [param.dims()[0], 1, 1, param.dims()[1]])?)
}

impl Recurrent for Rwkv5 {
    fn compute(&self) -> &Arc<Compute> {
        &self.compute
    }

    fn sizes(&self) -> Sizes {
        let Rwkv5Sizes { layers, width, vocab, .. } = self.layers.shape;
        Sizes { layers, width, vocab }
    }

    fn layout(&self) -> StateLayout {
        let Rwkv5Sizes { layers, width, head, .. } = self.layers.shape;
        let of = |sizes: &[usize]| {
            [Extent::Size(layers), Extent::Texts].into_iter().chain(sizes.iter().map(|n| Extent::Size(*n))).collect()
        };
        let parts = vec![
            PartLayout::f32("wkv", of(&[width / head, head, head])),
            PartLayout::f32("att_shift", of(&[1, width])),
            PartLayout::f32("ffn_shift", of(&[1, width])),
        ];
        StateLayout { kind: KIND.model_type, parts, begins: Begins::Zero }
    }

    fn embed(&self, tape: &Tape, inputs: &Inputs, segments: Range<usize>, _: &[Tensor]) -> Result<Tensor> {
        let x = ops::embedding(&tape.param(&self.embed), &inputs.ids(segments)?)?;
        Ok(ops::layer_norm(&x, &tape.param(&self.first.gain), &tape.param(&self.first.bias), self.layers.shape.eps)?)
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
        let [s, a, b] = [0, 1, 2].map(|i| ops::rows(&state.tensors[i], rows.clone()));
        let (own, s, a, b) = (self.layers.clone(), s?, a?, b?);
        let mut after =
            lean(context, &[x, &s, &a, &b], move |tape, [x, s, a, b], seen| own.run(tape, &layers, [x, s, a, b], seen))?;
        let y = after.remove(0);
        state.replace(&rows, after)?;
        Ok((y, state))
    }

    fn end(&self, _: &Tape, state: LayerState, counts: Vec<Count>) -> Result<State> {
        self.layout().state(state.tensors, counts)
    }

    fn normed(&self, tape: &Tape, h: &Tensor) -> Result<Tensor> {
        Ok(ops::layer_norm(h, &tape.param(&self.last.gain), &tape.param(&self.last.bias), self.layers.shape.eps)?)
    }

    fn output_table(&self) -> &Param {
        &self.head
    }

    fn params(&self) -> Vec<&Param> {
        let mut all = vec![&self.embed, &self.first.gain, &self.first.bias];
        all.extend(self.layers.params());
        all.extend([&self.last.gain, &self.last.bias, &self.head]);
        all
    }

    fn entries(&self) -> Vec<Entry<'_>> {
        let w = self.layers.as_ref();
        let Rwkv5Sizes { layers, width: c, head: n, inner: f, .. } = w.shape;
        let mut list = EntryList::new(layers);
        list.whole("rwkv.embeddings.weight".into(), &self.embed);
        list.whole("rwkv.blocks.0.pre_ln.weight".into(), &self.first.gain);
        list.whole("rwkv.blocks.0.pre_ln.bias".into(), &self.first.bias);
        for l in 0..layers {
            let block = format!("rwkv.blocks.{l}.");
            let mut add =
                |name: &str, param, shape: &[usize]| list.layer(format!("{block}{name}"), param, l, shape.to_vec(), Layout::Plain);
            for (norm, name) in w.norms.iter().zip(["ln1", "ln2"]).chain([(&w.heads, "attention.ln_x")]) {
                add(&format!("{name}.weight"), &norm.gain, &[c]);
                add(&format!("{name}.bias"), &norm.bias, &[c]);
            }
            for (mu, name) in w.mix.iter().zip(["key", "value", "receptance", "gate"]) {
                add(&format!("attention.time_mix_{name}"), mu, &[1, 1, c]);
            }
            add("attention.time_decay", &w.decay, &[c / n, n]);
            add("attention.time_faaaa", &w.bonus, &[c / n, n]);
            for (mu, name) in w.second_mix.iter().zip(["key", "receptance"]) {
                add(&format!("feed_forward.time_mix_{name}"), mu, &[1, 1, c]);
            }
            let mut matrix = |name: &str, param, [output, input]: [usize; 2]| {
                let layout = Layout::Columns { from: 0, columns: output };
                list.layer(format!("{block}{name}.weight"), param, l, vec![output, input], layout);
            };
            for (param, name) in w.project.iter().zip(["receptance", "key", "value", "gate"]) {
                matrix(&format!("attention.{name}"), param, [c, c]);
            }
            matrix("attention.output", &w.output, [c, c]);
            for ((param, name), shape) in w.second.iter().zip(["key", "receptance", "value"]).zip([[f, c], [c, c], [c, f]]) {
                matrix(&format!("feed_forward.{name}"), param, shape);
            }
        }
        list.whole("rwkv.ln_out.weight".into(), &self.last.gain);
        list.whole("rwkv.ln_out.bias".into(), &self.last.bias);
        list.whole("head.weight".into(), &self.head);
        list.alias(|name| vec![authors_name(name)]);
        list.into_entries()
    }

    fn open<'a>(&'a self, state: &State) -> Result<Box<dyn OpenSegment + 'a>> {
        Ok(Box::new(TokenByToken::new(self, state)?))
    }

    fn plain(&self) -> Option<Vec<FileTensor<'_>>> {
        Some(self.entries().into_iter().map(FileTensor::whole).collect())
    }
}

/// A tensor's name in the authors' own files.
fn authors_name(name: &str) -> String {
    let mut own = name.strip_prefix("rwkv.").unwrap_or(name).to_string();
    for (theirs, ours) in [("embeddings.", "emb."), ("pre_ln", "ln0"), ("attention.", "att."), ("feed_forward.", "ffn.")] {
        own = own.replace(theirs, ours);
    }
    match own.split_once("time_mix_") {
        Some((block, mixed)) => format!("{block}time_mix_{}", &mixed[..1]),
        None => own,
    }
}
