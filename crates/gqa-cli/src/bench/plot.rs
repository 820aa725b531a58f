//! Figures, as SVG and PNG.

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// How an axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// From zero.
    Linear,
    /// Doublings.
    Log,
}

/// An axis.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// What it counts, with its unit.
    pub label: &'static str,
    /// How.
    pub scale: Scale,
}

/// A curve.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// In the order in which they are joined.
    pub points: Vec<(f64, f64)>,
    /// Joined by a line.
    pub line: bool,
    /// With a dot at each point; a line without dots is a guide and has the colour of text.
    pub dots: bool,
}

/// A figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// File name without ending.
    pub name: String,
    /// Over the figure.
    pub title: String,
    /// To the right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// Curves.
    pub series: Vec<Series>,
    /// A line across, such as 1 for a ratio.
    pub rule: Option<f64>,
}

/// Page, text, axes and mesh. The report's style sheet finds them by these values and exchanges
/// them on a dark page.
pub const PAGE: RGBColor = RGBColor(255, 255, 255);
/// Text.
pub const INK: RGBColor = RGBColor(31, 35, 40);
/// Axes.
pub const AXIS: RGBColor = RGBColor(110, 119, 129);
/// Mesh.
pub const MESH: RGBColor = RGBColor(222, 227, 232);

/// Told apart by people of all kinds of colour vision, and on light and dark pages.
const CURVES: [RGBColor; 8] = [
    RGBColor(31, 119, 214),
    RGBColor(222, 110, 16),
    RGBColor(26, 152, 106),
    RGBColor(201, 76, 165),
    RGBColor(178, 134, 0),
    RGBColor(30, 160, 185),
    RGBColor(211, 53, 53),
    RGBColor(128, 110, 214),
];

/// Curves in a figure at most: more are not told apart.
pub const MOST_CURVES: usize = CURVES.len();

const FONT: &str = "sans-serif";
const SIZE: (u32, u32) = (860, 440);
const LEGEND_ROW: u32 = 20;

impl Figure {
    /// As SVG text.
    pub fn svg(&self) -> Result<String> {
        let mut text = String::new();
        let area = SVGBackend::with_string(&mut text, self.size(1)).into_drawing_area();
        self.draw(&area, 1)?;
        drop(area);
        Ok(text)
    }

    /// As a PNG file's bytes, two pixels for each of the SVG's units.
    pub fn png(&self) -> Result<Vec<u8>> {
        let (width, height) = self.size(2);
        let mut pixels = vec![0; (width * height * 3) as usize];
        let area = BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area();
        self.draw(&area, 2)?;
        drop(area);
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.write_header()?.write_image_data(&pixels)?;
        Ok(bytes)
    }

    fn size(&self, zoom: u32) -> (u32, u32) {
        (SIZE.0 * zoom, (SIZE.1 + LEGEND_ROW * self.series.len() as u32) * zoom)
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>, zoom: u32) -> Result<()> {
        let registered = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
        registered.map_err(|_| anyhow!("the font that is built in cannot be read"))?;
        let drawn = self.draw_all(area, zoom).map_err(|error| anyhow!("{error}"));
        drawn.with_context(|| format!("figure {}", self.name))
    }

    fn draw_all<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>, zoom: u32) -> Outcome<B> {
        area.fill(&PAGE)?;
        let (plot, legend) = area.split_vertically(SIZE.1 * zoom);
        self.draw_plot(&plot, zoom)?;
        for (number, (series, color)) in self.colored().enumerate() {
            let y = (LEGEND_ROW * zoom * number as u32 + 6 * zoom) as i32;
            let (left, right) = ((78 * zoom) as i32, (102 * zoom) as i32);
            let style = color.stroke_width(2 * zoom);
            if series.line {
                legend.draw(&PathElement::new(vec![(left, y), (right, y)], style))?;
            }
            if series.dots {
                let middle = ((left + right) / 2, y);
                legend.draw(&Circle::new(middle, (4 * zoom) as i32, color.filled()))?;
            }
            let text = text(13, zoom).pos(Pos::new(HPos::Left, VPos::Center));
            legend.draw_text(&series.name, &text, (right + (8 * zoom) as i32, y))?;
        }
        area.present()
    }

    fn draw_plot<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>, zoom: u32) -> Outcome<B> {
        let (xs, ys) = (self.range(self.x, |point| point.0), self.range(self.y, |point| point.1));
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, text(17, zoom))
            .margin(14 * zoom)
            .x_label_area_size(44 * zoom)
            .y_label_area_size(66 * zoom)
            .build_cartesian_2d(xs.0..xs.1, ys.0..ys.1)?;
        let labels = |axis: Axis| move |value: &f64| axis.format(*value);
        chart
            .configure_mesh()
            .axis_style(AXIS.stroke_width(zoom))
            .bold_line_style(MESH.stroke_width(zoom))
            .light_line_style(TRANSPARENT)
            .x_labels(ticks(self.x, xs, 12))
            .y_labels(ticks(self.y, ys, 8))
            .x_label_formatter(&labels(self.x))
            .y_label_formatter(&labels(self.y))
            .x_desc(self.x.label)
            .y_desc(self.y.label)
            .label_style(text(13, zoom))
            .axis_desc_style(text(14, zoom))
            .draw()?;
        if let Some(rule) = self.rule.map(|rule| self.y.place(rule)) {
            let line = vec![(xs.0, rule), (xs.1, rule)];
            chart.draw_series([PathElement::new(line, INK.stroke_width(zoom))])?;
        }
        for (series, color) in self.colored() {
            let points = series.points.iter().map(|&(x, y)| (self.x.place(x), self.y.place(y)));
            if series.line {
                chart.draw_series(LineSeries::new(points.clone(), color.stroke_width(2 * zoom)))?;
            }
            if series.dots {
                chart.draw_series(points.map(|at| Circle::new(at, 4 * zoom, color.filled())))?;
            }
        }
        Ok(())
    }

    /// Curves with their colours.
    fn colored(&self) -> impl Iterator<Item = (&Series, RGBColor)> {
        let mut colors = CURVES.iter().cycle();
        self.series.iter().map(move |series| {
            let guide = series.line && !series.dots;
            (series, if guide { INK } else { *colors.next().unwrap_or(&INK) })
        })
    }

    /// What the axis shows: all points, and a little more.
    fn range(&self, axis: Axis, coordinate: impl Fn(&(f64, f64)) -> f64) -> (f64, f64) {
        let points = self.series.iter().flat_map(|series| &series.points).map(coordinate);
        let places = points.map(|value| axis.place(value)).filter(|place| place.is_finite());
        let (low, high) = places.fold((f64::MAX, f64::MIN), |(l, h), p| (l.min(p), h.max(p)));
        match axis.scale {
            _ if low > high => (0.0, 1.0),
            Scale::Linear => (0.0, high.max(self.rule.unwrap_or(0.0)) * 1.08),
            Scale::Log => (low.floor() - 0.15, high.ceil().max(low.floor() + 1.0) + 0.15),
        }
    }
}

