//! What others need for the same attention: the file that `bench/peers.py` writes.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::ceiling::{Ceilings, Rate};
use super::record::{CallKey, Peer, Record};

/// More than any such file has.
const MOST_BYTES: u64 = 64 << 20;

/// The file.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Peers {
    /// Where the numbers come from: name and value.
    #[serde(default)]
    pub provenance: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    ceilings: Measured,
    results: Vec<Timing>,
}

/// Ceilings measured in the same run.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct Measured {
    memory: Option<Rate>,
    half: Option<Rate>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Timing {
    peer: String,
    #[serde(flatten)]
    call: CallKey,
    median_us: f64,
}

impl Peers {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self> {
        let name = || format!("--against {}", path.display());
        let text = gqa_onnx::read_file(path, MOST_BYTES).context("--against")?;
        serde_json::from_slice(&text).with_context(name)
    }

    /// Replaces vendors' figures by the ceilings in the file, and measured ones if the file has
    /// faster ones.
    pub fn raise(&self, ceilings: &mut Ceilings) {
        if let Some(half) = &self.ceilings.half {
            ceilings.half = half.clone();
        }
        let memory = self.ceilings.memory.as_ref();
        if let Some(faster) = memory.filter(|rate| rate.per_second > ceilings.memory.per_second) {
            ceilings.memory = faster.clone();
        }
    }

    /// Adds to the record what the file has of the same call. A call that computes other scores has
    /// no peers.
    pub fn join(&self, record: &mut Record) {
        if ["softcap", "scale", "smooth"].iter().any(|feature| record.features.contains(feature)) {
            return;
        }
        let same = self
            .results
            .iter()
            .filter(|timing| timing.call == record.call && timing.median_us > 0.0);
        record.peers = same
            .map(|timing| Peer {
                name: timing.peer.clone(),
                median_us: timing.median_us,
                ratio: timing.median_us / record.median_us,
            })
            .collect();
    }
}
