//! A node's attributes.

use crate::api::{Api, Failure};
use crate::schema::{Absent, Literal, Schema};
use gqa_host::Error;
use gqa_host::op::{GroupQueryAttention, PagedAttention, QuantType};
use ort_sys::{OrtKernelInfo, OrtStatusPtr};
use std::ffi::{CStr, c_char};
use std::ptr;

/// ONNX Runtime's functions that tell how many names a list of a node has, and one of them.
type Count = unsafe extern "system" fn(*const OrtKernelInfo, *mut usize) -> OrtStatusPtr;
type Name =
    unsafe extern "system" fn(*const OrtKernelInfo, usize, *mut c_char, *mut usize) -> OrtStatusPtr;

/// A node, as ONNX Runtime shows it when it makes a kernel.
#[derive(Clone, Copy)]
pub struct Node {
    /// ONNX Runtime's functions.
    pub api: Api,
    /// ONNX Runtime's handle.
    pub info: *const OrtKernelInfo,
    /// Which attributes it may have.
    schema: &'static Schema,
}

/// An attribute of a node.
enum Attribute {
    Int(i64),
    Float(f32),
    Text(String),
}

impl From<Literal> for Attribute {
    fn from(literal: Literal) -> Self {
        match literal {
            Literal::Int(number) => Self::Int(number),
            Literal::Float(number) => Self::Float(number),
            Literal::Text(text) => Self::Text(text.to_owned()),
        }
    }
}

impl Attribute {
    /// The error for an attribute of another type than the operator has.
    fn instead_of(&self, name: &'static str, allowed: &str) -> Error {
        let got = match self {
            Self::Int(number) => format!("the integer {number}"),
            Self::Float(number) => format!("the float {number}"),
            Self::Text(text) => format!("the string {text:?}"),
        };
        Error::invalid(name, got, allowed)
    }
}

impl Node {
    /// # Safety
    ///
    /// `info` must be what ONNX Runtime makes a kernel with, and outlive the value.
    pub unsafe fn new(api: Api, info: *const OrtKernelInfo, schema: &'static Schema) -> Self {
        Self { api, info, schema }
    }

    /// Whether the node has that output.
    fn has_output(self, index: usize) -> Result<bool, Failure> {
        let table = self.api.table();
        self.has(index, table.KernelInfo_GetOutputCount, table.KernelInfo_GetOutputName)
    }

    /// Whether a list of the node's names has one there that is not empty.
    fn has(self, index: usize, list_count: Count, list_name: Name) -> Result<bool, Failure> {
        let (mut count, mut bytes) = (0, 0);
        // SAFETY: the node is ONNX Runtime's, and the results have room
        unsafe {
            self.api.check(list_count(self.info, &mut count))?;
            if index >= count {
                return Ok(false);
            }
            self.api.check(list_name(self.info, index, ptr::null_mut(), &mut bytes))?;
        }
        // With the zero at its end.
        Ok(bytes > 1)
    }

    /// The attribute, whatever its type. ONNX Runtime returns a value only if the caller names its
    /// type.
    fn attribute(self, name: &CStr) -> Option<Attribute> {
        let (api, table, name) = (self.api, self.api.table(), name.as_ptr());
        let (mut int, mut float, mut size) = (0, 0.0, 0);
        // SAFETY: the node is ONNX Runtime's, names are zero-terminated, and the result buffers are
        // large enough: for a string as large as the first call says
        unsafe {
            if api.succeeds((table.KernelInfoGetAttribute_int64)(self.info, name, &mut int)) {
                return Some(Attribute::Int(int));
            }
            if api.succeeds((table.KernelInfoGetAttribute_float)(self.info, name, &mut float)) {
                return Some(Attribute::Float(float));
            }
            let text = table.KernelInfoGetAttribute_string;
            if !api.succeeds(text(self.info, name, ptr::null_mut(), &mut size)) {
                return None;
            }
            let mut bytes = vec![0u8; size];
            if !api.succeeds(text(self.info, name, bytes.as_mut_ptr().cast(), &mut size)) {
                return None;
            }
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            Some(Attribute::Text(String::from_utf8_lossy(&bytes[..end]).into_owned()))
        }
    }

    /// What the node has, or what it means without that.
    fn value(self, name: &'static CStr) -> Result<Attribute, Error> {
        let declared = self.schema.attributes.iter().find(|declared| declared.name == name);
        let absent = declared.map_or(Absent::Refused, |declared| declared.absent);
        match (self.attribute(name), absent) {
            (Some(value), _) => Ok(value),
            (None, Absent::Default(value) | Absent::Means(value)) => Ok(value.into()),
            (None, Absent::As(other)) => self.value(other),
            (None, Absent::Refused) => {
                Err(Error::invalid(utf8(name), "no attribute", "an integer; it is required"))
            }
        }
    }

