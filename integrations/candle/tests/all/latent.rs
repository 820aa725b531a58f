//! Latent KV caches against attention to all rows that were appended, and candle-transformers'
//! DeepSeek V2 with its own attention and with one over these caches.

use crate::definition::{Definition, noise};
use crate::devices::on_each;
use crate::refusal::refusal;
use candle::{D, DType, Device, IndexOp, Module, Result, Shape, Tensor};
use candle_nn::rotary_emb::rope_i;
use candle_nn::var_builder::{SimpleBackend, VarBuilder};
use candle_nn::{Embedding, Init, Linear, RmsNorm};
use candle_transformers::models::deepseek2::{DeepSeekV2, DeepSeekV2Config};
use gqa_candle::{LatentAttention, LatentKvCache, QuantFormat, Rope, Sequence};

const HEADS: usize = 4;
const SIZE: usize = 48;
const VALUES: usize = 32;
const ROTATED: usize = 16;
const SCALE: f32 = 0.17;

fn rope(positions: usize, dtype: DType, device: &Device) -> Result<Rope> {
    Ok(Rope::of_frequency(10_000., ROTATED, positions, dtype, device)?.interleaved())
}

fn attention(dtype: DType, device: &Device) -> Result<LatentAttention> {
    let attention = LatentAttention::new(HEADS, SIZE, VALUES, SCALE);
    Ok(attention.rope(rope(64, dtype, device)?, VALUES))
}

/// The last elements of (tokens, heads, size) rotated, from position 0 on.
fn rotated(x: &Tensor) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    let angle = |i: usize| {
        let frequency = 10_000f32.powf(-2. * (i % (ROTATED / 2)) as f32 / ROTATED as f32);
        (i / (ROTATED / 2)) as f32 * frequency
    };
    let table = |f: fn(f32) -> f32| {
        let values = (0..tokens * ROTATED / 2).map(|i| f(angle(i)));
        Tensor::from_iter(values, x.device())?.reshape((tokens, ROTATED / 2))
    };
    let pe = x.narrow(2, VALUES, ROTATED)?.transpose(0, 1)?.contiguous()?.unsqueeze(0)?;
    let pe = rope_i(&pe, &table(f32::cos)?, &table(f32::sin)?)?.i(0)?.transpose(0, 1)?;
    Tensor::cat(&[&x.narrow(2, 0, VALUES)?, &pe], 2)
}

/// A sequence's query, (tokens, heads, size), and rows, (tokens, size).
fn sequence(tokens: usize, seed: u32, device: &Device) -> Result<[Tensor; 2]> {
    let query = noise((tokens, HEADS, SIZE), seed, device)?;
    Ok([query, noise((tokens, SIZE), seed + 100, device)?])
}

/// Its output, all tokens at once. Behind the values there are others, which are cut off.
fn whole([query, rows]: &[Tensor; 2], window: Option<usize>) -> Result<Tensor> {
    let (query, rows) = (rotated(query)?, rotated(&rows.unsqueeze(1)?)?);
    let attended = Definition::new(SCALE, [window.map(|keys| keys - 1), Some(0)]).batch(
        &query.unsqueeze(0)?,
        &rows.unsqueeze(0)?,
        &rows.unsqueeze(0)?,
    )?;
    attended.i(0)?.narrow(2, 0, VALUES)
}

fn apart(got: &Tensor, want: &Tensor) -> Result<f32> {
    assert_eq!(got.dims(), want.dims());
    let [got, want] =
        [got, want].map(|tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32));
    (got? - want?)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// Prompts, decode steps, and a sequence whose prompt goes on beside the others' steps.
const CALLS: [[usize; 3]; 5] = [[20, 7, 0], [1, 1, 9], [1, 1, 1], [0, 5, 1], [3, 0, 2]];

