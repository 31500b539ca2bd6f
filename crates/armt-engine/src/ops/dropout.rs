//! Dropout: y = x keep / (1 - p), keep 0 with probability p and 1 otherwise.
//!
//! keep is a hash of (seed, step, site, element), so that no mask is stored: the backward pass computes it again, a recompute region
//! sees the same one, and both devices agree on every bit. Seed and step live on the device, where a captured graph can advance them.

use super::{cast, cuda_of, to_f32, via_f32};
use crate::cpu::{par_rows, simd};
use crate::error::{Error, Result};
use crate::tape::{Backward, Grads, record};
use crate::tensor::{DType, Device, Tensor};

const OP: &str = "dropout";

/// Where dropout takes its random bits from: a seed, and a step that [`Generator::advance`] counts. Clones are the same generator.
///
/// Advance once at the start of a step and never between a forward pass and its backward pass, which has to see the same masks.
#[derive(Clone, Debug)]
pub struct Generator {
    /// i32 `[3]`: low and high half of the seed, step.
    state: Tensor,
}

impl Generator {
    /// A generator at step 0.
    pub fn new(seed: u64, device: &Device) -> Result<Self> {
        Ok(Generator { state: Tensor::from_slice(&[seed as u32 as i32, (seed >> 32) as u32 as i32, 0], [3], device)? })
    }

    /// Goes to the next step, in the order of the device's other work. Can be part of a captured graph.
    pub fn advance(&self) -> Result<()> {
        match cuda_of(&self.state) {
            None => {
                let step = &mut self.state.write::<i32>(OP)?[2];
                *step = step.wrapping_add(1);
                Ok(())
            }
            Some(cuda) => cuda.kernel("dropout", DType::F32, "advance")?.block(32).grid(1, 1, 1).arg(&self.state).run(),
        }
    }

    /// Low and high half of the seed, and the step: what a checkpoint stores. Waits for the device.
    pub fn state(&self) -> Result<[i32; 3]> {
        let state = self.state.to_vec::<i32>()?;
        Ok([state[0], state[1], state[2]])
    }

    /// Goes back to what [`Generator::state`] gave.
    pub fn restore(&self, state: [i32; 3]) -> Result<()> {
        self.state.overwrite(&state)
    }
}

/// The finalizer of splitmix64.
fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of one place in one step.
fn key([low, high, step]: [i32; 3], site: u32) -> [u32; 2] {
    let seed = u64::from(low as u32) | u64::from(high as u32) << 32;
    let k = mix64(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
    let k = mix64(k ^ (u64::from(step as u32) << 32 | u64::from(site)));
    [k as u32, (k >> 32) as u32]
}

/// A 32-bit mixer (lowbias32): vectorises, where a 64-bit product would not.
#[inline(always)]
fn mix32(mut h: u32) -> u32 {
    h = (h ^ (h >> 16)).wrapping_mul(0x7feb_352d);
    h = (h ^ (h >> 15)).wrapping_mul(0x846c_a68b);
    h ^ (h >> 16)
}

/// The random bits of one element: two keyed rounds.
#[inline(always)]
fn bits(key: [u32; 2], index: u64) -> u32 {
    let folded = (index as u32) ^ ((index >> 32) as u32).wrapping_mul(0x9e37_79b9);
    mix32(mix32(folded ^ key[0]).wrapping_add(key[1]))
}

/// Elements whose bits are below this are dropped.
fn threshold(p: f32) -> u32 {
    (f64::from(p) * 2f64.powi(32)) as u32
}

/// Whether [`dropout`] keeps element `index` at a place: the plain form of what the kernels compute.
pub fn dropout_keeps(state: [i32; 3], site: u32, index: usize, p: f32) -> bool {
    bits(key(state, site), index as u64) >= threshold(p)
}

/// x with a fraction p of its elements set to zero and the others scaled by 1 / (1 - p). p = 0 gives x itself; p outside [0, 1) is
/// refused.
///
/// `site` is a number that the model gives each place where it drops: places with the same number drop the same elements. The backward
/// pass computes the mask again from the generator's state at that time: see [`Generator`] on when to advance it.
pub fn dropout(x: &Tensor, p: f32, generator: &Generator, site: u32) -> Result<Tensor> {
    x.expect_float(OP, "the operand")?;
    if !(0.0..1.0).contains(&p) {
        return Err(Error::argument(OP, format!("expected a probability of at least 0 and below 1, got {p}")));
    }
    generator.state.expect_device_of(OP, "the generator", x)?;
    if p == 0.0 {
        return Ok(x.clone());
    }
    if via_f32(x) {
        return cast(&dropout(&to_f32(x)?, p, generator, site)?, DType::BF16);
    }
    let mask = Mask { p, state: generator.state.clone(), site };
    let y = mask.apply(x)?;
    Ok(record(&[x], y, || mask))
}

struct Mask {
    p: f32,
    state: Tensor,
    site: u32,
}

impl Mask {
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let y = Tensor::uninit(x.shape(), x.dtype(), x.device())?;
        let (threshold, scale) = (threshold(self.p), 1.0 / (1.0 - self.p));
        match cuda_of(x) {
            None => {
                let state = self.state.read::<i32>(OP)?;
                let key = key([state[0], state[1], state[2]], self.site);
                let x = x.read::<f32>(OP)?;
                par_rows(&mut y.write::<f32>(OP)?, 1, 4, |first, y| {
                    let x = &x[first..first + y.len()];
                    simd!({
                        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
                            *y = if bits(key, (first + i) as u64) >= threshold { x * scale } else { 0.0 };
                        }
                    });
                });
            }
            Some(cuda) => {
                let n = x.elements();
                let launch = cuda.kernel("dropout", x.dtype(), OP)?.cover(n).arg(x).arg(&y).arg(&self.state);
                launch.arg(n).arg(self.site as i32).arg(threshold as i32).arg(scale).run()?;
            }
        }
        Ok(y)
    }
}

