//! A model of Llama's architecture over candle. How it attends is the caller's.

use super::clock::Clock;
use candle::quantized::{QMatMul, gguf_file};
use candle::{D, DType, Device, IndexOp, Module, Result, Tensor};
use candle_nn::ops::{rms_norm, silu};
use gqa_candle::{Attention, Rope};
use std::io::{Read, Seek};

/// A model's sizes and constants.
#[derive(Clone, Debug)]
pub struct Config {
    pub layers: usize,
    pub width: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_size: usize,
    pub vocabulary: usize,
    pub theta: f32,
    pub epsilon: f32,
    /// Tokens of a sequence at most.
    pub context: usize,
}

impl Config {
    /// What a GGUF file says of itself.
    fn of(file: &gguf_file::Content) -> Result<Self> {
        let value = |key: &str| match file.metadata.get(&format!("llama.{key}")) {
            Some(value) => Ok(value),
            None => candle::bail!("the file says nothing of llama.{key}: it is no Llama model"),
        };
        let number = |key: &str| Ok::<_, candle::Error>(value(key)?.to_u32()? as usize);
        let (width, heads) = (number("embedding_length")?, number("attention.head_count")?);
        Ok(Self {
            layers: number("block_count")?,
            width,
            hidden: number("feed_forward_length")?,
            heads,
            kv_heads: number("attention.head_count_kv")?,
            head_size: width / heads,
            vocabulary: 0,
            theta: value("rope.freq_base").and_then(gguf_file::Value::to_f32).unwrap_or(10_000.),
            epsilon: value("attention.layer_norm_rms_epsilon")?.to_f32()?,
            context: number("context_length")?,
        })
    }

    /// An attention layer of the model, for sequences of up to `capacity` tokens. Files of this
    /// kind have heads whose neighbours rotate against each other.
    pub fn attention(&self, capacity: usize, dtype: DType, device: &Device) -> Result<Attention> {
        let rope = Rope::of_frequency(self.theta, self.head_size, capacity, dtype, device)?;
        let attention = Attention::new(self.heads, self.kv_heads, self.head_size);
        Ok(attention.rope(rope.interleaved()))
    }
}

/// How the weights are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    /// As in the file; activations are float32.
    Quantized,
    /// In a floating-point type, which activations have too.
    Dense(DType),
}

impl Weights {
    /// Element type of activations.
    pub fn dtype(self) -> DType {
        match self {
            Self::Quantized => DType::F32,
            Self::Dense(dtype) => dtype,
        }
    }
}

/// Attends for the layers of a model.
pub trait Attend {
    /// Appends keys and values of new tokens to the layer's cache, rotated like the queries, and
    /// lets these attend to all tokens so far: (batch, tokens, heads, size), with fewer heads of
    /// `key` and `value`.
    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
    ) -> Result<Tensor>;
}

/// Which tokens' logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Logits {
    Last,
    All,
}

struct Layer {
    attention_norm: Tensor,
    query: QMatMul,
    key: QMatMul,
    value: QMatMul,
    output: QMatMul,
    norm: Tensor,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
}

/// The model.
pub struct Llama {
    pub config: Config,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    output: QMatMul,
    /// What attention takes.
    pub attention: Clock,
}

impl Llama {
    /// Of a GGUF file, whose header is `file`.
    pub fn from_gguf(
        file: &gguf_file::Content,
        reader: &mut (impl Read + Seek),
        weights: Weights,
        device: &Device,
    ) -> Result<Self> {
        let dtype = weights.dtype();
        let mut tensor = |name: &str| {
            let tensor = file.tensor(reader, &format!("{name}.weight"), device)?;
            let dense =
                |tensor: &candle::quantized::QTensor| tensor.dequantize(device)?.to_dtype(dtype);
            let matrix = match weights {
                Weights::Quantized => QMatMul::from_qtensor(tensor)?,
                Weights::Dense(_) => QMatMul::Tensor(dense(&tensor)?),
            };
            Ok(matrix)
        };
        Self::new(Config::of(file)?, dtype, &mut tensor, device)
    }

