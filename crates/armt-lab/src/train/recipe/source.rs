//! What a recipe is read from: a file, those that it `extends`, and single changes, made into one table that remembers where each key stands.
//!
//! A recipe that extends another has its keys over the other's. A `[model]` or `[memory]` of another kind takes the place of the other's whole,
//! and so do `[[stage]]`s; `[stage.8]` changes keys of the eighth.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use armt::files::read_text;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use crate::carried;
use crate::error::{Error, Result};

/// Recipes that extend one another, at most: more can only be a ring.
const DEEPEST: usize = 8;

/// Where a key stands.
#[derive(Clone, Debug, Default)]
struct Place {
    file: Option<PathBuf>,
    line: usize,
}

/// A recipe as a table, and where its keys stand, by their paths: `stage.2.batch` is of the second stage.
pub(super) struct Source {
    table: Table,
    places: BTreeMap<String, Place>,
    /// The file that was asked for.
    file: Option<PathBuf>,
}

impl Source {
    /// A file, and those that it extends: beside it, or carried by the program.
    pub fn open(path: &Path) -> Result<Self> {
        Self::extended(path, DEEPEST)
    }

    fn extended(path: &Path, deepest: usize) -> Result<Self> {
        let mut own = Self::parse(&read_text(path)?, Some(path))?;
        let Some(base) = own.table.remove("extends") else { return Ok(own) };
        let place = own.places.remove("extends").unwrap_or_default();
        let at = |reason: Error| mistake("extends", Some(&place), reason);
        let Some(name) = base.as_str() else {
            return Err(at(Error::config("extends", "the name of a recipe", &base)));
        };
        if deepest == 0 {
            return Err(at(Error::config("extends", "recipes that end somewhere", name)));
        }
        let file = carried::recipe(path.with_file_name(name), Path::new(name)).map_err(&at)?;
        let mut base = Self::extended(&file, deepest - 1).map_err(|e| match e {
            Error::Recipe { .. } => e,
            other => at(other),
        })?;
        base.cover(own)?;
        Ok(base)
    }

    /// A recipe's text, of a file where it is of one.
    pub fn parse(text: &str, file: Option<&Path>) -> Result<Self> {
        let line = |at: usize| 1 + text[..at.min(text.len())].matches('\n').count();
        let place = |at: usize| Place { file: file.map(Path::to_path_buf), line: line(at) };
        let refuse = |e: toml::de::Error| {
            let place = e.span().map(|span| place(span.start));
            mistake(
                "",
                place.as_ref().or(Some(&Place { file: file.map(Path::to_path_buf), line: 0 })),
                Error::Toml(e.message().into()),
            )
        };
        let spans = DeTable::parse(text).map_err(refuse)?;
        let table = toml::from_str(text).map_err(refuse)?;
        let mut places = BTreeMap::new();
        keys(spans.get_ref(), "", &mut |path, span| {
            places.insert(path, place(span.start));
        });
        Ok(Source { table, places, file: file.map(Path::to_path_buf) })
    }

    /// Takes another recipe's keys over its own.
    fn cover(&mut self, mut other: Source) -> Result<()> {
        for section in ["model", "memory"] {
            let kind = |table: &Table| table.get(section).and_then(|s| s.get("kind")).cloned();
            if kind(&other.table).is_some_and(|other| Some(other) != kind(&self.table)) {
                self.forget(section);
            }
        }
        match other.table.remove("stage") {
            Some(Value::Table(changes)) => self.change_stages(changes, &other.places)?,
            Some(stages) => {
                self.forget("stage");
                self.table.insert("stage".into(), stages);
            }
            None => {}
        }
        merge(&mut self.table, other.table);
        self.places.extend(other.places);
        self.file = other.file;
        Ok(())
    }

    /// Changes keys of single stages: `[stage.8]`.
    fn change_stages(&mut self, changes: Table, places: &BTreeMap<String, Place>) -> Result<()> {
        let count = self.table.get("stage").and_then(Value::as_array).map_or(0, Vec::len);
        for (number, change) in changes {
            let path = format!("stage.{number}");
            let stage =
                number.parse::<usize>().ok().and_then(|n| n.checked_sub(1)).and_then(|i| match self.table.get_mut("stage") {
                    Some(Value::Array(stages)) => stages.get_mut(i),
                    _ => None,
                });
            match (stage, change) {
                (Some(Value::Table(stage)), Value::Table(change)) => merge(stage, change),
                _ => {
                    let expected = format!("keys of one of the {count} stages of the recipe that is extended");
                    return Err(mistake(&path, places.get(&path), Error::config(&path, &expected, number)));
                }
            }
        }
        Ok(())
    }

    /// Drops a section and the places of its keys.
    fn forget(&mut self, section: &str) {
        self.table.remove(section);
        let within = format!("{section}.");
        self.places.retain(|path, _| path != section && !path.starts_with(&within));
    }

    /// Makes one `key=value` change, as `armt train --set` does; `stage.2.steps=100` names the second stage.
    pub fn set(&mut self, change: &str) -> Result<()> {
        let refuse = |what: &str| Error::config("--set", "key=value with a key of the recipe", format!("{change} ({what})"));
        let (key, value) = change.split_once('=').ok_or_else(|| refuse("no ="))?;
        let parsed: Table = toml::from_str(&format!("v = {value}"))
            .or_else(|_| toml::from_str(&format!("v = {}", Value::String(value.into()))))
            .map_err(|_| refuse("not a value"))?;
        let value = parsed.get("v").cloned().ok_or_else(|| refuse("no value"))?;
        let mut parts: Vec<&str> = key.trim().split('.').collect();
        let last = parts.pop().ok_or_else(|| refuse("no key"))?;
        let mut at = &mut self.table;
        let mut parts = parts.into_iter();
        while let Some(part) = parts.next() {
            let next = at.entry(part).or_insert_with(|| Value::Table(Table::new()));
            at = match next {
                Value::Table(table) => table,
                Value::Array(list) => {
                    let number: usize =
                        parts.next().and_then(|n| n.parse().ok()).ok_or_else(|| refuse("expected a stage's number"))?;
                    match number.checked_sub(1).and_then(|i| list.get_mut(i)) {
                        Some(Value::Table(table)) => table,
                        _ => return Err(refuse("no such stage")),
                    }
                }
                _ => return Err(refuse("not a table")),
            };
        }
        at.insert(last.into(), value);
        // Its line says something else now.
        self.places.remove(key.trim());
        Ok(())
    }

