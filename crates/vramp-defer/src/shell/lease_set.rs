//! The right to use buffers, for work on streams.

use std::sync::Arc;
use std::time::Instant;

use crate::planner::{
    Access, BufferId, BufferLeaseId, BufferUse, GrantedLease, LeaseEnd, LeaseRefused, PointerScope,
    UseToken, Writes, WrittenRange,
};
use smallvec::SmallVec;
use vramp_alloc::{Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::Stream;

use super::acquire::InPlaceMode;
use super::buffer_handle::{DeferrableBuffer, Owner, Pin};
use super::events::key;
use super::queued_request::QueuedRequest;
use super::report::WaitRecord;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::Deadline;

/// The right to use a set of buffers on the card, at their addresses, for work on the lease's
/// streams. While it is held, none of them moves.
///
/// Dropped, it ends at what is queued on its streams so far: an event on each says when the buffers
/// may move again. Nobody waits for that. All of an exclusively leased buffer counts as written;
/// [`wrote_only`](LeaseSet::wrote_only) says otherwise.
///
/// For a graph, hold the lease of what its nodes use around the launch.
#[must_use = "a lease that is dropped at once covers nothing that is queued later"]
pub struct LeaseSet {
    shared: Arc<Shared>,
    lease: BufferLeaseId,
    /// Where the buffers lie, as they were named; each keeps its buffer alive.
    named: Vec<Named>,
    streams: SmallVec<[Stream; 2]>,
    written: Option<Vec<WrittenRange>>,
    ended: bool,
}

/// A buffer as a lease names it.
struct Named {
    owner: Arc<Owner>,
    range: AddrRange,
    access: Access,
    in_place: bool,
}

/// Since when somebody waits, and for what.
struct Wait {
    since: Instant,
    began_ns: u64,
    refused: LeaseRefused,
}

/// What is needed to end a lease.
pub(super) struct LeaseEnding {
    lease: BufferLeaseId,
    buffers: Vec<BufferId>,
    streams: SmallVec<[Stream; 2]>,
    written: Option<Vec<WrittenRange>>,
}

impl Shared {
    /// Takes a lease on all of the buffers, or none. Those that may stay where they are stay there.
    pub(super) fn lease(
        self: &Arc<Shared>,
        wanted: &[(&DeferrableBuffer, Access)],
        streams: &[StreamId],
        deadline: Deadline,
        stay: InPlaceMode<'_>,
    ) -> Result<LeaseSet, SpillError> {
        if wanted.iter().any(|(buffer, _)| !Arc::ptr_eq(&buffer.owner.shared, self)) {
            return Err(SpillError::OtherManager);
        }
        let raw = self.driver_streams(streams)?;
        let named: Vec<(BufferId, Access)> =
            wanted.iter().map(|(buffer, access)| (buffer.owner.id, *access)).collect();
        let granted = self.grant_and_bring(&named, &raw, deadline, stay)?;
        if let InPlaceMode::AllBut(hot) = stay {
            self.lock().note_reads(&granted, hot);
        }
        let mut set = LeaseSet {
            shared: Arc::clone(self),
            lease: granted.lease,
            named: Vec::new(),
            streams: raw,
            written: None,
            ended: false,
        };
        set.name(wanted, &named, &granted.in_place);
        Ok(set)
    }

    /// Asks, and brings what is missing. Where others have the memory, it holds nothing while it
    /// waits for them, but its place in line.
    fn grant_and_bring(
        &self,
        buffers: &[(BufferId, Access)],
        streams: &[Stream],
        deadline: Deadline,
        stay: InPlaceMode<'_>,
    ) -> Result<GrantedLease, SpillError> {
        let mut turn = QueuedRequest::new(self, buffers, streams, stay);
        loop {
            let granted = self.grant(&mut turn, deadline)?;
            let ready = self.order(&granted, streams);
            let ready = ready.and_then(|()| self.order_after_memory(&granted, streams));
            let ready = ready.and_then(|()| self.restore_all(&granted, streams));
            let Err(error) = ready else { return Ok(granted) };
            self.cancel(granted.lease);
            if error.lacks_host_blocks() {
                self.lower(self.mover.config().step);
            }
            let may_help = error.lacks_host_blocks()
                || matches!(error, SpillError::NoMemory { .. } | SpillError::NoBudget(_));
            if !may_help || deadline.instant().is_some_and(|end| Instant::now() >= end) {
                return Err(error);
            }
            let mut state = self.lock();
            turn.enqueue(&mut state)?;
            drop(self.wait_briefly(state));
        }
    }

    /// The driver's streams. One call for each, which asks whether it captures.
    fn driver_streams(&self, streams: &[StreamId]) -> Result<SmallVec<[Stream; 2]>, SpillError> {
        let raw = |&id: &StreamId| {
            let raw = self.allocator.stream(id);
            let raw = raw.ok_or_else(|| SpillError::UnknownStream(id.to_string()))?;
            match self.driver.is_capturing(raw)? {
                true => Err(SpillError::Capturing(raw)),
                false => Ok(raw),
            }
        };
        streams.iter().map(raw).collect()
    }

    /// Asks until the deadline; whoever waits holds nothing, and is served in the order of arrival.
    fn grant(
        &self,
        turn: &mut QueuedRequest<'_>,
        deadline: Deadline,
    ) -> Result<GrantedLease, SpillError> {
        let mut waits: Option<Wait> = None;
        let mut guard = self.lock();
        loop {
            guard.poll()?;
            let capacity = self.capacity();
            let state = &mut *guard;
            state.core.set_capacity(capacity);
            let now_ns = self.driver.now_ns();
            let refused = match turn.ask(state, now_ns) {
                Ok(granted) => {
                    if let Some(wait) = waits {
                        state.note_wait(wait, turn, true);
                    }
                    return Ok(granted);
                }
                Err(refused) => refused,
            };
            let may_help = matches!(
                refused,
                LeaseRefused::Busy { .. }
                    | LeaseRefused::Settling { .. }
                    | LeaseRefused::Full { .. }
                    | LeaseRefused::OlderWaiters { .. }
            );
            let over = deadline.instant().is_some_and(|end| Instant::now() >= end);
            if !may_help || over {
                if let Some(wait) = waits {
                    state.note_wait(Wait { refused: refused.clone(), ..wait }, turn, false);
                }
                return Err(match refused {
                    LeaseRefused::Unknown(unknown) => unknown.into(),
                    refused => SpillError::Refused(refused),
                });
            }
            turn.enqueue(state)?;
            let (since, began_ns) =
                waits.map_or_else(|| (Instant::now(), now_ns), |wait| (wait.since, wait.began_ns));
            waits = Some(Wait { since, began_ns, refused });
            guard = self.wait_briefly(guard);
        }
    }

    /// Lets the streams come behind the work that used the buffers before.
    fn order(&self, granted: &GrantedLease, streams: &[Stream]) -> Result<(), SpillError> {
        for &token in &granted.after {
            let event = self.lock().events.of(token);
            let Some(event) = event else { continue };
            for &stream in streams.iter().filter(|&&stream| key(stream) != token.stream) {
                self.driver.wait(stream, event)?;
            }
            if streams.is_empty() {
                self.driver.synchronize_event(event)?;
            }
        }
        Ok(())
    }

    /// Ends a lease under which nothing was launched.
    fn cancel(&self, lease: BufferLeaseId) {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Ok(less) = state.core.cancel_lease(lease) {
            for range in less {
                state.lend(range);
            }
            state.reap();
        }
        drop(guard);
        self.notify();
    }
}

impl State {
    /// Ends a lease at what is queued on its streams; if one of them captures, once it does not.
    pub(super) fn end_lease(&mut self, ending: LeaseEnding) {
        let LeaseEnding { lease, buffers, streams, written } = &ending;
        if streams.iter().any(|&stream| self.events.captures(stream)) {
            self.deferred_ends.push(ending);
            return;
        }
        // A stream without a token has no work any more.
        let tokens: SmallVec<[UseToken; 2]> =
            streams.iter().filter_map(|&stream| self.events.note_or_wait(stream)).collect();
        let of = |&buffer: &BufferId| tokens.iter().map(move |&token| BufferUse { buffer, token });
        let uses: Vec<BufferUse> = buffers.iter().flat_map(of).collect();
        let writes = written.as_deref().map_or(Writes::All, Writes::Only);
        let now_ns = self.events.now_ns();
        let ended = self.core.end_lease(*lease, &LeaseEnd { uses: &uses, writes }, now_ns);
        match ended {
            Ok(stale) => self.drop_copies(&stale),
            // It stays held: that keeps what is in use where it is.
            Err(why) => debug_assert!(false, "a lease that is held ends: {why}"),
        }
    }

    fn note_wait(&mut self, wait: Wait, turn: &QueuedRequest<'_>, served: bool) {
        let Wait { since, began_ns, refused } = wait;
        let waited_ns = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stats.waits += 1;
        self.stats.waited_ns += waited_ns;
        let buffers = turn.buffers();
        self.history.push_wait(WaitRecord { buffers, began_ns, waited_ns, refused, served });
    }
}

impl LeaseSet {
    fn name(
        &mut self,
        wanted: &[(&DeferrableBuffer, Access)],
        named: &[(BufferId, Access)],
        in_place: &[BufferId],
    ) {
        let by_strongest_access = |id: BufferId| {
            let same = named.iter().filter(|(other, _)| *other == id);
            same.map(|(_, access)| *access).max().unwrap_or(Access::Shared)
        };
        let name = |buffer: &DeferrableBuffer| Named {
            owner: Arc::clone(&buffer.owner),
            range: buffer.addresses(),
            access: by_strongest_access(buffer.owner.id),
            in_place: in_place.contains(&buffer.owner.id),
        };
        self.named = wanted.iter().map(|(buffer, _)| name(buffer)).collect();
    }

    /// Where the buffers lie, in the order in which they were named; of a view, its part.
    pub fn addresses(&self) -> impl ExactSizeIterator<Item = AddrRange> {
        self.named.iter().map(|named| named.range)
    }

    /// Where the buffer lies that was named at this place.
    ///
    /// # Panics
    /// If fewer were named.
    pub fn address(&self, index: usize) -> AddrRange {
        self.named[index].range
    }

    /// True if what was named at this place is read where it is, over the bus where it is spilled.
    /// False if fewer were named.
    pub fn is_in_place(&self, index: usize) -> bool {
        self.named.get(index).is_some_and(|named| named.in_place)
    }

    /// Says what was written of a buffer named at this place, from an offset in what was named on:
    /// copies of the rest stay good. Called at all, nothing counts as written but what calls say.
    ///
    /// # Errors
    /// The part does not lie in what was named, or is not leased exclusive. Nothing changes.
    pub fn wrote_only(
        &mut self,
        index: usize,
        offset: vramp_core::Bytes,
        len: vramp_core::Bytes,
    ) -> Result<(), SpillError> {
        let Named { owner, range, access, .. } = self.named(index)?;
        if *access != Access::Exclusive {
            return Err(SpillError::NotWritable { index });
        }
        let whole = range.len;
        if offset.checked_add(len).is_none_or(|end| end > whole) {
            return Err(SpillError::Outside { offset, len, whole });
        }
        let base = range.start.number() - owner.start().number();
        let offset = vramp_core::Bytes::new(base) + offset;
        let written = WrittenRange { buffer: owner.id, offset, len };
        self.written.get_or_insert_default().push(written);
        Ok(())
    }

    /// Hands a pointer outside that lives longer than the lease. See [`PointerScope`] for when the buffer
    /// may move again.
    ///
    /// # Errors
    /// Fewer buffers were named.
    pub fn expose(&self, index: usize, grade: PointerScope) -> Result<Exposure, SpillError> {
        let Named { owner, range, .. } = self.named(index)?;
        self.shared.lock().core.expose(self.lease, owner.id, grade)?;
        Ok(Exposure { owner: Arc::clone(owner), addresses: *range, grade })
    }

    /// Keeps the buffer named at this place on the card behind the lease's end, until the pin is
    /// dropped.
    ///
    /// # Errors
    /// Fewer buffers were named.
    pub fn pin(&self, index: usize) -> Result<Pin, SpillError> {
        let Named { owner, .. } = self.named(index)?;
        self.shared.lock().core.pin(self.lease, owner.id)?;
        Ok(Pin { owner: Arc::clone(owner) })
    }

    fn named(&self, index: usize) -> Result<&Named, SpillError> {
        self.named.get(index).ok_or(SpillError::NotNamed { index })
    }

    /// Ends it, as dropping does.
    pub fn end(self) {}

    /// Ends it where nothing was queued and nothing written.
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
            drop(state);
            self.shared.notify();
        }
    }
}

