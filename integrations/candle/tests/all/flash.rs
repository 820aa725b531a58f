//! candle-flash-attn's functions against their definition, computed in float64.

use crate::definition::{Definition, noise};
use crate::devices::on_each;
use crate::refusal::refusal;
use candle::{D, DType, Device, IndexOp, Result, Tensor};
use gqa_candle::flash::*;

const SCALE: f32 = 0.3;

/// Errs unless both are alike.
fn check(got: &Tensor, want: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!(got.dims(), want.dims());
    let got = got.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let apart = (got - want.to_device(&Device::Cpu)?)?.abs()?.flatten_all()?.max(0)?;
    let apart = apart.to_scalar::<f32>()?;
    assert!(apart < tolerance, "{apart}");
    Ok(())
}

/// Query, key and value of (2, rows, 6, 16), (2, keys, 2, 16).
fn tensors(rows: usize, keys: usize, device: &Device) -> Result<[Tensor; 3]> {
    let kv = (2, keys, 2, 16);
    Ok([noise((2, rows, 6, 16), 1, device)?, noise(kv, 2, device)?, noise(kv, 3, device)?])
}

/// Shapes: a square, a chunk over a past, a decode step, and more rows than keys.
const SHAPES: [[usize; 2]; 4] = [[33, 33], [7, 50], [1, 300], [9, 4]];

#[test]
fn causal_or_not() -> Result<()> {
    on_each(|device| {
        for ([rows, keys], causal) in SHAPES.into_iter().flat_map(|s| [(s, true), (s, false)]) {
            let [q, k, v] = tensors(rows, keys, device)?;
            let want = Definition::new(SCALE, [None, causal.then_some(0)]).batch(&q, &k, &v)?;
            check(&flash_attn(&q, &k, &v, SCALE, causal)?, &want, 1e-5)?;
            for (dtype, tolerance) in [(DType::F16, 3e-3), (DType::BF16, 3e-2)] {
                let cast = |tensor: &Tensor| tensor.to_dtype(dtype);
                let got = flash_attn(&cast(&q)?, &cast(&k)?, &cast(&v)?, SCALE, causal)?;
                assert_eq!(got.dtype(), dtype);
                check(&got, &want, tolerance)?;
            }
        }
        Ok(())
    })
}

#[test]
fn windows_softcap_and_alibi() -> Result<()> {
    on_each(|device| {
        let slopes = vec![0.5, 0.25, 0.125, 0.0625, 0.03, 0.01];
        let alibi = Tensor::new(&slopes[..], device)?;
        let windows = [
            [None, None],
            [Some(3), Some(0)],
            [Some(2), Some(5)],
            [None, Some(4)],
            [Some(0), None],
        ];
        for ([rows, keys], window) in SHAPES.into_iter().flat_map(|s| windows.map(|w| (s, w))) {
            let [q, k, v] = tensors(rows, keys, device)?;
            let [left, right] = window;
            let plain = Definition::new(SCALE, window);
            let got = flash_attn_windowed(&q, &k, &v, SCALE, left, right)?;
            check(&got, &plain.batch(&q, &k, &v)?, 1e-5)?;
            let with_slopes = Definition { slopes: Some(slopes.clone()), ..plain };
            let got = flash_attn_alibi_windowed(&q, &k, &v, &alibi, SCALE, left, right)?;
            check(&got, &with_slopes.batch(&q, &k, &v)?, 1e-5)?;
            let got = flash_attn_alibi_windowed_softcap(
                &q,
                &k,
                &v,
                Some(&alibi),
                SCALE,
                left,
                right,
                0.7,
            )?;
            check(
                &got,
                &Definition { softcap: 0.7, ..with_slopes.clone() }.batch(&q, &k, &v)?,
                1e-5,
            )?;
            if left.is_none() && right.is_none() {
                let got = flash_attn_alibi(&q, &k, &v, &alibi, SCALE, false)?;
                check(&got, &with_slopes.batch(&q, &k, &v)?, 1e-5)?;
            }
        }
        Ok(())
    })
}

