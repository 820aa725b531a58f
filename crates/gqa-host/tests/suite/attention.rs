//! ONNX Attention: one error of one line per rule, and small calls whose results are known.

use gqa_host::backend::Backend;
use gqa_host::backend::cpu::Cpu;
use gqa_host::backend::sim::Sim;
use gqa_host::op::{Attention, AttentionInputs};
use gqa_host::plan::PlanOptions;
use gqa_host::reference::Reference;
use gqa_host::{DType, Tensor};
use ndarray::{Array1, ArrayD, IxDyn};

/// A call: by default two query heads of size 8 per KV head, three query rows, five keys, values of
/// size 6.
#[derive(Clone)]
struct Call {
    op: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Option<Tensor>,
    past: [Option<Tensor>; 2],
    nonpad: Option<Tensor>,
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(dtype, shape)
}

fn float(shape: &[usize]) -> Tensor {
    zeros(DType::F32, shape)
}

fn long(values: &[i64]) -> Option<Tensor> {
    Some(Array1::from(values.to_vec()).into())
}

impl Default for Call {
    fn default() -> Self {
        Self {
            op: Attention::new(),
            q: float(&[2, 4, 3, 8]),
            k: float(&[2, 2, 5, 8]),
            v: float(&[2, 2, 5, 6]),
            attn_mask: None,
            past: [None, None],
            nonpad: None,
        }
    }
}

impl Call {
    fn inputs(&self) -> AttentionInputs<'_> {
        AttentionInputs {
            attn_mask: self.attn_mask.as_ref(),
            past_key: self.past[0].as_ref(),
            past_value: self.past[1].as_ref(),
            nonpad_kv_seqlen: self.nonpad.as_ref(),
            ..AttentionInputs::new(&self.q, &self.k, &self.v)
        }
    }

    fn refusal(&self) -> String {
        match self.op.problem(&self.inputs()) {
            Ok(problem) => format!("accepted: {problem:?}"),
            Err(error) => error.to_string(),
        }
    }
}

fn refuses(change: impl FnOnce(&mut Call), want: &str) {
    let mut call = Call::default();
    change(&mut call);
    assert_eq!(call.refusal(), want);
}

#[test]
fn refusals_of_attributes() {
    let op = |op: Attention, want: &str| refuses(|c| c.op = op, want);
    let base = Attention::new;
    op(base().is_causal(2), "is_causal: got 2; allowed: 0 or 1");
    op(base().scale(-1.0), "scale: got -1; allowed: a finite number, 0 or more");
    op(base().scale(f32::NAN), "scale: got NaN; allowed: a finite number, 0 or more");
    op(base().softcap(-0.5), "softcap: got -0.5; allowed: a finite number, 0 or more");
    op(base().qk_matmul_output_mode(4), "qk_matmul_output_mode: got 4; allowed: 0, 1, 2 or 3");
    op(
        base().softmax_precision(2),
        "softmax_precision: got 2; allowed: 1 (float32), 10 (float16), 11 (float64) or 16 (bfloat16)",
    );
    op(
        base().left_window_size(-2),
        "left_window_size: got -2; allowed: 0 or more, or -1 for no bound",
    );
    op(
        base().right_window_size(-7),
        "right_window_size: got -7; allowed: 0 or more, or -1 for no bound",
    );
    op(base().q_num_heads(3), "q_num_heads: got 3; allowed: no attribute, or 4, the heads of Q");
    op(
        base().num_heads(4, -2),
        "kv_num_heads: got -2; allowed: no attribute, or 2, the heads of K",
    );
}

