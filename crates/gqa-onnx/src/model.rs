//! Single-node models.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use gqa_host::{DType, Tensor};
use prost::Message;

use crate::error::{Error, Result};
use crate::file;
use crate::operator::{Call, Operator};
use crate::opset::Imports;
use crate::proto::{
    GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, element_type_name,
};
use crate::tensor::{ELEMENT_TYPES, dtype_of, from_proto, read_tensor};

/// A model whose graph is one node of a supported [`Operator`].
#[derive(Clone, Debug)]
pub struct Model {
    operator: Operator,
    /// Inputs of the node, in the operator's order.
    inputs: Vec<Option<Source>>,
    /// Inputs of the graph.
    graph_inputs: usize,
    /// Names of the graph's outputs.
    output_names: Vec<String>,
    /// For each output of the graph, the index of the operator's output.
    outputs: Vec<usize>,
}

/// Where an input of the node comes from.
#[derive(Clone, Debug)]
struct Source {
    /// The operator's name for it.
    argument: &'static str,
    /// Input of the graph, read from input_K.pb; wins over the constant.
    fed: Option<Fed>,
    /// Initializer.
    constant: Option<Tensor>,
}

/// An input of the graph.
#[derive(Clone, Debug)]
struct Fed {
    /// K of input_K.pb.
    index: usize,
    /// Declared element type.
    dtype: Option<DType>,
    /// Declared dimensions; `None` for a free dimension.
    shape: Option<Vec<Option<i64>>>,
}

impl Model {
    /// Reads and checks a model file.
    ///
    /// # Errors
    ///
    /// Where the file cannot be read, and those of [`decode`](Self::decode).
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = file::read_file(path, file::MESSAGE_BYTES)?;
        Self::named(&bytes, &path.display())
    }

    /// Decodes and checks a `ModelProto`.
    ///
    /// # Errors
    ///
    /// Where the bytes are not a model with a single node, or its operator is not supported.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        Self::named(bytes, &"model")
    }

    /// As [`decode`](Self::decode); errors that are the whole model's have its name.
    fn named(bytes: &[u8], name: &dyn std::fmt::Display) -> Result<Self> {
        let model = ModelProto::decode(bytes).map_err(|e| {
            Error::invalid(name, format!("malformed protobuf ({e})"), "a ModelProto")
        })?;
        let graph =
            model.graph.ok_or_else(|| Error::invalid(name, "no graph", "a graph of one node"))?;
        let [node] = graph.node.as_slice() else {
            return Err(Error::invalid(name, format!("{} nodes", graph.node.len()), "one node"));
        };
        let operator = Operator::from_node(node, &Imports::of(&model.opset_import)?)?;
        let (output_names, outputs) = outputs(&graph, node)?;
        let inputs = inputs(&graph, node, &operator)?;
        Ok(Self { operator, inputs, graph_inputs: graph.input.len(), output_names, outputs })
    }

    /// Names of the graph's outputs, in order.
    pub fn output_names(&self) -> &[String] {
        &self.output_names
    }

    /// The call on a data set: a folder with an input_K.pb for each input of the graph.
    ///
    /// # Errors
    ///
    /// Where an input cannot be read or is missing, and the operator's own.
    pub fn call(&self, data: &Path) -> Result<Call> {
        if let Some((index, _)) =
            numbered_files(data, "input")?.pop_if(|(index, _)| *index >= self.graph_inputs)
        {
            let allowed = format!(
                "input_0.pb to input_K.pb for the {} inputs of the graph",
                self.graph_inputs
            );
            return Err(Error::invalid("data set", format_args!("input_{index}.pb"), allowed));
        }
        let inputs = self.inputs.iter().map(|source| match source {
            None => Ok(None),
            Some(source) => source.tensor(data).map(Some),
        });
        Ok(Call::new(self.operator.clone(), inputs.collect::<Result<_>>()?))
    }

    /// Computes the graph's outputs, in the graph's order.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call), and the back end's.
    pub fn run(
        &self,
        call: &Call,
        backend: &dyn gqa_host::backend::Backend,
    ) -> Result<Vec<Tensor>> {
        let count = self.outputs.iter().max().map_or(0, |last| last + 1);
        let computed = call.run(backend, count)?;
        Ok(self.outputs.iter().filter_map(|&output| computed.get(output)?.clone()).collect())
    }
}

