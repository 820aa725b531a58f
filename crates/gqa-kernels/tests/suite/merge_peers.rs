//! The merge of what several GPUs hold, on the simulator, against its definition. The GPUs are CTAs
//! of a cluster, which run at the same time, and their memories arguments of one launch.

use crate::support::{Random, entry, unit, wide};
use gqa_kernels::attention::merge_peers::{Part, RANKS, SLOTS, THREADS, merge_as};
use gqa_kernels::num::{DType, Element, bf16, f16};
use gqa_kernels::params::{PeersParams, Strides};
use gqa_kernels::simt::{Global, block_idx_x, grid_dim_x, sync_threads};
use gqa_sim::{Arg, Arguments, Launch, Report, launch};

/// Microseconds of the simulated clock: more than an exchange takes, and few.
const LONG: u32 = 100_000;
const SHORT: u32 = 10;

/// Sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Shape {
    batch: u32,
    q_len: u32,
    heads: u32,
    size: u32,
}

impl Shape {
    fn draw<T: Element>(random: &mut Random) -> Self {
        let units = [1, 2, 9, 16, 32, 33, 64][random.below(7) as usize];
        let sizes = [1 + random.below(2), 1 + random.below(3), 1 + random.below(6)];
        let [batch, q_len, heads] = sizes;
        Self { batch, q_len, heads, size: units * 8 / size_of::<T>() as u32 }
    }

    fn rows(self) -> usize {
        (self.batch * self.q_len * self.heads) as usize
    }

    fn elements(self) -> usize {
        self.rows() * self.size as usize
    }

    /// The parameters, with log-sum-exps that lie in the order (head, batch, row).
    fn params<T: Element>(self, [rank, count, capacity]: [u32; 3], timeout: u32) -> PeersParams {
        let [batch, head] = [self.q_len, self.batch * self.q_len].map(u64::from);
        PeersParams {
            part_lse: Strides { batch, head, row: 1 },
            rows: self.rows() as u32,
            heads: self.heads,
            q_len: self.q_len,
            row_units: self.size * size_of::<T>() as u32 / 8,
            rank,
            count,
            capacity,
            timeout,
        }
    }

    /// Where a row's log-sum-exps are: the part's, and the merged one.
    fn lse_at(self, row: usize) -> [usize; 2] {
        let [q_len, heads, batch] = [self.q_len, self.heads, self.batch].map(|n| n as usize);
        let (b, s, h) = (row / heads / q_len, row / heads % q_len, row % heads);
        [(h * batch + b) * q_len + s, (b * heads + h) * q_len + s]
    }
}

/// What a rank has of a call, and gets.
#[derive(Clone)]
struct Tensors<T> {
    part: Vec<T>,
    part_lse: Vec<f32>,
    out: Vec<T>,
    lse: Vec<f32>,
}

impl<T: Element> Tensors<T> {
    /// Some rows have no key here: their output is not read.
    fn draw(shape: Shape, random: &mut Random) -> Self {
        let mut part = random.values::<T>(shape.elements());
        let mut part_lse = vec![0.0; shape.rows()];
        for row in 0..shape.rows() {
            let is_empty = random.below(4) == 0;
            let value = (20.0 * random.unit() - 10.0) as f32;
            part_lse[shape.lse_at(row)[0]] = if is_empty { f32::NEG_INFINITY } else { value };
            if is_empty {
                let size = shape.size as usize;
                part[row * size..][..size].fill(T::from_f32(f32::NAN));
            }
        }
        let nan = T::from_f32(f32::NAN);
        let (out, lse) = (vec![nan; shape.elements()], vec![f32::NAN; shape.rows()]);
        Self { part, part_lse, out, lse }
    }
}

/// A GPU's memory of the exchange.
#[derive(Clone)]
struct Memory {
    inbox: Vec<u128>,
    state: Vec<u64>,
    late: Vec<u32>,
}

impl Memory {
    fn new(count: u32, capacity: u32, blocks: u32) -> Self {
        let pairs = (SLOTS * count * capacity) as usize;
        Self { inbox: vec![0; pairs], state: vec![0; blocks as usize], late: vec![0] }
    }

    fn is_late(&self) -> bool {
        self.late[0] != 0
    }
}

/// Calls of all ranks: by call, then rank.
type Calls<T> = Vec<(Shape, Vec<Tensors<T>>)>;

/// Arguments of a rank, and of a rank's call.
const OF_RANK: usize = 3;
const OF_CALL: usize = 4;

