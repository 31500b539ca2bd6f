//! Layer norm y = (x - mean) / sqrt(var + eps) * gain + bias, and RMS norm y = x / sqrt(mean(x^2) + eps) * gain, over the last axis.
//!
//! The backward pass keeps x alone and computes mean and deviation again: they cost one pass over a row that has to be read anyway.
//! Statistics are in f32. Gains and biases may differ between groups of rows, for stacked layers.

use super::matmul::add_sum;
use super::reduce::sum_halves_into;
use super::{cast, cuda_of, to_f32, via_f32};
use crate::cpu::norm as cpu;
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use crate::paths::{self, NormPath};
use crate::tape::{Backward, Grads, Target, record};
use crate::tensor::{DType, Tensor};

/// What is normalised, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) groups: usize,
    /// Rows of a group.
    pub(crate) m: usize,
    pub(crate) d: usize,
    pub(crate) eps: f32,
    /// Layer norm subtracts the mean, RMS norm does not.
    pub(crate) centred: bool,
}

/// Layer norm. x is `[G, .., d]` with gain and bias `[G, d]`, or `[.., d]` with `[d]`; other shapes are refused.
pub fn layer_norm(x: &Tensor, gain: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
    normalise("layer_norm", x, gain, Some(bias), eps)
}

/// RMS norm. x is `[G, .., d]` with gain `[G, d]`, or `[.., d]` with `[d]`; other shapes are refused.
pub fn rms_norm(x: &Tensor, gain: &Tensor, eps: f32) -> Result<Tensor> {
    normalise("rms_norm", x, gain, None, eps)
}

/// Layer norm with a bias, RMS norm without.
fn normalise(op: &'static str, x: &Tensor, gain: &Tensor, bias: Option<&Tensor>, eps: f32) -> Result<Tensor> {
    x.expect_float(op, "x")?;
    for (what, t) in [("the gain", Some(gain)), ("the bias", bias)] {
        if let Some(t) = t {
            t.expect_dtype(op, what, x.dtype())?;
            t.expect_device_of(op, what, x)?;
        }
    }
    if !(eps >= 0.0 && eps.is_finite()) {
        return Err(Error::argument(op, format!("expected eps of at least 0, got {eps}")));
    }
    let (shape, d) = (x.shape(), x.shape().last());
    if shape.rank() == 0 || d == 0 {
        return Err(Error::shape(op, "x", "[.., at least 1]", shape));
    }
    let grouped = shape.rank() >= 2 && gain.shape().rank() == 2;
    let groups = if grouped { shape[0] } else { 1 };
    for (what, t) in [("the gain", Some(gain)), ("the bias", bias)] {
        let Some(t) = t else { continue };
        if !(grouped && t.dims() == [groups, d] || !grouped && t.dims() == [d]) {
            let expected = if shape.rank() >= 2 { format!("[{d}] or [{}, {d}] for x {shape}", shape[0]) } else { format!("[{d}]") };
            return Err(Error::shape(op, what, expected, t.shape()));
        }
    }
    if via_f32(x) {
        let bias = bias.map(to_f32).transpose()?;
        return cast(&normalise(op, &to_f32(x)?, &to_f32(gain)?, bias.as_ref(), eps)?, DType::BF16);
    }
    let norm = Norm { groups, m: shape.rows() / groups.max(1), d, eps, centred: bias.is_some() };
    let y = Tensor::uninit(shape, x.dtype(), x.device())?;
    match cuda_of(x) {
        None => {
            let bias = bias.map(|b| b.read::<f32>(op)).transpose()?;
            cpu::forward(&x.read::<f32>(op)?, &gain.read::<f32>(op)?, bias.as_deref(), &mut y.write::<f32>(op)?, norm);
        }
        Some(cuda) => {
            let rows = shape.rows();
            let path = Rows::of(d, &[Some(x), Some(gain), bias, Some(&y)]);
            let blocks = rows.div_ceil(path.rows());
            let launch = cuda.kernel("norm", x.dtype(), &path.kernel("norm"))?.grid(blocks, 1, 1);
            launch.arg(x).arg(gain).arg(bias).arg(&y).arg(rows).arg(norm.m).arg(d).arg(eps).run()?;
        }
    }
    let inputs: Vec<&Tensor> = [Some(x), Some(gain), bias].into_iter().flatten().collect();
    Ok(record(&inputs, y, || NormBackward { op, x: x.detach(), gain: gain.detach(), norm }))
}

/// A launch of the kernels for a row of d elements.
#[derive(Clone, Copy)]
struct Rows(NormPath);

impl Rows {
    fn of(d: usize, tensors: &[Option<&Tensor>]) -> Self {
        let mut tensors = tensors.iter().flatten();
        let width = 16 / tensors.clone().next().map_or(4, |t| t.dtype().size());
        Rows(paths::norm(d, width, tensors.all(|t| t.ptr().is_multiple_of(16))))
    }

    /// The kernel's name in norm.cu.
    fn kernel(self, stem: &str) -> String {
        match self.0 {
            NormPath::Vector { lanes, held } => format!("{stem}_vector_{lanes}_{held}"),
            NormPath::Scalar { lanes, held } => format!("{stem}_scalar_{lanes}_{held}"),
            NormPath::WideVector => format!("{stem}_wide_vector"),
            NormPath::Wide => format!("{stem}_wide"),
        }
    }

    /// Rows that a block of 256 threads works on at a time.
    fn rows(self) -> usize {
        match self.0 {
            NormPath::Vector { lanes, .. } | NormPath::Scalar { lanes, .. } => 256 / lanes,
            NormPath::WideVector | NormPath::Wide => 1,
        }
    }

