//! A node of a model, and its calls.

use crate::api::{Api, Failure};
use crate::attributes::Node;
use crate::value::{Context, Value};
use gqa_host::backend::{IoViews, cpu::Cpu};
use gqa_host::op::{GroupQueryAttention, Shapes};
use gqa_host::plan::{TensorId, Tensors};
use gqa_host::{CacheBinding, DType, Error, Problem, Tensor, TensorViewMut};
use std::array;

/// Inputs in ONNX's order.
pub const INPUTS: [&str; 16] = [
    "query",
    "key",
    "value",
    "past_key",
    "past_value",
    "seqlens_k",
    "total_sequence_length",
    "cos_cache",
    "sin_cache",
    "position_ids",
    "attention_bias",
    "head_sink",
    "k_scale",
    "v_scale",
    "q_norm_weight",
    "k_norm_weight",
];

/// Outputs in ONNX's order.
pub const OUTPUTS: [&str; 4] = ["output", "present_key", "present_value", "output_qk"];

/// What each input is in a call. total_sequence_length is a number rather than a tensor.
const ROLES: [Option<TensorId>; INPUTS.len()] = [
    Some(TensorId::Query),
    Some(TensorId::Key),
    Some(TensorId::Value),
    Some(TensorId::PastKey),
    Some(TensorId::PastValue),
    Some(TensorId::SeqlensK),
    None,
    Some(TensorId::CosCache),
    Some(TensorId::SinCache),
    Some(TensorId::PositionIds),
    Some(TensorId::AttentionBias),
    Some(TensorId::HeadSink),
    Some(TensorId::KScale),
    Some(TensorId::VScale),
    Some(TensorId::QNormWeight),
    Some(TensorId::KNormWeight),
];

/// A node.
pub struct Kernel {
    /// ONNX Runtime's functions.
    pub api: Api,
    op: GroupQueryAttention,
    cpu: Cpu,
}

impl Kernel {
    /// The kernel for a node.
    pub fn new(api: Api, node: Node) -> Result<Self, Failure> {
        Ok(Self { api, op: node.group_query_attention()?, cpu: Cpu::default() })
    }

    /// One call.
    ///
    /// # Safety
    ///
    /// Nobody but the call may use its tensors before it returns.
    pub unsafe fn compute(&self, context: Context) -> Result<(), Failure> {
        let given = Given::read(context)?;
        // SAFETY: as the caller says
        let total = unsafe { given.total_sequence_length() }?;
        let problem = |cache| self.op.problem_from_shapes(&given.shapes(total)?, cache);
        let separate = problem(CacheBinding::Separate)?;
        let mut made = Made::room(context, &separate)?;
        let problem = match made.shares_cache_with(&given)? {
            true => problem(CacheBinding::Shared)?,
            false => separate,
        };
        tracing::debug!(backend = "cpu", call = %problem, "run");
        // SAFETY: as the caller says; a past that is the present is written through that only
        let mut io = unsafe { made.io(&given, problem.cache) }?;
        Ok(self.cpu.run_on(&problem, &mut io)?)
    }
}

/// What the call reads.
struct Given([Option<Value>; INPUTS.len()]);

impl Given {
    fn read(context: Context) -> Result<Self, Failure> {
        let mut given = array::from_fn(|_| None);
        for (index, name) in INPUTS.into_iter().enumerate() {
            given[index] = context.input(index, name)?;
        }
        Ok(Self(given))
    }

    fn get(&self, name: &str) -> Option<&Value> {
        INPUTS.iter().zip(&self.0).find(|(known, _)| **known == name)?.1.as_ref()
    }

    fn required(&self, name: &'static str) -> Result<&Value, Error> {
        let missing = || Error::invalid(name, "no input", "a tensor; it is required");
        self.get(name).ok_or_else(missing)
    }

    /// The number.
    ///
    /// # Safety
    ///
    /// The input must be in the host's memory and not be written by others.
    unsafe fn total_sequence_length(&self) -> Result<usize, Error> {
        const NAME: &str = "total_sequence_length";
        let value = self.required(NAME)?;
        if value.dtype != DType::I32 || value.shape.iter().product::<usize>() != 1 {
            let got = format!("{} {:?}", value.dtype, value.shape);
            return Err(Error::invalid(NAME, got, "int32, one element"));
        }
        // SAFETY: there is one such number, of which the caller says where it is
        let number = unsafe { value.data.cast::<i32>().read_unaligned() };
        let negative = |_| Error::invalid(NAME, number, "0 or more");
        usize::try_from(number).map_err(negative)
    }