/// Counted from their own places, the first rows are so far from all keys that float16 and bfloat16
/// have one number for every distance.
#[test]
fn alibi_of_rows_far_before_all_keys() -> Result<()> {
    on_each(|device| {
        let slopes = vec![0.5, 0.25, 0.125, 0.0625, 0.03, 0.01];
        let alibi = Tensor::new(&slopes[..], device)?;
        let [q, k, v] = tensors(3000, 8, device)?;
        let plain = Definition::new(SCALE, [None; 2]);
        let want = Definition { slopes: Some(slopes), ..plain }.batch(&q, &k, &v)?;
        let starts = [&[0u32, 3000], &[0, 8]].map(|starts| Tensor::new(starts, device));
        let [sq, sk] = starts;
        let (sq, sk) = (sq?, sk?);
        for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F16, 3e-3), (DType::BF16, 3e-2)] {
            let [q, k, v] = [&q, &k, &v].map(|tensor| tensor.to_dtype(dtype));
            let (q, k, v) = (q?, k?, v?);
            check(&flash_attn_alibi(&q, &k, &v, &alibi, SCALE, false)?, &want, tolerance)?;
            let (q, k, v) = (q.i(0)?, k.i(0)?, v.i(0)?);
            let got = flash_attn_varlen_alibi(&q, &k, &v, &alibi, &sq, &sk, 3000, 8, SCALE, false)?;
            check(&got, &want.i(0)?, tolerance)?;
        }
        Ok(())
    })
}

/// Rows, heads and batch entries of views, and heads with elements between them.
#[test]
fn views_are_read_where_they_are() -> Result<()> {
    on_each(|device| {
        let [q, k, v] = tensors(7, 50, device)?;
        let want = flash_attn(&q, &k, &v, SCALE, true)?;
        let transposed = |t: &Tensor| t.transpose(1, 2)?.contiguous()?.transpose(1, 2);
        let got = flash_attn(&transposed(&q)?, &transposed(&k)?, &transposed(&v)?, SCALE, true)?;
        check(&got, &want, 1e-6)?;
        // As a fused projection leaves them, and a row further on.
        let packed = Tensor::cat(&[q.narrow(1, 0, 7)?, k.narrow(1, 0, 7)?, v.narrow(1, 0, 7)?], 2)?;
        let packed = Tensor::cat(&[packed.narrow(1, 0, 1)?, packed.clone()], 1)?.narrow(1, 1, 7)?;
        let part = |first, heads| packed.narrow(2, first, heads);
        let want = flash_attn(&q, &k.narrow(1, 0, 7)?, &v.narrow(1, 0, 7)?, SCALE, true)?;
        check(&flash_attn(&part(0, 6)?, &part(6, 2)?, &part(8, 2)?, SCALE, true)?, &want, 1e-6)?;
        // Elements that do not lie side by side are copied.
        let odd = |t: &Tensor| t.transpose(1, D::Minus1)?.contiguous()?.transpose(1, D::Minus1);
        let (k, v) = (k.narrow(1, 0, 7)?, v.narrow(1, 0, 7)?);
        check(&flash_attn(&odd(&q)?, &odd(&k)?, &odd(&v)?, SCALE, true)?, &want, 1e-6)
    })
}

#[test]
fn head_sizes_of_any_number() -> Result<()> {
    on_each(|device| {
        for size in [1, 5, 24, 33, 130] {
            let [q, k, v] = [
                noise((1, 4, 3, size), 1, device)?,
                noise((1, 9, 1, size), 2, device)?,
                noise((1, 9, 1, size), 3, device)?,
            ];
            let want = Definition::new(SCALE, [None, Some(0)]).batch(&q, &k, &v)?;
            check(&flash_attn(&q, &k, &v, SCALE, true)?, &want, 1e-5)?;
        }
        Ok(())
    })
}

/// Rows and keys of four sequences; one of them has no rows, and one none of either.
const ROWS: [u32; 5] = [0, 5, 5, 12, 12];
const KEYS: [u32; 5] = [0, 9, 19, 26, 26];