impl Source {
    /// The file if there is one, else the constant.
    fn tensor(&self, data: &Path) -> Result<Tensor> {
        match (&self.fed, &self.constant) {
            (Some(fed), constant) => {
                let path = data.join(format!("input_{}.pb", fed.index));
                match constant {
                    Some(constant) if !path.exists() => Ok(constant.clone()),
                    _ => fed.read(&path, self.argument),
                }
            }
            (None, Some(constant)) => Ok(constant.clone()),
            (None, None) => {
                Err(Error::invalid(self.argument, "no tensor", "an input or an initializer"))
            }
        }
    }
}

impl Fed {
    /// Reads the input's file and compares it with the model's declaration.
    fn read(&self, path: &Path, argument: &str) -> Result<Tensor> {
        let what = format!("{argument} (input_{}.pb)", self.index);
        let tensor = read_tensor(path, &what)?;
        if self.dtype.is_some_and(|dtype| dtype != tensor.dtype()) {
            let declared = self.dtype.map_or_else(String::new, |dtype| dtype.to_string());
            return Err(Error::invalid(
                what,
                tensor.dtype(),
                format!("{declared}, as the model declares"),
            ));
        }
        match &self.shape {
            Some(declared) if !fits(tensor.shape(), declared) => {
                let dims: Vec<_> =
                    declared.iter().map(|n| n.map_or("?".to_owned(), |n| n.to_string())).collect();
                let allowed = format!("[{}], as the model declares", dims.join(", "));
                Err(Error::invalid(what, format!("shape {:?}", tensor.shape()), allowed))
            }
            _ => Ok(tensor),
        }
    }
}

/// Whether a shape is one of those declared.
fn fits(shape: &[usize], declared: &[Option<i64>]) -> bool {
    shape.len() == declared.len()
        && shape
            .iter()
            .zip(declared)
            .all(|(&n, declared)| declared.is_none_or(|d| i64::try_from(n) == Ok(d)))
}

/// Where each input of the node comes from.
fn inputs(
    graph: &GraphProto,
    node: &NodeProto,
    operator: &Operator,
) -> Result<Vec<Option<Source>>> {
    let mut fed = HashMap::new();
    for (index, info) in graph.input.iter().enumerate() {
        if fed.insert(info.name.as_str(), (index, info)).is_some() {
            return Err(Error::invalid(
                "graph input",
                format_args!("{:?} twice", info.name),
                "each name once",
            ));
        }
    }
    let mut constants = HashMap::new();
    for initializer in &graph.initializer {
        if constants.insert(initializer.name.as_str(), initializer).is_some() {
            return Err(Error::invalid(
                "initializer",
                format_args!("{:?} twice", initializer.name),
                "each name once",
            ));
        }
    }
    let sources = node.input.iter().zip(operator.input_names()).map(|(name, &argument)| {
        if name.is_empty() {
            return Ok(None);
        }
        let fed = match fed.get(name.as_str()) {
            Some(&(index, info)) => Some(declared(index, info, argument)?),
            None => None,
        };
        let constant = match constants.get(name.as_str()) {
            Some(proto) => Some(from_proto(proto, &format!("{argument} (initializer)"))?),
            None => None,
        };
        if fed.is_none() && constant.is_none() {
            return Err(Error::invalid(
                argument,
                format_args!("{name:?}"),
                "an input of the graph or an initializer",
            ));
        }
        Ok(Some(Source { argument, fed, constant }))
    });
    sources.collect()
}

