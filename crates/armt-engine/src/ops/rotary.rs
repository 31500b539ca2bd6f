//! Rotary position embedding (Su et al. 2021) in the halves form of GPT-NeoX and Llama: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin),
//! x1 and x2 the two halves of the first r dimensions of each query and key head. The angles come as tables.

use super::{Heads, cast, cuda_of, to_f32, via_f32};
use crate::cpu::rotary::{Turn, rotate};
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

/// Rotates the query and key heads of qkv `[.., T, (H + 2 Hk) size]`, rows packed as [q heads | k heads | v heads]; v is copied.
///
/// cos and sin are f32 `[T, r/2]` with r <= size, or `[G, T, r/2]` with a table for each index of qkv's leading axis; row i of T takes the
/// table's row i. Dimensions from r on stay as they are.
pub fn rotary(qkv: &Tensor, heads: Heads, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    const OP: &str = "rotary";
    let (_, t) = heads.expect_packed(OP, qkv)?;
    cos.expect_dtype(OP, "cos", DType::F32)?;
    cos.expect_device_of(OP, "cos", qkv)?;
    sin.expect_dtype(OP, "sin", DType::F32)?;
    sin.expect_device_of(OP, "sin", qkv)?;
    let (half, most) = (cos.shape().last(), heads.size / 2);
    let groups = if cos.shape().rank() == 3 { cos.shape()[0] } else { 1 };
    let fits = match *cos.dims() {
        [rows, _] => rows == t,
        [groups, rows, _] => rows == t && groups == qkv.shape()[0] && qkv.shape().rank() > 2,
        _ => false,
    };
    if !fits || half > most {
        let expected = format!("[{t}, at most {most}], or [{}, {t}, at most {most}]", qkv.shape()[0]);
        return Err(Error::shape(OP, "cos", expected, cos.shape()));
    }
    sin.expect_shape(OP, "sin", cos.shape())?;
    if via_f32(qkv) {
        return cast(&rotary(&to_f32(qkv)?, heads, cos, sin)?, DType::BF16);
    }
    let turn = Turn {
        row: heads.packed(),
        rotated: heads.query + heads.key,
        size: heads.size,
        half,
        t,
        table: qkv.shape().rows() / groups,
        sign: 1.0,
    };
    let y = apply(qkv, cos, sin, turn)?;
    Ok(record(&[qkv], y, || Rotary { cos: cos.detach(), sin: sin.detach(), turn }))
}

fn apply(x: &Tensor, cos: &Tensor, sin: &Tensor, s: Turn) -> Result<Tensor> {
    const OP: &str = "rotary";
    let y = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
    match cuda_of(x) {
        None => rotate(&x.read::<f32>(OP)?, &cos.read::<f32>(OP)?, &sin.read::<f32>(OP)?, s, &mut y.write::<f32>(OP)?),
        Some(cuda) => {
            let n = x.elements();
            let launch = cuda.kernel("rotary", x.dtype(), OP)?.cover(n).arg(x).arg(cos).arg(sin).arg(&y).arg(n);
            launch.arg(s.row).arg(s.rotated).arg(s.size).arg(s.half).arg(s.t).arg(s.table).arg(s.sign).run()?;
        }
    }
    Ok(y)
}

struct Rotary {
    cos: Tensor,
    sin: Tensor,
    turn: Turn,
}

impl Backward for Rotary {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        // The inverse of a rotation is its transpose: the angle negated.
        let turn = Turn { sign: -1.0, ..self.turn };
        grads.give(0, apply(&dy, &self.cos, &self.sin, turn)?)
    }
}
