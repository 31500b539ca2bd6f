//! Counters, as Prometheus reads them.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What a server has done.
#[derive(Default)]
pub struct Metrics {
    /// Tokens that were read into memories.
    pub tokens: AtomicU64,
    /// Bytes of text that came.
    pub bytes: AtomicU64,
    /// Time in which texts were read, in microseconds.
    pub reading: AtomicU64,
    /// Time in which text had come and the device read none, in microseconds.
    pub waiting: AtomicU64,
    /// Questions and completions that were answered.
    pub answers: AtomicU64,
    /// Tokens of answers.
    pub answered: AtomicU64,
    /// Time from a question to its answer, in microseconds.
    pub asking: AtomicU64,
    /// Requests by the first digit of their status.
    pub statuses: [AtomicU64; 6],
}

impl Metrics {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds a time to a counter.
    pub fn add_time(counter: &AtomicU64, time: Duration) {
        Self::add(counter, time.as_micros() as u64);
    }

    /// The text that Prometheus asks for. Gauges are given with their names and what they are.
    pub fn text(&self, gauges: &[(&str, &str, f64)]) -> String {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = |counter: &AtomicU64| of(counter) as f64 / 1e6;
        let mut text = String::new();
        let mut say = |kind: &str, name: &str, what: &str, value: f64| {
            let _ = write!(text, "# HELP {name} {what}\n# TYPE {name} {kind}\n{name} {value}\n");
        };
        say("counter", "armt_tokens_read_total", "Tokens read into memories.", of(&self.tokens) as f64);
        say("counter", "armt_text_bytes_total", "Bytes of text that came.", of(&self.bytes) as f64);
        say("counter", "armt_reading_seconds_total", "Time in which texts were read.", seconds(&self.reading));
        say(
            "counter",
            "armt_reading_waits_seconds_total",
            "Time in which text had come and none was read.",
            seconds(&self.waiting),
        );
        say("counter", "armt_answers_total", "Questions and completions answered.", of(&self.answers) as f64);
        say("counter", "armt_answer_tokens_total", "Tokens of answers.", of(&self.answered) as f64);
        say("counter", "armt_answering_seconds_total", "Time from questions to their answers.", seconds(&self.asking));
        gauges.iter().for_each(|(name, what, value)| say("gauge", name, what, *value));
        text.push_str("# HELP armt_requests_total Requests by status.\n# TYPE armt_requests_total counter\n");
        for (class, counter) in self.statuses.iter().enumerate().skip(1) {
            let _ = writeln!(text, "armt_requests_total{{status=\"{class}xx\"}} {}", of(counter));
        }
        text
    }
}
