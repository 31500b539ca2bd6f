//! Cross entropy of logits h W^T that never exist all at once.
//!
//! Rows go in chunks through one buffer `[chunk, V]`: the forward pass keeps one log-sum-exp a row, the backward pass makes each
//! chunk's logits again, turns them into dlogits in place, and adds dh = dlogits W and dW = dlogits^T h. Logits of one chunk are not
//! made again but kept.

use super::cross_entropy::{check_targets, gradient, mean_loss, row_losses};
use super::matmul::{add_sum, multiply};
use super::{Sizes, cuda_of, to_f32};
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use crate::paths;
use crate::tape::{Backward, Grads, Target, is_recorded, record};
use crate::tensor::{DType, Tensor};

const OP: &str = "linear_cross_entropy";

/// The mean cross entropy of the logits h W^T, as f32 `[1]`: h `[.., d]`, weight `[V, d]` (an embedding table, or a head stored as
/// one), i32 targets `[..]` as in [`cross_entropy`](super::cross_entropy()). `chunk_rows` rows of logits exist at a time; 0 takes
/// what fits into 64 MiB on the CPU, and into a small part of a GPU's memory.
pub fn linear_cross_entropy(h: &Tensor, weight: &Tensor, targets: &Tensor, chunk_rows: usize) -> Result<Tensor> {
    h.expect_float(OP, "h")?;
    weight.expect_dtype(OP, "the weight", h.dtype())?;
    weight.expect_device_of(OP, "the weight", h)?;
    weight.expect_rank(OP, "the weight", 2)?;
    let (classes, d) = (weight.shape()[0], weight.shape()[1]);
    if classes == 0 {
        return Err(Error::shape(OP, "the weight", "[at least 1, d]", weight.shape()));
    }
    let rank = h.shape().rank();
    if rank == 0 || h.shape().last() != d {
        return Err(Error::shape(OP, "h", format!("[.., {d}]"), h.shape()));
    }
    check_targets(OP, h, &h.dims()[..rank - 1], targets, classes)?;
    let (h, weight) = (&to_f32(h)?, &to_f32(weight)?);
    let rows = targets.elements();
    let own = |t: &Tensor| Tensor::uninit([t.elements()], DType::F32, t.device());
    let (lse, losses) = (own(targets)?, own(targets)?);
    let chunked = Chunked {
        h: h.view([rows, d]),
        weight: weight.detach(),
        targets: targets.view([rows]),
        chunk: paths::logits_rows(chunk_rows, rows, classes * h.dtype().size(), cuda_of(h).map(CudaDevice::card)),
    };
    let buffer = chunked.buffer()?;
    chunked.each(&buffer, false, |c| row_losses(&c.logits, &c.targets, Some(&c.of(&lse)), &c.of(&losses)))?;
    let (loss, share) = mean_loss(&losses, targets)?;
    // Those of one chunk are still there.
    let logits = (chunked.chunk >= rows && is_recorded(&[h, weight])).then_some(buffer);
    Ok(record(&[h, weight], loss, || LinearCrossEntropy { chunked, logits, lse, share, shape: h.shape() }))
}

/// The operands, and how many rows of logits exist at a time.
struct Chunked {
    h: Tensor,       // [rows, d]
    weight: Tensor,  // [V, d]
    targets: Tensor, // [rows]
    chunk: usize,
}

/// One chunk of rows with its logits.
struct Chunk {
    from: usize,
    h: Tensor,       // [n, d]
    logits: Tensor,  // [n, V], in the buffer that all chunks share
    targets: Tensor, // [n]
}

impl Chunk {
    /// This chunk's rows of a tensor of all rows.
    fn of(&self, all: &Tensor) -> Tensor {
        all.view_rows(self.from..self.from + self.targets.elements())
    }
}

impl Chunked {
    /// Room for a chunk's logits.
    fn buffer(&self) -> Result<Tensor> {
        let rows = self.chunk.min(self.h.shape()[0]);
        Tensor::uninit([rows, self.weight.shape()[0]], self.h.dtype(), self.h.device())
    }

    /// Makes every chunk's logits in `buffer`, unless they are there, and calls `f` with them.
    fn each(&self, buffer: &Tensor, there: bool, mut f: impl FnMut(&Chunk) -> Result<()>) -> Result<()> {
        let (rows, d, classes) = (self.h.shape()[0], self.h.shape()[1], self.weight.shape()[0]);
        for from in (0..rows).step_by(self.chunk) {
            let range = from..rows.min(from + self.chunk);
            let n = range.len();
            let (h, targets) = (self.h.view_rows(range.clone()), self.targets.view_rows(range));
            let logits = buffer.view_rows(0..n);
            if !there {
                multiply(&h, false, &self.weight, true, Sizes { batch: 1, m: n, n: classes, k: d }, &logits, false)?;
            }
            f(&Chunk { from, h, logits, targets })?;
        }
        Ok(())
    }
}

