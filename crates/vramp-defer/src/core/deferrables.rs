//! The state: all buffers, their ranges, leases and moves. Adding and removing buffers.

use std::collections::{BTreeMap, BTreeSet};

use slotmap::SlotMap;

use super::buffer_state::{Buffer, Exposures, Hint};
use super::grant::Lease;
use super::peers::PeerCopies;
use super::piece::{ContentPlace, Copies, Piece, PieceMove};
use super::range::{BLOCK_ALIGN, Range, Tenant, merged};
use super::uses::Uses;
use super::wait_queue::Waiter;
use super::{
    AddError, BufferId, BufferLeaseId, DeferConfig, DeferConfigError, DeferCounters, HeldError,
    MoveId, PieceId, PieceState, RangeId, RangeSlice, SpillRoom, StaleCopy, Ticket, UnknownBuffer,
    UnknownRange,
};
use vramp_core::{Bytes, PoolAddr};

/// State of all deferrable buffers of one card.
#[derive(Clone, Debug)]
pub struct Deferrables {
    pub(super) config: DeferConfig,
    pub(super) buffers: SlotMap<BufferId, Buffer>,
    pub(super) ranges: SlotMap<RangeId, Range>,
    pub(super) leases: BTreeMap<BufferLeaseId, Lease>,
    /// Waiting requests, the oldest first.
    pub(super) wait_queue: BTreeMap<Ticket, Waiter>,
    pub(super) moves: BTreeMap<MoveId, PieceId>,
    /// Buffers with work that may still run.
    pub(super) in_use: BTreeSet<BufferId>,
    /// Sum of the lengths of ranges with an unevictable tenant.
    pub(super) committed: Bytes,
    /// Memory mapped at the ranges now.
    pub(super) occupied: Bytes,
    /// Copies on other cards, in the order in which they are reclaimed.
    pub(super) peer_copies: PeerCopies,
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
            wait_queue: BTreeMap::new(),
            moves: BTreeMap::new(),
            in_use: BTreeSet::new(),
            committed: Bytes::ZERO,
            occupied: Bytes::ZERO,
            peer_copies: PeerCopies::new(),
            promised: SpillRoom::default(),
            counters: DeferCounters::default(),
            next: 0,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> DeferConfig {
        self.config
    }

    /// Sets the most memory that leased buffers may occupy. Granted leases stay.
    pub fn set_capacity(&mut self, capacity: Bytes) {
        self.config.capacity = capacity;
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
        let range = Range::new(self.config.pages(len), false);
        let range = self.ranges.insert(range);
        Ok(self.add(range, Bytes::ZERO, len))
    }

    /// Adds a range for small buffers that are used together and have the same lifetime.
    ///
    /// # Errors
    /// The length is zero, or more than a piece.
    pub fn add_group(&mut self, len: Bytes) -> Result<RangeId, AddError> {
        self.check_len(len, self.config.piece)?;
        Ok(self.ranges.insert(Range::new(self.config.pages(len), true)))
    }

    /// Adds a buffer to a group, in the lowest gap where it fits. O(tenants).
    ///
    /// # Errors
    /// The group does not exist, or has no such gap.
    pub fn add_tenant(&mut self, group: RangeId, len: Bytes) -> Result<AddedBuffer, AddError> {
        let unknown = UnknownRange { range: group };
        let range = self.ranges.get(group).filter(|range| range.is_group).ok_or(unknown)?;
        self.check_len(len, self.config.piece)?;
        let whole = len.checked_round_up(BLOCK_ALIGN).expect("a piece is no longer than 32 MiB");
        let full = || AddError::Full { group, len, longest: range.longest_gap() };
        let offset = range.gap(whole).ok_or_else(full)?;
        Ok(self.add(group, offset, len))
    }

    fn check_len(&self, len: Bytes, most: Bytes) -> Result<(), AddError> {
        if len.is_zero() || len > most {
            return Err(AddError::Length { len, most });
        }
        Ok(())
    }

