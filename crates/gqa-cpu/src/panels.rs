//! Attention of any number of rows to a range of keys: panels of rows, tile by tile.

use super::key_range::{Attend, Softmax, Write, tiles};
use super::lanes::{self, Lanes};
use super::panel::{Panel, Products, Rows, span};
use super::scratch::Scratch;
use pulp::Simd;
use std::mem;

/// Attention of any number of rows, in panels, with the given kind of products.
#[inline(always)]
pub(super) fn many<S: Simd, P: Products<S, N>, const N: usize>(
    simd: S,
    products: P,
    Attend { rows, keys, write }: Attend<'_>,
) {
    let [key, value] = rows.sizes().map(|size| size.next_multiple_of(P::PADDED_TO));
    let count = lanes_of::<S, N>(rows.count());
    let mut scratch = Scratch::new();
    let [queries, outputs, scores, lines, key_buffer, value_buffer, packed] = scratch.slices([
        count * key,
        count * value,
        P::TILE * Lanes::<S, N>::COUNT,
        S::F32_LANES * key.max(value),
        P::TILE * key,
        P::TILE * value,
        P::TILE * value,
    ]);
    let mut panels = panels::<S, P, N>(simd, products, rows, [queries, outputs], lines);
    let spans: Vec<_> = panels.iter().map(|panel| panel.span.clone()).collect();
    let seen = span(&spans);
    let keys = keys.start.max(seen.start)..keys.end.min(seen.end);
    for keys in tiles(keys, P::TILE) {
        let buffers = [&mut *key_buffer, &mut *value_buffer, &mut *packed];
        let tile = products.tile(simd, rows, &keys, buffers);
        for panel in &mut panels {
            panel.attend(simd, products, &keys, &tile, bytemuck::cast_slice_mut(scores));
        }
    }
    for panel in &mut panels {
        finish(simd, panel, rows.sizes()[1], lines, write);
    }
}

/// Lanes of the panels that so many rows fill.
pub(super) fn lanes_of<S: Simd, const N: usize>(rows: usize) -> usize {
    rows.next_multiple_of(Lanes::<S, N>::COUNT)
}

/// Panels of all rows, in memory for queries and outputs; `lines` is scratch for the queries of one
/// vector of rows.
#[inline(always)]
pub(super) fn panels<'a, S: Simd, P: Products<S, N>, const N: usize>(
    simd: S,
    products: P,
    rows: &'a dyn Rows,
    [queries, outputs]: [&'a mut [f32]; 2],
    lines: &mut [f32],
) -> Vec<Panel<'a, S, N>> {
    let mut queries: &mut [Lanes<S, N>] = bytemuck::cast_slice_mut(queries);
    let mut outputs: &mut [Lanes<S, N>] = bytemuck::cast_slice_mut(outputs);
    let count = rows.count().div_ceil(Lanes::<S, N>::COUNT);
    let [key, value] = [queries.len(), outputs.len()].map(|entries| entries / count);
    let mut panels = Vec::with_capacity(count);
    for panel in 0..count {
        // Not in chunks: a value may have no numbers.
        let memory = [take(&mut queries, key), take(&mut outputs, value)];
        let first = panel * Lanes::<S, N>::COUNT;
        panels.push(Panel::new(simd, products, rows, first, memory, lines));
    }
    panels
}

/// Splits off the first `count` entries.
fn take<'a, T>(entries: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (taken, rest) = mem::take(entries).split_at_mut(count);
    *entries = rest;
    taken
}

/// Writes the outputs of a panel's rows, `size` elements each.
#[inline(always)]
fn finish<S: Simd, const N: usize>(
    simd: S,
    panel: &mut Panel<'_, S, N>,
    size: usize,
    lines: &mut [f32],
    write: &mut Write<'_>,
) {
    let (stride, count) = (panel.output.len(), panel.visible.len());
    panel.divide(simd);
    let [max, sum] = [panel.max.rows(), panel.sum.rows()];
    for n in 0..N {
        lanes::lanes_to_rows(simd, panel.output, n, lines);
        for lane in n * S::F32_LANES..count.min((n + 1) * S::F32_LANES) {
            let line = &lines[lane % S::F32_LANES * stride..][..size];
            write(panel.first + lane, Softmax { max: max[lane], sum: sum[lane] }, line);
        }
    }
}
