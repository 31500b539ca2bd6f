//! Single changes of a recipe, as `armt train --set` makes them.

use crate::error::{Error, Result};

/// Makes one `key=value` change; `stage.2.steps=100` names the second stage.
pub(super) fn set(table: &mut toml::Table, change: &str) -> Result<()> {
    let refuse = |what: &str| Error::config("--set", "key=value with a key of the recipe", format!("{change} ({what})"));
    let (key, value) = change.split_once('=').ok_or_else(|| refuse("no ="))?;
    let parsed: toml::Table = toml::from_str(&format!("v = {value}"))
        .or_else(|_| toml::from_str(&format!("v = {}", toml::Value::String(value.into()))))
        .map_err(|_| refuse("not a value"))?;
    let value = parsed.get("v").cloned().ok_or_else(|| refuse("no value"))?;
    let mut parts: Vec<&str> = key.trim().split('.').collect();
    let last = parts.pop().ok_or_else(|| refuse("no key"))?;
    let mut at = table;
    let mut parts = parts.into_iter();
    while let Some(part) = parts.next() {
        let next = at.entry(part).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        at = match next {
            toml::Value::Table(table) => table,
            toml::Value::Array(list) => {
                let number: usize = parts.next().and_then(|n| n.parse().ok()).ok_or_else(|| refuse("expected a stage's number"))?;
                match number.checked_sub(1).and_then(|i| list.get_mut(i)) {
                    Some(toml::Value::Table(table)) => table,
                    _ => return Err(refuse("no such stage")),
                }
            }
            _ => return Err(refuse("not a table")),
        };
    }
    at.insert(last.into(), value);
    Ok(())
}
