//! The figures of a report, and files of them: time and rate against length, place under the
//! roofline, ratio to others.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};

use super::ceiling::Ceilings;
use super::plot::{Axis, Figure, MOST_CURVES, Scale, Series};
use super::record::Record;
use super::report::{Mode, Report};
use gqa_host::DType;

/// All figures.
pub fn figures(report: &Report) -> Vec<Figure> {
    let records = &report.results;
    let length = Axis { label: report.mode.length(), scale: Scale::Log };
    let time = Axis { label: "microseconds of a call", scale: Scale::Log };
    let rate = Axis { label: report.mode.rate_unit(), scale: Scale::Linear };
    let against = |name: &str, title: &str, y, series| Figure {
        name: name.to_owned(),
        title: title.to_owned(),
        x: length,
        y,
        series,
        rule: None,
    };
    let rate_of = |record: &Record| report.mode.rate(record);
    let mut figures = vec![
        against("latency", "Time of a call", time, by_length(records, |record| record.median_us)),
        against("rate", report.mode.rate_title(), rate, by_length(records, rate_of)),
    ];
    if let Some(ceilings) = &report.ceilings {
        let title = match report.note_of_roofline() {
            Some(_) => "Place under the roofline; above it: in a cache, or AMX, float8",
            None => "Place under the roofline",
        };
        figures.push(Figure { title: title.to_owned(), ..roofline(records, ceilings) });
    }
    let ratios = ratios(records);
    if !ratios.is_empty() {
        let y = Axis { label: "their time over ours", scale: Scale::Linear };
        let figure = against("ratio", "Others' time over ours: above 1, ours is faster", y, ratios);
        figures.push(Figure { rule: Some(1.0), ..figure });
    }
    figures.into_iter().flat_map(split).collect()
}

/// Makes the folder of figures.
pub fn make_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("--plots {}", folder.display()))
}

impl Report {
    /// Writes every figure as SVG and PNG.
    pub fn write_plots(&self, folder: &Path) -> Result<()> {
        let name = || format!("--plots {}", folder.display());
        make_folder(folder)?;
        for figure in figures(self) {
            let path = |ending| folder.join(format!("{}.{ending}", figure.name));
            std::fs::write(path("svg"), figure.svg()?).with_context(name)?;
            std::fs::write(path("png"), figure.png()?).with_context(name)?;
        }
        Ok(())
    }
}

impl Mode {
    /// What sweeps go over.
    pub fn length(self) -> &'static str {
        match self {
            Self::Prefill => "rows of the prompt",
            Self::Decode => "rows in the cache",
        }
    }

    /// The rate that matters.
    pub fn rate(self, record: &Record) -> f64 {
        match self {
            Self::Prefill => record.tflop_per_s,
            Self::Decode => record.gb_per_s,
        }
    }

    /// Its unit.
    pub fn rate_unit(self) -> &'static str {
        match self {
            Self::Prefill => "TFLOP/s",
            Self::Decode => "GB/s",
        }
    }

    fn rate_title(self) -> &'static str {
        match self {
            Self::Prefill => "Arithmetic: operations of q·k and p·v that the mask leaves",
            Self::Decode => "Memory: bytes that must be read or written once",
        }
    }
}

/// A curve for each layer, type and batch.
fn by_length(records: &[Record], value: impl Fn(&Record) -> f64) -> Vec<Series> {
    let points =
        records.iter().map(|record| (record.series(), (record.length() as f64, value(record))));
    curves(points, true)
}

/// A curve for each peer and layer.
fn ratios(records: &[Record]) -> Vec<Series> {
    let points = records.iter().flat_map(|record| {
        let name = |peer: &str| format!("{peer}: {}", record.series());
        record
            .peers
            .iter()
            .map(move |peer| (name(&peer.name), (record.length() as f64, peer.ratio)))
    });
    curves(points, true)
}

