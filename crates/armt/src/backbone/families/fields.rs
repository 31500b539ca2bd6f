//! Values of a Hugging Face configuration, with errors that name the key, and checks that several families share.

use armt_engine::ops::Heads;
use serde_json::Value;

use crate::backbone::architecture::{Llama3Scaling, Mlp, Rotary, Scaling, YarnScaling};
use crate::error::{Error, Result};

/// Reads values of a Hugging Face configuration, with errors that name the key.
pub(crate) struct Fields<'a>(pub(crate) &'a Value);

impl Fields<'_> {
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        let value = self.get(key).ok_or_else(|| Error::config(key, "a positive integer", "nothing"))?;
        value.as_u64().filter(|n| *n > 0).map(|n| n as usize).ok_or_else(|| Error::config(key, "a positive integer", value))
    }

    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        self.get(key).map_or(Ok(default), |v| v.as_f64().ok_or_else(|| Error::config(key, "a number", v)))
    }

    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        self.get(key).map_or(Ok(default), |v| v.as_bool().ok_or_else(|| Error::config(key, "true or false", v)))
    }

    pub(crate) fn text_or<'s>(&'s self, key: &str, default: &'s str) -> Result<&'s str> {
        self.get(key).map_or(Ok(default), |v| v.as_str().ok_or_else(|| Error::config(key, "a string", v)))
    }
}

pub(super) fn heads_of(width: usize, query: usize, key: usize, size: Option<usize>) -> Result<Heads> {
    if size.is_none() && !width.is_multiple_of(query) {
        return Err(Error::config("the number of heads", &format!("a divisor of the width {width}"), query));
    }
    if !query.is_multiple_of(key) {
        return Err(Error::config("num_key_value_heads", &format!("a divisor of {query}"), key));
    }
    Ok(Heads { query, key, size: size.unwrap_or(width / query) })
}

/// Rotary positions of `share` of heads of a size, unless the configuration says otherwise. Newer files have all in `rope_parameters`, older ones
/// `rope_theta` (`rotary_emb_base`), `rotary_pct` and `rope_scaling`. A kind of scaling that is not known is refused.
pub(super) fn rotary_of(r: &Fields<'_>, size: usize, share: f64) -> Result<Rotary> {
    let rope = Fields(r.get("rope_parameters").unwrap_or(&Value::Null));
    let old = r.number_or("rope_theta", r.number_or("rotary_emb_base", 10_000.0)?)?;
    let theta = rope.number_or("rope_theta", old)?;
    let share = r.number_or("partial_rotary_factor", r.number_or("rotary_pct", share)?)?;
    let dims = (size as f64 * rope.number_or("partial_rotary_factor", share)?) as usize;
    if !dims.is_multiple_of(2) || dims > size || dims == 0 {
        return Err(Error::config("rotary dimensions", &format!("an even number up to {size}"), dims));
    }
    if theta <= 1.0 {
        return Err(Error::config("rope_theta", "a number above 1", theta));
    }
    Ok(Rotary { theta, dims, scaling: scaling_of(r)? })
}

fn scaling_of(r: &Fields<'_>) -> Result<Option<Scaling>> {
    let scaled = Fields(r.get("rope_scaling").or(r.get("rope_parameters")).unwrap_or(&Value::Null));
    let factor = |default: Option<f64>| {
        let factor = match (scaled.get("factor"), default) {
            (None, None) => return Err(Error::config("rope_scaling.factor", "a number", "nothing")),
            (_, default) => scaled.number_or("factor", default.unwrap_or(1.0))?,
        };
        if factor >= 1.0 { Ok(factor) } else { Err(Error::config("rope_scaling.factor", "at least 1", factor)) }
    };
    let positions = r.number_or("max_position_embeddings", 2048.0)?;
    Ok(match scaled.text_or("rope_type", scaled.text_or("type", "default")?)? {
        "default" => None,
        // Beyond its positions alone, where no segment goes.
        "dynamic" => None,
        "linear" => Some(Scaling::Linear(factor(None)?)),
        "llama3" => Some(Scaling::Llama3(Llama3Scaling {
            factor: factor(Some(8.0))?,
            low: scaled.number_or("low_freq_factor", 1.0)?,
            high: scaled.number_or("high_freq_factor", 4.0)?,
            original: scaled.number_or("original_max_position_embeddings", 8192.0)?,
        })),
        "yarn" => {
            if let Some(key) = ["mscale", "mscale_all_dim"].into_iter().find(|key| scaled.get(key).is_some()) {
                return Err(Error::config(
                    &format!("rope_scaling.{key}"),
                    "no such key: DeepSeek's form of yarn is not known",
                    "one",
                ));
            }
            if !scaled.flag_or("truncate", true)? {
                return Err(Error::config("rope_scaling.truncate", "true", false));
            }
            let factor = factor(None)?;
            let sharper = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
            Some(Scaling::Yarn(YarnScaling {
                factor,
                fast: scaled.number_or("beta_fast", 32.0)?,
                slow: scaled.number_or("beta_slow", 1.0)?,
                original: scaled.number_or("original_max_position_embeddings", positions)?,
                attention: scaled.number_or("attention_factor", sharper)?,
            }))
        }
        other => return Err(Error::config("rope_scaling.rope_type", "default, linear, dynamic, llama3 or yarn", other)),
    })
}

/// Refuses attention to fewer positions than a layer's own in some layers only. `None` where all are seen.
pub(super) fn sliding_window_of(r: &Fields<'_>, usual: bool) -> Result<Option<usize>> {
    let used = r.flag_or("use_sliding_window", usual)?;
    let window = if r.get("sliding_window").is_some() { Some(r.size("sliding_window")?) } else { None };
    Ok(window.filter(|_| used))
}

pub(super) fn gelu_of(key: &str, name: &str) -> Result<Mlp> {
    match name {
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Mlp::Gelu),
        "gelu" => Ok(Mlp::GeluErf),
        other => Err(Error::config(key, "gelu, gelu_new, gelu_fast or gelu_pytorch_tanh", other)),
    }
}
