//! Which operators there are: one for each combination of element types.

use crate::api::{Api, guarded};
use crate::attributes::Node;
use crate::kernel::{INPUTS, Kernel, OUTPUTS};
use crate::value::{Context, element_type};
use gqa_host::DType;
use ort_sys::OrtCustomOpInputOutputCharacteristic::{self, INPUT_OUTPUT_OPTIONAL};
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

/// What ONNX Runtime asks about an operator, and what it is.
#[repr(C)]
pub struct Operator {
    /// First, as ONNX Runtime hands back a pointer to it.
    base: OrtCustomOp,
    dtype: DType,
    cache: DType,
}

/// All of them. Of several that fit a node ONNX Runtime takes the first, so that the cache which a
/// node without past_key makes is not quantized.
pub fn all() -> &'static [Operator] {
    static ALL: LazyLock<Vec<Operator>> = LazyLock::new(|| {
        let plain = FLOATS.map(|dtype| Operator::new(dtype, dtype));
        let quantized = FLOATS
            .iter()
            .flat_map(|&dtype| QUANTIZED.iter().map(move |&cache| Operator::new(dtype, cache)));
        plain.into_iter().chain(quantized).collect()
    });
    &ALL
}

impl Operator {
    const fn new(dtype: DType, cache: DType) -> Self {
        let base = OrtCustomOp {
            version: ORT_API_VERSION,
            CreateKernel: None,
            GetName: Some(name),
            GetExecutionProviderType: Some(provider),
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
            GetMayInplace: None,
            ReleaseMayInplace: None,
            GetAliasMap: None,
            ReleaseAliasMap: None,
        };
        Self { base, dtype, cache }
    }

    /// As ONNX Runtime takes it.
    pub fn base(&self) -> *const OrtCustomOp {
        &raw const self.base
    }

    fn input_type(&self, index: usize) -> DType {
        match INPUTS[index] {
            "past_key" | "past_value" => self.cache,
            "seqlens_k" | "total_sequence_length" => DType::I32,
            "position_ids" => DType::I64,
            "k_scale" | "v_scale" => DType::F32,
            _ => self.dtype,
        }
    }

    fn output_type(&self, index: usize) -> DType {
        match OUTPUTS[index] {
            "present_key" | "present_value" => self.cache,
            _ => self.dtype,
        }
    }
}

/// # Safety
///
/// `op` must be [`Operator::base`].
unsafe fn operator<'a>(op: *const OrtCustomOp) -> &'a Operator {
    // SAFETY: the base is the operator's first field
    unsafe { &*op.cast() }
}

unsafe extern "system" fn name(_: *const OrtCustomOp) -> *const c_char {
    c"GroupQueryAttention".as_ptr()
}

unsafe extern "system" fn provider(_: *const OrtCustomOp) -> *const c_char {
    c"CPUExecutionProvider".as_ptr()
}

unsafe extern "system" fn input_count(_: *const OrtCustomOp) -> usize {
    INPUTS.len()
}

unsafe extern "system" fn output_count(_: *const OrtCustomOp) -> usize {
    OUTPUTS.len()
}

unsafe extern "system" fn input_type(
    op: *const OrtCustomOp,
    index: usize,
) -> ONNXTensorElementDataType {
    // SAFETY: ONNX Runtime has it from `all`
    element_type(unsafe { operator(op) }.input_type(index))
}

unsafe extern "system" fn output_type(
    op: *const OrtCustomOp,
    index: usize,
) -> ONNXTensorElementDataType {
    // SAFETY: ONNX Runtime has it from `all`
    element_type(unsafe { operator(op) }.output_type(index))
}

unsafe extern "system" fn input_characteristic(
    _: *const OrtCustomOp,
    index: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    match INPUTS[index] {
        "query" | "seqlens_k" | "total_sequence_length" => {
            OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED
        }
        _ => INPUT_OUTPUT_OPTIONAL,
    }
}

unsafe extern "system" fn output_characteristic(
    _: *const OrtCustomOp,
    index: usize,
) -> OrtCustomOpInputOutputCharacteristic {
    match OUTPUTS[index] {
        "output" => OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED,
        _ => INPUT_OUTPUT_OPTIONAL,
    }
}

unsafe extern "system" fn input_memory(_: *const OrtCustomOp, _: usize) -> OrtMemType {
    OrtMemType::OrtMemTypeDefault
}

unsafe extern "system" fn not_variadic(_: *const OrtCustomOp) -> c_int {
    0
}

/// The operator set that brought it.
unsafe extern "system" fn version(_: *const OrtCustomOp) -> c_int {
    1
}

unsafe extern "system" fn create(
    _: *const OrtCustomOp,
    table: *const OrtApi,
    info: *const OrtKernelInfo,
    to: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: both are ONNX Runtime's
    let (api, node) = unsafe {
        let api = Api::from_table(table);
        (api, Node::new(api, info))
    };
    guarded(api, || {
        let kernel = Box::new(Kernel::new(api, node)?);
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
