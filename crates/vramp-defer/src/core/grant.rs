//! Granting and ending leases: the right to use a set of buffers, all or nothing.
//!
//! A request is granted at once, or refused with what to wait for; a waiter holds nothing. All
//! leases together never need more than the capacity. So leases cannot deadlock, unless a caller
//! takes a second one while it holds a first. `wait_queue.rs` has the order of waiters, and
//! `overtake.rs` what a second one may overtake.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use super::buffer_state::Buffer;
use super::in_place::SplitRequest;
use super::piece::{ContentPlace, Piece, PieceMove};
use super::range::Range;
use super::uses::latest_by_stream;
use super::wait_queue::{Blocked, LAST, Place};
use super::{
    Access, BufferId, BufferLeaseId, Deferrables, Hint, HolderKey, LeaseEndError, LeaseRefused,
    MoveId, PieceId, RangeId, Restore, StaleCopy, StreamKey, UnknownBuffer, UnknownBufferLease,
    UseToken,
};
use vramp_core::Bytes;

#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub buffers: SmallVec<[(BufferId, Access); 4]>,
    streams: SmallVec<[StreamKey; 2]>,
    pub holder: HolderKey,
    /// Buffers that are read in place: nothing of them was restored.
    pub in_place: SmallVec<[BufferId; 2]>,
    /// Buffers that are overwritten, in order: nothing of them was restored.
    pub overwritten: SmallVec<[BufferId; 2]>,
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
    /// Buffers that stay where they are, see [`Deferrables::lease_in_place`].
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
    /// These bytes only; other pieces stay clean. An exposed buffer counts as written as a whole.
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
            let Buffer { holders, in_place, .. } = &self.buffers[id];
            // One that holds it exclusively is the only one.
            let excludes = |held: Access| *in_place > 0 || held.max(wanted) == Access::Exclusive;
            holders.first().is_some_and(|&(_, held)| excludes(held))
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
            let Buffer { holders, in_place, .. } = &self.buffers[buffer];
            // A buffer that is read in place must not move.
            let stays = *in_place > 0;
            let excludes = move |held: Access| stays || held.max(wanted) == Access::Exclusive;
            let holders = holders.iter();
            holders.filter(move |(_, held)| excludes(*held)).map(|&(lease, _)| lease)
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

    /// Records the lease. Buffers of `in_place` stay where they are.
    pub(super) fn grant(
        &mut self,
        buffers: SmallVec<[(BufferId, Access); 4]>,
        in_place: SmallVec<[BufferId; 2]>,
        request: &LeaseRequest<'_>,
        now_ns: u64,
    ) -> GrantedLease {
        let lease = BufferLeaseId(self.next());
        self.ranges_of(&buffers).into_iter().for_each(|range| self.cancel_evictions(range));
        let mut ranges = BTreeSet::new();
        let mut after = Vec::new();
        let mut restores = Vec::new();
        for &(id, access) in &buffers {
            let last_stream = &mut self.buffers[id].last_stream;
            *last_stream = request.streams.last().copied().or(*last_stream);
            if in_place.contains(&id) {
                after.extend(self.hold_in_place(id, lease, now_ns));
                continue;
            }
            ranges.insert(self.buffers[id].range);
            let buffer = &mut self.buffers[id];
            buffer.holders.push((lease, access));
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
        let mut after = latest_by_stream(after.iter());
        after.retain(|token| request.streams != [token.stream]);
        let (ranges, stay) = (ranges.into_iter().collect(), in_place.to_vec());
        let (streams, holder) = (request.streams.into(), request.holder);
        self.leases.insert(
            lease,
            Lease { buffers, streams, holder, in_place, overwritten: SmallVec::new() },
        );
        self.wait_queue.add_lease(lease, holder);
        self.counters.leases += 1;
        GrantedLease { lease, after, restores, ranges, in_place: stay }
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
    /// O(pieces).
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
        self.wait_queue.remove_lease(lease, ended.holder);
        let mut stale = Vec::new();
        for (id, access) in ended.buffers {
            let tokens = end.uses.iter().filter(|use_| use_.buffer == id).map(|use_| use_.token);
            let buffer = &mut self.buffers[id];
            buffer.holders.retain(|(holder, _)| *holder != lease);
            buffer.in_place -= u32::from(ended.in_place.contains(&id));
            buffer.last_use_ns = now_ns;
            if access == Access::Shared {
                tokens.for_each(|token| self.note_use_of(id, token, Access::Shared));
            } else {
                let tokens: SmallVec<[UseToken; 2]> = tokens.collect();
                if !tokens.is_empty() {
                    buffer.uses.replace(tokens.iter().copied());
                    tokens.into_iter().for_each(|token| self.uses.note(token, id));
                }
                let all = ended.overwritten.binary_search(&id).is_ok();
                stale.extend(self.end_writing(id, if all { Writes::All } else { end.writes }));
            }
            self.reindex_buffer(id);
            self.refresh(id);
        }
        Ok(stale)
    }

    fn check_end(&self, lease: BufferLeaseId, end: &LeaseEnd<'_>) -> Result<(), LeaseEndError> {
        let held = self.leases.get(&lease).ok_or(UnknownBufferLease { lease })?;
        let access = |buffer: BufferId| {
            let found = held.buffers.iter().find(|(held, _)| *held == buffer);
            found.map(|&(_, access)| access).ok_or(LeaseEndError::OtherBuffer { buffer })
        };
        let lacking = |id: &PieceId| {
            !held.in_place.contains(&id.buffer)
                && held.overwritten.binary_search(&id.buffer).is_err()
                && self.piece(*id).place == ContentPlace::SpillTier
        };
        let mut pieces = held.buffers.iter().flat_map(|&(buffer, _)| self.pieces_of(buffer));
        if let Some(piece) = pieces.find(lacking) {
            return Err(LeaseEndError::NotRestored { piece });
        }
        for use_ in end.uses {
            access(use_.buffer)?;
            let stream = use_.token.stream;
            if !held.streams.contains(&stream) {
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

    fn end_writing(&mut self, id: BufferId, writes: Writes<'_>) -> Vec<StaleCopy> {
        let exposed = self.buffers[id].exposed;
        let is_out = exposed.stream_scoped || exposed.quiesced || exposed.opaque > 0;
        let piece = self.config.piece;
        match writes {
            Writes::Only(written) if !is_out => {
                let touches = |index: usize| {
                    let start = piece * index as u64;
                    let mine = written.iter().filter(|one| one.buffer == id && !one.len.is_zero());
                    let mut mine = mine.map(|one| (one.offset, one.offset + one.len));
                    mine.any(|(from, to)| from < start + piece && start < to)
                };
                self.note_written(id, touches)
            }
            _ => self.note_written(id, |_| true),
        }
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
        self.wait_queue.remove_lease(lease, cancelled.holder);
        let mut less = BTreeSet::new();
        for (id, _) in cancelled.buffers {
            let buffer = &mut self.buffers[id];
            buffer.holders.retain(|(holder, _)| *holder != lease);
            let stayed = u32::from(cancelled.in_place.contains(&id));
            buffer.in_place -= stayed;
            buffer.reads = buffer.reads.saturating_sub(stayed);
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
        let mut idle = Vec::new();
        for id in self.uses.take_over(token) {
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
