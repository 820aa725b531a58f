//! Random tensors for a call, with valid lengths and block tables.

use crate::problem::{Alignment, CallKind, Pages, Phase, Problem, QuantFormat};
use crate::tensors::{TensorId, TensorSpec};
use gqa_tensor::{DType, Result, Tensor};

/// All tensors that a call reads, including the cache that it appends to. Queries are large enough
/// that softmax distinguishes keys.
///
/// # Errors
/// Where there is no memory for them.
pub fn tensors(p: &Problem, seed: u64) -> Result<Vec<(TensorId, Tensor)>> {
    let sequences = Sequences::of(p);
    let is_read = |id: TensorId| !id.is_output() || id.is_present();
    let specs = TensorSpec::all(p).into_iter().filter(|(id, _)| is_read(*id));
    specs.map(|(id, spec)| Ok((id, sequences.tensor(p, id, &spec, seed)?))).collect()
}

/// The lengths of a call's sequences.
struct Sequences {
    /// Rows before the call.
    past: Vec<usize>,
    /// New rows.
    rows: Vec<usize>,
}

impl Sequences {
    /// Lengths that differ between sequences where the call allows that.
    fn of(p: &Problem) -> Self {
        let mut left = p.pages.map_or(p.q_len * p.batch, |pages| pages.tokens);
        let rows = (0..p.batch).map(|b| {
            let share = if b == 0 { p.q_len } else { left.div_ceil(p.batch - b) };
            let rows = share.min(p.q_len).min(left);
            left -= rows;
            rows
        });
        let rows = rows.collect();
        let past = p.total_len.saturating_sub(p.q_len);
        let ragged =
            p.alignment == Alignment::Phase && p.has_present() && p.phase != Phase::FirstPrompt;
        let past = (0..p.batch).map(|b| past - if ragged { 37 * b % (past + 1) } else { 0 });
        Self { past: past.collect(), rows }
    }

    /// Sequence and row number of each new token.
    fn tokens(&self) -> impl Iterator<Item = (usize, usize)> {
        self.rows.iter().enumerate().flat_map(|(b, &rows)| (0..rows).map(move |row| (b, row)))
    }

    fn tensor(&self, p: &Problem, id: TensorId, spec: &TensorSpec, seed: u64) -> Result<Tensor> {
        let count = spec.len();
        let mut random = Random::new(seed, id as u64);
        if let Some(integers) = self.integers(p, id, count) {
            return of_integers(spec, integers);
        }
        let code = |how: QuantFormat| match how {
            QuantFormat::Int8 => 0.02,
            QuantFormat::Int4 | QuantFormat::Float4 => 0.3,
            QuantFormat::Float8 => 0.25,
        };
        let scale = p.quantized.map_or(1.0, |how| code(how.format));
        match spec.dtype {
            DType::U8 | DType::I8 | DType::Bool => {
                let mut tensor = Tensor::try_zeros(id.name(), spec.dtype, &spec.shape)?;
                let is_mask = spec.dtype == DType::Bool;
                let byte = |bits: u64| if is_mask { u8::from(bits % 5 > 0) } else { bits as u8 };
                tensor.with_bytes_mut(|bytes| {
                    bytes.iter_mut().for_each(|to| *to = byte(random.bits() >> 32));
                });
                return Ok(tensor);
            }
            _ => {}
        }
        let mut number = |row: usize, column: usize| match id {
            TensorId::Query => 4.0 * random.number(),
            TensorId::QNormWeight | TensorId::KNormWeight => 1.0 + 0.5 * random.number(),
            TensorId::KScale | TensorId::VScale | TensorId::KRowScale | TensorId::VRowScale => {
                scale * (1.0 + 0.3 * random.number())
            }
            TensorId::OutputScale => 1.0 / 64.0,
            TensorId::CosCache => angle(row, column, spec).cos(),
            TensorId::SinCache => angle(row, column, spec).sin(),
            TensorId::PresentKey | TensorId::PresentValue if p.quantized.is_some() => {
                8.0 * random.number()
            }
            _ => 2.0 * random.number(),
        };
        let columns = spec.shape.last().copied().unwrap_or(1).max(1);
        let numbers: Vec<f32> = (0..count).map(|i| number(i / columns, i % columns)).collect();
        Tensor::from_f32(spec.dtype, &spec.shape, &numbers)
    }

