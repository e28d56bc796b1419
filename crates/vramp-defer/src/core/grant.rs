//! Granting and ending leases: the right to use a set of buffers, all or nothing.
//!
//! A request is granted at once, or refused with what to wait for; a waiter holds nothing. All
//! leases together never need more than the capacity. So leases cannot deadlock, unless a caller
//! takes a second one while it holds a first. `wait_queue.rs` has the order of waiters, and
//! `overtake.rs` what a second one may overtake.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::buffer_state::Buffer;
use super::buffer_state::{ContentPlace, Piece, PieceMove};
use super::lease::{
    BufferUse, GrantedLease, Lease, LeaseEnd, LeaseRequest, SplitRequest, Writes, WrittenRange,
};
use super::range::Range;
use super::uses::latest_by_stream;
use super::wait_queue::{Blocked, LAST, Place};
use super::{
    Access, BufferId, BufferLeaseId, Deferrables, Hint, LeaseEndError, LeaseRefused, MoveId,
    PieceId, RangeId, Restore, StaleCopy, StreamKey, UnknownBuffer, UnknownBufferLease, UseToken,
};
use vramp_core::Bytes;

/// What was done under a lease, by buffer.
struct ByBuffer {
    uses: SmallVec<[BufferUse; 4]>,
    written: Option<Vec<WrittenRange>>,
}

impl ByBuffer {
    /// O(n log n) in the number of uses and ranges, and O(n) if they are in the order of the buffers.
    fn new(end: &LeaseEnd<'_>) -> ByBuffer {
        let mut uses: SmallVec<[BufferUse; 4]> = SmallVec::from_slice(end.uses);
        uses.sort_by_key(|use_| use_.buffer);
        let written = match end.writes {
            Writes::All => None,
            Writes::Only(written) => {
                let mut written = written.to_vec();
                written.sort_by_key(|one| one.buffer);
                Some(written)
            }
        };
        ByBuffer { uses, written }
    }

    fn uses(&self, buffer: BufferId) -> &[BufferUse] {
        run_of(&self.uses, buffer, |use_| use_.buffer)
    }

    /// Returns what was written of a buffer; `None` for all of it.
    fn written(&self, buffer: BufferId) -> Option<&[WrittenRange]> {
        self.written.as_ref().map(|written| run_of(written, buffer, |one| one.buffer))
    }
}

/// Returns the entries of one buffer. They are sorted by buffer. O(log n).
fn run_of<T>(all: &[T], buffer: BufferId, key: impl Fn(&T) -> BufferId) -> &[T] {
    let from = all.partition_point(|entry| key(entry) < buffer);
    let to = all.partition_point(|entry| key(entry) <= buffer);
    &all[from..to]
}

impl Deferrables {
    /// Grants a lease on all of the buffers. None of them is a victim while it is held, and one
    /// that was chosen and has not left stays. To prefetch, end the lease without uses. O(pieces).
    ///
    /// # Errors
    /// A buffer does not exist, is held or in flight, the set does not fit on the card, or an older
    /// waiter conflicts with it. Nothing changes, and nothing is held.
    pub fn lease(
        &mut self,
        request: &LeaseRequest<'_>,
        now_ns: u64,
    ) -> Result<GrantedLease, LeaseRefused> {
        self.lease_in_place(request, &[], now_ns)
    }

    /// Keeps buffers on the card whose contents are there, as a lease that ends at once: those that were
    /// chosen to leave stay. O(pieces).
    ///
    /// # Errors
    /// As [`lease`](Deferrables::lease).
    pub fn keep(&mut self, request: &LeaseRequest<'_>, now_ns: u64) -> Result<(), LeaseRefused> {
        let buffers = self.by_strongest_access(request.buffers)?;
        let wanted = self.split_by_place(&buffers, &[]);
        self.check_lease(&wanted, request)?;
        self.ranges_of(&buffers).into_iter().for_each(|range| self.cancel_evictions(range));
        for (id, _) in buffers {
            self.buffers[id].last_use_ns = now_ns;
            self.reindex_buffer(id);
        }
        Ok(())
    }

    /// Returns why a request that is not in the queue cannot be granted now.
    pub(super) fn check_lease(
        &mut self,
        wanted: &SplitRequest,
        request: &LeaseRequest<'_>,
    ) -> Result<(), LeaseRefused> {
        let checked = self.fits(&wanted.come).and_then(|()| {
            let place = Place { ticket: LAST, holders: &request.holders() };
            self.check(wanted, &place).map_err(|blocked| self.describe(wanted, blocked))
        });
        self.counters.leases_refused += u64::from(checked.is_err());
        checked
    }

