//! y = a + b, a - b, a * b, and a scaled by a number. b may be smaller: its axes, aligned at the right, are a's or 1.

use half::bf16;

use super::reduce::sum_middle_into;
use super::{cast, cuda_of, to_f32, via_f32};
use crate::cpu::elementwise;
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Tensor};

#[derive(Clone, Copy, PartialEq)]
enum Arithmetic {
    Add,
    Sub,
    Mul,
}

impl Arithmetic {
    fn op(self) -> &'static str {
        match self {
            Arithmetic::Add => "add",
            Arithmetic::Sub => "sub",
            Arithmetic::Mul => "mul",
        }
    }
}

/// How a smaller operand repeats over a larger one: the larger is `[outer, middle, inner]`, and the smaller has a stride, possibly 0,
/// along each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) sizes: [usize; 3],
    pub(crate) strides: [usize; 3],
}

impl Spread {
    /// Whether the smaller operand has the larger one's shape.
    pub(crate) fn is_same(&self) -> bool {
        self.sizes[0] == 1 && self.sizes[1] == 1 && self.strides[2] == 1
    }
}

/// a + b.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary(Arithmetic::Add, a, b)
}

/// a - b.
pub fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary(Arithmetic::Sub, a, b)
}

/// a * b, element by element.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    binary(Arithmetic::Mul, a, b)
}

/// How `b` spreads over `a`, or an error if it does not.
fn spread(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Spread> {
    let refuse = || Error::shape(op, "the second operand", format!("that repeats over {}", a.shape()), b.shape());
    let (ad, bd) = (a.dims(), b.dims());
    if bd.len() > ad.len() {
        return Err(refuse());
    }
    // Runs of axes that all repeat, or all do not: (size, repeats).
    let mut runs: Vec<(usize, bool)> = Vec::new();
    for (i, &size) in ad.iter().enumerate() {
        let own = (i + bd.len()).checked_sub(ad.len()).map_or(1, |j| bd[j]);
        if own != size && own != 1 {
            return Err(refuse());
        }
        if size == 1 {
            continue;
        }
        let repeats = own == 1;
        match runs.last_mut() {
            Some((length, same)) if *same == repeats => *length *= size,
            _ => runs.push((size, repeats)),
        }
    }
    if runs.len() > 3 {
        return Err(refuse());
    }
    while runs.len() < 3 {
        runs.insert(0, (1, true));
    }
    let mut stride = 1;
    let mut s = Spread { sizes: [1; 3], strides: [0; 3] };
    for (i, &(size, repeats)) in runs.iter().enumerate().rev() {
        s.sizes[i] = size;
        if !repeats {
            s.strides[i] = stride;
            stride *= size;
        }
    }
    if runs[2] == (1, true) {
        s.strides[2] = 1; // both hold one element
    }
    Ok(s)
}

fn binary(kind: Arithmetic, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let op = kind.op();
    a.expect_float(op, "the first operand")?;
    b.expect_dtype(op, "the second operand", a.dtype())?;
    b.expect_device_of(op, "the second operand", a)?;
    if via_f32(a) {
        return cast(&binary(kind, &to_f32(a)?, &to_f32(b)?)?, DType::BF16);
    }
    let s = spread(op, a, b)?;
    let y = apply(kind, a, b, s)?;
    Ok(record(&[a, b], y, || Binary { kind, a: a.detach(), b: b.detach(), spread: s }))
}

fn apply(kind: Arithmetic, a: &Tensor, b: &Tensor, s: Spread) -> Result<Tensor> {
    let op = kind.op();
    let y = Tensor::uninit(a.shape(), a.dtype(), a.device())?;
    match cuda_of(a) {
        None => {
            let (x, z, y) = (a.read::<f32>(op)?, b.read::<f32>(op)?, &mut y.write::<f32>(op)?);
            match (kind, s.is_same()) {
                (Arithmetic::Add, true) => elementwise::zip(&x, &z, y, |a, b| a + b),
                (Arithmetic::Sub, true) => elementwise::zip(&x, &z, y, |a, b| a - b),
                (Arithmetic::Mul, true) => elementwise::zip(&x, &z, y, |a, b| a * b),
                (Arithmetic::Add, false) => elementwise::zip_spread(&x, &z, y, s, |a, b| a + b),
                (Arithmetic::Sub, false) => elementwise::zip_spread(&x, &z, y, s, |a, b| a - b),
                (Arithmetic::Mul, false) => elementwise::zip_spread(&x, &z, y, s, |a, b| a * b),
            }
        }
        Some(cuda) => {
            let n = a.elements();
            let mut launch = cuda.kernel("elementwise", a.dtype(), op)?.cover(n).arg(a).arg(b).arg(&y).arg(n);
            for value in [s.sizes[1], s.sizes[2], s.strides[0], s.strides[1], s.strides[2]] {
                launch = launch.arg(value);
            }
            launch.run()?;
        }
    }
    Ok(y)
}

struct Binary {
    kind: Arithmetic,
    a: Tensor,
    b: Tensor,
    spread: Spread,
}

impl Backward for Binary {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        if grads.wants(1) {
            let full = match self.kind {
                Arithmetic::Add => dy.clone(),
                Arithmetic::Sub => scaled(&dy, -1.0)?,
                Arithmetic::Mul => apply(Arithmetic::Mul, &dy, &self.a, spread("mul", &dy, &self.a)?)?,
            };
            let db = if self.spread.is_same() { full } else { gather(&full, self.spread, &self.b)? };
            grads.give(1, db.view(self.b.shape()))?;
        }
        if grads.wants(0) {
            let da = match self.kind {
                Arithmetic::Add | Arithmetic::Sub => dy,
                Arithmetic::Mul => apply(Arithmetic::Mul, &dy, &self.b, self.spread)?,
            };
            grads.give(0, da)?;
        }
        Ok(())
    }
}

