//! Results as lines, JSON and CSV.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::ceiling::Ceilings;
use super::provenance::Provenance;
use super::record::Record;

/// What is measured.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Many query rows.
    Prefill,
    /// Few query rows against a long cache.
    Decode,
}

/// A call that could not be measured.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Failed {
    /// Which.
    pub call: String,
    /// Why.
    pub reason: String,
}

/// What the numbers were measured on, and the numbers.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Report {
    /// Prefill or decode.
    pub mode: Mode,
    /// Where the numbers come from.
    pub provenance: Provenance,
    /// The roofline; none where nothing sensible could be measured.
    pub ceilings: Option<Ceilings>,
    /// Calls.
    pub results: Vec<Record>,
    /// Calls that could not be measured.
    pub failed: Vec<Failed>,
    /// Where the others' numbers come from.
    #[serde(default)]
    pub peers: std::collections::BTreeMap<String, String>,
}

/// Name of a column, its value in a record, and whether it is a number.
pub type Column = (&'static str, fn(&Record) -> String, bool);

/// Columns of the CSV file.
static COLUMNS: &[Column] = &[
    ("model", |r| r.model.clone().unwrap_or_default(), false),
    ("dtype", |r| r.call.dtype.clone(), false),
    ("batch", |r| r.call.batch.to_string(), true),
    ("query_length", |r| r.call.query_length.to_string(), true),
    ("past_length", |r| r.call.past_length.to_string(), true),
    ("heads", |r| r.call.heads.to_string(), true),
    ("kv_heads", |r| r.call.kv_heads.to_string(), true),
    ("head_size", |r| r.call.head_size.to_string(), true),
    ("causal", |r| r.call.causal.to_string(), false),
    ("window", |r| r.call.window.to_string(), true),
    ("features", |r| r.features.clone(), false),
    ("kernels", |r| r.kernels.join(" "), false),
    ("launches", |r| r.launches.to_string(), true),
    ("runs", |r| r.runs.to_string(), true),
    ("buffer_sets", |r| r.buffer_sets.to_string(), true),
    ("median_us", |r| format!("{:.3}", r.median_us), true),
    ("p10_us", |r| format!("{:.3}", r.p10_us), true),
    ("p90_us", |r| format!("{:.3}", r.p90_us), true),
    ("cpu_us", |r| format!("{:.3}", r.cpu_us), true),
    ("tflop_per_s", |r| format!("{:.4}", r.tflop_per_s), true),
    ("gb_per_s", |r| format!("{:.2}", r.gb_per_s), true),
    ("roofline_us", |r| r.roofline_us.map_or(String::new(), |us| format!("{us:.3}")), true),
    (
        "roofline_fraction",
        |r| r.roofline_fraction.map_or(String::new(), |f| format!("{f:.4}")),
        true,
    ),
    ("checked_rows", |r| r.checked_rows.to_string(), true),
    ("max_abs_error", |r| format!("{:e}", r.max_abs_error), true),
    ("elements_out_of_tolerance", |r| r.elements_out_of_tolerance.to_string(), true),
    (
        "peers_us",
        |r| {
            r.peers
                .iter()
                .map(|p| format!("{}={:.3}", p.name, p.median_us))
                .collect::<Vec<_>>()
                .join("; ")
        },
        false,
    ),
];

/// Columns that people read; peers follow them.
pub fn columns(mode: Mode) -> Vec<Column> {
    let rate: Column = match mode {
        Mode::Prefill => ("TFLOP/s", |r| digits(r.tflop_per_s), true),
        Mode::Decode => ("GB/s", |r| digits(r.gb_per_s), true),
    };
    vec![
        ("layer", |r| r.model.clone().unwrap_or_else(|| r.heads()), false),
        ("type", |r| r.call.dtype.clone(), false),
        ("batch", |r| r.call.batch.to_string(), true),
        ("rows", |r| r.call.query_length.to_string(), true),
        ("past", |r| r.call.past_length.to_string(), true),
        ("median us", |r| format!("{:.1}", r.median_us), true),
        ("p10 to p90", |r| format!("{:.1} to {:.1}", r.p10_us, r.p90_us), true),
        rate,
        (
            "roofline",
            |r| r.roofline_fraction.map_or("-".to_owned(), |f| format!("{:.1}%", f * 100.0)),
            true,
        ),
        ("CPU us", |r| format!("{:.1}", r.cpu_us), true),
        ("launches", launches, true),
        ("check", Record::verdict, false),
        ("features", |r| r.features.clone(), false),
    ]
}

/// A back end without kernels launches none.
fn launches(record: &Record) -> String {
    if record.kernels.is_empty() { "-".to_owned() } else { record.launches.to_string() }
}

/// Names of all peers, in the order in which they come.
pub fn peer_names(records: &[Record]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for peer in records.iter().flat_map(|record| &record.peers) {
        if !names.contains(&peer.name) {
            names.push(peer.name.clone());
        }
    }
    names
}

/// A record's time of that peer: microseconds and the ratio.
pub fn peer_cell(record: &Record, name: &str) -> String {
    let peer = record.peers.iter().find(|peer| peer.name == name);
    peer.map_or("-".to_owned(), |peer| format!("{:.1} ({:.2}x)", peer.median_us, peer.ratio))
}

/// At least three digits.
fn digits(value: f64) -> String {
    let decimals = match value {
        large if large >= 100.0 => 0,
        middle if middle >= 10.0 => 1,
        small if small >= 1.0 => 2,
        tiny if tiny > 0.0 => 2 - tiny.log10().floor().max(-9.0) as i32,
        _ => 0,
    };
    format!("{value:.*}", decimals as usize)
}

/// A table as rows of cells, the first of them names, and which columns are numbers.
pub struct Table {
    /// Cells.
    pub rows: Vec<Vec<String>>,
    /// Of each column.
    pub numbers: Vec<bool>,
}

impl Table {
    /// Of those columns of the records.
    fn of(columns: &[Column], records: &[Record]) -> Self {
        let names = columns.iter().map(|column| column.0.to_owned()).collect();
        let cells = |record: &Record| columns.iter().map(|column| column.1(record)).collect();
        let rows = std::iter::once(names).chain(records.iter().map(cells)).collect();
        Self { rows, numbers: columns.iter().map(|column| column.2).collect() }
    }

    /// Results.
    pub fn results(mode: Mode, records: &[Record]) -> Self {
        Self::of(&columns(mode), records)
    }

    /// Results beside others; none where there are no others.
    pub fn side_by_side(mode: Mode, records: &[Record]) -> Option<Self> {
        let names = peer_names(records);
        let records: Vec<_> =
            records.iter().filter(|record| !record.peers.is_empty()).cloned().collect();
        // Layer, type, batch, rows, past and median.
        let mut table = Self::of(&columns(mode)[..6], &records);
        for (row, record) in table.rows.iter_mut().skip(1).zip(&records) {
            row.extend(names.iter().map(|name| peer_cell(record, name)));
        }
        table.rows[0][5] = "ours us".to_owned();
        table.numbers.extend(names.iter().map(|_| true));
        table.rows[0].extend(names.iter().map(|name| format!("{name} us (ratio)")));
        (!names.is_empty()).then_some(table)
    }

    /// Aligned text.
    pub fn lines(&self) -> Vec<String> {
        aligned(&self.rows, &self.numbers)
    }
}

fn aligned(rows: &[Vec<String>], numbers: &[bool]) -> Vec<String> {
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..numbers.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate().map(|(i, cell)| match numbers.get(i) {
            Some(true) => format!("{cell:>width$}", width = widths[i]),
            Some(false) => format!("{cell:<width$}", width = widths[i]),
            None => cell.clone(),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

impl Report {
    /// Why a call is faster than the roofline says, if one is: ceilings are of memory and of what
    /// [`Ceilings`] measures.
    pub fn note_of_roofline(&self) -> Option<&'static str> {
        let above = self.results.iter().any(|r| r.roofline_fraction > Some(1.0));
        above.then_some(
            "over 100% where a call's tensors are in a cache, which is faster than memory, or where \
             its products take instructions that the ceiling has not: AMX, float8",
        )
    }

    /// Which kernels the calls are made of, each list once.
    pub fn kernels(&self) -> Vec<String> {
        let mut lists: Vec<String> = Vec::new();
        for record in self.results.iter().filter(|record| !record.kernels.is_empty()) {
            let list = record.kernels.join(", ");
            if !lists.contains(&list) {
                lists.push(list);
            }
        }
        lists
    }

    /// Writes the results as CSV; every row says where it comes from.
    pub fn write_csv(&self, path: &Path) -> Result<()> {
        let name = || format!("--csv {}", path.display());
        let mut writer = csv::Writer::from_path(path).with_context(name)?;
        let Provenance { device, driver, commit, date, command, .. } = &self.provenance;
        let driver = driver.as_deref().unwrap_or_default();
        let origin = ["device", "driver", "commit", "date", "command"];
        writer.write_record(COLUMNS.iter().map(|column| column.0).chain(origin))?;
        for record in &self.results {
            let cells = COLUMNS.iter().map(|column| column.1(record));
            let origin = [device, driver, commit, date, command].map(str::to_owned);
            writer.write_record(cells.chain(origin))?;
        }
        writer.flush().with_context(name)
    }

    /// Success, if everything was measured and right.
    pub fn exit_code(&self) -> ExitCode {
        let wrong = self.results.iter().any(|record| record.elements_out_of_tolerance > 0);
        if wrong || !self.failed.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}
