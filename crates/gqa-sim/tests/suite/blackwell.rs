//! Products into tensor memory against plain definitions of what they compute, with operands that
//! these tests lay out by hand.

use gqa_sim::device::*;
use gqa_sim::{Arg, Arguments, Fault, Launch, Report, launch};
use half::{bf16, f16};

/// Elements of the depth: two swizzled rows of 16-bit elements, or one of 8 bits.
const DEPTH: usize = 128;
/// The place of an operand in shared memory.
const A: u32 = 0;
const B: u32 = 64 << 10;
const BARRIER: u32 = 128 << 10;
const SLOT: u32 = BARRIER + 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    F16,
    Bf16,
    E4m3,
    E5m2,
}
use Element::*;

impl Element {
    fn bytes(self) -> usize {
        if matches!(self, F16 | Bf16) { 2 } else { 1 }
    }

    /// As instruction descriptors have it.
    fn code(self) -> u32 {
        u32::from(matches!(self, Bf16 | E5m2))
    }

    /// A small integer, exact in every type.
    fn encode(self, value: f32) -> [u8; 2] {
        match self {
            F16 => f16::from_f32(value).to_le_bytes(),
            Bf16 => bf16::from_f32(value).to_le_bytes(),
            E4m3 => f32x2_to_e4m3x2(value, 0.0).to_le_bytes(),
            // The upper byte of f16.
            E5m2 => [f16::from_f32(value).to_le_bytes()[1], 0],
        }
    }
}

/// How an operand lies in shared memory.
#[derive(Clone, Copy, Debug)]
struct Form {
    element: Element,
    /// Whether its rows or columns are contiguous, and not its depth.
    mn_major: bool,
    /// Bytes of a swizzled row; 16: no swizzle.
    row: usize,
    /// Rows of A or columns of B.
    extent: usize,
}

impl Form {
    /// The byte of element (mn, k): swizzled rows of one line of the matrix, the lines one after
    /// the other, then the next part of each line.
    fn byte(self, mn: usize, k: usize) -> usize {
        let (line, across, lines) =
            if self.mn_major { (k, mn, DEPTH) } else { (mn, k, self.extent) };
        let at = across * self.element.bytes();
        let (part, unit, byte) = (at / self.row, at % self.row / 16, at % 16);
        // Eight rows of 128 bytes, pairs of rows of 64 or fours of rows of 32 are permuted alike.
        let swizzled = unit ^ (line % 8 * self.row / 128);
        part * lines * self.row + line * self.row + swizzled * 16 + byte
    }

    fn bytes(self, numbers: &dyn Fn(usize, usize) -> f32) -> Vec<u8> {
        let mut image = vec![0; 64 << 10];
        for (mn, k) in (0..self.extent).flat_map(|mn| (0..DEPTH).map(move |k| (mn, k))) {
            let (at, code) = (self.byte(mn, k), self.element.encode(numbers(mn, k)));
            image[at..at + self.element.bytes()].copy_from_slice(&code[..self.element.bytes()]);
        }
        image
    }

    /// Elements of one instruction.
    fn step(self) -> usize {
        32 / self.element.bytes()
    }

    /// The descriptor of that step of the depth, for an operand at `base`.
    fn descriptor(self, base: u32, step: usize) -> u64 {
        let swizzle = match self.row {
            16 => 0,
            32 => 6,
            64 => 4,
            _ => 2,
        };
        let (row, extent) = (self.row as u64, self.extent as u64);
        let next_part = if self.mn_major { DEPTH as u64 * row } else { extent * row };
        let eight_lines = 8 * row;
        let (leading, stride) = match (self.mn_major, self.row) {
            (false, 16) => (next_part, eight_lines),
            (false, _) => (0, eight_lines),
            (true, 16) => (eight_lines, next_part),
            (true, _) => (next_part, eight_lines),
        };
        let start = match self.mn_major {
            true => step * self.step() * self.row,
            false => step * 32 / self.row * self.extent * self.row + step * 32 % self.row,
        };
        (base as u64 + start as u64) >> 4
            | (leading >> 4) << 16
            | (stride >> 4) << 32
            | 1 << 46
            | swizzle << 61
    }
}

/// The instruction descriptor.
fn instruction(a: Form, b: Form) -> u32 {
    1 << 4
        | a.element.code() << 7
        | b.element.code() << 10
        | u32::from(a.mn_major) << 15
        | u32::from(b.mn_major) << 16
        | (b.extent as u32 / 8) << 17
        | (a.extent as u32 / 16) << 24
}