struct LinearCrossEntropy {
    chunked: Chunked,
    /// Where they are one chunk.
    logits: Option<Tensor>,
    lse: Tensor,
    share: Tensor,
    shape: crate::tensor::Shape,
}

impl Backward for LinearCrossEntropy {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dloss = grads.output(0)?;
        let Chunked { h, weight, .. } = &self.chunked;
        let (d, classes) = (weight.shape()[1], weight.shape()[0]);
        let dh = grads.wants(0).then(|| Tensor::uninit(h.shape(), h.dtype(), h.device())).transpose()?;
        let target = grads.target(1)?;
        let dw = target.as_ref().map(WeightSum::new).transpose()?;
        let there = self.logits.is_some();
        let buffer = self.logits.map_or_else(|| self.chunked.buffer(), Ok)?;
        self.chunked.each(&buffer, there, |c| {
            gradient(None, &c.targets, &c.of(&self.lse), &self.share, &dloss, &c.logits)?;
            let dlogits = &c.logits; // [n, V]
            let n = c.targets.elements();
            if let Some(dh) = &dh {
                multiply(dlogits, false, weight, false, Sizes { batch: 1, m: n, n: d, k: classes }, &c.of(dh), false)?;
            }
            if let Some(dw) = &dw {
                multiply(dlogits, true, &c.h, false, Sizes { batch: 1, m: classes, n: d, k: n }, &dw.sum, true)?;
            }
            Ok(())
        })?;
        if let (Some(dw), Some(target)) = (dw, target) {
            dw.finish(&target)?;
        }
        match dh {
            Some(dh) => grads.give(0, dh.view(self.shape)),
            None => Ok(()),
        }
    }
}

/// The f32 buffer that chunks add their part of dW to: the target itself, unless it is bf16, which every chunk would round.
struct WeightSum {
    sum: Tensor,
}

impl WeightSum {
    fn new(target: &Target) -> Result<Self> {
        let t = &target.tensor;
        if t.dtype() != DType::F32 {
            return Ok(WeightSum { sum: Tensor::zeros(t.shape(), DType::F32, t.device())? });
        }
        if !target.accumulate {
            t.fill_zero()?;
        }
        Ok(WeightSum { sum: t.clone() })
    }

    fn finish(self, target: &Target) -> Result<()> {
        if target.tensor.dtype() == DType::F32 {
            return Ok(());
        }
        add_sum(&self.sum, [1, 1, self.sum.elements()], target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::{Param, Tape};
    use crate::tensor::Device;

    #[test]
    fn operands_that_do_not_fit_are_refused() {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::cpu()).unwrap();
        let targets = Tensor::from_slice(&[0, 5], [2], &Device::cpu()).unwrap();
        let refused = |h: &[usize], w: &[usize]| linear_cross_entropy(&zeros(h), &zeros(w), &targets, 0).unwrap_err();
        assert!(matches!(refused(&[2, 3], &[6, 4]), Error::Shape { what: "h", .. }));
        assert!(matches!(refused(&[2, 3], &[0, 3]), Error::Shape { what: "the weight", .. }));
        assert!(matches!(refused(&[3, 3], &[6, 3]), Error::Shape { what: "the targets", .. }));
        assert!(refused(&[2, 3], &[5, 3]).to_string().contains("target 5 at position 1"));
    }

    #[test]
    fn one_tensor_may_be_rows_and_weight_and_a_parameter_may_be_bf16() {
        let data: Vec<f32> = (0..12).map(|i| (i * 7 % 5) as f32 / 4.0 - 0.5).collect();
        let targets = Tensor::from_slice(&[1, -1, 0, 3], [4], &Device::cpu()).unwrap();
        let value = Tensor::from_slice(&data, [4, 3], &Device::cpu()).unwrap();
        let gradient = |dtype: DType, chunk: Option<usize>| {
            let param = Param::new("table", &value, dtype).unwrap();
            let tape = Tape::new();
            let table = tape.param(&param);
            let loss = match chunk {
                Some(chunk) => linear_cross_entropy(&table, &table, &targets, chunk),
                None => super::super::cross_entropy(&super::super::matmul_nt(&table, &table).unwrap(), &targets),
            };
            tape.backward(&loss.unwrap()).unwrap();
            param.grad().unwrap().to_vec::<f32>().unwrap()
        };
        let want = gradient(DType::F32, None);
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, 4e-3)] {
            let got = gradient(dtype, Some(3));
            got.iter().zip(&want).for_each(|(g, w)| assert!((g - w).abs() < tolerance, "{got:?} instead of {want:?}"));
        }
    }
}
