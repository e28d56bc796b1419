//! Restoring the state of a recorded allocator: its segments, and the blocks allocated in them.
//!
//! Recordings often begin in the middle. The free blocks at that moment decide which segments are
//! allocated later. A replay that predicts them has to begin with the same free blocks, at
//! addresses in the same order.

use super::block::SegmentId;
use super::block::{Class, State};
use super::config::fixed::{BLOCK_ALIGN, SMALL_LIMIT, SMALL_SEGMENT};
use super::pool::{TorchBlock, TorchPool};
use super::settle::{Target, TorchOp, TorchPlan};
use super::stats::ByClass;
use vramp_core::{Bytes, DeviceAddr};
use vramp_core::{PoolAddr, SpanId, StreamId};

/// A segment as it was recorded; not an expandable one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchSegment {
    /// Start address.
    pub start: DeviceAddr,
    /// Length.
    pub len: Bytes,
    /// Stream that it serves.
    pub stream: StreamId,
    /// Allocated blocks in address order: start address and requested bytes. All else is free.
    pub held: Vec<(DeviceAddr, Bytes)>,
}

impl TorchPool {
    /// Returns the plans that give an empty pool these segments, one for each, in address order:
    /// perform and settle all, then call [`TorchPool::hold_restored`]. `None` if the pool is not
    /// empty, has expandable segments, or the recorded addresses are impossible.
    pub fn restore(&self, segments: &[TorchSegment]) -> Option<Vec<TorchPlan>> {
        if self.config.expandable_segments || !self.segments.is_empty() {
            return None;
        }
        let ends = segments.iter().map(|s| s.start.number().checked_add(s.len.count()));
        let top = ends
            .max()
            .flatten()
            .unwrap_or(0)
            .checked_next_multiple_of(super::addresses::AREA_UNIT)?;
        let mut end = 0;
        let plans = (0..).zip(segments).map(|(index, segment)| {
            let (start, len) = (segment.start.number(), segment.len);
            let in_order = start >= end && !len.is_zero() && self.streams.knows(segment.stream);
            end = start.checked_add(len.count())?;
            // The highest recorded address becomes the highest of the pool.
            let offset = PoolAddr::SPAN_LIMIT
                .count()
                .checked_sub(top.checked_sub(start)?)
                .filter(|_| in_order)?;
            let (class, stream) = (class_of(segment), segment.stream);
            let at = PoolAddr::new(SpanId::new(0), Bytes::new(offset));
            let op = TorchOp::Allocate { segment: SegmentId::new(index), len };
            Some(TorchPlan { op, target: Target::New { class, stream, at } })
        });
        plans.collect()
    }

    /// Allocates the recorded blocks, in the order of the segments and of the blocks in them.
    /// `None` for a block that does not lie in free memory of its segment.
    pub fn hold_restored(&mut self, segments: &[TorchSegment]) -> Vec<Option<TorchBlock>> {
        let mut blocks = Vec::new();
        for (index, segment) in (0..).zip(segments) {
            let end = segment.start.number() + segment.len.count();
            for (number, &(start, requested)) in segment.held.iter().enumerate() {
                let next = segment.held.get(number + 1).map_or(end, |(start, _)| start.number());
                let len = self.len_until(class_of(segment), start.number(), requested, next);
                let offset = start.number().checked_sub(segment.start.number());
                blocks.push(offset.zip(len).and_then(|(offset, len)| {
                    self.hold(SegmentId::new(index), offset, len, requested)
                }));
            }
        }
        self.count_splits();
        self.fresh = None;
        blocks
    }

    /// Returns the length of a block whose next allocated neighbour begins at `next`: a rest that
    /// is too small to be a free block belongs to it.
    fn len_until(&self, class: Class, start: u64, requested: Bytes, next: u64) -> Option<u64> {
        let rounded = self.config.round(requested)?.count();
        let rest = next.checked_sub(start)?.checked_sub(rounded)?;
        let free = if class == Class::Small { rest >= BLOCK_ALIGN } else { rest > SMALL_LIMIT };
        Some(if free { rounded } else { rounded + rest })
    }

    fn hold(
        &mut self,
        segment: SegmentId,
        offset: u64,
        len: u64,
        requested: Bytes,
    ) -> Option<TorchBlock> {
        let at = self.segment(segment).at.plus(offset);
        let around = |block: &super::block::Block| {
            block.state == State::Free && block.at <= at && at.plus(len) <= block.at.plus(block.len)
        };
        let (slot, block) = self.blocks.iter().find(|(_, block)| around(block))?;
        let (before, class) = (at.since(block.at), block.class);
        self.unlist(slot);
        if before > 0 {
            let front = self.blocks.split_front(slot, before);
            self.list(front);
        }
        let taken = if len < self.blocks.get(slot).len {
            let taken = self.blocks.split_front(slot, len);
            self.list(slot);
            taken
        } else {
            slot
        };
        let block = self.blocks.get_mut(taken);
        block.state = State::Used;
        block.requested = requested.count();
        self.count_allocated(class, len, requested);
        self.block(self.blocks.id(taken)).ok()
    }

    fn count_splits(&mut self) {
        let free = self.blocks.iter().filter(|(_, b)| b.state == State::Free && b.is_split());
        let splits: Vec<(Class, u64)> = free.map(|(_, block)| (block.class, block.len)).collect();
        for (class, len) in splits {
            self.stats.inactive_split.increase(class, 1);
            self.stats.inactive_split_bytes.increase(class, len);
        }
    }
}

/// Large segments begin at 10 MiB.
fn class_of(segment: &TorchSegment) -> Class {
    if segment.len.count() == SMALL_SEGMENT { Class::Small } else { Class::Large }
}