    /// Types and shapes.
    fn shapes(&self, total: usize) -> Result<Shapes<'_>, Error> {
        let desc = |name: &'static str| self.get(name).map(Value::desc);
        let required = |name: &'static str| self.required(name).map(Value::desc);
        Ok(Shapes {
            key: desc("key"),
            value: desc("value"),
            past_key: desc("past_key"),
            past_value: desc("past_value"),
            cos_cache: desc("cos_cache"),
            sin_cache: desc("sin_cache"),
            position_ids: desc("position_ids"),
            attention_bias: desc("attention_bias"),
            head_sink: desc("head_sink"),
            k_scale: desc("k_scale"),
            v_scale: desc("v_scale"),
            q_norm_weight: desc("q_norm_weight"),
            k_norm_weight: desc("k_norm_weight"),
            ..Shapes::new(required("query")?, required("seqlens_k")?, total)
        })
    }
}

/// What the call writes.
struct Made {
    output: Output,
    present_key: Output,
    present_value: Output,
    output_qk: Option<Output>,
}

enum Output {
    /// In ONNX Runtime's memory, or where the caller of the session wants it.
    Wanted(Value),
    /// The node has no such output: it is computed and dropped.
    Unwanted(Tensor),
}

impl Made {
    fn room(context: Context, problem: &Problem) -> Result<Self, Failure> {
        let room = |index: usize, id: TensorId| {
            let Some(spec) = id.spec(problem) else { return Ok::<_, Failure>(None) };
            Ok(Some(match context.output(index, OUTPUTS[index], &spec.shape)? {
                Some(value) => Output::Wanted(value),
                None => Output::Unwanted(Tensor::try_zeros(id.name(), spec.dtype, &spec.shape)?),
            }))
        };
        let required = |index, id| {
            let empty = || Output::Unwanted(Tensor::zeros(problem.dtype, &[0]));
            room(index, id).map(|output| output.unwrap_or_else(empty))
        };
        Ok(Self {
            output: required(0, TensorId::Output)?,
            present_key: required(1, TensorId::PresentKey)?,
            present_value: required(2, TensorId::PresentValue)?,
            output_qk: room(3, TensorId::OutputQk)?,
        })
    }

    /// Whether past and present are one memory: rows are then appended in place.
    fn shares_cache_with(&self, given: &Given) -> Result<bool, Error> {
        let keys = self.present_key.is(given.get("past_key"));
        let values = self.present_value.is(given.get("past_value"));
        if keys != values {
            let one = if keys { "past_key" } else { "past_value" };
            let allowed = "both in the memory of their present output, or none";
            return Err(Error::invalid("past_key, past_value", format!("{one} only"), allowed));
        }
        Ok(keys)
    }

    /// The call's tensors, in the memory where they are.
    ///
    /// # Safety
    ///
    /// As for [`Value::view`] and [`Value::view_mut`].
    unsafe fn io<'a>(
        &'a mut self,
        given: &'a Given,
        cache: CacheBinding,
    ) -> Result<IoViews<'a>, Error> {
        let mut inputs = Tensors::default();
        for (value, role) in given.0.iter().zip(ROLES) {
            let is_past = matches!(role, Some(TensorId::PastKey | TensorId::PastValue));
            match (value, role) {
                _ if is_past && cache == CacheBinding::Shared => {}
                // SAFETY: as the caller says
                (Some(value), Some(id)) => inputs = inputs.with(id, unsafe { value.view(id) }?),
                _ => {}
            }
        }
        // SAFETY: as the caller says
        unsafe {
            let output_qk = self.output_qk.as_mut();
            Ok(IoViews {
                inputs,
                output: self.output.view_mut(TensorId::Output)?,
                present_key: self.present_key.view_mut(TensorId::PresentKey)?.into(),
                present_value: self.present_value.view_mut(TensorId::PresentValue)?.into(),
                output_qk: output_qk.map(|qk| qk.view_mut(TensorId::OutputQk)).transpose()?,
                lse: None,
            })
        }
    }
}

impl Output {
    /// Whether the output is in the memory of that input.
    fn is(&self, input: Option<&Value>) -> bool {
        match (self, input) {
            (Self::Wanted(output), Some(input)) => {
                !input.is_empty() && output.data == input.data && output.shape == input.shape
            }
            _ => false,
        }
    }

    /// # Safety
    ///
    /// As for [`Value::view_mut`].
    unsafe fn view_mut(&mut self, id: TensorId) -> Result<TensorViewMut<'_>, Error> {
        match self {
            // SAFETY: as the caller says
            Self::Wanted(value) => unsafe { value.view_mut(id) },
            Self::Unwanted(tensor) => Ok(tensor.view_mut()),
        }
    }
}
