//! A call's tensors by their role.

use super::Io;
use crate::Tensor;
use crate::plan::TensorId;

impl<'a> Io<'a> {
    /// The input in that role.
    pub fn input(&self, id: TensorId) -> Option<&'a Tensor> {
        match id {
            TensorId::Query => Some(self.query),
            TensorId::Key => self.key,
            TensorId::Value => self.value,
            TensorId::PastKey => self.past_key,
            TensorId::PastValue => self.past_value,
            TensorId::SeqlensK => Some(self.seqlens_k),
            TensorId::CosCache => self.cos_cache,
            TensorId::SinCache => self.sin_cache,
            TensorId::PositionIds => self.position_ids,
            TensorId::AttentionBias => self.attention_bias,
            TensorId::HeadSink => self.head_sink,
            TensorId::KScale => self.k_scale,
            TensorId::VScale => self.v_scale,
            TensorId::QNormWeight => self.q_norm_weight,
            TensorId::KNormWeight => self.k_norm_weight,
            TensorId::CumulativeSequenceLength => {
                self.pages.map(|pages| pages.cumulative_sequence_length)
            }
            TensorId::BlockTable => self.pages.map(|pages| pages.block_table),
            TensorId::SlotMapping => self.pages.and_then(|pages| pages.slot_mapping),
            _ => None,
        }
    }

    /// The outputs that the call has.
    pub fn outputs(&mut self) -> impl Iterator<Item = (TensorId, &mut Tensor)> {
        let outputs = [
            (TensorId::Output, Some(&mut *self.output)),
            (TensorId::PresentKey, Some(&mut *self.present_key)),
            (TensorId::PresentValue, Some(&mut *self.present_value)),
            (TensorId::OutputQk, self.output_qk.as_deref_mut()),
            (TensorId::Lse, self.lse.as_deref_mut()),
        ];
        outputs.into_iter().filter_map(|(id, tensor)| Some((id, tensor?)))
    }
}
