//! Small random models of every family and memory, for tests.

#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use armt::State;
use armt::config::{Alignment, Config, ModelType};
use armt::engine::{DType, Device, Tensor};
use armt::memory::{Associative, MemoryConfig, Prmt, Rmt, RmtR, Window, Write};
use armt::model::Model;
use armt::random::Random;
use armt::segment::Batch;
use armt::state::Count;
use serde_json::{Value, json};

pub const VOCAB: usize = 23;
pub const FAMILIES: [&str; 7] = ["gpt2", "gpt_neox", "gpt_neox serial", "llama", "mistral", "qwen2", "qwen3"];

/// A Hugging Face configuration of a small backbone.
pub fn backbone(family: &str, layers: usize) -> Value {
    match family {
        "gpt2" => {
            json!({"model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": layers, "n_head": 2})
        }
        "llama" => json!({"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true,
            "rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
        "mistral" | "qwen2" | "qwen3" => {
            json!({"model_type": family, "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 64,
            "tie_word_embeddings": family == "qwen2"})
        }
        _ => json!({"model_type": "gpt_neox", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20,
            "num_hidden_layers": layers, "num_attention_heads": 2, "max_position_embeddings": 64, "rotary_pct": 0.5,
            "use_parallel_residual": family == "gpt_neox"}),
    }
}

/// The memories that have a diagonal schedule, and those that go through the top.
pub fn memories() -> Vec<MemoryConfig> {
    let associative = Associative::new(2, 4);
    vec![
        MemoryConfig::new(associative.clone()),
        MemoryConfig::new(Associative { correction: false, nu: 2, ..associative.clone() }),
        MemoryConfig::new(Associative { memory_layers: Some(vec![0]), ..associative.clone() }),
        MemoryConfig::new(Associative { write: Write::Projected, ..associative.clone() }),
        MemoryConfig::new(Associative { write: Write::Projected, correction: false, memory_layers: Some(vec![0]), ..associative }),
        MemoryConfig::new(Prmt { tokens: 2, wrap_pos: false }),
        MemoryConfig::new(Window { sliding_window: false }),
        MemoryConfig::new(Window { sliding_window: true }),
        MemoryConfig::new(Rmt { tokens: 2, wrap_pos: false }),
        MemoryConfig::new(RmtR { tokens: 2 }),
    ]
}

pub fn config(family: &str, layers: usize, memory: MemoryConfig, segment_size: usize, alignment: Alignment) -> Config {
    let backbone = backbone(family, layers);
    Config { model_type: ModelType::Armt, segment_size, segment_alignment: alignment, after_question: None, memory, backbone }
}

/// A model all of whose parameters are random: fresh ones have zeros that hide errors.
pub fn model(config: Config, seed: u64, device: &Device) -> Model {
    model_of_spread(config, seed, 0.25, device)
}

/// A model all of whose parameters are random, with a standard deviation of the weights.
pub fn model_of_spread(config: Config, seed: u64, deviation: f64, device: &Device) -> Model {
    let model = Model::fresh(config, seed, DType::F32, device).unwrap();
    let mut random = Random::new(seed);
    for p in model.params() {
        let gain = if p.name().ends_with("gain") { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..p.value().elements()).map(|_| (gain + deviation * random.normal()) as f32).collect();
        p.set(&Tensor::from_slice(&values, p.value().shape(), device).unwrap()).unwrap();
    }
    model
}

/// Random tokens.
pub fn tokens(batch: usize, tokens: usize, seed: u64) -> Batch {
    let mut random = Random::new(seed);
    Batch { ids: (0..batch * tokens).map(|_| random.below(VOCAB) as i32).collect(), texts: batch, mask: None }
}

/// A state as it might be after some reading: nothing in it is zero. Kinds without a form of their own read a segment for it.
pub fn used_state(model: &Model, texts: usize, seed: u64) -> State {
    let empty = model.empty(texts).unwrap();
    let (Some(a), Some(z)) = (empty.get("A"), empty.get("z")) else {
        let text = tokens(texts, model.config().segment_size, seed);
        return model.forward(&text, &empty, armt::schedule::ScheduleKind::Sequential).unwrap().1;
    };
    let mut random = Random::new(seed);
    let mut fill = |t: &Tensor, f: &dyn Fn(f64) -> f64| {
        let values: Vec<f32> = (0..t.elements()).map(|_| f(random.normal()) as f32).collect();
        Tensor::from_slice(&values, t.shape(), model.device()).unwrap()
    };
    let tensors = vec![fill(a, &|x| 0.3 * x), fill(z, &|x| 0.5 + 0.3 * x.abs())];
    let counts = vec![Count { tokens: 5, segments: 1, text: None }; texts];
    model.recurrence().layout().state(tensors, counts).unwrap()
}

/// Everything a state holds, as numbers; masks left out.
pub fn numbers(state: &State) -> Vec<f32> {
    state.tensors().filter(|(_, t)| t.dtype().is_float()).flat_map(|(_, t)| t.to_f32_vec().unwrap()).collect()
}

/// Largest difference, relative to the largest value.
pub fn off(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    let most =
        got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0f32, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) });
    most / largest
}