/// The model's declaration of a graph input.
fn declared(index: usize, info: &ValueInfoProto, argument: &str) -> Result<Fed> {
    let Some(TypeProto { tensor_type: Some(tensor) }) = &info.r#type else {
        return Ok(Fed { index, dtype: None, shape: None });
    };
    let dtype = match tensor.elem_type {
        0 => None,
        number => Some(dtype_of(number).ok_or_else(|| {
            let what = format!("{argument} (graph input {index})");
            Error::invalid(what, element_type_name(number), ELEMENT_TYPES)
        })?),
    };
    let dims =
        tensor.shape.as_ref().map(|shape| shape.dim.iter().map(|dim| dim.dim_value).collect());
    Ok(Fed { index, dtype, shape: dims })
}

/// The graph's outputs: their names, and their indices among the node's outputs.
fn outputs(graph: &GraphProto, node: &NodeProto) -> Result<(Vec<String>, Vec<usize>)> {
    if graph.output.is_empty() {
        return Err(Error::invalid("model", "a graph without outputs", "at least one output"));
    }
    let find = |info: &ValueInfoProto| {
        let position = node.output.iter().position(|name| !name.is_empty() && *name == info.name);
        let position = position.ok_or_else(|| {
            Error::invalid("graph output", format_args!("{:?}", info.name), "an output of the node")
        })?;
        Ok((info.name.clone(), position))
    };
    graph.output.iter().map(find).collect()
}