#[test]
fn refusals_of_q_k_and_v() {
    refuses(|c| c.q = float(&[2, 8]), "Q: got (2, 8); allowed: 3 or 4 dimensions");
    refuses(
        |c| c.k = float(&[2, 5, 16]),
        "K: got (2, 5, 16); allowed: 4 dimensions, as many as Q has",
    );
    refuses(
        |c| c.v = float(&[2, 2, 0, 6]),
        "V: got (2, 2, 0, 6); allowed: (batch_size = 2, kv_num_heads = 2, kv_sequence_length = 5, v_head_size = 6)",
    );
    refuses(
        |c| c.v = float(&[2, 2, 5, 0]),
        "V: got (2, 2, 5, 0), so a head size of 0; allowed: 1 to 65536",
    );
    refuses(|c| c.q = float(&[2, 0, 3, 8]), "Q: got no heads; allowed: 1 or more heads");
    refuses(|c| c.k = float(&[2, 0, 5, 8]), "K: got no heads; allowed: 1 or more heads");
    refuses(
        |c| c.q = zeros(DType::I32, &[2, 4, 3, 8]),
        "Q: got int32; allowed: float32, float16, bfloat16 or float64",
    );
    refuses(
        |c| c.v = zeros(DType::Bool, &[2, 2, 5, 6]),
        "V: got bool; allowed: float32, float16, bfloat16 or float64",
    );
    refuses(
        |c| c.k = zeros(DType::F16, &[2, 2, 5, 8]),
        "K: got float16; allowed: float32, the type of Q",
    );
    refuses(
        |c| c.k = float(&[2, 3, 5, 8]),
        "Q: got 4 heads; allowed: a multiple of the 3 KV heads",
    );
    refuses(
        |c| c.k = float(&[2, 2, 5, 16]),
        "K: got (2, 2, 5, 16); allowed: (batch_size = 2, kv_num_heads = 2, kv_sequence_length = 5, head_size = 8)",
    );
    refuses(
        |c| c.v = float(&[2, 2, 4, 6]),
        "V: got (2, 2, 4, 6); allowed: (batch_size = 2, kv_num_heads = 2, kv_sequence_length = 5, v_head_size = 6)",
    );
    refuses(
        |c| c.v = float(&[2, 2, 1, 65537]),
        "V: got (2, 2, 1, 65537), so a head size of 65537; allowed: 1 to 65536",
    );
    refuses(
        |c| (c.op, c.nonpad) = (Attention::new().present(true), long(&[3, 5])),
        "present_key, present_value: got an output; allowed: no output, as nonpad_kv_seqlen is given",
    );
    let flat = |op: Attention, q: usize, want: &str| {
        refuses(
            |c| {
                (c.q, c.k, c.v) = (float(&[2, 3, q]), float(&[2, 5, 16]), float(&[2, 5, 12]));
                c.op = op;
            },
            want,
        );
    };
    flat(
        Attention::new(),
        32,
        "q_num_heads: got no attribute; allowed: one, as Q has three dimensions",
    );
    flat(
        Attention::new().q_num_heads(4),
        32,
        "kv_num_heads: got no attribute; allowed: one, as Q has three dimensions",
    );
    flat(Attention::new().num_heads(0, 2), 32, "q_num_heads: got 0; allowed: 1 to 65535");
    flat(
        Attention::new().num_heads(4, 2),
        33,
        "Q: got (2, 3, 33); allowed: a last dimension that is a multiple of q_num_heads = 4",
    );
    flat(
        Attention::new().num_heads(4, 2),
        36,
        "K: got (2, 5, 16); allowed: (batch_size = 2, kv_sequence_length = 5, kv_num_heads * head size = 18)",
    );
}

#[test]
fn refusals_of_caches() {
    let key = || Some(float(&[2, 2, 7, 8]));
    let value = || Some(float(&[2, 2, 7, 6]));
    refuses(
        |c| c.past = [key(), None],
        "past_value: got no input; allowed: a tensor, as past_key is given",
    );
    refuses(
        |c| c.past = [key(), Some(float(&[2, 2, 6, 6]))],
        "past_value: got (2, 2, 6, 6); allowed: (batch_size = 2, kv_num_heads = 2, past_sequence_length = 7, v_head_size = 6)",
    );
    refuses(
        |c| c.past = [Some(zeros(DType::F16, &[2, 2, 7, 8])), value()],
        "past_key: got float16; allowed: float32, the type of K",
    );
    refuses(
        |c| (c.past, c.nonpad) = ([key(), value()], long(&[1, 1])),
        "nonpad_kv_seqlen: got a tensor; allowed: no input, as past_key is given",
    );
    refuses(
        |c| c.nonpad = Some(zeros(DType::I32, &[2])),
        "nonpad_kv_seqlen: got int32; allowed: int64",
    );
    refuses(
        |c| c.nonpad = long(&[1, 1, 1]),
        "nonpad_kv_seqlen: got (3); allowed: (batch_size = 2)",
    );
    refuses(
        |c| c.nonpad = long(&[5, 6]),
        "nonpad_kv_seqlen: got 6 for batch entry 1; allowed: 0 to 5, the rows of K",
    );
    refuses(
        |c| c.nonpad = long(&[-1, 5]),
        "nonpad_kv_seqlen: got -1 for batch entry 0; allowed: 0 to 5, the rows of K",
    );
    refuses(
        |c| (c.nonpad, c.attn_mask) = (long(&[4, 3]), Some(float(&[3, 3]))),
        "nonpad_kv_seqlen: got 4 for batch entry 0; allowed: 0 to 3, the columns of attn_mask",
    );
}

