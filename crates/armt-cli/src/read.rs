//! `armt read`: texts into a memory file.

use std::fmt::Display;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use armt::Session;
use armt::reader::End;
use armt::text::Source;
use clap::Args;

use crate::device::DeviceArgs;
use crate::place::expect_place;
use crate::progress::{Meter, bytes, thousands};
use crate::read_each::ReadEach;
use armt_shipped::find_model;

const EXAMPLE: &str = "\
Examples:
  armt read gpt2-armt war-and-peace.txt --memory war.mem
  zcat wiki.txt.gz | armt read gpt2-armt - --memory wiki.mem
  armt read gpt2-armt war-and-peace.txt --memory war.mem --resume
  armt read gpt2-armt anna-karenina.txt --memory war.mem --append --new-document
  armt read gpt2-armt books/ --each memories/

Files are one text, as `cat` would join them, unless --new-document sets them apart. --append goes on where the memory's text ended,
within a word too, and needs nothing of what was read before.

Ctrl-C saves what was read so far. To go on, give the same texts with --resume: what the memory already holds is passed over. Where a text
was to be appended, Ctrl-C leaves the memory as it was.

--each reads many texts side by side, FILEs and all in folders among them, each into a memory file of its own: DIR/NAME.mem. Those that are there
are not read again, so that the same command goes on with a reading that was stopped.";

/// What is open at the end of a text is a word, unless it has more bytes than that.
const LARGE: usize = 4096;

/// What a shell sees of a command ended by Ctrl-C.
const INTERRUPTED: u8 = 130;

#[derive(Args)]
#[command(after_help = EXAMPLE)]
pub struct ReadArgs {
    /// Model folder, as `armt convert` writes it, a run's folder, or a model that comes with the program (babilong-qa1).
    model: PathBuf,
    /// Texts in UTF-8, read one after the other; - is standard input.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Adapter of the model, as training writes it (RUN/adapter), or its run's folder.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// File to keep the memory in.
    #[arg(long, value_name = "OUT", required_unless_present = "each")]
    memory: Option<PathBuf>,
    /// Folder to keep a memory of each text in.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["memory", "resume", "append", "new_document"])]
    each: Option<PathBuf>,
    /// Texts that --each reads side by side.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096), requires = "each")]
    batch: u64,
    /// Go on with a reading that was interrupted: the same texts, of which what the memory in OUT holds is passed over.
    #[arg(long, conflicts_with = "force")]
    resume: bool,
    /// Add the texts to the memory in OUT.
    #[arg(long, conflicts_with_all = ["force", "resume"])]
    append: bool,
    /// Each file is a document of its own: it begins a segment, and no word spans two. With --append the first is set apart from what the
    /// memory holds too.
    #[arg(long)]
    new_document: bool,
    /// Overwrite OUT; with --each read all texts again.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(args: &ReadArgs) -> Result<ExitCode> {
    if let Some(out) = &args.each {
        return args.read_each(out);
    }
    args.check()?;
    let documents = args.documents()?;
    let total = documents.iter().flatten().map(Source::bytes).sum::<Option<u64>>();
    let mut session = args.device.open_session(&args.model, args.adapter.as_deref())?;
    if args.resume || args.append {
        session.load(args.out())?;
    }
    let before = session.fork();
    let stop = Arc::new(AtomicBool::new(false));
    listen(stop.clone())?;
    let mut done = Done::default();
    let end = args.read_documents(&mut session, documents, total, &stop, &mut done);
    let unchanged = (session.state().counts(), session.state().tails()) == (before.state().counts(), before.state().tails());
    if unchanged {
        // Nothing new: no file is written, so a failed command leaves none behind.
        return match end? {
            End::Finished => {
                crate::say(format_args!("nothing left to read: the memory has all {} tokens", thousands(before.certain_tokens())))?;
                Ok(ExitCode::SUCCESS)
            }
            End::Stopped => args.stopped(&before, None),
        };
    }
    if args.append && !matches!(end, Ok(End::Finished)) {
        // A part of a text could not be gone on with.
        return match end {
            Ok(_) => {
                crate::say(format_args!("stopped: {} is as it was, and the same command begins again", args.out().display()))?;
                Ok(ExitCode::from(INTERRUPTED))
            }
            Err(error) => Err(error).with_context(|| format!("{} is as it was: reading failed", args.out().display())),
        };
    }
    session.save(args.out())?;
    let summary = args.summary(&before, &session, &done);
    match end {
        Ok(End::Finished) => {
            crate::say(format_args!("{summary}"))?;
            Ok(ExitCode::SUCCESS)
        }
        Ok(End::Stopped) => args.stopped(&session, Some(&summary)),
        Err(error) => Err(error).with_context(|| {
            format!(
                "{}: saved after {} tokens, when reading failed",
                args.out().display(),
                thousands(session.state().tokens_read())
            )
        }),
    }
}

/// What the documents so far had and took.
#[derive(Default)]
struct Done {
    bytes: u64,
    /// Bytes that were no UTF-8.
    replaced: u64,
    /// Without what was passed over.
    seconds: f64,
}

impl ReadArgs {
    /// Where the memory goes, where there is one.
    fn out(&self) -> &Path {
        self.memory.as_deref().unwrap_or(Path::new(""))
    }

    fn read_each(&self, out: &Path) -> Result<ExitCode> {
        find_model(&self.model)?;
        armt::files::make_folder(out)?;
        let session = self.device.open_session(&self.model, self.adapter.as_deref())?;
        let stop = Arc::new(AtomicBool::new(false));
        listen(stop.clone())?;
        ReadEach { files: &self.files, out, batch: self.batch as usize, force: self.force }.run(&session, &stop)
    }

