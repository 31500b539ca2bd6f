//! Learning rates over time: a linear warm-up from 0, then constant, or falling to 0 along a line or half a cosine.

/// What the rate does after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Stays at the peak.
    Constant,
    /// Falls along a line to 0 at step `total`.
    Linear {
        /// Step at which 0 is reached.
        total: u64,
    },
    /// Falls along half a cosine to 0 at step `total`.
    Cosine {
        /// Step at which 0 is reached.
        total: u64,
    },
}

/// A learning rate for every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The rate at the end of the warm-up.
    pub peak: f32,
    /// Steps of linear warm-up; 0 starts at the peak.
    pub warmup: u64,
    /// What follows.
    pub decay: Decay,
}

impl Schedule {
    /// The rate of a step, counted from 0: `peak * step / warmup` first, the decay from then on, 0 after its end.
    pub fn rate(&self, step: u64) -> f32 {
        if step < self.warmup {
            return (f64::from(self.peak) * step as f64 / self.warmup as f64) as f32;
        }
        let progress = |total: u64| {
            let span = total.saturating_sub(self.warmup).max(1) as f64;
            ((step - self.warmup) as f64 / span).min(1.0)
        };
        let factor = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear { total } => 1.0 - progress(total),
            Decay::Cosine { total } => 0.5 * (1.0 + (std::f64::consts::PI * progress(total)).cos()),
        };
        (f64::from(self.peak) * factor) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_is_linear_and_starts_at_zero() {
        let s = Schedule { peak: 2.0, warmup: 4, decay: Decay::Constant };
        assert_eq!([0, 1, 2, 4, 1000].map(|i| s.rate(i)), [0.0, 0.5, 1.0, 2.0, 2.0]);
        assert_eq!(Schedule { warmup: 0, ..s }.rate(0), 2.0);
    }

    #[test]
    fn linear_and_cosine_fall_to_zero_and_stay_there() {
        let linear = Schedule { peak: 1.0, warmup: 10, decay: Decay::Linear { total: 20 } };
        assert_eq!([10, 15, 20, 25].map(|i| linear.rate(i)), [1.0, 0.5, 0.0, 0.0]);
        let cosine = Schedule { peak: 1.0, warmup: 10, decay: Decay::Cosine { total: 20 } };
        assert_eq!(cosine.rate(10), 1.0);
        assert!((cosine.rate(15) - 0.5).abs() < 1e-7);
        assert_eq!([20, 99].map(|i| cosine.rate(i)), [0.0, 0.0]);
    }

    #[test]
    fn a_total_within_the_warm_up_does_not_divide_by_zero() {
        let s = Schedule { peak: 1.0, warmup: 10, decay: Decay::Linear { total: 5 } };
        assert_eq!([10, 11].map(|i| s.rate(i)), [1.0, 0.0]);
    }
}
