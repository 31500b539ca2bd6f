//! Texts: loss, perplexity and bits per byte, and what the memory gives to each segment.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use anyhow::Result;
use armt_lab::eval::text::{Report, judge};
use armt_lab::tasks::documents::{Document, Documents};
use armt_lab::tasks::words::Words;
use clap::{Args, ValueEnum};

use super::{EvalArgs, first_given};
use crate::place::{Written, expect_place_for};
use crate::progress::{Meter, thousands};
use crate::train::stop_on_signals;

#[derive(Args)]
#[command(next_help_heading = "Options of text")]
pub struct TextArgs {
    /// Texts to judge on: .txt, .md and .jsonl files (also .gz and .zst), folders and patterns.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<String>,
    /// The field of a row of a table that has its text; text if not given.
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// What one document is; a row of a table and a text as a whole if not given.
    #[arg(long, value_enum)]
    document: Option<DocumentKind>,
    /// Segments of each document that are read, at most; all if not given.
    #[arg(long, value_name = "N", value_parser = super::positive)]
    segments: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DocumentKind {
    File,
    Row,
    Line,
}

impl TextArgs {
    /// The first option that was given.
    pub fn given(&self) -> Option<&'static str> {
        first_given(&[
            ("--text", !self.text.is_empty()),
            ("--field", self.field.is_some()),
            ("--document", self.document.is_some()),
            ("--segments", self.segments.is_some()),
        ])
    }

    fn documents(&self) -> Result<Documents> {
        let document = self.document.map(|kind| match kind {
            DocumentKind::File => Document::File,
            DocumentKind::Row => Document::Row,
            DocumentKind::Line => Document::Line,
        });
        if self.text.is_empty() {
            anyhow::bail!("--text: expected the texts to judge on, got none");
        }
        Ok(Documents::open(&self.text, self.field.as_deref().unwrap_or("text"), document)?)
    }
}

pub fn run(args: &EvalArgs, folder: &Path) -> Result<ExitCode> {
    let own = &args.text;
    let plot = args.out.as_deref().map(|out| out.with_extension("svg"));
    if let Some(plot) = &plot {
        if args.out.as_ref() == Some(plot) {
            anyhow::bail!(
                "--out {}: expected the name of a report, beside which its plot is drawn, got that of the plot",
                plot.display()
            );
        }
        expect_place_for(Written::Plot, plot)?;
    }
    let documents = own.documents()?;
    let session = args.device.open_session(folder, args.adapter.as_deref())?;
    let model = session.model();
    let words = Words::new(session.tokenizer().clone(), Some(model.config()))?;
    let stop = stop_on_signals()?;
    let mut meter = Meter::new(None, 0);
    let judged = judge(model, &documents, &words, own.segments, &mut |judged| {
        meter.show(judged.tokens, judged.tokens);
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    meter.finish();
    let report = match judged {
        Err(armt_lab::Error::Interrupted) => return Ok(ExitCode::from(130)),
        other => Report { model: args.model.display().to_string(), name: args.name.clone(), ..other? },
    };
    tell(args, &report)?;
    if let (Some(out), Some(plot)) = (&args.out, plot) {
        report.save(out)?;
        armt::files::write_beside(&plot, report.plot().svg()?.as_bytes())?;
        args.say(format_args!("{} and {}", out.display(), plot.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn tell(args: &EvalArgs, report: &Report) -> Result<()> {
    let Report { loss, perplexity, bits_per_byte, emptied_loss, .. } = report;
    let documents = if report.documents == 1 { "1 document".into() } else { format!("{} documents", thousands(report.documents)) };
    args.say(format_args!("{} tokens of {documents}, segments of {}", thousands(report.tokens), report.segment_size))?;
    args.say(format_args!("loss {loss:.4}, perplexity {perplexity:.2}, bits per byte {bits_per_byte:.4}"))?;
    args.say(format_args!("with the memory emptied before each segment: loss {emptied_loss:.4}"))?;
    args.say(format_args!("\n{:>12} {:>12} {:>12} {:>12} {:>12}", "segment", "tokens", "loss", "emptied", "gained"))?;
    for range in report.ranges() {
        let segment = if range.from == range.to { range.from.to_string() } else { format!("{} to {}", range.from, range.to) };
        let gained = range.emptied - range.loss;
        let (tokens, loss, emptied) = (thousands(range.tokens), range.loss, range.emptied);
        args.say(format_args!("{segment:>12} {tokens:>12} {loss:>12.4} {emptied:>12.4} {gained:>12.4}"))?;
    }
    Ok(())
}
