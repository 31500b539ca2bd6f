//! The cases, one file for each operation.

mod activation;
mod binary;
mod matmul;
mod reduce;

use super::Case;

/// Sizes that are not multiples of anything a kernel is built around.
pub const ODD: [usize; 4] = [1, 3, 17, 65];

/// Every case of every operation.
pub fn all() -> Vec<Case> {
    [activation::cases(), binary::cases(), matmul::cases(), reduce::cases()].into_iter().flatten().collect()
}
