//! Which operators there are: one for each provider and combination of element types.

use crate::api::{Api, guarded};
use crate::attributes::Node;
use crate::kernel::{Kernel, Provider};
use crate::schema::{Schema, Types};
use crate::value::{Context, element_type};
use crate::{group_query, paged};
use gqa_host::DType;
use ort_sys::OrtCustomOpInputOutputCharacteristic::{
    self, INPUT_OUTPUT_OPTIONAL, INPUT_OUTPUT_REQUIRED,
};
use ort_sys::{
    ONNXTensorElementDataType, ORT_API_VERSION, OrtApi, OrtCustomOp, OrtKernelContext,
    OrtKernelInfo, OrtMemType, OrtStatusPtr,
};
use std::ffi::{c_char, c_int, c_void};
use std::sync::LazyLock;

/// Types of query, key, value and output.
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
/// Types of a quantized KV cache.
const QUANTIZED: [DType; 3] = [DType::I8, DType::U8, DType::F8E4M3];

/// An operator, as ONNX Runtime queries it.
#[repr(C)]
pub struct Operator {
    /// First, as ONNX Runtime hands back a pointer to it.
    base: OrtCustomOp,
    schema: &'static Schema,
    provider: Provider,
    types: Types,
}

/// All operators. If several fit a node, ONNX Runtime takes the first. So the types without
/// quantization come first: a node without past_key makes a cache that is not quantized. A session
/// needs the operators for all of its providers. If one provider lacks ours, ONNX Runtime tries its
/// own kernel there, which fails because that does not fit our schema.
pub fn all() -> &'static [Operator] {
    static ALL: LazyLock<Vec<Operator>> = LazyLock::new(|| {
        let mut all = Vec::new();
        for schema in [&group_query::SCHEMA, &paged::SCHEMA] {
            for provider in [Provider::Cpu, Provider::Cuda] {
                let new =
                    |element, cache| Operator::new(schema, provider, Types { element, cache });
                all.extend(FLOATS.map(|element| new(element, element)));
                all.extend(
                    FLOATS.iter().flat_map(|&element| QUANTIZED.map(|cache| new(element, cache))),
                );
            }
        }
        all
    });
    &ALL
}

impl Operator {
    fn new(schema: &'static Schema, provider: Provider, types: Types) -> Self {
        let base = OrtCustomOp {
            version: ORT_API_VERSION,
            CreateKernel: None,
            GetName: Some(name),
            GetExecutionProviderType: Some(provider_name),
            GetInputType: Some(input_type),
            GetInputTypeCount: Some(input_count),
            GetOutputType: Some(output_type),
            GetOutputTypeCount: Some(output_count),
            KernelCompute: None,
            KernelDestroy: Some(destroy),
            GetInputCharacteristic: Some(input_characteristic),
            GetOutputCharacteristic: Some(output_characteristic),
            GetInputMemoryType: Some(input_memory),
            GetVariadicInputMinArity: Some(not_variadic),
            GetVariadicInputHomogeneity: Some(not_variadic),
            GetVariadicOutputMinArity: Some(not_variadic),
            GetVariadicOutputHomogeneity: Some(not_variadic),
            CreateKernelV2: Some(create),
            KernelComputeV2: Some(compute),
            InferOutputShapeFn: None,
            GetStartVersion: Some(version),
            GetEndVersion: None,
            GetMayInplace: schema.in_place.then_some(caches),
            ReleaseMayInplace: schema.in_place.then_some(keep_caches),
            GetAliasMap: None,
            ReleaseAliasMap: None,
        };
        Self { base, schema, provider, types }
    }

    /// As ONNX Runtime takes it.
    pub fn base(&self) -> *const OrtCustomOp {
        &raw const self.base
    }
}

/// # Safety
///
/// `op` must be [`Operator::base`].
unsafe fn operator<'a>(op: *const OrtCustomOp) -> &'a Operator {
    // SAFETY: the base is the operator's first field
    unsafe { &*op.cast() }
}

unsafe extern "system" fn name(op: *const OrtCustomOp) -> *const c_char {
    // SAFETY: ONNX Runtime has it from `all`
    unsafe { operator(op) }.schema.name.as_ptr()
}

unsafe extern "system" fn provider_name(op: *const OrtCustomOp) -> *const c_char {
    // SAFETY: ONNX Runtime has it from `all`
    let name = match unsafe { operator(op) }.provider {
        Provider::Cpu => c"CPUExecutionProvider",
        Provider::Cuda => c"CUDAExecutionProvider",
    };
    name.as_ptr()
}

