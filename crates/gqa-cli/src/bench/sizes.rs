//! Which calls are measured: models or free layers, element types, batches, lengths.

use std::str::FromStr;

use super::model::Model;
use crate::options::count;
use crate::shape::{Element, Layer, Shape};

/// Options that name calls.
#[derive(clap::Args)]
pub struct Selection {
    /// Models, several separated by commas: llama3-8b, llama3-70b, qwen3-14b, mistral-7b,
    /// mixtral-8x22b, phi3-mini, phi3-small, phi3-medium, gemma4-global, gemma4-local; instead of
    /// heads, head size and window. Sequences longer than a model's are left out.
    #[arg(long, value_delimiter = ',', value_parser = Model::parse, conflicts_with_all = ["heads", "kv_heads", "head_size", "window"])]
    model: Vec<Model>,
    /// Element types, several separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16")]
    dtype: Vec<Element>,
    /// Sequences of a call, several separated by commas; every one with every length.
    #[arg(long, value_delimiter = ',', requires = "length", conflicts_with = "size", value_parser = count(1 << 24))]
    batch: Vec<u64>,
    /// Lengths, several separated by commas; 64..8192 doubles from 64 to 8192.
    #[arg(long, value_delimiter = ',', conflicts_with = "size")]
    length: Vec<Lengths>,
    #[command(flatten)]
    layer: Layer,
}

/// One call to be measured.
pub struct Row {
    /// Whose layer it is.
    pub model: Option<&'static str>,
    /// Sizes and attributes.
    pub shape: Shape,
}

impl Selection {
    /// All calls; `shape` makes one of a layer and a size, `sizes` are used where no lengths are
    /// given.
    pub fn rows(&self, sizes: &[Size], shape: impl Fn(Layer, Size) -> Shape) -> Vec<Row> {
        let sizes = if self.length.is_empty() { sizes.to_vec() } else { self.grid() };
        let mut rows = Vec::new();
        for (model, layer) in self.layers() {
            let longest = model.map_or(usize::MAX, |model| model.max_length);
            let shapes = sizes.iter().map(|&size| shape(layer, size));
            let shapes = shapes.filter(|shape| shape.total() <= longest);
            rows.extend(shapes.map(|shape| Row { model: model.map(|model| model.name), shape }));
        }
        rows
    }

    /// Tokens of the longest sequence that one of the models takes.
    pub fn longest(&self) -> usize {
        self.model.iter().map(|model| model.max_length).max().unwrap_or(usize::MAX)
    }

    fn layers(&self) -> Vec<(Option<Model>, Layer)> {
        let models: Vec<_> = match self.model.as_slice() {
            [] => vec![(None, self.layer)],
            models => models.iter().map(|model| (Some(*model), model.layer(self.layer))).collect(),
        };
        let typed =
            |dtype| models.iter().map(move |&(model, layer)| (model, Layer { dtype, ..layer }));
        let layers = self.dtype.iter().copied().flat_map(typed);
        // What a mask over the new tokens costs shows beside the call without.
        let masks = if self.layer.tree_mask { &[false, true][..] } else { &[false] };
        let masked = |(model, layer)| {
            masks.iter().map(move |&tree_mask| (model, Layer { tree_mask, ..layer }))
        };
        layers.flat_map(masked).collect()
    }

    fn grid(&self) -> Vec<Size> {
        let batches = if self.batch.is_empty() { vec![1] } else { self.batch.clone() };
        let lengths: Vec<_> = self.length.iter().flat_map(|lengths| lengths.0.clone()).collect();
        let sizes = |batch| lengths.iter().map(move |&length| Size { batch, length });
        batches.iter().flat_map(|&batch| sizes(batch as usize)).collect()
    }
}

/// `BATCHxLENGTH`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Sequences.
    pub batch: usize,
    /// New rows of a prompt; rows before a token.
    pub length: usize,
}

/// A positive number that fits 32 bits.
fn number(text: &str) -> Option<usize> {
    text.parse::<u32>().ok().filter(|&n| n > 0).map(|n| n as usize)
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = text.split_once('x').and_then(|(b, l)| number(b).zip(number(l)));
        let size = size.map(|(batch, length)| Self { batch, length });
        size.ok_or_else(|| format!("BATCHxLENGTH, such as 8x2048, both 1 to {}", u32::MAX))
    }
}

/// A length, or lengths that double.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lengths(Vec<usize>);

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let range = number(first).zip(number(last)).filter(|(first, last)| first <= last);
        let (first, last) = range.ok_or_else(|| {
            let most = u32::MAX;
            format!("rows, such as 2048, or FIRST..LAST, such as 64..8192, all 1 to {most}")
        })?;
        let doubling = std::iter::successors(Some(first), |length| Some(length * 2));
        Ok(Self(doubling.take_while(|&length| length <= last).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_double_from_first_to_last() {
        assert_eq!("512".parse(), Ok(Lengths(vec![512])));
        assert_eq!("64..600".parse(), Ok(Lengths(vec![64, 128, 256, 512])));
        for bad in ["", "0", "8..4", "..", "1..x", "64...128"] {
            assert!(
                bad.parse::<Lengths>().is_err_and(|error| error.contains("FIRST..LAST")),
                "{bad}"
            );
        }
    }

    #[test]
    fn sizes_are_two_positive_numbers() {
        assert_eq!("8x2048".parse(), Ok(Size { batch: 8, length: 2048 }));
        for bad in ["8", "x", "0x1", "1x0", "3by4", "1x5000000000"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }
}
