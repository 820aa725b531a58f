//! Random weights of whatever names and shapes a model asks for.

use candle::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::{SimpleBackend, VarBuilder};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// What was asked for, so that models loaded one after the other have the same weights.
#[derive(Default)]
struct Random(Mutex<HashMap<String, Tensor>>);

/// Weights in that type.
pub fn random(dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::<Random>::default(), dtype, device.clone())
}

impl SimpleBackend for Random {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tensor) = known.get(name) {
            return Ok(tensor.clone());
        }
        let tensor = match shape.dims() {
            // Those of norms.
            [_] => Tensor::ones(shape, dtype, device)?,
            dims => {
                let spread = 1. / (dims.last().copied().unwrap_or(1) as f32).sqrt();
                Tensor::randn(0., spread, shape, device)?.to_dtype(dtype)?
            }
        };
        known.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle::bail!("{name} has no shape of its own")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}