type Outcome<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn text(size: u32, zoom: u32) -> TextStyle<'static> {
    (FONT, (size * zoom) as i32).into_text_style(&(SIZE.0 * zoom, SIZE.1 * zoom)).color(&INK)
}

/// Labels on an axis, so that on a logarithmic one they are whole doublings.
fn ticks(axis: Axis, (low, high): (f64, f64), most: usize) -> usize {
    let doublings = (high.floor() - low.ceil()) as usize + 1;
    if axis.scale == Scale::Linear { most } else { doublings.min(most) }
}

impl Axis {
    /// Where the value is drawn.
    fn place(&self, value: f64) -> f64 {
        if self.scale == Scale::Linear { value } else { value.log2() }
    }

    /// The label at a place.
    fn format(&self, place: f64) -> String {
        match self.scale {
            Scale::Linear => number(place),
            Scale::Log if (place - place.round()).abs() > 1e-6 => String::new(),
            Scale::Log => number(place.round().exp2()),
        }
    }
}

/// Three digits, and K for 1024.
fn number(value: f64) -> String {
    let kibi = value / 1024.0;
    if value >= 1024.0 && kibi.fract() == 0.0 && kibi < 1024.0 {
        return format!("{kibi}K");
    }
    let text = match value.abs() {
        0.0 => return "0".to_owned(),
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure() -> Figure {
        let points = vec![(64.0, 12.0), (128.0, 20.0), (256.0, 50.0)];
        Figure {
            name: "latency".into(),
            title: "Latency <&>".into(),
            x: Axis { label: "rows", scale: Scale::Log },
            y: Axis { label: "us", scale: Scale::Linear },
            series: vec![Series { name: "a".into(), points, line: true, dots: true }],
            rule: Some(1.0),
        }
    }

    #[test]
    fn an_svg_has_a_dot_for_each_point_and_one_for_the_legend() {
        let svg = figure().svg().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 4);
        let lines = |color: &str| {
            svg.lines().filter(|l| l.starts_with("<polyline") && l.contains(color)).count()
        };
        assert_eq!(lines("stroke=\"#1F77D6\""), 2, "the curve and its legend");
        assert_eq!(lines("stroke=\"#1F2328\""), 1, "the rule");
        assert!(svg.contains("Latency &lt;&amp;&gt;"));
        for label in ["64", "128", "256"] {
            assert!(svg.contains(&format!("\n{label}\n")), "{label} in {svg}");
        }
    }

    #[test]
    fn a_png_has_the_figure_at_twice_the_size() {
        let bytes = figure().png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (1720, 920));
        let curve = [CURVES[0].0, CURVES[0].1, CURVES[0].2];
        assert!(pixels.chunks(3).filter(|pixel| *pixel == curve).count() > 1000);
    }

    #[test]
    fn figures_without_points_are_drawn() {
        assert!(Figure { series: Vec::new(), ..figure() }.svg().is_ok());
    }

    #[test]
    fn labels_are_short() {
        let got = [0.0, 0.125, 1.5, 64.0, 128.0, 4096.0, 12345.0, 65536.0].map(number);
        assert_eq!(got, ["0", "0.125", "1.5", "64", "128", "4K", "12345", "64K"]);
    }
}
