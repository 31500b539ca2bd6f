//! Line plots as SVG text: several named series over a linear or logarithmic axis, with a shaded spread where points have one. The same
//! plot gives the same bytes.

use super::svg::Drawing;
use crate::error::{Error, Result};

/// Okabe and Ito's colours, which colour-blind readers can tell apart; the marks differ too.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444"];
/// The frame, in pixels from the left and the top.
const LEFT: f64 = 76.0;
pub(super) const RIGHT: f64 = 596.0;
const TOP: f64 = 46.0;
const BOTTOM: f64 = 366.0;
/// With ticks and the axis' label below the frame; a long legend needs more.
pub(super) const HEIGHT: f64 = BOTTOM + 58.0;

/// An axis' scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Equal distances for equal differences.
    #[default]
    Linear,
    /// Equal distances for equal ratios; only for numbers above 0.
    Log,
}

/// A point of a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    /// Where on the x axis.
    pub x: f64,
    /// Where on the y axis.
    pub y: f64,
    /// Least and most that y came to, where it is a mean.
    pub spread: Option<(f64, f64)>,
}

/// Points under one name, joined in their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// The points.
    pub marks: Vec<Mark>,
}

/// A dotted line up from the x axis, with its text along it.
#[derive(Clone, Debug, PartialEq)]
pub struct Guide {
    /// Where on the x axis.
    pub x: f64,
    /// What it says.
    pub label: String,
    /// Whose colour it has; `None`: grey, as it is for all.
    pub series: Option<usize>,
}

impl Guide {
    fn colour(&self) -> &'static str {
        self.series.map_or("#777777", |i| COLOURS[i % COLOURS.len()])
    }
}

/// A dashed grey line to compare the series with. The axes do not grow for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// What the legend says.
    pub name: String,
    /// Its points, joined in their order.
    pub points: Vec<(f64, f64)>,
}

/// A plot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plot {
    /// Above the frame.
    pub title: String,
    /// Below the x axis.
    pub x_label: String,
    /// Beside the y axis.
    pub y_label: String,
    /// Scale of the x axis.
    pub x_scale: Scale,
    /// Named places of the x axis, which then has no other ticks. Where they are close, only some have their names.
    pub x_ticks: Vec<(f64, String)>,
    /// What the y axis spans; `None`: all points and 0.
    pub y_range: Option<(f64, f64)>,
    /// The lines, in the order of the legend.
    pub series: Vec<Series>,
    /// What to compare them with.
    pub reference: Option<Reference>,
    /// Marked places of the x axis; those outside the axis are not drawn.
    pub guides: Vec<Guide>,
}

/// A spanned axis: where its numbers lie in pixels, and which of them have ticks.
pub(super) struct Axis {
    scale: Scale,
    from: f64,
    to: f64,
    pixels: (f64, f64),
    ticks: Vec<f64>,
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        let (from, to, value) = match self.scale {
            Scale::Linear => (self.from, self.to, value),
            Scale::Log => (self.from.ln(), self.to.ln(), value.ln()),
        };
        self.pixels.0 + (value - from) / (to - from) * (self.pixels.1 - self.pixels.0)
    }

    /// From tick to tick around the values.
    fn linear(from: f64, to: f64, pixels: (f64, f64)) -> Self {
        let (from, to) = if from < to { (from, to) } else { (from - 0.5, to + 0.5) };
        let step = round_step((to - from) / 6.0);
        let (first, last) = ((from / step - 1e-9).ceil() as i64, (to / step + 1e-9).floor() as i64);
        let ticks = (first..=last).map(|i| i as f64 * step).collect();
        Axis { scale: Scale::Linear, from, to, pixels, ticks }
    }

    /// From round number to round number around the values.
    fn rounded(from: f64, to: f64, pixels: (f64, f64)) -> Self {
        let (from, to) = if from < to { (from, to) } else { (from - 0.5, to + 0.5) };
        let step = round_step((to - from) / 6.0);
        Self::linear((from / step + 1e-9).floor() * step, (to / step - 1e-9).ceil() * step, pixels)
    }

    fn log(from: f64, to: f64, pixels: (f64, f64)) -> Self {
        let (from, to) = if from < to { (from, to) } else { (from / 2.0, to * 2.0) };
        let decades = (to / from).log10();
        let digits: &[f64] = if decades <= 4.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let every = (decades / 8.0).ceil().max(1.0) as usize;
        let (first, last) = (from.log10().floor() as i32, to.log10().ceil() as i32);
        let ticks = (first..=last).step_by(every).flat_map(|e| digits.iter().map(move |d| d * 10f64.powi(e)));
        let ticks = ticks.filter(|t| (from * (1.0 - 1e-9)..=to * (1.0 + 1e-9)).contains(t)).collect();
        Axis { scale: Scale::Log, from, to, pixels, ticks }
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powi(step.log10().floor() as i32);
    [1.0, 2.0, 5.0].into_iter().map(|d| d * power).find(|s| *s >= step * (1.0 - 1e-9)).unwrap_or(10.0 * power)
}

