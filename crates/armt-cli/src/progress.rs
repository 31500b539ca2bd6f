//! Progress of a reading: a bar on a terminal, a line every few seconds elsewhere; both on standard error.

pub use armt_lab::eval::numbers::thousands;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between lines where there is no terminal.
const PAUSE: Duration = Duration::from_secs(5);

/// Shows how far a reading is. Its length is known in bytes of text where all texts are files.
pub struct Meter {
    bar: Option<ProgressBar>,
    total: Option<u64>,
    /// Bytes passed over before this reading, which say nothing about its speed.
    skipped: u64,
    /// What is read, before each line.
    label: String,
    started: Instant,
    last: Instant,
}

impl Meter {
    pub fn new(total: Option<u64>, skipped: u64) -> Self {
        let template = match total {
            Some(_) => "{bar:20} {percent:>3}%  {wide_msg}",
            None => "{spinner} {wide_msg}",
        };
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
            bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_position(skipped);
            bar.set_message("reading");
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        let now = Instant::now();
        Meter { bar, total, skipped, label: String::new(), started: now, last: now }
    }

    /// Says what is being read.
    pub fn label(&mut self, label: String) {
        self.label = label;
    }

    /// Tokens read by this command, and bytes of all texts up to there.
    pub fn show(&mut self, tokens: u64, bytes: u64) {
        let seconds = self.started.elapsed().as_secs_f64().max(1e-3);
        let mut line = format!("{} tokens, {} tokens/s", thousands(tokens), thousands((tokens as f64 / seconds) as u64));
        let left = self.total.map(|total| (total, total.saturating_sub(bytes)));
        if let Some((_, left)) = left
            && bytes > self.skipped
        {
            let rest = seconds * left as f64 / (bytes - self.skipped) as f64;
            line += &format!(", {} left", time(rest));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
            bar.set_message(format!("{}{line}", self.label));
        } else if self.last.elapsed() >= PAUSE {
            self.last = Instant::now();
            match left {
                Some((total, left)) if total > 0 => {
                    let percent = 100.0 * (total - left) as f64 / total as f64;
                    crate::note(format_args!("{}{percent:.0}%: {line}", self.label));
                }
                _ => crate::note(format_args!("{}{line}", self.label)),
            }
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A size as people write it.
pub fn bytes(n: u64) -> String {
    match n {
        0..=9_999 => format!("{} bytes", thousands(n)),
        10_000..=10_485_759 => format!("{:.1} KiB", n as f64 / 1024.0),
        10_485_760..=10_737_418_239 => format!("{:.1} MiB", n as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", n as f64 / f64::from(1 << 30)),
    }
}

fn time(seconds: f64) -> String {
    let s = seconds.round() as u64;
    match s {
        0..=59 => format!("{s} s"),
        60..=3599 => format!("{}:{:02} min", s / 60, s % 60),
        _ => format!("{}:{:02} h", s / 3600, s / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!((bytes(512), bytes(1 << 20)), ("512 bytes".into(), "1024.0 KiB".into()));
        assert_eq!((time(59.4), time(61.0), time(7260.0)), ("59 s".into(), "1:01 min".into(), "2:01 h".into()));
    }
}
