//! Which kernels ONNX Attention reaches, and why not others.

use gqa_host::op::{Attention, AttentionShapes};
use gqa_host::plan::{DeviceInfo, Launch, Plan, PlanOptions, plan};
use gqa_host::{DType, Problem, TensorDesc};
use gqa_kernels::registry::{Family, Role};

/// Batch 2, 8 query heads over 2 KV heads.
#[derive(Clone, Copy)]
struct Shape {
    dtype: DType,
    q_len: usize,
    new_len: usize,
    past: Option<usize>,
    nonpad: bool,
    head_size: usize,
    v_head_size: usize,
    /// Type and columns.
    mask: Option<(DType, usize)>,
}

/// As many new keys as queries.
fn square(q_len: usize) -> Shape {
    Shape {
        dtype: DType::F16,
        q_len,
        new_len: q_len,
        past: None,
        nonpad: false,
        head_size: 64,
        v_head_size: 64,
        mask: None,
    }
}

impl Shape {
    fn problem(self, op: &Attention) -> Problem {
        let Self { dtype, q_len, new_len, head_size, v_head_size, .. } = self;
        fn tensor(dtype: DType, shape: &[usize]) -> TensorDesc<'_> {
            TensorDesc { dtype, shape }
        }
        let q = [2, 8, q_len, head_size];
        let (k, v) = ([2, 2, new_len, head_size], [2, 2, new_len, v_head_size]);
        let past = self.past.unwrap_or(0);
        let (past_key, past_value) = ([2, 2, past, head_size], [2, 2, past, v_head_size]);
        let mask = self.mask.map(|(dtype, columns)| (dtype, [q_len, columns]));
        let shapes = AttentionShapes {
            q: tensor(dtype, &q),
            k: tensor(dtype, &k),
            v: tensor(dtype, &v),
            attn_mask: mask.as_ref().map(|(dtype, shape)| tensor(*dtype, shape)),
            past_key: self.past.map(|_| tensor(dtype, &past_key)),
            past_value: self.past.map(|_| tensor(dtype, &past_value)),
            nonpad_kv_seqlen: self.nonpad.then_some(tensor(DType::I64, &[2])),
        };
        op.problem_from_shapes(&shapes).unwrap()
    }
}

fn planned(problem: &Problem) -> Plan {
    plan(problem, &DeviceInfo::h200(), &PlanOptions::default()).unwrap()
}

fn names(plan: &Plan) -> Vec<&'static str> {
    let name = |launch: &Launch| match launch.entry().role {
        Role::Attention => launch.entry().family.name(),
        role => role.name(),
    };
    plan.launches().iter().map(name).collect()
}

/// The family of the attention kernel, and the decision about plain flash attention.
fn reaches(shape: Shape, op: &Attention) -> (Family, String) {
    let plan = planned(&shape.problem(op));
    let mut families = plan.launches().iter().map(|launch| launch.entry().family);
    let family = families.find(|family| *family != Family::Prologue).unwrap();
    let hopper = plan.decisions().iter().find(|d| d.family == Family::Hopper).unwrap();
    let outcome = hopper.outcome.as_ref();
    (family, outcome.map_or_else(ToString::to_string, |entry| entry.name.to_owned()))
}