/// A tick's number without what rounding left at its end; thousands as k, millions as M.
fn number(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{}{unit}", if text == "-0" { "0" } else { text })
}

impl Drawing {
    /// The `i`th shape of mark.
    fn mark(&mut self, i: usize, x: f64, y: f64) {
        let colour = COLOURS[i % COLOURS.len()];
        let around = r##"stroke="#ffffff" stroke-width="1""##;
        let polygon = |points: &[(f64, f64)]| {
            let points: Vec<String> = points.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy)).collect();
            format!(r#"<polygon points="{}" fill="{colour}" {around}/>"#, points.join(" "))
        };
        let shape = match i % 4 {
            0 => format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="4.5" fill="{colour}" {around}/>"#),
            1 => polygon(&[(-4.0, -4.0), (4.0, -4.0), (4.0, 4.0), (-4.0, 4.0)]),
            2 => polygon(&[(0.0, -5.5), (5.0, 3.5), (-5.0, 3.5)]),
            _ => polygon(&[(0.0, -5.5), (5.5, 0.0), (0.0, 5.5), (-5.5, 0.0)]),
        };
        self.add(format_args!("{shape}"));
    }

    fn dashes(&mut self, points: &[(f64, f64)]) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.add(format_args!(
            r##"<polyline points="{}" fill="none" stroke="#888888" stroke-width="1.5" stroke-dasharray="7 5"/>"##,
            points.join(" ")
        ));
    }

    fn path(&mut self, points: &[(f64, f64)], i: usize) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        // A colour comes again with dashes.
        let dashes = if i >= COLOURS.len() { r#" stroke-dasharray="6 4""# } else { "" };
        let (points, colour) = (points.join(" "), COLOURS[i % COLOURS.len()]);
        self.add(format_args!(
            r#"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"{dashes}/>"#
        ));
    }
}

impl Plot {
    /// The plot as an SVG file. Refuses a plot without points, numbers that are not finite, and a logarithm of 0 or less.
    pub fn svg(&self) -> Result<String> {
        let (x, y) = self.axes()?;
        let names = || self.series.iter().map(|s| &s.name).chain(self.reference.iter().map(|r| &r.name));
        let longest = names().map(|name| name.chars().count()).max().unwrap_or(0);
        // About the width of the letters: there is no font here to measure.
        let width = RIGHT + 62.0 + 7.6 * longest as f64;
        let height = HEIGHT.max(TOP + 22.0 * names().count() as f64 + 16.0);
        let mut d = Drawing::new(width, height);
        self.draw(&mut d, (&x, &y), "");
        for (i, name) in names().enumerate() {
            let at = TOP + 12.0 + 22.0 * i as f64;
            match i < self.series.len() {
                true => legend(&mut d, (RIGHT + 16.0, at), i, name),
                false => {
                    d.dashes(&[(RIGHT + 16.0, at), (RIGHT + 44.0, at)]);
                    d.text(RIGHT + 52.0, at + 4.5, "start", "", name);
                }
            }
        }
        Ok(d.finish())
    }