/// The outputs of those calls beside what all tokens of a sequence at once give; the largest
/// difference.
fn compare(
    cache: &mut LatentKvCache,
    all: &[[Tensor; 2]; 3],
    want: &[Tensor; 3],
    dtype: DType,
) -> Result<f32> {
    let sequences = [cache.begin(), cache.begin(), cache.begin()];
    let (mut lengths, mut most) = ([0; 3], 0f32);
    for tokens in CALLS {
        let parts = |of: &dyn Fn(usize) -> Tensor| {
            let parts = (0..3).map(|b| of(b).narrow(0, lengths[b], tokens[b]));
            Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)
        };
        let (query, rows) = (parts(&|b| all[b][0].clone())?, parts(&|b| all[b][1].clone())?);
        let batch: Vec<_> = sequences.into_iter().zip(tokens).collect();
        let got = cache.attend(&query.to_dtype(dtype)?, &rows.to_dtype(dtype)?, &batch)?;
        assert_eq!(got.dtype(), dtype);
        most = most.max(apart(&got, &parts(&|b| want[b].clone())?)?);
        (0..3).for_each(|b| lengths[b] += tokens[b]);
        assert_eq!(sequences.map(|sequence| cache.length(sequence).unwrap()), lengths);
    }
    Ok(most)
}

fn sequences(device: &Device) -> Result<[[Tensor; 2]; 3]> {
    Ok([sequence(25, 1, device)?, sequence(14, 2, device)?, sequence(13, 3, device)?])
}

#[test]
fn calls_of_any_lengths_are_the_whole() -> Result<()> {
    on_each(|device| {
        let all = sequences(device)?;
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F16, 5e-3), (DType::BF16, 4e-2)] {
            for (window, block_size) in [(None, 8), (None, 16), (Some(5), 16)] {
                let of = |sequence: &[Tensor; 2]| whole(sequence, window);
                let want = [of(&all[0])?, of(&all[1])?, of(&all[2])?];
                let attention = attention(dtype, device)?;
                let attention = window.map_or(attention.clone(), |keys| attention.window(keys));
                let mut cache = LatentKvCache::new(&attention, 12, block_size, dtype, device)?;
                let apart = compare(&mut cache, &all, &want, dtype)?;
                assert!(apart < tolerance, "{dtype:?}, window {window:?}: {apart}");
            }
        }
        Ok(())
    })
}

#[test]
fn rows_may_be_quantized() -> Result<()> {
    on_each(|device| {
        let all = sequences(device)?;
        let want = [whole(&all[0], None)?, whole(&all[1], None)?, whole(&all[2], None)?];
        for (format, step) in [(QuantFormat::Int8, 1.5 / 127.), (QuantFormat::Float8, 0.1)] {
            for count in [1, SIZE] {
                let scale = Tensor::full(step as f32, count, device)?;
                let attention = attention(DType::F32, device)?.quantized(format, &scale)?;
                let mut cache = LatentKvCache::new(&attention, 12, 16, DType::F32, device)?;
                let apart = compare(&mut cache, &all, &want, DType::F32)?;
                assert!((1e-4..0.15).contains(&apart), "{format} with {count} scales: {apart}");
            }
        }
        Ok(())
    })
}

#[test]
fn blocks_of_a_sequence_that_ended_are_those_of_others() -> Result<()> {
    on_each(|device| {
        let mut cache =
            LatentKvCache::new(&attention(DType::F32, device)?, 2, 16, DType::F32, device)?;
        for seed in 0..3 {
            let all = sequence(20, seed, device)?;
            let own = cache.begin();
            let got = cache.attend(&all[0], &all[1], &[(own, 20)])?;
            assert!(apart(&got, &whole(&all, None)?)? < 2e-5);
            assert_eq!((cache.free_blocks(), cache.end(own)), (0, true));
        }
        Ok(())
    })
}