fn shape(seed: u64) -> Launch<'static> {
    Launch { name: "products", threads: 128, shared_bytes: SLOT + 4, seed, ..Launch::default() }
}

/// Copies an operand as it lies.
fn copy(image: Global<u32>, to: u32) {
    for unit in (thread_idx()..4096).step_by(128) {
        st_shared_vec(to + 16 * unit, image.load_vec(4 * unit as usize));
    }
}

/// Allocates columns; all threads get their address.
fn allocate(slot: u32, columns: u32) -> u32 {
    if warp() == 0 {
        tcgen05_alloc(slot, columns);
        tcgen05_relinquish();
    }
    sync_threads();
    tcgen05_fence_after();
    ld_shared(slot)
}

fn free(address: u32, columns: u32) {
    tcgen05_fence_before();
    sync_threads();
    if warp() == 0 {
        tcgen05_dealloc(address, columns);
    }
}

/// Commits what thread 0 has issued; all threads wait for it.
fn finish(barrier: u32, parity: u32) {
    if thread_idx() == 0 {
        tcgen05_commit(barrier);
    }
    mbarrier_wait(barrier, parity);
    tcgen05_fence_after();
}

/// Prepares an mbarrier of one arrival, and two operands in shared memory.
fn prepare(arguments: &Arguments, base: u32) {
    if thread_idx() == 0 {
        mbarrier_init(base + BARRIER, 1);
        fence_mbarrier_init();
    }
    copy(arguments.global(0), base + A);
    copy(arguments.global(1), base + B);
    fence_proxy_async();
}

/// The lane of a row of D.
fn lane_of(row: usize, rows: usize) -> usize {
    if rows == 128 { row } else { row / 16 * 32 + row % 16 }
}

/// The product, `lanes` by N, as the lanes of tensor memory hold it.
fn multiply(a: Form, b: Form, flags: u32, seed: u64) -> (Vec<f32>, Report) {
    let (left, right) = (a.bytes(&left), b.bytes(&right));
    let n = b.extent;
    let mut out = vec![0.0f32; 128 * n];
    let kernel = |arguments: &Arguments| {
        let base = shared_base();
        prepare(arguments, base);
        let d = allocate(base + SLOT, 128);
        if thread_idx() == 0 {
            for step in 0..DEPTH / a.step() {
                let (of_a, of_b) = (a.descriptor(base + A, step), b.descriptor(base + B, step));
                let instruction = instruction(a, b) ^ flags;
                match a.element.bytes() {
                    2 => tcgen05_mma_f16(d, of_a, of_b, instruction, step > 0),
                    _ => tcgen05_mma_f8f6f4(d, of_a, of_b, instruction, step > 0),
                }
            }
        }
        finish(base + BARRIER, 0);
        let out = arguments.global::<f32>(2);
        for column in (0..n as u32).step_by(8).filter(|_| a.extent == 128) {
            let part = tcgen05_ld_32x32b::<8>(d + (warp() << 21) + column);
            tcgen05_wait_ld();
            for (i, value) in part.registers().into_iter().enumerate() {
                let at = thread_idx() as usize * n + column as usize + i;
                out.store(at, f32::from_bits(value));
            }
        }
        for column in (0..n as u32).step_by(8).filter(|_| a.extent == 64) {
            let part = tcgen05_ld_16x256b::<4>(d + (warp() << 21) + column);
            tcgen05_wait_ld();
            for (i, value) in part.registers().into_iter().enumerate() {
                let row = warp() * 32 + lane() / 4 + i as u32 / 2 * 8;
                let at = row * n as u32 + column + lane() % 4 * 2 + i as u32 % 2;
                out.store(at as usize, f32::from_bits(value));
            }
        }
        free(d, 128);
    };
    let given = [Arg::read(&left), Arg::read(&right), Arg::write(&mut out)];
    let report = launch(&shape(seed), &kernel, &given).unwrap();
    (out, report)
}

fn left(row: usize, k: usize) -> f32 {
    ((row * 5 + k * 3 + k / 16) % 8) as f32 - 4.0
}

fn right(column: usize, k: usize) -> f32 {
    ((column * 3 + k * 7 + column / 8) % 7) as f32 - 3.0
}

