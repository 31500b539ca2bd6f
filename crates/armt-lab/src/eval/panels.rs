//! Several plots of the same models on one sheet, side by side and with one legend: what would be too many lines for one frame.

use super::plot::{HEIGHT, Plot, RIGHT, Series, legend};
use super::svg::Drawing;
use crate::error::Result;

/// Panels beside each other.
const COLUMNS: usize = 2;
/// Size of a panel beside that of a plot of its own.
const SCALE: f64 = 0.78;
/// Room that a panel takes.
const WIDE: f64 = SCALE * (RIGHT + 34.0);
const HIGH: f64 = SCALE * HEIGHT + 10.0;

/// Plots that share axes and a legend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Panels {
    /// The plots, in rows. All have the same series in the same order, some without points, and a model has the same colour in each.
    pub plots: Vec<Plot>,
}

impl Panels {
    /// The sheet as an SVG file. Refuses what [`Plot::svg`] refuses of all points together.
    pub fn svg(&self) -> Result<String> {
        let first = self.plots.first().cloned().unwrap_or_default();
        let series: Vec<Series> = self.plots.iter().flat_map(|plot| plot.series.clone()).collect();
        let (x, y) = Plot { series, ..first.clone() }.axes()?;
        // The legend has the place of the panel after the last.
        let place = |i: usize| (WIDE * (i % COLUMNS) as f64, HIGH * (i / COLUMNS) as f64);
        let rows = (self.plots.len() + 1).div_ceil(COLUMNS);
        let mut d = Drawing::new(WIDE * COLUMNS as f64, HIGH * rows as f64);
        for (i, plot) in self.plots.iter().enumerate() {
            let (left, top) = place(i);
            d.add(format_args!(r#"<g transform="translate({left:.1} {top:.1}) scale({SCALE})">"#));
            plot.draw(&mut d, (&x, &y), &i.to_string());
            d.add(format_args!("</g>"));
        }
        let (left, top) = place(self.plots.len());
        for (i, series) in first.series.iter().enumerate() {
            legend(&mut d, (left + 40.0, top + 44.0 + 24.0 * i as f64), i, &series.name);
        }
        Ok(d.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::plot::{Mark, Scale};

    #[test]
    fn panels_share_axes_colours_and_a_legend() {
        let line = |name: &str, points: &[(f64, f64)]| Series {
            name: name.into(),
            marks: points.iter().map(|(x, y)| Mark { x: *x, y: *y, spread: None }).collect(),
        };
        let plot = |title: &str, series| Plot { title: title.into(), x_scale: Scale::Log, series, ..Plot::default() };
        let panels = Panels {
            plots: vec![
                plot("qa1", vec![line("a & b", &[(1.0, 1.0), (10.0, 0.5)]), line("c", &[])]),
                plot("qa2", vec![line("a & b", &[]), line("c", &[(10.0, 0.5), (1000.0, 0.25)])]),
            ],
        };
        let svg = panels.svg().unwrap();
        assert_eq!(svg, panels.svg().unwrap());
        assert_eq!((svg.matches(">a &amp; b<").count(), svg.matches(">c<").count()), (1, 1), "one legend");
        assert!([">qa1<", ">qa2<", "id=\"marks0\"", "id=\"marks1\""].iter().all(|part| svg.contains(part)));
        // The point that both have is at one place of each, in the colour of its model: a circle and a square.
        let centre = |mark: &str| svg.lines().filter(|l| l.contains(mark)).count();
        assert_eq!((centre("<circle"), centre("<polygon")), (3, 3), "two points and the legend");
        assert_eq!(svg.matches(">1000<").count(), 2, "both axes reach as far as the longest");
        assert!(Panels::default().svg().is_err());
    }
}