    /// Rows whose gain and bias gradients one block sums: as many blocks as the multiprocessors hold, but at least two rows for each row of
    /// lanes.
    fn rows_per_sum(self, cuda: &CudaDevice, groups: usize, m: usize) -> usize {
        let blocks = cuda.card().multiprocessors * paths::norm_blocks(self.0);
        let wanted = blocks.div_ceil(groups.max(1));
        m.div_ceil(wanted.max(1)).max(2 * self.rows())
    }

    /// Bytes of shared memory that a block gathers its sums in.
    fn shared(self, d: usize) -> usize {
        match self.0 {
            NormPath::Vector { .. } | NormPath::Scalar { .. } => self.rows() * d * size_of::<f32>(),
            NormPath::WideVector | NormPath::Wide => 0,
        }
    }
}

struct NormBackward {
    op: &'static str,
    x: Tensor,
    gain: Tensor,
    norm: Norm,
}

impl Backward for NormBackward {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let NormBackward { op, x, gain, norm } = *self;
        let Norm { groups, m, d, centred, .. } = norm;
        let dy = grads.output(0)?;
        // A parameter's gradient is f32 whatever it computes in, and the kernel writes the type of x: a buffer of its own then.
        let apart = grads.input_leaf(0).is_some_and(|sum| sum.dtype() != x.dtype());
        let target = match if apart { None } else { grads.target(0)? } {
            Some(target) => target,
            None => Target { tensor: Tensor::uninit(x.shape(), x.dtype(), x.device())?, accumulate: false },
        };
        let Target { tensor: dx, accumulate } = &target;
        let path = Rows::of(d, &[Some(&x), Some(&gain), Some(&dy), Some(dx)]);
        let length = match cuda_of(&x) {
            None => cpu::rows_per_sum(m, d),
            Some(cuda) => path.rows_per_sum(cuda, groups, m),
        };
        let pieces = m.div_ceil(length);
        // The gain's sums, then the bias'.
        let sums = Tensor::uninit([1 + usize::from(centred), groups, pieces, d], DType::F32, x.device())?;
        let dgain = sums.view_rows(0..1);
        let dbias = centred.then(|| sums.view_rows(1..2));
        match cuda_of(&x) {
            None => {
                let mut sums = sums.write::<f32>(op)?;
                let (dgain, dbias) = sums.split_at_mut(groups * pieces * d);
                let inputs = (&*x.read::<f32>(op)?, &*gain.read::<f32>(op)?, &*dy.read::<f32>(op)?);
                cpu::backward(inputs, (&mut dx.write::<f32>(op)?, *accumulate), dgain, centred.then_some(dbias), norm);
            }
            Some(cuda) => {
                let launch = cuda.kernel("norm", x.dtype(), &path.kernel("norm_backward"))?.grid(pieces, groups, 1);
                let launch = launch.shared(path.shared(d));
                let launch = launch.arg(&x).arg(&gain).arg(&dy).arg(dx).arg(&dgain).arg(dbias.as_ref());
                launch.arg(length).arg(m).arg(d).arg(norm.eps).arg(*accumulate).run()?;
            }
        }
        if apart {
            grads.give(0, dx.clone())?;
        }
        let sizes = [groups, pieces, d];
        // Both into the buffers of two parameters, at once.
        if let (Some(gain), Some(bias)) = (grads.input_leaf(1), if centred { grads.input_leaf(2) } else { None })
            && gain.ptr() != bias.ptr()
        {
            return sum_halves_into(&sums, sizes, [&gain, &bias], true);
        }
        if let Some(t) = grads.target(1)? {
            add_sum(&dgain, sizes, &t)?;
        }
        if let Some(dbias) = dbias
            && let Some(t) = grads.target(2)?
        {
            add_sum(&dbias, sizes, &t)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Device;

    fn zeros(shape: &[usize]) -> Tensor {
        Tensor::zeros(shape, DType::F32, &Device::cpu()).unwrap()
    }

    #[test]
    fn a_gain_that_does_not_fit_is_refused_with_the_shapes_that_would() {
        let e = layer_norm(&zeros(&[2, 3, 4]), &zeros(&[3, 4]), &zeros(&[3, 4]), 1e-5).unwrap_err().to_string();
        assert!(e.contains("the gain") && e.contains("[4] or [2, 4]") && e.contains("[3, 4]"), "{e}");
        let e = layer_norm(&zeros(&[2, 4]), &zeros(&[4]), &zeros(&[2, 4]), 1e-5).unwrap_err().to_string();
        assert!(e.contains("the bias"), "{e}");
        let e = rms_norm(&zeros(&[4]), &zeros(&[5]), 1e-5).unwrap_err().to_string();
        assert!(e.contains("[4]") && e.contains("[5]"), "{e}");
    }

    #[test]
    fn empty_rows_integers_and_a_negative_eps_are_refused() {
        assert!(matches!(rms_norm(&zeros(&[3, 0]), &zeros(&[0]), 1e-5), Err(Error::Shape { .. })));
        let ids = Tensor::zeros([4], DType::I32, &Device::cpu()).unwrap();
        assert!(matches!(rms_norm(&ids, &zeros(&[4]), 1e-5), Err(Error::DType { .. })));
        assert!(matches!(rms_norm(&zeros(&[4]), &zeros(&[4]), -1.0), Err(Error::Argument { .. })));
        assert!(matches!(rms_norm(&zeros(&[4]), &zeros(&[4]), f32::NAN), Err(Error::Argument { .. })));
    }

    #[test]
    fn no_rows_give_no_rows() {
        assert_eq!(rms_norm(&zeros(&[0, 4]), &zeros(&[4]), 1e-5).unwrap().dims(), [0, 4]);
    }
}