fn sum(row: usize, column: usize) -> f32 {
    (0..DEPTH).map(|k| left(row, k) * right(column, k)).sum()
}

#[test]
fn products_of_every_layout() {
    let extents = [(128, 80), (64, 80), (64, 24)];
    let rows = [16, 32, 64, 128];
    for (case, (m, n)) in extents.into_iter().enumerate() {
        for element in [F16, Bf16, E4m3, E5m2] {
            for layout in 0..16 {
                let (of_a, of_b) = (rows[layout % 4], rows[layout / 4]);
                let majors = [(false, false), (false, true), (true, false), (true, true)];
                let (a_mn, b_mn) = majors[(layout + layout / 4 + case) % 4];
                if element.bytes() == 1 && b_mn && n % 16 != 0 {
                    continue;
                }
                let a = Form { element, mn_major: a_mn, row: of_a, extent: m };
                let b = Form { element, mn_major: b_mn, row: of_b, extent: n };
                let (out, report) = multiply(a, b, 0, layout as u64);
                for (row, column) in (0..m).flat_map(|row| (0..n).map(move |n| (row, n))) {
                    let at = lane_of(row, m) * n + column;
                    assert_eq!(out[at], sum(row, column), "{a:?}, {b:?}, {row}, {column}");
                }
                assert_eq!(report.tensor_products, (DEPTH / a.step()) as u64);
            }
        }
    }
}

#[test]
fn signs_of_operands() {
    let form = |extent| Form { element: Bf16, mn_major: false, row: 128, extent };
    for (flags, sign) in [(1 << 13, -1.0), (1 << 14, -1.0), (3 << 13, 1.0)] {
        let (out, _) = multiply(form(128), form(16), flags, 1);
        assert_eq!(out[5 * 16 + 3], sign * sum(5, 3));
    }
}

#[test]
fn operands_of_two_types_of_eight_bits() {
    let a = Form { element: E5m2, mn_major: false, row: 128, extent: 128 };
    let b = Form { element: E4m3, extent: 32, ..a };
    let (out, _) = multiply(a, b, 0, 2);
    assert_eq!(out[77 * 32 + 9], sum(77, 9));
}

/// A goes to tensor memory by 32-bit columns, in the upper or lower half of the lanes where it has
/// 64 rows.
fn multiply_from_tensor_memory(a: Form, b: Form, half: u32) -> Vec<f32> {
    let right = b.bytes(&right);
    let n = b.extent;
    let mut words = vec![0u8; 64 << 10];
    for (row, k) in (0..a.extent).flat_map(|row| (0..DEPTH).map(move |k| (row, k))) {
        let lane = lane_of(row, a.extent) + half as usize;
        let at = lane * 256 + k * a.element.bytes();
        let code = a.element.encode(left(row, k));
        words[at..at + a.element.bytes()].copy_from_slice(&code[..a.element.bytes()]);
    }
    let mut out = vec![0.0f32; 128 * n];
    let kernel = |arguments: &Arguments| {
        let base = shared_base();
        prepare(arguments, base);
        let d = allocate(base + SLOT, 256);
        let p = d + 128;
        for part in 0..2 {
            let at = thread_idx() * 64 + part * 32;
            let words = arguments.global::<u32>(0);
            let row = std::array::from_fn::<_, 32, _>(|i| words.load(at as usize + i));
            tcgen05_st_32x32b(p + (warp() << 21) + 32 * part, row);
        }
        tcgen05_wait_st();
        tcgen05_fence_before();
        sync_threads();
        tcgen05_fence_after();
        if thread_idx() == 0 {
            for step in 0..DEPTH / a.step() {
                let (from, to) = (p + (half << 16) + 8 * step as u32, d + (half << 16));
                let of_b = b.descriptor(base + B, step);
                match a.element.bytes() {
                    2 => tcgen05_mma_tensor_f16(to, from, of_b, instruction(a, b), step > 0),
                    _ => tcgen05_mma_tensor_f8f6f4(to, from, of_b, instruction(a, b), step > 0),
                }
            }
        }
        finish(base + BARRIER, 0);
        let out = arguments.global::<f32>(2);
        for column in (0..n as u32).step_by(8) {
            let lanes = if a.extent == 64 { half } else { 0 };
            let store = |row: u32, part: [u32; 4]| {
                for (i, value) in part.into_iter().enumerate() {
                    let row = row + lane() / 4 + i as u32 / 2 * 8;
                    let at = row * n as u32 + column + lane() % 4 * 2 + i as u32 % 2;
                    out.store(at as usize, f32::from_bits(value));
                }
            };
            for more in [0, 16].into_iter().take(if a.extent == 64 { 1 } else { 2 }) {
                let row = warp() * 32 + lanes + more;
                let part = tcgen05_ld_16x256b::<4>(d + (row << 16) + column);
                tcgen05_wait_ld();
                store(row, part.registers());
            }
        }
        free(d, 256);
    };
    let given = [Arg::read(&words), Arg::read(&right), Arg::write(&mut out)];
    launch(&shape(3), &kernel, &given).unwrap();
    out
}

