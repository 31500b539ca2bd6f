//! Generation: everything but the last segment goes into the memory, then tokens follow from the last, which reads the memory and does
//! not write it. Keys and values are kept within the segment.
//!
//! The authors' code stops being itself when a segment is full: it goes on with positions it never saw. [`Options::roll_over`] writes the
//! full segment to the memory instead and begins the next.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use armt_engine::Tape;

use crate::error::{Error, Result};
use crate::model::Model;
use crate::random::Random;
use crate::reader::{End, Reader, Tokens, alike, closed};
use crate::segment::{Alignment, Batch, segment};
use crate::state::State;

/// How the next token is picked.
#[derive(Clone, Debug, PartialEq)]
pub enum Sampling {
    /// The most probable one.
    Greedy,
    /// At random.
    Random {
        /// Logits are divided by this; above 0.
        temperature: f32,
        /// Only this many of the most probable tokens.
        top_k: Option<usize>,
        /// Only the most probable tokens that together have this probability.
        top_p: Option<f32>,
        /// Equal seeds give equal texts.
        seed: u64,
    },
}

/// What to generate.
#[derive(Clone, Debug)]
pub struct Options {
    /// Most tokens to add.
    pub max_new_tokens: usize,
    /// Tokens that end a text.
    pub stop: Vec<i32>,
    /// How tokens are picked.
    pub sampling: Sampling,
    /// Write a segment to the memory when it is full and go on in the next.
    pub roll_over: bool,
    /// Give back every step's logits.
    pub keep_logits: bool,
    /// Set from elsewhere it ends everything soon, by [`Error::Interrupted`], the reading of a long prompt too.
    pub interrupt: Option<Arc<AtomicBool>>,
}

impl Options {
    /// Is [`Error::Interrupted`] once `interrupt` is set.
    pub fn expect_going_on(&self) -> Result<()> {
        match &self.interrupt {
            Some(set) if set.load(Ordering::Relaxed) => Err(Error::Interrupted),
            _ => Ok(()),
        }
    }
}

/// Segments of a prompt that are read at once: a prompt of any length takes no more memory than so many.
const AT_ONCE: usize = 256;

impl Default for Options {
    fn default() -> Self {
        Options {
            max_new_tokens: 32,
            stop: Vec::new(),
            sampling: Sampling::Greedy,
            roll_over: true,
            keep_logits: false,
            interrupt: None,
        }
    }
}

/// What was generated.
pub struct Generated {
    /// New tokens of each text, a stop token included.
    pub tokens: Vec<Vec<i32>>,
    /// The model's probability of each of them, whatever they were picked by.
    pub probabilities: Vec<Vec<f32>>,
    /// Logits of each step, `[B, V]`, where they were asked for.
    pub logits: Vec<Vec<f32>>,
    /// The memory at the end: of everything but the last, unfinished segment.
    pub state: State,
}

/// Continues a batch of texts of equal length, from a state of what came before, the open ends of its texts included. `each` sees every step's new tokens, one for each text,
/// as they come.
pub fn generate(
    model: &Model,
    prompt: &Batch,
    state: &State,
    options: &Options,
    each: &mut dyn FnMut(&[i32]),
) -> Result<Generated> {
    generate_until(model, prompt, state, options, &mut |next| {
        each(next);
        ControlFlow::Continue(())
    })
}