#[test]
fn flash_attention_where_positions_and_windows_are_its_own() {
    let (plain, causal) = (Attention::new(), Attention::new().is_causal(1));
    for (what, shape, op, want) in [
        ("prompt", square(512), &causal, Family::Hopper),
        ("not causal", square(512), &plain, Family::Hopper),
        ("float32", Shape { dtype: DType::F32, ..square(512) }, &causal, Family::TiledF32),
        (
            "float32, past, token",
            Shape { dtype: DType::F32, past: Some(4096), ..square(1) },
            &causal,
            Family::TiledF32,
        ),
        ("few rows", square(63), &causal, Family::Hopper),
        ("past", Shape { past: Some(64), ..square(512) }, &causal, Family::Hopper),
        ("past, token", Shape { past: Some(4096), ..square(1) }, &causal, Family::Decode),
        (
            "external cache, token",
            Shape { new_len: 4096, nonpad: true, ..square(1) },
            &causal,
            Family::Decode,
        ),
        ("cross", Shape { new_len: 4096, ..square(512) }, &plain, Family::Hopper),
        ("window", square(512), &Attention::new().is_causal(1).left_window_size(7), Family::Hopper),
        (
            "window, right bound 0",
            square(512),
            &Attention::new().left_window_size(7).right_window_size(0),
            Family::Hopper,
        ),
        ("softcap", square(512), &Attention::new().softcap(20.0), Family::Hopper),
        (
            "mask",
            Shape { mask: Some((DType::Bool, 512)), ..square(512) },
            &plain,
            Family::HopperMasked,
        ),
        (
            "causal bias",
            Shape { mask: Some((DType::F16, 512)), ..square(512) },
            &causal,
            Family::HopperMasked,
        ),
        (
            "short bias",
            Shape { mask: Some((DType::F16, 304)), ..square(512) },
            &plain,
            Family::HopperMasked,
        ),
        (
            "short bias, no whole vectors",
            Shape { mask: Some((DType::F16, 301)), ..square(512) },
            &plain,
            Family::TiledMasked,
        ),
        (
            "bias, few rows",
            Shape { mask: Some((DType::F16, 16)), ..square(16) },
            &plain,
            Family::HopperMasked,
        ),
        (
            "bias elsewhere",
            Shape { mask: Some((DType::F16, 600)), new_len: 600, ..square(512) },
            &causal,
            Family::General,
        ),
    ] {
        let (family, hopper) = reaches(shape, op);
        assert_eq!(family, want, "{what}: {hopper}");
    }
}

#[test]
fn refusals_of_flash_attention_say_why() {
    let (plain, causal) = (Attention::new(), Attention::new().is_causal(1));
    let right = Attention::new().right_window_size(3);
    let left = Attention::new().left_window_size(3);
    let scores = |mode| Attention::new().qk_matmul_output(true).qk_matmul_output_mode(mode);
    let general = Family::General;
    for (shape, op, want, reason) in [
        (Shape { v_head_size: 76, ..square(512) }, &plain, general, "76 is not a multiple of 8"),
        (
            Shape { head_size: 20, v_head_size: 20, ..square(512) },
            &plain,
            general,
            "head size 20 is not a multiple of 8",
        ),
        (Shape { dtype: DType::F32, ..square(512) }, &plain, Family::TiledF32, "float32"),
        (square(512), &right, general, "a window to the right"),
        (square(512), &left, general, "only to the left"),
        (Shape { new_len: 600, ..square(512) }, &causal, general, "row 0 at position 0"),
        (
            Shape { new_len: 600, past: Some(7), ..square(512) },
            &causal,
            general,
            "row 0 at position 7",
        ),
        (
            Shape { new_len: 600, nonpad: true, ..square(512) },
            &causal,
            general,
            "the last row at each sequence's end",
        ),
        (square(512), &scores(3), general, "output_qk"),
        (square(512), &scores(0), Family::Unfused, "output_qk"),
        (square(512), &scores(1), Family::Unfused, "output_qk"),
        (square(512), &scores(2), Family::Unfused, "output_qk"),
    ] {
        let (family, hopper) = reaches(shape, op);
        assert_eq!(family, want, "{reason}");
        assert!(hopper.contains(reason), "{hopper:?} does not say {reason:?}");
    }
}

