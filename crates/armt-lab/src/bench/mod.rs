//! The workloads that every speed figure of this project is for, run through the reader and the training step that everybody uses.

mod agreement;
pub mod growth;

use std::ops::{ControlFlow, Not};
use std::time::Instant;

pub use agreement::Agreement;

use armt::engine::machine::expect_room;
use armt::engine::ops::Linear;
use armt::engine::optim::{AdamW, Group, Settings};
use armt::engine::{Clocks, Communicator, DType, Device, Membership, Param, Tape, Tensor, ops};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::{Error, Result};
use crate::tasks::TaskBatch;
use crate::train::Stepper;
use crate::train::replicas::{Alone, Replicas};
use armt::Model;
use armt::config::Config;
use armt::memory::{Associative, MemoryConfig, Window, Write};
use armt::random::Random;
use armt::reader::{Reader, Tokens};
use armt::recurrence::{self, FreshTokens, Targets};
use armt::schedule::{Backprop, ScheduleKind};
use armt::segment::Batch;

/// Segments that a reading warms up with, at most: those of several groups.
const WARM_UP: usize = 640;

/// What is done with the texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// They are read into a memory.
    Read,
    /// A training step: back through all segments, loss on the last.
    Train,
}

/// What model a workload has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Built {
    /// GPT-2 blocks with an associative memory.
    #[default]
    Armt,
    /// Mamba.
    Mamba,
    /// RWKV-5.
    Rwkv5,
}

impl Built {
    fn is_armt(&self) -> bool {
        *self == Built::Armt
    }
}

/// A model, and texts of some segments.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Its name.
    pub name: String,
    /// What is done.
    pub work: Work,
    /// The model.
    #[serde(default, skip_serializing_if = "Built::is_armt")]
    pub model: Built,
    /// Width of the residual stream.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Heads of attention, or of RWKV-5; Mamba has none.
    pub heads: usize,
    /// Text tokens of a segment.
    pub segment: usize,
    /// Memory tokens; Mamba and RWKV-5 have none.
    pub tokens: usize,
    /// Width of memory keys; of Mamba N, the numbers of state for each channel.
    pub d_mem: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Texts side by side.
    pub batch: usize,
    /// Segments of each text.
    pub segments: usize,
    /// How the memory is written.
    #[serde(default)]
    pub write: Write,
}

/// The workloads that have names.
pub const WORKLOADS: [&str; 8] =
    ["read-gpt2", "train-retrieval", "read-small", "train-babilong", "read-mamba", "read-rwkv5", "train-mamba", "train-rwkv5"];

