//! The hyperbolic tangent.

use crate::concept::softmax::LOG2_E;
use crate::simt::{exp2, fma, rcp};

/// Below this, `1 - 2/(e^2x + 1)` cancels; a polynomial is as short.
const SMALL: f32 = 0.6;
/// tanh(x) = x + x³·P(x²) for |x| < [`SMALL`], interpolated at Chebyshev nodes; highest power
/// first.
const P: [f32; 5] = [-6.269_12e-3, 2.111_096e-2, -5.387_395e-2, 0.133_329_15, -0.333_333_3];

/// tanh(x) with a relative error below 1e-6, for any x.
#[cfg_attr(target_arch = "nvptx64", inline(always))]
pub fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();
    if magnitude < SMALL {
        let square = x * x;
        let p = P.iter().fold(0.0, |p, &coefficient| fma(p, square, coefficient));
        fma(x * square, p, x)
    } else {
        let e = exp2(2.0 * LOG2_E * magnitude);
        fma(-2.0, rcp(e + 1.0), 1.0).copysign(x)
    }
}
