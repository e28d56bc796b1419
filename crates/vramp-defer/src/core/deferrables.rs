//! The state: all buffers, their ranges, leases and moves. Adding and removing buffers.

use std::collections::{BTreeMap, BTreeSet};

use slotmap::SlotMap;

use super::buffer_state::{Buffer, Hint};
use super::buffer_state::{ContentPlace, Copies, Piece, PieceMove};
use super::buffer_state::{HostCopies, PeerCopies};
use super::lease::Lease;
use super::lists::Lists;
use super::range::{BLOCK_ALIGN, GroupSet, Range, Tenant, merged};
use super::uses::UseIndex;
use super::uses::Uses;
use super::wait_queue::WaitQueue;
use super::{
    AddError, BufferId, BufferLeaseId, DeferConfig, DeferConfigError, DeferCounters, GroupSetId,
    HeldError, Holds, MoveId, PieceId, PieceState, RangeId, RangeSlice, SpillRoom, StaleCopy,
    UnknownBuffer, UnknownRange,
};
use vramp_core::{Bytes, PoolAddr};

/// State of all deferrable buffers of one card.
#[derive(Clone, Debug)]
pub struct Deferrables {
    pub(super) config: DeferConfig,
    pub(super) buffers: SlotMap<BufferId, Buffer>,
    pub(super) ranges: SlotMap<RangeId, Range>,
    pub(super) leases: BTreeMap<BufferLeaseId, Lease>,
    pub(super) wait_queue: WaitQueue,
    pub(super) moves: BTreeMap<MoveId, PieceId>,
    /// Buffers by the work that may still use them.
    pub(super) uses: UseIndex,
    /// Buffers without handles that may end now.
    pub(super) ending: BTreeSet<BufferId>,
    /// Number of buffers without handles.
    pub(super) without_handles: usize,
    pub(super) group_sets: SlotMap<GroupSetId, GroupSet>,
    /// What may leave the card.
    pub(super) lists: Lists,
    /// Sum of the lengths of ranges with an unevictable tenant.
    pub(super) committed: Bytes,
    /// Sum of the lengths of ranges that stay on the card even without leases.
    pub(super) kept: Bytes,
    /// Memory mapped at the ranges now.
    pub(super) occupied: Bytes,
    /// Copies on other cards, in the order in which they are reclaimed.
    pub(super) peer_copies: PeerCopies,
    /// Copies on the host, in the order in which they are reclaimed.
    pub(super) host_copies: HostCopies,
    /// Bytes of contents on the card that have a copy.
    pub(super) clean: Bytes,
    /// Room below the card that moves in flight will take.
    pub(super) promised: SpillRoom,
    pub(super) counters: DeferCounters,
    pub(super) next: u64,
}

/// A buffer that was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddedBuffer {
    /// Id of the buffer.
    pub buffer: BufferId,
    /// Addresses of the buffer.
    pub at: RangeSlice,
}