impl Workload {
    /// One of the project's, by its name or the short one that figures once had; `None` for another name. Training on retrieval has
    /// other texts on the CPU.
    pub fn named(name: &str, cuda: bool) -> Option<Self> {
        let of = |name: &str, work, [width, layers, heads, segment, tokens, d_mem, vocab, batch, segments]: [usize; 9]| Workload {
            name: name.into(),
            work,
            model: Built::Armt,
            width,
            layers,
            heads,
            segment,
            tokens,
            d_mem,
            vocab,
            batch,
            segments,
            write: Write::Paper,
        };
        let (batch, segments) = if cuda { (512, 51) } else { (64, 11) };
        Some(match name {
            "read-gpt2" | "w1" => of("read-gpt2", Work::Read, [768, 12, 12, 512, 16, 64, 50257, 1, 200]),
            "train-retrieval" | "w2" => of("train-retrieval", Work::Train, [128, 4, 4, 6, 4, 32, 128, batch, segments]),
            "read-small" | "w3" => of("read-small", Work::Read, [256, 6, 8, 256, 16, 64, 8192, 1, 40]),
            "train-babilong" | "w4" => of("train-babilong", Work::Train, [384, 8, 6, 512, 16, 64, 8192, 32, 8]),
            // The shapes of mamba-130m and of an RWKV-5 of 12 layers.
            "read-mamba" | "w5" => {
                Workload { model: Built::Mamba, ..of("read-mamba", Work::Read, [768, 24, 0, 512, 0, 16, 50280, 1, 200]) }
            }
            "read-rwkv5" | "w6" => {
                Workload { model: Built::Rwkv5, ..of("read-rwkv5", Work::Read, [768, 12, 12, 512, 0, 0, 65536, 1, 200]) }
            }
            "train-mamba" => {
                Workload { model: Built::Mamba, ..of("train-mamba", Work::Train, [768, 24, 0, 2048, 0, 16, 50280, 8, 1]) }
            }
            "train-rwkv5" => {
                Workload { model: Built::Rwkv5, ..of("train-rwkv5", Work::Train, [768, 12, 12, 2048, 0, 0, 65536, 8, 1]) }
            }
            _ => return None,
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> Result<Config> {
        let (layers, width) = (self.layers, self.width);
        let own = |kind: &str, keys| recurrence::describe(kind, keys, FreshTokens { vocab: self.vocab, end: 0 });
        let (backbone, memory) = match self.model {
            Built::Armt => {
                let backbone = json!({
                    "model_type": "gpt2", "vocab_size": self.vocab, "n_positions": self.segment + self.tokens,
                    "n_embd": width, "n_layer": layers, "n_head": self.heads,
                });
                let memory = Associative { write: self.write, ..Associative::new(self.tokens, self.d_mem) };
                (backbone, MemoryConfig::new(memory))
            }
            Built::Mamba => {
                let keys = json!({"layers": layers, "width": width, "state": self.d_mem});
                (own("mamba", keys)?, MemoryConfig::new(Window::default()))
            }
            Built::Rwkv5 => {
                let keys = json!({"layers": layers, "width": width, "head": width / self.heads.max(1)});
                (own("rwkv5", keys)?, MemoryConfig::new(Window::default()))
            }
        };
        Ok(Config::new(backbone, memory, self.segment))
    }

    /// Text tokens of one repetition.
    pub fn text_tokens(&self) -> usize {
        self.batch * self.segments * self.segment
    }

    /// Operations of one repetition's matrix products: the block's, and the memory's maps, reads and recalls. Those of the recurrences themselves
    /// are no products.
    pub fn operations(&self) -> f64 {
        let (d, dm, dk) = (self.width as f64, self.d_mem as f64, 6.0 * self.d_mem as f64);
        let passes = if self.work == Work::Read { 1.0 } else { 3.0 };
        let row = match self.model {
            Built::Armt => None,
            // W_in, W_x, W_dt and W_out, with 2 d channels.
            Built::Mamba => {
                let rank = self.width.div_ceil(16) as f64;
                Some(2.0 * (4.0 * d * d + 2.0 * d * (rank + 2.0 * dm) + 2.0 * d * rank + 2.0 * d * d))
            }
            // Five and one of d by d, two of 3.5 d by d.
            Built::Rwkv5 => Some(2.0 * 13.0 * d * d),
        };
        if let Some(row) = row {
            return passes * (self.layers * self.text_tokens()) as f64 * row;
        }
        let rows = (self.batch * self.segments * (self.segment + self.tokens)) as f64;
        let written = (self.batch * self.segments * self.tokens) as f64;
        let attention = 2.0 * 2.0 * d * (self.segment + self.tokens) as f64 / 2.0;
        let row = 2.0 * 12.0 * d * d + attention + 2.0 * d * dm + 2.0 * dk * d;
        let token = 2.0 * d * (dm + d) + 4.0 * dk * d;
        passes * self.layers as f64 * (rows * row + written * token)
    }
}

/// How a workload is run.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Repetitions that are timed.
    pub repeats: usize,
    /// How the grid of layers and segments is walked.
    pub schedule: ScheduleKind,
    /// How gradients go back.
    pub backprop: Backprop,
    /// Parts that a step's batch is computed in.
    pub accumulate: usize,
    /// Whether the results are compared with those of the plain twins.
    pub check: bool,
    /// Whether a training step adds up its gradients by NCCL, over this one process.
    pub nccl: bool,
}

/// How long a workload took.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Timing {
    /// The workload.
    pub workload: Workload,
    /// Numbers that were computed with.
    pub dtype: String,
    /// The schedule's name.
    pub schedule: String,
    /// Whether blocks were computed again on the way back.
    pub recompute: bool,
    /// Whether the memory was unwound on the way back.
    pub unwind: bool,
    /// Parts that a step's batch was computed in.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub accumulate: usize,
    /// Whether gradients were added up by NCCL, over one process.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub nccl: bool,
    /// Seconds of each repetition, in their order.
    pub seconds: Vec<f64>,
    /// Text tokens in a second, at the median.
    pub tokens_per_second: f64,
    /// Milliseconds of a repetition, the median.
    pub ms_per_step: f64,
    /// Most bytes that tensors took at one time.
    pub peak_bytes: usize,
    /// Rate of the workload's matrix products over all its time, in TFLOP/s, and that of a product of the block's shape alone.
    pub tflops: [f64; 2],
    /// Seconds from the start to the end of the first repetition, everything compiled and planned.
    pub first_seconds: f64,
    /// MHz of the multiprocessors and of the memory, and watts, after the last repetition; where a GPU shows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks: Option<[f32; 3]>,
    /// How far the results are from those of the plain twins, if it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agreement: Option<Agreement>,
}

fn one() -> usize {
    1
}

fn is_one(n: &usize) -> bool {
    *n == 1
}

/// Runs a workload: twice for warming up, then as often as asked for. `each` hears of every repetition's seconds and may end it.
pub fn run(
    workload: &Workload,
    way: Way,
    (dtype, device): (DType, &Device),
    each: &mut dyn FnMut(f64) -> ControlFlow<()>,
) -> Result<Timing> {
    let Way { repeats, schedule, backprop, accumulate, check, nccl } = way;
    if repeats == 0 {
        return Err(Error::input("repeats", "at least 1", 0));
    }
    if workload.work == Work::Train && (accumulate == 0 || !workload.batch.is_multiple_of(accumulate)) {
        return Err(Error::input("accumulate", format!("parts that divide the batch of {}", workload.batch), accumulate));
    }
    let tokens = [workload.batch, workload.segments, workload.segment, size_of::<i32>()];
    expect_room("segments by texts", &tokens)?;
    expect_room("repeats", &[repeats, size_of::<f64>()])?;
    let start = Instant::now();
    let model = model(workload, dtype, device)?;
    let mut random = Random::new(2);
    let ids: Vec<i32> = (0..workload.text_tokens()).map(|_| random.below(workload.vocab) as i32).collect();
    let communicator = nccl.then(|| Communicator::join(device, Membership::alone())).transpose()?;
    let replicas = communicator.as_ref().map_or(&Alone as &dyn Replicas, |communicator| communicator);
    device.reset_peak();
    let mut repeat: Box<dyn FnMut(bool) -> Result<()>> = match workload.work {
        Work::Read => {
            let mut reader = Reader::with_schedule(&model, model.empty(workload.batch)?, schedule)?;
            let (model, ids) = (&model, &ids);
            let [start, all] = [workload.segments.min(WARM_UP), workload.segments].map(|n| n * workload.segment);
            Box::new(move |warm| reading(model, &mut reader, ids, if warm { start } else { all }))
        }
        Work::Train => {
            let params: Vec<Param> = model.params().into_iter().cloned().collect();
            let optimizer = AdamW::new(vec![Group { params, weight_decay: 0.01, rate: 1.0 }], Settings::default())?;
            let mut stepper = Stepper::new(&model, optimizer, backprop, schedule)?.among(replicas);
            let example = task_batch(workload, &ids);
            Box::new(move |_| stepper.step(&example, accumulate, 1e-4).map(|_| ()))
        }
    };
    repeat(true)?;
    let first_seconds = start.elapsed().as_secs_f64();
    repeat(true)?;
    let mut seconds = Vec::new();
    for _ in 0..repeats {
        let start = Instant::now();
        repeat(false)?;
        device.synchronize()?;
        seconds.push(start.elapsed().as_secs_f64());
        if each(start.elapsed().as_secs_f64()).is_break() {
            break;
        }
    }
    let clocks = if let Device::Cuda(cuda) = device { cuda.clocks() } else { None };
    drop(repeat);
    communicator.map_or(Ok(()), Communicator::leave)?;
    let peak_bytes = device.pool_stats().peak_bytes;
    let median = median(&seconds);
    Ok(Timing {
        workload: workload.clone(),
        dtype: dtype.to_string(),
        schedule: schedule.schedule(model.recurrence())?.name().into(),
        recompute: backprop.recompute,
        unwind: backprop.unwinds(dtype),
        accumulate,
        nccl,
        seconds,
        tokens_per_second: workload.text_tokens() as f64 / median,
        ms_per_step: 1e3 * median,
        peak_bytes,
        tflops: [workload.operations() / median / 1e12, ceiling(workload, dtype, device)?],
        first_seconds,
        clocks: clocks.map(|Clocks { sm_mhz, memory_mhz, watts }| [sm_mhz as f32, memory_mhz as f32, watts]),
        agreement: check.then(|| agreement::agreement(workload, &ids, (dtype, device))).transpose()?,
    })
}

/// The middle one, or the mean of the middle two.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    if n == 0 { f64::NAN } else { (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0 }
}

