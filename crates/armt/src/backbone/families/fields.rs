//! Values of a Hugging Face configuration, with errors that name the key, and checks that several families share.

use armt_engine::ops::Heads;
use serde_json::Value;

use crate::backbone::architecture::{Llama3Scaling, Mlp, Rotary};
use crate::error::{Error, Result};

/// Reads values of a Hugging Face configuration, with errors that name the key.
pub(super) struct Fields<'a>(pub(super) &'a Value);

impl Fields<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn size(&self, key: &str) -> Result<usize> {
        let value = self.get(key).ok_or_else(|| Error::config(key, "a positive integer", "nothing"))?;
        value.as_u64().filter(|n| *n > 0).map(|n| n as usize).ok_or_else(|| Error::config(key, "a positive integer", value))
    }

    pub(super) fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    pub(super) fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        self.get(key).map_or(Ok(default), |v| v.as_f64().ok_or_else(|| Error::config(key, "a number", v)))
    }

    pub(super) fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        self.get(key).map_or(Ok(default), |v| v.as_bool().ok_or_else(|| Error::config(key, "true or false", v)))
    }

    pub(super) fn text_or<'s>(&'s self, key: &str, default: &'s str) -> Result<&'s str> {
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

pub(super) fn rotary_of(theta: f64, dims: usize, size: usize, scaling: Option<Llama3Scaling>) -> Result<Rotary> {
    if !dims.is_multiple_of(2) || dims > size {
        return Err(Error::config("rotary dimensions", &format!("an even number up to {size}"), dims));
    }
    if theta <= 0.0 {
        return Err(Error::config("rope_theta", "a positive number", theta));
    }
    Ok(Rotary { theta, dims, scaling })
}

pub(super) fn gelu_of(key: &str, name: &str) -> Result<Mlp> {
    match name {
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Mlp::Gelu),
        "gelu" => Ok(Mlp::GeluErf),
        other => Err(Error::config(key, "gelu, gelu_new, gelu_fast or gelu_pytorch_tanh", other)),
    }
}