impl Deferrables {
    /// Returns a state without buffers.
    ///
    /// # Errors
    /// The piece length is not a whole number of pages, or more than 32 MiB.
    pub fn new(config: DeferConfig) -> Result<Deferrables, DeferConfigError> {
        config.check()?;
        Ok(Deferrables {
            config,
            buffers: SlotMap::with_key(),
            ranges: SlotMap::with_key(),
            leases: BTreeMap::new(),
            wait_queue: WaitQueue::default(),
            moves: BTreeMap::new(),
            uses: UseIndex::default(),
            ending: BTreeSet::new(),
            without_handles: 0,
            group_sets: SlotMap::with_key(),
            lists: Lists::default(),
            committed: Bytes::ZERO,
            kept: Bytes::ZERO,
            occupied: Bytes::ZERO,
            peer_copies: PeerCopies::new(),
            host_copies: HostCopies::new(),
            clean: Bytes::ZERO,
            promised: SpillRoom::default(),
            counters: DeferCounters::default(),
            next: 0,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> DeferConfig {
        self.config
    }

    /// Sets the most memory that leased buffers may occupy. Granted leases stay. O(1) while no waiter
    /// lacks room.
    pub fn set_capacity(&mut self, capacity: Bytes) {
        let was_tight = self.is_tight();
        let before = std::mem::replace(&mut self.config.capacity, capacity);
        if before != capacity && (was_tight || self.is_tight()) {
            self.wait_queue.mark_pinned();
        }
    }

    /// Returns the memory mapped at the ranges now, in whole pages. O(1).
    pub fn occupied(&self) -> Bytes {
        self.occupied
    }

    /// Adds a buffer with a range of its own, as long as the buffer in whole pages. O(pieces).
    ///
    /// # Errors
    /// The length is zero, or more than the address space.
    pub fn add_buffer(&mut self, len: Bytes) -> Result<AddedBuffer, AddError> {
        self.check_len(len, PoolAddr::SPAN_LIMIT.round_down(self.config.page))?;
        let range = self.ranges.insert(Range::of_buffer(self.config.pages(len)));
        Ok(self.add(range, Bytes::ZERO, len))
    }

    pub(super) fn check_len(&self, len: Bytes, most: Bytes) -> Result<(), AddError> {
        if len.is_zero() || len > most {
            return Err(AddError::Length { len, most });
        }
        Ok(())
    }

    pub(super) fn add(&mut self, range: RangeId, offset: Bytes, len: Bytes) -> AddedBuffer {
        let piece = self.config.piece;
        let mut pieces = vec![Piece::new(piece); (len.count() / piece.count()) as usize];
        let rest = len - piece * pieces.len() as u64;
        if !rest.is_zero() {
            pieces.push(Piece::new(rest));
        }
        let buffer = self.buffers.insert(Buffer {
            len,
            range,
            offset,
            pieces,
            deferred: Bytes::ZERO,
            priority: 0,
            hint: Hint::None,
            last_use_ns: 0,
            last_stream: None,
            cools_at: None,
            holders: Default::default(),
            reads: 0,
            readable: false,
            uses: Uses::default(),
            pins: 0,
            has_pinned_memory: false,
            is_counted: false,
            is_kept: false,
            is_ending: false,
        });
        let whole = len.checked_round_up(BLOCK_ALIGN).expect("lengths are below the span limit");
        self.ranges[range].tenants.insert(offset, Tenant { buffer, len: whole });
        AddedBuffer { buffer, at: RangeSlice { range, offset, len } }
    }

    /// Discards contents: they are neither copied out nor restored. Returns the stale copies.
    /// Memory stays mapped until it is chosen, or the buffer is removed.
    ///
    /// # Errors
    /// A lease, a pin or a move holds the buffer. Nothing changes. Work in flight is
    /// no obstacle.
    pub fn discard(&mut self, buffer: BufferId) -> Result<Vec<StaleCopy>, HeldError> {
        let mut holds = self.holds(buffer)?;
        holds.uses.clear();
        if !holds.is_free() {
            return Err(HeldError::Held { buffer, holds });
        }
        let stale = self.drop_copies(buffer, |_| true);
        let discarded = &mut self.buffers[buffer];
        discarded.deferred = Bytes::ZERO;
        for piece in &mut discarded.pieces {
            piece.place = ContentPlace::Empty;
        }
        self.reindex_buffer(buffer);
        Ok(stale)
    }

    /// Removes a buffer, and its range unless that is a group's. Returns the stale copies.
    ///
    /// # Errors
    /// A lease, a pin, a move or work in flight holds the buffer. Nothing changes.
    pub fn remove(&mut self, buffer: BufferId) -> Result<Vec<StaleCopy>, HeldError> {
        let holds = self.holds(buffer)?;
        if !holds.is_free() {
            return Err(HeldError::Held { buffer, holds });
        }
        let stale = self.discard(buffer)?;
        // Memory that is pinned stays pinned in the pool; the range does without it.
        self.buffers[buffer].has_pinned_memory = false;
        self.refresh(buffer);
        for index in 0..self.buffers[buffer].pieces.len() {
            self.set_backed(PieceId { buffer, index: index as u32 }, false);
        }
        self.unlist(buffer);
        self.ending.remove(&buffer);
        let gone = self.buffers.remove(buffer).expect("it was found above");
        self.without_handles -= usize::from(gone.is_ending);
        self.touch(buffer);
        let range = &mut self.ranges[gone.range];
        range.tenants.remove(&gone.offset);
        match range.is_group {
            true => self.vacate(gone.range, gone.offset, gone.len),
            false => drop(self.ranges.remove(gone.range)),
        }
        Ok(stale)
    }

    /// Returns what holds a buffer. O(pieces).
    pub fn holds(&self, buffer: BufferId) -> Result<Holds, UnknownBuffer> {
        let buffer = self.get(buffer)?;
        Ok(Holds {
            leases: buffer.holders.leases(),
            pins: buffer.pins,
            uses: buffer.uses.all(),
            moves: buffer
                .pieces
                .iter()
                .filter_map(|piece| piece.motion.map(PieceMove::id))
                .collect(),
        })
    }

    /// Returns the buffers of a range, by offset.
    pub fn tenants(&self, range: RangeId) -> impl Iterator<Item = BufferId> {
        let tenants = self.ranges.get(range).map(|range| range.tenants.values());
        tenants.into_iter().flatten().map(|tenant| tenant.buffer)
    }

    /// Returns the addresses of a buffer.
    pub fn slice(&self, buffer: BufferId) -> Result<RangeSlice, UnknownBuffer> {
        let Buffer { range, offset, len, .. } = *self.get(buffer)?;
        Ok(RangeSlice { range, offset, len })
    }

    /// Returns true if no contents of a buffer are below the card only. O(1).
    ///
    /// # Errors
    /// The buffer does not exist.
    pub fn is_on_card(&self, buffer: BufferId) -> Result<bool, UnknownBuffer> {
        Ok(self.get(buffer)?.deferred.is_zero())
    }

    /// Returns the state of each piece of a buffer, in order.
    pub fn states(&self, buffer: BufferId) -> Result<Vec<PieceState>, UnknownBuffer> {
        Ok(self.get(buffer)?.pieces.iter().map(Piece::state).collect())
    }

    /// Returns the parts of a range that need memory, as offsets and lengths: sorted, merged,
    /// disjoint; of a group in whole pages. The rest may be lent to the pool: all work on it is complete.
    /// O(pieces), and O(pages) for a group.
    pub fn needed_memory(&self, range: RangeId) -> Result<Vec<(Bytes, Bytes)>, UnknownRange> {
        let known = self.ranges.get(range).ok_or(UnknownRange { range })?;
        if known.is_group {
            let page = self.config.page;
            let backed = (0..).zip(&known.backed_in_page).filter(|(_, backed)| **backed > 0);
            return Ok(merged(backed.map(|(index, _)| (page * index, page))));
        }
        let pieces = known.tenants.values().flat_map(|tenant| {
            let buffer = &self.buffers[tenant.buffer];
            let at = |index: usize| buffer.offset + self.config.piece * index as u64;
            let backed = buffer.pieces.iter().enumerate().filter(|(_, piece)| piece.backed);
            backed.map(move |(index, piece)| (at(index), piece.len))
        });
        Ok(merged(pieces))
    }

    pub(super) fn get(&self, buffer: BufferId) -> Result<&Buffer, UnknownBuffer> {
        self.buffers.get(buffer).ok_or(UnknownBuffer { buffer })
    }

    pub(super) fn get_mut(&mut self, buffer: BufferId) -> Result<&mut Buffer, UnknownBuffer> {
        self.buffers.get_mut(buffer).ok_or(UnknownBuffer { buffer })
    }

    pub(super) fn piece(&self, id: PieceId) -> &Piece {
        &self.buffers[id.buffer].pieces[id.index as usize]
    }

    /// Returns a piece that is about to change.
    pub(super) fn piece_mut(&mut self, id: PieceId) -> &mut Piece {
        self.note_changed(id);
        &mut self.buffers[id.buffer].pieces[id.index as usize]
    }

    pub(super) fn piece_slice(&self, id: PieceId) -> RangeSlice {
        let buffer = &self.buffers[id.buffer];
        let offset = buffer.offset + self.config.piece * u64::from(id.index);
        RangeSlice { range: buffer.range, offset, len: self.piece(id).len }
    }

    pub(super) fn begin(
        &mut self,
        piece: PieceId,
        motion: impl FnOnce(MoveId) -> PieceMove,
    ) -> MoveId {
        let id = MoveId(self.next());
        self.moves.insert(id, piece);
        let motion = motion(id);
        self.count_leaving(piece, motion.is_leaving(), 1);
        if let Some(to) = motion.promised() {
            let len = self.piece(piece).len;
            *self.promised.of(to) += len;
        }
        self.piece_mut(piece).motion = Some(motion);
        self.touch(piece.buffer);
        id
    }

    pub(super) fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Marks a piece as backed by memory or not. Returns the memory that is mapped or unmapped with
    /// it: the piece's pages, or all of a group for its first and its last piece.
    pub(super) fn set_backed(&mut self, id: PieceId, backed: bool) -> Bytes {
        let piece = self.piece_mut(id);
        if piece.backed == backed {
            return Bytes::ZERO;
        }
        piece.backed = backed;
        let len = piece.len;
        let Buffer { range, offset, .. } = self.buffers[id.buffer];
        let range = &mut self.ranges[range];
        if range.is_group {
            range.count_pages(offset, len, self.config.page, backed);
        }
        let others = if backed { range.backed } else { range.backed - 1 };
        range.backed = if backed { others + 1 } else { others };
        let memory = match (range.leaves_together(), others) {
            (true, 0) => range.len,
            (true, _) => Bytes::ZERO,
            (false, _) => self.config.pages(len),
        };
        if range.is_adopted {
            if !backed && others == 0 {
                self.end_adoption(id.buffer);
            }
            return memory;
        }
        let occupied = self.occupied;
        self.occupied = if backed { occupied + memory } else { occupied - memory };
        memory
    }

    /// Updates what depends on leases, pins and uses.
    pub(super) fn refresh(&mut self, id: BufferId) {
        self.note_buffer_changed(id);
        self.note_let_go(id);
        let buffer = &mut self.buffers[id];
        let (is_counted, is_kept) = (buffer.is_unevictable(), buffer.is_pinned());
        let was_counted = std::mem::replace(&mut buffer.is_counted, is_counted);
        let was_kept = std::mem::replace(&mut buffer.is_kept, is_kept);
        let id_of_range = buffer.range;
        self.touch(id);
        if (was_counted, was_kept) == (is_counted, is_kept) {
            return;
        }
        let range = &mut self.ranges[id_of_range];
        let before = (range.unevictable_count > 0, range.kept_count > 0);
        range.unevictable_count += u32::from(is_counted);
        range.unevictable_count -= u32::from(was_counted);
        range.kept_count += u32::from(is_kept);
        range.kept_count -= u32::from(was_kept);
        let after = (range.unevictable_count > 0, range.kept_count > 0);
        if before == after {
            return;
        }
        let of = |counts: bool| if counts { range.needs() } else { Bytes::ZERO };
        self.committed = self.committed + of(after.0) - of(before.0);
        self.kept = self.kept + of(after.1) - of(before.1);
        self.range_was_counted(id_of_range, before.0 && !after.0, before.1 != after.1);
    }

    /// Marks the waiters for whom a range's memory counts differently now.
    fn range_was_counted(&mut self, range: RangeId, frees: bool, pins_changed: bool) {
        if self.wait_queue.is_empty() {
            return;
        }
        if frees {
            self.wait_queue.mark_room();
        }
        if pins_changed {
            self.wait_queue.mark_pinned();
        }
        // Other tenants share the memory.
        for buffer in self.waited_tenants(range) {
            self.touch(buffer);
            if pins_changed {
                self.wait_queue.mark_all_for(buffer);
            }
        }
    }

    /// Invalidates the copies of some pieces, and copies of them in flight.
    pub(super) fn drop_copies(
        &mut self,
        id: BufferId,
        of: impl Fn(usize) -> bool,
    ) -> Vec<StaleCopy> {
        let buffer = &mut self.buffers[id];
        let after = buffer.uses.writes();
        let mut stale = Vec::new();
        for (index, piece) in buffer.pieces.iter_mut().enumerate().filter(|(index, _)| of(*index)) {
            if let Some(PieceMove::Out { torn, .. }) = &mut piece.motion {
                *torn = true;
            }
            let id = PieceId { buffer: id, index: index as u32 };
            let copies = std::mem::replace(&mut piece.copies, Copies::NONE);
            let gone =
                copies.iter().map(|from| StaleCopy { piece: id, from, after: after.clone() });
            stale.extend(gone);
        }
        self.counters.copies_dropped += stale.len() as u64;
        self.reindex_buffer(id);
        stale
    }
}
