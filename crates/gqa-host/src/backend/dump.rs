//! Dumps the tensors of calls as NumPy `.npy` files.

use super::{Backend, Io};
use gqa_plan::Problem;
use gqa_plan::plan::TensorId;
use gqa_plan::plan::environment::DUMP;
use gqa_tensor::{DType, Error, Result, Tensor};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The folder that `GQA_DUMP` names, if it is set.
pub(super) fn folder() -> Result<Option<&'static Path>> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| std::env::var_os(DUMP).map(PathBuf::from)).as_deref();
    if folder.is_some_and(|folder| folder.as_os_str().is_empty()) {
        return Err(Error::Switch { name: DUMP, got: String::new(), allowed: "a folder" });
    }
    Ok(folder)
}

/// A back end that writes a folder for each call into `folder`: a description (`call.txt`), the
/// inputs before the call (`query.npy`, …; a shared cache as `past_key.npy` and `past_value.npy`),
/// and the outputs after it. NumPy has neither bfloat16 nor 8-bit floats: such tensors are stored
/// as the integers of their bits, for `.view(ml_dtypes.bfloat16)` and
/// `.view(ml_dtypes.float8_e4m3fn)`.
pub struct Dumped<'a> {
    backend: &'a dyn Backend,
    folder: &'a Path,
}

impl<'a> Dumped<'a> {
    /// Dumps the calls of `backend` into `folder`, which is created if missing.
    pub fn new(backend: &'a dyn Backend, folder: &'a Path) -> Self {
        Self { backend, folder }
    }
}

impl Backend for Dumped<'_> {
    fn name(&self) -> &'static str {
        self.backend.name()
    }

    /// Also errs where the folder cannot be written.
    fn run(&self, problem: &Problem, io: &mut Io<'_>) -> Result<()> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let number = CALLS.fetch_add(1, Ordering::Relaxed);
        let call = Folder(self.folder.join(format!("{number:06}-{}", self.name())));
        call.write_inputs(problem, io)?;
        self.backend.run(problem, io)?;
        let mut outputs = io.outputs().filter(|(id, _)| id.spec(problem).is_some());
        outputs.try_for_each(|(id, tensor)| call.write(id.name(), tensor))
    }
}

/// The folder of one call.
struct Folder(PathBuf);

impl Folder {
    fn write_inputs(&self, problem: &Problem, io: &Io<'_>) -> Result<()> {
        let made = std::fs::create_dir_all(&self.0);
        let told =
            made.and_then(|()| std::fs::write(self.0.join("call.txt"), format!("{problem}\n")));
        told.map_err(|error| self.unwritable(error))?;
        for id in TensorId::ALL {
            io.input(id).map_or(Ok(()), |tensor| self.write(id.name(), tensor))?;
        }
        if problem.cache == gqa_plan::CacheBinding::Shared {
            self.write("past_key", io.present_key)?;
            if problem.has_value_tensors() {
                self.write("past_value", io.present_value)?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let file = self.0.join(name).with_extension("npy");
        write_npy(&file, tensor).map_err(|error| self.unwritable(error))
    }

    fn unwritable(&self, error: std::io::Error) -> Error {
        let got = format!("{} ({error})", self.0.display());
        Error::invalid(DUMP, got, "a folder that can be written")
    }
}

/// Format version 1.0: magic, version, length of the header, the header padded to 64 bytes, the
/// elements.
fn write_npy(path: &Path, tensor: &Tensor) -> std::io::Result<()> {
    let descr = match tensor.dtype() {
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::BF16 => "<u2",
        DType::I32 => "<i4",
        DType::I64 => "<i8",
        DType::F64 => "<f8",
        DType::Bool => "|b1",
        DType::I8 => "|i1",
        DType::U8 | DType::F8E4M3 => "|u1",
    };
    let shape: String = tensor.shape().iter().map(|size| format!("{size},")).collect();
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    const PREFIX: usize = 10;
    let padded = (PREFIX + header.len() + 1).next_multiple_of(64) - PREFIX;
    header = format!("{header:<width$}\n", width = padded - 1);
    let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
    file.write_all(b"\x93NUMPY\x01\x00")?;
    file.write_all(&(padded as u16).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    file.write_all(tensor.bytes())?;
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn files_have_the_layout_that_numpy_documents() {
        let path = std::env::temp_dir().join(format!("gqa-{}.npy", std::process::id()));
        write_npy(&path, &array![[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]].into()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let length = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
        assert_eq!((10 + length) % 64, 0);
        let header = std::str::from_utf8(&bytes[10..10 + length]).unwrap();
        assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2,3,), }"));
        assert!(header.ends_with(" \n"));
        assert_eq!(&bytes[10 + length..14 + length], 1.0f32.to_le_bytes());
        assert_eq!(bytes.len(), 10 + length + 24);
    }
}
