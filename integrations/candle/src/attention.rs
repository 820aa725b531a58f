//! What the calls of an attention layer have in common.

use crate::error::invalid;
use crate::rows::{check_type, contiguous};
use candle::{DType, Device, Result, Tensor};
use gqa_host::engine::{self, Heads, LatentHeads, Layer};
use gqa_host::plan::TensorId;
use gqa_host::{QuantFormat, Quantization, Scales};

/// Rotary position embedding: which way each position turns.
#[derive(Clone, Debug)]
pub struct Rope {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
    interleaved: bool,
}

impl Rope {
    /// By cosines and sines of shape (positions, dim / 2), in the KV cache's element type and on
    /// its device. The leading `dim` elements of each head rotate, halves against each other, as in
    /// Llama.
    ///
    /// # Errors
    ///
    /// Unless both have two dimensions, the same ones, and the same type and device.
    pub fn new(cos: &Tensor, sin: &Tensor) -> Result<Self> {
        if cos.rank() != 2 {
            return Err(invalid("cos", format!("{:?}", cos.shape()), "(positions, dim / 2)"));
        }
        let table = |tensor: &Tensor| {
            let place = tensor.device().location();
            format!("{:?} {:?} on {place:?}", tensor.dtype(), tensor.shape())
        };
        if table(sin) != table(cos) {
            return Err(invalid("sin", table(sin), format!("{}, as cos", table(cos))));
        }
        Ok(Self { cos: contiguous(cos)?, sin: contiguous(sin)?, interleaved: false })
    }

    /// The usual angles: position times `theta` to the power of -2i / `dim`, for `positions`
    /// positions from 0 on.
    ///
    /// # Errors
    ///
    /// Where candle's are: memory, or a device that fails.
    pub fn of_frequency(
        theta: f32,
        dim: usize,
        positions: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let exponents = (0..dim / 2).map(|i| -2. * i as f32 / dim as f32);
        let frequencies: Vec<f32> = exponents.map(|exponent| theta.powf(exponent)).collect();
        let turn = |f: fn(f32) -> f32| {
            let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |x| p as f32 * x));
            let table = Tensor::from_iter(angles.map(f), device)?;
            table.reshape((positions, dim / 2))?.to_dtype(dtype)
        };
        Self::new(&turn(f32::cos)?, &turn(f32::sin)?)
    }

    /// Neighbours (2i, 2i + 1) rotate against each other instead of halves, as in GPT-J.
    pub fn interleaved(self) -> Self {
        Self { interleaved: true, ..self }
    }
}

/// An attention layer: causal attention of `query_heads` heads, which share `kv_heads` keys and
/// values, all of `head_size` elements.
#[derive(Clone, Debug)]
pub struct Attention {
    pub(crate) heads: Heads,
    /// Of a layer whose values are the leading elements of its keys.
    pub(crate) latent: Option<Latent>,
    scale: Option<f32>,
    softcap: Option<f32>,
    window: Option<usize>,
    pub(crate) rope: Option<Rope>,
    pub(crate) quantized: Option<Quantized>,
}

/// What a latent layer has of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latent {
    /// Leading elements of a row that are its value.
    pub(crate) values: usize,
    /// The first element that rotates.
    pub(crate) rotates_from: usize,
}

/// How a KV cache is quantized, and its scales.
#[derive(Clone, Debug)]
pub(crate) struct Quantized {
    how: Quantization,
    k_scale: Tensor,
    /// Of a layer that is not latent.
    v_scale: Option<Tensor>,
}

impl Attention {
    /// A layer without anything else. Whether the numbers make sense is checked where a cache is
    /// made for it.
    pub const fn new(query_heads: usize, kv_heads: usize, head_size: usize) -> Self {
        let heads = Heads { query: query_heads, kv: kv_heads, size: head_size };
        Self {
            heads,
            latent: None,
            scale: None,
            softcap: None,
            window: None,
            rope: None,
            quantized: None,
        }
    }

    /// The factor on q·k; 1/√head_size where it is not given.
    pub fn scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// Scores become softcap · tanh(score / softcap).
    pub fn softcap(self, softcap: f32) -> Self {
        Self { softcap: Some(softcap), ..self }
    }

    /// A query sees the newest `keys` keys, its own included.
    pub fn window(self, keys: usize) -> Self {
        Self { window: Some(keys), ..self }
    }

    /// Queries and new keys rotate, to the place that their token has in its sequence.
    pub fn rope(self, rope: Rope) -> Self {
        Self { rope: Some(rope), ..self }
    }

    /// The KV cache holds quantized values of that format: each times its scale is the number, and
    /// new keys, once they are rotated, and values are divided by it and rounded.
    ///
    /// `k_scale` and `v_scale` are float32, on the device of the KV cache, and have one element, or
    /// one for each KV head, or one for each element of each KV head, (KV heads, head_size).
    ///
    /// # Errors
    ///
    /// Where a scale has another type or another number of elements, or k_scale's is not
    /// v_scale's; where one is not finite, or so small that nothing can be divided by it.
    pub fn quantized(
        self,
        format: QuantFormat,
        k_scale: &Tensor,
        v_scale: &Tensor,
    ) -> Result<Self> {
        let of_keys = Quantized::new("k_scale", format, k_scale, self.heads)?;
        if scales_per("v_scale", v_scale, self.heads)? != of_keys.how.scales {
            let allowed = format!("{} elements, as k_scale", k_scale.elem_count());
            return Err(invalid("v_scale", format!("{:?}", v_scale.shape()), allowed));
        }
        let quantized = Quantized { v_scale: Some(contiguous(v_scale)?), ..of_keys };
        Ok(Self { quantized: Some(quantized), ..self })
    }