#[test]
fn sequences_of_any_lengths() -> Result<()> {
    on_each(|device| {
        let [q, k, v] = [
            noise((12, 6, 16), 1, device)?,
            noise((26, 2, 16), 2, device)?,
            noise((26, 2, 16), 3, device)?,
        ];
        let starts = [Tensor::new(&ROWS, device)?, Tensor::new(&KEYS, device)?];
        let slopes = vec![0.5, 0.25, 0.125, 0.0625, 0.03, 0.01];
        let alibi = Tensor::new(&slopes[..], device)?;
        let ([sq, sk], [mq, mk]) = (&starts, [7, 10]);
        let definition = |window| Definition::new(SCALE, window);
        let want = |d: Definition| d.sequences([&q, &k, &v], &ROWS, &KEYS);
        let strided = |t: &Tensor| t.transpose(0, 1)?.contiguous()?.transpose(0, 1);

        for causal in [true, false] {
            let window = [None, causal.then_some(0)];
            let got = flash_attn_varlen(&q, &k, &v, sq, sk, mq, mk, SCALE, causal)?;
            check(&got, &want(definition(window))?, 1e-5)?;
            let (q, k, v) = (strided(&q)?, strided(&k)?, strided(&v)?);
            let got = flash_attn_varlen(&q, &k, &v, sq, sk, mq, mk, SCALE, causal)?;
            check(&got, &want(definition(window))?, 1e-5)?;
            let got = flash_attn_varlen_alibi(&q, &k, &v, &alibi, sq, sk, mq, mk, SCALE, causal)?;
            let with_slopes = Definition { slopes: Some(slopes.clone()), ..definition(window) };
            check(&got, &want(with_slopes)?, 1e-5)?;
        }
        let window = [Some(3), Some(1)];
        let got = flash_attn_varlen_windowed(&q, &k, &v, sq, sk, mq, mk, SCALE, Some(3), Some(1))?;
        check(&got, &want(definition(window))?, 1e-5)?;
        let with_slopes = Definition { slopes: Some(slopes), ..definition(window) };
        let got = flash_attn_varlen_alibi_windowed(
            &q,
            &k,
            &v,
            &alibi,
            sq,
            sk,
            mq,
            mk,
            SCALE,
            Some(3),
            Some(1),
        )?;
        check(&got, &want(with_slopes.clone())?, 1e-5)?;
        let got = flash_attn_varlen_alibi_windowed_softcap(
            &q,
            &k,
            &v,
            Some(&alibi),
            sq,
            sk,
            mq,
            mk,
            SCALE,
            Some(3),
            Some(1),
            0.7,
        )?;
        check(&got, &want(Definition { softcap: 0.7, ..with_slopes })?, 1e-5)
    })
}

/// Blocks of 8 rows: 10 there are, 5 of them are used.
#[test]
fn a_paged_cache() -> Result<()> {
    on_each(|device| {
        let [q, k, v] = [
            noise((12, 6, 16), 1, device)?,
            noise((26, 2, 16), 2, device)?,
            noise((26, 2, 16), 3, device)?,
        ];
        let [sq, sk] = [Tensor::new(&ROWS, device)?, Tensor::new(&KEYS, device)?];
        let table = Tensor::new(&[[7u32, 2], [4, 9], [0, 99], [99, 99]], device)?;
        let places: Vec<u32> = [[0, 9], [9, 19], [19, 26]]
            .iter()
            .zip([[7, 2], [4, 9], [0, 99]])
            .flat_map(|([from, to], blocks)| {
                (0..to - from).map(move |row| blocks[row / 8] * 8 + row as u32 % 8)
            })
            .collect();
        let places = Tensor::new(&places[..], device)?;
        let blocks = |rows: &Tensor| {
            let filled = Tensor::full(f32::NAN, (80, 2, 16), device)?;
            let places = places.reshape((26, 1, 1))?.broadcast_as((26, 2, 16))?.contiguous()?;
            filled.scatter(&places, rows, 0)?.reshape((10, 8, 2, 16))
        };
        let (kb, vb) = (blocks(&k)?, blocks(&v)?);
        let call = |left, right, ranges: Option<&Tensor>, softcap| {
            flash_attn_varlen_paged_windowed(
                &q, &kb, &vb, &sq, &sk, &table, ranges, 7, 10, SCALE, left, right, 8, softcap,
            )
        };
        let windows = [
            [None, None],
            [None, Some(0)],
            [Some(3), Some(0)],
            [Some(2), None],
            [Some(2), Some(3)],
        ];
        for (window, softcap) in windows.into_iter().flat_map(|w| [(w, None), (w, Some(0.7))]) {
            let definition = Definition {
                softcap: softcap.unwrap_or_default(),
                ..Definition::new(SCALE, window)
            };
            let want = definition.sequences([&q, &k, &v], &ROWS, &KEYS)?;
            check(&call(window[0], window[1], None, softcap)?, &want, 1e-5)?;
        }
        let ranges = vec![
            vec![[5, 9], [0, 0]],
            vec![[0, 0], [0, 0]],
            vec![[1, 4], [2, 6]],
            vec![[0, 0], [0, 0]],
        ];
        let tensor =
            Tensor::new(ranges.iter().flatten().flatten().copied().collect::<Vec<i32>>(), device)?;
        let definition =
            Definition { ranges: Some(ranges), ..Definition::new(SCALE, [Some(3), Some(0)]) };
        let want = definition.sequences([&q, &k, &v], &ROWS, &KEYS)?;
        check(&call(Some(3), Some(0), Some(&tensor.reshape((4, 2, 2))?), None)?, &want, 1e-5)
    })
}

