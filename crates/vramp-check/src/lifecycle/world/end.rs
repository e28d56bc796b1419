//! The end of a program: everything is ended, and nothing is left.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use vramp::Bytes;

use super::{Finding, SHARED, World, words};
use crate::lifecycle::op::Op;
use crate::lifecycle::subject::Way;

/// Attempts to close a pool at the end of a program, and the time between them.
const CLOSES_MAX: u32 = 10_000;
const PAUSE: Duration = Duration::from_micros(200);

impl World {
    /// Ends everything, and checks that nothing is left.
    ///
    /// # Errors
    /// A promise was broken.
    pub(in crate::lifecycle) fn finish(&mut self) -> Result<(), Finding> {
        let finished = catch_unwind(AssertUnwindSafe(|| self.end_all()));
        finished.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err(format!("at the end, a panic: {}", text.unwrap_or_default()))
        })
    }

    pub(super) fn end_all(&mut self) -> Result<(), Finding> {
        self.tap.cancel();
        self.fired = self.tap.fired();
        self.open_gates();
        for observer in self.observers.names() {
            self.perform(&Op::Unobserve { observer })?;
        }
        for capture in self.captures.names() {
            self.discard(capture, Way::Here)?;
        }
        for lease in self.leases.names() {
            self.perform(&Op::EndLease { lease, way: 0 })?;
        }
        for graph in self.graphs.names() {
            self.drop_graph(graph, 0)?;
        }
        for range in self.ranges.names() {
            self.drop_range(range, 0)?;
        }
        for cache in self.caches.names() {
            self.drop_cache(cache, 0)?;
        }
        for arena in self.arenas.names() {
            self.drop_arena(arena, 0)?;
        }
        self.check(true)?;
        self.free_all()?;
        self.check(true)?;
        let lost = self.leaks || self.tap.lost_something();
        self.sync()?;
        self.check(true)?;
        for pool in self.pools.names() {
            let trimmed = self.subject.trim(pool, Bytes::ZERO);
            self.allow(trimmed, &[])?;
        }
        for pool in self.own_pools() {
            let usage = self.subject.usage(pool);
            if let Some((live, reserved)) = self.allow(usage, &[])?
                && !lost
                && self.blocks.len() == 0
                && (!live.is_zero() || !reserved.is_zero() && !self.trim_keeps_memory())
            {
                return Err(format!(
                    "all is freed and trimmed, and pool {pool} has {live} live, {reserved} reserved"
                ));
            }
        }
        for pool in self.own_pools() {
            // The captures of other threads refuse it until they end. One whose thread found
            // something does not end: then the pool is dropped.
            for attempt in 0..=CLOSES_MAX {
                if self.pools.has(pool) {
                    self.end_pool(pool, u64::from(attempt == CLOSES_MAX))?;
                    self.check(true)?;
                }
                if self.pools.has(pool) {
                    // The others need the locks that a close takes.
                    std::thread::sleep(PAUSE);
                }
            }
        }
        if self.shared {
            self.end_streams()?;
        }
        self.subject.drop_all();
        self.check(false)?;
        self.compare()?;
        for event in self.events.drain(..) {
            self.device.destroy_event(event).map_err(words)?;
        }
        match self.device.free_host(self.buffer) {
            // A graph that stays behind copies to it.
            Err(_) if lost => {}
            freed => freed.map_err(words)?,
        }
        if let Some(sim) = &self.sim
            && !lost
            && !self.shared
        {
            let live = sim.live();
            if live != self.before {
                return Err(format!("left on the device: {live:?}"));
            }
        }
        Ok(())
    }

    /// Returns the pools that the program opened.
    fn own_pools(&self) -> Vec<u64> {
        let names = self.pools.names().into_iter();
        names.filter(|&pool| !self.shared || pool != SHARED).collect()
    }

    /// Destroys the streams of a program that does not end the group.
    fn end_streams(&mut self) -> Result<(), Finding> {
        for stream in self.streams.names() {
            if self.raw(stream).is_some() {
                self.destroy(SHARED, stream)?;
            }
        }
        let ended = std::mem::take(&mut self.streams.0).into_iter();
        self.events.extend(ended.filter_map(|(_, state)| state.end));
        Ok(())
    }

    pub(super) fn free_all(&mut self) -> Result<(), Finding> {
        for block in self.blocks.names() {
            let Some(state) = self.blocks.get(block) else { continue };
            // On a stream that may free it: one that used it last, or any that is open.
            let own = state.users.iter().find(|user| user.worked && !user.recorded);
            let own = own.map(|user| user.stream);
            let any = self.streams.0.iter().find(|(_, stream)| stream.is_open());
            let any = any.or(self.streams.0.first()).map(|(name, _)| *name);
            let Some(stream) = any.or(own) else { continue };
            if !self.free(block, stream, 0)?
                && let Some(own) = own
            {
                self.free(block, own, 0)?;
            }
        }
        Ok(())
    }
}