/// Continues texts as [`generate`] does, until `each` ends it.
pub fn generate_until(
    model: &Model,
    prompt: &Batch,
    state: &State,
    options: &Options,
    each: &mut dyn FnMut(&[i32]) -> ControlFlow<()>,
) -> Result<Generated> {
    model.expect_state(state, prompt.texts)?;
    if prompt.mask.is_some() {
        return Err(Error::input("texts of equal length to continue", "texts with padding"));
    }
    let mut pick = Picker::new(&options.sampling)?;
    let mut segments = model.segments(prompt)?;
    let Some(last) = segments.pop() else { return Err(Error::input("at least one token to go on from", "none")) };
    let mut state = closed(model, state, options.interrupt.as_ref())?;
    for some in segments.chunks(AT_ONCE) {
        state = model.absorb(some, &state, options.interrupt.as_deref())?;
    }
    let (texts, tokens) = (prompt.texts, prompt.tokens());
    // The open segment's tokens, row by row.
    let mut open: Vec<Vec<i32>> = (0..texts).map(|b| prompt.ids[b * tokens..][last.range.clone()].to_vec()).collect();
    let mut caches = model.recurrence().open(&state)?;
    let mut logits = last_logits(model, &caches.step(&open.concat(), 0)?)?;
    let (tokens, probabilities) = (vec![Vec::new(); texts], vec![Vec::new(); texts]);
    let mut out = Generated { tokens, probabilities, logits: Vec::new(), state: state.clone() };
    let mut done = vec![false; texts];
    for step in 0..options.max_new_tokens {
        options.expect_going_on()?;
        let next = logits.chunks(model.sizes().vocab).map(|row| pick.token(row)).collect::<Result<Vec<i32>>>()?;
        let shares: Vec<f32> = logits.chunks(model.sizes().vocab).zip(&next).map(|(row, token)| probability(row, *token)).collect();
        if options.keep_logits {
            out.logits.push(std::mem::take(&mut logits));
        }
        for (b, token) in next.iter().enumerate() {
            if !done[b] {
                out.tokens[b].push(*token);
                out.probabilities[b].push(shares[b]);
                done[b] = options.stop.contains(token);
            }
        }
        if each(&next).is_break() || done.iter().all(|d| *d) || step + 1 == options.max_new_tokens {
            break;
        }
        if open[0].len() == model.config().segment_size && options.roll_over {
            let full = Batch { ids: open.concat(), texts, mask: None };
            state = model.absorb(&[segment(&full, 0..full.tokens(), full.tokens())], &state, options.interrupt.as_deref())?;
            open.iter_mut().for_each(Vec::clear);
            caches = model.recurrence().open(&state)?;
        }
        let from = open[0].len();
        if from >= model.recurrence().longest_segment() {
            break;
        }
        open.iter_mut().zip(&next).for_each(|(row, token)| row.push(*token));
        logits = last_logits(model, &caches.step(&next, from)?)?;
    }
    out.state = state;
    Ok(out)
}

/// Continues texts of any lengths, each from a state of its own, side by side: the prompts' whole segments as a [`Reader`] reads them, and
/// then the texts together that have as many tokens in their last segment. Gives what was generated of each. Another number of states than of prompts is an error, and so is
/// a prompt without a token.
pub fn generate_each(model: &Model, prompts: &[Vec<i32>], states: &[State], options: &Options) -> Result<Vec<Generated>> {
    if prompts.len() != states.len() || prompts.is_empty() {
        return Err(Error::Texts { state: states.len(), texts: prompts.len() });
    }
    if prompts.iter().any(Vec::is_empty) {
        return Err(Error::input("at least one token to go on from", "none"));
    }
    let size = model.config().segment_size;
    // Cut from their ends, prompts have no whole segments in common.
    let head =
        |prompt: &Vec<i32>| if model.config().segment_alignment == Alignment::Left { (prompt.len() - 1) / size * size } else { 0 };
    let mut reader = Reader::new(model, states[0].clone())?;
    if let Some(stop) = &options.interrupt {
        reader.stop_on(stop.clone());
    }
    reader.begin_each(states.to_vec())?;
    reader.close()?;
    let mut heads: Vec<_> = prompts.iter().map(|prompt| prompt[..head(prompt)].iter().map(|token| Ok(*token))).collect();
    let mut heads: Vec<Tokens<'_>> = heads.iter_mut().map(|head| head as Tokens<'_>).collect();
    // Groups that a GPU has recorded do not look for a stop themselves.
    let mut each = |_| if options.expect_going_on().is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
    if reader.read_all(&mut heads, &mut each)? == End::Stopped {
        return Err(Error::Interrupted);
    }
    reader.close()?;
    let states = reader.states()?;
    let mut all: Vec<Option<Generated>> = prompts.iter().map(|_| None).collect();
    for (_, texts) in
        alike(prompts.iter().zip(&states).map(|(prompt, state)| (prompt.len() - head(prompt), state.is_empty(), state.shapes())))
    {
        let ids = texts.iter().flat_map(|text| prompts[*text][head(&prompts[*text])..].iter().copied()).collect();
        let state = State::stack(&texts.iter().map(|text| states[*text].clone()).collect::<Vec<_>>())?;
        let said = generate(model, &Batch { ids, texts: texts.len(), mask: None }, &state, options, &mut |_| {})?;
        let Generated { tokens, probabilities, logits, state } = said;
        let own = tokens.into_iter().zip(probabilities).zip(state.split()?);
        for (row, (text, ((tokens, probabilities), state))) in texts.into_iter().zip(own).enumerate() {
            let vocab = model.sizes().vocab;
            let logits = logits.iter().map(|step| step[row * vocab..][..vocab].to_vec()).collect();
            all[text] = Some(Generated { tokens: vec![tokens], probabilities: vec![probabilities], logits, state });
        }
    }
    Ok(all.into_iter().flatten().collect())
}

