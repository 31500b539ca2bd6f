//! Generation: everything but the last segment goes into the memory, then tokens follow from the last, which reads the memory and does
//! not write it. Keys and values are kept within the segment.
//!
//! The authors' code stops being itself when a segment is full: it goes on with positions it never saw. [`Options::roll_over`] writes the
//! full segment to the memory instead and begins the next.

use std::ops::ControlFlow;

use armt_engine::{Tape, Tensor, ops};

use crate::config::Positions;
use crate::error::{Error, Result};
use crate::memory::{Content, Kind, LayerMemory, MemoryState};
use crate::model::{Attend, Cache, Inputs, Model};
use crate::random::Random;
use crate::schedule::{Backprop, Choice};
use crate::segment::{Batch, Segment, segment};

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
}

impl Default for Options {
    fn default() -> Self {
        Options { max_new_tokens: 32, stop: Vec::new(), sampling: Sampling::Greedy, roll_over: true, keep_logits: false }
    }
}

/// What was generated.
pub struct Generated {
    /// New tokens of each text, a stop token included.
    pub tokens: Vec<Vec<i32>>,
    /// Logits of each step, `[B, V]`, where they were asked for.
    pub logits: Vec<Vec<f32>>,
    /// The memory at the end: of everything but the last, unfinished segment.
    pub state: MemoryState,
}

impl Model {
    /// Continues a batch of texts of equal length, from a memory of what came before. `each` sees every step's new tokens, one for each
    /// text, as they come.
    pub fn generate(
        &self,
        prompt: &Batch,
        state: &MemoryState,
        options: &Options,
        each: &mut dyn FnMut(&[i32]),
    ) -> Result<Generated> {
        self.generate_until(prompt, state, options, &mut |next| {
            each(next);
            ControlFlow::Continue(())
        })
    }

    /// The same, where `each` may also end the generation.
    pub fn generate_until(
        &self,
        prompt: &Batch,
        state: &MemoryState,
        options: &Options,
        each: &mut dyn FnMut(&[i32]) -> ControlFlow<()>,
    ) -> Result<Generated> {
        state.expect_fits(self, prompt.batch)?;
        if prompt.mask.is_some() {
            return Err(Error::Argument("texts to continue must have equal length: continue them one by one".into()));
        }
        let mut pick = Picker::new(&options.sampling)?;
        let mut segments = self.segments(prompt)?;
        let Some(last) = segments.pop() else {
            return Err(Error::Argument("expected at least one token to go on from, got none".into()));
        };
        let tape = Tape::off();
        let mut state = if segments.is_empty() { state.clone() } else { self.absorb(&segments, state)? };
        let batch = prompt.batch;
        let tokens = prompt.tokens();
        // The open segment's tokens, row by row.
        let mut open: Vec<Vec<i32>> = (0..batch).map(|b| prompt.ids[b * tokens..][last.range.clone()].to_vec()).collect();
        let mut caches = Caches::new(self, &state, &tape)?;
        let mut logits = caches.step(self, &tape, &open, 0)?;
        let mut out = Generated { tokens: vec![Vec::new(); batch], logits: Vec::new(), state: state.clone() };
        let mut done = vec![false; batch];
        for step in 0..options.max_new_tokens {
            let next: Vec<i32> = logits.chunks(self.backbone.vocab).map(|row| pick.token(row)).collect();
            if options.keep_logits {
                out.logits.push(std::mem::take(&mut logits));
            }
            for (b, token) in next.iter().enumerate() {
                if !done[b] {
                    out.tokens[b].push(*token);
                    done[b] = options.stop.contains(token);
                }
            }
            if each(&next).is_break() {
                break;
            }
            if done.iter().all(|d| *d) || step + 1 == options.max_new_tokens {
                break;
            }
            if open[0].len() == self.config.segment_size && options.roll_over {
                let full = Batch { ids: open.concat(), batch, mask: None };
                let whole = segment(&full, 0..full.tokens(), full.tokens());
                state = self.absorb(&[whole], &state)?;
                open.iter_mut().for_each(Vec::clear);
                caches = Caches::new(self, &state, &tape)?;
            }
            let from = open[0].len();
            if from >= self.longest_segment() {
                break;
            }
            open.iter_mut().zip(&next).for_each(|(row, token)| row.push(*token));
            logits = caches.step(self, &tape, &open, from)?;
        }
        out.state = state;
        Ok(out)
    }

