//! Instructions against plain definitions of what they compute.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Launch, launch};
use half::{bf16, f16};
use std::cell::Cell;

const WARP: Launch<'static> = Launch {
    name: "kernel",
    grid: [1, 1, 1],
    threads: 32,
    shared_bytes: 4096,
    seed: 3,
    cluster: 1,
    communicates: false,
    programmatic: false,
};

/// What each lane of a warp returns.
fn lanes<T: bytemuck::Pod + Default, const N: usize>(
    kernel: impl Fn(u32) -> [T; N] + Sync,
) -> Vec<[T; N]> {
    let mut output = vec![[T::default(); N]; 32];
    let kernel = |arguments: &Arguments| {
        let values = kernel(lane());
        for (i, value) in values.into_iter().enumerate() {
            arguments.global::<T>(0).store(lane() as usize * N + i, value);
        }
    };
    launch(&WARP, &kernel, &[Arg::write(output.as_flattened_mut())]).unwrap();
    output
}

#[test]
fn shuffles_and_votes() {
    let results = lanes(|lane| {
        let votes = [any_sync(lane == 31), any_sync(false)];
        let pair = [shfl_xor_u32(lane, 5), shfl_idx_u32(lane * 2, 31 - lane)];
        [
            pair[0],
            pair[1],
            shfl_xor_f32(lane as f32, 16) as u32,
            shfl_idx_f32(lane as f32, 40) as u32,
            votes[0] as u32,
            votes[1] as u32,
        ]
    });
    for (lane, result) in results.iter().enumerate() {
        let lane = lane as u32;
        assert_eq!(*result, [lane ^ 5, 2 * (31 - lane), lane ^ 16, 8, 1, 0]);
    }
}

/// An `8n × 8` matrix of distinct elements in rows of 16 bytes: element (row, column) is `8 row +
/// column`.
fn store_rows() {
    for i in 0..4 {
        let first = 8 * lane() + 2 * i;
        st_shared(shared_base() + 16 * lane() + 4 * i, first | (first + 1) << 16);
    }
    sync_warp();
}

#[test]
fn matrix_loads_distribute_elements_as_ptx_says() {
    let results = lanes(|lane| {
        store_rows();
        let row = shared_base() + 16 * lane;
        let ([a, b, c, d], [e, f]) = (ldmatrix_x4(row), ldmatrix_x2(row));
        let ([g, h, i, j], [k, l]) = (ldmatrix_x4_trans(row), ldmatrix_x2_trans(row));
        [a, b, c, d, e, f, g, h, i, j, k, l]
    });
    for (lane, result) in results.into_iter().enumerate() {
        let (group, pair) = (lane as u32 / 4, lane as u32 % 4);
        let element = |m: u32, row: u32, column: u32| 64 * m + 8 * row + column;
        let plain = |m| element(m, group, 2 * pair) | element(m, group, 2 * pair + 1) << 16;
        let transposed = |m| element(m, 2 * pair, group) | element(m, 2 * pair + 1, group) << 16;
        assert_eq!(result[..4], [0, 1, 2, 3].map(plain));
        assert_eq!(result[4..6], [0, 1].map(plain));
        assert_eq!(result[6..10], [0, 1, 2, 3].map(transposed));
        assert_eq!(result[10..], [0, 1].map(transposed));
    }
}

#[test]
fn a_matrix_in_registers_is_transposed_as_ptx_says() {
    let element = |row: u32, column: u32| 8 * row + column;
    let results = lanes(|lane| {
        let (group, pair) = (lane / 4, lane % 4);
        [movmatrix_trans(element(group, 2 * pair) | element(group, 2 * pair + 1) << 16)]
    });
    for (lane, [result]) in results.into_iter().enumerate() {
        let (group, pair) = (lane as u32 / 4, lane as u32 % 4);
        assert_eq!(result, element(2 * pair, group) | element(2 * pair + 1, group) << 16);
    }
}

#[test]
fn last_lanes_of_a_two_matrix_load_give_no_address() {
    lanes(|lane| {
        store_rows();
        ldmatrix_x2(if lane < 16 { shared_base() + 16 * lane } else { u32::MAX })
    });
}

type Pack = fn(f32, f32) -> u32;
type Multiply = fn(&mut [f32; 4], [u32; 4], [u32; 2]);

