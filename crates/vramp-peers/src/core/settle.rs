//! Driver operations as values, and the only place where performed ones change the pool.

use super::block::SegmentId;
use super::block::{Block, Class, Slot, State};
use super::pool::{Segment, TorchPool};
use super::stats::ByClass;
use vramp_core::Bytes;
use vramp_core::{PoolAddr, StreamId};

/// One operation on the device, performed as a whole or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TorchOp {
    /// Allocates memory as a new segment.
    Allocate {
        /// Id of the new segment.
        segment: SegmentId,
        /// Length of the segment.
        len: Bytes,
    },
    /// Frees an allocated segment. Waits for all work on the device.
    Free {
        /// Segment to free.
        segment: SegmentId,
        /// Length of the segment.
        len: Bytes,
    },
    /// Reserves a range of addresses as a new segment.
    Reserve {
        /// Id of the new segment.
        segment: SegmentId,
        /// Length of the range.
        len: Bytes,
    },
    /// Frees a range of addresses. Nothing is mapped in it.
    FreeAddresses {
        /// Segment to free.
        segment: SegmentId,
        /// Length of the range.
        len: Bytes,
    },
    /// Creates handles, maps them side by side and sets access.
    Map {
        /// Segment whose range is meant.
        segment: SegmentId,
        /// Distance of the first handle from the range's start.
        offset: Bytes,
        /// Length of all handles together.
        len: Bytes,
        /// Length of each handle.
        handle: Bytes,
    },
    /// Waits for `stream`, then unmaps and releases handles.
    Unmap {
        /// Segment whose range is meant.
        segment: SegmentId,
        /// Stream whose work may still touch the memory.
        stream: StreamId,
        /// Distance of the first handle from the range's start.
        offset: Bytes,
        /// Length of all handles together.
        len: Bytes,
        /// Length of each handle.
        handle: Bytes,
    },
}

/// The block or segment that an operation is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// The block that it maps, unmaps or releases.
    Block(Slot),
    /// A new segment.
    New { class: Class, stream: StreamId, at: PoolAddr },
}

/// An operation to perform and then settle. Dropping it changes nothing.
#[derive(Debug)]
#[must_use = "the pool does not see an operation that is performed and not settled"]
pub struct TorchPlan {
    pub(crate) op: TorchOp,
    pub(crate) target: Target,
}

impl TorchPlan {
    /// Returns the operation to perform on the device.
    pub fn op(&self) -> TorchOp {
        self.op
    }
}

impl TorchPool {
    /// Applies a performed operation to the state.
    pub fn settle(&mut self, plan: TorchPlan) {
        self.performed.push(plan.op);
        match (plan.op, plan.target) {
            (TorchOp::Allocate { segment, len }, Target::New { class, stream, at }) => {
                self.addresses.take(at.offset().count(), len.count());
                let slot = self.add_segment(segment, at, len.count(), None, class, stream);
                self.list(slot);
                self.fresh = Some(slot);
                self.grown(class, len, 1);
                self.stats.segment.increase(class, 1);
                if len.count() >= self.config.oversize() {
                    self.stats.oversize_segments.increase(1);
                }
            }
            (TorchOp::Free { segment, len }, Target::Block(slot)) => {
                self.unlist(slot);
                let block = self.blocks.remove(slot);
                self.addresses.free(block.at.offset().count(), len.count());
                self.segments[segment.index()] = None;
                self.shrunk(block.class, len, 1);
                self.stats.segment.decrease(block.class, 1);
                if len.count() >= self.config.oversize() {
                    self.stats.oversize_segments.decrease(1);
                }
            }
            (TorchOp::Reserve { segment, len }, Target::New { class, stream, at }) => {
                let handle = self.handle_size(class);
                let slot = self.add_segment(segment, at, len.count(), Some(handle), class, stream);
                self.list(slot);
            }
            (TorchOp::FreeAddresses { segment, .. }, Target::Block(slot)) => {
                self.unlist(slot);
                self.blocks.remove(slot);
                self.segments[segment.index()] = None;
            }
            (TorchOp::Map { len, handle, .. }, Target::Block(slot)) => {
                let class = self.blocks.get(slot).class;
                self.fresh = Some(self.mapped(slot, len.count()));
                self.grown(class, len, len.count() / handle.count());
            }
            (TorchOp::Unmap { segment, offset, len, handle, .. }, Target::Block(slot)) => {
                let class = self.blocks.get(slot).class;
                let start = self.segment(segment).at.plus(offset.count());
                self.unmapped(slot, start, len.count());
                self.shrunk(class, len, len.count() / handle.count());
            }
            (op, target) => panic!("{op:?} is not for {target:?}"),
        }
    }

    fn add_segment(
        &mut self,
        segment: SegmentId,
        at: PoolAddr,
        len: u64,
        handle: Option<u64>,
        class: Class,
        stream: StreamId,
    ) -> Slot {
        if self.segments.len() <= segment.index() {
            self.segments.resize(segment.index() + 1, None);
        }
        let before = self.segments[segment.index()].replace(Segment { at, len, handle });
        assert!(before.is_none(), "{segment} is there already");
        let state = if handle.is_some() { State::Unmapped } else { State::Free };
        self.blocks.add(Block {
            at,
            len,
            requested: 0,
            stream,
            class,
            segment,
            state,
            uses: Default::default(),
            free_since: 0,
            prev: None,
            next: None,
        })
    }

    /// Makes the mapped front of an unmapped block free, and merges it with its free neighbours.
    fn mapped(&mut self, slot: Slot, len: u64) -> Slot {
        self.unlist(slot);
        let front = if len < self.blocks.get(slot).len {
            let front = self.blocks.split_front(slot, len);
            self.list(slot);
            front
        } else {
            slot
        };
        self.blocks.get_mut(front).state = State::Free;
        let _ = self.merge_neighbours(front);
        self.list(front);
        front
    }

    /// Makes an unmapped part of a free block unmapped in the state.
    fn unmapped(&mut self, slot: Slot, start: PoolAddr, len: u64) {
        self.unlist(slot);
        let before = start.since(self.blocks.get(slot).at);
        if before > 0 {
            let front = self.blocks.split_front(slot, before);
            self.list(front);
        }
        let hole = if len < self.blocks.get(slot).len {
            let hole = self.blocks.split_front(slot, len);
            self.list(slot);
            hole
        } else {
            slot
        };
        self.blocks.get_mut(hole).state = State::Unmapped;
        let _ = self.merge_neighbours(hole);
        self.list(hole);
    }

    fn grown(&mut self, class: Class, len: Bytes, chunks: u64) {
        self.reserved += len.count();
        self.counters.reserved_peak = self.counters.reserved_peak.max(Bytes::new(self.reserved));
        self.counters.chunks_created += chunks;
        self.stats.reserved_bytes.increase(class, len.count());
        self.stats.num_device_alloc += 1;
    }

    fn shrunk(&mut self, class: Class, len: Bytes, chunks: u64) {
        self.reserved -= len.count();
        self.counters.chunks_released += chunks;
        self.stats.reserved_bytes.decrease(class, len.count());
        self.stats.num_device_free += 1;
    }
}