#[test]
fn no_launch_more_than_needed() {
    let causal = Attention::new().is_causal(1);
    let kernels = |shape: Shape, op| names(&planned(&shape.problem(op)));
    assert_eq!(kernels(square(16), &causal).len(), 1, "K and V are read where they are");
    let past = Shape { past: Some(64), ..square(16) };
    assert_eq!(kernels(past, &causal)[0], "concat_new_to_past_kv");
    assert_eq!(kernels(past, &causal).len(), 2);
    let odd = Shape { v_head_size: 10, ..past };
    assert_eq!(kernels(odd, &causal), ["concat_rows", "concat_rows", "general"]);
    let scores = Attention::new().qk_matmul_output(true);
    let unfused = ["unfused_scores", "unfused_softmax", "unfused_values"];
    assert_eq!(kernels(square(16), &scores), unfused);
}

#[test]
fn the_workspace_of_unfused_attention_is_its_scores() {
    let scores = Attention::new().qk_matmul_output(true);
    let plan = planned(&Shape { new_len: 48, ..square(16) }.problem(&scores));
    assert_eq!(plan.workspace_bytes(), 2 * 8 * 16 * 48 * 4);
    assert_eq!(planned(&square(512).problem(&Attention::new())).workspace_bytes(), 0);
}

#[test]
fn the_explanation_names_the_operator() {
    let shape = Shape { new_len: 600, mask: Some((DType::Bool, 600)), ..square(512) };
    let text = planned(&shape.problem(&Attention::new().is_causal(1))).explain().to_string();
    for want in [
        "Attention float16: batch 2, 8 query heads over 2 KV heads, head size 64",
        "external cache of 600 rows",
        "mask of 1x1x512x600",
        "row 0 at position 0",
        "hopper_masked          refused: does not take row 0 at position 0",
        "general                chosen: gqa_general_f16",
        "unfused                refused: not needed",
    ] {
        assert!(text.contains(want), "no {want:?} in\n{text}");
    }
}

#[test]
fn float64_needs_the_cpu() {
    let problem = Shape { dtype: DType::F64, ..square(16) }.problem(&Attention::new());
    let error =
        plan(&problem, &DeviceInfo::h200(), &PlanOptions::default()).unwrap_err().to_string();
    assert!(error.contains("unfused does not take float64"), "{error}");
}

#[test]
fn a_call_without_work_has_no_launches() {
    let launches = |shape: Shape, op: Attention| {
        let problem = shape.problem(&op);
        let plan = planned(&problem);
        assert_eq!(plan.launches().is_empty(), problem.is_empty());
        names(&plan)
    };
    let none = |q_len, new_len, past| Shape { new_len, past, ..square(q_len) };
    assert_eq!(launches(none(0, 512, None), Attention::new()), [""; 0]);
    assert_eq!(launches(none(0, 0, Some(0)), Attention::new()), [""; 0]);
    assert_eq!(launches(none(0, 0, None), Attention::new().present(true)), [""; 0]);
    // Present takes the given rows, and the call ends there.
    assert_eq!(launches(none(0, 512, Some(9)), Attention::new()), ["concat_new_to_past_kv"]);
    let present = Attention::new().present(true);
    assert_eq!(launches(none(0, 512, None), present), ["concat_new_to_past_kv"]);
    // Rows without keys become zeros, by a kernel that has no tiles of keys.
    assert_eq!(launches(none(512, 0, None), Attention::new().is_causal(1)), ["general"]);
    let all_in_all = Attention::new().qk_matmul_output(true);
    let unfused = ["unfused_scores", "unfused_softmax", "unfused_values"];
    assert_eq!(launches(none(512, 0, None), all_in_all), unfused);
}

#[test]
fn present_without_a_past_is_written_first() {
    let present = Attention::new().present(true).is_causal(1);
    let plan = planned(&square(512).problem(&present));
    assert_eq!(names(&plan), ["concat_new_to_past_kv", "hopper"]);
    let plan = planned(&Shape { v_head_size: 40, ..square(512) }.problem(&present));
    assert_eq!(names(&plan), ["concat_rows", "concat_rows", "hopper"]);
}