/// Plays all ranks' launches of all calls, one behind the other on each rank.
fn play<T: Element>(
    calls: &mut Calls<T>,
    memories: &mut [Memory],
    [blocks, capacity]: [u32; 2],
    seed: u64,
) -> Result<Report, gqa_sim::Fault> {
    let count = memories.len();
    let shapes: Vec<_> = calls.iter().map(|(shape, _)| *shape).collect();
    let mut arguments = Vec::new();
    for memory in memories {
        arguments.push(Arg::write(&mut memory.inbox));
        arguments.push(Arg::write(&mut memory.state));
        arguments.push(Arg::write(&mut memory.late));
    }
    for tensors in calls.iter_mut().flat_map(|(_, ranks)| ranks) {
        arguments.push(Arg::read(&tensors.part));
        arguments.push(Arg::read(&tensors.part_lse));
        arguments.push(Arg::write(&mut tensors.out));
        arguments.push(Arg::write(&mut tensors.lse));
    }
    let kernel = |arguments: &Arguments| {
        let rank = block_idx_x() as usize % count;
        let place = [block_idx_x() / count as u32, grid_dim_x() / count as u32];
        let inbox = |rank| arguments.global::<u64>(OF_RANK * rank);
        let peers = std::array::from_fn(|peer| match peer < count && peer != rank {
            true => inbox(peer),
            false => Global::null(),
        });
        for (call, shape) in shapes.iter().enumerate() {
            let p = shape.params::<T>([rank as u32, count as u32, capacity], LONG);
            let first = OF_RANK * count + OF_CALL * (call * count + rank);
            let part = Part { out: arguments.global::<T>(first), lse: arguments.global(first + 1) };
            let state = arguments.global(OF_RANK * rank + 1);
            let late = arguments.global(OF_RANK * rank + 2);
            let (out, lse) = (arguments.global::<T>(first + 2), arguments.global(first + 3));
            merge_as(place, part, inbox(rank), peers, state, late, out, lse, p);
            // The next launch begins when all of this one has ended.
            sync_threads();
        }
    };
    let shape = Launch {
        name: "merge_peers on all ranks",
        grid: [blocks * count as u32, 1, 1],
        threads: THREADS,
        seed,
        cluster: count as u32,
        communicates: true,
        ..Launch::default()
    };
    launch(&shape, &kernel, &arguments)
}

/// Compares what a rank got with the definition.
fn compare<T: Element>(shape: Shape, ranks: &[Tensors<T>], got: &Tensors<T>) {
    for row in 0..shape.rows() {
        let [from, to] = shape.lse_at(row);
        let logs: Vec<f64> = ranks.iter().map(|rank| f64::from(rank.part_lse[from])).collect();
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let shares = logs.iter().map(|log| if most.is_finite() { (log - most).exp() } else { 0.0 });
        let shares: Vec<_> = shares.collect();
        let sum: f64 = shares.iter().sum();
        let lse = f64::from(got.lse[to]);
        match most.is_finite() {
            true => assert!((lse - most - sum.ln()).abs() < 1e-5, "{shape:?}, row {row}"),
            false => assert_eq!(lse, f64::NEG_INFINITY, "{shape:?}, row {row}"),
        }
        for i in row * shape.size as usize..(row + 1) * shape.size as usize {
            let parts = ranks.iter().zip(&shares).filter(|(_, share)| **share > 0.0);
            let want: f64 = parts.map(|(rank, share)| share / sum * wide(rank.part[i])).sum();
            let bound = unit::<T>() * want.abs() + 1e-6;
            let got = wide(got.out[i]);
            assert!((got - want).abs() <= bound, "{shape:?}, row {row}: {got}, not {want}");
        }
    }
}

/// Calls of several sizes in an exchange of `count` GPUs.
fn exchange<T: Element>(count: u32, blocks: u32, seed: u64) {
    let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut calls: Calls<T> = (0..1 + random.below(5))
        .map(|_| {
            let shape = Shape::draw::<T>(&mut random);
            let tensors = (0..count).map(|_| Tensors::draw(shape, &mut random)).collect();
            (shape, tensors)
        })
        .collect();
    let pairs = |(shape, _): &(Shape, _)| shape.params::<T>([0, count, 0], LONG).pairs();
    let capacity = calls.iter().map(pairs).max().unwrap_or_default() + random.below(3);
    let mut memories = vec![Memory::new(count, capacity, blocks); count as usize];
    play(&mut calls, &mut memories, [blocks, capacity], seed).unwrap();
    for memory in &memories {
        assert!(!memory.is_late());
        assert_eq!(memory.state, vec![calls.len() as u64; blocks as usize]);
    }
    for (shape, ranks) in &calls {
        let bits = |rank: &Tensors<T>| bytemuck::cast_slice::<T, u8>(&rank.out).to_vec();
        for rank in ranks {
            compare(*shape, ranks, rank);
            assert_eq!(bits(rank), bits(&ranks[0]), "ranks differ");
        }
    }
}

#[test]
fn all_gpus_get_the_merge_of_all_parts() {
    for seed in 0..40 {
        let count = 2 + seed as u32 % (RANKS as u32 - 1);
        let blocks = 1 + seed as u32 / 7 % 3;
        match seed % 3 {
            0 => exchange::<bf16>(count, blocks, seed),
            1 => exchange::<f16>(count, blocks, seed),
            _ => exchange::<f32>(count, blocks, seed),
        }
    }
}

