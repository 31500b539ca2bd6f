//! Tensors joined along one axis, or put in place of rows of another. Going back, each part gets its range of the gradient.

use std::ops::Range;

use super::slice::Stretches;
use crate::cpu::slice::Stretch;
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, record};
use crate::tensor::Tensor;

const OP: &str = "concat";

/// The parts one after another along `axis`. Refuses an empty list, an axis that the parts do not have, and parts that differ in type,
/// device or any other axis.
pub fn concat(parts: &[&Tensor], axis: usize) -> Result<Tensor> {
    let Some((first, rest)) = parts.split_first() else {
        return Err(Error::argument(OP, "expected at least one tensor, got an empty list"));
    };
    let shape = first.shape();
    if axis >= shape.rank() {
        return Err(Error::shape(OP, "the parts", format!("more than {axis} axes"), shape));
    }
    for part in rest {
        part.expect_dtype(OP, "every part", first.dtype())?;
        part.expect_device_of(OP, "a later part", first)?;
        if part.shape().rank() != shape.rank() || part.shape().with(axis, shape[axis]) != shape {
            return Err(Error::shape(OP, "every part", format!("{shape}, in which only axis {axis} may differ"), part.shape()));
        }
    }
    if rest.is_empty() {
        return Ok((*first).clone());
    }
    let lengths: Vec<usize> = parts.iter().map(|p| p.shape()[axis]).collect();
    let y = Tensor::uninit(shape.with(axis, lengths.iter().sum()), first.dtype(), first.device())?;
    let mut start = 0;
    for (part, &len) in parts.iter().zip(&lengths) {
        if axis == 0 {
            y.view_rows(start..start + len).copy_from(part)?;
        } else {
            into_whole(&y, axis, start, len).copy(part, &y)?;
        }
        start += len;
    }
    Ok(record(parts, y, || Concat { axis, lengths }))
}

/// `first` and after it `rest`, along the leading axis. Takes `rest`: where nobody else has its buffer and there is room in front of it
/// ([`Linear::room`](super::Linear::room)), it stays where it is. Refuses what [`concat()`] refuses.
pub fn prepend(first: &Tensor, rest: Tensor) -> Result<Tensor> {
    let fits = first.dtype() == rest.dtype() && first.device() == rest.device() && first.shape().rank() == rest.shape().rank();
    if fits && first.shape().rank() > 0 && !first.is_tracked() && !rest.is_tracked() {
        let rows = first.shape()[0];
        if first.shape().with(0, rest.shape()[0]) == rest.shape()
            && let Some(whole) = rest.with_front(rows)
        {
            whole.view_rows(0..rows).copy_from(first)?;
            return Ok(whole);
        }
    }
    concat(&[first, &rest], 0)
}

/// `whole` with rows `range` of its leading axis replaced by `part`. One pass over the gradient, where [`concat()`] of what lies before and behind
/// would take apart and add up all of it. Refuses a part that does not fit there.
pub fn replace_rows(whole: &Tensor, range: Range<usize>, part: &Tensor) -> Result<Tensor> {
    const OP: &str = "replace_rows";
    let shape = whole.shape();
    if shape.rank() == 0 || range.start > range.end || range.end > shape[0] {
        return Err(Error::shape(OP, "the whole", format!("[at least {}, ..]", range.end), shape));
    }
    part.expect_dtype(OP, "the part", whole.dtype())?;
    part.expect_device_of(OP, "the part", whole)?;
    part.expect_shape(OP, "the part", shape.with(0, range.len()))?;
    let y = Tensor::uninit(shape, whole.dtype(), whole.device())?;
    for rest in [0..range.start, range.end..shape[0]].into_iter().filter(|rest| !rest.is_empty()) {
        y.view_rows(rest.clone()).copy_from(&whole.view_rows(rest))?;
    }
    y.view_rows(range.clone()).copy_from(&part.detach())?;
    Ok(record(&[whole, part], y, || ReplaceRows { range }))
}

struct ReplaceRows {
    range: Range<usize>,
}

impl Backward for ReplaceRows {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output_owned(0)?;
        let own = dy.view_rows(self.range);
        if !grads.wants(0) {
            return grads.give(1, own);
        }
        if grads.wants(1) {
            grads.give(1, super::copy_of(&own)?)?;
        }
        own.fill_zero()?;
        drop(own);
        grads.give(0, dy)
    }
}

