//! Leases: what is requested, granted, held and ended.

use smallvec::SmallVec;

use super::{Access, BufferId, BufferLeaseId, HolderKey, RangeId, Restore, StreamKey, UseToken};
use vramp_core::Bytes;

#[derive(Clone, Debug)]
pub(super) struct Lease {
    /// In order, each once.
    pub buffers: SmallVec<[(BufferId, Access); 4]>,
    /// In order.
    pub streams: SmallVec<[StreamKey; 2]>,
    pub holder: HolderKey,
    /// Number of buffers that are read in place: nothing of them was restored.
    pub in_place: usize,
    /// Buffers that are overwritten, in order: nothing of them was restored.
    pub overwritten: SmallVec<[BufferId; 2]>,
}

impl Lease {
    /// Returns the access to a buffer; `None` if it is not leased. O(log buffers).
    pub fn access(&self, buffer: BufferId) -> Option<Access> {
        let place = self.buffers.binary_search_by_key(&buffer, |&(held, _)| held);
        place.ok().map(|place| self.buffers[place].1)
    }

    /// Returns true if it occupies memory on the card.
    pub fn has_room(&self) -> bool {
        self.buffers.len() > self.in_place
    }
}

/// A request for a lease.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeaseRequest<'a> {
    /// Buffers to lease. One that is named twice is leased once, with the stronger access.
    pub buffers: &'a [(BufferId, Access)],
    /// Streams whose work will use the buffers. Empty for work that is complete when the lease
    /// ends.
    pub streams: &'a [StreamKey],
    /// Holder of the lease.
    pub holder: HolderKey,
    /// Other holders whose leases the caller keeps while it waits.
    pub holding: &'a [HolderKey],
}

impl LeaseRequest<'_> {
    /// Returns the holder and the others.
    pub(super) fn holders(&self) -> SmallVec<[HolderKey; 2]> {
        let mut all = SmallVec::from_slice(&[self.holder]);
        all.extend(self.holding.iter().copied().filter(|&other| other != self.holder));
        all
    }
}

/// A lease that was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a lease that never ends keeps its buffers on the card"]
pub struct GrantedLease {
    /// Id of the lease.
    pub lease: BufferLeaseId,
    /// Work that each stream of the lease waits for, except its own: writes before a shared use,
    /// all uses before an exclusive one. In the order of the streams.
    pub after: Vec<UseToken>,
    /// Pieces to restore first.
    pub restores: Vec<Restore>,
    /// Ranges that need all their memory, or that of the leased tenants.
    pub ranges: Vec<RangeId>,
    /// Buffers that stay where they are, see [`Deferrables::lease_in_place`](super::Deferrables::lease_in_place).
    pub in_place: Vec<BufferId>,
}

/// Queued work that used a leased buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferUse {
    /// The leased buffer.
    pub buffer: BufferId,
    /// The work, on one of the lease's streams.
    pub token: UseToken,
}

/// Bytes that were written under an exclusive lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenRange {
    /// The leased buffer.
    pub buffer: BufferId,
    /// Offset of the first byte.
    pub offset: Bytes,
    /// Number of bytes.
    pub len: Bytes,
}

/// What was written under exclusive access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Writes<'a> {
    /// All of each buffer.
    #[default]
    All,
    /// These bytes only; other pieces stay clean. A pinned buffer counts as written as a whole.
    Only(&'a [WrittenRange]),
}

/// What was done under a lease.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeaseEnd<'a> {
    /// Work in flight. None for a buffer whose work is complete.
    pub uses: &'a [BufferUse],
    /// What was written of the exclusively leased buffers.
    pub writes: Writes<'a>,
}

/// The buffers of a request by where they would be used now, each once.
#[derive(Clone, Debug)]
pub(super) struct SplitRequest {
    /// On the card, in order.
    pub come: SmallVec<[(BufferId, Access); 4]>,
    /// Read in place, in order.
    pub stay: SmallVec<[BufferId; 2]>,
}

/// Returns the buffers in order.
pub(super) fn sorted(buffers: &[BufferId]) -> SmallVec<[BufferId; 2]> {
    let mut sorted = SmallVec::from_slice(buffers);
    sorted.sort_unstable();
    sorted
}
