//! Which of cuBLASLt's algorithms a product runs with.
//!
//! The library's first suggestion is often not the fastest of its first few. So a product of some size is tried with each of them when it is
//! first met, and what was found is kept on disk for the next run. Only algorithms that give the very bits of the first suggestion are
//! taken: what a clock has chosen then never changes a result, and the same seed gives the same bits on every run. Results that are mostly
//! zero would not tell algorithms apart; such a product keeps the first. Who does not need that can have the fastest whatever its bits
//! (those that sum in several parts, for instance): then only runs with the same kept choices are the same.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::CudaDevice;
use super::blas::{Blas, Product};
use super::cache::hash;
use super::driver::Context;
use super::kernels::Call;
use crate::error::Result;
use crate::paths;
use crate::tensor::DType;
use crate::tensor::pool::Block;

/// Set to `off`, every product runs with the library's first suggestion; to `any`, with the fastest, whatever its bits.
const VARIABLE: &str = "ARMT_TUNE";
/// Runs that are timed together.
const RUNS: usize = 5;
/// Another algorithm must take at most this share of the first one's time: less could be noise.
const WORTH: f32 = 0.98;

/// What was found in this and earlier runs: for each product, the number of the suggestion to take.
pub(super) struct Choices {
    file: Option<PathBuf>,
    known: HashMap<u64, usize>,
    pub(super) among: Among,
}

/// Which suggestions a product may run with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Among {
    /// The first.
    First,
    /// Those with the bits of the first.
    SameBits,
    /// All.
    Any,
}

impl Among {
    fn named(variable: Option<&OsStr>) -> Self {
        match variable.and_then(OsStr::to_str) {
            Some("off") => Among::First,
            Some("any") => Among::Any,
            _ => Among::SameBits,
        }
    }
}

/// A product's name among the choices that are kept.
fn name(p: &Product) -> u64 {
    hash(&[format!("{:?}", p.key()).as_bytes()])
}

impl Choices {
    /// Those kept in `folder` for this device and library. A line that cannot be read counts for nothing.
    pub(super) fn load(folder: Option<&Path>, device: &str, version: usize) -> Self {
        Self::load_among(Among::named(std::env::var_os(VARIABLE).as_deref()), folder, device, version)
    }

    fn load_among(among: Among, folder: Option<&Path>, device: &str, version: usize) -> Self {
        let kind = if among == Among::Any { "any-products" } else { "products" };
        let name = format!("{kind}-{:016x}", hash(&[device.as_bytes(), &version.to_le_bytes()]));
        let file = folder.map(|f| f.join(name));
        let text = file.as_ref().and_then(|f| std::fs::read_to_string(f).ok()).unwrap_or_default();
        let line = |l: &str| {
            let (product, choice) = l.split_once(' ')?;
            Some((u64::from_str_radix(product, 16).ok()?, choice.parse().ok()?))
        };
        Choices { known: text.lines().filter_map(line).collect(), file, among }
    }

    /// Which of the `suggestions` for a product to take, or `None` if they must be tried. A product that is met in a capture cannot be tried,
    /// and takes the first.
    pub(super) fn choice(&self, p: &Product, suggestions: usize, capturing: bool) -> Option<usize> {
        let operations = 2.0 * p.m as f64 * p.n as f64 * p.k as f64 * p.batch as f64;
        if suggestions < 2 || !paths::tries_suggestions(operations) || self.among == Among::First {
            return Some(0);
        }
        match self.known.get(&name(p)) {
            Some(known) => Some(if *known < suggestions { *known } else { 0 }),
            None => capturing.then_some(0),
        }
    }

    /// Keeps a choice. One that cannot be written is found again in the next run.
    fn keep(&mut self, product: u64, choice: usize) {
        self.known.insert(product, choice);
        let Some(file) = &self.file else { return };
        let open = || {
            file.parent().map(std::fs::create_dir_all).transpose()?;
            std::fs::OpenOptions::new().create(true).append(true).open(file)
        };
        // One write, so that lines of several programs do not mix.
        let _ = open().and_then(|mut f| f.write_all(format!("{product:016x} {choice}\n").as_bytes()));
    }
}

/// What it takes to try the suggestions for a product on its own operands, with results that nobody sees.
///
/// The buffers are those that were free when the product was issued, and what comes after it may have them again: the trial is made in the
/// product's place among the work on the stream.
pub(super) struct Trial {
    planned: Product,
    trial: Product,
    suggestions: usize,
    among: Among,
    /// Address and bytes of each result.
    outputs: Vec<(u64, usize)>,
    /// Two sums over the bits of all results.
    sums: u64,
    prints: Vec<Call>,
}

