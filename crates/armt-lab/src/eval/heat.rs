//! A table of shares as SVG: a square for each, the darker the more, with its percentage in it. The same table gives the same bytes.

use super::svg::Drawing;
use crate::error::{Error, Result};

/// White, and Okabe and Ito's blue darkened: told apart by anyone, and in print.
const NONE: [f64; 3] = [247.0, 249.0, 251.0];
const ALL: [f64; 3] = [0.0, 76.0, 128.0];
/// A square's sides, and the room for the names of rows and columns, in pixels.
const WIDE: f64 = 54.0;
const HIGH: f64 = 38.0;
const TOP: f64 = 46.0;

/// A table of shares from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatMap {
    /// Above the table.
    pub title: String,
    /// Below the columns' names.
    pub x_label: String,
    /// The columns' names.
    pub columns: Vec<String>,
    /// Each row's name and its shares, one for each column; `None` where nothing is known.
    pub rows: Vec<(String, Vec<Option<f64>>)>,
}

impl HeatMap {
    /// The table as an SVG file. Refuses one without rows or columns, a row of another length, and what is no share.
    pub fn svg(&self) -> Result<String> {
        if self.rows.is_empty() || self.columns.is_empty() {
            return Err(Error::input("table", "at least one row and column", "none"));
        }
        if let Some((name, row)) = self.rows.iter().find(|(_, row)| row.len() != self.columns.len()) {
            return Err(Error::input(name, format!("{} shares", self.columns.len()), row.len()));
        }
        if let Some(bad) = self.rows.iter().flat_map(|(_, row)| row).flatten().find(|s| !(0.0..=1.0).contains(*s)) {
            return Err(Error::input("table", "shares from 0 to 1", bad));
        }
        // About the width of the letters: there is no font here to measure.
        let longest = self.rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let left = 24.0 + 8.0 * longest as f64;
        let (right, bottom) = (left + WIDE * self.columns.len() as f64, TOP + HIGH * self.rows.len() as f64);
        let titled = left + 9.5 * self.title.chars().count() as f64;
        let mut d = Drawing::new((right + 20.0).max(titled), bottom + 58.0);
        d.text(left, 28.0, "start", r#"font-size="16" font-weight="bold""#, &self.title);
        for (r, (name, row)) in self.rows.iter().enumerate() {
            let y = TOP + HIGH * r as f64;
            d.text(left - 10.0, y + HIGH / 2.0 + 4.5, "end", "", name);
            for (c, share) in row.iter().enumerate() {
                draw(&mut d, left + WIDE * c as f64, y, *share);
            }
        }
        for (c, name) in self.columns.iter().enumerate() {
            d.text(left + WIDE * (c as f64 + 0.5), bottom + 18.0, "middle", "", name);
        }
        d.text((left + right) / 2.0, bottom + 44.0, "middle", r#"font-size="14""#, &self.x_label);
        Ok(d.finish())
    }
}

/// A square with its percentage, or a dash where there is none.
fn draw(d: &mut Drawing, x: f64, y: f64, share: Option<f64>) {
    let (colour, ink, text) = match share {
        None => ("#ffffff".to_string(), "#999999", "-".to_string()),
        Some(share) => {
            let mix = |i: usize| (NONE[i] + (ALL[i] - NONE[i]) * share).round() as u8;
            let colour = format!("#{:02x}{:02x}{:02x}", mix(0), mix(1), mix(2));
            // A share that is not all of them must not be rounded to look so.
            let percent = (100.0 * share).round().min(if share < 1.0 { 99.0 } else { 100.0 });
            (colour, if share > 0.45 { "#ffffff" } else { "#222222" }, format!("{percent:.0}"))
        }
    };
    d.add(format_args!(
        r##"<rect x="{x:.1}" y="{y:.1}" width="{WIDE:.1}" height="{HIGH:.1}" fill="{colour}" stroke="#ffffff" stroke-width="2"/>"##
    ));
    d.text(x + WIDE / 2.0, y + HIGH / 2.0 + 4.5, "middle", format_args!(r#"fill="{ink}""#), &text);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> HeatMap {
        HeatMap {
            title: "BABILong <ARMT>".into(),
            x_label: "tokens".into(),
            columns: ["0k", "1k", "1M"].map(String::from).to_vec(),
            rows: vec![
                ("qa1".into(), vec![Some(1.0), Some(0.996), None]),
                ("mean".into(), vec![Some(0.0), Some(0.5), Some(0.334)]),
            ],
        }
    }

    #[test]
    fn every_share_is_a_square_with_its_percentage_and_the_same_table_gives_the_same_bytes() {
        let svg = map().svg().unwrap();
        assert_eq!(svg, map().svg().unwrap());
        assert_eq!(svg.matches("<rect x=").count(), 6);
        assert!(
            svg.contains("BABILong &lt;ARMT&gt;")
                && [">100<", ">99<", ">-<", ">0<", ">50<", ">33<"].iter().all(|t| svg.contains(t))
        );
    }

    #[test]
    fn what_is_no_table_of_shares_is_refused() {
        assert!(HeatMap::default().svg().is_err());
        let with = |row: Vec<Option<f64>>| HeatMap { rows: vec![("qa1".into(), row)], ..map() }.svg().unwrap_err().to_string();
        assert!(with(vec![Some(1.0)]).contains("qa1: expected 3 shares, got 1"));
        assert!(with(vec![None, Some(1.5), None]).contains("got 1.5") && with(vec![None, Some(f64::NAN), None]).contains("NaN"));
    }
}
