//! Host memory that the device maps, for copies that are read in place (`mapped_copy.rs`).

use std::sync::Arc;

use crate::planner::{RangeId, UseToken};
use vramp_alloc::range::{HostBacking, StableRange};
use vramp_core::Bytes;
use vramp_tiers::reserve::Charge;

use super::events::LeaseStream;

/// Host memory that the device maps.
pub(super) struct MappedCopy {
    pub memory: Arc<HostBacking>,
    pub copy_mapping: StableRange,
    /// Where it is mapped, or being mapped, beside the copy mapping.
    pub mapped_at: Option<(RangeId, Bytes)>,
    pub _charge: Charge,
}

/// Shared by all readable buffers.
pub(super) struct InPlacePool {
    /// Stream of their copies.
    pub stream: LeaseStream,
    pub node: u32,
    pub stock: Vec<MappedCopy>,
    /// Stale copies, and what may still read them.
    pub retired: Vec<(MappedCopy, Vec<UseToken>)>,
}

impl InPlacePool {
    /// Returns the bytes that copies in stock take of the host's space.
    pub fn charged(&self) -> Bytes {
        self.stock.iter().map(|mapped| mapped.memory.len()).sum()
    }

    /// Returns the number of stale copies that work may still read.
    pub fn retired_count(&self) -> usize {
        self.retired.len()
    }
}