const F16: (Pack, Multiply) =
    (|lo, hi| f32x2_to_f16x2(lo, hi), |d, a, b| mma_m16n8k16_f16(d, a, b));
const BF16: (Pack, Multiply) =
    (|lo, hi| f32x2_to_bf16x2(lo, hi), |d, a, b| mma_m16n8k16_bf16(d, a, b));

fn a(row: u32, k: u32) -> f32 {
    (row * 3 + k * 7) as f32 % 11.0 - 5.0
}

fn b(k: u32, column: u32) -> f32 {
    (k * 5 + column * 2) as f32 % 13.0 - 6.0
}

fn c(row: u32, column: u32) -> f32 {
    (row * 8 + column) as f32
}

/// A 16×8 product whose fragments are made from the maps in the PTX manual; `swap` exchanges two
/// registers of A.
fn product((pack, multiply): (Pack, Multiply), swap: bool) -> [[f32; 8]; 16] {
    let results = lanes(|lane| {
        let (g, t) = (lane / 4, 2 * (lane % 4));
        let part_a = |row, k| pack(a(row, k), a(row, k + 1));
        let part_b = |k| pack(b(k, g), b(k + 1, g));
        let mut registers =
            [part_a(g, t), part_a(g + 8, t), part_a(g, t + 8), part_a(g + 8, t + 8)];
        if swap {
            registers.swap(1, 2);
        }
        let mut d = [c(g, t), c(g, t + 1), c(g + 8, t), c(g + 8, t + 1)];
        multiply(&mut d, registers, [part_b(t), part_b(t + 8)]);
        d
    });
    let mut matrix = [[0.0; 8]; 16];
    for (lane, [d0, d1, d2, d3]) in results.into_iter().enumerate() {
        let (g, t) = (lane / 4, 2 * (lane % 4));
        (matrix[g][t], matrix[g][t + 1], matrix[g + 8][t], matrix[g + 8][t + 1]) = (d0, d1, d2, d3);
    }
    matrix
}

#[test]
fn matrix_product_is_right_with_the_right_fragments_and_only_then() {
    let expected: [[f32; 8]; 16] = std::array::from_fn(|row| {
        std::array::from_fn(|column| {
            let (row, column) = (row as u32, column as u32);
            c(row, column) + (0..16).map(|k| a(row, k) * b(k, column)).sum::<f32>()
        })
    });
    for element in [F16, BF16] {
        assert_eq!(product(element, false), expected);
        assert_ne!(product(element, true), expected);
    }
}

/// A 16×8 product in TF32 with an inner dimension of 8, whose elements have `noise` in the 13 bits
/// that TF32 drops.
fn product_tf32(noise: u32, swap: bool) -> [[f32; 8]; 16] {
    let noisy = |x: f32| x.to_bits() | noise;
    let results = lanes(|lane| {
        let (g, t) = (lane / 4, lane % 4);
        let mut registers = [a(g, t), a(g + 8, t), a(g, t + 4), a(g + 8, t + 4)].map(noisy);
        if swap {
            registers.swap(1, 2);
        }
        let mut d = [c(g, 2 * t), c(g, 2 * t + 1), c(g + 8, 2 * t), c(g + 8, 2 * t + 1)];
        mma_m16n8k8_tf32(&mut d, registers, [b(t, g), b(t + 4, g)].map(noisy));
        d
    });
    let mut matrix = [[0.0; 8]; 16];
    for (lane, [d0, d1, d2, d3]) in results.into_iter().enumerate() {
        let (g, t) = (lane / 4, 2 * (lane % 4));
        (matrix[g][t], matrix[g][t + 1], matrix[g + 8][t], matrix[g + 8][t + 1]) = (d0, d1, d2, d3);
    }
    matrix
}

#[test]
fn tf32_product_takes_the_upper_19_bits() {
    let expected: [[f32; 8]; 16] = std::array::from_fn(|row| {
        std::array::from_fn(|column| {
            let (row, column) = (row as u32, column as u32);
            c(row, column) + (0..8).map(|k| a(row, k) * b(k, column)).sum::<f32>()
        })
    });
    for noise in [0, 1, 0x1000, 0x1fff] {
        assert_eq!(product_tf32(noise, false), expected, "{noise:x}");
    }
    assert_ne!(product_tf32(0x2000, false), expected);
    assert_ne!(product_tf32(0, true), expected);
}