    fn add(&mut self, range: RangeId, offset: Bytes, len: Bytes) -> AddedBuffer {
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
            priority: 0,
            hint: Hint::None,
            last_use_ns: 0,
            retrieved_ns: None,
            holders: Default::default(),
            in_place: 0,
            reads: 0,
            readable: false,
            uses: Uses::default(),
            pins: 0,
            has_pinned_memory: false,
            exposed: Exposures::default(),
            is_counted: false,
        });
        let whole = len.checked_round_up(BLOCK_ALIGN).expect("lengths are below the span limit");
        self.ranges[range].tenants.insert(offset, Tenant { buffer, len: whole });
        AddedBuffer { buffer, at: RangeSlice { range, offset, len } }
    }

    /// Discards contents: they are neither copied out nor restored. Returns the stale copies.
    /// Memory stays mapped until it is chosen, or the buffer is removed.
    ///
    /// # Errors
    /// A lease, a pin, an exposure or a move holds the buffer. Nothing changes. Work in flight is
    /// no obstacle.
    pub fn discard(&mut self, buffer: BufferId) -> Result<Vec<StaleCopy>, HeldError> {
        let mut holds = self.holds(buffer)?;
        holds.uses.clear();
        if !holds.is_free() {
            return Err(HeldError::Held { buffer, holds });
        }
        let stale = self.drop_copies(buffer, |_| true);
        for piece in &mut self.buffers[buffer].pieces {
            piece.place = ContentPlace::Empty;
        }
        debug_assert!(self.buffers[buffer].pieces.iter().all(|piece| piece.peer_key.is_none()));
        Ok(stale)
    }

    /// Removes a buffer, and its range unless that is a group's. Returns the stale copies.
    ///
    /// # Errors
    /// A lease, a pin, an exposure, a move or work in flight holds the buffer. Nothing changes.
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
        let gone = self.buffers.remove(buffer).expect("it was found above");
        let range = &mut self.ranges[gone.range];
        range.tenants.remove(&gone.offset);
        if !range.is_group {
            self.ranges.remove(gone.range);
        }
        Ok(stale)
    }

    /// Removes a group without tenants. Returns false if it has some, or does not exist.
    pub fn remove_group(&mut self, group: RangeId) -> bool {
        let empty = |range: &Range| range.is_group && range.tenants.is_empty();
        self.ranges.get(group).is_some_and(empty) && self.ranges.remove(group).is_some()
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

    /// Returns the state of each piece of a buffer, in order.
    pub fn states(&self, buffer: BufferId) -> Result<Vec<PieceState>, UnknownBuffer> {
        Ok(self.get(buffer)?.pieces.iter().map(Piece::state).collect())
    }

    /// Returns the parts of a range that need memory, as offsets and lengths: sorted, merged,
    /// disjoint. The rest may be lent to the pool: all work on it is complete. O(pieces).
    pub fn needed_memory(&self, range: RangeId) -> Result<Vec<(Bytes, Bytes)>, UnknownRange> {
        let tenants = &self.ranges.get(range).ok_or(UnknownRange { range })?.tenants;
        let pieces = tenants.values().flat_map(|tenant| {
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

    pub(super) fn piece_mut(&mut self, id: PieceId) -> &mut Piece {
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
        if let Some(to) = motion.promised() {
            let len = self.piece(piece).len;
            *self.promised.of(to) += len;
        }
        self.piece_mut(piece).motion = Some(motion);
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
        let range = self.buffers[id.buffer].range;
        let range = &mut self.ranges[range];
        let others = if backed { range.backed } else { range.backed - 1 };
        range.backed = if backed { others + 1 } else { others };
        let memory = match (range.is_group, others) {
            (true, 0) => range.len,
            (true, _) => Bytes::ZERO,
            (false, _) => self.config.pages(len),
        };
        let occupied = self.occupied;
        self.occupied = if backed { occupied + memory } else { occupied - memory };
        memory
    }

    /// Updates what depends on leases, pins, exposures and uses.
    pub(super) fn refresh(&mut self, id: BufferId) {
        let buffer = &mut self.buffers[id];
        if buffer.uses.is_empty() {
            self.in_use.remove(&id);
        } else {
            self.in_use.insert(id);
        }
        buffer.exposed.stream_scoped &= !(buffer.holders.is_empty() && buffer.uses.is_empty());
        let is_counted = buffer.is_unevictable();
        if buffer.is_counted == is_counted {
            return;
        }
        buffer.is_counted = is_counted;
        let range = &mut self.ranges[buffer.range];
        if is_counted {
            range.unevictable_count += 1;
            if range.unevictable_count == 1 {
                self.committed += range.len;
            }
        } else {
            range.unevictable_count -= 1;
            if range.unevictable_count == 0 {
                self.committed -= range.len;
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