#[test]
fn bad_input_is_refused_by_name_and_changes_nothing() -> Result<()> {
    on_each(|device| {
        let new = |attention: &LatentAttention, dtype| {
            refusal(LatentKvCache::new(attention, 4, 16, dtype, device))
        };
        let text = new(&LatentAttention::new(HEADS, SIZE, SIZE + 8, SCALE), DType::F32);
        assert!(text.starts_with("value_size: got 56"), "{text}");
        let text = new(&LatentAttention::new(HEADS, 44, VALUES, SCALE), DType::F32);
        assert!(text.starts_with("head_size: got 44"), "{text}");
        let turned = |first| {
            let rope = rope(64, DType::F32, device).unwrap();
            LatentAttention::new(HEADS, SIZE, VALUES, SCALE).rope(rope, first)
        };
        for first in [4, 40] {
            let text = new(&turned(first), DType::F32);
            assert!(text.starts_with(&format!("rope.offset: got {first}")), "{text}");
        }
        let text = new(&turned(VALUES), DType::BF16);
        assert!(text.starts_with("cos: got F32"), "{text}");
        let scale = Tensor::ones(3, DType::F32, device)?;
        let text = refusal(attention(DType::F32, device)?.quantized(QuantFormat::Int8, &scale));
        assert_eq!(text, "scale: got [3]; allowed: 1 or 48 elements");

        let mut cache =
            LatentKvCache::new(&attention(DType::F32, device)?, 2, 16, DType::F32, device)?;
        let own = cache.begin();
        let [query, rows] = sequence(5, 1, device)?;
        cache.attend(&query, &rows, &[(own, 5)])?;
        let text = refusal(cache.attend(&query, &rows.narrow(1, 0, VALUES)?, &[(own, 5)]));
        assert_eq!(text, "rows: got [5, 32]; allowed: [5, 48], (tokens, head size)");
        let text = refusal(cache.attend(&query, &rows.unsqueeze(1)?, &[(own, 5)]));
        assert_eq!(text, "rows: got [5, 1, 48]; allowed: [5, 48], (tokens, head size)");
        let text = refusal(cache.attend(&query, &rows.to_dtype(DType::F16)?, &[(own, 5)]));
        assert_eq!(text, "rows: got F16; allowed: F32");
        let text = refusal(cache.attend(&query.narrow(1, 0, 2)?, &rows, &[(own, 5)]));
        assert_eq!(text, "query: got [5, 2, 48]; allowed: [5, 4, 48], (tokens, heads, size)");
        let text = refusal(cache.attend(&query, &rows, &[(own, 60)]));
        assert!(text.contains("up to 64 in all, the positions of the rotary embedding"), "{text}");
        assert_eq!((cache.length(own), cache.free_blocks()), (Some(5), 1));
        Ok(())
    })
}

/// A model's sizes. candle-transformers reads them from JSON.
struct Config {
    layers: usize,
    width: usize,
    heads: usize,
    nope: usize,
    rotated: usize,
    latent: usize,
    values: usize,
    hidden: usize,
    vocabulary: usize,
}

const CONFIG: Config = Config {
    layers: 3,
    width: 96,
    heads: HEADS,
    nope: 24,
    rotated: 16,
    latent: 48,
    values: 32,
    hidden: 160,
    vocabulary: 211,
};
const EPSILON: f64 = 1e-6;
const CONTEXT: usize = 256;

impl Config {
    fn theirs(&self) -> DeepSeekV2Config {
        serde_json::from_value(serde_json::json!({
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "moe_intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": EPSILON,
            "rope_theta": 10_000.,
            "attention_bias": false,
            "qk_rope_head_dim": self.rotated,
            "kv_lora_rank": self.latent,
            "v_head_dim": self.values,
            "qk_nope_head_dim": self.nope,
            "n_group": 1,
            "topk_group": 1,
        }))
        .expect("a configuration")
    }
}

/// Random weights of whatever names and shapes are asked for, the same ones for the same name.
struct Random;

