//! What a segment's memory tokens write: k = x W_K, v = x W_V, beta = x W_b + bias (equation 1), of the last m rows of each text.
//!
//! In training three products, which is also the plain twin. In a model that is used on CUDA in bf16, where the tokens are few, one kernel makes
//! all three and takes the rows from where they are: each product alone leaves most of the GPU idle, and so does the copy of the rows.

use crate::error::{Error, Result};
use crate::ops::{Linear, cuda_of, linear, narrow, reshape};
use crate::paths;
use crate::tape::is_recorded;
use crate::tensor::{DType, Tensor};

const OP: &str = "assoc_tokens";

/// Columns of k or v that a block of the kernel makes; `COLUMNS` there.
const COLUMNS: usize = 32;

/// The maps of L layers' memory tokens.
#[derive(Clone, Copy)]
pub struct TokenMaps<'a> {
    /// W_K `[L, w, dm]`.
    pub key: &'a Tensor,
    /// W_V `[L, w, d]`.
    pub value: &'a Tensor,
    /// W_b `[L, w, 1]`.
    pub beta: &'a Tensor,
    /// Added to what W_b gives, `[L, 1]`.
    pub bias: &'a Tensor,
}

/// Keys `[L, B, m, dm]`, values `[L, B, m, d]` and importance before its sigmoid `[L, B, m]` of the last m rows of x `[L, B, T, w]`. All have
/// x's type. Anything else is an error.
pub fn assoc_tokens(x: &Tensor, m: usize, maps: TokenMaps<'_>) -> Result<[Tensor; 3]> {
    x.expect_rank(OP, "x", 4)?;
    let (layers, texts, t) = (x.shape()[0], x.shape()[1], x.shape()[2]);
    if m == 0 || m > t {
        return Err(Error::shape(OP, "x", format!("at least {} rows a text", m.max(1)), x.shape()));
    }
    if let Some(made) = in_one_launch(x, m, maps)? {
        return Ok(made);
    }
    let tokens = narrow(x, 2, t - m, m)?;
    let k = linear(&tokens, maps.key, Linear::default())?;
    let v = linear(&tokens, maps.value, Linear::default())?;
    let beta = linear(&tokens, maps.beta, Linear { bias: Some(maps.bias), ..Linear::default() })?;
    Ok([k, v, reshape(&beta, [layers, texts, m])?])
}

/// All three by the kernel, where that is the way. What does not fit together is left to the products, which say so.
fn in_one_launch(x: &Tensor, m: usize, maps: TokenMaps<'_>) -> Result<Option<[Tensor; 3]>> {
    let TokenMaps { key, value, beta, bias } = maps;
    let (layers, texts, t, width) = (x.shape()[0], x.shape()[1], x.shape()[2], x.shape()[3]);
    let operands = [x, key, value, beta, bias];
    let Some(cuda) = cuda_of(x).filter(|_| !is_recorded(&operands)) else { return Ok(None) };
    let (dm, d) = (key.shape().last(), value.shape().last());
    let fits = [(key, vec![layers, width, dm]), (value, vec![layers, width, d]), (beta, vec![layers, width, 1])];
    if fits.iter().any(|(map, shape)| map.dims() != &shape[..]) || bias.elements() != layers {
        return Ok(None);
    }
    let same = operands.iter().all(|t| t.dtype() == DType::BF16 && t.device() == x.device());
    if !same || x.elements() == 0 || !paths::tokens_in_one_launch(texts * m, [width, dm, d]) {
        return Ok(None);
    }
    let made = |shape: &[usize]| Tensor::uninit(shape, x.dtype(), x.device());
    let (k, v, b) = (made(&[layers, texts, m, dm])?, made(&[layers, texts, m, d])?, made(&[layers, texts, m])?);
    let blocks = dm.div_ceil(COLUMNS) + d.div_ceil(COLUMNS) + 1;
    let launch = cuda.kernel("memory_tokens", x.dtype(), "token_maps")?.grid(blocks, layers, 1);
    let launch = launch.arg(x).arg(key).arg(value).arg(beta).arg(bias).arg(&k).arg(&v).arg(&b);
    let launch = launch.arg(texts as i32).arg(m as i32).arg(t as i32);
    launch.arg(width as i32).arg(dm as i32).arg(d as i32).run()?;
    Ok(Some([k, v, b]))
}
