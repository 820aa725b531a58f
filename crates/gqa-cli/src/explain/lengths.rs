//! `--lengths`: how a decode step over a paged KV cache divides the keys of sequences that differ
//! in length. The division is the kernels' own ([`Plan::division`]); how it runs is an estimate.

use std::fmt::Write as _;

use anyhow::{Result, bail};
use gqa_host::plan::{Division, Plan};
use gqa_host::{Pages, Problem, ProblemFields};
use serde_json::{Value, json};

use crate::shape::Shape;
use crate::usage::Usage;

/// Most sequences of a call.
const MOST: usize = 4096;
/// Rows of a block where `--block-size` does not say.
pub const BLOCK_SIZE: u64 = 16;
/// Columns and lines of the picture at most.
const COLUMNS: usize = 64;
const ROWS: usize = 32;

/// One of `--lengths`: `ROWS`, or `SEQUENCESxROWS`.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    sequences: usize,
    rows: usize,
}

/// What `--lengths` takes between its commas.
pub fn parse(text: &str) -> Result<Lengths, String> {
    let (sequences, rows) = text.split_once('x').unwrap_or(("1", text));
    let number = |text: &str, range: std::ops::RangeInclusive<usize>| {
        text.parse().ok().filter(|number| range.contains(number))
    };
    match (number(sequences, 1..=MOST), number(rows, 0..=(1 << 31) - 1)) {
        (Some(sequences), Some(rows)) => Ok(Lengths { sequences, rows }),
        _ => Err(format!("ROWS or SEQUENCESxROWS, such as 5000,30x900, of up to {MOST} sequences")),
    }
}

/// The rows of each sequence before the call.
pub fn all(lengths: &[Lengths]) -> Result<Vec<usize>> {
    let count = lengths.iter().map(|part| part.sequences).sum::<usize>();
    if count > MOST {
        bail!(Usage(format!("--lengths: got {count} sequences; allowed: up to {MOST}")));
    }
    let repeated = |part: &Lengths| std::iter::repeat_n(part.rows, part.sequences);
    Ok(lengths.iter().flat_map(repeated).collect())
}

/// The call over a cache that has as many blocks as the sequences need.
pub fn problem(shape: &Shape, lengths: &[usize]) -> Result<Problem> {
    let rows = |past: usize| past + shape.query_length;
    let size = shape.layer.block_size.unwrap_or(BLOCK_SIZE) as usize;
    let blocks = lengths.iter().map(|&past| rows(past).div_ceil(size)).sum();
    let one_each = shape.query_length == 1;
    let of_lengths = |pages: Pages| Pages { blocks, one_each, ..pages };
    let problem = shape.problem()?;
    Ok(problem.derive(|call| ProblemFields { pages: call.pages.map(of_lengths), ..call })?)
}

/// A plan's division, and when each part runs if CTAs take the places that become free first.
pub struct Schedule {
    lengths: Vec<usize>,
    division: Division,
    places: Vec<Place>,
}

/// What a place of a CTA does, one part after the other.
#[derive(Clone, Default)]
struct Place {
    /// Numbers of its parts.
    parts: Vec<usize>,
    /// Their key tiles.
    tiles: u32,
}

impl Schedule {
    /// Of sequences with that many rows before the call; `None` where the plan divides no keys by
    /// lengths.
    pub fn of(plan: &Plan, lengths: Vec<usize>) -> Result<Option<Self>> {
        let tokens = plan.problem().q_len;
        let integers = |numbers: &mut dyn Iterator<Item = usize>| {
            numbers.map(i32::try_from).collect::<Result<Vec<_>, _>>()
        };
        let starts = integers(&mut (0..=lengths.len()).map(|b| b * tokens))?;
        let past = integers(&mut lengths.iter().copied())?;
        let Some(division) = plan.division(Some(&starts), &past)? else { return Ok(None) };
        let mut places = vec![Place::default(); division.slots as usize];
        for (number, part) in division.parts.iter().enumerate() {
            let first = places.iter_mut().min_by_key(|place| place.tiles);
            let Some(place) = first else { break };
            place.parts.push(number);
            place.tiles += division.tiles_of(part);
        }
        Ok(Some(Self { lengths, division, places }))
    }

