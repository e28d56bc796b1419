//! Memory of arenas: backed before use, lent while idle.

use std::collections::BTreeSet;

use vramp_core::{ArenaId, Attempt, Bytes, Mark, StreamId};
use vramp_driver::DriverError;

use crate::completion::Awaited;
use crate::completion::captures;
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
        self.arenas.list_to_lend(id);
        let attempt = || Attempt::back_part(id, from, len, stream);
        let mut served = self.serve(&mut attempt());
        if let Err(Refusal::Short(..)) = served {
            // Free chunks may fit no gap of the arena. Idle ones can be replaced by chunks that do.
            self.note_ended_captures().and_then(|()| self.find_idle()).map_err(Refusal::Driver)?;
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

    /// Lends every idle arena, then parked pages of caches until `needed` bytes are lent. Returns the bytes
    /// lent by this call. An event record and some queries for each stream that used one, and none for other
    /// streams. Looks at the arenas that may have memory to lend, and at none again before that changes,
    /// unless its work is not over.
    pub(crate) fn lend_idle(&mut self, needed: Bytes) -> Result<Bytes, DriverError> {
        let lent = self.lend_idle_arenas()?;
        Ok(lent + self.lend_parked(needed.saturating_sub(lent))?)
    }

    fn lend_idle_arenas(&mut self) -> Result<Bytes, DriverError> {
        let mut candidates: Vec<ArenaId> = self.arenas.may_lend.iter().copied().collect();
        candidates.retain(|&id| self.may_lend(id) && !self.pool.arena_memory(id).backed.is_zero());
        self.arenas.may_lend = candidates.iter().copied().collect();
        if candidates.is_empty() {
            return Ok(Bytes::ZERO);
        }
        let mut users: BTreeSet<StreamId> = BTreeSet::new();
        for &id in &candidates {
            let marks = self.marks_of(id);
            self.record_all(&marks)?;
            users.extend(marks.into_iter().map(|mark| mark.stream));
        }
        // An event that was recorded just now on an idle stream is reached soon.
        for _ in 0..POLLS_MAX {
            let any_open = self.poll_of(&users)?;
            if !any_open || candidates.iter().all(|&id| self.is_over(id)) {
                break;
            }
        }
        let mut lent = Bytes::ZERO;
        for id in candidates {
            if self.is_over(id) {
                lent += self.lend(id);
                self.arenas.may_lend.remove(&id);
            }
        }
        Ok(lent)
    }

    /// Lends the chunks of an arena that no live block touches.
    pub(super) fn lend(&mut self, id: ArenaId) -> Bytes {
        let live: Vec<(Bytes, Bytes)> = self.arenas.get(id).arena.live_ranges().collect();
        self.pool.lend(id, &live)
    }

    /// Returns true if no capture and no lease uses the arena, and no graph of it is being made ready:
    /// it may lend once its work is over.
    pub(super) fn may_lend(&self, id: ArenaId) -> bool {
        let state = self.arenas.get(id);
        let in_use = state.unguarded || state.is_capturing() || state.instantiating > 0;
        !in_use && state.leases.holder().is_none()
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

    /// Returns the events of the work that may still touch an arena's memory and that `stream` is not ordered
    /// behind, for waits on the host without the pool's lock. Some driver calls for each stream with such
    /// work.
    ///
    /// # Errors
    /// A driver call failed; or such a stream captures, so that no event covers its earlier work.
    pub(crate) fn begin_arena_waits(
        &mut self,
        id: ArenaId,
        stream: StreamId,
    ) -> Result<Vec<Awaited>, DriverError> {
        let mut marks = self.marks_of(id);
        marks.retain(|&mark| mark.stream != stream && !self.pool.is_ordered(stream, mark));
        if marks.is_empty() {
            return Ok(Vec::new());
        }
        self.record_all(&marks)?;
        self.poll()?;
        marks.retain(|&mark| !self.pool.is_over(mark));
        if let Some(mark) = marks.iter().find(|&&mark| self.exec.events.covering(mark).is_none()) {
            return Err(captures(mark.stream));
        }
        Ok(marks.into_iter().filter_map(|mark| self.exec.events.begin_wait(mark)).collect())
    }

    /// Records an event for each mark that none covers, except on streams that capture.
    pub(crate) fn record_all(&mut self, marks: &[Mark]) -> Result<(), DriverError> {
        for &mark in marks {
            if mark == self.pool.now(mark.stream) && self.pool.is_open(mark.stream) {
                self.record(mark)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vramp_core::{ArenaPolicy, Mixed, Overlap, Policy, PoolConfig};
    use vramp_driver::Driver;
    use vramp_driver::sim::{Contents, Simulator};

    use super::*;
    use crate::config::Progress;
    use crate::sharing::{Access, SharingConfig};

    const LEN: Bytes = Bytes::mib(2);

    /// A pool that may not grow beyond `limit`, and a stream.
    fn pool(limit: Option<Bytes>) -> (VirtualPool, StreamId) {
        let card = Simulator::builder().contents(Contents::Discarded).build();
        let driver: Arc<dyn Driver> = Arc::new(card);
        let raw = driver.create_stream().expect("a stream can be made");
        let policy = Policy::Mixed(Mixed::default());
        let config =
            PoolConfig { page: LEN, span: Bytes::tib(1), first_span: Bytes::tib(1), limit, policy };
        let access = Access::resolve(&*driver, &SharingConfig::default());
        let access = access.expect("the default is possible");
        let pool = VirtualPool::new(driver, access, config, Progress::Events);
        let mut pool = pool.expect("the configuration is sound");
        let stream = StreamId::new(0);
        pool.add_stream(stream, Some(raw));
        (pool, stream)
    }

    fn backed(pool: &mut VirtualPool, stream: StreamId) -> ArenaId {
        let id = pool.add_arena(ArenaPolicy::Reusing, LEN * 4).expect("there are addresses");
        assert!(pool.back(id, LEN, stream).is_ok(), "there is memory");
        id
    }

    #[test]
    fn an_arena_is_looked_at_for_memory_to_lend_once_after_each_change_however_many_there_are() {
        for arenas in [10, 100, 1_000, 10_000] {
            let (mut pool, stream) = pool(None);
            let ids: Vec<ArenaId> = (0..arenas).map(|_| backed(&mut pool, stream)).collect();
            assert!(pool.arenas.may_lend.len() <= arenas);
            pool.lend_idle(Bytes::ZERO).expect("no call fails");
            assert!(pool.arenas.may_lend.is_empty(), "{arenas}: none is looked at again");
            // One is in use again, one serves a capture, one a replay.
            assert!(pool.back(ids[3], LEN, stream).is_ok());
            assert!(pool.prepare_capture(ids[5], stream).is_ok());
            pool.arenas.abort(ids[5]);
            let lease = pool.take_lease(ids[7], LEN, stream, Overlap::Order);
            let Ok(lease) = lease else { panic!("the arena is free") };
            assert_eq!(
                pool.arenas.may_lend.iter().copied().collect::<Vec<_>>(),
                [ids[3], ids[5], ids[7]]
            );
            assert_eq!(pool.lend_idle(Bytes::ZERO).expect("no call fails"), LEN);
            assert!(pool.arenas.may_lend.is_empty(), "the lease will list its arena again");
            pool.end_lease(ids[7], lease, stream, Overlap::Refuse);
            assert_eq!(pool.arenas.may_lend.len(), 1);
            pool.lend_idle(Bytes::ZERO).expect("no call fails");
            assert_eq!(pool.pool.arena_memory(ids[7]).lent, LEN);
            pool.abandon_arena(ids[3]);
            pool.audit().expect("every step keeps every invariant");
        }
    }

    #[test]
    fn backing_an_arena_with_lent_memory_lists_as_much_of_it_with_10_000_arenas_as_with_1_000() {
        let allocations = [1_000, 10_000].map(|arenas| {
            let (mut pool, stream) = pool(Some(LEN * arenas));
            for _ in 0..arenas {
                backed(&mut pool, stream);
            }
            pool.lend_idle(Bytes::ZERO).expect("no call fails");
            // Now and then a table grows.
            let counts = [(); 9].map(|()| {
                let counted = allocation_counter::measure(|| {
                    backed(&mut pool, stream);
                });
                counted.count_total
            });
            pool.audit().expect("every step keeps every invariant");
            counts.into_iter().min()
        });
        let [few, many] = allocations.map(|count| count.expect("there are nine"));
        assert!(many <= few + few / 4, "{few} allocations with 1,000 arenas, {many} with 10,000");
    }
}
