//! Elements under another shape, rows of the leading axis, and rows that gradients stop at. None copies.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, Target, leaf_rows, record, record_all};
use crate::tensor::{Shape, Tensor};

/// The elements of x with another shape.
pub fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    if shape.elements() != x.elements() {
        return Err(Error::shape("reshape", "the operand", format!("{} elements, as {shape}", shape.elements()), x.shape()));
    }
    let before = x.shape();
    Ok(record(&[x], x.view(shape), || Reshape { before }))
}

struct Reshape {
    before: Shape,
}

impl Backward for Reshape {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        grads.give(0, dy.view(self.before))
    }
}

/// Rows `range` of the leading axis, sharing the buffer. Of a stacked parameter `[L, ...]` this takes layers, and their gradient goes
/// straight to the same layers of the parameter's gradient.
pub fn rows(x: &Tensor, range: Range<usize>) -> Result<Tensor> {
    if x.shape().rank() == 0 || range.start > range.end || range.end > x.shape()[0] {
        return Err(Error::shape("rows", "the operand", format!("[at least {}, ...]", range.end), x.shape()));
    }
    let view = x.view_rows(range.clone());
    if let Some(leaf) = leaf_rows(x, &view, range.clone()) {
        return Ok(leaf);
    }
    Ok(record(&[x], view, || Rows { range }))
}

struct Rows {
    range: Range<usize>,
}

impl Backward for Rows {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        let Some(target) = grads.target(0)? else { return Ok(()) };
        let Target { tensor, accumulate } = target;
        if accumulate {
            return super::accumulate(&tensor.view_rows(self.range), &dy);
        }
        for rest in [0..self.range.start, self.range.end..tensor.shape()[0]].into_iter().filter(|r| !r.is_empty()) {
            tensor.view_rows(rest).fill_zero()?;
        }
        tensor.view_rows(self.range).copy_from(&dy)
    }
}

/// Rows of the leading axis before `at` and from there on, sharing the buffer: as [`rows`] twice, with one pass over the gradient.
pub fn split_rows(x: &Tensor, at: usize) -> Result<[Tensor; 2]> {
    if x.shape().rank() == 0 || at > x.shape()[0] {
        return Err(Error::shape("split_rows", "the operand", format!("[at least {at}, ...]"), x.shape()));
    }
    let parts = [0..at, at..x.shape()[0]].map(|range| x.view_rows(range));
    Ok(record_all(&[x], parts, || SplitRows { at }))
}

struct SplitRows {
    at: usize,
}

impl Backward for SplitRows {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let parts = [grads.output(0)?, grads.output(1)?];
        let Some(Target { tensor, accumulate }) = grads.target(0)? else { return Ok(()) };
        let n = tensor.shape()[0];
        for (range, dy) in [0..self.at, self.at..n].into_iter().zip(&parts) {
            let rows = tensor.view_rows(range);
            if accumulate { super::accumulate(&rows, dy)? } else { rows.copy_from(dy)? }
        }
        Ok(())
    }
}

/// The elements of x, with no gradient going back through rows `range` of the leading axis: truncated back-propagation for some layers of
/// a stacked memory.
pub fn cut_rows(x: &Tensor, range: Range<usize>) -> Result<Tensor> {
    if x.shape().rank() == 0 || range.start > range.end || range.end > x.shape()[0] {
        return Err(Error::shape("cut_rows", "the operand", format!("[at least {}, ...]", range.end), x.shape()));
    }
    Ok(record(&[x], x.detach(), || CutRows { range }))
}

struct CutRows {
    range: Range<usize>,
}

impl Backward for CutRows {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output_owned(0)?;
        dy.view_rows(self.range).fill_zero()?;
        grads.give(0, dy)
    }
}