unsafe extern "system" fn input_count(op: *const OrtCustomOp) -> usize {
    // SAFETY: ONNX Runtime has it from `all`
    unsafe { operator(op) }.schema.inputs.len()
}

unsafe extern "system" fn output_count(op: *const OrtCustomOp) -> usize {
    // SAFETY: ONNX Runtime has it from `all`
    unsafe { operator(op) }.schema.outputs.len()
}

unsafe extern "system" fn input_type(
    op: *const OrtCustomOp,
    index: usize,
) -> ONNXTensorElementDataType {
    // SAFETY: ONNX Runtime has it from `all`
    let Operator { schema, types, .. } = unsafe { operator(op) };
    element_type(types.of(schema.inputs[index].kind))
}

unsafe extern "system" fn output_type(
    op: *const OrtCustomOp,
    index: usize,
) -> ONNXTensorElementDataType {
    // SAFETY: ONNX Runtime has it from `all`
    let Operator { schema, types, .. } = unsafe { operator(op) };
    element_type(types.of(schema.outputs[index].kind))
}

unsafe extern "system" fn input_characteristic(
    op: *const OrtCustomOp,
    index: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    // SAFETY: ONNX Runtime has it from `all`
    match unsafe { operator(op) }.schema.inputs[index].required {
        true => INPUT_OUTPUT_REQUIRED,
        false => INPUT_OUTPUT_OPTIONAL,
    }
}

unsafe extern "system" fn output_characteristic(
    _: *const OrtCustomOp,
    index: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    if index == 0 { INPUT_OUTPUT_REQUIRED } else { INPUT_OUTPUT_OPTIONAL }
}

unsafe extern "system" fn input_memory(op: *const OrtCustomOp, index: usize) -> OrtMemType {
    // SAFETY: ONNX Runtime has it from `all`
    match unsafe { operator(op) }.schema.inputs[index].role {
        Some(_) => OrtMemType::OrtMemTypeDefault,
        None => OrtMemType::OrtMemTypeCPUInput,
    }
}

/// Inputs 3 and 4 are outputs 1 and 2.
unsafe extern "system" fn caches(inputs: *mut *mut c_int, outputs: *mut *mut c_int) -> usize {
    static INPUTS: [c_int; 2] = [3, 4];
    static OUTPUTS: [c_int; 2] = [1, 2];
    // SAFETY: ONNX Runtime's array has room for the pointers, and it only reads what they point to
    unsafe {
        *inputs = INPUTS.as_ptr().cast_mut();
        *outputs = OUTPUTS.as_ptr().cast_mut();
    }
    INPUTS.len()
}

/// What `caches` gives is not freed.
unsafe extern "system" fn keep_caches(_: *mut c_int, _: *mut c_int) {}

unsafe extern "system" fn not_variadic(_: *const OrtCustomOp) -> c_int {
    0
}

/// The operator set that brought it.
unsafe extern "system" fn version(_: *const OrtCustomOp) -> c_int {
    1
}

unsafe extern "system" fn create(
    op: *const OrtCustomOp,
    table: *const OrtApi,
    info: *const OrtKernelInfo,
    to: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: all three are ONNX Runtime's, which has the operator from `all`
    let (Operator { schema, provider, types, .. }, api, node) = unsafe {
        let api = Api::from_table(table);
        let op = operator(op);
        (op, api, Node::new(api, info, op.schema))
    };
    guarded(api, || {
        let kernel = Box::new(Kernel::new(schema, *types, *provider, node)?);
        // SAFETY: ONNX Runtime has room for the pointer
        unsafe { *to = Box::into_raw(kernel).cast() };
        Ok(())
    })
}

unsafe extern "system" fn compute(
    kernel: *mut c_void,
    context: *mut OrtKernelContext,
) -> OrtStatusPtr {
    // SAFETY: the kernel is one of `create`, which several threads may use at a time
    let kernel = unsafe { &*kernel.cast::<Kernel>() };
    // SAFETY: the call has not returned before this function has
    guarded(kernel.api, || unsafe { kernel.compute(Context::new(kernel.api, context)) })
}

unsafe extern "system" fn destroy(kernel: *mut c_void) {
    // SAFETY: the kernel is one of `create`, and nobody uses it any more
    drop(unsafe { Box::from_raw(kernel.cast::<Kernel>()) });
}
