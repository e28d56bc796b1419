//! Settling: a performed plan changes the pool. Nothing here can fail.

use super::Pool;
use crate::Bytes;
use crate::ids::PoolAddr;
use crate::pool::ops::{Change, Leftovers, Op, Order, Plan, Range};

impl Pool {
    /// Makes a plan's change after all its operations were performed.
    pub fn settle(&mut self, plan: Plan) {
        match plan.change {
            Change::Reserve { span, len } => {
                let key = self.regions.add_span(PoolAddr::new(span, Bytes::ZERO), len);
                self.add_hole(key);
            }
            Change::Fill { at, fills, order } => {
                self.settle_order(&order);
                self.settle_fill(at, &fills, order.stream);
            }
            Change::Back { arena, at, fills, order } => {
                self.settle_order(&order);
                self.settle_back(arena, at, &fills, order.stream);
            }
            Change::Unmap { ranges } => {
                ranges.iter().for_each(|&range| self.note_unmapped(range));
            }
            Change::Trim { chunk, ranges } => {
                ranges.iter().for_each(|&range| self.note_unmapped(range));
                self.counters.released += self.chunks.get(chunk).len;
                self.chunks.remove(chunk);
                self.counters.chunks_released += 1;
            }
            Change::Order { order, need } => {
                self.settle_order(&order);
                self.take_over_ordered(order.stream, need);
            }
        }
        let reserved = self.chunks.bytes();
        self.counters.reserved_peak = self.counters.reserved_peak.max(reserved);
    }

    fn settle_order(&mut self, order: &Order) {
        order.records.iter().for_each(|&mark| self.streams.record(mark));
        order.waits.iter().for_each(|&on| self.streams.waits(order.stream, on));
    }

    /// Notes that a plan failed and was undone: the pool is as before, except for what could not be
    /// undone.
    pub fn abandon(&mut self, plan: Plan, leftovers: Leftovers) {
        self.counters.plans_undone += 1;
        let done = plan.ops.iter().take(leftovers.performed);
        let unmapped: Vec<Range> = done
            .filter_map(|op| if let Op::Unmap(range) = op { Some(*range) } else { None })
            .collect();
        unmapped.iter().for_each(|&range| self.note_unmapped(range));
        match plan.change {
            Change::Unmap { ranges } => {
                // The one that failed: still mapped, in an unknown state.
                if let Some(&range) = ranges.get(unmapped.len()) {
                    self.quarantine(range);
                }
            }
            Change::Trim { chunk, ranges } if unmapped.len() == ranges.len() => {
                // Mapped nowhere any more, and not released.
                let len = self.chunks.get(chunk).len;
                self.chunks.remove(chunk);
                self.chunks.add(chunk, len, None);
            }
            _ => {}
        }
        for &range in &leftovers.mapped {
            self.quarantine(range);
        }
        for &(chunk, len) in &leftovers.chunks {
            self.chunks.add(chunk, len, None);
        }
        self.keep_stuck_chunks(&plan.ops, &leftovers);
        // Events that were recorded before the failure close their epochs all the same.
        for op in &plan.ops {
            if let Op::Record(mark) = *op
                && leftovers.recorded.contains(&mark)
            {
                self.streams.record(mark);
            }
        }
    }

    /// A chunk that was to move and is stuck at its new address too is never released: released
    /// while mapped there its memory would stay taken, uncounted.
    fn keep_stuck_chunks(&mut self, ops: &[Op], leftovers: &Leftovers) {
        for op in ops {
            if let Op::Map { chunk, at, len } = *op
                && leftovers.mapped.contains(&Range { at, len })
            {
                self.chunks.add_alias(chunk, at);
            }
        }
    }
}