fn curves(points: impl Iterator<Item = (String, (f64, f64))>, line: bool) -> Vec<Series> {
    let mut curves: Vec<Series> = Vec::new();
    let mut places = BTreeMap::new();
    for (name, point) in points {
        let place = *places.entry(name.clone()).or_insert(curves.len());
        if place == curves.len() {
            curves.push(Series { name, points: Vec::new(), line, dots: true });
        }
        curves[place].points.push(point);
    }
    for curve in &mut curves {
        curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}

/// Operations per second over operations per byte, under what the machine can do.
fn roofline(records: &[Record], ceilings: &Ceilings) -> Figure {
    let points =
        records.iter().map(|record| (record.series(), (record.intensity, record.tflop_per_s)));
    let placed = curves(points, false);
    let at = placed.iter().flat_map(|series| &series.points).map(|point| point.0);
    let (low, high) = at.fold((1.0f64, 1024.0f64), |(l, h), x| (l.min(x), h.max(x)));
    let single = records.iter().any(|record| record.call.dtype == DType::F32.to_string());
    let half = records.iter().any(|record| record.call.dtype != DType::F32.to_string());
    let roofs = [("16-bit", half, &ceilings.half), ("float32", single, &ceilings.single)];
    let same = ceilings.half.per_second == ceilings.single.per_second;
    let mut series = Vec::new();
    for (what, _, rate) in
        roofs.into_iter().filter(|(what, used, _)| *used && !(same && *what == "16-bit" && single))
    {
        let (peak, slope) = (rate.per_second * 1e-12, ceilings.memory.per_second * 1e-12);
        let knee = peak / slope;
        let points = [low, knee, high.max(knee * 2.0)].map(|x| (x, (x * slope).min(peak)));
        series.push(Series {
            name: format!("roofline, {what}"),
            points: points.to_vec(),
            line: true,
            dots: false,
        });
    }
    series.extend(placed);
    Figure {
        name: "roofline".to_owned(),
        title: String::new(),
        x: Axis { label: "operations per byte that must move", scale: Scale::Log },
        y: Axis { label: "TFLOP/s", scale: Scale::Log },
        series,
        rule: None,
    }
}

/// Figures of as many curves as can be told apart.
fn split(figure: Figure) -> Vec<Figure> {
    let (shared, own): (Vec<_>, Vec<_>) =
        figure.series.iter().cloned().partition(|series| series.line && !series.dots);
    let chunks: Vec<_> = own.chunks(MOST_CURVES).collect();
    let parts = chunks.len();
    let part = |(number, own): (usize, &[Series])| {
        let suffix = if parts > 1 { format!("-{}", number + 1) } else { String::new() };
        let title = if parts > 1 {
            format!("{} ({} of {parts})", figure.title, number + 1)
        } else {
            figure.title.clone()
        };
        let series = shared.iter().chain(own).cloned().collect();
        Figure { name: figure.name.clone() + &suffix, title, series, ..figure.clone() }
    };
    chunks.into_iter().enumerate().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A report of one call that takes that fraction of its time by the roofline.
    fn report(fraction: f64) -> Report {
        let result = json!({
            "model": null, "dtype": "bfloat16", "batch": 1, "query_length": 1, "past_length": 8,
            "heads": 2, "kv_heads": 1, "head_size": 32, "causal": true, "window": -1,
            "features": "", "kernels": [], "launches": 0, "runs": 1, "buffer_sets": 1,
            "median_us": 1.0, "p10_us": 1.0, "p90_us": 1.0,
            "cpu_us": 1.0, "tflop_per_s": 1.0, "gb_per_s": 1.0,
            "intensity": 1.0, "roofline_us": fraction,
            "roofline_fraction": fraction, "checked_rows": 1,
            "max_abs_error": 0.0, "elements_out_of_tolerance": 0
        });
        let rate = json!({ "per_second": 1e9, "source": "a test" });
        let report = json!({
            "mode": "decode",
            "provenance": {
                "version": "0", "commit": "0", "command": "gqa",
                "date": "today", "device": "cpu", "driver": null, "clocks": [],
                "cpu": "one", "system": "linux"
            },
            "ceilings": { "memory": rate, "half": rate, "single": rate },
            "results": [result], "failed": []
        });
        serde_json::from_value(report).unwrap()
    }

    #[test]
    fn who_is_faster_than_the_roofline_is_told_why() {
        let (below, above) = (report(0.9), report(3.82));
        assert!(below.note_of_roofline().is_none());
        let note = above.note_of_roofline().unwrap();
        assert!(note.contains("cache") && note.contains("AMX"), "{note}");
        let title = |report: &Report| {
            let figures = figures(report);
            figures.iter().find(|figure| figure.name == "roofline").unwrap().title.clone()
        };
        assert_eq!(title(&below), "Place under the roofline");
        assert!(title(&above).contains("above it"), "{}", title(&above));
        assert!(crate::bench::html::page(&above).unwrap().contains(note));
    }
}
