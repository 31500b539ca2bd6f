//! The cases, one file for each operation.

mod activation;
mod assoc;
mod attention;
mod binary;
mod cast;
mod cross_entropy;
mod dropout;
mod embedding;
mod matmul;
mod norm;
mod reduce;
mod rotary;
mod slice;
mod softmax;

use super::Case;

/// Sizes that are not multiples of anything a kernel is built around.
pub const ODD: [usize; 4] = [1, 3, 17, 65];

/// Every case of every operation.
#[rustfmt::skip]
pub fn all() -> Vec<Case> {
    let groups = [
        activation::cases(),
        assoc::cases(),
        attention::cases(),
        binary::cases(),
        cast::cases(),
        cross_entropy::cases(),
        dropout::cases(),
        embedding::cases(),
        matmul::cases(),
        norm::cases(),
        reduce::cases(),
        rotary::cases(),
        slice::cases(),
        softmax::cases(),
    ];
    groups.into_iter().flatten().collect()
}

/// Cases too large for differences of plain loops, where one device is compared with another.
pub fn large() -> Vec<Case> {
    assoc::large()
}
