//! Plans of operator calls, through the public interface.

use crate::step::{CAPACITY, Step, int};
use gqa_host::DType;
use gqa_host::engine::{Dense, Heads, Layer};
use gqa_host::plan::{
    DeviceInfo, Family, Launch, Plan, PlanOptions, candidates, environment, plan,
};
use gqa_kernels::registry::{Entry, entries};

fn planned(step: &Step, device: &str) -> Plan {
    let device = DeviceInfo::known(device).unwrap();
    plan(&step.problem(), &device, &PlanOptions::default()).unwrap()
}

#[test]
fn lengths_on_the_device_do_not_change_the_plan() {
    let step = Step::new(DType::F16, 1, &[200, 17], CAPACITY);
    let later = Step { seqlens_k: int(&[12, 298]), ..Step::new(DType::F16, 1, &[1, 1], CAPACITY) };
    let launches = |step| format!("{:?}", planned(step, "h200").launches());
    assert_eq!(launches(&step), launches(&later));
}

#[test]
fn every_known_device_has_a_plan_within_its_means() {
    for name in DeviceInfo::known_names() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (rows, total) in [(1, CAPACITY), (30, 30), (64, CAPACITY)] {
                let plan =
                    planned(&Step::new(dtype, rows, &[total as i32, rows as i32], total), name);
                let fits = |launch: &Launch| {
                    launch.entry().runs_on(plan.device().sm)
                        && launch.entry().shared_bytes <= plan.device().shared_bytes
                };
                assert!(plan.launches().iter().all(fits), "{}", plan.explain());
            }
        }
    }
}

/// Elements of a key that a KV head's row tiles read together: what a row of the registry that is
/// for a head size of its own is to lower.
fn read_by_tiles(entry: &Entry, packed_rows: usize) -> usize {
    packed_rows.div_ceil(entry.rows as usize) * entry.head_size as usize
}

/// docs/adding-a-kernel.md: a row for one more head size is a matter of speed.
#[test]
fn a_head_size_with_a_row_of_its_own_keeps_the_tiles_that_its_calls_had() {
    const GROUP: usize = 4;
    let attention = |device: &DeviceInfo, dtype, size, rows| {
        let layer = Layer::new(dtype, Heads { query: 8 * GROUP, kv: 8, size });
        let problem = layer.dense(Dense::chunk(1, rows, 4096)).unwrap();
        let plan = plan(&problem, device, &PlanOptions::default()).unwrap();
        plan.decisions().iter().find_map(|decision| decision.outcome.clone().ok()).unwrap()
    };
    for name in DeviceInfo::known_names() {
        let device = DeviceInfo::known(name).unwrap();
        for dtype in [DType::F16, DType::BF16] {
            for (size, rows) in
                (1..=64).flat_map(|eighth| [1, 8, 16, 2048].map(|rows| (8 * eighth, rows)))
            {
                let chosen = attention(&device, dtype, size, rows);
                let is_rival = |other: &&Entry| {
                    other.head_size as usize >= size
                        && other.runs_on(device.sm)
                        && other.shared_bytes <= device.shared_bytes
                        && other.min_sm <= device.sm
                        && (other.family, other.role, other.dtype, other.formats, other.outputs)
                            == (
                                chosen.family,
                                chosen.role,
                                chosen.dtype,
                                chosen.formats,
                                chosen.outputs,
                            )
                };
                // Kernels of `general` have no tiles, those of `decode` rows for one head size.
                if chosen.rows == 0 || chosen.family.name().starts_with("decode") {
                    continue;
                }
                let read = |entry| read_by_tiles(entry, GROUP * rows);
                let best = entries().filter(is_rival).min_by_key(|other| read(other)).unwrap();
                assert!(
                    2 * read(chosen) <= 3 * read(best),
                    "{name}: {rows} rows of heads of {size}: {chosen:?} for {best:?}"
                );
            }
        }
    }
}

#[test]
fn the_explanation_is_for_people() {
    let text = planned(&Step::new(DType::F32, 4, &[90, 40], 90), "a100").explain().to_string();
    let expected = "\
GroupQueryAttention float32: batch 2, 8 query heads over 2 KV heads, head size 64
subsequent prompt: 4 query rows, 4 new keys, 90 keys in all; shared cache of 300 rows
half-split rotary embedding of 64 elements
on a100: compute capability 8.0, 108 SMs, 166912 bytes of shared memory per block, 2039 GB/s
positions: implicit, past + row

attention
  blackwell_decode       refused: does not take float32
  decode_quantized       refused: the KV cache is not quantized
  decode                 refused: does not take float32
  split_kv               refused: does not take float32
  split_kv_masked        refused: there is no attention_bias
  hopper_float8          refused: the KV cache is not quantized
  hopper_quantized       refused: the KV cache is not quantized
  hopper_paged           refused: does not take float32
  hopper                 refused: does not take float32
  hopper_masked          refused: there is no attention_bias
  hopper_wide            refused: has no tile for head size 64
  blackwell              refused: does not take float32
  tiled_tma              refused: needs TMA, which compute capability 8.0 lacks
  tiled                  refused: does not take float32
  tiled_masked           refused: there is no attention_bias
  tiled_f32              chosen: gqa_tiled_f32_d64
";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains("gqa_unpack_qkv_with_rope_and_append_kv_f32: "), "{text}");
    assert!(
        text.contains("q=query k=key v=value cos=cos_cache sin=sin_cache position_ids=null"),
        "{text}"
    );
}

#[test]
fn decisions_are_data() {
    let plan = planned(&Step::new(DType::F16, 1, &[CAPACITY as i32], CAPACITY), "h200");
    let chosen: Vec<_> =
        plan.decisions().iter().filter(|decision| decision.outcome.is_ok()).collect();
    assert_eq!(chosen.len(), 1);
    assert_eq!(chosen[0].family, Family::Decode);
    assert_eq!(plan.decisions().len(), candidates().count());
}

#[test]
fn the_documentation_of_the_options_names_each() {
    let text = environment::markdown();
    for variable in &environment::TABLE {
        assert!(text.contains(&format!("| `{}` |", variable.name())), "{text}");
    }
    assert_eq!(text.lines().count(), environment::TABLE.len() + environment::AIDS.len() + 2);
}
