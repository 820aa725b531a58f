//! A library that takes the place of ONNX Runtime's `com.microsoft.GroupQueryAttention` and
//! `PagedAttention` in unmodified models.
//!
//! A program calls `SessionOptions.register_custom_ops_library(path)`. ONNX Runtime then calls
//! [`RegisterCustomOps`], which hands it a domain `com.microsoft` with an operator for each
//! provider and combination of element types. For each node of a model it makes a kernel
//! (`kernel`) from the node's attributes, and calls that with the node's tensors.
//!
//! ```text
//! RegisterCustomOps -> operator      which providers and types there are
//!   CreateKernel    -> attributes    of a node, once
//!   KernelCompute   -> kernel
//!                        call, value           tensors in ONNX Runtime's memory
//!                        group_query, paged    the problem, and room for outputs
//!                        cpu, cuda             computes, nothing is copied
//! ```
//!
//! What fails becomes an `OrtStatus` with the text of the error (`api`), and so does a panic.

mod api;
mod attributes;
mod call;
mod cpu;
mod cuda;
mod group_query;
mod kernel;
mod log;
mod operator;
mod paged;
mod schema;
mod threads;
mod value;

use api::{Api, Failure, guarded};
use ort_sys::{OrtApiBase, OrtCustomOpDomain, OrtSessionOptions, OrtStatusPtr};
use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::sync::{LazyLock, OnceLock};

/// ONNX Runtime's entry point: adds our operators to the options of a session.
///
/// # Safety
///
/// `options` and `base` must be what ONNX Runtime calls this function with.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn RegisterCustomOps(
    options: *mut OrtSessionOptions,
    base: *const OrtApiBase,
) -> OrtStatusPtr {
    // SAFETY: as the caller says
    match unsafe { Api::from_base(base) } {
        // SAFETY: as the caller says
        Ok(api) => guarded(api, || unsafe { register(api, options) }),
        Err(status) => status,
    }
}

/// Names, optionality and defaults of the inputs, outputs and attributes of our operators, as JSON:
/// for a test that compares them with ONNX Runtime's own.
#[unsafe(no_mangle)]
pub extern "system" fn GqaOperators() -> *const c_char {
    static TEXT: LazyLock<CString> = LazyLock::new(|| {
        let text = format!("{{{}, {}}}", group_query::SCHEMA, paged::SCHEMA);
        CString::new(text).unwrap_or_default()
    });
    TEXT.as_ptr()
}

/// Adds our operators, unless the options have them already: ONNX Runtime would refuse to make a
/// session with operators of the same names twice.
///
/// # Safety
///
/// `options` must be those of a session.
unsafe fn register(api: Api, options: *mut OrtSessionOptions) -> Result<(), Failure> {
    /// An entry of the options, which are copied with their operators.
    const REGISTERED: &CStr = c"gqa.registered";
    log::start()?;
    let (table, key, mut entries) = (api.table(), REGISTERED.as_ptr(), 0);
    // SAFETY: the options are those of a session
    api.check(unsafe { (table.HasSessionConfigEntry)(options, key, &mut entries) })?;
    if entries > 0 {
        return Ok(());
    }
    let domain = domain(api)?;
    // SAFETY: the domain and its operators are never freed
    api.check(unsafe { (table.AddCustomOpDomain)(options, domain) })?;
    // SAFETY: ONNX Runtime copies both texts
    api.check(unsafe { (table.AddSessionConfigEntry)(options, key, c"1".as_ptr()) })
}

/// The domain with our operators, which all sessions share. It is made once: sessions refer to it
/// as long as they live, and ONNX Runtime tells nobody when the last of them ends.
fn domain(api: Api) -> Result<*mut OrtCustomOpDomain, Failure> {
    struct Domain(*mut OrtCustomOpDomain);
    // SAFETY: sessions only read a domain to which nothing is added any more
    unsafe impl Send for Domain {}
    // SAFETY: as above
    unsafe impl Sync for Domain {}
    static DOMAIN: OnceLock<Domain> = OnceLock::new();

    if let Some(domain) = DOMAIN.get() {
        return Ok(domain.0);
    }
    let mut domain = ptr::null_mut();
    // SAFETY: the name ends with a zero, and the operators live as long as the process
    unsafe {
        api.check((api.table().CreateCustomOpDomain)(c"com.microsoft".as_ptr(), &mut domain))?;
        for operator in operator::all() {
            api.check((api.table().CustomOpDomain_Add)(domain, operator.base()))?;
        }
    }
    // If two threads create a domain at the same time, one of the domains stays unused.
    Ok(DOMAIN.get_or_init(|| Domain(domain)).0)
}
