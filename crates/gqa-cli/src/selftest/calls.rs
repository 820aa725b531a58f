//! The calls of the self-test: few of each kind that kernels tell apart, and small.

use crate::shape::{Codes, Element, Layer, Rotation, ScalesPer, Shape};

/// All of them.
pub fn calls() -> Vec<Shape> {
    let steps = [(1, 1, 1023), (16, 1, 511), (1, 1, 8191), (2, 8, 1000), (1, 24, 2000)];
    let prompts = [(1, 1024, 0), (4, 128, 0), (1, 256, 1792)];
    let of = |layer: Layer, sizes: &[(usize, usize, usize)]| {
        let shape = |&(batch, rows, past)| Shape::new(layer, batch, rows, past);
        sizes.iter().map(shape).collect::<Vec<_>>()
    };
    let (step, prompt) = ((1, 1, 1023), (1, 512, 0));
    let mut calls = of(llama(), &[steps.as_slice(), &prompts].concat());
    let both = elements().into_iter().chain(head_sizes()).chain(scores()).chain(tensors());
    calls.extend(both.flat_map(|layer| of(layer, &[step, prompt])));
    calls.extend(quantized().flat_map(|layer| of(layer, &[step, (1, 256, 768)])));
    calls.extend(paged().flat_map(|layer| of(layer, &[(8, 1, 700), (2, 300, 0), (3, 64, 333)])));
    calls.extend(of(Layer { tree_mask: true, ..llama() }, &[(1, 16, 500)]));
    let products = Layer { float8_products: true, ..over(Codes::Float8) };
    calls.extend(of(products, &[(1, 512, 7680)]));
    let rolling = Layer { window: 256, sliding_cache: Some(300), ..llama() };
    calls.extend(of(rolling, &[(2, 1, 1000), (1, 200, 0)]));
    calls
}

fn llama() -> Layer {
    Layer::llama3_8b(Element::Bf16)
}

fn elements() -> Vec<Layer> {
    [Element::F16, Element::F32].map(Layer::llama3_8b).to_vec()
}

fn head_sizes() -> impl Iterator<Item = Layer> {
    const SIZES: [u64; 9] = [40, 64, 80, 96, 160, 192, 224, 256, 512];
    SIZES.into_iter().map(|head_size| {
        let rotates = head_size.is_multiple_of(16);
        let rotary = if rotates { Rotation::Half } else { Rotation::None };
        Layer { heads: 16, kv_heads: 4, head_size, rotary, ..llama() }
    })
}

/// What scores may be besides.
fn scores() -> Vec<Layer> {
    vec![
        Layer { window: 200, ..llama() },
        Layer { softcap: 30.0, ..llama() },
        Layer { smooth_softmax: true, ..llama() },
        Layer { bidirectional: true, ..llama() },
        Layer { qk_norm: true, ..llama() },
        Layer { rotary: Rotation::Interleaved, ..llama() },
        Layer { heads: 32, kv_heads: 1, ..llama() },
        Layer { heads: 64, kv_heads: 2, ..llama() },
    ]
}

/// What tensors may be besides.
fn tensors() -> Vec<Layer> {
    vec![
        Layer { packed: true, ..llama() },
        Layer { cached: true, rotary: Rotation::None, ..llama() },
        Layer { float32_output: true, ..llama() },
        Layer { float8_output: true, ..llama() },
    ]
}

fn quantized() -> impl Iterator<Item = Layer> {
    const SCALES: [Option<ScalesPer>; 3] = [None, Some(ScalesPer::Channel), Some(ScalesPer::Token)];
    let formats = [Codes::Int8, Codes::Int4, Codes::Float8, Codes::Float4];
    let of_format = |codes| SCALES.map(|scales| Layer { scales, ..over(codes) });
    formats.into_iter().flat_map(of_format)
}

fn over(codes: Codes) -> Layer {
    Layer { kv_cache: Some(codes), ..llama() }
}

fn paged() -> impl Iterator<Item = Layer> {
    let blocks = |layer| Layer { block_size: Some(64), ..layer };
    let layers = [
        Layer { block_size: Some(16), ..llama() },
        blocks(Layer { heads: 64, head_size: 64, ..llama() }),
        blocks(Layer { heads: 16, kv_heads: 4, head_size: 256, ..llama() }),
        blocks(Layer { rotary: Rotation::None, ..llama() }),
        blocks(over(Codes::Int8)),
        blocks(over(Codes::Float8)),
        blocks(over(Codes::Int4)),
    ];
    layers.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gqa_host::plan::{DeviceInfo, PlanOptions, plan};
    use std::collections::BTreeSet;

    /// The families of all kernels that the calls launch on that GPU.
    fn families(device: &str) -> BTreeSet<String> {
        let device = DeviceInfo::known(device).unwrap();
        let plans = calls().into_iter().map(|shape| {
            let problem = shape.problem().unwrap();
            plan(&problem, &device, &PlanOptions::default()).unwrap()
        });
        let family = |launch: &gqa_host::plan::Launch| format!("{:?}", launch.entry().family);
        plans.flat_map(|plan| plan.launches().iter().map(family).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn calls_take_the_families_of_each_gpu() {
        for (device, wanted) in [
            (
                "h200",
                "Decode DecodeQuantized Hopper HopperFloat8 HopperPaged HopperPagedQuantized \
                 HopperQuantized HopperWide Prologue TiledF32",
            ),
            ("a100", "Decode DecodeQuantized Prologue Tiled TiledF32 TiledPaged TiledWide"),
            ("b200", "Blackwell BlackwellPaged Decode DecodeQuantized Prologue TiledF32 TiledWide"),
            ("thor", "TiledTma"),
            ("b300", "BlackwellDecode BlackwellDecodePaged Decode Prologue"),
            ("t4", "General Prologue SplitKv Tiled"),
        ] {
            let found = families(device);
            let missing: Vec<_> = wanted.split(' ').filter(|name| !found.contains(*name)).collect();
            assert!(missing.is_empty(), "{device}: {missing:?} are not in {found:?}");
        }
    }

    #[test]
    fn every_gpu_that_is_known_plans_them() {
        DeviceInfo::known_names().for_each(|name| assert!(!families(name).is_empty()));
    }
}
