//! A context hidden among other text.

use std::sync::Arc;

use armt::random::Random;

use crate::error::Result;
use crate::tasks::babilong::{Books, Reading};

/// The other text around a context.
#[derive(Clone, Debug, Default)]
pub struct Hidden {
    /// Before it.
    pub before: Vec<i32>,
    /// After it.
    pub after: Vec<i32>,
}

impl Hidden {
    /// The context with what is around it.
    pub fn around(&self, context: &[i32]) -> Vec<i32> {
        [&self.before, context, &self.after].concat()
    }
}

/// Hides contexts among the sentences of books.
#[derive(Clone)]
pub struct Hiding(pub Arc<Books>);

impl Hiding {
    /// So much of other text around a context that together they have `length` tokens, whole sentences before it; none where it already has as
    /// many.
    pub fn hide(&self, context: &[i32], length: usize, mut random: Random) -> Result<Hidden> {
        let background = length.saturating_sub(context.len());
        if background == 0 {
            return Ok(Hidden::default());
        }
        let before = random.below(background + 1);
        let mut reading = Reading::new(self.0.clone(), random)?;
        let mut hidden = Hidden::default();
        loop {
            reading.advance()?;
            if hidden.before.len() + reading.sentence().len() > before {
                break;
            }
            hidden.before.extend_from_slice(reading.sentence());
        }
        let after = background - hidden.before.len();
        while hidden.after.len() < after {
            let left = after - hidden.after.len();
            let sentence = reading.sentence();
            hidden.after.extend_from_slice(&sentence[..sentence.len().min(left)]);
            reading.advance()?;
        }
        Ok(hidden)
    }
}
