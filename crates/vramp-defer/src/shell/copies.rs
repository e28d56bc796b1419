//! Copies of pieces below the card, and the memory of those that are read in place (`mapped_copy.rs`).

use std::sync::Arc;

use crate::planner::{RangeId, SpillTier, UseToken};
use vramp_alloc::range::{HostBacking, StableRange};
use vramp_core::Bytes;
use vramp_tiers::host::HostAllocation;
use vramp_tiers::movers::DiskCopy;
use vramp_tiers::peer::PeerAllocation;
use vramp_tiers::reserve::Charge;

use super::events::LeaseStream;

/// One copy of a piece.
pub(super) enum PieceCopy {
    /// In blocks of the host pool.
    Host(HostAllocation),
    /// On the host, in memory that the device maps.
    Mapped(MappedCopy),
    Disk(Arc<DiskCopy>),
    /// On another card.
    Peer(PeerAllocation),
}

/// Copies of a piece below the card.
#[derive(Default)]
pub(super) struct SpilledCopies {
    /// In blocks of the host pool.
    pub host: Option<HostAllocation>,
    /// On the host, in memory that the device maps.
    pub mapped: Option<MappedCopy>,
    pub disk: Option<Arc<DiskCopy>>,
    /// On another card.
    pub peer: Option<PeerAllocation>,
}

impl SpilledCopies {
    /// Returns the bytes that the copies take of the host's space.
    pub fn charged_host(&self) -> Bytes {
        let host = self.host.as_ref().map(HostAllocation::len).unwrap_or_default();
        host + self.mapped.as_ref().map(|mapped| mapped.memory.len()).unwrap_or_default()
    }

    /// Returns the bytes that the copy takes of the disk's space.
    pub fn charged_disk(&self) -> Bytes {
        self.disk.as_ref().map(|disk| disk.charged()).unwrap_or_default()
    }

    /// Adds a copy.
    pub fn put(&mut self, copy: PieceCopy) {
        match copy {
            PieceCopy::Host(host) => self.host = Some(host),
            PieceCopy::Mapped(mapped) => self.mapped = Some(mapped),
            PieceCopy::Disk(stored) => self.disk = Some(stored),
            PieceCopy::Peer(copy) => self.peer = Some(copy),
        }
    }

    /// Takes the copies in a tier.
    pub fn take(&mut self, tier: SpillTier) -> impl Iterator<Item = PieceCopy> + use<> {
        let copies = match tier {
            SpillTier::Host => {
                let mapped = self.mapped.take().map(PieceCopy::Mapped);
                [self.host.take().map(PieceCopy::Host), mapped]
            }
            SpillTier::Disk => [self.disk.take().map(PieceCopy::Disk), None],
            SpillTier::Peer(_) => [self.peer.take().map(PieceCopy::Peer), None],
        };
        copies.into_iter().flatten()
    }

    pub fn is_empty(&self) -> bool {
        let SpilledCopies { host, mapped, disk, peer } = self;
        host.is_none() && mapped.is_none() && disk.is_none() && peer.is_none()
    }
}

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
