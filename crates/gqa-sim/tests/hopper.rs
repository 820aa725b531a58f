//! Copies of boxes, transaction barriers and warpgroup products against plain definitions of what they compute.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Launch, Report, Swizzle, TensorLayout, launch};
use half::bf16;

const ROWS: u32 = 64;
const COLUMNS: u32 = 128;
const DEPTH: u32 = 128;
const A: u32 = 0;
const B: u32 = A + ROWS * DEPTH * 2;
const C: u32 = B + COLUMNS * DEPTH * 2;
const BARRIERS: u32 = C + ROWS * COLUMNS * 2;

/// A producer warp and a consumer warpgroup.
fn shape(seed: u64) -> Launch<'static> {
    Launch { name: "gemm", grid: [1, 1, 1], threads: 256, shared_bytes: BARRIERS + 64, seed }
}

fn value(i: usize) -> f32 {
    ((i * 7 + i / 128 * 3) % 17) as f32 - 8.0
}

fn values(count: u32) -> Vec<bf16> {
    (0..count as usize).map(|i| bf16::from_f32(value(i))).collect()
}

/// A matrix of `rows` by `columns` whose boxes are 64 columns wide.
fn matrix(rows: u32, columns: u32, tile_rows: u32) -> TensorLayout {
    let bytes = rows as u64 * columns as u64 * 2;
    TensorLayout {
        size: [columns, rows, 1, 1],
        stride: [columns as u64 * 2, bytes, bytes],
        tile: [64, tile_rows, 1, 1],
        swizzle: Swizzle::Bytes128,
    }
}

fn descriptor(address: u32, leading: u32) -> u64 {
    (address as u64 >> 4) | (leading as u64 >> 4) << 16 | (1024 >> 4) << 32 | 1 << 62
}

/// Loads the two chunks of 64 columns of a matrix.
fn load(destination: u32, map: TensorMap, rows: u32, full: u32) {
    mbarrier_arrive_expect(full, rows * 256);
    for chunk in 0..2 {
        tma_load(destination + chunk * rows * 128, map, [chunk * 64, 0, 0, 0], full);
    }
}

/// Both operands K-major in shared memory.
fn multiply_k_major(base: u32) -> [f32; 64] {
    let (a, b) = (descriptor(base + A, 16), descriptor(base + B, 16));
    wgmma_fence();
    let mut c = wgmma_bf16(a, b);
    for step in 1..DEPTH / 16 {
        let (chunk, within) = (step / 4, step % 4 * 2);
        let at = |rows: u32| (chunk * rows * 8 + within) as u64;
        wgmma_add_bf16(&mut c, a + at(ROWS), b + at(COLUMNS));
    }
    wgmma_commit();
    wgmma_wait::<0>();
    c
}

/// A in registers, B MN-major in shared memory.
fn multiply_mn_major(base: u32) -> [f32; 64] {
    let (row, pair) = (thread_idx() % 128 / 32 * 16 + lane() / 4, lane() % 4 * 2);
    let a = |row: u32, k: u32| {
        let at = base + A + k / 64 * ROWS * 128 + row * 128 + k % 64 * 2;
        ld_shared::<u32>(at ^ (at >> 3 & 0x70))
    };
    let b = descriptor(base + B, DEPTH * 128);
    let mut c = [0.0; 64];
    for step in 0..DEPTH / 16 {
        let k = step * 16 + pair;
        let registers = [a(row, k), a(row + 8, k), a(row, k + 8), a(row + 8, k + 8)];
        wgmma_fence();
        wgmma_add_registers_bf16(&mut c, registers, b + step as u64 * 128);
    }
    wgmma_commit();
    wgmma_wait::<0>();
    c
}

/// Writes the product in two chunks of swizzled rows and stores them as boxes.
fn store(base: u32, c: &[f32; 64], map: TensorMap) {
    let row = thread_idx() % 128 / 32 * 16 + lane() / 4;
    for (i, pair) in c.chunks_exact(2).enumerate() {
        let (row, column) = (row + i as u32 % 2 * 8, i as u32 / 2 * 8 + lane() % 4 * 2);
        let at = base + C + column / 64 * ROWS * 128 + row * 128 + column % 64 * 2;
        st_shared(at ^ (at >> 3 & 0x70), f32x2_to_bf16x2(pair[0], pair[1]));
    }
    fence_proxy_async();
    named_barrier_sync(1, 128);
    if thread_idx() % 128 == 0 {
        for chunk in 0..2 {
            tma_store(map, [chunk * 64, 0, 0, 0], base + C + chunk * ROWS * 128);
        }
        bulk_commit();
        bulk_wait_read();
    }
}

fn gemm(arguments: &Arguments, multiply: impl Fn(u32) -> [f32; 64]) {
    let base = shared_base();
    let full = base + BARRIERS;
    if thread_idx() == 0 {
        mbarrier_init(full, 2);
        fence_mbarrier_init();
    }
    sync_threads();
    if thread_idx() < 128 {
        registers_lower::<24>();
        if thread_idx() == 0 {
            load(base + A, arguments.tensor_map(0), ROWS, full);
            load(base + B, arguments.tensor_map(1), COLUMNS, full);
        }
    } else {
        registers_raise::<256>();
        mbarrier_wait(full, 0);
        store(base, &multiply(base), arguments.tensor_map(2));
    }
}

/// `rows` by `columns` of the product of matrices that are smaller than the tile; what lies outside is zero.
fn run(
    [rows, columns]: [u32; 2],
    seed: u64,
    multiply: impl Fn(u32) -> [f32; 64] + Sync,
) -> (Vec<bf16>, Report) {
    let (a, b) = (values(rows * DEPTH), values(DEPTH * DEPTH));
    let mut c = vec![bf16::ONE; (rows * columns) as usize];
    let given = [
        Arg::read(&a).tensor_map(matrix(rows, DEPTH, ROWS)),
        Arg::read(&b).tensor_map(matrix(DEPTH, columns.min(DEPTH), COLUMNS)),
        Arg::write(&mut c).tensor_map(matrix(rows, columns, ROWS)),
    ];
    let report = launch(&shape(seed), &|arguments| gemm(arguments, &multiply), &given).unwrap();
    (c, report)
}

#[test]
fn product_of_k_major_operands() {
    for seed in 0..10 {
        let (c, report) = run([ROWS, COLUMNS], seed, multiply_k_major);
        assert_eq!((report.tensor_loads, report.warpgroup_products), (4, 32));
        for (i, c) in c.iter().enumerate() {
            let (row, column) = (i / 128, i % 128);
            let sum: f32 = (0..128).map(|k| value(row * 128 + k) * value(column * 128 + k)).sum();
            assert_eq!(*c, bf16::from_f32(sum), "row {row}, column {column}, seed {seed}");
        }
    }
}

#[test]
fn product_with_an_mn_major_operand_and_edges_inside_the_tile() {
    let (rows, columns) = (40, 104);
    for seed in 0..10 {
        let (c, _) = run([rows, columns], seed, multiply_mn_major);
        for (i, c) in c.iter().enumerate() {
            let (row, column) = (i / columns as usize, i % columns as usize);
            let b = |k: usize| value(k * columns as usize + column);
            let sum: f32 = (0..128).map(|k| value(row * 128 + k) * b(k)).sum();
            assert_eq!(*c, bf16::from_f32(sum), "row {row}, column {column}, seed {seed}");
        }
    }
}