impl Trial {
    pub(super) fn new(device: &CudaDevice, p: &Product, suggestions: usize, among: Among) -> Result<Self> {
        let bytes = p.d.dtype.size() * ((p.batch - 1) * p.d.stride + p.m * p.n);
        let (d, aux) = (device.pool().alloc(bytes)?, p.aux_stored().then(|| device.pool().alloc(bytes)).transpose()?);
        let sums = device.pool().alloc(16)?;
        let mut trial = *p;
        trial.d.ptr = d.address() as u64;
        trial.aux = aux.as_ref().map_or(0, |a| a.address() as u64);
        let outputs: Vec<_> = std::iter::once(&d).chain(&aux).map(|block| (block.address() as u64, bytes)).collect();
        let print = |block: &Block| {
            let launch = device.kernel("fingerprint", DType::F32, "fingerprint")?.cover(bytes / 2);
            launch.arg(block.address()).arg(bytes / 2).arg(sums.address()).call()
        };
        let prints = std::iter::once(&d).chain(&aux).filter_map(|block| print(block).transpose()).collect::<Result<_>>()?;
        Ok(Trial { planned: *p, trial, suggestions, among, outputs, sums: sums.address() as u64, prints })
    }

    /// Whether all that it launches is compiled.
    pub(super) fn is_ready(&self) -> bool {
        self.prints.iter().all(Call::is_ready)
    }

    /// Finds which suggestion to take, and keeps it.
    pub(super) fn run(&self, context: &Context, (blas, choices): &mut (Blas, Choices)) -> Result<()> {
        let choice = self.fastest(context, blas)?;
        choices.keep(name(&self.planned), choice);
        blas.settle(&self.planned, choice);
        Ok(())
    }

    fn fastest(&self, context: &Context, blas: &Blas) -> Result<usize> {
        let try_it = |suggestion| blas.try_suggestion(context, self.planned.key(), &self.trial, suggestion);
        let words: usize = self.outputs.iter().map(|(_, bytes)| bytes / 2).sum();
        let mut first = None;
        let (mut best, mut fastest) = (0, f32::MAX);
        for suggestion in 0..self.suggestions {
            self.outputs.iter().try_for_each(|(address, bytes)| context.zero(*address, *bytes))?;
            if try_it(suggestion).is_err() {
                continue;
            }
            let print = self.fingerprint(context)?;
            let [_, zeros] = print;
            if self.among == Among::SameBits && suggestion == 0 && zeros as usize > words / 2 {
                return Ok(0);
            }
            if *first.get_or_insert(print) != print && self.among == Among::SameBits {
                continue;
            }
            let time = context.time(|| (0..RUNS).try_for_each(|_| try_it(suggestion)))?;
            let least = if suggestion == 0 { time } else { time / WORTH };
            if least < fastest {
                (best, fastest) = (suggestion, time);
            }
        }
        Ok(best)
    }

    /// A number that says whether two results have the same bits, and how many of their 16-bit words are zero.
    fn fingerprint(&self, context: &Context) -> Result<[u64; 2]> {
        context.zero(self.sums, 16)?;
        self.prints.iter().try_for_each(|print| print.make(context))?;
        let mut print = [0u64; 2];
        context.download(self.sums, &mut print)?;
        Ok(print)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_kept_for_one_device_and_library_and_bad_lines_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("kernels");
        let mut choices = Choices::load(Some(&folder), "a GPU", 130_100);
        choices.keep(7, 3);
        choices.keep(u64::MAX, 5);
        let file = choices.file.clone().unwrap();
        std::fs::OpenOptions::new().append(true).open(&file).unwrap().write_all(b"no number\n12\n").unwrap();
        let again = Choices::load(Some(&folder), "a GPU", 130_100);
        assert_eq!(again.known, HashMap::from([(7, 3), (u64::MAX, 5)]));
        assert!(Choices::load(Some(&folder), "another GPU", 130_100).known.is_empty());
        assert!(Choices::load(Some(&folder), "a GPU", 120_900).known.is_empty());
        assert!(Choices::load(None, "a GPU", 130_100).known.is_empty());
        // What is the fastest whatever its bits must not be taken for one with the same.
        assert!(Choices::load_among(Among::Any, Some(&folder), "a GPU", 130_100).known.is_empty());
        assert_eq!(Choices::load_among(Among::First, Some(&folder), "a GPU", 130_100).known, again.known);
    }

    #[test]
    fn a_variable_says_which_suggestions_count() {
        let named = |text: &str| Among::named(Some(OsStr::new(text)));
        assert_eq!(
            [named("off"), named("any"), named("on"), Among::named(None)],
            [Among::First, Among::Any, Among::SameBits, Among::SameBits]
        );
    }
}
