//! `armt read`: texts into a memory file.

use std::fmt::Display;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use armt::State;
use armt::reader::End;
use armt::text::{Counts, Source};
use clap::Args;

use crate::device::{DeviceArgs, expect_model};
use crate::eval::expect_place;
use crate::progress::{Meter, bytes, thousands};

const EXAMPLE: &str = "\
Examples:
  armt read gpt2-armt war-and-peace.txt --memory war.mem
  zcat wiki.txt.gz | armt read gpt2-armt - --memory wiki.mem
  armt read gpt2-armt war-and-peace.txt --memory war.mem --resume

Ctrl-C saves what was read so far. To go on, or to add texts to a memory, give all its texts again in their order with
--resume: what the memory already holds is passed over.";

/// What a shell sees of a command ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct ReadArgs {
    /// Model folder, as `armt convert` writes it.
    model: PathBuf,
    /// Texts in UTF-8, read one after the other; - is standard input.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// File to keep the memory in.
    #[arg(long, value_name = "OUT")]
    memory: PathBuf,
    /// Go on from the memory in OUT, passing over the tokens it has read.
    #[arg(long, conflicts_with = "force")]
    resume: bool,
    /// Overwrite OUT.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: &ReadArgs) -> Result<ExitCode> {
    args.check()?;
    let sources = args.sources()?;
    let total = sources.iter().map(Source::bytes).sum::<Option<u64>>();
    let mut session = args.device.open_session(&args.model)?;
    if args.resume {
        session.load(&args.memory)?;
    }
    let before = session.state().clone();

    let stop = Arc::new(AtomicBool::new(false));
    listen(stop.clone())?;
    let mut reading = session.reading(sources, stop.clone())?;
    let counts = reading.counts();
    if args.resume {
        crate::note(format_args!("passing over {} tokens that the memory has read", thousands(before.tokens_read())));
        let mut meter = Meter::new(None, 0);
        let skipped = reading.skip(&mut |passed| meter.show(passed, 0));
        meter.finish();
        match skipped {
            Err(armt::Error::Interrupted) => return args.stopped(&before, None),
            other => other?,
        }
    }
    let started = Instant::now();
    let mut meter = Meter::new(total, counts.bytes());
    let end = reading.run(&mut |progress| {
        meter.show(progress.tokens - before.tokens_read(), counts.bytes());
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    meter.finish();
    session.set_state(reading.into_state())?;
    let state = session.state();
    if state.tokens_read() == before.tokens_read() {
        // Nothing new: no file is written, so a failed command leaves none behind.
        return match end? {
            End::Finished => {
                crate::say(format_args!("nothing left to read: the memory has all {} tokens", thousands(before.tokens_read())))?;
                Ok(ExitCode::SUCCESS)
            }
            End::Stopped => args.stopped(&before, None),
        };
    }
    session.save(&args.memory)?;
    let summary = summary(&before, state, started.elapsed(), &args.memory, &counts);
    match end {
        Ok(End::Finished) => {
            crate::say(format_args!("{summary}"))?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(End::Stopped) => args.stopped(state, Some(&summary)),
        Err(error) => Err(error).with_context(|| {
            format!("{}: saved after {} tokens, when reading failed", args.memory.display(), thousands(state.tokens_read()))
        }),
    }
}

impl ReadArgs {
    /// Everything that can be refused before the model is loaded.
    fn check(&self) -> Result<()> {
        expect_model(&self.model)?;
        let out = &self.memory;
        match (out.exists(), self.resume, self.force) {
            (true, false, false) => {
                bail!("{}: it exists already; --resume goes on from it, --force overwrites it", out.display())
            }
            (false, true, _) => bail!("{}: there is no such memory to go on from; leave out --resume", out.display()),
            _ => {}
        }
        expect_place(out)?;
        if self.files.iter().filter(|f| is_stdin(f)).count() > 1 {
            bail!("-: standard input can be read only once");
        }
        Ok(())
    }

    fn sources(&self) -> Result<Vec<Source>> {
        let source = |path: &PathBuf| if is_stdin(path) { Ok(Source::stdin()) } else { Ok(Source::file(path)?) };
        self.files.iter().map(source).collect()
    }

    /// Says what was kept and how to go on.
    fn stopped(&self, state: &State, summary: Option<&dyn Display>) -> Result<ExitCode> {
        match summary {
            Some(summary) => crate::say(format_args!("stopped: {summary}"))?,
            None => crate::say(format_args!("stopped before anything new was read"))?,
        }
        let quoted = |p: &Path| quote(&p.to_string_lossy());
        let mut command = vec!["armt".into(), "read".into(), quoted(&self.model)];
        command.extend(self.files.iter().map(|f| quoted(f)));
        command.extend(["--memory".into(), quoted(&self.memory)]);
        command.extend(self.device.arguments());
        if !state.is_empty() {
            command.push("--resume".into());
        } else if self.force {
            command.push("--force".into());
        }
        let again = if self.files.iter().any(|f| is_stdin(f)) { " (with the same text on standard input)" } else { "" };
        crate::say(format_args!("to go on{again}:\n  {}", command.join(" ")))?;
        Ok(ExitCode::from(INTERRUPTED))
    }
}

fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// A word as a shell takes it.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:=+,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// The first Ctrl-C, termination or hang-up asks for a stop, the second quits.
fn listen(stop: Arc<AtomicBool>) -> Result<()> {
    let handler = move || {
        if stop.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(INTERRUPTED));
        }
        crate::note(format_args!("\nstopping after the segments at hand; Ctrl-C again quits at once and saves nothing"));
    };
    ctrlc::set_handler(handler).context("Ctrl-C cannot be caught")
}

fn summary(before: &State, state: &State, time: Duration, memory: &Path, counts: &Counts) -> String {
    let (tokens, segments) = (state.tokens_read() - before.tokens_read(), state.segments_read() - before.segments_read());
    let seconds = time.as_secs_f64();
    let rate = thousands((tokens as f64 / seconds.max(1e-9)) as u64);
    let size = bytes(std::fs::metadata(memory).map_or(0, |m| m.len()));
    let mut line = format!(
        "{} tokens in {} segments read in {seconds:.1} s, {rate} tokens/s; {} has {size}",
        thousands(tokens),
        thousands(segments),
        memory.display()
    );
    if !before.is_empty() {
        line += &format!(" and {} tokens in all", thousands(state.tokens_read()));
    }
    if counts.replaced() > 0 {
        line += &format!("; {} bytes were no UTF-8 and were read as U+FFFD", thousands(counts.replaced()));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_split_them() {
        assert_eq!(quote("a/b-1.txt"), "a/b-1.txt");
        assert_eq!(quote("it's here"), "'it'\\''s here'");
        assert_eq!(quote(""), "''");
    }
}
