//! How fast long work goes and how long it will take, in words. Drawing is the caller's.
//!
//! The rate is a mean over the past in which a second counts e times less for every [`MEMORY`] that has gone by since:
//!
//! ```text
//! U <- U e^(-dt / M) + du;  T <- T e^(-dt / M) + dt;  rate = U / T
//! ```
//!
//! Both sums start at 0, so the first rates need no correction: they are plain means.

use std::time::{Duration, Instant};

/// How far back a rate looks.
pub const MEMORY: Duration = Duration::from_secs(20);

/// Follows a count of units (steps, tokens, bytes) on its way to a total.
#[derive(Clone, Debug)]
pub struct Meter {
    done: u64,
    total: Option<u64>,
    last: Instant,
    units: f64,
    seconds: f64,
}

impl Meter {
    /// A meter of work of which `done` units lie behind, of `total` where that is known. They say nothing about the rate.
    pub fn new(done: u64, total: Option<u64>, now: Instant) -> Self {
        Meter { done, total, last: now, units: 0.0, seconds: 0.0 }
    }

    /// Notes that `done` units are done in all. A count or a time that goes back counts as standing still.
    pub fn update(&mut self, done: u64, now: Instant) {
        let dt = now.saturating_duration_since(self.last).as_secs_f64();
        let keep = (-dt / MEMORY.as_secs_f64()).exp();
        self.units = self.units * keep + done.saturating_sub(self.done) as f64;
        self.seconds = self.seconds * keep + dt;
        self.done = done;
        self.last = self.last.max(now);
    }

    /// Units done.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Units in all, where known.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// Units a second; none before the first.
    pub fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0 && self.units > 0.0).then(|| self.units / self.seconds)
    }

    /// The part done, 0 to 1; none without a total.
    pub fn fraction(&self) -> Option<f64> {
        let total = self.total?;
        Some(if total == 0 { 1.0 } else { (self.done as f64 / total as f64).min(1.0) })
    }

    /// Time left at this rate; none without a total or a rate.
    pub fn left(&self) -> Option<Duration> {
        let units = self.total?.saturating_sub(self.done);
        if units == 0 {
            return Some(Duration::ZERO);
        }
        Duration::try_from_secs_f64(units as f64 / self.rate()?).ok()
    }

    /// What is known: `37%, 12.3k tokens/s, 1h 02m left`. Empty before anything is.
    pub fn line(&self, unit: &str) -> String {
        let part = self.fraction().map(|f| format!("{}%", (100.0 * f).floor()));
        let rate = self.rate().map(|r| rate(r, unit));
        let left = self.left().map(|l| format!("{} left", duration(l)));
        [part, rate, left].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// A rate as people write it: `12.3k tokens/s`.
pub fn rate(per_second: f64, unit: &str) -> String {
    format!("{} {unit}/s", short(per_second))
}

/// A number in three digits: 0.52, 5.21, 52.1, 521, 5.21k, 52.1M.
pub fn short(x: f64) -> String {
    if !x.is_finite() || x < 0.0 {
        return "?".into();
    }
    // The bounds are those at which rounding would give a digit more.
    let digits = |y: f64| match y {
        y if y < 9.995 => format!("{y:.2}"),
        y if y < 99.95 => format!("{y:.1}"),
        y => format!("{y:.0}"),
    };
    let mut y = x;
    for letter in ["", "k", "M", "G"] {
        if y < 999.5 {
            return digits(y) + letter;
        }
        y /= 1000.0;
    }
    digits(y) + "T"
}

/// A time in its two largest units: `42s`, `3m 07s`, `1h 02m`, `2d 05h`.
pub fn duration(time: Duration) -> String {
    let s = time.as_secs().saturating_add(u64::from(time.subsec_millis() >= 500));
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d {:02}h", s / 86_400, s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, seconds: f64) -> Instant {
        start + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_steady_rate_is_shown_as_it_is_from_the_first_update() {
        let start = Instant::now();
        let mut meter = Meter::new(500, Some(1500), start);
        assert_eq!((meter.rate(), meter.left(), meter.line("steps")), (None, None, "33%".into()));
        for i in 1..=30 {
            meter.update(500 + 10 * i, after(start, i as f64));
            assert!((meter.rate().unwrap() - 10.0).abs() < 1e-6);
        }
        assert_eq!(meter.left().unwrap().as_secs_f64().round(), 70.0);
        assert_eq!(meter.line("steps"), "53%, 10.0 steps/s, 1m 10s left");
    }

    #[test]
    fn a_change_of_speed_shows_and_the_distant_past_does_not() {
        let start = Instant::now();
        let mut meter = Meter::new(0, None, start);
        (1..=100).for_each(|i| meter.update(i * 100, after(start, i as f64)));
        meter.update(10_000, after(start, 101.0));
        let slower = meter.rate().unwrap();
        assert!(slower < 100.0 && slower > 90.0, "{slower}");
        (1..=200).for_each(|i| meter.update(10_000 + i, after(start, 101.0 + i as f64)));
        assert!((meter.rate().unwrap() - 1.0).abs() < 0.02);
        assert_eq!((meter.fraction(), meter.left()), (None, None));
    }

    #[test]
    fn clocks_and_counts_that_go_back_and_empty_totals_do_no_harm() {
        let start = Instant::now();
        let mut meter = Meter::new(10, Some(0), after(start, 5.0));
        meter.update(4, start);
        assert_eq!((meter.rate(), meter.fraction(), meter.left()), (None, Some(1.0), Some(Duration::ZERO)));
        let mut meter = Meter::new(0, Some(u64::MAX), start);
        meter.update(1, after(start, 1e6));
        assert_eq!(meter.left(), None, "longer than a duration can say");
    }

    #[test]
    fn numbers_have_three_digits() {
        let shown = [0.0, 0.517, 9.994, 9.996, 52.14, 99.96, 999.4, 999.6, 12_345.0, 999_600.0, 2.5e9, 1.0e13].map(short);
        let expected = ["0.00", "0.52", "9.99", "10.0", "52.1", "100", "999", "1.00k", "12.3k", "1.00M", "2.50G", "10.0T"];
        assert_eq!(shown, expected);
        assert_eq!((short(f64::NAN), rate(12_345.0, "tokens")), ("?".into(), "12.3k tokens/s".into()));
    }

    #[test]
    fn times_have_two_units() {
        let shown = [0.4, 59.4, 59.6, 187.0, 3599.6, 3720.0, 86_399.0, 190_800.0].map(|s| duration(Duration::from_secs_f64(s)));
        assert_eq!(shown, ["0s", "59s", "1m 00s", "3m 07s", "1h 00m", "1h 02m", "23h 59m", "2d 05h"]);
        assert!(duration(Duration::MAX).ends_with('h'));
    }
}
