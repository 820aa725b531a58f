//! A node of a model, and its calls.

use crate::api::{Api, Failure};
use crate::attributes::Node;
use crate::call::Given;
use crate::cuda::Cuda;
use crate::schema::{Schema, Types};
use crate::threads::Threads;
use crate::value::Context;
use crate::{cpu, group_query, paged};
use gqa_host::backend::cpu::{Cpu, Instructions};
use gqa_host::op::{GroupQueryAttention, PagedAttention};
use std::ptr;

/// Who computes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// CPUExecutionProvider
    Cpu,
    /// CUDAExecutionProvider
    Cuda,
}

/// A node.
pub struct Kernel {
    /// ONNX Runtime's functions.
    pub api: Api,
    schema: &'static Schema,
    types: Types,
    operator: Operator,
    device: Device,
}

enum Operator {
    GroupQuery(GroupQueryAttention),
    Paged(PagedAttention),
}

enum Device {
    Cpu(Cpu),
    Cuda(Cuda),
}

impl Kernel {
    /// The kernel for a node.
    pub fn new(
        schema: &'static Schema,
        types: Types,
        provider: Provider,
        node: Node,
    ) -> Result<Self, Failure> {
        let operator = match ptr::eq(schema, &paged::SCHEMA) {
            true => Operator::Paged(node.paged_attention()?),
            false => Operator::GroupQuery(node.group_query_attention()?),
        };
        let device = match provider {
            Provider::Cpu => Device::Cpu(Cpu::new(Instructions::from_env()?)),
            Provider::Cuda => Device::Cuda(Cuda::new(node)?),
        };
        Ok(Self { api: node.api, schema, types, operator, device })
    }

    /// One call. On a GPU it has only begun when this returns.
    ///
    /// # Safety
    ///
    /// Nobody but the call may use its tensors before it is done.
    pub unsafe fn compute(&self, context: Context) -> Result<(), Failure> {
        let given = Given::read(context, self.schema, self.types)?;
        // SAFETY: as the caller says
        unsafe {
            let (problem, mut made) = match &self.operator {
                Operator::GroupQuery(op) => group_query::call(op, context, &given)?,
                Operator::Paged(op) => paged::call(op, context, &given)?,
            };
            match &self.device {
                Device::Cpu(cpu) => {
                    cpu::run(*cpu, &Threads::of(context), &problem, &given, &mut made)
                }
                Device::Cuda(cuda) => cuda.enqueue(context, &problem, &given, &made),
            }
        }
    }
}
