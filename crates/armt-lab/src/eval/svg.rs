//! SVG text, element by element. The same drawing gives the same bytes.

use std::fmt::{Display, Write};

/// How the first line of every drawing begins and ends, and the second line. Plots are known by these.
const BEGIN: &str = r#"<svg xmlns="http://www.w3.org/2000/svg" width=""#;
const STYLE: &str = r##"font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" font-size="13" fill="#222222">"##;
const SHEET: &str = r##"<rect width="100%" height="100%" fill="#ffffff"/>"##;

/// Whether a file that begins so was drawn here: of all SVG the head alone tells it.
pub fn is_plot(head: &str) -> bool {
    let mut lines = head.lines();
    let first = lines.next().is_some_and(|line| line.starts_with(BEGIN) && line.ends_with(STYLE));
    first && lines.next() == Some(SHEET)
}

/// Text as it may stand in SVG. Control characters have no place in XML, escaped or not.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&apos;",
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Elements of the drawing, one a line.
pub(super) struct Drawing(String);

impl Drawing {
    /// An empty sheet.
    pub fn new(width: f64, height: f64) -> Self {
        let mut d = Drawing(String::new());
        d.add(format_args!(r#"{BEGIN}{width:.0}" height="{height:.0}" viewBox="0 0 {width:.0} {height:.0}" {STYLE}"#));
        d.add(format_args!("{SHEET}"));
        d
    }

    /// The whole file.
    pub fn finish(mut self) -> String {
        self.add(format_args!("</svg>"));
        self.0
    }

    pub fn add(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{element}");
    }

    pub fn text(&mut self, x: f64, y: f64, anchor: &str, more: impl Display, text: &str) {
        let text = escape(text);
        self.add(format_args!(r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" {more}>{text}</text>"#));
    }

    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
        self.add(format_args!(r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="{colour}"/>"#));
    }
}