    /// Returns what a request waits for, in full. O(leases + pieces).
    pub(super) fn describe(&self, wanted: &SplitRequest, blocked: Blocked) -> LeaseRefused {
        let come = &wanted.come;
        let refused = self.is_free(come).and_then(|()| self.has_settled(come));
        match (refused.and_then(|()| self.has_room(come)), blocked) {
            (Err(refused), _) => refused,
            (Ok(()), Blocked::Older(behind) | Blocked::BehindRoom(behind)) => {
                LeaseRefused::OlderWaiters { behind }
            }
            (Ok(()), _) => LeaseRefused::Settling { moves: Vec::new() },
        }
    }

    pub(super) fn by_strongest_access(
        &self,
        named: &[(BufferId, Access)],
    ) -> Result<SmallVec<[(BufferId, Access); 4]>, UnknownBuffer> {
        let held = |&(buffer, access): &(BufferId, Access)| {
            self.get(buffer).map(|_| (buffer, access.held()))
        };
        let mut all = named.iter().map(held).collect::<Result<SmallVec<[_; 4]>, _>>()?;
        // The strongest access of a buffer comes first, and stays.
        all.sort_unstable_by(|one, other| one.0.cmp(&other.0).then(other.1.cmp(&one.1)));
        all.dedup_by_key(|(buffer, _)| *buffer);
        Ok(all)
    }

    /// Returns the ranges of the buffers that exist, sorted.
    pub(super) fn ranges_of(&self, buffers: &[(BufferId, Access)]) -> SmallVec<[RangeId; 4]> {
        let ranges = buffers.iter().filter_map(|&(id, _)| Some(self.buffers.get(id)?.range));
        let mut ranges: SmallVec<[RangeId; 4]> = ranges.collect();
        ranges.sort_unstable();
        ranges.dedup();
        ranges
    }

    pub(super) fn fits(&self, buffers: &[(BufferId, Access)]) -> Result<(), LeaseRefused> {
        let ranges = self.ranges_of(buffers).into_iter();
        let needed = ranges.map(|range| self.ranges[range].needs()).sum();
        let capacity = self.config.capacity;
        if needed > capacity {
            return Err(LeaseRefused::TooLarge { needed, capacity });
        }
        Ok(())
    }

    /// Returns a buffer that other leases hold, or that moves: the request waits for it.
    pub(super) fn unavailable(&self, wanted: &SplitRequest) -> Option<BufferId> {
        let is_mapping = |id: BufferId| self.ranges[self.buffers[id].range].is_mapping;
        let found = wanted.come.iter().find(|&&(id, wanted)| {
            self.buffers[id].holders.exclude(wanted)
                || is_mapping(id)
                || self.unsettled(id, wanted).next().is_some()
        });
        // What is read in place has to be mapped there by then.
        let stay = || wanted.stay.iter().find(|id| is_mapping(**id));
        found.map(|&(id, _)| id).or_else(|| stay().copied())
    }

    fn is_free(&self, buffers: &[(BufferId, Access)]) -> Result<(), LeaseRefused> {
        let held_by = self.excluding_leases(buffers);
        if !held_by.is_empty() {
            return Err(LeaseRefused::Busy { held_by: held_by.into_iter().collect() });
        }
        Ok(())
    }

    /// Returns the leases that exclude a lease on these buffers.
    fn excluding_leases(&self, buffers: &[(BufferId, Access)]) -> BTreeSet<BufferLeaseId> {
        let holders = |&(buffer, wanted): &(BufferId, Access)| {
            let holders = &self.buffers[buffer].holders;
            if holders.exclude(wanted) { holders.leases() } else { Vec::new() }
        };
        buffers.iter().flat_map(holders).collect()
    }