    fn int(self, name: &'static CStr) -> Result<i64, Error> {
        match self.value(name)? {
            Attribute::Int(number) => Ok(number),
            other => Err(other.instead_of(utf8(name), "an integer")),
        }
    }

    fn float(self, name: &'static CStr) -> Result<f32, Error> {
        match self.value(name)? {
            Attribute::Float(number) => Ok(number),
            other => Err(other.instead_of(utf8(name), "a float")),
        }
    }

    fn text(self, name: &'static CStr) -> Result<String, Error> {
        match self.value(name)? {
            Attribute::Text(text) => Ok(text),
            other => Err(other.instead_of(utf8(name), "a string")),
        }
    }

    /// Only 1 turns something on.
    fn on(self, name: &'static CStr) -> Result<bool, Error> {
        Ok(self.int(name)? == 1)
    }

    /// k_quant_type or v_quant_type, in letters of either case.
    fn quant_type(self, name: &'static CStr) -> Result<QuantType, Error> {
        let text = self.text(name)?;
        let all = [QuantType::None, QuantType::PerTensor, QuantType::PerChannel];
        let known = all.into_iter().find(|how| text.eq_ignore_ascii_case(&how.to_string()));
        let allowed = "NONE, PER_TENSOR or PER_CHANNEL";
        known.ok_or_else(|| Error::invalid(utf8(name), format!("{text:?}"), allowed))
    }

    /// qk_output, which asks for the node's 4th output.
    fn qk_output(self) -> Result<i64, Failure> {
        let wanted = self.int(c"qk_output")?;
        if wanted != 0 && !self.has_output(3)? {
            let got = format!("{wanted} without the output output_qk");
            let allowed = "0, or a name for the node's 4th output";
            return Err(Error::invalid("qk_output", got, allowed).into());
        }
        Ok(wanted)
    }

    /// The operator of a GroupQueryAttention node.
    pub fn group_query_attention(self) -> Result<GroupQueryAttention, Failure> {
        let heads = [self.int(c"num_heads")?, self.int(c"kv_num_heads")?];
        Ok(GroupQueryAttention::new(heads[0], heads[1])
            .causal(self.int(c"causal")?)
            .scale(self.float(c"scale")?)
            .softcap(self.float(c"softcap")?)
            .local_window_size(self.int(c"local_window_size")?)
            .sliding_window_cache(self.on(c"sliding_window_cache")?)
            .do_rotary(self.on(c"do_rotary")?)
            .rotary_interleaved(self.on(c"rotary_interleaved")?)
            .smooth_softmax(self.on(c"smooth_softmax")?)
            .qk_output(self.qk_output()?)
            .k_quant_type(self.quant_type(c"k_quant_type")?)
            .v_quant_type(self.quant_type(c"v_quant_type")?)
            .kv_cache_bit_width(self.int(c"kv_cache_bit_width")?)
            .qk_norm_epsilon(self.float(c"qk_norm_epsilon")?)
            .q_norm_epsilon(self.float(c"q_norm_epsilon")?)
            .k_norm_epsilon(self.float(c"k_norm_epsilon")?))
    }

    /// The operator of a PagedAttention node.
    pub fn paged_attention(self) -> Result<PagedAttention, Failure> {
        let layout = self.text(c"kv_cache_layout")?;
        if layout == "LATENT" && self.has_output(2)? {
            let allowed = "none, as kv_cache_layout is LATENT";
            return Err(Error::invalid("value_cache_out", "an output", allowed).into());
        }
        let heads = [self.int(c"num_heads")?, self.int(c"kv_num_heads")?];
        Ok(PagedAttention::new(heads[0], heads[1])
            .is_causal(self.int(c"is_causal")?)
            .scale(self.float(c"scale")?)
            .softcap(self.float(c"softcap")?)
            .local_window_size(self.int(c"local_window_size")?)
            .do_rotary(self.on(c"do_rotary")?)
            .rotary_interleaved(self.on(c"rotary_interleaved")?)
            .k_quant_type(self.quant_type(c"k_quant_type")?)
            .v_quant_type(self.quant_type(c"v_quant_type")?)
            .k_cache_dtype(&self.text(c"k_cache_dtype")?)
            .v_cache_dtype(&self.text(c"v_cache_dtype")?)
            .kv_cache_layout(&layout)
            .v_head_size(self.int(c"v_head_size")?)
            .rotary_offset(self.int(c"rotary_offset")?)
            .qk_norm_epsilon(self.float(c"qk_norm_epsilon")?))
    }
}

/// Names of attributes are ASCII.
fn utf8(name: &'static CStr) -> &'static str {
    name.to_str().unwrap_or_default()
}