    /// The memory after whole segments.
    fn absorb(&self, segments: &[Segment], state: &MemoryState) -> Result<MemoryState> {
        let inputs = Inputs::new(self, segments, state.batch)?.asking(|_| false);
        Choice::Auto.schedule(self)?.run(self, &Tape::off(), &inputs, state, Backprop::default(), &mut |_, _| Ok(()))
    }

    /// Positions that exist for a segment's tokens.
    fn longest_segment(&self) -> usize {
        let before = self.config.memory.tokens_before();
        match (&self.backbone.positions, &self.rotary) {
            (Positions::Learned(rows), _) if self.config.memory.wrap_pos() => *rows,
            (Positions::Learned(rows), _) => rows - before,
            // Half of the table is for the segment before, where a window sees it.
            (_, Some((cos, _))) => cos.dims()[0] / 2 - before,
            (_, None) => usize::MAX,
        }
    }
}

/// The layers' memories, which stay as they are, and their caches, which grow.
struct Caches {
    layers: Vec<(LayerMemory, Cache)>,
    /// RMT's memory tokens, read at the segment's start.
    carried: Option<Tensor>,
    batch: usize,
}

impl Caches {
    fn new(model: &Model, state: &MemoryState, tape: &Tape) -> Result<Self> {
        let layers = (0..model.backbone().layers)
            .map(|l| {
                let memory = state.layers(model, l..l + 1, tape)?;
                let cache = match &memory.kind {
                    Kind::Window(Some((qkv, seen))) => model.window_cache(qkv, seen)?,
                    _ => Cache::default(),
                };
                Ok((memory, cache))
            })
            .collect::<Result<Vec<_>>>()?;
        let carried = if let Content::Rmt(m) = &state.content { m.clone() } else { None };
        Ok(Caches { layers, carried, batch: state.batch })
    }

    /// Runs tokens `from..` of the open segment; gives the last one's logits, row by row.
    fn step(&mut self, model: &Model, tape: &Tape, open: &[Vec<i32>], from: usize) -> Result<Vec<f32>> {
        let ids: Vec<i32> = open.iter().flat_map(|row| row[from..].iter().copied()).collect();
        let before = model.config.memory.tokens_before();
        let text = model.embed_tokens(tape, &ids, self.batch)?;
        // RMT and PRMT read their memory tokens at the segment's start.
        let (x, first) = if from == 0 && before > 0 {
            let learned = if self.carried.is_none() { model.memory_tokens(tape, self.batch)? } else { None };
            let memory = self.carried.as_ref().or(learned.as_ref());
            (ops::concat(&memory.into_iter().chain([&text]).collect::<Vec<_>>(), 1)?, 0)
        } else {
            (text, before + from)
        };
        let n = x.dims()[1];
        let positions: Vec<i32> = (first..first + n).map(|p| p as i32).collect();
        let x = model.add_positions(tape, &x, &positions)?;
        let d = x.dims()[2];
        let mut h = ops::reshape(&x, [1, self.batch, n, d])?;
        for (l, (memory, cache)) in self.layers.iter_mut().enumerate() {
            h = match &memory.kind {
                Kind::Prmt(m) if from == 0 => ops::concat(&[m, &ops::narrow(&h, 2, before, n - before)?], 2)?,
                _ => model.associative_read(tape, l..l + 1, &h, memory)?,
            };
            h = model.block(tape, l..l + 1, &h, Attend::Cached(cache))?.0;
        }
        let h = ops::reshape(&ops::narrow(&h, 2, n - 1, 1)?, [self.batch, d])?;
        Ok(model.logits(tape, &h)?.to_f32_vec()?)
    }
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

    fn token(&mut self, logits: &[f32]) -> i32 {
        let Sampling::Random { temperature, top_k, top_p, .. } = self.sampling else {
            let best = logits.iter().enumerate().fold((0, f32::NEG_INFINITY), |m, (i, x)| if *x > m.1 { (i, *x) } else { m });
            return best.0 as i32;
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
                return order[i] as i32;
            }
        }
        order[weights.len() - 1] as i32
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
        (0..4000).for_each(|_| counts[picker.token(&[0.0, 2.0, 1.0, -1.0]) as usize] += 1);
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