/// What the model gives a token of a row of logits.
fn probability(logits: &[f32], token: i32) -> f32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    (f64::from(logits[token as usize] - most).exp() / sum) as f32
}

/// Logits of the last layer's outputs `[B, d]`, row by row on the host.
fn last_logits(model: &Model, h: &armt_engine::Tensor) -> Result<Vec<f32>> {
    Ok(model.logits(&Tape::off(), h)?.to_f32_vec()?)
}

/// Picks tokens.
struct Picker<'a> {
    sampling: &'a Sampling,
    random: Random,
}

impl<'a> Picker<'a> {
    fn new(sampling: &'a Sampling) -> Result<Self> {
        let mut seed = 0;
        if let Sampling::Random { temperature, top_k, top_p, seed: own } = sampling {
            if !(*temperature > 0.0 && temperature.is_finite()) {
                return Err(Error::config("temperature", "a positive number", temperature));
            }
            if *top_k == Some(0) {
                return Err(Error::config("top_k", "at least 1", 0));
            }
            if let Some(p) = top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
                return Err(Error::config("top_p", "above 0 and at most 1", p));
            }
            seed = *own;
        }
        Ok(Picker { sampling, random: Random::new(seed) })
    }

    /// The next token. Logits that are no numbers are an error: there is nothing to pick from.
    fn token(&mut self, logits: &[f32]) -> Result<i32> {
        if let Some(value) = logits.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
            return Err(Error::NotFinite { what: "the model's next token".into(), value: *value });
        }
        let Sampling::Random { temperature, top_k, top_p, .. } = self.sampling else {
            let best = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |m, (i, x)| if *x > m.1 { (i, *x) } else { m });
            return Ok(best.0 as i32);
        };
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        order.truncate(top_k.unwrap_or(order.len()).max(1));
        let most = logits[order[0]];
        let mut weights: Vec<f64> = order.iter().map(|i| f64::from((logits[*i] - most) / temperature).exp()).collect();
        if let Some(p) = top_p {
            let total: f64 = weights.iter().sum();
            let mut sum = 0.0;
            let keep = weights.iter().take_while(|w| {
                let open = sum < f64::from(*p) * total;
                sum += **w;
                open
            });
            let keep = keep.count().max(1);
            weights.truncate(keep);
        }
        let mut at = self.random.uniform() * weights.iter().sum::<f64>();
        for (i, w) in weights.iter().enumerate() {
            at -= w;
            if at < 0.0 {
                return Ok(order[i] as i32);
            }
        }
        Ok(order[weights.len() - 1] as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampling {
        Sampling::Random { temperature, top_k, top_p, seed: 1 }
    }

    fn counts(sampling: &Sampling) -> [usize; 4] {
        let mut picker = Picker::new(sampling).unwrap();
        let mut counts = [0; 4];
        (0..4000).for_each(|_| counts[picker.token(&[0.0, 2.0, 1.0, -1.0]).unwrap() as usize] += 1);
        counts
    }

    #[test]
    fn tokens_come_with_their_probabilities() {
        let c = counts(&random(1.0, None, None));
        let share = c[1] as f64 / 4000.0;
        assert!((share - 0.644).abs() < 0.03, "{c:?}");
        assert_eq!(counts(&Sampling::Greedy), [0, 4000, 0, 0]);
        let cold = counts(&random(0.1, None, None));
        assert!(cold[1] > 3990);
    }

    #[test]
    fn top_k_and_top_p_leave_out_the_unlikely() {
        let k = counts(&random(1.0, Some(2), None));
        assert!(k[0] == 0 && k[3] == 0 && k[2] > 0);
        let p = counts(&random(1.0, None, Some(0.7)));
        assert!(p[0] == 0 && p[3] == 0 && p[2] > 0, "0.64 is not yet 0.7, so the second counts too: {p:?}");
        assert_eq!(counts(&random(1.0, None, Some(0.5))), [0, 4000, 0, 0]);
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused() {
        let mut picker = Picker::new(&Sampling::Greedy).unwrap();
        assert!(matches!(picker.token(&[0.0, f32::NAN]), Err(Error::NotFinite { .. })));
        assert_eq!(picker.token(&[f32::NEG_INFINITY, 1.0]).unwrap(), 1, "a token that is ruled out is no fault");
    }

    #[test]
    fn impossible_settings_are_named() {
        for (sampling, key) in [
            (random(0.0, None, None), "temperature"),
            (random(1.0, Some(0), None), "top_k"),
            (random(1.0, None, Some(1.5)), "top_p"),
        ] {
            assert!(Picker::new(&sampling).err().unwrap().to_string().contains(key));
        }
    }
}
