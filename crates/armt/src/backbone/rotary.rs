//! Tables of rotary angles: cos and sin of p / theta^(2i/r) for position p and pair i, with what slows low frequencies.

use armt_engine::{Device, Tensor};

use super::architecture::{Rotary, Scaling, YarnScaling};
use crate::error::Result;

/// cos and sin, each `[positions, dims / 2]`.
pub(super) fn tables(rotary: &Rotary, positions: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let frequencies = frequencies(rotary);
    let sharper = if let Some(Scaling::Yarn(s)) = rotary.scaling { s.attention } else { 1.0 };
    let angles = |f: fn(f64) -> f64| -> Vec<f32> {
        (0..positions).flat_map(|p| frequencies.iter().map(move |w| (sharper * f(p as f64 * w)) as f32)).collect()
    };
    let shape = [positions, frequencies.len()];
    Ok((Tensor::from_slice(&angles(f64::cos), shape, device)?, Tensor::from_slice(&angles(f64::sin), shape, device)?))
}

fn frequencies(rotary: &Rotary) -> Vec<f64> {
    let plain = (0..rotary.dims / 2).map(|i| rotary.theta.powf(-2.0 * i as f64 / rotary.dims as f64));
    let s = match rotary.scaling {
        None => return plain.collect(),
        Some(Scaling::Linear(factor)) => return plain.map(|w| w / factor).collect(),
        Some(Scaling::Yarn(s)) => return yarn(rotary, &s, plain),
        Some(Scaling::Llama3(s)) => s,
    };
    plain
        .map(|w| {
            let wave = std::f64::consts::TAU / w;
            if wave < s.original / s.high {
                w
            } else if wave > s.original / s.low {
                w / s.factor
            } else {
                let smooth = (s.original / wave - s.low) / (s.high - s.low);
                (1.0 - smooth) * w / s.factor + smooth * w
            }
        })
        .collect()
}

/// YaRN: pair i turns as before below the pair that turns `fast` times within the original context, `factor` times slower above that which turns
/// `slow` times, and along a ramp between them.
fn yarn(rotary: &Rotary, s: &YarnScaling, plain: impl Iterator<Item = f64>) -> Vec<f64> {
    let dims = rotary.dims as f64;
    let pair = |turns: f64| dims * (s.original / (turns * std::f64::consts::TAU)).ln() / (2.0 * rotary.theta.ln());
    let low = pair(s.fast).floor().max(0.0);
    let high = pair(s.slow).ceil().min(dims - 1.0);
    // Not a division by nothing.
    let span = if high > low { high - low } else { 0.001 };
    plain
        .enumerate()
        .map(|(i, w)| {
            let slowed = ((i as f64 - low) / span).clamp(0.0, 1.0);
            slowed * w / s.factor + (1.0 - slowed) * w
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backbone::architecture::Llama3Scaling;

    #[test]
    fn frequencies_fall_from_one() {
        let f = frequencies(&Rotary { theta: 10_000.0, dims: 8, scaling: None });
        assert!(f.iter().zip([1.0, 0.1, 0.01, 0.001]).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn llama_3_slows_low_frequencies_only() {
        let scaling = Llama3Scaling { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let plain = frequencies(&Rotary { theta: 500_000.0, dims: 128, scaling: None });
        let scaled = frequencies(&Rotary { theta: 500_000.0, dims: 128, scaling: Some(Scaling::Llama3(scaling)) });
        assert_eq!(plain[0], scaled[0]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-9);
        assert!(plain.iter().zip(&scaled).any(|(p, s)| p / s > 1.01 && p / s < 7.9), "some are in between");
    }
}
