//! Calls whose values have another head size than keys. Operators describe few of them, so these
//! are described as engines do.

use anyhow::{Result, bail};
use gqa_host::engine::{self, Dense, External, Heads, LatentHeads, Paged, Rope};
use gqa_host::{Error, Problem};

use crate::options::count;
use crate::shape::{Layer, Rotation, Shape};
use crate::usage::Usage;

/// Names of the engine API's arguments, and the options that say what they are.
const OPTIONS: [(&str, &str); 7] = [
    ("heads.values", "--latent"),
    ("heads.size", "--head-size"),
    ("heads.query", "--heads"),
    ("heads.kv", "--kv-heads"),
    ("rope.dim", "--rotary"),
    ("window", "--window"),
    ("softcap", "--softcap"),
];

/// Options that say how large values are.
#[derive(Clone, Copy, clap::Args)]
pub struct Values {
    /// Multi-head latent attention: one KV head, whose rows of --head-size elements are keys, and
    /// values in their leading ones, of which this is the number. --rotary rotates the others.
    #[arg(long, value_name = "VALUES", value_parser = count(4096), conflicts_with_all = [
        "model", "value_size", "kv_heads", "separate_cache", "packed", "cached", "prefetch_cache",
        "float32_output", "float8_output", "qk_norm", "sliding_cache", "smooth_softmax",
        "tree_mask"])]
    latent: Option<u64>,
    /// Elements of a head of values, where there is no KV cache: prefill of --query-length rows, as
    /// of multi-head latent attention before its projections are absorbed.
    #[arg(long, value_parser = count(4096), requires = "query_length", conflicts_with_all = [
        "model", "past_length", "block_size", "separate_cache", "packed", "cached",
        "prefetch_cache", "float32_output", "float8_output", "rotary", "qk_norm", "kv_cache",
        "sliding_cache", "smooth_softmax", "tree_mask"])]
    value_size: Option<u64>,
}

impl Values {
    /// The call, if one of the options is given; with that many tokens of all sequences together if
    /// fewer than all have.
    pub fn problem(self, shape: &Shape, tokens: Option<u64>) -> Result<Option<Problem>> {
        let problem = match (self.latent, self.value_size) {
            (Some(values), _) => latent(shape, values as usize, tokens.map(|n| n as usize))?,
            (None, Some(size)) => external(shape, size as usize),
            (None, None) => return Ok(None),
        };
        problem.map(Some).map_err(by_option)
    }
}

/// Over a latent cache, paged with --block-size.
fn latent(
    shape: &Shape,
    values: usize,
    tokens: Option<usize>,
) -> Result<gqa_host::Result<Problem>> {
    let Layer { heads, head_size, rotary, .. } = shape.layer;
    let size = head_size as usize;
    if values > size {
        bail!(Usage(format!("--latent: got {values}; allowed: up to --head-size = {size}")));
    }
    let heads = LatentHeads { query: heads as usize, size, values };
    let mut layer = engine::Layer::latent(shape.layer.dtype.into(), heads, scale(&shape.layer));
    if let Some(how) = shape.layer.quantization() {
        layer = layer.quantized(how);
    }
    if rotary != Rotation::None {
        let rope = Rope::new(size - values, shape.total()).offset(values);
        let is_interleaved = rotary == Rotation::Interleaved;
        layer = layer.rope(if is_interleaved { rope.interleaved() } else { rope });
    }
    let layer = with_scores(layer, &shape.layer);
    Ok(match shape.layer.block_size {
        Some(block_size) => layer.paged(paged(shape, block_size as usize, tokens)?),
        None => layer.dense(Dense::chunk(shape.batch, shape.query_length, shape.total())),
    })
}

/// Sequences of equal lengths, or the first of them with fewer tokens.
fn paged(shape: &Shape, block_size: usize, tokens: Option<usize>) -> Result<Paged> {
    let (rows, all) = (shape.query_length, shape.batch * shape.query_length);
    let tokens = tokens.unwrap_or(all);
    if !(rows..=all).contains(&tokens) {
        bail!(Usage(format!("--tokens: got {tokens}; allowed: {rows} to {all}")));
    }
    let per_sequence = shape.total().div_ceil(block_size);
    let cache = [shape.batch * per_sequence, block_size, per_sequence];
    let call = match rows {
        1 if tokens == all => Paged::decode(shape.batch, cache),
        _ => Paged::new(shape.batch, tokens, cache).most_tokens(rows),
    };
    Ok(call.longest(shape.total()))
}

/// Over keys and values that come with the call.
fn external(shape: &Shape, value_size: usize) -> gqa_host::Result<Problem> {
    let Layer { heads, kv_heads, head_size, .. } = shape.layer;
    let [query, kv, size] = [heads, kv_heads, head_size].map(|n| n as usize);
    let layer = engine::Layer::new(shape.layer.dtype.into(), Heads { query, kv, size });
    let layer = with_scores(layer.scale(scale(&shape.layer)), &shape.layer);
    let call = External::new(shape.batch, shape.query_length, shape.query_length);
    layer.external(call.value_size(value_size))
}

/// The factor on q·k.
fn scale(layer: &Layer) -> f32 {
    if layer.scale == 0.0 { (layer.head_size as f32).sqrt().recip() } else { layer.scale }
}

/// What scores are besides.
fn with_scores(engine: engine::Layer, layer: &Layer) -> engine::Layer {
    let engine = engine.softcap(layer.softcap);
    let engine = if layer.bidirectional { engine.bidirectional() } else { engine };
    match usize::try_from(layer.window) {
        Ok(keys) => engine.window(keys),
        Err(_) => engine,
    }
}

/// The error with options in place of the engine's names, if it is about one.
fn by_option(error: Error) -> anyhow::Error {
    let options = |text: &str| {
        OPTIONS.iter().fold(text.to_owned(), |text, (name, option)| text.replace(name, option))
    };
    match error {
        Error::Invalid { argument, got, allowed }
            if OPTIONS.iter().any(|row| row.0 == argument) =>
        {
            let allowed = options(&allowed);
            Usage(format!("{}: got {got}; allowed: {allowed}", options(argument))).into()
        }
        other => other.into(),
    }
}