impl SimpleBackend for Random {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let seed = name.bytes().fold(7u32, |seed, byte| seed.wrapping_mul(31) + u32::from(byte));
        let numbers = noise(shape.clone(), seed % 60_000, device)?;
        match shape.dims() {
            // Those of norms.
            [_] => (numbers * 0.2)? + 1.,
            dims => numbers * (3. / dims.last().copied().unwrap_or(1) as f64).sqrt(),
        }?
        .to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle::bail!("{name} has no shape of its own")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

fn weights(device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Random), DType::F32, device.clone())
}

/// The same model, whose layers have latent KV caches and absorbed projections.
struct Absorbed {
    embed: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
}

struct Layer {
    norms: [RmsNorm; 2],
    query: Linear,
    latent: Linear,
    latent_norm: RmsNorm,
    /// (heads, nope, latent): a query of keys becomes one of latent rows.
    keys: Tensor,
    /// (heads, latent, values): of what latent rows are summed to.
    values: Tensor,
    output: Linear,
    mlp: [Linear; 3],
    cache: LatentKvCache,
    sequence: Sequence,
}

impl Layer {
    fn new(config: &Config, weights: &VarBuilder<'_>) -> Result<Self> {
        let Config { width, heads, nope, rotated, latent, values, hidden, .. } = *config;
        let (own, device) = (weights.pp("self_attn"), weights.device());
        let linear = candle_nn::linear_no_bias;
        let expand = own.pp("kv_b_proj").get((heads * (nope + values), latent), "weight")?;
        let expand = expand.reshape((heads, nope + values, latent))?;
        let scale = 1. / ((nope + rotated) as f32).sqrt();
        let rope = Rope::of_frequency(10_000., rotated, CONTEXT, DType::F32, device)?.interleaved();
        let attention = LatentAttention::new(heads, latent + rotated, latent, scale);
        let attention = attention.rope(rope, latent);
        let mut cache =
            LatentKvCache::new(&attention, CONTEXT.div_ceil(16), 16, DType::F32, device)?;
        let norm =
            |name, size, at: &VarBuilder<'_>| candle_nn::rms_norm(size, EPSILON, at.pp(name));
        let mlp = weights.pp("mlp");
        Ok(Self {
            norms: [
                norm("input_layernorm", width, weights)?,
                norm("post_attention_layernorm", width, weights)?,
            ],
            query: linear(width, heads * (nope + rotated), own.pp("q_proj"))?,
            latent: linear(width, latent + rotated, own.pp("kv_a_proj_with_mqa"))?,
            latent_norm: norm("kv_a_layernorm", latent, &own)?,
            keys: expand.narrow(1, 0, nope)?.contiguous()?,
            values: expand.narrow(1, nope, values)?.transpose(1, 2)?.contiguous()?,
            output: linear(heads * values, width, own.pp("o_proj"))?,
            mlp: [
                linear(width, hidden, mlp.pp("gate_proj"))?,
                linear(width, hidden, mlp.pp("up_proj"))?,
                linear(hidden, width, mlp.pp("down_proj"))?,
            ],
            sequence: cache.begin(),
            cache,
        })
    }

    /// (tokens, width)
    fn attend(&mut self, config: &Config, x: &Tensor) -> Result<Tensor> {
        let Config { heads, nope, rotated, latent, .. } = *config;
        let tokens = x.dim(0)?;
        let query = self.query.forward(x)?.reshape((tokens, heads, nope + rotated))?;
        let of_keys = query.narrow(2, 0, nope)?.transpose(0, 1)?.contiguous()?;
        let of_rows = of_keys.matmul(&self.keys)?.transpose(0, 1)?;
        let query = Tensor::cat(&[&of_rows, &query.narrow(2, nope, rotated)?], 2)?;
        let rows = self.latent.forward(x)?;
        let normed = self.latent_norm.forward(&rows.narrow(1, 0, latent)?.contiguous()?)?;
        let rows = Tensor::cat(&[&normed, &rows.narrow(1, latent, rotated)?], 1)?;
        let summed = self.cache.attend(&query, &rows, &[(self.sequence, tokens)])?;
        let values = summed.transpose(0, 1)?.contiguous()?.matmul(&self.values)?;
        self.output.forward(&values.transpose(0, 1)?.contiguous()?.flatten_from(1)?)
    }