impl std::fmt::Debug for LeaseSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} buffers", self.lease, self.named.len())
    }
}

/// A pointer that was handed outside. One of the grade [`PointerScope::Opaque`] keeps the buffer on the
/// card until this is dropped.
#[must_use = "an opaque exposure ends when this is dropped"]
pub struct Exposure {
    owner: Arc<Owner>,
    addresses: AddrRange,
    grade: PointerScope,
}

impl Exposure {
    /// Where it points.
    pub fn addresses(&self) -> AddrRange {
        self.addresses
    }

    /// Notes that the work queued on `stream` by now uses the pointer.
    ///
    /// # Errors
    /// The buffer may have left since, the stream captures a graph, or a driver call failed.
    pub fn used_on(&self, stream: StreamId, access: Access) -> Result<(), SpillError> {
        let shared = &self.owner.shared;
        let raw = shared.allocator.stream(stream);
        let raw = raw.ok_or_else(|| SpillError::UnknownStream(stream.to_string()))?;
        let mut guard = shared.lock();
        let state = &mut *guard;
        if shared.driver.is_capturing(raw)? {
            return Err(SpillError::Capturing(raw));
        }
        let token = state.events.note(raw)?;
        let stale = state.core.note_use(self.owner.id, token, access)?;
        state.drop_copies(&stale);
        Ok(())
    }
}

impl Drop for Exposure {
    fn drop(&mut self) {
        if self.grade == PointerScope::Opaque {
            let released = self.owner.shared.lock().core.release(self.owner.id);
            debug_assert!(released.is_ok(), "an exposure is released once: {released:?}");
            self.owner.shared.notify();
        }
    }
}