#[test]
fn nothing_to_attend_to_is_zero_and_no_rows_are_none() -> Result<()> {
    on_each(|device| {
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
        let [q, k, v] = tensors(3, 5, device)?;
        let none = |t: &Tensor| t.narrow(1, 0, 0)?.contiguous();
        check(
            &flash_attn(&q, &none(&k)?, &none(&v)?, SCALE, true)?,
            &zeros(&[2, 3, 6, 16])?,
            1e-9,
        )?;
        assert_eq!(flash_attn(&none(&q)?, &k, &v, SCALE, true)?.dims(), [2, 0, 6, 16]);

        let starts = |starts: &[u32]| Tensor::new(starts, device);
        let (q, k, v) = (q.flatten(0, 1)?, k.i(0)?, v.i(0)?);
        let varlen = |q: &Tensor, rows: &[u32], keys: &[u32]| {
            flash_attn_varlen(q, &k, &v, &starts(rows)?, &starts(keys)?, 6, 6, SCALE, false)
        };
        // The second sequence has no keys.
        let got = varlen(&q, &[0, 4, 6], &[0, 5, 5])?;
        check(&got.narrow(0, 4, 2)?, &zeros(&[2, 6, 16])?, 1e-9)?;
        let none = q.narrow(0, 0, 0)?.contiguous()?;
        assert_eq!(varlen(&none, &[0, 0], &[0, 5])?.dims(), [0, 6, 16]);
        let paged = flash_attn_varlen_paged_windowed(
            &none,
            &k.unsqueeze(0)?,
            &v.unsqueeze(0)?,
            &starts(&[0, 0])?,
            &starts(&[0, 5])?,
            &Tensor::new(&[[0u32]], device)?,
            None,
            0,
            5,
            SCALE,
            None,
            Some(0),
            5,
            None,
        )?;
        assert_eq!(paged.dims(), [0, 6, 16]);
        Ok(())
    })
}

#[test]
fn bad_input_is_refused_by_name() -> Result<()> {
    on_each(|device| {
        let [q, k, v] = tensors(4, 9, device)?;
        let half = k.to_dtype(DType::F16)?;
        assert_eq!(refusal(flash_attn(&q, &half, &v, 1., true)), "k: got F16; allowed: F32");
        let text = refusal(flash_attn(&q, &k, &v.narrow(1, 0, 8)?, 1., true));
        assert_eq!(
            text,
            "v: got [2, 8, 2, 16]; allowed: (batch = 2, keys, KV heads, size = 16), as q and each other"
        );
        let text = refusal(flash_attn(&q, &k.narrow(3, 0, 8)?, &v, 1., true));
        assert!(text.starts_with("k: got [2, 9, 2, 8]"), "{text}");
        let text = refusal(flash_attn(&q.narrow(2, 0, 5)?, &k, &v, 1., true));
        assert!(
            text.contains("5 heads") && text.contains("a multiple of the 2 KV heads"),
            "{text}"
        );
        let text = refusal(flash_attn(&q.i(0)?, &k, &v, 1., true));
        assert!(text.starts_with("q, k: got"), "{text}");
        let text = refusal(flash_attn(&q, &k, &v, f32::NAN, true));
        assert!(text.starts_with("scale: got NaN"), "{text}");
        let ints = q.to_dtype(DType::U32)?;
        let text = refusal(flash_attn(&ints, &ints, &ints, 1., true));
        assert!(text.contains("F32, F16 or BF16"), "{text}");
        let alibi = Tensor::zeros(5, DType::F32, device)?;
        let text = refusal(flash_attn_alibi(&q, &k, &v, &alibi, 1., true));
        assert_eq!(text, "alibi_slopes: got 5 slopes; allowed: 6, the heads of q");

        let [q, k, v] = [q.i(0)?, k.i(0)?, v.i(0)?];
        let varlen = |starts: [&[u32]; 2], most: [usize; 2]| -> Result<Tensor> {
            let starts = starts.map(|starts| Tensor::new(starts, device));
            let [sq, sk] = starts;
            flash_attn_varlen(&q, &k, &v, &sq?, &sk?, most[0], most[1], 1., true)
        };
        let text = refusal(varlen([&[0, 4], &[0, 9]], [3, 9]));
        assert_eq!(text, "max_seqlen_q: got 3; allowed: 4 or more, by seqlens_q");
        let text = refusal(varlen([&[0, 5], &[0, 9]], [5, 9]));
        assert_eq!(text, "seqlens_q: got 5 at its end; allowed: up to 4, the rows that there are");
        let text = refusal(varlen([&[0, 4], &[0, 10]], [4, 10]));
        assert_eq!(text, "seqlens_k: got 10 at its end; allowed: up to 9, the rows that there are");
        let text = refusal(varlen([&[0, 4], &[0, 9, 9]], [4, 9]));
        assert_eq!(text, "seqlens_k: got 3 numbers; allowed: 2, as seqlens_q has");
        let text = refusal(varlen([&[0, 5, 4], &[0, 9, 9]], [5, 9]));
        assert!(text.starts_with("seqlens_q: got"), "{text}");
        Ok(())
    })
}