/// How important a token that is written is, before the sigmoid. The memory tokens of a random model have much the same keys, and all are
/// written against the old memory: at a sigmoid of a half, 16 of them overshoot eightfold, and the memory grows without end.
const IMPORTANCE: f32 = -4.0;

/// A fresh model whose memory does not stay empty: the value projection, which starts at zero, is random like the other weights.
fn model(workload: &Workload, dtype: DType, device: &Device) -> Result<Model> {
    let reads = workload.work == Work::Read;
    // Int8 is rounded from f32.
    let made_in = if reads && dtype == DType::I8 { DType::F32 } else { dtype };
    let model = Model::fresh(workload.config()?, 1, made_in, device)?;
    if let (Some(value), Some(bias)) = (model.param("assoc.value"), model.param("assoc.beta_bias")) {
        let mut random = Random::new(4);
        let values: Vec<f32> = (0..value.value().elements()).map(|_| 0.02 * random.normal() as f32).collect();
        value.set(&Tensor::from_slice(&values, value.value().shape(), device)?)?;
        let importance = vec![IMPORTANCE; bias.value().elements()];
        bias.set(&Tensor::from_slice(&importance, bias.value().shape(), device)?)?;
    }
    // What only reads has its weights and nothing else, as a model that is loaded.
    Ok(if reads { model.for_use_in(dtype)? } else { model })
}