    /// Returns the moves of a buffer that a request waits for.
    ///
    /// A victim need not settle: it stays. But a writer waits for each copy of it, so that no copy
    /// mixes old and new contents. It can wait for a copy in stream order only if all of that is
    /// queued.
    fn unsettled(&self, id: BufferId, access: Access) -> impl Iterator<Item = (MoveId, PieceId)> {
        let moves = move |piece: &Piece| match piece.motion? {
            PieceMove::Restore { id, .. } | PieceMove::Push { id, .. } => Some(id),
            PieceMove::Out { id, to: Some(_), queued: None, .. } => {
                (access == Access::Exclusive).then_some(id)
            }
            PieceMove::Out { .. } => None,
        };
        let pieces = (0..).zip(&self.buffers[id].pieces);
        pieces
            .filter_map(move |(index, piece)| Some((moves(piece)?, PieceId { buffer: id, index })))
    }

    fn has_settled(&self, buffers: &[(BufferId, Access)]) -> Result<(), LeaseRefused> {
        let unsettled = buffers.iter().flat_map(|&(id, access)| self.unsettled(id, access));
        let moves: Vec<_> = unsettled.collect();
        let is_mapping =
            |&(id, _): &(BufferId, Access)| self.ranges[self.buffers[id].range].is_mapping;
        if !moves.is_empty() || buffers.iter().any(is_mapping) {
            return Err(LeaseRefused::Settling { moves });
        }
        Ok(())
    }

    /// Returns the memory of a set that is not unevictable already.
    pub(super) fn needed(&self, buffers: &[(BufferId, Access)]) -> Bytes {
        let ranges = self.ranges_of(buffers).into_iter().map(|range| &self.ranges[range]);
        ranges.filter(|range| range.unevictable_count == 0).map(Range::needs).sum()
    }

    fn has_room(&self, buffers: &[(BufferId, Access)]) -> Result<(), LeaseRefused> {
        let needed = self.needed(buffers);
        let (committed, capacity) = (self.committed, self.config.capacity);
        if committed + needed > capacity && !needed.is_zero() {
            let held_by = self.leases_with_room().collect();
            return Err(LeaseRefused::Full { needed, committed, capacity, held_by });
        }
        Ok(())
    }

    /// Returns the leases that occupy memory on the card. One that reads all of its set in place
    /// does not.
    fn leases_with_room(&self) -> impl Iterator<Item = BufferLeaseId> {
        self.leases.iter().filter(|(_, lease)| lease.has_room()).map(|(&id, _)| id)
    }

    /// Records the lease. Buffers of `in_place`, in order, stay where they are.
    pub(super) fn grant(
        &mut self,
        buffers: SmallVec<[(BufferId, Access); 4]>,
        in_place: SmallVec<[BufferId; 2]>,
        request: &LeaseRequest<'_>,
        now_ns: u64,
    ) -> GrantedLease {
        let lease = BufferLeaseId(self.next());
        let (holder, committed) = (request.holder, self.committed);
        self.ranges_of(&buffers).into_iter().for_each(|range| self.cancel_evictions(range));
        let mut ranges = BTreeSet::new();
        let mut after = Vec::new();
        let mut restores = Vec::new();
        for &(id, access) in &buffers {
            let last_stream = &mut self.buffers[id].last_stream;
            *last_stream = request.streams.last().copied().or(*last_stream);
            if in_place.binary_search(&id).is_ok() {
                after.extend(self.hold_in_place(id, (lease, holder), now_ns));
                continue;
            }
            ranges.insert(self.buffers[id].range);
            let buffer = &mut self.buffers[id];
            buffer.holders.add(lease, holder, access, false);
            buffer.hint = Hint::None;
            buffer.last_use_ns = now_ns;
            after.extend(buffer.uses.before(access));
            if access == Access::Exclusive {
                after.extend(buffer.pieces.iter().filter_map(Piece::copied_until));
            }
            let restored_before = restores.len();
            for piece in self.pieces_of(id).collect::<SmallVec<[PieceId; 8]>>() {
                self.set_backed(piece, true);
                restores.extend(self.begin_restore(piece));
            }
            self.reindex_buffer(id);
            if restores.len() > restored_before {
                self.begin_cooldown(id, now_ns);
            }
            self.refresh(id);
        }
        let mut after = latest_by_stream(after.into_iter());
        after.retain(|token| request.streams != [token.stream]);
        let mut streams: SmallVec<[StreamKey; 2]> = request.streams.into();
        streams.sort_unstable();
        let overwritten = SmallVec::new();
        let granted = Lease { buffers, streams, holder, in_place: in_place.len(), overwritten };
        self.wait_queue.add_lease(lease, holder, granted.has_room());
        self.leases.insert(lease, granted);
        if self.committed > committed {
            self.mark_lacking();
        }
        self.counters.leases += 1;
        let (ranges, in_place) = (ranges.into_iter().collect(), in_place.to_vec());
        GrantedLease { lease, after, restores, ranges, in_place }
    }