#[test]
fn refusals_of_masks() {
    let mask = |mask: Tensor, want: &str| refuses(|c| c.attn_mask = Some(mask), want);
    let form = "what broadcasts to (batch_size = 2, q_num_heads = 4, q_sequence_length = 3, \
                total_sequence_length = 5), the last dimension 5 or less";
    mask(
        zeros(DType::F16, &[3, 5]),
        "attn_mask: got float16; allowed: bool, or float32, the type of Q",
    );
    mask(
        zeros(DType::I64, &[3, 5]),
        "attn_mask: got int64; allowed: bool, or float32, the type of Q",
    );
    mask(float(&[1, 1, 1, 1, 5]), "attn_mask: got (1, 1, 1, 1, 5); allowed: 1 to 4 dimensions");
    mask(float(&[]), "attn_mask: got (); allowed: 1 to 4 dimensions");
    for bad in [&[3, 6][..], &[2, 5], &[2, 3, 5], &[3, 1, 1, 5], &[3, 0]] {
        let got: Vec<String> = bad.iter().map(ToString::to_string).collect();
        mask(float(bad), &format!("attn_mask: got ({}); allowed: {form}", got.join(", ")));
    }
}

/// In operator set 23 the last dimension broadcasts as the others do, and is not padded.
#[test]
fn masks_of_operator_set_23() {
    let form = "what broadcasts to (batch_size = 2, q_num_heads = 4, q_sequence_length = 3, \
                total_sequence_length = 5)";
    let columns = |shape: &[usize]| {
        let op = Attention::new().broadcast_columns(true);
        let call = Call { op, attn_mask: Some(float(shape)), ..Call::default() };
        let problem = call.op.problem(&call.inputs()).map_err(|error| error.to_string())?;
        Ok(problem.bias.map(|bias| bias.columns))
    };
    for shape in [&[][..], &[1], &[3, 1], &[4, 3, 1], &[2, 1, 1, 1], &[5], &[3, 5]] {
        assert_eq!(columns(shape), Ok(Some(5)), "{shape:?}");
    }
    for (shape, got) in
        [(&[3, 4][..], "3, 4"), (&[3, 2], "3, 2"), (&[3, 0], "3, 0"), (&[2, 1], "2, 1")]
    {
        let want = format!("attn_mask: got ({got}); allowed: {form}");
        assert_eq!(columns(shape), Err(want));
    }
}

/// The visible keys of each row, as rows of `x` and `.`: queries are zero, so that all visible keys
/// weigh the same, and values are unit vectors, so that an output row is its weights.
#[derive(Default)]
struct Seen {
    op: Attention,
    rows: usize,
    new: usize,
    past: Option<usize>,
    nonpad: Option<i64>,
    mask: Option<Tensor>,
}

impl Seen {
    fn by(&self, backend: &dyn Backend, dtype: DType) -> Vec<String> {
        let (past, size) = (self.past.unwrap_or(0), 8);
        let total = past + self.new;
        let units = |from: usize, rows: usize| {
            let values: Vec<f32> = (0..rows * total)
                .map(|i| f32::from(u8::from(i / total + from == i % total)))
                .collect();
            Tensor::from_f32(dtype, &[1, 1, rows, total], &values).unwrap()
        };
        let cache = self.past.map(|rows| (zeros(dtype, &[1, 1, rows, size]), units(0, rows)));
        let (past_key, past_value) = cache.unzip();
        let mask = self.mask.clone().map(|mask| match mask {
            Tensor::F32(a) => {
                let values: Vec<f32> = a.iter().copied().collect();
                Tensor::from_f32(dtype, a.shape(), &values).unwrap()
            }
            mask => mask,
        });
        let call = Call {
            op: self.op.clone(),
            q: zeros(dtype, &[1, 1, self.rows, size]),
            k: zeros(dtype, &[1, 1, self.new, size]),
            v: units(past, self.new),
            attn_mask: mask,
            past: [past_key, past_value],
            nonpad: self.nonpad.and_then(|n| long(&[n])),
        };
        let y = call.op.run(&call.inputs(), backend).unwrap().y.to_f64();
        y.chunks_exact(total)
            .map(|row| {
                let seen = row.iter().filter(|x| **x > 0.0).count() as f64;
                let sum: f64 = row.iter().sum();
                assert!(seen == 0.0 || (sum - 1.0).abs() < 0.02, "weights {row:?}");
                row.iter().map(|x| if *x > 0.0 { 'x' } else { '.' }).collect()
            })
            .collect()
    }

    /// On every back end, in float32 and float16, by every kernel that the planner can choose.
    fn is(self, want: &[&str]) {
        let unfused = PlanOptions {
            disable_flash_attention: true,
            disable_memory_efficient_attention: true,
            ..PlanOptions::default()
        };
        let backends: [&dyn Backend; 4] =
            [&Reference, &Cpu::default(), &Sim::default(), &Sim::default().with_options(unfused)];
        for backend in backends {
            for dtype in [DType::F32, DType::F16] {
                assert_eq!(self.by(backend, dtype), want, "{} {dtype}", backend.name());
            }
        }
        assert_eq!(self.by(&Cpu::default(), DType::F64), want, "cpu float64");
    }
}