    /// Elements of a tensor of lengths, positions or indices; `None` for other tensors.
    fn integers(&self, p: &Problem, id: TensorId, count: usize) -> Option<Vec<i64>> {
        let whole = |n: usize| n as i64;
        let each = || self.past.iter().zip(&self.rows);
        Some(match id {
            TensorId::SeqlensK => match p.pages {
                Some(Pages { counts_new: false, .. }) => {
                    self.past.iter().map(|&past| whole(past)).collect()
                }
                Some(_) => each().map(|(past, rows)| whole(past + rows)).collect(),
                None => each().map(|(past, rows)| whole(*past + *rows) - 1).collect(),
            },
            TensorId::QuerySeqlens => self.rows.iter().map(|&rows| whole(rows)).collect(),
            TensorId::CumulativeSequenceLength => {
                let mut end = 0;
                let ends = self.rows.iter().map(|rows| {
                    end += rows;
                    whole(end)
                });
                std::iter::once(0).chain(ends).collect()
            }
            TensorId::PositionIds => {
                let columns = count / p.batch.max(1);
                let first =
                    |b: usize| if p.computes == CallKind::Attention { self.past[b] } else { 0 };
                (0..p.batch).flat_map(|b| (0..columns).map(move |i| whole(first(b) + i))).collect()
            }
            TensorId::BlockTable => {
                let pages = p.pages?;
                (0..p.batch)
                    .flat_map(|b| {
                        (0..pages.columns()).map(move |i| whole(block(p.batch, pages, b, i)))
                    })
                    .collect()
            }
            TensorId::SlotMapping => {
                let pages = p.pages?;
                let slot = |(b, row): (usize, usize)| {
                    let position = self.past[b] + row;
                    let block = block(p.batch, pages, b, position / pages.block_size);
                    whole(block * pages.block_size + position % pages.block_size)
                };
                self.tokens().map(slot).collect()
            }
            // A causal chain in which later tokens do not see every third token.
            TensorId::TreeMask => self
                .tokens()
                .map(|(_, row)| {
                    let sees = |earlier: usize| earlier == row || earlier < row && earlier % 3 != 2;
                    (0..=row.min(63))
                        .filter(|&earlier| sees(earlier))
                        .fold(0, |bits, i| bits | 1 << i)
                })
                .collect(),
            _ => return None,
        })
    }
}

/// Block `nth` of a sequence. The blocks of different sequences alternate and descend, unless rows
/// are consecutive.
fn block(sequences: usize, pages: Pages, sequence: usize, nth: usize) -> usize {
    match pages.consecutive {
        true => sequence * pages.per_sequence + nth,
        false => (pages.per_sequence - 1 - nth) * sequences + sequence,
    }
}

fn angle(position: usize, pair: usize, spec: &TensorSpec) -> f32 {
    let pairs = spec.shape.last().copied().unwrap_or(1).max(1);
    position as f32 * 10000f32.powf(-(pair as f32) / pairs as f32)
}

fn of_integers(spec: &TensorSpec, integers: Vec<i64>) -> Result<Tensor> {
    let mut tensor = Tensor::try_zeros("lengths", spec.dtype, &spec.shape)?;
    let size = spec.dtype.size();
    tensor.with_bytes_mut(|bytes| {
        for (to, integer) in bytes.chunks_exact_mut(size).zip(integers) {
            to.copy_from_slice(&integer.to_le_bytes()[..size]);
        }
    });
    Ok(tensor)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        Self(seed.wrapping_add(stream.wrapping_mul(0xd134_2543_de82_ef95)))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Between -1 and 1.
    fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
