//! Copies of boxes, transaction barriers and warpgroup products against plain definitions of what
//! they compute.

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
    Launch {
        name: "gemm",
        grid: [1, 1, 1],
        threads: 256,
        shared_bytes: BARRIERS + 64,
        seed,
        ..Launch::default()
    }
}

fn value(i: usize) -> f32 {
    ((i * 7 + i / 128 * 3) % 17) as f32 - 8.0
}

fn values(count: u32) -> Vec<bf16> {
    (0..count as usize).map(|i| bf16::from_f32(value(i))).collect()
}

/// Where A comes from, and the order of B in memory.
#[derive(Clone, Copy, Debug)]
enum Operands {
    /// Shared memory; K-major.
    KMajor,
    /// Registers; MN-major.
    MnMajor,
    /// Registers; K-major.
    ByK,
}

/// The operands, and the layout of boxes of A and B in shared memory.
#[derive(Clone, Copy, Debug)]
struct Form {
    operands: Operands,
    swizzle: Swizzle,
    /// Bytes of a box's row.
    row: u32,
}

const SWIZZLES: [(Swizzle, u32); 4] =
    [(Swizzle::None, 16), (Swizzle::Bytes32, 32), (Swizzle::Bytes64, 64), (Swizzle::Bytes128, 128)];

impl Form {
    fn descriptor(self, address: u32, leading: u32, stride: u32) -> u64 {
        let swizzle = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes128 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes32 => 3,
        };
        let offsets = (leading as u64 >> 4) << 16 | (stride as u64 >> 4) << 32;
        (address as u64 >> 4) | offsets | swizzle << 62
    }

    /// Descriptor of 16 columns of a K-major matrix at `base`.
    fn k_major(self, base: u32, rows: u32, step: u32) -> u64 {
        let (chunk, within) = (step * 32 / self.row, step * 32 % self.row);
        let address = base + chunk * rows * self.row + within;
        self.descriptor(address, rows * self.row, 8 * self.row)
    }

    /// Descriptor of 16 rows of a matrix of `DEPTH` rows at `base`.
    fn mn_major(self, base: u32, step: u32) -> u64 {
        let (eight_rows, chunk) = (8 * self.row, DEPTH * self.row);
        let address = base + step * 16 * self.row;
        match self.swizzle {
            Swizzle::None => self.descriptor(address, eight_rows, chunk),
            _ => self.descriptor(address, chunk, eight_rows),
        }
    }

    /// A matrix of `rows` by `columns` and its boxes.
    fn matrix(self, rows: u32, columns: u32, tile_rows: u32) -> TensorLayout {
        TensorLayout {
            tile: [self.row / 2, tile_rows, 1, 1],
            swizzle: self.swizzle,
            ..matrix(rows, columns, tile_rows)
        }
    }
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

/// Loads 128 columns of a matrix.
fn load(form: Form, destination: u32, map: TensorMap, rows: u32, full: u32) {
    mbarrier_arrive_expect(full, rows * 256);
    for chunk in 0..256 / form.row {
        let place = destination + chunk * rows * form.row;
        tma_load(place, map, [chunk * form.row / 2, 0, 0, 0], full);
    }
}

/// Both operands K-major in shared memory.
fn multiply_k_major(form: Form, base: u32) -> [f32; 64] {
    let a = |step| form.k_major(base + A, ROWS, step);
    let b = |step| form.k_major(base + B, COLUMNS, step);
    wgmma_fence();
    let mut c = wgmma_bf16(a(0), b(0));
    for step in 1..DEPTH / 16 {
        wgmma_add_bf16(&mut c, a(step), b(step));
    }
    wgmma_commit();
    wgmma_wait::<0>();
    c
}

/// The thread's registers of 16 columns of A.
fn fragment(form: Form, base: u32, step: u32) -> [u32; 4] {
    let (row, k) = (thread_idx() % 128 / 32 * 16 + lane() / 4, step * 16 + lane() % 4 * 2);
    let a = |row: u32, k: u32| {
        let chunk = k * 2 / form.row * ROWS * form.row;
        let at = base + A + chunk + row * form.row + k * 2 % form.row;
        ld_shared::<u32>(at ^ (at >> 3 & (form.row - 16)))
    };
    [a(row, k), a(row + 8, k), a(row, k + 8), a(row + 8, k + 8)]
}

/// A in registers, B MN-major in shared memory.
fn multiply_mn_major(form: Form, base: u32) -> [f32; 64] {
    let mut c = [f32::NAN; 64];
    for step in 0..DEPTH / 16 {
        let registers = fragment(form, base, step);
        wgmma_fence();
        wgmma_registers_bf16(&mut c, step > 0, registers, form.mn_major(base + B, step));
    }
    wgmma_commit();
    wgmma_wait::<0>();
    c
}

