//! Element types of arrays, and those that attention is computed in.

use gqa_host::{DType, TensorView, TensorViewMut};
use half::{bf16, f16};

/// Rust's type of an array's elements.
pub trait Known: Copy {
    const DTYPE: DType;
}

impl Known for f32 {
    const DTYPE: DType = DType::F32;
}
impl Known for f16 {
    const DTYPE: DType = DType::F16;
}
impl Known for bf16 {
    const DTYPE: DType = DType::BF16;
}

pub trait Element: Known + Default + Send + Sync + 'static {
    fn to_f32(self) -> f32;
    fn from_f32(x: f32) -> Self;
    fn view(elements: &[Self]) -> TensorView<'_>;
    fn view_mut(elements: &mut [Self]) -> TensorViewMut<'_>;
}

macro_rules! element {
    ($t:ty, $variant:ident, $to:expr, $from:expr) => {
        impl Element for $t {
            fn to_f32(self) -> f32 {
                $to(self)
            }

            fn from_f32(x: f32) -> Self {
                $from(x)
            }

            fn view(elements: &[Self]) -> TensorView<'_> {
                TensorView::$variant(elements)
            }

            fn view_mut(elements: &mut [Self]) -> TensorViewMut<'_> {
                TensorViewMut::$variant(elements)
            }
        }
    };
}
element!(f32, F32, std::convert::identity, std::convert::identity);
element!(f16, F16, f16::to_f32, f16::from_f32);
element!(bf16, BF16, bf16::to_f32, bf16::from_f32);

/// Calls a function of one type parameter for the element type of an array.
macro_rules! typed {
    ($array:expr, $function:ident($($argument:expr),*)) => {
        match $array.dtype {
            gqa_host::DType::F32 => $function::<f32>($($argument),*),
            gqa_host::DType::F16 => $function::<half::f16>($($argument),*),
            gqa_host::DType::BF16 => $function::<half::bf16>($($argument),*),
            other => {
                let allowed = "float32, float16 or bfloat16";
                Err($crate::error::invalid($array.name, other, allowed))
            }
        }
    };
}
pub(crate) use typed;
