//! Memory of arenas: backed before use, lent while idle.

use vramp_core::{ArenaId, Attempt, Bytes, Mark, StreamId};
use vramp_driver::{Driver, DriverError};

use crate::virtual_pool::{Refusal, Served, VirtualPool};

/// Most polls of arenas that may be idle soon: some tens of microseconds.
const POLLS_MAX: u32 = 64;

impl VirtualPool {
    /// Backs the first `upto` bytes of an arena. Does nothing for zero bytes.
    pub(crate) fn back(
        &mut self,
        id: ArenaId,
        upto: Bytes,
        stream: StreamId,
    ) -> Result<(), Refusal> {
        self.back_part(id, Bytes::ZERO, upto, stream)
    }

    /// Backs `len` bytes of an arena from `from` on.
    pub(crate) fn back_part(
        &mut self,
        id: ArenaId,
        from: Bytes,
        len: Bytes,
        stream: StreamId,
    ) -> Result<(), Refusal> {
        if len.is_zero() {
            return Ok(());
        }
        let attempt = || Attempt::back_part(id, from, len, stream);
        let mut served = self.serve(&mut attempt());
        if let Err(Refusal::Short(..)) = served {
            // Free chunks may fit no gap of the arena. Idle ones can be replaced by chunks that do.
            self.note_captures().and_then(|_| self.find_idle()).map_err(Refusal::Driver)?;
            served = self.serve(&mut attempt());
        }
        match served? {
            Served::Backed => Ok(()),
            _ => unreachable!("the attempt is for an arena"),
        }
    }

    /// Backs an arena that grew in small steps with few large chunks, and no more than it needs:
    /// restoring a chunk costs the same at any size. Only while it is idle; live blocks stay.
    pub(super) fn make_whole(&mut self, id: ArenaId, stream: StreamId) {
        let upto = self.arenas.get(id).arena.high_water();
        if !self.pool.is_ill_cut(id, upto) || !self.may_lend(id) || !self.is_over(id) {
            return;
        }
        self.lend(id);
        while let Some(plan) = self.pool.release_lent(id) {
            if self.exec.perform(&mut self.pool, plan).is_err() {
                break;
            }
        }
        // If it fails, the replay backs it again and returns the error.
        let _ = self.back(id, upto, stream);
    }

    /// Lends every idle arena. Returns the bytes lent by this call. An event record and a query for
    /// each stream that used one.
    pub(crate) fn lend_idle(&mut self) -> Result<Bytes, DriverError> {
        let backed = |id: ArenaId| !self.pool.arena_memory(id).backed.is_zero();
        let ids = self.arenas.iter().map(|(id, _)| id);
        let candidates: Vec<ArenaId> = ids.filter(|&id| self.may_lend(id) && backed(id)).collect();
        if candidates.is_empty() {
            return Ok(Bytes::ZERO);
        }
        for &id in &candidates {
            let marks = self.marks_of(id);
            self.record_all(&marks)?;
        }
        // An event that was recorded just now on an idle stream is reached soon.
        for _ in 0..POLLS_MAX {
            self.poll()?;
            let settled = self.pool.pending().next().is_none() || self.pool.holds_any();
            if settled || candidates.iter().all(|&id| self.is_over(id)) {
                break;
            }
        }
        let mut lent = Bytes::ZERO;
        for id in candidates {
            if self.is_over(id) {
                lent += self.lend(id);
            }
        }
        Ok(lent)
    }

    /// Lends the chunks of an arena that no live block touches.
    pub(super) fn lend(&mut self, id: ArenaId) -> Bytes {
        let live: Vec<(Bytes, Bytes)> = self.arenas.get(id).arena.live_ranges().collect();
        self.pool.lend(id, &live)
    }

    /// Returns true if no capture and no lease uses the arena: it may lend once its work is over.
    pub(super) fn may_lend(&self, id: ArenaId) -> bool {
        let state = self.arenas.get(id);
        !state.unguarded && !state.is_capturing() && state.leases.holder().is_none()
    }

    /// Returns true if there is no lease and all work on the arena is known to be over.
    pub(super) fn is_over(&self, id: ArenaId) -> bool {
        let leases = &self.arenas.get(id).leases;
        leases.is_idle(|mark| self.pool.is_over(mark)) && self.pool.arena_inherited(id).is_empty()
    }

    /// Returns the marks of all work that may still touch an arena's memory.
    pub(super) fn marks_of(&self, id: ArenaId) -> Vec<Mark> {
        let mut marks = self.pool.arena_inherited(id);
        marks.extend(self.arenas.get(id).leases.unfinished());
        marks
    }

    /// Records an event for each mark that none covers, except on streams that capture.
    pub(super) fn record_all(&mut self, marks: &[Mark]) -> Result<(), DriverError> {
        for &mark in marks {
            if mark == self.pool.now(mark.stream)
                && self.pool.is_open(mark.stream)
                && !self.exec.driver.is_capturing(self.exec.stream(mark.stream))?
            {
                self.exec.record(mark)?;
                self.pool.recorded(mark);
            }
        }
        Ok(())
    }
}