/// One rank's launch of the entry, of two ranks and one CTA.
fn alone(
    rank: u32,
    shape: Shape,
    tensors: &mut Tensors<f32>,
    [own, other]: [&mut Memory; 2],
    timeout: u32,
) -> Report {
    let entry = entry("merge_peers", DType::F32);
    let capacity = (own.inbox.len() as u32) / (SLOTS * 2);
    let mut arguments = vec![Arg::read(&tensors.part), Arg::read(&tensors.part_lse)];
    arguments.push(Arg::write(&mut own.inbox));
    let mut other = Some(Arg::write(&mut other.inbox));
    arguments.extend((0..RANKS as u32).map(|peer| match peer == 1 - rank {
        true => other.take().unwrap_or_else(Arg::null),
        false => Arg::null(),
    }));
    arguments.push(Arg::write(&mut own.state));
    arguments.push(Arg::write(&mut own.late));
    arguments.push(Arg::write(&mut tensors.out));
    arguments.push(Arg::write(&mut tensors.lse));
    arguments.push(Arg::params(&shape.params::<f32>([rank, 2, capacity], timeout)));
    let launched = Launch {
        name: entry.name,
        threads: entry.threads,
        communicates: true,
        programmatic: true,
        ..Launch::default()
    };
    launch(&launched, &entry.simulate, &arguments).unwrap()
}

/// Two ranks with a call of six rows.
fn two() -> (Shape, [Tensors<f32>; 2], [Memory; 2]) {
    let shape = Shape { batch: 1, q_len: 2, heads: 3, size: 16 };
    let mut random = Random::new(5);
    let tensors = [(); 2].map(|()| Tensors::draw(shape, &mut random));
    let capacity = shape.params::<f32>([0, 2, 0], LONG).pairs();
    (shape, tensors, [(); 2].map(|()| Memory::new(2, capacity, 1)))
}

fn is_nan(tensors: &Tensors<f32>) -> bool {
    tensors.out.iter().chain(&tensors.lse).all(|x| x.is_nan())
}

#[test]
fn a_gpu_that_never_sends_is_an_error_in_bounded_time() {
    let (shape, [mut mine, _], [mut own, mut other]) = two();
    let waited = alone(0, shape, &mut mine, [&mut own, &mut other], SHORT);
    assert!(is_nan(&mine));
    assert_eq!((own.late[0], own.state[0]), (1 << 1, 1 | 1 << 32));
    assert!(other.inbox.iter().any(|pair| *pair != 0), "nothing was sent");
    // From now on it neither waits nor sends.
    own.late[0] = 0;
    other.inbox.fill(0);
    mine.out.fill(0.0);
    mine.lse.fill(0.0);
    let after = alone(0, shape, &mut mine, [&mut own, &mut other], LONG);
    assert!(is_nan(&mine));
    assert!(other.inbox.iter().all(|pair| *pair == 0));
    assert!(after.turns < waited.turns);
}

#[test]
fn a_part_that_came_before_the_launch_is_taken() {
    let (shape, [mut mine, mut others], [mut own, mut other]) = two();
    // That rank waits in vain here, but has sent.
    alone(1, shape, &mut others, [&mut other, &mut own], SHORT);
    alone(0, shape, &mut mine, [&mut own, &mut other], SHORT);
    assert_eq!((own.late[0], own.state[0]), (0, 1));
    compare(shape, &[mine.clone(), others], &mine);
}

#[test]
fn parts_of_earlier_calls_are_not_taken() {
    let (shape, [mut mine, mut others], [mut own, mut other]) = two();
    alone(1, shape, &mut others, [&mut other, &mut own], SHORT);
    // Call 3 has the slot of call 1.
    own.state[0] = 2;
    alone(0, shape, &mut mine, [&mut own, &mut other], SHORT);
    assert!(is_nan(&mine) && own.late[0] == 1 << 1);
}

#[test]
fn each_word_of_a_part_is_waited_for() {
    let (shape, [mine, mut others], [mut own, mut other]) = two();
    alone(1, shape, &mut others, [&mut other, &mut own], SHORT);
    let sent: Vec<_> = (0..own.inbox.len()).filter(|pair| own.inbox[*pair] != 0).collect();
    assert_eq!(sent.len(), shape.rows() * (1 + shape.size as usize / 2));
    for pair in sent {
        for half in [32, 96] {
            let (mut mine, mut own) = (mine.clone(), own.clone());
            own.inbox[pair] &= !(u128::from(u32::MAX) << half);
            alone(0, shape, &mut mine, [&mut own, &mut other.clone()], SHORT);
            assert_eq!(own.late[0], 1 << 1, "pair {pair}");
        }
    }
}