    fn forward(&mut self, config: &Config, x: &Tensor) -> Result<Tensor> {
        let normed = self.norms[0].forward(x)?;
        let x = (x + self.attend(config, &normed)?)?;
        let normed = self.norms[1].forward(&x)?;
        let [gate, up, down] = &self.mlp;
        let hidden = (gate.forward(&normed)?.silu()? * up.forward(&normed)?)?;
        &x + down.forward(&hidden)?
    }
}

impl Absorbed {
    fn new(config: &Config, weights: &VarBuilder<'_>) -> Result<Self> {
        let Config { vocabulary, width, .. } = *config;
        let model = weights.pp("model");
        let layer = |i| Layer::new(config, &model.pp("layers").pp(i));
        Ok(Self {
            embed: candle_nn::embedding(vocabulary, width, model.pp("embed_tokens"))?,
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            norm: candle_nn::rms_norm(width, EPSILON, model.pp("norm"))?,
            head: candle_nn::linear_no_bias(width, vocabulary, weights.pp("lm_head"))?,
        })
    }

    /// Logits of the last of these tokens.
    fn forward(&mut self, config: &Config, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.embed.forward(&tokens.i(0)?)?;
        for layer in &mut self.layers {
            x = layer.forward(config, &x)?;
        }
        let last = self.norm.forward(&x)?.narrow(0, x.dim(0)? - 1, 1)?;
        self.head.forward(&last)
    }
}

/// The likeliest token after these, behind `past` others; both models say the same.
fn likeliest(
    theirs: &mut DeepSeekV2,
    ours: &mut Absorbed,
    tokens: &[u32],
    past: usize,
    device: &Device,
) -> Result<u32> {
    let tokens = Tensor::new(tokens, device)?.unsqueeze(0)?;
    let want = theirs.forward(&tokens, past)?;
    let got = ours.forward(&CONFIG, &tokens)?;
    let apart = apart(&got, &want)?;
    assert!(apart < 2e-4, "{apart} after {past} tokens");
    let [got, want] = [got, want].map(|logits| logits.argmax(D::Minus1)?.i(0)?.to_scalar());
    let (got, want): (u32, u32) = (got?, want?);
    assert_eq!(got, want, "after {past} tokens");
    Ok(want)
}

/// Prompts in chunks, and greedy text behind them.
#[test]
fn deepseek_v2_is_as_with_its_own_attention() -> Result<()> {
    on_each(|device| {
        let weights = weights(device);
        for (seed, chunks) in [(1, vec![40]), (2, vec![1]), (3, vec![17, 23, 1, 30])] {
            let mut theirs = DeepSeekV2::new(&CONFIG.theirs(), weights.clone())?;
            let mut ours = Absorbed::new(&CONFIG, &weights)?;
            let (mut past, mut next, mut text) = (0, 0, Vec::new());
            for tokens in chunks {
                let place = past as u32..(past + tokens) as u32;
                let prompt: Vec<u32> = place.map(|i| (i * 7919 + seed * 104_729) % 211).collect();
                next = likeliest(&mut theirs, &mut ours, &prompt, past, device)?;
                past += tokens;
            }
            for _ in 0..48 {
                text.push(next);
                next = likeliest(&mut theirs, &mut ours, &[next], past, device)?;
                past += 1;
            }
            text.sort_unstable();
            text.dedup();
            assert!(text.len() > 5, "the text is of few tokens: {text:?}");
        }
        Ok(())
    })
}