/// A in registers, B K-major in shared memory, in two products of 64 columns.
fn multiply_by_k(form: Form, base: u32) -> [f32; 64] {
    let mut c = [f32::NAN; 64];
    for (half, c) in c.as_chunks_mut().0.iter_mut().enumerate() {
        for step in 0..DEPTH / 16 {
            let b = form.k_major(base + B + half as u32 * 64 * form.row, COLUMNS, step);
            wgmma_fence();
            wgmma_k_major_bf16(c, step > 0, fragment(form, base, step), b);
        }
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
    if thread_idx() == 128 {
        for chunk in 0..2 {
            tma_store(map, [chunk * 64, 0, 0, 0], base + C + chunk * ROWS * 128);
        }
        bulk_commit();
        bulk_wait_read();
    }
}

fn gemm(arguments: &Arguments, form: Form) {
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
            load(form, base + A, arguments.tensor_map(0), ROWS, full);
            load(form, base + B, arguments.tensor_map(1), COLUMNS, full);
        }
    } else {
        registers_raise::<256>();
        mbarrier_wait(full, 0);
        let multiply = match form.operands {
            Operands::KMajor => multiply_k_major,
            Operands::MnMajor => multiply_mn_major,
            Operands::ByK => multiply_by_k,
        };
        store(base, &multiply(form, base), arguments.tensor_map(2));
    }
}

/// `rows` by `columns` of the product of matrices smaller than the tile; elements outside are zero.
fn run([rows, columns]: [u32; 2], seed: u64, form: Form) -> (Vec<bf16>, Report) {
    let (a, b) = (values(rows * DEPTH), values(DEPTH * DEPTH));
    let mut c = vec![bf16::ONE; (rows * columns) as usize];
    let given = [
        Arg::read(&a).tensor_map(form.matrix(rows, DEPTH, ROWS)),
        Arg::read(&b).tensor_map(form.matrix(DEPTH, columns, COLUMNS)),
        Arg::write(&mut c).tensor_map(matrix(rows, columns, ROWS)),
    ];
    let report = launch(&shape(seed), &|arguments| gemm(arguments, form), &given).unwrap();
    (c, report)
}

/// Compares with the definition; `b` is an element of B: (k, column).
fn check(extent: [u32; 2], form: Form, seed: u64, b: impl Fn(usize, usize) -> f32) -> Report {
    let (c, report) = run(extent, seed, form);
    let columns = extent[1] as usize;
    for (i, c) in c.iter().enumerate() {
        let (row, column) = (i / columns, i % columns);
        let sum: f32 = (0..128).map(|k| value(row * 128 + k) * b(k, column)).sum();
        assert_eq!(*c, bf16::from_f32(sum), "{form:?}, seed {seed}, row {row}, column {column}");
    }
    report
}

#[test]
fn product_of_k_major_operands() {
    for (swizzle, row) in SWIZZLES {
        let form = Form { operands: Operands::KMajor, swizzle, row };
        for seed in 0..5 {
            let b = |k, column| value(column * 128 + k);
            let report = check([ROWS, COLUMNS], form, seed, b);
            let loads = 2 * 256 / u64::from(row);
            assert_eq!((report.tensor_loads, report.warpgroup_products), (loads, 32));
        }
    }
}

#[test]
fn product_of_registers_and_a_k_major_operand() {
    let form = Form { operands: Operands::ByK, swizzle: Swizzle::Bytes128, row: 128 };
    for seed in 0..5 {
        check([ROWS, COLUMNS], form, seed, |k, column| value(column * 128 + k));
    }
}

#[test]
fn product_with_an_mn_major_operand_and_edges_inside_the_tile() {
    for (swizzle, row) in SWIZZLES {
        let form = Form { operands: Operands::MnMajor, swizzle, row };
        for seed in 0..5 {
            check([40, 104], form, seed, |k, column| value(k * 104 + column));
        }
    }
}

/// 12 rows of 20 elements, 24 from row to row, three planes of two volumes; boxes of 16 by 4 by 2
/// by 2.
const SMALL: TensorLayout = TensorLayout {
    size: [20, 12, 3, 2],
    stride: [48, 48 * 12, 48 * 36],
    tile: [16, 4, 2, 2],
    swizzle: Swizzle::None,
};
const SMALL_ELEMENTS: usize = 24 * 12 * 3 * 2;

/// Element of the small tensor; `None`: outside.
fn small([x, y, z, w]: [i32; 4]) -> Option<usize> {
    let inside =
        [x, y, z, w].iter().zip(SMALL.size).all(|(at, size)| (0..size as i32).contains(at));
    inside.then(|| ((w * 3 + z) * 12 + y) as usize * 24 + x as usize)
}