    /// Of random numbers.
    pub fn random(config: Config, dtype: DType, device: &Device) -> Result<Self> {
        let Config { width, hidden, vocabulary, .. } = config;
        let [all, kv] = [config.heads, config.kv_heads].map(|heads| heads * config.head_size);
        let mut tensor = |name: &str| {
            let name = name.rsplit('.').next().unwrap_or_default();
            if name.ends_with("norm") {
                return Ok(QMatMul::Tensor(Tensor::ones(width, dtype, device)?));
            }
            let shape = match name {
                "attn_q" => (all, width),
                "attn_k" | "attn_v" => (kv, width),
                "attn_output" => (width, all),
                "ffn_gate" | "ffn_up" => (hidden, width),
                "ffn_down" => (width, hidden),
                _ => (vocabulary, width),
            };
            let spread = 1. / (shape.1 as f32).sqrt();
            Ok(QMatMul::Tensor(Tensor::randn(0., spread, shape, device)?.to_dtype(dtype)?))
        };
        Self::new(config, dtype, &mut tensor, device)
    }

    /// Of the matrices that `tensor` gives by their names in a GGUF file.
    fn new(
        config: Config,
        dtype: DType,
        tensor: &mut dyn FnMut(&str) -> Result<QMatMul>,
        device: &Device,
    ) -> Result<Self> {
        let embedding = tensor("token_embd")?;
        let output = tensor("output").unwrap_or_else(|_| embedding.clone());
        let embedding = dense(&embedding)?.to_dtype(dtype)?;
        let vector = |matrix: QMatMul| dense(&matrix)?.to_device(device)?.to_dtype(dtype);
        let norm = vector(tensor("output_norm")?)?;
        let layers = (0..config.layers).map(|i| {
            let mut of = |name: &str| tensor(&format!("blk.{i}.{name}"));
            Ok(Layer {
                attention_norm: vector(of("attn_norm")?)?,
                query: of("attn_q")?,
                key: of("attn_k")?,
                value: of("attn_v")?,
                output: of("attn_output")?,
                norm: vector(of("ffn_norm")?)?,
                gate: of("ffn_gate")?,
                up: of("ffn_up")?,
                down: of("ffn_down")?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let config = Config { vocabulary: embedding.dim(0)?, ..config };
        Ok(Self { config, embedding, layers, norm, output, attention: Clock::of(device) })
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        self.embedding.device()
    }

    /// Logits after `tokens`, u32 of shape (batch, tokens): float32 of shape (batch, 1 or tokens,
    /// vocabulary).
    pub fn forward(
        &mut self,
        tokens: &Tensor,
        attend: &mut dyn Attend,
        logits: Logits,
    ) -> Result<Tensor> {
        let Config { heads, kv_heads, head_size, width, epsilon, .. } = self.config;
        let (batch, rows) = tokens.dims2()?;
        let chosen = self.embedding.index_select(&tokens.flatten_all()?, 0)?;
        let mut x = chosen.reshape((batch, rows, width))?;
        for (i, layer) in self.layers.iter().enumerate() {
            let normal = rms_norm(&x, &layer.attention_norm, epsilon)?;
            let split = |matrix: &QMatMul, heads| {
                matrix.forward(&normal)?.reshape((batch, rows, heads, head_size))
            };
            let query = split(&layer.query, heads)?;
            let (key, value) = (split(&layer.key, kv_heads)?, split(&layer.value, kv_heads)?);
            let attended = self.attention.span(|| attend.attend(i, &query, &key, &value))?;
            x = (x + layer.output.forward(&attended.flatten_from(2)?)?)?;
            let normal = rms_norm(&x, &layer.norm, epsilon)?;
            let gate = silu(&layer.gate.forward(&normal)?)?;
            x = (x + layer.down.forward(&(gate * layer.up.forward(&normal)?)?)?)?;
        }
        if logits == Logits::Last {
            x = x.i((.., rows - 1..))?.contiguous()?;
        }
        self.output.forward(&rms_norm(&x, &self.norm, epsilon)?)?.to_dtype(DType::F32)
    }
}

/// A matrix, or a vector, as numbers.
fn dense(matrix: &QMatMul) -> Result<Tensor> {
    match matrix {
        QMatMul::QTensor(tensor) => tensor.dequantize(&tensor.device()),
        QMatMul::Tensor(tensor) | QMatMul::TensorF16(tensor) => Ok(tensor.clone()),
    }
}

/// The likeliest token after the last of `logits`, of each batch entry.
pub fn likeliest(logits: &Tensor) -> Result<Vec<u32>> {
    logits.i((.., logits.dim(1)? - 1))?.argmax(D::Minus1)?.to_vec1()
}
