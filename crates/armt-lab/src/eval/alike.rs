//! Whether reports of one name are seeds of one model, judged on the same texts in the same way.

use serde::Serialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// Refuses two reports of one name that differ in one of some keys: their mean would be of nothing.
pub(super) fn expect_alike(name: &str, keys: &[&str], reports: [&impl Serialize; 2]) -> Result<()> {
    let read = |report| serde_json::to_value(report).map_err(|e| Error::input(name, "a report", e));
    let [one, other] = [read(reports[0])?, read(reports[1])?];
    let told = |value: &Value| if value.is_null() { "none".to_string() } else { value.to_string() };
    match keys.iter().find(|key| one[**key] != other[**key]) {
        Some(key) => {
            let expected = format!("reports of one {key} under one name, whose mean is told (--names gives each another)");
            Err(Error::input(name, expected, format!("{} and {}", told(&one[*key]), told(&other[*key]))))
        }
        None => Ok(()),
    }
}
