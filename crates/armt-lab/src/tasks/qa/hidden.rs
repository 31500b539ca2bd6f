//! A context hidden among other text.

use std::sync::Arc;

use armt::random::Random;

use crate::error::Result;
use crate::tasks::babilong::{Books, Reading};

/// Hides contexts among the sentences of books.
#[derive(Clone)]
pub struct Hiding(pub Arc<Books>);

impl Hiding {
    /// A context with so much of other text around it that it has `length` tokens, whole sentences before it; as it is where it already has
    /// as many.
    pub fn hide(&self, context: &[i32], length: usize, mut random: Random) -> Result<Vec<i32>> {
        let background = length.saturating_sub(context.len());
        if background == 0 {
            return Ok(context.to_vec());
        }
        let before = random.below(background + 1);
        let mut reading = Reading::new(self.0.clone(), random)?;
        let mut text = Vec::with_capacity(length);
        loop {
            reading.advance()?;
            if text.len() + reading.sentence().len() > before {
                break;
            }
            text.extend_from_slice(reading.sentence());
        }
        text.extend_from_slice(context);
        while text.len() < length {
            let left = length - text.len();
            let sentence = reading.sentence();
            text.extend_from_slice(&sentence[..sentence.len().min(left)]);
            reading.advance()?;
        }
        Ok(text)
    }
}