    fn begin_restore(&mut self, piece: PieceId) -> Option<Restore> {
        if self.piece(piece).place != ContentPlace::SpillTier {
            return None;
        }
        let from = self.piece(piece).copies.best().expect("a spilled piece has a copy");
        let id = self.begin(piece, |id| PieceMove::Restore { id, from });
        Some(Restore { id, piece, at: self.piece_slice(piece), from })
    }

    pub(super) fn pieces_of(&self, buffer: BufferId) -> impl Iterator<Item = PieceId> + use<> {
        let count = self.buffers[buffer].pieces.len() as u32;
        (0..count).map(move |index| PieceId { buffer, index })
    }

    /// Ends a lease under which work was queued, or done. Returns the stale copies.
    ///
    /// The work of an exclusive lease replaces all earlier uses, since it waited for them.
    /// O(pieces + uses log uses), and O(log leases) for each buffer.
    ///
    /// # Errors
    /// The lease does not exist, a piece was not restored, or the uses are not the lease's. Nothing
    /// changes.
    pub fn end_lease(
        &mut self,
        lease: BufferLeaseId,
        end: &LeaseEnd<'_>,
        now_ns: u64,
    ) -> Result<Vec<StaleCopy>, LeaseEndError> {
        self.check_end(lease, end)?;
        let ended = self.leases.remove(&lease).expect("it was checked");
        self.wait_queue.remove_lease(lease, ended.holder, ended.has_room());
        let end = ByBuffer::new(end);
        let mut stale = Vec::new();
        for (id, access) in ended.buffers {
            let uses = end.uses(id);
            self.counters.looked_at += uses.len() as u64;
            let tokens = uses.iter().map(|use_| use_.token);
            let buffer = &mut self.buffers[id];
            buffer.holders.remove(lease, ended.holder);
            buffer.last_use_ns = now_ns;
            if access == Access::Shared {
                tokens.for_each(|token| self.note_use_of(id, token, Access::Shared));
            } else {
                if !uses.is_empty() {
                    buffer.uses.replace(tokens.clone());
                    tokens.for_each(|token| self.uses.note(token, id));
                }
                let all = ended.overwritten.binary_search(&id).is_ok();
                let written = end.written(id).filter(|_| !all);
                self.counters.looked_at += written.map_or(0, |written| written.len() as u64);
                stale.extend(self.end_writing(id, written));
            }
            self.reindex_buffer(id);
            self.refresh(id);
        }
        Ok(stale)
    }

    fn check_end(&self, lease: BufferLeaseId, end: &LeaseEnd<'_>) -> Result<(), LeaseEndError> {
        let held = self.leases.get(&lease).ok_or(UnknownBufferLease { lease })?;
        let access =
            |buffer: BufferId| held.access(buffer).ok_or(LeaseEndError::OtherBuffer { buffer });
        let lacking = |id: &PieceId| {
            self.piece(*id).place == ContentPlace::SpillTier
                && !self.buffers[id.buffer].holders.read_in_place()
                && held.overwritten.binary_search(&id.buffer).is_err()
        };
        let mut pieces = held.buffers.iter().flat_map(|&(buffer, _)| self.pieces_of(buffer));
        if let Some(piece) = pieces.find(lacking) {
            return Err(LeaseEndError::NotRestored { piece });
        }
        for use_ in end.uses {
            access(use_.buffer)?;
            let stream = use_.token.stream;
            if held.streams.binary_search(&stream).is_err() {
                return Err(LeaseEndError::OtherStream { stream });
            }
        }
        let Writes::Only(written) = end.writes else { return Ok(()) };
        for &WrittenRange { buffer, offset, len } in written {
            let allowed = access(buffer)? == Access::Exclusive;
            let whole = self.buffers[buffer].len;
            if !allowed || offset.checked_add(len).is_none_or(|end| end > whole) {
                return Err(LeaseEndError::InvalidWrite { buffer, offset, len });
            }
        }
        Ok(())
    }