    /// The same in gqa's terms.
    ///
    /// # Errors
    ///
    /// Where the element type is none of ours, or that of the rotary embedding is another.
    pub(crate) fn layer(&self, dtype: DType) -> Result<Layer> {
        let element = element_type("dtype", dtype)?;
        let mut layer = match self.latent {
            None => Layer::new(element, self.heads),
            Some(Latent { values, .. }) => {
                let heads = LatentHeads { query: self.heads.query, size: self.heads.size, values };
                // A latent layer always has a scale of its own.
                Layer::latent(element, heads, self.scale.unwrap_or_default())
            }
        };
        if let Some(Quantized { how, .. }) = &self.quantized {
            layer = layer.quantized(*how);
        }
        if let Some(scale) = self.scale {
            layer = layer.scale(scale);
        }
        if let Some(softcap) = self.softcap {
            layer = layer.softcap(softcap);
        }
        if let Some(window) = self.window {
            layer = layer.window(window);
        }
        let Some(Rope { cos, interleaved, .. }) = &self.rope else { return Ok(layer) };
        if cos.dtype() != dtype {
            let allowed = format!("{dtype:?}, the type of the KV cache");
            return Err(invalid("cos", format!("{:?}", cos.dtype()), allowed));
        }
        let (positions, half) = cos.dims2()?;
        let first = self.latent.map_or(0, |latent| latent.rotates_from);
        let rope = engine::Rope::new(2 * half, positions).offset(first);
        Ok(layer.rope(if *interleaved { rope.interleaved() } else { rope }))
    }
}

impl Attention {
    /// Elements of a head in the KV cache's memory.
    pub(crate) fn cached_size(&self) -> usize {
        let how = self.quantized.as_ref().map(|quantized| quantized.how);
        self.heads.size / how.map_or(1, Quantization::codes_per_element)
    }

    /// Elements of a head of the output.
    pub(crate) fn value_size(&self) -> usize {
        self.latent.map_or(self.heads.size, |latent| latent.values)
    }

    /// The tensors that all calls of the layer read, and what errors call them.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (TensorId, &'static str, &Tensor)> {
        let rope = self.rope.iter().flat_map(|Rope { cos, sin, .. }| {
            [(TensorId::CosCache, "cos", cos), (TensorId::SinCache, "sin", sin)]
        });
        let scales = self.quantized.iter().flat_map(|Quantized { k_scale, v_scale, .. }| {
            let of_values = v_scale.as_ref().map(|scale| (TensorId::VScale, "v_scale", scale));
            [(TensorId::KScale, "k_scale", k_scale)].into_iter().chain(of_values)
        });
        rope.chain(scales)
    }

    /// Errs unless the rotary embedding has `positions` positions, and all of the layer's tensors
    /// are on the device.
    pub(crate) fn check_tensors(&self, positions: usize, device: &Device) -> Result<()> {
        let rows = self.rope.as_ref().map_or(Ok(positions), |rope| rope.cos.dim(0))?;
        if rows < positions {
            let allowed = format!("{positions} or more, the tokens that a sequence has room for");
            return Err(invalid("cos", format!("{rows} positions"), allowed));
        }
        let other = |(_, _, tensor): &(_, _, &Tensor)| !tensor.device().same_device(device);
        match self.tensors().find(other) {
            None => Ok(()),
            Some((_, name, tensor)) => {
                let [got, allowed] = [tensor.device(), device].map(|device| device.location());
                let allowed = format!("{allowed:?}, where the KV cache is");
                Err(invalid(name, format!("a tensor on {got:?}"), allowed))
            }
        }
    }
}

impl Quantized {
    /// With scales of keys alone.
    pub(crate) fn new(
        argument: &'static str,
        format: QuantFormat,
        scale: &Tensor,
        heads: Heads,
    ) -> Result<Self> {
        let scales = scales_per(argument, scale, heads)?;
        let how = Quantization { format, scales };
        Ok(Self { how, k_scale: contiguous(scale)?, v_scale: None })
    }
}

/// What each of a KV cache's scales is for.
fn scales_per(argument: &'static str, scale: &Tensor, heads: Heads) -> Result<Scales> {
    check_type(argument, scale, DType::F32)?;
    let kinds = [Scales::PerTensor, Scales::PerHead, Scales::PerChannel];
    let count = |scales: &Scales| scales.count(heads.kv, heads.size) == Some(scale.elem_count());
    let Some(scales) = kinds.into_iter().find(count) else {
        let [of_heads, of_channels] = [heads.kv, heads.kv.saturating_mul(heads.size)];
        let allowed = match heads.kv {
            1 => format!("1 or {of_channels} elements"),
            _ => format!("1, {of_heads} or {of_channels} elements"),
        };
        return Err(invalid(argument, format!("{:?}", scale.shape()), allowed));
    };
    let numbers = scale.flatten_all()?.to_vec1::<f32>()?;
    match numbers.into_iter().find(|number| !number.is_normal()) {
        None => Ok(scales),
        Some(number) => {
            Err(invalid(argument, number, "finite numbers other than 0, none subnormal"))
        }
    }
}

/// candle's element type as ours: one that attention is computed of.
pub(crate) fn element_type(argument: &'static str, dtype: DType) -> Result<gqa_host::DType> {
    match dtype {
        DType::F32 => Ok(gqa_host::DType::F32),
        DType::F16 => Ok(gqa_host::DType::F16),
        DType::BF16 => Ok(gqa_host::DType::BF16),
        _ => Err(invalid(argument, format!("{dtype:?}"), "F32, F16 or BF16")),
    }
}
