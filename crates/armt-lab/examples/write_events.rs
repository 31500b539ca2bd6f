//! Writes the event files of a run that is stopped and resumed, for `scripts/check-tensorboard` to read back.

use std::path::Path;

use armt_lab::train::EventWriter;

/// The values of a step: what the script expects too.
fn values(step: u64) -> [(&'static str, f32); 3] {
    [("train/loss", 1.0 / (step + 1) as f32), ("train/rate", -0.5 * step as f32), ("valid/größe", 3.0e38)]
}

fn main() -> armt_lab::Result<()> {
    let Some(folder) = std::env::args().nth(1) else {
        return Err(armt_lab::Error::input("folder", "one to write to", "nothing"));
    };
    let mut first = EventWriter::create(Path::new(&folder))?;
    for step in 0..=200 {
        first.scalars(step, &values(step))?;
    }
    // The run goes on from step 150: what the first file says of later steps is to be forgotten.
    let mut second = EventWriter::create(Path::new(&folder))?;
    second.resume_after(150)?;
    for step in (151..300).chain([1 << 40]) {
        second.scalars(step, &values(step))?;
    }
    Ok(())
}