    /// Records what was written of a buffer: these ranges of it, or all of it. O(pieces + ranges).
    fn end_writing(&mut self, id: BufferId, written: Option<&[WrittenRange]>) -> Vec<StaleCopy> {
        let Buffer { pins, pieces, .. } = &self.buffers[id];
        // What is written through a pin, and when, is not known here.
        let Some(written) = written.filter(|_| *pins == 0) else {
            return self.note_written(id, |_| true);
        };
        // Ranges that begin at a piece, less those that end before it.
        let mut opens = vec![0_i64; pieces.len() + 1];
        for &WrittenRange { offset, len, .. } in written.iter().filter(|one| !one.len.is_zero()) {
            let (first, last) = (offset, offset + len - Bytes::new(1));
            let index = |at: Bytes| (at.count() / self.config.piece.count()) as usize;
            opens[index(first)] += 1;
            opens[index(last) + 1] -= 1;
        }
        let touched = opens.iter().scan(0, |open, change| {
            *open += change;
            Some(*open > 0)
        });
        let touched: Vec<bool> = touched.collect();
        self.note_written(id, |index| touched[index])
    }

    /// Records new contents of some pieces.
    pub(super) fn note_written(
        &mut self,
        id: BufferId,
        which: impl Fn(usize) -> bool,
    ) -> Vec<StaleCopy> {
        let buffer = &mut self.buffers[id];
        for (index, piece) in buffer.pieces.iter_mut().enumerate() {
            if which(index) {
                if piece.place == ContentPlace::SpillTier {
                    // It was overwritten: `check_end` refuses other leases without the piece.
                    buffer.deferred -= piece.len;
                }
                piece.place = ContentPlace::Card;
            }
        }
        self.drop_copies(id, which)
    }

    /// Ends a lease under which nothing was launched. Nothing counts as written. Restores in flight
    /// continue. Returns the ranges that need less memory now, see [`Deferrables::needed_memory`].
    /// O(pieces).
    ///
    /// # Errors
    /// The lease does not exist.
    pub fn cancel_lease(
        &mut self,
        lease: BufferLeaseId,
    ) -> Result<Vec<RangeId>, UnknownBufferLease> {
        let cancelled = self.leases.remove(&lease).ok_or(UnknownBufferLease { lease })?;
        self.wait_queue.remove_lease(lease, cancelled.holder, cancelled.has_room());
        let mut less = BTreeSet::new();
        for (id, _) in cancelled.buffers {
            let buffer = &mut self.buffers[id];
            let stayed = buffer.holders.read_in_place();
            buffer.holders.remove(lease, cancelled.holder);
            buffer.reads = buffer.reads.saturating_sub(u32::from(stayed));
            self.refresh(id);
            for piece in self.pieces_of(id).collect::<SmallVec<[PieceId; 8]>>() {
                let Buffer { uses, holders, .. } = &self.buffers[id];
                let unused = uses.is_empty() && !self.buffers[id].stays();
                let held = !holders.is_empty();
                let state = self.piece(piece);
                let needless = match state.place {
                    ContentPlace::Card => false,
                    ContentPlace::SpillTier => !held && state.motion.is_none(),
                    ContentPlace::Empty => unused,
                };
                if state.backed && needless {
                    self.set_backed(piece, false);
                    less.insert(self.buffers[id].range);
                }
            }
        }
        Ok(less.into_iter().collect())
    }

    /// Records work that uses a buffer.
    pub(super) fn note_use_of(&mut self, id: BufferId, token: UseToken, access: Access) {
        self.buffers[id].uses.note(token, access);
        self.uses.note(token, id);
    }

    /// Records that a stream's work up to a point is complete. Returns the buffers that have no work in
    /// flight since. O(log n) for each use that is complete.
    pub fn complete_use(&mut self, token: UseToken) -> Vec<BufferId> {
        let mut all = usize::MAX;
        self.complete_some_uses(token, &mut all)
    }

    /// Does the same for `most` uses, and subtracts those. Where zero are left, call it again for the rest:
    /// that work counts as in flight until then.
    pub fn complete_some_uses(&mut self, token: UseToken, most: &mut usize) -> Vec<BufferId> {
        let mut idle = Vec::new();
        let over = self.uses.take_over(token, *most);
        *most -= over.len();
        for id in over {
            self.counters.looked_at += 1;
            let Some(buffer) = self.buffers.get_mut(id) else { continue };
            if buffer.uses.is_empty() {
                continue;
            }
            buffer.uses.over(token);
            if buffer.uses.is_empty() {
                idle.push(id);
            }
            self.refresh(id);
        }
        idle
    }
}