    /// Everything that can be refused before the model is loaded.
    fn check(&self) -> Result<()> {
        find_model(&self.model)?;
        let out = self.out();
        expect_place(out)?;
        let option = if self.append { "--append" } else { "--resume" };
        match (out.exists(), self.resume || self.append, self.force) {
            (true, false, false) => {
                bail!("{}: it exists already; --append adds to it, --resume goes on from it, --force overwrites it", out.display())
            }
            (false, true, _) => bail!("{}: there is no such memory to go on from; leave out {option}", out.display()),
            _ => {}
        }
        if let Some(text) = self.files.iter().find(|file| is_same_file(file, out)) {
            bail!("{}: it is also a text to read and would be lost; name another file for the memory", text.display());
        }
        if self.files.iter().filter(|f| is_stdin(f)).count() > 1 {
            bail!("-: standard input can be read only once");
        }
        Ok(())
    }

    /// What is read as one text each.
    fn documents(&self) -> Result<Vec<Vec<Source>>> {
        let source = |path: &PathBuf| if is_stdin(path) { Ok(Source::stdin()) } else { Ok(Source::file(path)?) };
        let sources = self.files.iter().map(source).collect::<Result<Vec<_>>>()?;
        Ok(if self.new_document { sources.into_iter().map(|source| vec![source]).collect() } else { vec![sources] })
    }

    /// Reads documents into a session. Whatever ends it, the session has what was read.
    fn read_documents(
        &self,
        session: &mut Session,
        documents: Vec<Vec<Source>>,
        total: Option<u64>,
        stop: &Arc<AtomicBool>,
        done: &mut Done,
    ) -> Result<End> {
        let (last, held) = (documents.len() - 1, session.state().tokens_read());
        let mut passing = None;
        let mut resume = self.resume;
        if resume {
            crate::note(format_args!("passing over {} tokens that the memory has read", thousands(held)));
        }
        for (number, sources) in documents.into_iter().enumerate() {
            if self.new_document && !resume && (self.append || number > 0) {
                session.end_document()?;
            }
            let mut reading = match resume {
                true => session.reading_again(sources, stop.clone())?,
                false => session.reading(sources, stop.clone())?,
            };
            let counts = reading.counts();
            if resume {
                let passing = passing.get_or_insert(reading.passing()?);
                let mut meter = Meter::new(None, 0);
                let passed = reading.pass(passing, &mut |passed| meter.show(passed, 0));
                meter.finish();
                match passed {
                    Err(armt::Error::Interrupted) => return Ok(End::Stopped),
                    other => other?,
                }
                // A document that has ended leaves nothing open: what is open then is the next one's.
                let of_next = reading.passed_to_end() && !session.state().tails()[0].is_empty();
                if (!passing.is_over() || of_next) && number < last {
                    done.bytes += counts.bytes();
                    continue;
                }
                match reading.passed(passing) {
                    Err(armt::Error::Interrupted) => return Ok(End::Stopped),
                    other => other?,
                }
                resume = false;
            }
            let started = Instant::now();
            let mut meter = Meter::new(total, done.bytes + counts.bytes());
            let end = reading.run(&mut |progress| {
                meter.show(progress.tokens - held, done.bytes + counts.bytes());
                if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            meter.finish();
            done.seconds += started.elapsed().as_secs_f64();
            done.bytes += counts.bytes();
            done.replaced += counts.replaced();
            session.set_state(reading.into_state()?)?;
            if end? == End::Stopped {
                return Ok(End::Stopped);
            }
        }
        Ok(End::Finished)
    }

    /// What was read, how fast, and what there is now.
    fn summary(&self, before: &Session, after: &Session, done: &Done) -> String {
        let Done { seconds, replaced, .. } = *done;
        let (held, all) = (before.certain_tokens(), after.certain_tokens());
        let tokens = all.saturating_sub(held);
        let rate = thousands((tokens as f64 / seconds.max(1e-9)) as u64);
        let size = bytes(std::fs::metadata(self.out()).map_or(0, |m| m.len()));
        let place = self.out().display();
        let mut line = format!("{} tokens read in {seconds:.1} s, {rate} tokens/s; {place} has {size}", thousands(tokens));
        if held > 0 {
            line += &format!(" and {} tokens in all", thousands(all));
        }
        if replaced > 0 {
            let (s, were) = if replaced == 1 { ("", "was") } else { ("s", "were") };
            line += &format!("; {} byte{s} {were} no UTF-8 and {were} read as U+FFFD", thousands(replaced));
        }
        let open = after.state().tails()[0].text.bytes.len();
        if open > LARGE {
            line += &format!(
                "; its last {} bytes are no tokens yet, for nothing in them ends a word: each question reads them anew",
                thousands(open as u64)
            );
        }
        line
    }

    /// Says what was kept and how to go on.
    fn stopped(&self, session: &Session, summary: Option<&dyn Display>) -> Result<ExitCode> {
        match summary {
            Some(summary) => crate::say(format_args!("stopped: {summary}"))?,
            None => crate::say(format_args!("stopped before anything new was read"))?,
        }
        let quoted = |p: &Path| quote(&p.to_string_lossy());
        let mut command = vec!["armt".into(), "read".into(), quoted(&self.model)];
        command.extend(self.files.iter().map(|f| quoted(f)));
        command.extend(self.adapter.iter().flat_map(|adapter| ["--adapter".into(), quoted(adapter)]));
        command.extend(["--memory".into(), quoted(self.out())]);
        command.extend(self.device.arguments());
        if self.new_document {
            command.push("--new-document".into());
        }
        if self.append {
            command.push("--append".into());
        } else if !session.state().is_empty() {
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

/// Whether two names lead to one file that is there.
fn is_same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// A word as a shell takes it.
pub fn quote(word: &str) -> String {
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
