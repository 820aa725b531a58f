//! Single parts of the API: files, tensors, devices, options.

use super::draw::{Draw, TYPES};
use super::{Report, Scenario};
use gqa_host::plan::{DeviceInfo, PlanOptions, Planner};
use gqa_host::{DType, Tensor};
use gqa_onnx::{Model, decode_tensor, encode_tensor};
use ndarray::{ArrayD, Axis, IxDyn};
use std::sync::LazyLock;

/// Damaged bytes of a tensor's or a model's file.
#[derive(Debug)]
pub struct Bytes {
    bytes: Vec<u8>,
    is_model: bool,
}

/// Models of the stored cases.
static MODELS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let cases = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("cases");
    let cases = gqa_onnx::find_cases(&cases).expect("the stored cases");
    let models = cases.iter().filter_map(|case| std::fs::read(case.path.join("model.onnx")).ok());
    models.step_by(7).collect()
});

impl Bytes {
    pub fn draw(draw: &mut Draw) -> Self {
        let is_model = draw.flag();
        let shape: Vec<_> = (0..draw.below(4)).map(|_| draw.below(4)).collect();
        let mut bytes = match is_model {
            true => draw.of(&MODELS),
            false => encode_tensor("query", &Tensor::zeros(draw.of(&TYPES), &shape)),
        };
        for _ in 0..draw.below(4) {
            let at = draw.below(bytes.len().max(1));
            match draw.below(4) {
                0 => bytes.truncate(at),
                1 => drop(bytes.splice(at..at, [0xff; 9])),
                2 => bytes.insert(at, draw.byte()),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte = draw.byte()),
            }
        }
        Self { bytes, is_model }
    }
}

impl Scenario for Bytes {
    fn make(&self, report: &mut Report) {
        if self.is_model {
            let _ = Model::decode(&self.bytes);
        } else if let Ok(tensor) = decode_tensor(&self.bytes, "query") {
            let again = decode_tensor(&encode_tensor("query", &tensor), "query");
            if again.is_ok_and(|again| again.bytes() != tensor.bytes()) {
                report.fault("a tensor that was written is read otherwise");
            }
        }
    }
}

/// Things that are made of numbers.
#[derive(Debug)]
pub struct Made {
    dtype: DType,
    shape: Vec<usize>,
    values: Vec<f32>,
    variable: (&'static str, &'static str),
    device: DeviceInfo,
    byte: u8,
}

impl Made {
    pub fn draw(draw: &mut Draw) -> Self {
        let names = ["GQA_SPLITS", "GQA_CLUSTER", "GQA_FORCE", "GQA_DISABLE_FUSED_KV", "GQA_"];
        let values = ["", "0", "1", "-1", "129", "yes", "gqa_general_f32", "18446744073709551616"];
        Self {
            dtype: draw.of(&TYPES),
            shape: (0..draw.below(6)).map(|_| draw.size(3)).collect(),
            values: (0..draw.below(5)).map(|_| draw.float()).collect(),
            variable: (draw.of(&names), draw.of(&values)),
            device: draw.device(),
            byte: draw.byte(),
        }
    }

    /// A tensor from an array in any memory order has its elements in row-major order.
    fn array(&self, report: &mut Report) {
        let dims: Vec<usize> = self.shape.iter().map(|n| n % 4).collect();
        let mut next = i32::from(self.byte);
        let mut array = ArrayD::from_shape_simple_fn(IxDyn(&dims), || {
            next += 7;
            next
        });
        if !dims.is_empty() {
            array.invert_axis(Axis(usize::from(self.byte) % dims.len()));
        }
        let array = if self.byte % 2 == 0 { array.reversed_axes() } else { array };
        let want: Vec<i32> = array.iter().copied().collect();
        let got: Vec<i32> = bytemuck::pod_collect_to_vec(Tensor::from(array).bytes());
        if got != want {
            report.fault(format!("{got:?} of {want:?}"));
        }
    }
}

impl Scenario for Made {
    fn make(&self, report: &mut Report) {
        report.expect("shape dtype values", [].into_iter());
        let Self { dtype, shape, values, .. } = self;
        let zeros = report.note("zeros", Tensor::try_zeros("shape", *dtype, shape));
        if let Some(mut zeros) = zeros {
            zeros.with_bytes_mut(|bytes| bytes.fill(self.byte));
            if zeros.bytes().len() != zeros.len() * dtype.size() || zeros.shape() != shape {
                report.fault("zeros of another shape");
            }
        }
        report.note("tensor of numbers", Tensor::from_f32(*dtype, shape, values));
        report.note("tensor of numbers", Tensor::from_f32(*dtype, &[values.len()], values));
        self.array(report);
        let (name, value) = self.variable;
        let variables = [(name.to_owned(), value.to_owned())];
        report.note("options", PlanOptions::from_variables(variables));
        let DeviceInfo { sm, multiprocessors, bandwidth, .. } = self.device;
        let _ = DeviceInfo::peak_flops(sm, multiprocessors, bandwidth);
        let _ = (DeviceInfo::known(value), self.device.clone().with_known_rates().capability());
        let _ = shape.iter().map(|&n| Planner::bucket(n)).max();
    }
}
