//! Layers of known models.

use crate::shape::Layer;

/// The attention layer of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// As `--model` takes it.
    pub name: &'static str,
    heads: u64,
    kv_heads: u64,
    head_size: u64,
    /// Longest sequence.
    pub max_length: usize,
    window: Option<i64>,
}

const fn row(name: &'static str, heads: [u64; 3], max_length: usize, window: Option<i64>) -> Model {
    let [heads, kv_heads, head_size] = heads;
    Model { name, heads, kv_heads, head_size, max_length, window }
}

/// Heads, KV heads and head size; longest sequence; window.
static TABLE: [Model; 10] = [
    row("llama3-8b", [32, 8, 128], 8192, None),
    row("llama3-70b", [64, 8, 128], 8192, None),
    row("qwen3-14b", [40, 8, 128], 8192, None),
    row("mistral-7b", [32, 8, 128], 32768, Some(4096)),
    row("mixtral-8x22b", [48, 8, 128], 65536, None),
    row("phi3-mini", [32, 32, 96], 131_072, None),
    row("phi3-small", [32, 8, 128], 131_072, None),
    row("phi3-medium", [40, 10, 128], 131_072, None),
    row("gemma4-global", [8, 4, 512], 32768, None),
    row("gemma4-local", [8, 4, 512], 32768, Some(4096)),
];

impl Model {
    /// The model of that name.
    pub fn parse(name: &str) -> Result<Self, String> {
        TABLE.iter().find(|model| model.name == name).copied().ok_or_else(|| {
            let names: Vec<_> = TABLE.iter().map(|model| model.name).collect();
            names.join(", ")
        })
    }

    /// The layer with the model's heads and window.
    pub fn layer(&self, layer: Layer) -> Layer {
        let Self { heads, kv_heads, head_size, .. } = *self;
        Layer { heads, kv_heads, head_size, window: self.window.unwrap_or(-1), ..layer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{Element, Shape};

    #[test]
    fn every_model_is_a_legal_call_at_its_longest() {
        for model in &TABLE {
            let layer = model.layer(Layer::llama3_8b(Element::Bf16));
            assert!(
                Shape::new(layer, 1, 1, model.max_length - 1).problem().is_ok(),
                "{}",
                model.name
            );
            assert_eq!(Model::parse(model.name), Ok(*model));
        }
        assert!(Model::parse("gpt-2").is_err_and(|error| error.contains("llama3-8b")));
    }
}
