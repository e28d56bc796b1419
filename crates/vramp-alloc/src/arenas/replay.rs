//! Replays: leases, and the waits of a stream before it writes where another stream's work did.

use vramp_core::{ArenaId, ArenaLeaseId, Bytes, Mark, Overlap, StreamId};
use vramp_driver::{Driver, DriverError};

use super::NoLease;
use crate::completion::captures;
use crate::virtual_pool::{Refusal, VirtualPool};

/// Events of replays that are recorded before their completion is asked about.
const EVENTS_BETWEEN_POLLS: usize = 8;

impl VirtualPool {
    /// Takes a lease for a replay on `stream` that needs the first `upto` bytes, backs them, and
    /// orders the stream behind work that may still use them.
    pub(crate) fn take_lease(
        &mut self,
        id: ArenaId,
        upto: Bytes,
        stream: StreamId,
        overlap: Overlap,
    ) -> Result<ArenaLeaseId, NoLease> {
        let others = |marks: Vec<Mark>| -> Vec<Mark> {
            marks.into_iter().filter(|mark| mark.stream != stream).collect()
        };
        let unfinished = others(self.arenas.get(id).leases.unfinished().collect());
        if !unfinished.is_empty() {
            self.record_all(&unfinished)?;
            self.poll()?;
        }
        let VirtualPool { pool, arenas, .. } = self;
        let leases = &mut arenas.get_mut(id).leases;
        leases.forget(|mark| pool.is_over(mark));
        let ordered = |mark: Mark| pool.is_ordered(stream, mark);
        let taken = leases.take(stream, overlap, ordered).map_err(NoLease::Busy)?;
        let ready = self.back(id, upto, stream).and_then(|()| {
            let mut waits = others(self.pool.arena_inherited(id));
            waits.extend(taken.waits);
            self.order_behind(stream, &waits).map_err(Refusal::Driver)
        });
        match ready {
            Ok(()) => Ok(taken.lease),
            Err(refusal) => {
                let cancelled = self.arenas.get_mut(id).leases.cancel(taken.lease);
                cancelled.expect("the lease was taken above");
                self.arenas.list_to_lend(id);
                Err(NoLease::Refused(refusal))
            }
        }
    }

    /// Makes later work on `stream` wait for the work before `marks`.
    ///
    /// # Errors
    /// A driver call failed; or a stream captures and no event covers its earlier work, so no stream
    /// can wait for that.
    pub(crate) fn order_behind(
        &mut self,
        stream: StreamId,
        marks: &[Mark],
    ) -> Result<(), DriverError> {
        self.record_all(marks)?;
        for &mark in marks {
            if self.pool.is_ordered(stream, mark) {
                continue;
            }
            match self.exec.events.covering(mark) {
                Some(event) => self.exec.driver.wait(self.exec.stream(stream), event)?,
                None if self.pool.is_over(mark) => {}
                None => return Err(captures(mark.stream)),
            }
            self.pool.waits(stream, mark);
        }
        Ok(())
    }

    /// Ends a lease: the work queued on its stream so far uses the arena.
    ///
    /// With [`Overlap::Refuse`] an event is recorded behind that work. One recorded at the next replay
    /// would also cover what the stream got meanwhile, and refuse a replay that overlaps with nothing.
    pub(crate) fn end_lease(
        &mut self,
        id: ArenaId,
        lease: ArenaLeaseId,
        stream: StreamId,
        overlap: Overlap,
    ) {
        let mark = self.pool.now(stream);
        let ended = self.arenas.get_mut(id).leases.end(lease, mark);
        ended.expect("a lease is held until it is dropped");
        self.arenas.list_to_lend(id);
        if overlap == Overlap::Refuse && self.pool.is_open(stream) {
            // Where it fails, the next replay records one.
            let _ = self.poll_and_record(mark, EVENTS_BETWEEN_POLLS);
        }
    }
}
