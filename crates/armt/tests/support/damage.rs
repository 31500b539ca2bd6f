//! Damage for fuzzing: what disks, editors, other programs and people do to files.
//!
//! A case is a good file with some damage. `ARMT_FUZZ_CASES` is the number of cases of all targets together: 10,000 if not given, of which
//! each target has its share.

#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::RngSeed;

/// The setting of a target with so many of 10,000 cases: the same ones everywhere, so that nobody's change fails by another's luck. With
/// `ARMT_FUZZ_CASES` they are others each time.
pub fn share(cases: u32) -> ProptestConfig {
    let given = std::env::var("ARMT_FUZZ_CASES").ok().and_then(|n| n.parse::<u64>().ok());
    let own = (u64::from(cases) * given.unwrap_or(10_000) / 10_000).clamp(1, u64::from(u32::MAX)) as u32;
    let rng_seed = given.map_or(RngSeed::Fixed(20_407), |_| RngSeed::Random);
    // A file that breaks something is told as it is: to look for a smaller one takes longer than CI has.
    ProptestConfig { cases: own, max_shrink_iters: 200, failure_persistence: None, rng_seed, ..ProptestConfig::default() }
}

/// One damage.
#[derive(Clone, Debug)]
pub enum Damage {
    /// A bit is another.
    Flip(Index, u8),
    /// The end is missing.
    Cut(Index),
    /// Some bytes are missing.
    Remove(Index, usize),
    /// Some bytes come twice.
    Repeat(Index, usize),
    /// Something stands between.
    Insert(Index, Vec<u8>),
    /// A number is another, which may be far too large, or none.
    Number(Index, &'static str),
    /// A word between quotes is another word of the file.
    Word(Index, Index),
}

/// Numbers that programs trip over.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "-1",
    "2",
    "7",
    "127",
    "65536",
    "2147483648",
    "4294967295",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "0.5",
    "NaN",
    "null",
];

/// Some damages, one after the other.
pub fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let index = any::<Index>;
    let one = prop_oneof![
        3 => (index(), 0..8u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        1 => index().prop_map(Damage::Cut),
        1 => (index(), 1..64usize).prop_map(|(at, n)| Damage::Remove(at, n)),
        1 => (index(), 1..64usize).prop_map(|(at, n)| Damage::Repeat(at, n)),
        1 => (index(), prop::collection::vec(any::<u8>(), 1..8)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        4 => (index(), prop::sample::select(NUMBERS.to_vec())).prop_map(|(at, number)| Damage::Number(at, number)),
        2 => (index(), index()).prop_map(|(at, other)| Damage::Word(at, other)),
    ];
    prop::collection::vec(one, 1..4)
}

/// A file with damages.
pub fn damaged(good: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for damage in damages {
        if bytes.is_empty() {
            break;
        }
        let n = bytes.len();
        match damage {
            Damage::Flip(at, bit) => bytes[at.index(n)] ^= 1 << bit,
            Damage::Cut(at) => bytes.truncate(at.index(n)),
            Damage::Remove(at, count) => drop(bytes.drain(at.index(n)..n.min(at.index(n) + count))),
            Damage::Repeat(at, count) => {
                let (at, end) = (at.index(n), n.min(at.index(n) + count));
                let again = bytes[at..end].to_vec();
                bytes.splice(end..end, again);
            }
            Damage::Insert(at, more) => drop(bytes.splice(at.index(n)..at.index(n), more.iter().copied())),
            Damage::Number(at, number) => {
                let runs = runs(&bytes, |b| b.is_ascii_digit() || matches!(b, b'.' | b'-'));
                if !runs.is_empty() {
                    let (from, to) = runs[at.index(runs.len())];
                    bytes.splice(from..to, number.bytes());
                }
            }
            Damage::Word(at, other) => {
                let words = runs(&bytes, |b| b.is_ascii_alphabetic() || b == b'_');
                if !words.is_empty() {
                    let (from, to) = words[other.index(words.len())];
                    let word = bytes[from..to].to_vec();
                    let (from, to) = words[at.index(words.len())];
                    bytes.splice(from..to, word);
                }
            }
        }
    }
    bytes
}

/// Where the runs of some bytes are, of the first 100,000: headers come first.
fn runs(bytes: &[u8], of: impl Fn(u8) -> bool) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (i, byte) in bytes.iter().enumerate().take(100_000).filter(|(_, b)| of(**b)) {
        let _ = byte;
        match runs.last_mut() {
            Some((_, end)) if *end == i => *end = i + 1,
            _ => runs.push((i, i + 1)),
        }
    }
    runs
}
