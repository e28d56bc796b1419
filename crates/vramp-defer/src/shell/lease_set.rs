//! The lease that a caller holds.

use std::sync::Arc;

use crate::planner::{
    Access, BufferId, BufferLeaseId, BufferUse, GrantedLease, HolderKey, LeaseEnd, UseToken,
    Writes, WrittenRange,
};
use smallvec::SmallVec;
use vramp_core::{AddrRange, Bytes};

use super::buffer_owner::{Owner, Pin};
use super::events::LeaseStream;
use super::hand_over::LeaseEnding;
use super::lease_owner::LeaseOwner;
use super::spill_error::SpillError;
use super::state::{Shared, State};

/// The right to use a set of buffers on the card, at their addresses, for work on the lease's
/// streams. None of them moves while it is held.
///
/// Dropping it ends the lease at the work queued on its streams so far. An event recorded on each
/// stream marks when the buffers may move again; no thread waits for it. All of an exclusively
/// leased buffer counts as written, unless [`wrote_only`](LeaseSet::wrote_only) limits it.
///
/// For a graph, hold a lease on all that its nodes use around the launch.
#[must_use = "a lease that is dropped at once covers nothing that is queued later"]
pub struct LeaseSet {
    shared: Arc<Shared>,
    lease: BufferLeaseId,
    /// In the order of the request; each keeps its buffer alive.
    named: Vec<Named>,
    streams: SmallVec<[LeaseStream; 2]>,
    written: Option<Vec<WrittenRange>>,
    holder: HolderKey,
    ended: bool,
}

/// A buffer of the request. Keeps it alive.
pub(super) struct Named {
    owner: Arc<Owner>,
    /// Under the lease.
    range: AddrRange,
    /// Offset of the view in the buffer.
    offset: Bytes,
    access: Access,
    in_place: bool,
}

impl Named {
    pub fn new(owner: Arc<Owner>, range: AddrRange, offset: Bytes, access: Access) -> Named {
        Named { owner, range, offset, access, in_place: false }
    }
}

impl State {
    /// Ends a lease at the work queued on its streams. If one of them captures, the lease ends once
    /// it no longer does.
    pub(super) fn end_lease(&mut self, ending: LeaseEnding) {
        let LeaseEnding { lease, buffers, streams, written } = &ending;
        if streams.iter().any(|stream| self.events.captures(stream.id)) {
            self.deferred_ends.push(ending);
            return;
        }
        let tokens: SmallVec<[UseToken; 2]> =
            streams.iter().map(|stream| self.events.note(stream.id)).collect();
        let of = |&buffer: &BufferId| tokens.iter().map(move |&token| BufferUse { buffer, token });
        let uses: Vec<BufferUse> = buffers.iter().flat_map(of).collect();
        let writes = written.as_deref().map_or(Writes::All, Writes::Only);
        let now_ns = self.events.now_ns();
        let leased = self.leased_for_events(*lease);
        let ended = self.core.end_lease(*lease, &LeaseEnd { uses: &uses, writes }, now_ns);
        match ended {
            Ok(stale) => {
                self.emit_unlocked(&leased);
                self.drop_copies(&stale);
            }
            // It stays held, so that nothing that is in use moves.
            Err(error) => debug_assert!(false, "a lease that is held ends: {error}"),
        }
    }
}

impl LeaseSet {
    pub(super) fn new(
        shared: &Arc<Shared>,
        granted: GrantedLease,
        mut named: Vec<Named>,
        streams: SmallVec<[LeaseStream; 2]>,
        holder: HolderKey,
    ) -> LeaseSet {
        let GrantedLease { lease, mut in_place, .. } = granted;
        in_place.sort_unstable();
        // A buffer that is named twice is leased with the stronger access.
        let mut strongest: SmallVec<[(BufferId, Access); 4]> =
            named.iter().map(|named| (named.owner.id, named.access)).collect();
        strongest.sort_unstable_by(|one, other| one.0.cmp(&other.0).then(other.1.cmp(&one.1)));
        strongest.dedup_by_key(|(id, _)| *id);
        for named in &mut named {
            let id = named.owner.id;
            // Memory that was adopted may have been replaced while the request waited.
            named.range.start = named.owner.leased_start() + named.offset;
            named.in_place = in_place.binary_search(&id).is_ok();
            let place = strongest.binary_search_by_key(&id, |&(known, _)| known);
            named.access = strongest[place.expect("each name is in the list")].1;
        }
        let shared = Arc::clone(shared);
        LeaseSet { shared, lease, named, streams, written: None, holder, ended: false }
    }