#[test]
fn fma_rounds_once_and_flushes() {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let bits = (state >> 32) as u32;
        // Exponents close to each other, with cancellation and double rounding.
        f32::from_bits(bits & 0x807f_ffff | (120 + (bits >> 23) % 16) << 23)
    };
    for _ in 0..1_000_000 {
        let (a, b, c) = (next(), next(), next());
        for c in [c, -a * b, -a * b * (1.0 + f32::EPSILON), c * 2f32.powi(-24)] {
            assert_eq!(fma(a, b, c).to_bits(), a.mul_add(b, c).to_bits(), "{a:e} {b:e} {c:e}");
        }
    }
    assert_eq!(fma(f32::MIN_POSITIVE, 0.5, 0.0), 0.0);
    assert_eq!(fma(f32::MAX, f32::MAX, 0.0), f32::INFINITY);
    assert_eq!(fma(f32::MAX, 2.0, f32::NEG_INFINITY), f32::NEG_INFINITY);
    assert!(fma(f32::INFINITY, 0.0, 1.0).is_nan() && fma(f32::NAN, 0.0, 1.0).is_nan());
    assert_eq!((fma(0.0, 1.0, -0.0).to_bits(), fma(-0.0, 1.0, -0.0).to_bits()), (0, 1 << 31));
}

#[test]
fn arithmetic_at_the_edges() {
    let (inf, subnormal) = (f32::INFINITY, f32::MIN_POSITIVE / 2.0);
    assert_eq!(
        [exp2(-inf), exp2(inf), exp2(0.0), exp2(-127.0), exp2(3.0)],
        [0.0, inf, 1.0, 0.0, 8.0]
    );
    assert_eq!([log2(0.0), log2(inf), log2(8.0), log2(subnormal)], [-inf, inf, 3.0, -inf]);
    assert_eq!(
        [rcp(0.0), rcp(inf), rcp(4.0), rcp(subnormal), rcp(f32::MAX)],
        [inf, 0.0, 0.25, inf, 0.0]
    );
    assert_eq!([max(f32::NAN, 1.0), max(1.0, f32::NAN), max(-inf, 2.0)], [1.0, 1.0, 2.0]);
    assert_eq!((max(-0.0, 0.0).to_bits(), max(0.0, -0.0).to_bits()), (0, 0));
    assert!(max(f32::NAN, f32::NAN).is_nan() && exp2(f32::NAN).is_nan() && log2(-1.0).is_nan());
}

#[test]
fn conversions_round_to_nearest_even() {
    assert_eq!(f32_to_f16(65520.0), f16::INFINITY.to_bits());
    assert_eq!(f32_to_f16(1.0 + 2f32.powi(-11)), f16::ONE.to_bits());
    assert_eq!((f32_to_f16(f32::NAN), f32_to_f16(-f32::NAN)), (0x7fff, 0x7fff));
    assert_eq!(f16_to_f32(1), 2f32.powi(-24));
    assert_eq!(f32x2_to_f16x2(1.0, 2.0), 0x4000_3c00);
    assert_eq!(f32x2_to_bf16x2(1.0, -2.0), 0xc000_3f80);
    assert_eq!(
        f32x2_to_bf16x2(1.0 + 2f32.powi(-8), f32::NAN),
        0x7fff << 16 | bf16::ONE.to_bits() as u32
    );
}

#[test]
fn arguments_may_share_memory() {
    let mut memory = [1u32, 2, 3, 4];
    let cells = Cell::from_mut(&mut memory[..]).as_slice_of_cells();
    let kernel = |arguments: &Arguments| {
        if lane() == 0 {
            let (past, present) = (arguments.global::<u32>(0), arguments.global::<u32>(1));
            present.store(0, past.load(1) + present.load(2) + arguments.params::<u32>(2));
        }
    };
    launch(&WARP, &kernel, &[Arg::cells(cells), Arg::cells(&cells[1..]), Arg::params(&10u32)])
        .unwrap();
    assert_eq!(memory, [1, 16, 3, 4]);
}
