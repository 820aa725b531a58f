//! The tensors of a call.

use crate::api::Failure;
use crate::schema::{Schema, Types};
use crate::value::{Context, Value};
use gqa_host::plan::TensorId;
use gqa_host::{Error, Problem, TensorDesc};

/// What a call reads, in the order of its operator's inputs.
pub struct Given {
    schema: &'static Schema,
    types: Types,
    values: Vec<Option<Value>>,
}

impl Given {
    /// All inputs.
    pub fn read(context: Context, schema: &'static Schema, types: Types) -> Result<Self, Failure> {
        let inputs = schema.inputs.iter().enumerate().take(context.inputs()?);
        let values = inputs.map(|(index, input)| context.input(index, input.name));
        let mut values = values.collect::<Result<Vec<_>, _>>()?;
        values.resize(schema.inputs.len(), None);
        Ok(Self { schema, types, values })
    }

    /// The input of that name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        let index = self.schema.inputs.iter().position(|input| input.name == name)?;
        self.values[index].as_ref()
    }

    /// The same, which the call cannot do without.
    pub fn required(&self, name: &'static str) -> Result<&Value, Error> {
        let missing = || Error::invalid(name, "no input", "a tensor; it is required");
        self.get(name).ok_or_else(missing)
    }

    /// Type and shape of the input.
    pub fn desc(&self, name: &str) -> Option<TensorDesc<'_>> {
        self.get(name).map(Value::desc)
    }

    /// Type and shape of an input that the call cannot do without.
    pub fn required_desc(&self, name: &'static str) -> Result<TensorDesc<'_>, Error> {
        self.required(name).map(Value::desc)
    }

    /// The inputs that are tensors of the call.
    pub fn by_role(&self) -> impl Iterator<Item = (TensorId, &Value)> {
        let inputs = self.schema.inputs.iter().zip(&self.values);
        inputs.filter_map(|(input, value)| Some((input.role?, value.as_ref()?)))
    }
}

/// What a call writes; `None` where the node has no such output.
pub struct Made {
    /// output
    pub output: Option<Value>,
    /// present_key, or key_cache
    pub present_key: Option<Value>,
    /// present_value, or value_cache
    pub present_value: Option<Value>,
    /// output_qk
    pub output_qk: Option<Value>,
}

impl Made {
    /// The output in that role.
    pub fn get(&self, id: TensorId) -> Option<&Value> {
        match id {
            TensorId::Output => self.output.as_ref(),
            TensorId::PresentKey => self.present_key.as_ref(),
            TensorId::PresentValue => self.present_value.as_ref(),
            TensorId::OutputQk => self.output_qk.as_ref(),
            _ => None,
        }
    }
}

/// Errs where an output overlaps another tensor of the call. An input that is updated in place must
/// have exactly the memory of its output.
pub fn check_apart(given: &Given, made: &Made) -> Result<(), Error> {
    let Given { schema, values, .. } = given;
    let outputs = schema.outputs.iter();
    let outputs: Vec<_> =
        outputs.filter_map(|output| Some((output, made.get(output.role)?))).collect();
    for (i, &(output, written)) in outputs.iter().enumerate() {
        for (input, read) in schema.inputs.iter().zip(values) {
            let Some(read) = read else { continue };
            let in_place = input.role.is_some_and(|role| is_updated(role, output.role));
            if read.overlaps(written) && !(in_place && read.is(written)) {
                let exactly = if in_place { ", or exactly that memory" } else { "" };
                return Err(overlap(output.name, input.name, exactly));
            }
        }
        let other = outputs[..i].iter().find(|(_, other)| other.overlaps(written));
        if let Some((other, _)) = other {
            return Err(overlap(output.name, other.name, ""));
        }
    }
    Ok(())
}

/// Whether an input may be updated in place: it is the cache, or past_key or past_value.
fn is_updated(input: TensorId, output: TensorId) -> bool {
    match output {
        TensorId::PresentKey => [output, TensorId::PastKey].contains(&input),
        TensorId::PresentValue => [output, TensorId::PastValue].contains(&input),
        _ => false,
    }
}

fn overlap(output: &'static str, other: &str, exactly: &str) -> Error {
    let got = format!("memory that overlaps that of {other}");
    Error::invalid(output, got, format!("memory of its own{exactly}"))
}

/// The output that receives a problem's tensor, in ONNX Runtime's memory or where the session's
/// caller wants it; `None` if the problem or the node lacks it.
pub fn room(
    context: Context,
    given: &Given,
    id: TensorId,
    problem: &Problem,
) -> Result<Option<Value>, Failure> {
    let mut outputs = given.schema.outputs.iter().enumerate();
    let output = outputs.find(|(_, output)| output.role == id);
    let (Some((index, output)), Some(spec)) = (output, id.spec(problem)) else { return Ok(None) };
    // ONNX Runtime has room for elements of the kernel's type.
    let dtype = given.types.of(output.kind);
    if dtype != spec.dtype {
        return Err(Error::invalid(id.name(), dtype, spec.dtype).into());
    }
    // SAFETY: the output is of the type that the kernel has
    unsafe { context.output(index, id.name(), spec) }
}