    /// Most key tiles of a slot, divided by the mean over all slots.
    fn busiest_over_mean(&self) -> f64 {
        let tiles = self.places.iter().map(|place| place.tiles);
        let mean = f64::from(tiles.clone().sum::<u32>()) / self.places.len() as f64;
        f64::from(tiles.max().unwrap_or_default()) / mean
    }

    /// Parts of each sequence.
    fn counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.lengths.len()];
        self.division.parts.iter().for_each(|part| counts[part.batch as usize] += 1);
        counts
    }

    /// In words, with a picture.
    pub fn text(&self) -> String {
        let Division { keys, slots, parts, tiles, .. } = &self.division;
        let mut text = String::new();
        let count = self.lengths.len();
        let _ = writeln!(
            text,
            "\ndivision of the keys by these lengths, the same for every KV head and row tile\n  \
             {count} sequences in {} parts, in tiles of {keys} keys, on {slots} CTAs at a time\n  \
             the busiest place of a CTA has {:.2} times the tiles of the mean",
            parts.len(),
            self.busiest_over_mean()
        );
        let _ = writeln!(text, "\n  sequence         rows   tiles   parts");
        let rows = self.lengths.iter().zip(tiles).zip(self.counts());
        let rows = rows.map(|((rows, tiles), parts)| [*rows, *tiles as usize, parts]);
        let mut first = 0;
        for same in rows.collect::<Vec<_>>().chunk_by(|one, other| one == other) {
            let [rows, tiles, parts] = same[0];
            let name = match same.len() {
                1 => format!("{} {first}", symbol(first)),
                more => format!("{} {first}-{}", symbol(first), first + more - 1),
            };
            let _ = writeln!(text, "  {name:<12} {rows:>8} {tiles:>7} {parts:>7}");
            first += same.len();
        }
        text.push_str("\n  places of CTAs, and whose tiles they read, from left to right\n");
        let most = self.places.iter().map(|place| place.tiles).max().unwrap_or_default().max(1);
        let bars = self.places.iter().map(|place| self.bar(place, most)).collect::<Vec<_>>();
        let mut first = 0;
        for same in bars.chunk_by(|one, other| one == other).take(ROWS) {
            let last = first + same.len() - 1;
            let places = if first == last { format!("{first}") } else { format!("{first}-{last}") };
            let _ = writeln!(text, "{}", format!("  {places:>9} {}", same[0]).trim_end());
            first = last + 1;
        }
        if first < bars.len() {
            let _ = writeln!(text, "  and {} more", bars.len() - first);
        }
        text
    }

    /// The parts of a slot, drawn as letters of their sequences and scaled to the longest slot. A
    /// part begins in upper case.
    fn bar(&self, place: &Place, most: u32) -> String {
        let column = |tiles: u32| tiles as usize * COLUMNS / most as usize;
        let (mut bar, mut tiles) = (String::new(), 0);
        for &number in &place.parts {
            let part = &self.division.parts[number];
            tiles += self.division.tiles_of(part);
            let of = symbol(part.batch as usize);
            let width = column(tiles).saturating_sub(bar.len());
            bar.extend((0..width).map(|i| if i == 0 { of.to_ascii_uppercase() } else { of }));
        }
        bar
    }

    /// The same as data.
    pub fn json(&self) -> Value {
        let counts = self.counts();
        let sequences = self.lengths.iter().zip(&self.division.tiles).zip(counts);
        let sequences = sequences
            .map(|((rows, tiles), parts)| json!({ "rows": rows, "tiles": tiles, "parts": parts }));
        let mut parts = vec![Value::Null; self.division.parts.len()];
        for (number, place) in self.places.iter().enumerate() {
            let mut start = 0;
            for &of in &place.parts {
                let part = &self.division.parts[of];
                let tiles = self.division.tiles_of(part);
                parts[of] = json!({ "sequence": part.batch, "part": part.split, "tiles": tiles,
                                    "place": number, "start": start });
                start += tiles;
            }
        }
        json!({
            "keys_of_a_tile": self.division.keys,
            "places": self.division.slots,
            "sequences": sequences.collect::<Vec<_>>(),
            "parts": parts,
            "busiest_over_mean": self.busiest_over_mean(),
        })
    }
}

/// A letter for a sequence.
fn symbol(sequence: usize) -> char {
    char::from(b'a' + (sequence % 26) as u8)
}
