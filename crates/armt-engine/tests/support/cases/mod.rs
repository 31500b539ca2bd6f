//! The cases, one file for each operation.

pub mod activation;
pub mod attention;
pub mod binary;
pub mod cast;
pub mod cross_entropy;
pub mod embedding;
pub mod matmul;
pub mod memory;
pub mod norm;
pub mod recurrence;
pub mod reduce;
pub mod rotary;
pub mod slice;
pub mod softmax;

use armt_engine::ops::WriteRule;

use super::Case;

/// Sizes that are not multiples of anything a kernel is built around.
pub const ODD: [usize; 4] = [1, 3, 17, 65];

/// Every group of cases, by name: calls another macro with all of them. A group is one test on the CPU, so that a heavy operation is several.
macro_rules! each_group {
    ($macro:ident) => {
        $macro! {
            activation: crate::support::cases::activation::cases;
            attention_over_a_long_cache: crate::support::cases::attention::long_cached;
            attention_over_a_short_cache: crate::support::cases::attention::short_cached;
            attention_within_long_sequences: crate::support::cases::attention::long;
            attention_within_short_sequences: crate::support::cases::attention::short;
            attention_within_the_longest_sequence: crate::support::cases::attention::longest;
            binary: crate::support::cases::binary::cases;
            cast: crate::support::cases::cast::cases;
            cross_entropy: crate::support::cases::cross_entropy::cases;
            embedding: crate::support::cases::embedding::cases;
            linear: crate::support::cases::matmul::linear;
            matmul: crate::support::cases::matmul::products;
            memory_features: crate::support::cases::memory::dpfp::cases;
            memory_read: crate::support::cases::memory::read::cases;
            memory_reads_between_papers_writes: crate::support::cases::memory::walk::papers;
            memory_reads_between_projected_writes: crate::support::cases::memory::walk::projected;
            memory_tokens: crate::support::cases::memory::tokens::cases;
            memory_write_of_the_paper: crate::support::cases::memory::write::papers;
            memory_write_of_the_paper_then_read: crate::support::cases::memory::write_read::papers;
            memory_write_projected: crate::support::cases::memory::write::projected;
            memory_write_projected_then_read: crate::support::cases::memory::write_read::projected;
            norm: crate::support::cases::norm::cases;
            recurrence_causal_conv: crate::support::cases::recurrence::causal_conv::cases;
            recurrence_gated_scan: crate::support::cases::recurrence::gated::cases;
            recurrence_selective_scan: crate::support::cases::recurrence::selective_scan::cases;
            recurrence_token_mix: crate::support::cases::recurrence::token_mix::cases;
            recurrence_wkv5: crate::support::cases::recurrence::wkv5::cases;
            reduce: crate::support::cases::reduce::cases;
            rotary: crate::support::cases::rotary::cases;
            slice: crate::support::cases::slice::cases;
            softmax: crate::support::cases::softmax::cases;
        }
    };
}
pub(crate) use each_group;

/// Every case of every operation.
pub fn all() -> Vec<Case> {
    macro_rules! together {
        ($($name:ident: $cases:path;)*) => { [$($cases()),*] };
    }
    each_group!(together).into_iter().flatten().collect()
}

/// Cases too large for differences of plain loops, where one device is compared with another.
pub fn large() -> Vec<Case> {
    let memories = [WriteRule::Paper, WriteRule::Projected].into_iter().flat_map(memory::write_read::large);
    memories.chain(recurrence::large()).collect()
}
