//! Cross entropy: the mean over rows r with a target t_r >= 0 of log(sum_v e^logits[r, v]) - logits[r, t_r].
//!
//! dlogits[r, v] = (softmax(logits[r])_v - [v = t_r]) / count * dloss.
//!
//! Statistics are in f32, relative to the largest logit of the row. The backward pass keeps the logits and one log-sum-exp a row.
//! The number of rows that count is found on the device, so that nothing waits for it.

use super::{cuda_of, to_f32};
use crate::cpu::cross_entropy as cpu;
use crate::cpu::embedding::outside;
use crate::cuda::{CudaDevice, Launch};
use crate::error::{Error, Result};
use crate::paths;
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

const FILE: &str = "cross_entropy";

/// Rows and classes of logits and targets that fit each other.
fn sizes(op: &'static str, logits: &Tensor, targets: &Tensor) -> Result<[usize; 2]> {
    logits.expect_float(op, "the logits")?;
    let (rank, classes) = (logits.shape().rank(), logits.shape().last());
    if rank == 0 || classes == 0 {
        return Err(Error::shape(op, "the logits", "[.., at least 1]", logits.shape()));
    }
    check_targets(op, logits, &logits.dims()[..rank - 1], targets, classes)?;
    Ok([targets.elements(), classes])
}

/// The targets of rows of shape `rows` must be i32, of that shape, and (where the host can look) below `classes`.
pub(super) fn check_targets(op: &'static str, beside: &Tensor, rows: &[usize], targets: &Tensor, classes: usize) -> Result<()> {
    targets.expect_dtype(op, "the targets", DType::I32)?;
    targets.expect_device_of(op, "the targets", beside)?;
    if targets.dims() != rows {
        return Err(Error::shape(op, "the targets", format!("{rows:?}"), targets.shape()));
    }
    if !targets.device().is_cuda()
        && let Some((position, target)) = outside(&targets.read::<i32>(op)?, i32::MIN, classes)
    {
        let range = format!("the {classes} classes");
        return Err(Error::Index { op, what: "target", value: target.into(), position: Some(position), range });
    }
    Ok(())
}

/// The mean cross entropy of `logits` `[.., V]` and i32 `targets` `[..]`, as f32 `[1]`. Rows with a negative target do not count;
/// if none counts, the loss and the gradients are 0. A target of V or more is an error: on the CPU at once, on CUDA from the next
/// call that waits for the device.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    const OP: &str = "cross_entropy";
    let [rows, _] = sizes(OP, logits, targets)?;
    let logits = &to_f32(logits)?;
    let lse = Tensor::uninit([rows], DType::F32, logits.device())?;
    let losses = Tensor::uninit([rows], DType::F32, logits.device())?;
    row_losses(logits, targets, Some(&lse), &losses)?;
    let (loss, share) = mean_loss(&losses, targets)?;
    Ok(record(&[logits], loss, || CrossEntropy { logits: logits.detach(), targets: targets.detach(), lse, share }))
}

struct CrossEntropy {
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    share: Tensor,
}

impl Backward for CrossEntropy {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dloss = grads.output(0)?;
        let dlogits = Tensor::uninit(self.logits.shape(), self.logits.dtype(), self.logits.device())?;
        gradient(Some(&self.logits), &self.targets, &self.lse, &self.share, &dloss, &dlogits)?;
        grads.give(0, dlogits)
    }
}

/// The cross entropy of every row of `logits` `[.., V]`, as f32 `[rows]`, untracked: 0 for rows with a negative target.
/// Errors are those of [`cross_entropy`].
pub fn token_losses(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let [rows, _] = sizes("token_losses", logits, targets)?;
    let losses = Tensor::uninit([rows], DType::F32, logits.device())?;
    row_losses(&to_f32(&logits.detach())?, targets, None, &losses)?;
    Ok(losses)
}

/// The i32 index `[..]` of the largest value of the last axis of `x` `[.., V]`, the first among equals, untracked. NaN is passed
/// over.
pub fn argmax(x: &Tensor) -> Result<Tensor> {
    const OP: &str = "argmax";
    x.expect_float(OP, "the operand")?;
    let (rank, length) = (x.shape().rank(), x.shape().last());
    if rank == 0 || length == 0 || length > i32::MAX as usize {
        return Err(Error::shape(OP, "the operand", "[.., at least 1]", x.shape()));
    }
    let x = to_f32(&x.detach())?;
    let y = Tensor::uninit(&x.dims()[..rank - 1], DType::I32, x.device())?;
    match cuda_of(&x) {
        None => cpu::argmax(&x.read::<f32>(OP)?, &mut y.write::<i32>(OP)?, length),
        Some(cuda) => over_rows(cuda, x.dtype(), OP, y.elements(), length)?.arg(&x).arg(&y).arg(y.elements()).arg(length).run()?,
    }
    Ok(y)
}

/// A launch over rows: the kernel for their length, a warp or a block a row.
fn over_rows<'a>(cuda: &'a CudaDevice, dtype: DType, name: &str, rows: usize, length: usize) -> Result<Launch<'a>> {
    if paths::short_row(length) {
        Ok(cuda.kernel(FILE, dtype, &format!("{name}_short"))?.grid(rows.div_ceil(8), 1, 1))
    } else {
        Ok(cuda.kernel(FILE, dtype, name)?.grid(rows, 1, 1))
    }
}