/// Reads the first `tokens` tokens of all texts, side by side, from an empty memory.
fn reading(model: &Model, reader: &mut Reader, ids: &[i32], tokens: usize) -> Result<()> {
    let texts = reader.left_out().len();
    reader.begin(model.empty(texts)?)?;
    let mut sources: Vec<_> = ids.chunks(ids.len() / texts).map(|text| text[..tokens].iter().map(|id| Ok(*id))).collect();
    let mut sources: Vec<Tokens<'_>> = sources.iter_mut().map(|s| s as Tokens<'_>).collect();
    reader.read_all(&mut sources, &mut |_| ControlFlow::Continue(()))?;
    Ok(reader.close()?)
}

/// A batch whose last segment is asked for.
fn task_batch(workload: &Workload, ids: &[i32]) -> TaskBatch {
    let length = workload.segments * workload.segment;
    let asked = |i: usize| i % length >= length - workload.segment;
    let next = (0..ids.len()).map(|i| if asked(i) { ids[i] } else { -1 }).collect();
    TaskBatch { batch: Batch { ids: ids.to_vec(), texts: workload.batch, mask: None }, targets: Targets { next } }
}

/// TFLOP/s of the block's widest product with all layers batched, alone.
fn ceiling(workload: &Workload, dtype: DType, device: &Device) -> Result<f64> {
    let (l, d) = (workload.layers, workload.width);
    let rows = workload.batch * (workload.segment + workload.tokens);
    let mut random = Random::new(3);
    let mut fill = |shape: [usize; 3]| -> Result<Tensor> {
        let data: Vec<f32> = (0..shape.iter().product()).map(|_| random.normal() as f32).collect();
        Ok(Tensor::from_slice(&data, shape, device)?)
    };
    let (x, w) = (fill([l, rows, d])?, fill([l, d, 4 * d])?);
    let x = if dtype == DType::BF16 { ops::cast(&x, dtype)? } else { x };
    let w = match dtype {
        DType::I8 => Param::int8("w", w.dims())?.unwrap_or(Param::frozen("w", &w, DType::F32)?),
        _ => Param::frozen("w", &w, dtype)?,
    };
    let tape = Tape::off();
    let operations = 2.0 * (l * rows) as f64 * (4 * d * d) as f64;
    let times = if device.is_cuda() { 50 } else { 3 };
    let mut rates = Vec::new();
    for _ in 0..5 {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..times {
            tape.linear_rows(&x, &w, 0..l, Linear::default())?;
        }
        device.synchronize()?;
        rates.push(f64::from(times) * operations / start.elapsed().as_secs_f64() / 1e12);
    }
    Ok(median(&rates[1..]))
}