#[test]
fn products_with_a_in_tensor_memory() {
    for element in [F16, Bf16, E4m3, E5m2] {
        for (extent, half) in [(128, 0), (64, 0), (64, 16)] {
            let a = Form { element, mn_major: false, row: 128, extent };
            let b = Form { mn_major: true, extent: 48, ..a };
            let out = multiply_from_tensor_memory(a, b, half);
            for (row, column) in (0..extent).flat_map(|row| (0..48).map(move |n| (row, n))) {
                let at = (lane_of(row, extent) + half as usize) * 48 + column;
                assert_eq!(out[at], sum(row, column), "{a:?}, {half}, row {row}, column {column}");
            }
        }
    }
}

/// Stores by one shape and loads by the other; each register holds lane and column of its place.
#[test]
fn registers_lie_where_the_shapes_say() {
    let value = |lane: u32, column: u32| 1000 * lane + column;
    let kernel = |_: &Arguments| {
        let memory = allocate(shared_base(), 64);
        let own = memory + (warp() << 21);
        let first = warp() * 32;
        tcgen05_st_32x32b::<64>(own, std::array::from_fn(|i| value(first + lane(), i as u32)));
        tcgen05_wait_st();
        for half in [0, 16] {
            let part = tcgen05_ld_16x256b::<16>(own + (half << 16) + 32);
            tcgen05_wait_ld();
            for (i, register) in part.registers().into_iter().enumerate() {
                let i = i as u32;
                let row = first + half + lane() / 4 + i / 2 % 2 * 8;
                assert_eq!(register, value(row, 32 + i / 4 * 8 + lane() % 4 * 2 + i % 2));
            }
            let stored = std::array::from_fn(|i| 7 * lane() + 1000 * i as u32 + half);
            tcgen05_st_16x256b::<4>(own + (half << 16), stored);
            tcgen05_wait_st();
        }
        let row = tcgen05_ld_32x32b::<8>(own);
        tcgen05_wait_ld();
        for (column, register) in row.registers().into_iter().enumerate() {
            let (half, row) = (lane() / 16 * 16, lane() % 16);
            let thread = row % 8 * 4 + column as u32 / 2;
            let i = row / 8 * 2 + column as u32 % 2;
            assert_eq!(register, 7 * thread + 1000 * i + half, "column {column}");
        }
        free(memory, 64);
    };
    launch(&shape(4), &kernel, &[]).unwrap();
}

fn allocations(kernel: impl Fn(u32) + Sync) -> Result<(), Fault> {
    let shape = Launch { threads: 32, ..shape(5) };
    launch(&shape, &|_: &Arguments| kernel(shared_base()), &[]).map(|_| ())
}

/// Never at column 0 while there is another place.
#[test]
fn columns_are_allocated_in_powers_of_two() {
    let take = |slot: u32, columns: u32| {
        tcgen05_alloc(slot, columns);
        sync_warp();
        ld_shared::<u32>(slot)
    };
    allocations(|slot| {
        let (first, second) = (take(slot, 256), take(slot + 4, 128));
        let third = take(slot + 8, 32);
        assert_eq!([first, second, third], [256, 128, 96]);
        tcgen05_dealloc(second, 128);
        assert_eq!(take(slot + 12, 32), 224);
        tcgen05_dealloc(224, 32);
        tcgen05_dealloc(first, 256);
        tcgen05_dealloc(third, 32);
    })
    .unwrap();
    allocations(|slot| {
        let all = take(slot, 512);
        assert_eq!(all, 0);
        tcgen05_dealloc(all, 512);
    })
    .unwrap();
}
