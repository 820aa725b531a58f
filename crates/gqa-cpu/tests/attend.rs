//! Every mapping of rows or elements to lanes gives the scalar result. Not a unit test, which would
//! compile all loops again.

mod made_up;

use gqa_cpu::{Instructions, Rows, attend};
use made_up::MadeUp;

/// The error that rounding P to bfloat16 adds to sums.
const ROUNDING: f64 = 1.0 / 128.0;

/// Compares rows with all instruction sets of this processor.
#[track_caller]
fn check(rows: &MadeUp) {
    for instructions in Instructions::all() {
        let pairs = rows.stored && rows.count > 8 && instructions.name() == "amx";
        let rounding = if pairs { ROUNDING } else { 0.0 };
        let mut got = Vec::new();
        attend(instructions, rows, 0..Rows::keys(rows), &mut |row, softmax, output| {
            assert_eq!(row, got.len(), "rows come in their order");
            got.push((softmax, output.to_vec()));
        });
        rows.check(&got, rounding, instructions.name());
    }
}

#[test]
fn what_is_compared() {
    let names: Vec<_> = Instructions::all().iter().map(Instructions::name).collect();
    println!("instructions that are compared: {}", names.join(", "));
    if !names.contains(&"amx") {
        println!("not compared, as this processor has none: amx");
    }
}

#[test]
fn lanes_of_rows_and_lanes_of_elements_agree() {
    for (count, stored) in (1..=9).chain([16, 17, 40]).flat_map(|n| [(n, false), (n, true)]) {
        for has_bias in [false, true] {
            let softcap = if count % 2 == 0 { 3.0 } else { 0.0 };
            let rows = MadeUp::new(count, 300, [48, 96]);
            check(&MadeUp { softcap, has_bias, stored, ..rows });
        }
    }
}

#[test]
fn tiles_of_any_number_of_keys_agree() {
    for (keys, stored) in [70, 97, 128, 129].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        check(&MadeUp { stored, ..MadeUp::new(37, keys, [128, 64]) });
    }
}

#[test]
fn scales_may_be_negative_or_zero() {
    for (count, stored) in [3, 12, 40].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        for scale in [-0.5, 0.0] {
            check(&MadeUp { scale, stored, ..MadeUp::new(count, 300, [32, 80]) });
        }
    }
}

#[test]
fn rows_take_nothing_from_values_that_they_do_not_see() {
    for (count, stored) in [3, 12, 40].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        for key in [4, 130, 297] {
            check(&MadeUp { stored, ..MadeUp::new(count, 300, [32, 80]).poisoned(key) });
        }
    }
}

#[test]
fn keys_and_values_may_have_no_numbers() {
    for (count, stored) in [1, 12, 40].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        for sizes in [[16, 0], [0, 16], [0, 0]] {
            check(&MadeUp { stored, ..MadeUp::new(count, 100, sizes) });
        }
    }
}

/// On a processor with AMX, tiles released by an inner call are configured again.
#[test]
fn rows_may_ask_for_attention_themselves() {
    fn meanwhile() {
        check(&MadeUp { stored: true, ..MadeUp::new(10, 40, [32, 32]) });
    }
    for stored in [false, true] {
        let rows = MadeUp { stored, has_bias: true, ..MadeUp::new(40, 300, [32, 64]) };
        check(&MadeUp { meanwhile, ..rows });
    }
}
