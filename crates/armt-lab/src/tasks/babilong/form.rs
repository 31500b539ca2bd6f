//! How a context is written. The benchmark has been published in two forms, whose tokens differ; before they were told apart, this
//! project had a mixture of both.
//!
//! | | now | paper | mixed |
//! |---|---|---|---|
//! | space before a fact | yes | no | no |
//! | space before a sentence of background | yes | no | yes |
//! | line breaks within a sentence | kept | kept | joined |
//! | tokens of length L | L - 300 | 512 n - 20 for n whole segments | L |

use std::fmt;
use std::str::FromStr;

use armt::text::Lines;
use serde::{Deserialize, Serialize};

use super::Length;
use crate::error::{Error, Result};

/// What today's benchmark leaves of a length for its prompt.
const PROMPT: usize = 300;
/// What the paper's repository leaves of the last of its segments, of so many tokens, for question and answer.
const MARGIN: usize = 20;
const SEGMENT: usize = 512;

/// One of the forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Form {
    /// That of the benchmark's repository since November 2024.
    Now,
    /// That of the paper's repository.
    Paper,
    /// This project's own before them.
    #[default]
    Mixed,
}

impl Form {
    /// All of them.
    pub const ALL: [Form; 3] = [Form::Now, Form::Paper, Form::Mixed];

    /// What stands before each fact.
    pub fn before_fact(self) -> &'static str {
        if self == Form::Now { " " } else { "" }
    }

    /// What stands before each sentence of background.
    pub fn before_background(self) -> &'static str {
        if self == Form::Paper { "" } else { " " }
    }

    /// What becomes of line breaks within a sentence.
    pub fn lines(self) -> Lines {
        if self == Form::Mixed { Lines::Joined } else { Lines::Kept }
    }

    /// Tokens of facts and background where a length is asked for; 0 stays the facts alone. Of today's form the lengths up to 300 have no
    /// room, and are refused.
    pub fn tokens(self, length: Length) -> Result<Length> {
        Ok(Length(match (self, length.0) {
            (_, 0) => 0,
            (Form::Mixed, n) => n,
            (Form::Now, n) if n > PROMPT => n - PROMPT,
            (Form::Now, _) => {
                return Err(Error::config(
                    "length",
                    &format!("0k or more than {PROMPT} tokens, which the form `now` leaves free"),
                    length,
                ));
            }
            (Form::Paper, n) => ((n + SEGMENT / 2) / SEGMENT).max(1) * SEGMENT - MARGIN,
        }))
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::Now => "now",
            Form::Paper => "paper",
            Form::Mixed => "mixed",
        })
    }
}

impl FromStr for Form {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Form::ALL.into_iter().find(|f| f.to_string() == s).ok_or_else(|| Error::config("form", "now, paper or mixed", s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_has_the_tokens_of_its_form() {
        let tokens = |form: Form, n| form.tokens(Length(n)).unwrap().0;
        assert_eq!([0, 1000, 64_000].map(|n| tokens(Form::Now, n)), [0, 700, 63_700]);
        assert_eq!([0, 100, 1000, 4000, 64_000].map(|n| tokens(Form::Paper, n)), [0, 492, 1004, 4076, 63_980]);
        assert_eq!(tokens(Form::Mixed, 700), 700);
        assert!(Form::Now.tokens(Length(300)).unwrap_err().to_string().contains("more than 300"));
    }

    #[test]
    fn forms_are_written_as_they_are_shown() {
        assert!(Form::ALL.iter().all(|f| f.to_string().parse::<Form>().unwrap() == *f));
        assert!("new".parse::<Form>().unwrap_err().to_string().contains("now, paper or mixed"));
    }
}
