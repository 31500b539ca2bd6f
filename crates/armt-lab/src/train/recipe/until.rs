//! When a stage ends before its last step.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::{Serialize, Serializer};

/// The exact match at which a stage ends, or that none does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Until {
    /// It ends with its last step alone: `"never"`.
    Never,
    /// It ends when validation reaches this share, from 0 to 1.
    Reached(f64),
}

impl Default for Until {
    fn default() -> Self {
        Until::Reached(1.0)
    }
}

impl Until {
    /// Whether a stage with this exact match is over.
    pub fn reached(self, exact_match: f64) -> bool {
        self.mark().is_some_and(|mark| exact_match >= mark)
    }

    /// The exact match that is asked for, if one is.
    pub fn mark(self) -> Option<f64> {
        match self {
            Until::Never => None,
            Until::Reached(mark) => Some(mark),
        }
    }
}

impl<'de> Deserialize<'de> for Until {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UntilVisitor)
    }
}

impl Serialize for Until {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Until::Never => serializer.serialize_str("never"),
            Until::Reached(mark) => serializer.serialize_f64(*mark),
        }
    }
}

struct UntilVisitor;

impl Visitor<'_> for UntilVisitor {
    type Value = Until;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an exact match from 0 to 1, or \"never\"")
    }

    fn visit_f64<E: Error>(self, mark: f64) -> Result<Until, E> {
        match mark {
            mark if (0.0..=1.0).contains(&mark) => Ok(Until::Reached(mark)),
            // Recipes once said "never" by a number that no exact match reaches.
            mark if mark > 1.0 => Ok(Until::Never),
            mark => Err(E::invalid_value(serde::de::Unexpected::Float(mark), &self)),
        }
    }

    fn visit_i64<E: Error>(self, mark: i64) -> Result<Until, E> {
        self.visit_f64(mark as f64)
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<Until, E> {
        if word == "never" { Ok(Until::Never) } else { Err(E::invalid_value(serde::de::Unexpected::Str(word), &self)) }
    }
}