    /// What every recipe has, with `stage_keys` of each stage, and the rest, which is its task's: `[task]`, and the other keys of each stage.
    pub fn split(&self, stage_keys: &[&str]) -> (Table, Table) {
        let (mut shared, mut own) = (self.table.clone(), Table::new());
        own.insert("task".into(), shared.remove("task").unwrap_or_else(|| Table::new().into()));
        if let Some(Value::Array(stages)) = shared.get_mut("stage") {
            let split = stages.iter_mut().map(|stage| match stage {
                Value::Table(stage) => {
                    let (common, rest) = std::mem::take(stage).into_iter().partition(|(key, _)| stage_keys.contains(&key.as_str()));
                    *stage = common;
                    Value::Table(rest)
                }
                other => other.clone(),
            });
            own.insert("stage".into(), split.collect::<Vec<_>>().into());
        }
        (shared, own)
    }

    /// The text of a key that there must be.
    pub fn text(&self, path: &str) -> Result<String> {
        let found = path.split('.').try_fold(None::<&Value>, |above, key| match above {
            None => self.table.get(key).map(Some),
            Some(above) => above.get(key).map(Some),
        });
        let text = found.flatten().and_then(Value::as_str);
        text.map(String::from).ok_or_else(|| self.error(path, "", Error::config(path, "a name", "none")))
    }

    /// A part of the recipe. What does not fit its keys is an error with the file and line of the key.
    pub fn read<T>(&self, part: &Table, parse: impl FnOnce(&str) -> Result<T, toml::de::Error>) -> Result<T> {
        let text = toml::to_string(part).map_err(|e| Error::Toml(e.to_string()))?;
        parse(&text).map_err(|e| {
            let mut path = String::new();
            if let (Some(span), Ok(table)) = (e.span(), DeTable::parse(&text)) {
                let mut best = usize::MAX;
                keys(table.get_ref(), "", &mut |key, range| {
                    // The innermost key whose text has the place.
                    if range.contains(&span.start) && range.len() <= best {
                        (best, path) = (range.len(), key);
                    }
                });
            }
            let mut message = in_words(e.message());
            if message.starts_with("unknown field") && path.starts_with("stage.") {
                message += &format!("; every stage also has {}", super::Stage::KEYS.join(", "));
            }
            if message.starts_with("unknown field") && !path.contains('.') {
                message += "; a recipe also has task and extends";
            }
            self.error(&path, &path, Error::Toml(message))
        })
    }

    /// A mistake at a key, with its place. `part` is what the key's part of the recipe is called.
    pub fn error(&self, path: &str, part: &str, reason: Error) -> Error {
        let nowhere = Place { file: self.file.clone(), line: 0 };
        // A key that is missing is missing where its section is.
        let mut section = path;
        loop {
            if let Some(place) = self.places.get(section) {
                return mistake(part, Some(place), reason);
            }
            match section.rsplit_once('.') {
                Some((above, _)) => section = above,
                None => return mistake(part, Some(&nowhere), reason),
            }
        }
    }
}

/// What serde says of a value of the wrong kind, without the names of Rust's types.
fn in_words(message: &str) -> String {
    let kind = ["invalid type: ", "invalid value: "].into_iter().find_map(|start| message.strip_prefix(start));
    let Some((got, expected)) = kind.and_then(|rest| rest.rsplit_once(", expected ")) else { return message.into() };
    let expected = match expected {
        "usize" | "u32" | "u64" => "a whole number that is not negative",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "a text in quotes",
        "a sequence" => "a list",
        other => other,
    };
    format!("expected {expected}, got {got}")
}

fn mistake(part: &str, place: Option<&Place>, reason: Error) -> Error {
    Error::Recipe {
        file: place.and_then(|p| p.file.clone()),
        part: part.into(),
        line: place.map(|p| p.line).filter(|line| *line > 0),
        reason: Box::new(reason),
    }
}

/// Puts the keys of one table over another's, section by section.
fn merge(base: &mut Table, over: Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(Value::Table(base)), Value::Table(over)) => merge(base, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

/// Every key of a table by its path, with its text: from the key to the end of its value.
fn keys(table: &DeTable<'_>, above: &str, each: &mut dyn FnMut(String, Range<usize>)) {
    for (key, value) in table {
        let path = if above.is_empty() { key.get_ref().to_string() } else { format!("{above}.{}", key.get_ref()) };
        let (key, span) = (key.span(), value.span());
        each(path.clone(), key.start.min(span.start)..span.end.max(key.end));
        match value.get_ref() {
            DeValue::Table(inner) => keys(inner, &path, each),
            DeValue::Array(list) => {
                for (i, item) in list.iter().enumerate() {
                    let path = format!("{path}.{}", i + 1);
                    each(path.clone(), item.span());
                    if let DeValue::Table(inner) = item.get_ref() {
                        keys(inner, &path, each);
                    }
                }
            }
            _ => {}
        }
    }
}