    /// Returns the owner of the lease: for a lease taken without naming one, the thread's that took it, or
    /// one of its own after [`SpillManager::request`](super::SpillManager::request).
    pub fn owner(&self) -> LeaseOwner {
        LeaseOwner { key: self.holder }
    }

    /// Returns the addresses of the buffers, in the order of the request; of a view, its part.
    pub fn addresses(&self) -> impl ExactSizeIterator<Item = AddrRange> {
        self.named.iter().map(|named| named.range)
    }

    /// Returns the address range of the buffer at `index` in the request.
    ///
    /// # Panics
    /// If the request had fewer buffers.
    pub fn address(&self, index: usize) -> AddrRange {
        self.named[index].range
    }

    /// Returns true if the buffer at `index` is read in place: over the bus where it is spilled.
    /// False if the request had fewer buffers.
    pub fn is_in_place(&self, index: usize) -> bool {
        self.named.get(index).is_some_and(|named| named.in_place)
    }

    /// Limits what was written of the buffer at `index`, by a range relative to the buffer or view.
    /// Copies of other pieces stay valid. After the first call, for any buffer of the lease, only
    /// what such calls name counts as written.
    ///
    /// # Errors
    /// The range does not lie in the buffer, or the lease on it is shared. Nothing changes.
    pub fn wrote_only(
        &mut self,
        index: usize,
        offset: Bytes,
        len: Bytes,
    ) -> Result<(), SpillError> {
        let Named { owner, range, offset: base, access, .. } = self.named(index)?;
        if !access.is_exclusive() {
            return Err(SpillError::NotWritable { index });
        }
        let whole = range.len;
        if offset.checked_add(len).is_none_or(|end| end > whole) {
            return Err(SpillError::Outside { offset, len, whole });
        }
        let offset = *base + offset;
        let written = WrittenRange { buffer: owner.id, offset, len };
        self.written.get_or_insert_default().push(written);
        Ok(())
    }

    /// Keeps the buffer at `index` on the card after the lease's end, until the pin is dropped.
    ///
    /// # Errors
    /// The request had fewer buffers, or this one is read in place.
    pub fn pin(&self, index: usize) -> Result<Pin, SpillError> {
        let Named { owner, .. } = self.named(index)?;
        self.shared.lock().core.pin(self.lease, owner.id)?;
        Ok(Pin { owner: Arc::clone(owner) })
    }

    fn named(&self, index: usize) -> Result<&Named, SpillError> {
        self.named.get(index).ok_or(SpillError::NotNamed { index })
    }

    /// Ends the lease, as dropping it does.
    pub fn end(self) {}

    /// Ends a lease under which nothing was queued and nothing was written.
    pub fn cancel(mut self) {
        self.ended = true;
        self.shared.cancel(self.lease);
    }
}

impl Drop for LeaseSet {
    fn drop(&mut self) {
        if !self.ended {
            let ending = LeaseEnding {
                lease: self.lease,
                buffers: self.named.iter().map(|named| named.owner.id).collect(),
                streams: std::mem::take(&mut self.streams),
                written: self.written.take(),
            };
            let mut state = self.shared.lock();
            state.end_lease(ending);
            state.reap();
            state.note_freed();
            drop(state);
            self.shared.notify_spillable();
        }
    }
}

impl std::fmt::Debug for LeaseSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} buffers", self.lease, self.named.len())
    }
}
