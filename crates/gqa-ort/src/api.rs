//! ONNX Runtime's table of functions, and what becomes of failures.

use gqa_host::Error;
use ort_sys::{ORT_API_VERSION, OrtApi, OrtApiBase, OrtErrorCode, OrtStatusPtr};
use std::any::Any;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// ONNX Runtime's functions.
#[derive(Clone, Copy)]
pub struct Api(&'static OrtApi);

/// Why a call into this library or out of it failed.
pub enum Failure {
    /// We say so.
    Ours(Error),
    /// ONNX Runtime says so. It owns nothing: [`Api::status`] hands it on.
    Theirs(OrtStatusPtr),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl Api {
    /// The table of the version that this library is made for; where ONNX Runtime is older, the
    /// status that says so.
    ///
    /// # Safety
    ///
    /// `base` must be ONNX Runtime's, which lives as long as the process.
    pub unsafe fn from_base(base: *const OrtApiBase) -> Result<Self, OrtStatusPtr> {
        // SAFETY: as the caller says; tables are part of ONNX Runtime's code. Each version has the
        // functions of those before it at the same places, and the first can make a status: of
        // such a table nothing else is read.
        unsafe {
            let get = (*base).GetApi;
            if let Some(table) = get(ORT_API_VERSION).as_ref() {
                return Ok(Self(table));
            }
            let version = CStr::from_ptr(((*base).GetVersionString)()).to_string_lossy();
            let text = format!("ONNX Runtime: got version {version}; allowed: 1.24 or newer");
            let create = (&raw const (*get(1)).CreateStatus).read();
            Err(create(OrtErrorCode::ORT_FAIL, c_text(&text).as_ptr()))
        }
    }

    /// # Safety
    ///
    /// `table` must be ONNX Runtime's of that version, or a later one.
    pub unsafe fn from_table(table: *const OrtApi) -> Self {
        // SAFETY: as the caller says; the table is part of ONNX Runtime's code
        Self(unsafe { &*table })
    }

    /// The functions.
    pub fn table(self) -> &'static OrtApi {
        self.0
    }

    /// Turns a status into a result.
    pub fn check(self, status: OrtStatusPtr) -> Result<(), Failure> {
        if status.0.is_null() { Ok(()) } else { Err(Failure::Theirs(status)) }
    }

    /// Whether a call succeeded; frees the status.
    pub fn succeeds(self, status: OrtStatusPtr) -> bool {
        // SAFETY: ReleaseStatus takes null, and a status that nobody else has
        unsafe { (self.0.ReleaseStatus)(status.0) };
        status.0.is_null()
    }

    /// The status that ONNX Runtime gets for a failure.
    fn status(self, failure: Failure) -> OrtStatusPtr {
        match failure {
            Failure::Theirs(status) => status,
            Failure::Ours(error) => self.new_status(code(&error), &error.to_string()),
        }
    }

    fn new_status(self, code: OrtErrorCode, text: &str) -> OrtStatusPtr {
        // SAFETY: the text ends with a zero and is copied
        unsafe { (self.0.CreateStatus)(code, c_text(text).as_ptr()) }
    }
}

fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

fn code(error: &Error) -> OrtErrorCode {
    match error {
        Error::Invalid { .. } | Error::Switch { .. } => OrtErrorCode::ORT_INVALID_ARGUMENT,
        Error::NoKernel(_) => OrtErrorCode::ORT_NOT_IMPLEMENTED,
        _ => OrtErrorCode::ORT_FAIL,
    }
}

/// Runs a callback of ONNX Runtime. Errors and panics become a status.
pub fn guarded(api: Api, run: impl FnOnce() -> Result<(), Failure>) -> OrtStatusPtr {
    // After a panic nothing inconsistent is used: a call does not change its kernel.
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => OrtStatusPtr(ptr::null_mut()),
        Ok(Err(failure)) => api.status(failure),
        Err(panic) => {
            let text = format!("gqa panicked, which is a defect of it: {}", said(&*panic));
            api.new_status(OrtErrorCode::ORT_RUNTIME_EXCEPTION, &text)
        }
    }
}

/// What a panic says.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text")
}
