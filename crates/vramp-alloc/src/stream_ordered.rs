//! The driver's stream-ordered pool as a manager.
//!
//! The driver decides where memory lies and when it is reused. This module adds the records of
//! sizes, uses on other streams, and a limit.

use std::collections::BTreeMap;
use std::sync::Arc;

use vramp_core::{Bytes, DeviceAddr, Shortage, StreamId};
use vramp_driver::{Driver, DriverResult, Event, PoolUsage, Stream};

struct Held {
    addr: DeviceAddr,
    /// The stream it was allocated for, and those whose use was recorded.
    uses: Vec<StreamId>,
}

/// The driver's pool, which keeps all memory that it reserved.
pub(crate) struct OrderedPool {
    driver: Arc<dyn Driver>,
    limit: Option<Bytes>,
    held: BTreeMap<u64, Held>,
    next_slot: u64,
    fence: Option<Event>,
    /// Event at the end of the work of each stream that ended.
    ended: BTreeMap<StreamId, Event>,
    placed: u64,
}

pub(crate) enum OrderedOutcome {
    Placed { addr: DeviceAddr, len: Bytes, slot: u64 },
    Full(Shortage, Option<vramp_driver::DriverError>),
}

impl OrderedPool {
    pub(crate) fn new(driver: Arc<dyn Driver>, limit: Option<Bytes>) -> DriverResult<OrderedPool> {
        driver.set_pool_threshold(Bytes::new(u64::MAX))?;
        Ok(OrderedPool {
            driver,
            limit,
            held: BTreeMap::new(),
            next_slot: 0,
            fence: None,
            ended: BTreeMap::new(),
            placed: 0,
        })
    }

    /// Allocates. One driver call; two with a limit.
    pub(crate) fn malloc(
        &mut self,
        size: Bytes,
        id: StreamId,
        stream: Stream,
    ) -> DriverResult<OrderedOutcome> {
        let len = size.max(Bytes::new(1));
        // More than the card has is a shortage, whichever error the driver returns.
        if len > self.driver.info().limits.memory {
            return Ok(OrderedOutcome::Full(
                shortage((size, id), self.driver.pool_usage()?, None),
                None,
            ));
        }
        let addr = match self.driver.malloc_async(stream, len) {
            Ok(addr) => addr,
            Err(error) if error.is_out_of_memory() => {
                let usage = self.driver.pool_usage()?;
                return Ok(OrderedOutcome::Full(shortage((size, id), usage, None), Some(error)));
            }
            Err(error) => return Err(error),
        };
        if let Some(limit) = self.limit {
            let usage = self.driver.pool_usage()?;
            if usage.reserved > limit {
                self.driver.free_async(stream, addr)?;
                self.driver.synchronize_stream(stream)?;
                self.driver.trim_pool(Bytes::ZERO)?;
                let usage = self.driver.pool_usage()?;
                return Ok(OrderedOutcome::Full(shortage((size, id), usage, Some(limit)), None));
            }
        }
        let slot = self.next_slot;
        self.next_slot += 1;
        self.held.insert(slot, Held { addr, uses: vec![id] });
        self.placed += 1;
        Ok(OrderedOutcome::Placed { addr, len, slot })
    }

    /// Records an event at the end of a stream's work. Two driver calls.
    pub(crate) fn end_stream(&mut self, id: StreamId, stream: Stream) -> DriverResult<()> {
        let event = self.driver.create_event()?;
        if let Err(error) = self.driver.record(event, stream) {
            // The event is unused, so a failure to destroy it changes nothing.
            let _ = self.driver.destroy_event(event);
            return Err(error);
        }
        self.ended.insert(id, event);
        Ok(())
    }

    pub(crate) fn holds(&self, slot: u64, addr: DeviceAddr) -> bool {
        self.held.get(&slot).is_some_and(|held| held.addr == addr)
    }

    pub(crate) fn record_use(&mut self, slot: u64, stream: StreamId) {
        if let Some(held) = self.held.get_mut(&slot)
            && !held.uses.contains(&stream)
        {
            held.uses.push(stream);
        }
    }

    /// Frees a block. One driver call, and two more for each other stream that used it: the driver
    /// requires that the free is ordered behind the allocation.
    pub(crate) fn free(&mut self, slot: u64, id: StreamId, streams: &[Stream]) -> DriverResult<()> {
        let stream = streams[id.index()];
        let Some(held) = self.held.get(&slot) else { return Ok(()) };
        for &user in held.uses.iter().filter(|&&user| user != id) {
            if let Some(&event) = self.ended.get(&user) {
                self.driver.wait(stream, event)?;
                continue;
            }
            let event = match self.fence {
                Some(event) => event,
                None => *self.fence.insert(self.driver.create_event()?),
            };
            self.driver.record(event, streams[user.index()])?;
            self.driver.wait(stream, event)?;
        }
        self.driver.free_async(stream, held.addr)?;
        self.held.remove(&slot);
        Ok(())
    }

    /// Returns the driver's usage of its pool. One driver call.
    pub(crate) fn usage(&self) -> DriverResult<PoolUsage> {
        self.driver.pool_usage()
    }

    /// Returns the number of blocks allocated so far.
    pub(crate) fn placed(&self) -> u64 {
        self.placed
    }

    pub(crate) fn set_limit(&mut self, limit: Option<Bytes>) {
        self.limit = limit;
    }

    pub(crate) fn trim(&mut self, to: Bytes) -> DriverResult<()> {
        self.driver.trim_pool(to)
    }

    /// Waits for the work of all streams and returns everything. Goes on after a failure and
    /// returns the first one.
    pub(crate) fn close(&mut self, streams: &[Stream]) -> DriverResult<()> {
        let mut first: DriverResult<()> = Ok(());
        let mut note = |result: DriverResult<()>| {
            if first.is_ok() {
                first = result;
            }
        };
        for &stream in streams {
            note(self.driver.synchronize_stream(stream));
        }
        if let Some(&stream) = streams.first() {
            for held in std::mem::take(&mut self.held).into_values() {
                note(self.driver.free_async(stream, held.addr));
            }
            note(self.driver.synchronize_stream(stream));
        }
        let ended = std::mem::take(&mut self.ended).into_values();
        for event in self.fence.take().into_iter().chain(ended) {
            note(self.driver.destroy_event(event));
        }
        note(self.driver.trim_pool(Bytes::ZERO));
        first
    }
}

fn shortage(
    (requested, stream): (Bytes, StreamId),
    usage: PoolUsage,
    limit: Option<Bytes>,
) -> Shortage {
    let PoolUsage { reserved, used, .. } = usage;
    let free = reserved.saturating_sub(used);
    let (waiting, block_for) = (Bytes::ZERO, Some(stream));
    Shortage { requested, reserved, used, free, largest: free, waiting, limit, block_for }
}