impl Backward for Mask {
    fn backward(self: Box<Self>, grads: &mut Grads<'_>) -> Result<()> {
        let dy = grads.output(0)?;
        grads.give(0, self.apply(&dy)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::Tape;

    fn mask_of(generator: &Generator, site: u32, p: f32) -> Vec<f32> {
        let x = Tensor::full(1.0, [100, 1000], &Device::cpu()).unwrap();
        dropout(&x, p, generator, site).unwrap().to_vec().unwrap()
    }

    /// Fraction of the elements that are zero in both or in neither.
    fn agreement(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).filter(|(a, b)| (**a == 0.0) == (**b == 0.0)).count() as f64 / a.len() as f64
    }

    #[test]
    fn the_same_seed_step_and_site_drop_the_same_elements() {
        let (a, b) = (Generator::new(7 << 40, &Device::cpu()).unwrap(), Generator::new(7 << 40, &Device::cpu()).unwrap());
        assert_eq!(mask_of(&a, 3, 0.5), mask_of(&b, 3, 0.5));
        let before = a.state().unwrap();
        let first = mask_of(&a, 3, 0.5);
        a.advance().unwrap();
        assert_eq!(a.state().unwrap()[2], 1);
        a.restore(before).unwrap();
        assert_eq!(mask_of(&a, 3, 0.5), first);
    }

    #[test]
    fn another_seed_step_or_site_drops_others() {
        let generator = Generator::new(7, &Device::cpu()).unwrap();
        let first = mask_of(&generator, 0, 0.5);
        let other_site = mask_of(&generator, 1, 0.5);
        generator.advance().unwrap();
        let other_step = mask_of(&generator, 0, 0.5);
        let other_seed = mask_of(&Generator::new(7 | 1 << 32, &Device::cpu()).unwrap(), 0, 0.5);
        for other in [other_site, other_step, other_seed] {
            assert!((agreement(&first, &other) - 0.5).abs() < 0.01);
        }
    }

    #[test]
    fn the_fraction_kept_is_one_minus_p_and_the_mean_stays() {
        let generator = Generator::new(1, &Device::cpu()).unwrap();
        for p in [0.1f32, 0.5, 0.9] {
            let y = mask_of(&generator, 5, p);
            let kept = y.iter().filter(|y| **y != 0.0).count() as f32 / y.len() as f32;
            assert!((kept - (1.0 - p)).abs() < 0.01, "{kept} kept at {p}");
            assert!((y.iter().sum::<f32>() / y.len() as f32 - 1.0).abs() < 0.04);
            // Neighbours are independent: both kept with probability (1 - p)^2.
            let both = y.windows(2).filter(|w| w[0] != 0.0 && w[1] != 0.0).count() as f32 / y.len() as f32;
            assert!((both - (1.0 - p) * (1.0 - p)).abs() < 0.01, "{both} pairs kept at {p}");
        }
    }

    #[test]
    fn the_backward_pass_uses_the_mask_of_the_forward_pass() {
        let generator = Generator::new(9, &Device::cpu()).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let tape = Tape::new();
            let x = tape.variable(&cast(&Tensor::full(1.0, [777], &Device::cpu()).unwrap(), dtype).unwrap());
            let y = dropout(&x, 0.25, &generator, 2).unwrap();
            tape.backward_from(&[(&y, x.detach())]).unwrap();
            assert_eq!(tape.grad(&x).unwrap().to_f32_vec().unwrap(), y.to_f32_vec().unwrap());
        }
    }

    #[test]
    fn zero_gives_the_operand_itself_and_other_probabilities_are_refused() {
        let generator = Generator::new(0, &Device::cpu()).unwrap();
        let x = Tensor::full(2.0, [3], &Device::cpu()).unwrap();
        assert_eq!(dropout(&x, 0.0, &generator, 0).unwrap().ptr(), x.ptr());
        for p in [-0.1, 1.0, 1.5, f32::NAN] {
            let e = dropout(&x, p, &generator, 0).unwrap_err().to_string();
            assert!(e.contains("probability") && e.contains(&p.to_string()), "{e}");
        }
    }
}