/// A part's rows to their place in the rows of the whole.
fn into_whole(whole: &Tensor, axis: usize, start: usize, len: usize) -> Stretches {
    let shape = whole.shape();
    let inner = shape.inner(axis);
    Stretches {
        rows: shape.outer(axis),
        width: len * inner,
        from: Stretch { stride: len * inner, at: 0 },
        to: Stretch { stride: shape[axis] * inner, at: start * inner },
    }
}

struct Concat {
    axis: usize,
    lengths: Vec<usize>,
}

impl Backward for Concat {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let Concat { axis, lengths } = *self;
        let dy = grads.output(0)?;
        let mut start = 0;
        for (i, len) in lengths.into_iter().enumerate() {
            if grads.wants(i) {
                let part = if axis == 0 { dy.view_rows(start..start + len) } else { super::narrow(&dy, axis, start, len)? };
                grads.give(i, part)?;
            }
            start += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::Tape;
    use crate::tensor::{DType, Device};

    fn zeros(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::cpu()).unwrap()
    }

    #[test]
    fn every_misuse_is_named() {
        let x = zeros(&[2, 3], DType::F32);
        let message = |parts: &[&Tensor], axis| concat(parts, axis).unwrap_err().to_string();
        assert!(message(&[], 0).contains("empty list"));
        assert!(message(&[&x], 2).contains("more than 2 axes"));
        assert!(message(&[&x, &zeros(&[2, 3], DType::I32)], 0).contains("f32, got i32"));
        let e = message(&[&x, &zeros(&[3, 3], DType::F32)], 1);
        assert!(e.contains("only axis 1 may differ") && e.contains("[3, 3]"), "{e}");
        assert!(message(&[&x, &zeros(&[2, 3, 1], DType::F32)], 1).contains("[2, 3, 1]"));
    }

    #[test]
    fn what_has_room_in_front_and_no_other_owner_stays_where_it_is() {
        let numbers = |from: i32, n: i32, rows: usize| {
            let data: Vec<i32> = (from..from + n).collect();
            Tensor::from_slice(&data, [rows, 2], &Device::cpu()).unwrap()
        };
        let first = numbers(0, 2, 1);
        let rest = |whole: &Tensor| whole.view_rows(1..3);
        let whole = numbers(8, 6, 3);
        let (alone, place) = (rest(&whole), whole.ptr());
        drop(whole);
        let y = prepend(&first, alone).unwrap();
        assert_eq!((y.ptr(), y.to_vec::<i32>().unwrap()), (place, vec![0, 1, 10, 11, 12, 13]));
        // Someone else may still want what lies in front.
        let whole = numbers(8, 6, 3);
        let y = prepend(&first, rest(&whole)).unwrap();
        assert_eq!((y.dims(), y.to_vec::<i32>().unwrap()), (&[3, 2][..], vec![0, 1, 10, 11, 12, 13]));
        assert_eq!(whole.to_vec::<i32>().unwrap(), [8, 9, 10, 11, 12, 13]);
        // No room.
        assert_eq!(prepend(&numbers(0, 4, 2), rest(&numbers(8, 6, 3))).unwrap().to_vec::<i32>().unwrap().len(), 8);
        assert!(prepend(&first, zeros(&[2, 3], DType::I32)).unwrap_err().to_string().contains("only axis 0 may differ"));
    }

    #[test]
    fn integers_can_be_joined() {
        let x = Tensor::from_slice(&[1, 2], [2, 1], &Device::cpu()).unwrap();
        let y = Tensor::from_slice(&[3, 4, 5, 6], [2, 2], &Device::cpu()).unwrap();
        assert_eq!(concat(&[&x, &y], 1).unwrap().to_vec::<i32>().unwrap(), [1, 3, 4, 2, 5, 6]);
    }

    #[test]
    fn a_bf16_part_given_twice_gets_both_gradients() {
        for axis in [0, 1] {
            let tape = Tape::new();
            let x = tape.variable(&zeros(&[1, 2], DType::BF16));
            let y = concat(&[&x, &x], axis).unwrap();
            let seed = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], y.shape(), &Device::cpu()).unwrap();
            tape.backward_from(&[(&y, crate::ops::cast(&seed, DType::BF16).unwrap())]).unwrap();
            assert_eq!(tape.grad(&x).unwrap().to_f32_vec().unwrap(), [4.0, 6.0]);
        }
    }
}
