//! Redirects tensors of an inner call's launches to other memory.

use super::launch::{Arg, Launch, TensorMap};
use crate::tensors::TensorId;

/// New places of tensors; `Null`: unchanged.
pub(super) struct Rebind(pub(super) Vec<(TensorId, Arg)>);

impl Rebind {
    /// The launch with its tensors in their new places.
    pub(super) fn launch(&self, mut launch: Launch) -> Launch {
        for arg in &mut launch.args {
            match *arg {
                Arg::Tensor { id, offset } => *arg = self.moved(id, offset).unwrap_or(*arg),
                Arg::Map(map) => *arg = Arg::Map(self.moved_map(map)),
                _ => {}
            }
        }
        launch
    }

    /// The byte address of a tensor, if it is redirected.
    fn moved(&self, id: TensorId, offset: usize) -> Option<Arg> {
        match self.0.iter().find_map(|(from, to)| (*from == id).then_some(*to))? {
            Arg::Workspace { offset: start, bytes } => {
                Some(Arg::Workspace { offset: start + offset, bytes: bytes - offset })
            }
            Arg::Tensor { id, offset: start } => Some(Arg::Tensor { id, offset: start + offset }),
            _ => None,
        }
    }

    fn moved_map(&self, map: TensorMap) -> TensorMap {
        match map.id.and_then(|id| self.moved(id, map.offset)) {
            Some(Arg::Workspace { offset, .. }) => TensorMap { id: None, offset, ..map },
            Some(Arg::Tensor { id, offset }) => TensorMap { id: Some(id), offset, ..map },
            _ => map,
        }
    }
}
