//! Calls as an engine describes them.

use super::draw::{Draw, TYPES};
use super::machine::Machine;
use super::{Report, Scenario, operators};
use gqa_host::engine::{Dense, Heads, LatentHeads, Layer, Paged, Rope};
use gqa_host::plan::TensorId;
use gqa_host::{DType, Layout, QuantFormat, Quantization, RowStrides, Scales, Sink};

/// A call that is only planned.
#[derive(Debug)]
pub struct Planned {
    layer: Layer,
    call: Call,
    machine: Machine,
}

#[derive(Debug)]
enum Call {
    Dense(Dense),
    Paged(Paged),
}

impl Planned {
    pub fn draw(draw: &mut Draw) -> Self {
        let kv = 1 + draw.below(4);
        let [query, kv, size] = [kv * (1 + kv % 3), kv, 64].map(|n| number(draw, n));
        let dtype = if draw.one_in(8) { draw.of(&TYPES) } else { DType::BF16 };
        let plain = match draw.one_in(4) {
            false => Layer::new(dtype, Heads { query, kv, size }),
            true => {
                let values = number(draw, 48);
                let values = draw.of(&[32, 64, values]);
                Layer::latent(dtype, LatentHeads { query, size, values }, draw.float())
            }
        };
        let layer = layer(plain, draw);
        let counts = [3, 5, 40].map(|n| number(draw, n));
        let call = match draw.flag() {
            true => Call::Dense(dense(counts, draw)),
            false => Call::Paged(paged(counts, draw)),
        };
        Self { layer, call, machine: Machine::draw(draw) }
    }
}

/// The number, or a hostile one.
fn number(draw: &mut Draw, n: usize) -> usize {
    if draw.one_in(6) { draw.size(n) } else { n }
}

fn layer(mut layer: Layer, draw: &mut Draw) -> Layer {
    for _ in 0..draw.below(4) {
        let dim = draw.of(&[16, 64, 64, 0, 7, 128]);
        let [dim, positions] = [dim, 64].map(|n| number(draw, n));
        let format = draw.of(&QuantFormat::ALL);
        let scales =
            draw.of(&[Scales::PerTensor, Scales::PerHead, Scales::PerChannel, Scales::PerToken]);
        layer = match draw.below(9) {
            0 => layer.scale(draw.float()),
            1 => layer.softcap(draw.float()),
            2 => layer.window(draw.size(8)),
            3 => layer.bidirectional(),
            4 => layer.sink(draw.of(&[Sink::None, Sink::Zero, Sink::PerHead])),
            5 => layer.rope(Rope::new(dim, positions).offset(draw.of(&[0, 0, 8, 48, dim]))),
            6 => layer.qk_norm(draw.float()),
            7 => layer.batch_invariant(),
            _ => layer.quantized(Quantization { format, scales }),
        };
    }
    layer
}

fn dense([batch, rows, capacity]: [usize; 3], draw: &mut Draw) -> Dense {
    let mut call = match draw.below(3) {
        0 => Dense::decode(batch, capacity),
        1 => Dense::prefill(batch, rows, capacity),
        _ => Dense::chunk(batch, rows, capacity),
    };
    for _ in 0..draw.below(4) {
        let [batch, head, row] = [(); 3].map(|()| {
            let stride = 1024 * draw.below(64);
            number(draw, stride)
        });
        let strides = RowStrides { batch, head, row };
        call = match draw.below(13) {
            0 => call.longest(draw.size(capacity)),
            1 => call.nothing_new(),
            2 => call.layout(draw.of(&[Layout::Bsnh, Layout::Bnsh])),
            3 => call.query_strides(strides),
            4 => call.key_value_strides(strides),
            5 => call.output_strides(strides),
            6 => call.packed(),
            7 => call.explicit_positions(),
            8 => call.bias(draw.flag(), draw.flag()),
            9 => call.log_sum_exp(),
            10 => call.float32_output().float8_products(),
            11 => call.float8_output(),
            _ => call.prefetch_cache(),
        };
    }
    call
}

fn paged([sequences, tokens, _]: [usize; 3], draw: &mut Draw) -> Paged {
    let cache = [40, 16, 8].map(|n| number(draw, n));
    let mut call = match draw.below(3) {
        0 => Paged::decode(sequences, cache),
        1 => Paged::in_rows(sequences, tokens, cache[0]),
        _ => Paged::new(sequences, tokens, cache),
    };
    for _ in 0..draw.below(4) {
        let strides = [(); 2].map(|()| {
            let [head, row] = [1024, 8192].map(|n| number(draw, n));
            RowStrides { batch: 0, head, row }
        });
        call = match draw.below(6) {
            0 => call.most_tokens(number(draw, 2)),
            1 => call.longest(number(draw, 30)),
            2 => call.packed(),
            3 => call.value_size(number(draw, 48)),
            4 => call.row_strides(strides),
            _ => call.slot_mapping(),
        };
    }
    call
}

/// Numbers of a layer and of its calls.
const NUMBERS: [&str; 26] = [
    "batch_invariant",
    "dtype",
    "scale",
    "softcap",
    "sink",
    "causal",
    "qk_norm",
    "quantized",
    "packed",
    "sequences",
    "block_size",
    "blocks_per_sequence",
    "cache",
    "heads.query",
    "heads.kv",
    "heads.size",
    "heads.values",
    "value_size",
    "latent",
    "window",
    "rope.dim",
    "rope.offset",
    "rope.positions",
    "capacity",
    "longest",
    "most_tokens",
];

/// Tensors of a paged call that its plan names differently, or lacks.
const PAGED_TENSORS: [&str; 3] = ["key_cache", "value_cache", "past_seqlens"];

impl Scenario for Planned {
    fn make(&self, report: &mut Report) {
        let roles = TensorId::ALL.iter().map(|id| id.name()).chain(NUMBERS);
        let problem = match self.call {
            Call::Dense(call) => {
                report.expect(operators::GQA, roles);
                report.note("engine, dense", self.layer.dense(call))
            }
            Call::Paged(call) => {
                report.expect(operators::PAGED, roles.chain(PAGED_TENSORS));
                report.note("engine, paged", self.layer.paged(call))
            }
        };
        if let Some(problem) = problem {
            self.machine.plans(&problem, report);
        }
    }
}
