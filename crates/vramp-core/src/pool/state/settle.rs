//! Settling: a performed plan changes the pool. Nothing here can fail.

use super::Pool;
use crate::Bytes;
use crate::ids::PoolAddr;
use crate::pool::ops::{Change, Leftovers, Op, Order, Plan, Range, Trim};

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
            Change::Trim { trims } => trims.iter().for_each(|trim| self.settle_trim(trim)),
            Change::Release { chunk } => self.settle_release(chunk),
            Change::Order { order, free, waiting } => {
                self.settle_order(&order);
                self.take_over_ordered(order.stream, &free, &waiting);
            }
        }
        let reserved = self.chunks.bytes();
        self.counters.reserved_peak = self.counters.reserved_peak.max(reserved);
    }

    fn settle_order(&mut self, order: &Order) {
        order.records.iter().for_each(|&mark| self.note_recorded(mark));
        order.waits.iter().for_each(|&on| self.waits(order.stream, on));
    }

    fn settle_trim(&mut self, trim: &Trim) {
        trim.aliases.iter().for_each(|&range| self.note_unmapped(range));
        self.note_home_unmapped(trim);
        self.counters.released += trim.home.len;
        self.counters.chunks_released += 1;
        self.chunks.remove(trim.chunk);
    }

    /// Notes what a plan to release chunks did before it failed: the first `performed` operations.
    fn abandon_trim(&mut self, trims: &[Trim], performed: usize) {
        let mut left = performed;
        for trim in trims {
            let ops = trim.aliases.len() + 2;
            if left >= ops {
                self.settle_trim(trim);
                left -= ops;
                continue;
            }
            trim.aliases.iter().take(left).for_each(|&range| self.note_unmapped(range));
            // Mapped nowhere any more, and not released.
            if left > trim.aliases.len() {
                self.note_home_unmapped(trim);
                self.chunks.remove(trim.chunk);
                self.chunks.add(trim.chunk, trim.home.len, None);
            }
            return;
        }
    }

    /// Notes that a plan failed and was undone: the pool is as before, except for what could not be
    /// undone.
    pub fn abandon(&mut self, plan: Plan, leftovers: Leftovers) {
        self.counters.plans_undone += 1;
        match &plan.change {
            Change::Unmap { ranges } => {
                let unmapped = leftovers.performed;
                ranges.iter().take(unmapped).for_each(|&range| self.note_unmapped(range));
                // The one that failed: still mapped, in an unknown state.
                if let Some(&range) = ranges.get(unmapped) {
                    self.quarantine_retired(range);
                }
            }
            Change::Trim { trims } => self.abandon_trim(trims, leftovers.performed),
            _ => {}
        }
        for &(chunk, len) in &leftovers.chunks {
            self.chunks.add(chunk, len, None);
        }
        self.quarantine_mapped(&plan.ops, &leftovers);
        // Events that were recorded before the failure close their epochs all the same.
        for op in &plan.ops {
            if let Op::Record(mark) = *op
                && leftovers.recorded.contains(&mark)
            {
                self.note_recorded(mark);
            }
        }
    }

    /// A chunk that was to move and is stuck at its new address too is not released before it is unmapped
    /// there: its memory would stay taken, uncounted.
    fn quarantine_mapped(&mut self, ops: &[Op], leftovers: &Leftovers) {
        for op in ops {
            if let Op::Map { chunk, at, len } = *op
                && leftovers.mapped.contains(&Range { at, len })
            {
                self.quarantine_new(chunk, at, len);
            }
        }
    }
}
