//! The operators a node can name.

use gqa_host::backend::Backend;
use gqa_host::op::{GroupQueryAttention, Inputs};
use gqa_host::{CacheBinding, Problem, Tensor};

use crate::attributes::{Attributes, Kind};
use crate::proto::NodeProto;
use crate::{Error, Result};

/// An operator with its attributes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Operator {
    /// com.microsoft.GroupQueryAttention
    GroupQueryAttention(GroupQueryAttention),
}

/// What [`Operator::from_node`] knows, as messages list it.
const SUPPORTED: &str = "com.microsoft.GroupQueryAttention";

/// Inputs in ONNX's order.
const GQA_INPUTS: [&str; 16] = [
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
const GQA_OUTPUTS: [&str; 4] = ["output", "present_key", "present_value", "output_qk"];

/// Attributes and their types.
const GQA_ATTRIBUTES: [(&str, Kind); 15] = [
    ("num_heads", Kind::Int),
    ("kv_num_heads", Kind::Int),
    ("causal", Kind::Int),
    ("scale", Kind::Float),
    ("softcap", Kind::Float),
    ("local_window_size", Kind::Int),
    ("sliding_window_cache", Kind::Int),
    ("do_rotary", Kind::Int),
    ("rotary_interleaved", Kind::Int),
    ("smooth_softmax", Kind::Int),
    ("qk_output", Kind::Int),
    ("k_quant_type", Kind::Text),
    ("v_quant_type", Kind::Text),
    ("kv_cache_bit_width", Kind::Int),
    ("qk_norm_epsilon", Kind::Float),
];

/// Positions of the inputs that must be there.
const GQA_REQUIRED: [usize; 3] = [0, 5, 6];
/// Position of the output that qk_output asks for.
const OUTPUT_QK: usize = 3;

impl Operator {
    /// The node's operator. `version` gives the imported version of a domain.
    pub(crate) fn from_node(
        node: &NodeProto,
        version: impl Fn(&str) -> Option<i64>,
    ) -> Result<Self> {
        let domain = if node.domain.is_empty() { "ai.onnx" } else { &node.domain };
        match (domain, node.op_type.as_str()) {
            ("com.microsoft", "GroupQueryAttention") => {
                expect_version("com.microsoft", version("com.microsoft"), 1)?;
                group_query_attention(node).map(Self::GroupQueryAttention)
            }
            (domain, op) => {
                let got = format!("{:?}", format!("{domain}.{op}"));
                Err(Error::invalid("operator", got, SUPPORTED))
            }
        }
    }

    /// Names of the inputs, in ONNX's order.
    pub fn input_names(&self) -> &'static [&'static str] {
        match self {
            Self::GroupQueryAttention(_) => &GQA_INPUTS,
        }
    }

    /// Names of the outputs, in ONNX's order.
    pub fn output_names(&self) -> &'static [&'static str] {
        match self {
            Self::GroupQueryAttention(_) => &GQA_OUTPUTS,
        }
    }
}

/// Operator sets are numbered; ours come with exactly one number each.
fn expect_version(domain: &str, got: Option<i64>, allowed: i64) -> Result<()> {
    match got {
        Some(version) if version == allowed => Ok(()),
        Some(version) => {
            Err(Error::invalid(format_args!("opset_import of {domain}"), version, allowed))
        }
        None => Err(Error::invalid(format_args!("opset_import of {domain}"), "none", allowed)),
    }
}

/// The operator of a GroupQueryAttention node.
fn group_query_attention(node: &NodeProto) -> Result<GroupQueryAttention> {
    let attributes = Attributes::of(node, &GQA_ATTRIBUTES)?;
    refuse_what_is_not_there_yet(node, &attributes)?;
    for (list, names, what) in
        [(&node.input, &GQA_INPUTS[..], "inputs"), (&node.output, &GQA_OUTPUTS[..], "outputs")]
    {
        if list.len() > names.len() {
            return Err(Error::invalid(what, list.len(), format_args!("at most {}", names.len())));
        }
    }
    if let Some(missing) = GQA_REQUIRED.into_iter().find(|&i| !is_named(&node.input, i)) {
        return Err(Error::invalid(GQA_INPUTS[missing], "no input", "a tensor; it is required"));
    }
    let qk_output = attributes.int("qk_output").unwrap_or(0);
    if qk_output != 0 && !is_named(&node.output, OUTPUT_QK) {
        let got = format!("{qk_output} without the output output_qk");
        return Err(Error::invalid("qk_output", got, "0, or a name for the node's 4th output"));
    }
    let (heads, kv_heads) =
        (attributes.required_int("num_heads")?, attributes.required_int("kv_num_heads")?);
    Ok(GroupQueryAttention::new(heads, kv_heads)
        .scale(attributes.float("scale").unwrap_or(0.0))
        .softcap(attributes.float("softcap").unwrap_or(0.0))
        .local_window_size(attributes.int("local_window_size").unwrap_or(-1))
        .causal(attributes.int("causal").unwrap_or(1))
        .do_rotary(attributes.on("do_rotary"))
        .rotary_interleaved(attributes.on("rotary_interleaved"))
        .smooth_softmax(attributes.on("smooth_softmax"))
        .qk_output(qk_output))
}

