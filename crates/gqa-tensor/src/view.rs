//! Borrowed tensors: slices of one of the element types.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use float8::F8E4M3;
use half::{bf16, f16};

/// One row per element type: its variant, and the type.
macro_rules! views {
    ($($(#[$doc:meta])* $variant:ident($t:ty);)*) => {
        /// The elements of an input tensor, of the problem's type. As many as the tensor has, or if
        /// the problem has strides, as many as these reach.
        ///
        /// ```
        /// use gqa_tensor::{DType, TensorView};
        /// let numbers = vec![1.0f32, 2.0];
        /// let view = TensorView::from(&numbers[..]);
        /// assert_eq!((view.dtype(), view.len()), (DType::F32, 2));
        /// ```
        #[derive(Clone, Copy, Debug)]
                pub enum TensorView<'a> {
            $($(#[$doc])* $variant(&'a [$t]),)*
        }

        /// The elements of a tensor, to be written.
        #[derive(Debug)]
                pub enum TensorViewMut<'a> {
            $($(#[$doc])* $variant(&'a mut [$t]),)*
        }

        $(
            impl<'a> From<&'a [$t]> for TensorView<'a> {
                fn from(elements: &'a [$t]) -> Self {
                    Self::$variant(elements)
                }
            }

            impl<'a> From<&'a mut [$t]> for TensorViewMut<'a> {
                fn from(elements: &'a mut [$t]) -> Self {
                    Self::$variant(elements)
                }
            }
        )*

        impl<'a> TensorView<'a> {
            /// Element type.
            pub fn dtype(self) -> DType {
                match self {
                    $(Self::$variant(_) => DType::$variant,)*
                }
            }

            /// Number of elements.
            pub fn len(self) -> usize {
                match self {
                    $(Self::$variant(elements) => elements.len(),)*
                }
            }

            /// The elements' bytes.
            pub fn bytes(self) -> &'a [u8] {
                match self {
                    $(Self::$variant(elements) => bytemuck::cast_slice(elements),)*
                }
            }
        }

        impl TensorViewMut<'_> {
            /// The same elements, to be read.
            pub fn view(&self) -> TensorView<'_> {
                match self {
                    $(Self::$variant(elements) => TensorView::$variant(elements),)*
                }
            }

            /// The same elements, for a while.
            pub fn reborrow(&mut self) -> TensorViewMut<'_> {
                match self {
                    $(Self::$variant(elements) => TensorViewMut::$variant(elements),)*
                }
            }
        }

        impl Tensor {
            /// The elements, row-major.
            pub fn view(&self) -> TensorView<'_> {
                match self {
                    $(Self::$variant(array) => TensorView::$variant(array.as_slice()),)*
                }
            }

            /// The elements, row-major, to be written.
            pub fn view_mut(&mut self) -> TensorViewMut<'_> {
                match self {
                    $(Self::$variant(array) => TensorViewMut::$variant(array.as_slice_mut()),)*
                }
            }
        }
    };
}
views! {
    /// float32
    F32(f32);
    /// float16
    F16(f16);
    /// bfloat16
    BF16(bf16);
    /// int32
    I32(i32);
    /// int64
    I64(i64);
    /// float64
    F64(f64);
    /// bool
    Bool(bool);
    /// int8
    I8(i8);
    /// uint8
    U8(u8);
    /// float8e4m3fn
    F8E4M3(F8E4M3);
}

impl TensorView<'_> {
    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The values in double precision.
    pub fn to_f64(self) -> Vec<f64> {
        match self {
            Self::F32(a) => a.iter().map(|&x| x.into()).collect(),
            Self::F16(a) => a.iter().map(|x| x.to_f64()).collect(),
            Self::BF16(a) => a.iter().map(|x| x.to_f64()).collect(),
            Self::I32(a) => a.iter().map(|&x| x.into()).collect(),
            Self::I64(a) => a.iter().map(|&x| x as f64).collect(),
            Self::F64(a) => a.to_vec(),
            Self::Bool(a) => a.iter().map(|&x| f64::from(u8::from(x))).collect(),
            Self::I8(a) => a.iter().map(|&x| x.into()).collect(),
            Self::U8(a) => a.iter().map(|&x| x.into()).collect(),
            Self::F8E4M3(a) => a.iter().map(|x| x.to_f64()).collect(),
        }
    }
}

impl<'a> TensorViewMut<'a> {
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.view().dtype()
    }

    /// The elements' bytes, mutable.
    ///
    /// # Errors
    ///
    /// For bools, for which not every byte is valid.
    pub fn into_bytes(self) -> Result<&'a mut [u8]> {
        match self {
            Self::F32(a) => Ok(bytemuck::cast_slice_mut(a)),
            Self::F16(a) => Ok(bytemuck::cast_slice_mut(a)),
            Self::BF16(a) => Ok(bytemuck::cast_slice_mut(a)),
            Self::I32(a) => Ok(bytemuck::cast_slice_mut(a)),
            Self::I64(a) => Ok(bytemuck::cast_slice_mut(a)),
            Self::F64(a) => Ok(bytemuck::cast_slice_mut(a)),
            Self::Bool(_) => Err(Error::invalid(
                "tensor",
                DType::Bool,
                "an element type for which every byte is valid",
            )),
            Self::I8(a) => Ok(bytemuck::cast_slice_mut(a)),
            Self::U8(a) => Ok(a),
            Self::F8E4M3(a) => Ok(bytemuck::cast_slice_mut(a)),
        }
    }
}

/// A KV cache: the call appends to it, or it already holds all tokens.
#[derive(Debug)]
pub enum CacheView<'a> {
    /// Read and written.
    Appended(TensorViewMut<'a>),
    /// Read only.
    Read(TensorView<'a>),
}

impl CacheView<'_> {
    /// None, for calls without a KV cache.
    pub const NONE: Self = Self::Read(TensorView::F32(&[]));

    /// The elements, to be read.
    pub fn view(&self) -> TensorView<'_> {
        match self {
            Self::Appended(elements) => elements.view(),
            Self::Read(elements) => *elements,
        }
    }

    /// The same, for a while.
    pub fn reborrow(&mut self) -> CacheView<'_> {
        match self {
            Self::Appended(elements) => CacheView::Appended(elements.reborrow()),
            Self::Read(elements) => CacheView::Read(*elements),
        }
    }

    /// The elements of the tensor `name`, mutable.
    ///
    /// # Errors
    ///
    /// Where the view is read-only.
    pub fn appended(&mut self, name: &'static str) -> Result<TensorViewMut<'_>> {
        match self {
            Self::Appended(elements) => Ok(elements.reborrow()),
            Self::Read(_) => {
                let allowed = "a mutable one, as the call appends to it";
                Err(Error::invalid(name, "a read-only tensor", allowed))
            }
        }
    }
}

impl<'a> From<TensorViewMut<'a>> for CacheView<'a> {
    fn from(elements: TensorViewMut<'a>) -> Self {
        Self::Appended(elements)
    }
}

impl<'a> From<TensorView<'a>> for CacheView<'a> {
    fn from(elements: TensorView<'a>) -> Self {
        Self::Read(elements)
    }
}