/// Copies the box at `from` to the box at `to` of another tensor of the same shape.
fn copy_box(from: [i32; 4], to: [i32; 4]) -> Vec<u16> {
    let source: Vec<u16> = (1..=SMALL_ELEMENTS as u16).collect();
    let mut target = vec![0xffffu16; SMALL_ELEMENTS];
    let kernel = |arguments: &Arguments| {
        let (full, place) = (shared_base(), shared_base() + 128);
        if thread_idx() == 0 {
            mbarrier_init(full, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect(full, 16 * 4 * 4 * 2);
            tma_load(place, arguments.tensor_map(0), from.map(|at| at as u32), full);
            mbarrier_wait(full, 0);
            tma_store(arguments.tensor_map(1), to.map(|at| at as u32), place);
            bulk_commit();
            bulk_wait_read();
        }
    };
    let shape = Launch { threads: 32, shared_bytes: 1024, ..shape(1) };
    let given = [Arg::read(&source).tensor_map(SMALL), Arg::write(&mut target).tensor_map(SMALL)];
    launch(&shape, &kernel, &given).unwrap();
    target
}

#[test]
fn boxes_may_reach_over_every_edge() {
    let places = [[0, 0, 0, 0], [-3, -1, 1, 1], [8, 10, 2, -1], [13, 5, -1, 0], [-16, 0, 0, 0]];
    for (from, to) in places.into_iter().flat_map(|from| places.map(|to| (from, to))) {
        let target = copy_box(from, to);
        let mut expected = vec![0xffff; SMALL_ELEMENTS];
        for i in 0..16 * 4 * 2 * 2 {
            let within = [i % 16, i / 16 % 4, i / 64 % 2, i / 128];
            let place =
                |start: [i32; 4]| small(std::array::from_fn(|axis| start[axis] + within[axis]));
            if let Some(element) = place(to) {
                expected[element] = place(from).map_or(0, |element| element as u16 + 1);
            }
        }
        assert_eq!(target, expected, "from {from:?} to {to:?}");
    }
}

/// Rows of 128 bytes, as e4m3.
fn codes(rows: u32) -> Vec<u16> {
    let codes = (0..rows as usize * 64).map(|i| f32x2_to_e4m3x2(value(2 * i), value(2 * i + 1)));
    codes.collect()
}

/// The product of 64 by 128 and 128 by 128 e4m3 values, the first in registers if `in_registers`,
/// both K-major.
fn multiply_e4m3(base: u32, in_registers: bool) -> [f32; 64] {
    let form = Form { operands: Operands::KMajor, swizzle: Swizzle::Bytes128, row: 128 };
    let (row, four) = (thread_idx() % 128 / 32 * 16 + lane() / 4, lane() % 4 * 4);
    let a = |row: u32, k: u32| {
        let at = base + A + row * 128 + k;
        ld_shared::<u32>(at ^ (at >> 3 & 0x70))
    };
    let mut c = [f32::NAN; 64];
    for step in 0..4 {
        let b = form.k_major(base + B, COLUMNS, step);
        let k = 32 * step + four;
        let registers = [a(row, k), a(row + 8, k), a(row, k + 16), a(row + 8, k + 16)];
        wgmma_fence();
        if in_registers {
            wgmma_registers_e4m3(&mut c, step > 0, registers, b);
        } else if step == 0 {
            c = wgmma_e4m3(form.k_major(base + A, ROWS, step), b);
        } else {
            wgmma_add_e4m3(&mut c, form.k_major(base + A, ROWS, step), b);
        }
    }
    wgmma_commit();
    wgmma_wait::<0>();
    c
}

#[test]
fn products_of_eight_bits() {
    let (a, b) = (codes(ROWS), codes(COLUMNS));
    for in_registers in [false, true] {
        let mut c = vec![bf16::ONE; (ROWS * COLUMNS) as usize];
        let kernel = |arguments: &Arguments| {
            let base = shared_base();
            let full = base + BARRIERS;
            if thread_idx() == 0 {
                mbarrier_init(full, 1);
                fence_mbarrier_init();
            }
            sync_threads();
            if thread_idx() < 128 {
                if thread_idx() == 0 {
                    mbarrier_arrive_expect(full, (ROWS + COLUMNS) * 128);
                    tma_load(base + A, arguments.tensor_map(0), [0; 4], full);
                    tma_load(base + B, arguments.tensor_map(1), [0; 4], full);
                }
            } else {
                mbarrier_wait(full, 0);
                store(base, &multiply_e4m3(base, in_registers), arguments.tensor_map(2));
            }
        };
        // To TMA two quantized values are an element.
        let given = [
            Arg::read(&a).tensor_map(matrix(ROWS, 64, ROWS)),
            Arg::read(&b).tensor_map(matrix(COLUMNS, 64, COLUMNS)),
            Arg::write(&mut c).tensor_map(matrix(ROWS, COLUMNS, ROWS)),
        ];
        launch(&shape(0), &kernel, &given).unwrap();
        for (i, c) in c.iter().enumerate() {
            let (row, column) = (i / 128, i % 128);
            let sum: f32 = (0..128).map(|k| value(row * 128 + k) * value(column * 128 + k)).sum();
            assert_eq!(*c, bf16::from_f32(sum), "{in_registers}, row {row}, column {column}");
        }
    }
}
