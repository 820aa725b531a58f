//! Where a data set is, and made-up tensors.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use float8::F8E4M3;
use gqa_host::{DType, Tensor};
use half::{bf16, f16};
use ndarray::{ArrayD, IxDyn};

/// The folder itself, or its test_data_set_0.
pub fn data_set(folder: &Path) -> PathBuf {
    let inner = folder.join("test_data_set_0");
    if inner.is_dir() && !folder.join("input_0.pb").exists() { inner } else { folder.to_owned() }
}

/// Numbers of a block of noise that is repeated; prime, so that no two rows of a tensor are alike.
const BLOCK: usize = 1_048_583;

/// Repeatable noise.
pub struct Noise(u64);

impl Noise {
    /// Another seed gives other numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Next 64 bits (splitmix64).
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// About normal with mean 0 and standard deviation 1: twelve uniform numbers, 5 bits each.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..12).map(|i| (bits >> (5 * i)) & 31).sum();
        (sum as f32 - 186.0) / (12.0f32 * 85.25).sqrt()
    }

    /// A tensor of such numbers.
    pub fn whole(&mut self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.tensor(dtype, shape, 1.0)
    }

    /// As many elements of such a tensor as are not repeated, in one dimension.
    pub fn block(&mut self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let count = shape.iter().product::<usize>().min(BLOCK);
        self.tensor(dtype, &[count], 1.0)
    }

    /// A floating-point tensor of such numbers times `spread`.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize], spread: f32) -> Result<Tensor> {
        let count: usize = shape.iter().product();
        let block: Vec<f32> = (0..count.min(BLOCK)).map(|_| self.normal() * spread).collect();
        Ok(match dtype {
            DType::F16 => repeated(&block, f16::from_f32, shape)?.into(),
            DType::BF16 => repeated(&block, bf16::from_f32, shape)?.into(),
            DType::F32 => repeated(&block, |x| x, shape)?.into(),
            // As many quantized values as fit 3 to 4 standard deviations.
            DType::I8 => repeated(&block, |x| (x * 40.0) as i8, shape)?.into(),
            DType::F8E4M3 => repeated(&block, |x| F8E4M3::from_f32(x * 16.0), shape)?.into(),
            DType::U8 => {
                let code = |x: f32| ((x * 8.0 / 3.0).clamp(-8.0, 7.0) + 8.0) as u8;
                repeated(&block, |x| code(x) | code(-x) << 4, shape)?.into()
            }
            _ => bail!("noise of type {dtype}"),
        })
    }
}

/// The block again and again until the shape is full.
fn repeated<T: Copy>(
    block: &[f32],
    round: impl Fn(f32) -> T,
    shape: &[usize],
) -> Result<ArrayD<T>> {
    let block: Vec<T> = block.iter().map(|&x| round(x)).collect();
    let count: usize = shape.iter().product();
    let mut values = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    values.try_reserve_exact(count).with_context(|| format!("{bytes} bytes of noise"))?;
    while values.len() < count {
        let missing = count - values.len();
        values.extend_from_slice(&block[..block.len().min(missing)]);
    }
    Ok(ArrayD::from_shape_vec(IxDyn(shape), values)?)
}