    /// The plot without its legend. Names of elements end in `panel`, of which a sheet has several.
    pub(super) fn draw(&self, d: &mut Drawing, (x, y): (&Axis, &Axis), panel: &str) {
        d.text((LEFT + RIGHT) / 2.0, 28.0, "middle", r#"font-size="16" font-weight="bold""#, &self.title);
        self.draw_frame(d, x, y);
        // Marks may reach over the frame, a reference may not.
        for (id, over) in [("frame", 0.0), ("marks", 7.0)] {
            let (left, top) = (LEFT - over, TOP - over);
            let (wide, high) = (RIGHT - LEFT + 2.0 * over, BOTTOM - TOP + 2.0 * over);
            d.add(format_args!(
                r#"<clipPath id="{id}{panel}"><rect x="{left:.1}" y="{top:.1}" width="{wide:.1}" height="{high:.1}"/></clipPath>"#
            ));
        }
        let guides = || self.guides.iter().filter(|guide| (x.from..=x.to).contains(&guide.x));
        guides().for_each(|guide| draw_guide(d, guide, x.place(guide.x)));
        if let Some(Reference { points, .. }) = &self.reference {
            d.add(format_args!(r#"<g clip-path="url(#frame{panel})">"#));
            d.dashes(&points.iter().map(|(px, py)| (x.place(*px), y.place(*py))).collect::<Vec<_>>());
            d.add(format_args!("</g>"));
        }
        d.add(format_args!(r#"<g clip-path="url(#marks{panel})">"#));
        for (i, series) in self.series.iter().enumerate() {
            draw_spread(d, i, &series.marks, x, y);
        }
        for (i, series) in self.series.iter().enumerate() {
            let points: Vec<(f64, f64)> = series.marks.iter().map(|m| (x.place(m.x), y.place(m.y))).collect();
            d.path(&points, i);
            points.iter().for_each(|(px, py)| d.mark(i, *px, *py));
        }
        d.add(format_args!("</g>"));
        guides().for_each(|guide| label_guide(d, guide, x.place(guide.x)));
    }

    pub(super) fn axes(&self) -> Result<(Axis, Axis)> {
        let marks: Vec<&Mark> = self.series.iter().flat_map(|s| &s.marks).collect();
        if marks.is_empty() {
            return Err(Error::input("plot", "at least one point", "none"));
        }
        let xs = || marks.iter().map(|m| m.x);
        let ys = || marks.iter().flat_map(|m| [m.y].into_iter().chain(m.spread.into_iter().flat_map(|(low, high)| [low, high])));
        let reference = self.reference.iter().flat_map(|r| &r.points).flat_map(|(px, py)| [*px, *py]);
        if let Some(bad) = xs().chain(ys()).chain(reference).chain(self.guides.iter().map(|g| g.x)).find(|v| !v.is_finite()) {
            return Err(Error::input("plot", "finite numbers", bad));
        }
        let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
        let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NEG_INFINITY, f64::max);
        let (from, to) = (least(&mut xs()), most(&mut xs()));
        let x = match self.x_scale {
            // An axis that begins just above 0 had better begin there.
            Scale::Linear if from > 0.0 && from < 0.2 * to => Axis::linear(0.0, to, (LEFT, RIGHT - 12.0)),
            Scale::Linear => Axis::linear(from, to, (LEFT + 12.0, RIGHT - 12.0)),
            Scale::Log if from > 0.0 => Axis::log(from, to, (LEFT + 12.0, RIGHT - 12.0)),
            Scale::Log => return Err(Error::input("logarithmic axis", "numbers above 0", from)),
        };
        let y = match self.y_range {
            Some((from, to)) if from < to && from.is_finite() && to.is_finite() => Axis::linear(from, to, (BOTTOM, TOP)),
            Some((from, to)) => return Err(Error::input("y axis", "from less to more", format!("{from} to {to}"))),
            None => Axis::rounded(least(&mut ys()).min(0.0), most(&mut ys()).max(0.0), (BOTTOM, TOP)),
        };
        Ok((x, y))
    }

    fn draw_frame(&self, d: &mut Drawing, x: &Axis, y: &Axis) {
        let named = !self.x_ticks.is_empty();
        let ticks = if named { self.x_ticks.clone() } else { x.ticks.iter().map(|t| (*t, number(*t))).collect() };
        let mut free = f64::NEG_INFINITY;
        for (tick, name) in ticks.iter().filter(|(tick, _)| (x.from..=x.to).contains(tick) || !named) {
            let at = x.place(*tick);
            d.line((at, TOP), (at, BOTTOM), "#e6e6e6");
            // About half the width of the letters.
            let half = 3.7 * name.chars().count() as f64;
            if !named || at - half > free {
                d.text(at, BOTTOM + 18.0, "middle", "", name);
                free = at + half + 4.0;
            }
        }
        for tick in &y.ticks {
            let at = y.place(*tick);
            d.line((LEFT, at), (RIGHT, at), "#e6e6e6");
            d.text(LEFT - 8.0, at + 4.5, "end", "", &number(*tick));
        }
        d.line((LEFT, TOP), (LEFT, BOTTOM), "#444444");
        d.line((LEFT, BOTTOM), (RIGHT, BOTTOM), "#444444");
        d.text((LEFT + RIGHT) / 2.0, BOTTOM + 44.0, "middle", r#"font-size="14""#, &self.x_label);
        let (cx, cy) = (20.0, (TOP + BOTTOM) / 2.0);
        d.text(cx, cy, "middle", format_args!(r#"font-size="14" transform="rotate(-90 {cx:.1} {cy:.1})""#), &self.y_label);
    }
}

/// The `i`th series' line of a legend.
pub(super) fn legend(d: &mut Drawing, (x, y): (f64, f64), i: usize, name: &str) {
    d.path(&[(x, y), (x + 28.0, y)], i);
    d.mark(i, x + 14.0, y);
    d.text(x + 36.0, y + 4.5, "start", "", name);
}

fn draw_guide(d: &mut Drawing, guide: &Guide, at: f64) {
    let colour = guide.colour();
    d.add(format_args!(
        r#"<line x1="{at:.1}" y1="{TOP:.1}" x2="{at:.1}" y2="{BOTTOM:.1}" stroke="{colour}" stroke-width="1.5" stroke-dasharray="1.5 3"/>"#
    ));
}

/// Along the line, on its left or, where there is no room, its right; halfway up, as series crowd at top and bottom. White behind it keeps
/// it readable where a series crosses it.
fn label_guide(d: &mut Drawing, guide: &Guide, at: f64) {
    let tx = if at - LEFT > 20.0 { at - 5.0 } else { at + 14.0 };
    let ty = (TOP + BOTTOM) / 2.0;
    for paint in
        [r##"stroke="#ffffff" stroke-width="4" stroke-linejoin="round""##.to_string(), format!(r#"fill="{}""#, guide.colour())]
    {
        let turned = format_args!(r#"font-size="11" {paint} transform="rotate(-90 {tx:.1} {ty:.1})""#);
        d.text(tx, ty, "middle", turned, &guide.label);
    }
}

/// A band between the least and the most of neighbouring points, and bars where a point has none beside it.
fn draw_spread(d: &mut Drawing, i: usize, marks: &[Mark], x: &Axis, y: &Axis) {
    let colour = COLOURS[i % COLOURS.len()];
    for run in marks.split(|m| m.spread.is_none()) {
        let edges = run.iter().filter_map(|m| m.spread.map(|(low, high)| (x.place(m.x), y.place(low), y.place(high))));
        let edges: Vec<(f64, f64, f64)> = edges.collect();
        if let [(at, low, high)] = edges[..] {
            d.line((at, low), (at, high), colour);
            d.line((at - 4.0, low), (at + 4.0, low), colour);
            d.line((at - 4.0, high), (at + 4.0, high), colour);
        } else if !edges.is_empty() {
            let above = edges.iter().map(|(at, _, high)| (at, high));
            let below = edges.iter().rev().map(|(at, low, _)| (at, low));
            let points: Vec<String> = above.chain(below).map(|(px, py)| format!("{px:.1},{py:.1}")).collect();
            d.add(format_args!(r#"<polygon points="{}" fill="{colour}" fill-opacity="0.18"/>"#, points.join(" ")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot() -> Plot {
        let line = |name: &str, slope: f64, spread: bool| Series {
            name: name.into(),
            marks: [1.0, 2.0, 5.0, 10.0, 50.0, 200.0]
                .map(|x: f64| {
                    let y = (1.0 - slope * x.ln()).max(0.06);
                    Mark { x, y, spread: spread.then_some((y - 0.05, (y + 0.04).min(1.0))) }
                })
                .to_vec(),
        };
        Plot {
            title: "Exact match".into(),
            x_label: "pairs".into(),
            y_label: "share of <right> answers".into(),
            x_scale: Scale::Log,
            x_ticks: Vec::new(),
            y_range: Some((0.0, 1.0)),
            series: vec![line("ARMT", 0.02, true), line("RMT & \"friends\"", 0.2, false), line("PRMT", 0.12, true)],
            reference: None,
            guides: Vec::new(),
        }
    }

    #[test]
    fn the_same_plot_gives_the_same_bytes_and_text_is_escaped() {
        let svg = plot().svg().unwrap();
        assert_eq!(svg, plot().svg().unwrap());
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("RMT &amp; &quot;friends&quot;") && svg.contains("&lt;right&gt;"));
        assert_eq!((svg.matches("<polyline").count(), svg.matches("fill-opacity").count()), (6, 2));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn a_reference_and_guides_are_drawn_without_changing_the_axes() {
        let guide = |x, series| Guide { x, label: format!("trained <{x}>"), series };
        let reference = Some(Reference { name: "all of them".into(), points: vec![(1.0, 1.0), (200.0, 200.0)] });
        let with = Plot { reference, guides: vec![guide(50.0, None), guide(40.0, Some(1)), guide(900.0, None)], ..plot() };
        let (svg, before) = (with.svg().unwrap(), plot().svg().unwrap());
        assert!(svg.contains(">all of them<") && svg.contains("trained &lt;50&gt;"));
        assert_eq!(svg.matches("stroke-dasharray=\"1.5 3\"").count(), 2, "900 is outside");
        assert!(before.lines().filter(|l| l.contains("<circle")).all(|mark| svg.contains(mark)));
        assert!(Plot { guides: vec![guide(f64::NAN, None)], ..plot() }.svg().is_err());
    }

    #[test]
    fn ticks_are_round_and_reach_the_ends() {
        let ticks = |axis: Axis| axis.ticks.iter().map(|t| number(*t)).collect::<Vec<_>>().join(" ");
        let pixels = (0.0, 1.0);
        assert_eq!(ticks(Axis::linear(0.0, 1.0, pixels)), "0 0.2 0.4 0.6 0.8 1");
        assert_eq!(ticks(Axis::rounded(-3.0, 47.0, pixels)), "-10 0 10 20 30 40 50");
        assert_eq!(ticks(Axis::log(1.0, 200.0, pixels)), "1 2 5 10 20 50 100 200");
        assert_eq!(ticks(Axis::log(1.0, 1e6, pixels)), "1 10 100 1000 10k 100k 1M");
        assert_eq!(Axis::log(1.0, 100.0, (10.0, 30.0)).place(10.0), 20.0);
    }

    #[test]
    fn named_ticks_stand_in_the_place_of_numbers_where_there_is_room() {
        let x_ticks =
            [(1.0, "one"), (1.01, "close by"), (50.0, "fifty"), (900.0, "outside")].map(|(x, name)| (x, name.to_string())).to_vec();
        let svg = Plot { x_ticks, ..plot() }.svg().unwrap();
        assert!(svg.contains(">one<") && svg.contains(">fifty<") && !svg.contains(">20<"));
        assert!(!svg.contains(">close by<") && !svg.contains(">outside<"));
    }

    #[test]
    fn one_point_alone_is_drawn() {
        for x_scale in [Scale::Linear, Scale::Log] {
            let series = vec![Series { name: "a".into(), marks: vec![Mark { x: 3.0, y: 0.0, spread: Some((0.0, 0.0)) }] }];
            let svg = Plot { x_scale, series, ..Plot::default() }.svg().unwrap();
            assert!(svg.contains("<circle") && !svg.contains("NaN"));
        }
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        assert!(Plot::default().svg().is_err());
        let with = |x, y| Plot { series: vec![Series { name: String::new(), marks: vec![Mark { x, y, spread: None }] }], ..plot() };
        assert!(with(1.0, f64::NAN).svg().unwrap_err().to_string().contains("NaN"));
        assert!(with(0.0, 1.0).svg().unwrap_err().to_string().contains("above 0"));
        assert!(Plot { y_range: Some((1.0, 1.0)), ..plot() }.svg().is_err());
    }
}