/// losses[r], and where asked lse[r], of f32 or (on CUDA) bf16 logits `[rows, V]`.
pub(super) fn row_losses(logits: &Tensor, targets: &Tensor, lse: Option<&Tensor>, losses: &Tensor) -> Result<()> {
    const OP: &str = "cross_entropy";
    let (rows, classes) = (targets.elements(), logits.shape().last());
    let Some(cuda) = cuda_of(logits) else {
        let own = Tensor::uninit([if lse.is_some() { 0 } else { rows }], DType::F32, logits.device())?;
        let mut lse = lse.unwrap_or(&own).write::<f32>(OP)?;
        let (logits, targets) = (logits.read::<f32>(OP)?, targets.read::<i32>(OP)?);
        cpu::row_log_sums(&logits, &targets, &mut lse, classes);
        cpu::row_losses(&logits, &targets, &lse, &mut losses.write::<f32>(OP)?, classes);
        return Ok(());
    };
    let launch = over_rows(cuda, logits.dtype(), "row_losses", rows, classes)?;
    launch.arg(logits).arg(targets).arg(lse).arg(losses).arg(rows).arg(classes).arg(cuda.fault_ptr()).run()
}

/// The mean loss `[1]` of the rows that count, and one over their number `[1]`; zeros where none does.
pub(super) fn mean_loss(losses: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
    const OP: &str = "cross_entropy";
    let loss = Tensor::uninit([1], DType::F32, losses.device())?;
    let share = Tensor::uninit([1], DType::F32, losses.device())?;
    match cuda_of(losses) {
        None => {
            let (mean, one) = cpu::mean_loss(&losses.read::<f32>(OP)?, &targets.read::<i32>(OP)?);
            loss.write::<f32>(OP)?[0] = mean;
            share.write::<f32>(OP)?[0] = one;
        }
        Some(cuda) => {
            let launch = cuda.kernel(FILE, DType::F32, "mean_loss")?.block(1024);
            launch.arg(losses).arg(targets).arg(&loss).arg(&share).arg(targets.elements()).run()?;
        }
    }
    Ok((loss, share))
}

/// dlogits = (softmax - onehot) * share * dloss; from what is in `dlogits` where no `logits` are given.
pub(super) fn gradient(
    logits: Option<&Tensor>,
    targets: &Tensor,
    lse: &Tensor,
    share: &Tensor,
    dloss: &Tensor,
    dlogits: &Tensor,
) -> Result<()> {
    const OP: &str = "cross_entropy";
    let (rows, classes) = (targets.elements(), dlogits.shape().last());
    let Some(cuda) = cuda_of(dlogits) else {
        let scale = share.read::<f32>(OP)?[0] * dloss.read::<f32>(OP)?[0];
        let logits = logits.map(|t| t.read::<f32>(OP)).transpose()?;
        let (targets, lse) = (targets.read::<i32>(OP)?, lse.read::<f32>(OP)?);
        cpu::gradient(logits.as_deref(), &targets, &lse, scale, &mut dlogits.write::<f32>(OP)?, classes);
        return Ok(());
    };
    let launch = over_rows(cuda, dlogits.dtype(), "cross_entropy_backward", rows, classes)?;
    let launch = launch.arg(logits.unwrap_or(dlogits)).arg(targets).arg(lse).arg(share).arg(dloss);
    launch.arg(dlogits).arg(rows).arg(classes).run()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Device;

    fn floats(data: &[f32], shape: &[usize]) -> Tensor {
        Tensor::from_slice(data, shape, &Device::cpu()).unwrap()
    }

    fn targets(data: &[i32]) -> Tensor {
        Tensor::from_slice(data, [data.len()], &Device::cpu()).unwrap()
    }

    #[test]
    fn misuse_is_refused_with_what_was_expected() {
        let logits = floats(&[0.0; 6], &[2, 3]);
        let message = cross_entropy(&logits, &targets(&[2, 3])).unwrap_err().to_string();
        assert!(message.contains("target 3 at position 1") && message.contains("3 classes"), "{message}");
        assert!(matches!(cross_entropy(&logits, &targets(&[0])), Err(Error::Shape { .. })));
        assert!(matches!(token_losses(&logits, &floats(&[0.0; 2], &[2])), Err(Error::DType { .. })));
        assert!(matches!(cross_entropy(&targets(&[0]), &targets(&[0])), Err(Error::DType { .. })));
        assert!(matches!(cross_entropy(&floats(&[], &[2, 0]), &targets(&[0, 0])), Err(Error::Shape { .. })));
        assert!(matches!(argmax(&floats(&[], &[2, 0])), Err(Error::Shape { .. })));
    }

    #[test]
    fn huge_and_masked_logits_stay_finite() {
        let logits = floats(&[1e4, 0.0, f32::NEG_INFINITY, -1e4, 1e4, 1e4], &[2, 3]);
        let losses = token_losses(&logits, &targets(&[1, 2])).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(losses[0], 1e4);
        assert!((losses[1] - std::f32::consts::LN_2).abs() < 1e-3);
    }

    #[test]
    fn bf16_logits_give_an_f32_loss() {
        let logits = super::super::cast(&floats(&[0.0; 4], &[1, 4]), DType::BF16).unwrap();
        let loss = cross_entropy(&logits, &targets(&[1])).unwrap();
        assert_eq!(loss.dtype(), DType::F32);
        assert!((loss.item().unwrap() - 4f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn the_largest_value_passes_over_nan() {
        let x = floats(&[f32::NAN, 1.0, 2.0, 2.0, f32::NAN, f32::NAN, f32::NAN, f32::NAN], &[2, 4]);
        assert_eq!(argmax(&x).unwrap().to_vec::<i32>().unwrap(), [2, 0]);
    }
}