/// Sums a gradient over the axes that `b` was repeated along.
fn gather(full: &Tensor, s: Spread, b: &Tensor) -> Result<Tensor> {
    let [outer, middle, inner] = s.sizes;
    let mut sum = full.clone();
    let mut sizes = [outer, middle, inner];
    for axis in [2, 1, 0] {
        if s.strides[axis] == 0 && sizes[axis] != 1 {
            let around = |range: std::ops::Range<usize>| range.map(|i| sizes[i]).product::<usize>();
            let (before, after) = (around(0..axis), around(axis + 1..3));
            let next = Tensor::uninit([before * after], DType::F32, full.device())?;
            sum_middle_into(&sum, [before, sizes[axis], after], &next, false)?;
            sum = next;
            sizes[axis] = 1;
        }
    }
    cast(&sum.view(b.shape()), b.dtype())
}

/// c * a, for a number c.
pub fn scale(a: &Tensor, c: f32) -> Result<Tensor> {
    a.expect_float("scale", "the operand")?;
    if via_f32(a) {
        return cast(&scale(&to_f32(a)?, c)?, DType::BF16);
    }
    let y = scaled(&a.detach(), c)?;
    Ok(record(&[a], y, || Scale { c }))
}

fn scaled(a: &Tensor, c: f32) -> Result<Tensor> {
    let y = Tensor::uninit(a.shape(), a.dtype(), a.device())?;
    match cuda_of(a) {
        None => elementwise::map(&a.read::<f32>("scale")?, &mut y.write::<f32>("scale")?, |a| c * a),
        Some(cuda) => {
            let n = a.elements();
            cuda.kernel("elementwise", a.dtype(), "scale")?.cover(n).arg(a).arg(&y).arg(n).arg(c).run()?;
        }
    }
    Ok(y)
}

struct Scale {
    c: f32,
}

impl Backward for Scale {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        grads.give(0, scaled(&dy, self.c)?)
    }
}

/// sum += x, in place. The sum may be f32 where x is bf16.
pub(crate) fn accumulate(sum: &Tensor, x: &Tensor) -> Result<()> {
    const OP: &str = "accumulate";
    x.expect_shape(OP, "the gradient", sum.shape())?;
    x.expect_device_of(OP, "the gradient", sum)?;
    let name = match (sum.dtype(), x.dtype()) {
        (DType::F32, DType::F32) => "add_f32_to_f32",
        (DType::F32, DType::BF16) => "add_bf16_to_f32",
        (DType::BF16, DType::BF16) => "add_bf16_to_bf16",
        _ => return Err(Error::Bug(format!("{OP}: a gradient of {} cannot be added to one of {}", x.dtype(), sum.dtype()))),
    };
    match cuda_of(sum) {
        None => match (sum.dtype(), x.dtype()) {
            (DType::F32, DType::F32) => elementwise::update(&mut sum.write::<f32>(OP)?, &x.read::<f32>(OP)?, |s, x| s + x),
            (DType::F32, _) => {
                elementwise::update(&mut sum.write::<f32>(OP)?, &x.read::<bf16>(OP)?, |s, x| s + elementwise::widen(x));
            }
            _ => elementwise::update(&mut sum.write::<bf16>(OP)?, &x.read::<bf16>(OP)?, |s, x| {
                elementwise::round_bf16(elementwise::widen(s) + elementwise::widen(x))
            }),
        },
        Some(cuda) => {
            let n = x.elements();
            cuda.kernel("cast", DType::F32, name)?.cover(n).arg(sum).arg(x).arg(n).run()?;
        }
    }
    Ok(())
}

/// a + b of gradients, in a new buffer.
pub(crate) fn sum_of(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let sum = super::copy_of(a)?;
    accumulate(&sum, b)?;
    Ok(sum)
}