#[test]
fn causality_counts_from_the_past() {
    let causal = || Attention::new().is_causal(1);
    Seen { rows: 2, new: 4, ..Seen::default() }.is(&["xxxx", "xxxx"]);
    Seen { op: causal(), rows: 3, new: 5, ..Seen::default() }.is(&["x....", "xx...", "xxx.."]);
    Seen { op: causal(), rows: 5, new: 3, ..Seen::default() }
        .is(&["x..", "xx.", "xxx", "xxx", "xxx"]);
    Seen { op: causal(), rows: 2, new: 2, past: Some(2), ..Seen::default() }.is(&["xxx.", "xxxx"]);
    Seen { op: causal(), rows: 2, new: 3, past: Some(2), ..Seen::default() }
        .is(&["xxx..", "xxxx."]);
    Seen { op: causal(), rows: 2, new: 2, past: Some(0), ..Seen::default() }.is(&["x.", "xx"]);
    Seen { rows: 3, new: 1, past: Some(1), ..Seen::default() }.is(&["xx", "xx", "xx"]);
}

#[test]
fn an_external_cache_is_aligned_to_its_end() {
    let causal = || Attention::new().is_causal(1);
    let nonpad =
        |op, rows, new, valid| Seen { op, rows, new, nonpad: Some(valid), ..Seen::default() };
    nonpad(causal(), 2, 5, 3).is(&["xx...", "xxx.."]);
    nonpad(causal(), 3, 5, 1).is(&[".....", ".....", "x...."]);
    nonpad(causal(), 1, 5, 4).is(&["xxxx."]);
    nonpad(causal(), 1, 3, 0).is(&["..."]);
    nonpad(Attention::new(), 5, 4, 3).is(&["xxx."; 5]);
    nonpad(Attention::new(), 2, 3, 0).is(&["...", "..."]);
    nonpad(causal().left_window_size(1), 2, 5, 4).is(&[".xx..", "..xx."]);
}

#[test]
fn windows_are_inclusive_on_both_sides() {
    let window = |left, right| Attention::new().left_window_size(left).right_window_size(right);
    let seen = |op, rows, new| Seen { op, rows, new, ..Seen::default() };
    seen(window(2, 1), 4, 6).is(&["xx....", "xxx...", "xxxx..", ".xxxx."]);
    seen(window(0, -1), 3, 3).is(&["xxx", ".xx", "..x"]);
    seen(window(-1, 0), 3, 3).is(&["x..", "xx.", "xxx"]);
    seen(window(1, -1), 4, 2).is(&["xx", "xx", ".x", ".."]);
    seen(window(0, 0), 3, 3).is(&["x..", ".x.", "..x"]);
    seen(window(i64::MAX, i64::MAX), 1, 2).is(&["xx"]);
    let causal = window(1, 3).is_causal(1);
    Seen { op: causal, rows: 2, new: 2, past: Some(2), ..Seen::default() }.is(&[".xx.", "..xx"]);
}

#[test]
fn masks_hide_and_are_padded() {
    let boolean = |shape: &[usize], seen: &[u8]| {
        let seen = seen.iter().map(|&x| x == 1).collect();
        Some(Tensor::from(ArrayD::from_shape_vec(IxDyn(shape), seen).unwrap()))
    };
    let numbers =
        |shape: &[usize], values: &[f32]| Tensor::from_f32(DType::F32, shape, values).ok();
    let seen = |mask, new| Seen { rows: 2, new, mask, ..Seen::default() };
    seen(boolean(&[3], &[1, 0, 1]), 3).is(&["x.x", "x.x"]);
    seen(boolean(&[2, 3], &[0, 0, 0, 1, 1, 0]), 3).is(&["...", "xx."]);
    seen(boolean(&[1, 2, 1], &[1, 0]), 4).is(&["x...", "...."]);
    let hidden = f32::NEG_INFINITY;
    seen(numbers(&[1, 1, 1, 2], &[0.0, hidden]), 3).is(&["x..", "x.."]);
    seen(numbers(&[2, 2], &[hidden; 4]), 2).is(&["..", ".."]);
    // The lowest number is an ordinary bias: equal scores have equal weights.
    seen(numbers(&[2, 2], &[-65504.0, -65504.0, 0.0, -65504.0]), 2).is(&["xx", "x."]);
    let capped = Attention::new().softcap(0.5);
    Seen { op: capped, rows: 1, new: 2, mask: numbers(&[2], &[hidden, 0.0]), ..Seen::default() }
        .is(&[".x"]);
}