/// Files `PREFIX_K.pb` of a folder, by K.
pub(crate) fn numbered_files(folder: &Path, prefix: &str) -> Result<Vec<(usize, PathBuf)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix(prefix)?.strip_prefix('_')?.strip_suffix(".pb"));
        if let Some(number) = number.and_then(|number| number.parse().ok()) {
            files.push((number, entry.path()));
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proto::{
        AttributeProto, DimensionProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
        TensorTypeProto,
    };
    use gqa_host::op::Inputs;

    fn int(name: &str, i: i64) -> AttributeProto {
        AttributeProto { name: name.into(), i, r#type: 2, ..AttributeProto::default() }
    }

    fn text(name: &str, word: &str) -> AttributeProto {
        AttributeProto { name: name.into(), s: word.into(), r#type: 3, ..AttributeProto::default() }
    }

    fn value(name: &str, elem_type: i32, dims: Option<&[i64]>) -> ValueInfoProto {
        let dim = |&n: &i64| DimensionProto { dim_value: (n >= 0).then_some(n) };
        let shape = dims.map(|dims| TensorShapeProto { dim: dims.iter().map(dim).collect() });
        let tensor_type = Some(TensorTypeProto { elem_type, shape });
        ValueInfoProto { name: name.into(), r#type: Some(TypeProto { tensor_type }) }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    /// Two query heads on one KV head of size 8, one row, float32; graph outputs output and
    /// present_value.
    pub fn small_model() -> ModelProto {
        let node = NodeProto {
            input: names(&["q", "k", "v", "", "", "seqlens", "total"]),
            output: names(&["out", "", "pv"]),
            op_type: "GroupQueryAttention".into(),
            attribute: vec![int("num_heads", 2), int("kv_num_heads", 1)],
            domain: "com.microsoft".into(),
        };
        let graph = GraphProto {
            node: vec![node],
            initializer: vec![TensorProto {
                name: "total".into(),
                data_type: 6,
                int32_data: vec![1],
                ..TensorProto::default()
            }],
            input: vec![
                value("q", 1, Some(&[1, -1, 16])),
                value("k", 1, None),
                value("v", 0, None),
                value("seqlens", 6, Some(&[1])),
            ],
            output: vec![value("out", 1, None), value("pv", 1, None)],
        };
        let import = OperatorSetIdProto { domain: "com.microsoft".into(), version: 1 };
        ModelProto { graph: Some(graph), opset_import: vec![import] }
    }

    fn changed(change: impl FnOnce(&mut GraphProto, &mut Vec<OperatorSetIdProto>)) -> String {
        let mut model = small_model();
        let mut graph = model.graph.take().unwrap_or_default();
        change(&mut graph, &mut model.opset_import);
        model.graph = Some(graph);
        match Model::decode(&model.encode_to_vec()) {
            Ok(_) => "accepted".into(),
            Err(e) => e.to_string(),
        }
    }

    fn with_attribute(attribute: AttributeProto) -> String {
        changed(|graph, _| graph.node[0].attribute.push(attribute))
    }

    #[test]
    fn absent_inputs_and_outputs_are_empty_names() -> Result<()> {
        let model = Model::decode(&small_model().encode_to_vec())?;
        assert_eq!(model.output_names(), ["out", "pv"]);
        assert_eq!(model.outputs, [0, 2]);
        let fed: Vec<_> = model
            .inputs
            .iter()
            .map(|i| i.as_ref().map(|i| i.fed.as_ref().map(|f| f.index)))
            .collect();
        assert_eq!(
            fed,
            [Some(Some(0)), Some(Some(1)), Some(Some(2)), None, None, Some(Some(3)), Some(None)]
        );
        Ok(())
    }

    #[test]
    fn switches_are_on_at_1_only() {
        for name in ["do_rotary", "rotary_interleaved", "smooth_softmax"] {
            for value in [-1, 0, 1, 2] {
                assert_eq!(with_attribute(int(name, value)), "accepted");
            }
        }
    }

    #[test]
    fn refusals_of_attributes() {
        let cases = [
            (
                int("window", 4),
                "attribute: got \"window\"; allowed: num_heads, kv_num_heads, causal, scale, softcap, local_window_size, sliding_window_cache, do_rotary, rotary_interleaved, smooth_softmax, qk_output, k_quant_type, v_quant_type, kv_cache_bit_width, qk_norm_epsilon, q_norm_epsilon, k_norm_epsilon",
            ),
            (int("scale", 1), "scale: got type int; allowed: type float"),
            (int("num_heads", 2), "num_heads: got the attribute twice; allowed: once"),
            (
                AttributeProto { r#type: 0, ..int("causal", 1) },
                "causal: got type undefined; allowed: type int",
            ),
            (
                AttributeProto { ref_attr_name: "c".into(), ..int("causal", 1) },
                "causal: got a reference to \"c\"; allowed: type int",
            ),
            (
                int("qk_output", 1),
                "qk_output: got 1 without the output output_qk; allowed: 0, or a name for the node's 4th output",
            ),
            (int("sliding_window_cache", 2), "sliding_window_cache: got 2; allowed: 0 or 1"),
            (
                text("v_quant_type", "int\n8"),
                "v_quant_type: got \"int\\n8\"; allowed: NONE, PER_TENSOR, PER_CHANNEL",
            ),
        ];
        for (attribute, want) in cases {
            assert_eq!(with_attribute(attribute), want);
        }
        for word in ["none", "PER_TENSOR", "per_channel"] {
            assert_eq!(with_attribute(text("k_quant_type", word)), "accepted");
        }
    }

    #[test]
    fn refusals_of_models() {
        let no_graph = ModelProto::default().encode_to_vec();
        assert!(
            matches!(Model::decode(&no_graph), Err(e) if e.to_string() == "model: got no graph; allowed: a graph of one node")
        );
        let refused = |change: fn(&mut GraphProto), want: &str| {
            assert_eq!(changed(|graph, _| change(graph)), want)
        };
        refused(|g| g.node.push(NodeProto::default()), "model: got 2 nodes; allowed: one node");
        refused(
            |g| g.node[0].domain.clear(),
            "operator: got \"ai.onnx.GroupQueryAttention\"; allowed: com.microsoft.GroupQueryAttention, com.microsoft.PagedAttention, ai.onnx.Attention, ai.onnx.RotaryEmbedding, ai.onnx.TensorScatter",
        );
        refused(
            |g| g.node[0].op_type = "Add".into(),
            "operator: got \"com.microsoft.Add\"; allowed: com.microsoft.GroupQueryAttention, com.microsoft.PagedAttention, ai.onnx.Attention, ai.onnx.RotaryEmbedding, ai.onnx.TensorScatter",
        );
        refused(
            |g| g.node[0].input[5].clear(),
            "seqlens_k: got no input; allowed: a tensor; it is required",
        );
        refused(
            |g| g.node[0].input.truncate(6),
            "total_sequence_length: got no input; allowed: a tensor; it is required",
        );
        refused(
            |g| g.node[0].input.resize(99, String::new()),
            &format!("inputs: got 99; allowed: at most {}", Inputs::NAMES.len()),
        );
        refused(
            |g| g.node[0].input[1] = "nowhere".into(),
            "key: got \"nowhere\"; allowed: an input of the graph or an initializer",
        );
        refused(
            |g| {
                g.node[0].attribute.remove(0);
            },
            "num_heads: got no attribute of that name; allowed: an int",
        );
        refused(
            |g| g.input[1].name = "q".into(),
            "graph input: got \"q\" twice; allowed: each name once",
        );
        refused(
            |g| g.input[0] = value("q", 4, None),
            "query (graph input 0): got uint16; allowed: float32, float16, bfloat16, float64, float8e4m3fn, int32, int64, int8, uint8, bool",
        );
        refused(
            |g| g.output[0].name = "q".into(),
            "graph output: got \"q\"; allowed: an output of the node",
        );
        refused(
            |g| g.output.clear(),
            "model: got a graph without outputs; allowed: at least one output",
        );
        refused(
            |g| g.initializer[0].dims = vec![1 << 40],
            "total_sequence_length (initializer): got 1 elements for dimensions [1099511627776]; allowed: 1099511627776",
        );
        assert_eq!(
            changed(|_, imports| imports[0].version = 2),
            "opset_import of com.microsoft: got 2; allowed: 1"
        );
        assert_eq!(
            changed(|_, imports| imports.clear()),
            "opset_import of com.microsoft: got none; allowed: 1"
        );
    }

    #[test]
    fn declared_shapes_bind_the_files() -> Result<()> {
        let model = Model::decode(&small_model().encode_to_vec())?;
        let folder =
            tempfile::tempdir().map_err(|e| Error::io(Path::new("temporary folder"), e))?;
        let feed = |index: usize, tensor: &Tensor| {
            let path = folder.path().join(format!("input_{index}.pb"));
            std::fs::write(&path, crate::tensor::encode_tensor("", tensor))
                .map_err(|e| Error::io(&path, e))
        };
        let error = || model.call(folder.path()).err().map_or("accepted".into(), |e| e.to_string());
        assert!(error().starts_with("query (input_0.pb): got "), "{}", error());
        feed(0, &Tensor::zeros(DType::F32, &[1, 1, 8]))?;
        assert_eq!(
            error(),
            "query (input_0.pb): got shape [1, 1, 8]; allowed: [1, ?, 16], as the model declares"
        );
        feed(0, &Tensor::zeros(DType::F16, &[1, 1, 16]))?;
        assert_eq!(
            error(),
            "query (input_0.pb): got float16; allowed: float32, as the model declares"
        );
        feed(0, &Tensor::zeros(DType::F32, &[1, 1, 16]))?;
        feed(1, &Tensor::zeros(DType::F32, &[1, 1, 8]))?;
        feed(2, &Tensor::zeros(DType::F32, &[1, 1, 8]))?;
        feed(3, &Tensor::zeros(DType::I32, &[1]))?;
        assert_eq!(error(), "accepted");
        feed(4, &Tensor::zeros(DType::I32, &[1]))?;
        assert_eq!(
            error(),
            "data set: got input_4.pb; allowed: input_0.pb to input_K.pb for the 4 inputs of the graph"
        );
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(3000))]

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Model::decode(&bytes);
        }

        #[test]
        fn damaged_models_never_panic(
            damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            keep in any::<prop::sample::Index>(),
        ) {
            let mut bytes = small_model().encode_to_vec();
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            let _ = Model::decode(&bytes);
            bytes.truncate(keep.index(bytes.len()));
            let _ = Model::decode(&bytes);
        }
    }
}
