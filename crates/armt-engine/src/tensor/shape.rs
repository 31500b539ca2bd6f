//! Shapes of contiguous, row-major tensors.

/// Most axes a tensor can have: `[layer, batch, position, part, head, feature]`.
pub const MAX_RANK: usize = 6;

/// The sizes of a tensor's axes, outermost first. Small and `Copy`; strides follow from it because tensors are contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: usize,
}

impl Shape {
    /// A shape from its axes. At most [`MAX_RANK`] of them; more is a programming error and panics.
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= MAX_RANK, "a shape has at most {MAX_RANK} axes, got {dims:?}");
        let mut own = [1; MAX_RANK];
        own[..dims.len()].copy_from_slice(dims);
        Shape { dims: own, rank: dims.len() }
    }

    /// The axes.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of elements; the largest number where there are more than can be counted, which no device has room for.
    pub fn elements(&self) -> usize {
        if self.dims().contains(&0) { 0 } else { self.dims().iter().fold(1, |n, size| n.saturating_mul(*size)) }
    }

    /// Size of the last axis, 1 for a scalar.
    pub fn last(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// Product of all axes but the last: the number of rows.
    pub fn rows(&self) -> usize {
        self.dims()[..self.rank.saturating_sub(1)].iter().product()
    }

    /// Product of the axes before `axis`.
    pub fn outer(&self, axis: usize) -> usize {
        self.dims()[..axis].iter().product()
    }

    /// Product of the axes after `axis`.
    pub fn inner(&self, axis: usize) -> usize {
        self.dims()[axis + 1..].iter().product()
    }

    /// This shape with one axis resized.
    pub fn with(&self, axis: usize, size: usize) -> Self {
        let mut s = *self;
        s.dims[axis] = size;
        s
    }

    /// This shape with the last axis resized.
    pub fn with_last(&self, size: usize) -> Self {
        self.with(self.rank - 1, size)
    }
}

impl std::ops::Index<usize> for Shape {
    type Output = usize;
    fn index(&self, axis: usize) -> &usize {
        &self.dims()[axis]
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape::new(&dims)
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Shape::new(dims)
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}
