//! Ways to attend: ours, and candle's own.

use super::llama::{Attend, Config};
use candle::{DType, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::ops::softmax_last_dim;
use candle_nn::rotary_emb::rope_i;
use gqa_candle::{KvCache, PagedKvCache, Sequence};
use std::collections::HashMap;

/// gqa's kernels, over a KV cache that is appended to in place.
pub struct Dense(pub Vec<KvCache>);

impl Dense {
    /// With room for `capacity` tokens of each of `batch` sequences.
    pub fn new(
        config: &Config,
        batch: usize,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let attention = config.attention(capacity, dtype, device)?;
        let cache = |_| KvCache::new(&attention, batch, capacity, dtype, device);
        Ok(Self((0..config.layers).map(cache).collect::<Result<_>>()?))
    }
}

impl Attend for Dense {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.0[layer].attend(q, k, v)
    }
}

/// gqa's kernels, over a paged KV cache.
pub struct Paged(Vec<(PagedKvCache, Vec<Sequence>)>);

impl Paged {
    /// Rows of a block.
    const BLOCK: usize = 32;

    /// With room for `capacity` tokens of each of `batch` sequences.
    pub fn new(
        config: &Config,
        batch: usize,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let attention = config.attention(capacity, dtype, device)?;
        let layer = |_| {
            let blocks = batch * capacity.div_ceil(Self::BLOCK);
            let mut cache = PagedKvCache::new(&attention, blocks, Self::BLOCK, dtype, device)?;
            let sequences = (0..batch).map(|_| cache.begin()).collect();
            Ok((cache, sequences))
        };
        Ok(Self((0..config.layers).map(layer).collect::<Result<_>>()?))
    }
}

impl Attend for Paged {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (cache, sequences) = &mut self.0[layer];
        let batch: Vec<_> = sequences.iter().map(|s| (*s, q.dim(1).unwrap_or_default())).collect();
        let tokens = |tensor: &Tensor| tensor.flatten(0, 1);
        cache.attend(&tokens(q)?, &tokens(k)?, &tokens(v)?, &batch)?.reshape(q.shape())
    }
}

/// Cosines and sines for candle's rotary embedding.
struct Angles {
    cos: Tensor,
    sin: Tensor,
}

impl Angles {
    fn new(config: &Config, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let size = config.head_size;
        let frequency = |i: usize| config.theta.powf(-2. * i as f32 / size as f32);
        let angles = (0..capacity).flat_map(|p| (0..size / 2).map(move |i| (p, i)));
        let angles: Vec<f32> = angles.map(|(p, i)| p as f32 * frequency(i)).collect();
        let angles = Tensor::from_vec(angles, (capacity, size / 2), device)?;
        Ok(Self { cos: angles.cos()?.to_dtype(dtype)?, sin: angles.sin()?.to_dtype(dtype)? })
    }

    /// (batch, heads, tokens, size), from that position on.
    fn rotate(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let tokens = x.dim(2)?;
        let (cos, sin) =
            (self.cos.narrow(0, position, tokens)?, self.sin.narrow(0, position, tokens)?);
        rope_i(&x.contiguous()?, &cos, &sin)
    }
}

/// What candle-transformers' models do on the CPU: keys and values are concatenated at each token,
/// KV heads are repeated, and scores are a matrix.
pub struct Unfused {
    angles: Angles,
    caches: Vec<Option<[Tensor; 2]>>,
    masks: HashMap<[usize; 2], Tensor>,
}

impl Unfused {
    pub fn new(config: &Config, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let angles = Angles::new(config, capacity, dtype, device)?;
        Ok(Self { angles, caches: vec![None; config.layers], masks: HashMap::new() })
    }

    /// -inf where a key is behind a query.
    fn mask(&mut self, rows: usize, keys: usize, like: &Tensor) -> Result<Tensor> {
        if let Some(mask) = self.masks.get(&[rows, keys]) {
            return Ok(mask.clone());
        }
        let device = like.device();
        let places = Tensor::arange((keys - rows) as u32, keys as u32, device)?.unsqueeze(1)?;
        let hidden = Tensor::arange(0, keys as u32, device)?.broadcast_gt(&places)?;
        let number = |x: f32| Tensor::full(x, (rows, keys), device)?.to_dtype(like.dtype());
        let mask = hidden.where_cond(&number(f32::NEG_INFINITY)?, &number(0.)?)?;
        self.masks.insert([rows, keys], mask.clone());
        Ok(mask)
    }
}

/// Each KV head as often as query heads share it.
fn repeated(x: &Tensor, times: usize) -> Result<Tensor> {
    let (batch, heads, rows, size) = x.dims4()?;
    Tensor::cat(&vec![x; times], 2)?.reshape((batch, heads * times, rows, size))
}

impl Attend for Unfused {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (_, rows, heads, size) = q.dims4()?;
        let (q, k) = (q.transpose(1, 2)?, k.transpose(1, 2)?);
        let v = v.transpose(1, 2)?.contiguous()?;
        let past = match &self.caches[layer] {
            Some([keys, _]) => keys.dim(2)?,
            None => 0,
        };
        let (q, k) = (self.angles.rotate(&q, past)?, self.angles.rotate(&k, past)?);
        let [k, v] = match &self.caches[layer] {
            Some([keys, values]) => [Tensor::cat(&[keys, &k], 2)?, Tensor::cat(&[values, &v], 2)?],
            None => [k, v],
        };
        self.caches[layer] = Some([k.clone(), v.clone()]);
        let times = heads / k.dim(1)?;
        let (k, v) = (repeated(&k, times)?, repeated(&v, times)?);
        let scores = (q.matmul(&k.t()?)? / (size as f64).sqrt())?;
        let scores = match rows {
            1 => scores,
            _ => scores.broadcast_add(&self.mask(rows, past + rows, &scores)?)?,
        };
        softmax_last_dim(&scores)?.matmul(&v)?.transpose(1, 2)?.contiguous()
    }
}

/// candle-nn's flash attention for the CPU, over its KV cache that grows in place.
pub struct Flash {
    angles: Angles,
    caches: Vec<candle_nn::kv_cache::KvCache>,
}

impl Flash {
    pub fn new(config: &Config, capacity: usize, dtype: DType, device: &Device) -> Result<Self> {
        let caches = (0..config.layers).map(|_| candle_nn::kv_cache::KvCache::new(1, capacity));
        let angles = Angles::new(config, capacity, dtype, device)?;
        Ok(Self { angles, caches: caches.collect() })
    }
}

impl Attend for Flash {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let cache = &mut self.caches[layer];
        let past = cache.current_seq_len();
        let rotate = |x: &Tensor| {
            self.angles.rotate(&x.transpose(1, 2)?, past)?.transpose(1, 2)?.contiguous()
        };
        let (q, k) = (rotate(q)?, rotate(k)?);
        let (k, v) = cache.append(&k, &v.contiguous()?)?;
        let scale = 1. / (q.dim(3)? as f32).sqrt();
        let mask = AttnMask::causal_with_offset(past);
        // Its output has heads before tokens.
        flash_attn::<f32>(&q, &k, &v, scale, mask, None, None)?.transpose(1, 2)
    }
}