/// Whether the list has a name at a position: "" and a list that ends earlier both mean absent.
fn is_named(list: &[String], index: usize) -> bool {
    list.get(index).is_some_and(|name| !name.is_empty())
}

/// Quantised caches, windowed caches and QK-norm.
fn refuse_what_is_not_there_yet(node: &NodeProto, attributes: &Attributes<'_>) -> Result<()> {
    for name in ["k_quant_type", "v_quant_type"] {
        let word = attributes.text(name).unwrap_or_else(|| "NONE".to_owned());
        match word.to_ascii_uppercase().as_str() {
            "NONE" => {}
            "PER_TENSOR" | "PER_CHANNEL" => return Err(not_yet(name, &word, "NONE")),
            _ => {
                let got = format!("{word:?}");
                return Err(Error::invalid(name, got, "NONE, PER_TENSOR, PER_CHANNEL"));
            }
        }
    }
    match attributes.int("kv_cache_bit_width").unwrap_or(0) {
        0 => {}
        width @ (4 | 8) => return Err(not_yet("kv_cache_bit_width", width, "0")),
        width => return Err(Error::invalid("kv_cache_bit_width", width, "0, 4, 8")),
    }
    match attributes.int("sliding_window_cache").unwrap_or(0) {
        0 => {}
        1 => return Err(not_yet("sliding_window_cache", 1, "0, with local_window_size")),
        other => return Err(Error::invalid("sliding_window_cache", other, "0, 1")),
    }
    match (12..GQA_INPUTS.len()).find(|&i| is_named(&node.input, i)) {
        Some(given) => Err(not_yet(GQA_INPUTS[given], "a tensor", "leave the input out")),
        None => Ok(()),
    }
}

fn not_yet(argument: &'static str, got: impl ToString, instead: &'static str) -> Error {
    gqa_host::Error::NotSupportedYet { argument, got: got.to_string(), instead }.into()
}

/// An operator with its inputs, in ONNX's order.
#[derive(Clone, Debug)]
pub struct Call {
    operator: Operator,
    inputs: Vec<Option<Tensor>>,
}

impl Call {
    /// `inputs` in ONNX's order; trailing ones may be left out.
    pub(crate) fn new(operator: Operator, inputs: Vec<Option<Tensor>>) -> Self {
        Self { operator, inputs }
    }

    /// The validated call, as planners take it.
    pub fn problem(&self) -> Result<Problem> {
        match &self.operator {
            Operator::GroupQueryAttention(op) => {
                Ok(op.problem(&self.gqa_inputs()?, CacheBinding::Separate)?)
            }
        }
    }

    /// Computes the first `count` outputs, in ONNX's order. output_qk is zero where qk_output leaves it undefined.
    pub fn run(&self, backend: &dyn Backend, count: usize) -> Result<Vec<Tensor>> {
        match &self.operator {
            Operator::GroupQueryAttention(op) => {
                let inputs = self.gqa_inputs()?;
                let outputs = op.run(&inputs, backend)?;
                let mut all = vec![outputs.output, outputs.present_key, outputs.present_value];
                match outputs.output_qk {
                    Some(output_qk) => all.push(output_qk),
                    None if count > OUTPUT_QK => all.push(undefined_output_qk(&self.problem()?)),
                    None => {}
                }
                all.truncate(count);
                Ok(all)
            }
        }
    }

    fn input(&self, index: usize) -> Option<&Tensor> {
        self.inputs.get(index)?.as_ref()
    }

    fn required(&self, index: usize) -> Result<&Tensor> {
        let missing = || Error::invalid(GQA_INPUTS[index], "no input", "a tensor; it is required");
        self.input(index).ok_or_else(missing)
    }

    fn gqa_inputs(&self) -> Result<Inputs<'_>> {
        let [query, seqlens_k, total_sequence_length] = GQA_REQUIRED;
        Ok(Inputs {
            key: self.input(1),
            value: self.input(2),
            past_key: self.input(3),
            past_value: self.input(4),
            cos_cache: self.input(7),
            sin_cache: self.input(8),
            position_ids: self.input(9),
            attention_bias: self.input(10),
            head_sink: self.input(11),
            ..Inputs::new(
                self.required(query)?,
                self.required(seqlens_k)?,
                self.required(total_sequence_length)?,
            )
        })
    }
}

/// (B, N, S, T) zeros.
fn undefined_output_qk(problem: &Problem) -> Tensor {
    let shape = [problem.batch, problem.q_heads, problem.q_len, problem.total_len];
    Tensor::zeros(problem.dtype, &shape)
}
