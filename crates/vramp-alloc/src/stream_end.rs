//! The end of a stream: what is known of its work after the stream was destroyed.
//!
//! A destroyed stream takes no more work, but the work queued on it runs on. So an event is recorded
//! right before the destruction, and is kept where the stream was: by the streams of the group, by
//! each pool until it saw the event reached, and by everything else that depends on the stream's
//! work, such as leases and copies. No part of the library calls the driver with the handle of a
//! stream that ended.
//!
//! Growth: one event for each ended stream whose work is not known to be over. The group queries
//! them once their number has doubled, which is one query for each end on average, and an event is
//! destroyed with the last part that holds it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_core::StreamId;
use vramp_driver::{Driver, DriverResult, Event, Stream};
use vramp_host::fork::is_forked;

/// The work of a destroyed stream: an event behind all that was queued on it.
///
/// It lives as long as something depends on that work, and needs no allocator.
pub struct StreamEnd {
    driver: Arc<dyn Driver>,
    event: Event,
    over: AtomicBool,
}

/// Where the work queued on a stream can be observed.
#[derive(Clone, Debug)]
pub enum StreamWork {
    /// On the stream itself, which is open.
    Open(Stream),
    /// At an event: the stream was destroyed.
    Ended(Arc<StreamEnd>),
    /// Nowhere: the stream was destroyed, and its work is over.
    Over,
}

impl StreamEnd {
    /// Records the end of a stream's work. `None` if the stream captures. Two driver calls.
    pub(crate) fn record(
        driver: &Arc<dyn Driver>,
        stream: Stream,
    ) -> DriverResult<Option<Arc<StreamEnd>>> {
        let event = driver.create_event()?;
        let end = StreamEnd { driver: Arc::clone(driver), event, over: AtomicBool::new(false) };
        Ok(driver.record_outside(event, stream)?.then(|| Arc::new(end)))
    }

    /// Returns true if the work was observed to be over, by any caller. No driver call.
    pub fn is_known_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Returns true if the work is over. One driver call at most.
    ///
    /// # Errors
    /// The query failed: the work may still run.
    pub fn is_over(&self) -> DriverResult<bool> {
        if !self.is_known_over() && self.driver.query(self.event)? {
            self.over.store(true, Ordering::Release);
        }
        Ok(self.is_known_over())
    }

    /// Waits on the host until the work is over.
    ///
    /// # Errors
    /// The wait failed: the work may still run.
    pub fn synchronize(&self) -> DriverResult<()> {
        if !self.is_known_over() {
            self.driver.synchronize_event(self.event)?;
            self.over.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Returns the event, which is not recorded again.
    pub fn event(&self) -> Event {
        self.event
    }
}

impl Drop for StreamEnd {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // A drop cannot report a failure. The device destroys what stays.
        let _ = self.driver.destroy_event(self.event);
    }
}

impl fmt::Debug for StreamEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_known_over() { "over" } else { "may run" };
        write!(f, "work of a destroyed stream: {state}")
    }
}

/// Fewest ends before the first query.
const SWEEP_MIN: usize = 32;

/// Ended streams whose work is not known to be over.
#[derive(Debug)]
pub struct StreamEnds {
    ends: BTreeMap<StreamId, Arc<StreamEnd>>,
    sweep_at: usize,
}

impl Default for StreamEnds {
    fn default() -> StreamEnds {
        StreamEnds { ends: BTreeMap::new(), sweep_at: SWEEP_MIN }
    }
}

impl StreamEnds {
    /// Adds a stream that ended.
    pub fn push(&mut self, stream: StreamId, end: Arc<StreamEnd>) {
        self.ends.insert(stream, end);
    }

    /// Returns the end of a stream; `None` if its work is known to be over.
    pub fn get(&self, stream: StreamId) -> Option<&Arc<StreamEnd>> {
        self.ends.get(&stream).filter(|end| !end.is_known_over())
    }

    /// Returns the streams whose index is not below `first`.
    pub(crate) fn ids_from(&self, first: usize) -> impl Iterator<Item = StreamId> {
        let first = u32::try_from(first).ok().map(StreamId::new);
        let ids = first.map(|first| self.ends.range(first..).map(|(&id, _)| id));
        ids.into_iter().flatten()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<StreamEnd>> {
        self.ends.values()
    }

    /// Returns true if enough streams ended since the last sweep.
    pub fn is_sweep_due(&self) -> bool {
        self.ends.len() >= self.sweep_at
    }

    /// Removes the streams whose work is over, and returns them. O(ends).
    pub fn sweep(&mut self, mut is_over: impl FnMut(&StreamEnd) -> bool) -> Vec<StreamId> {
        let mut over = Vec::new();
        self.ends.retain(|id, end| {
            let done = is_over(end);
            if done {
                over.push(*id);
            }
            !done
        });
        self.sweep_at = SWEEP_MIN.max(2 * self.ends.len());
        over
    }
}
