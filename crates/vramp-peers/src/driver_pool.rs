//! The driver's stream-ordered pool (`cudaMallocAsync`).
//!
//! The driver decides where memory lies and when it is reused. This module adds the records of
//! sizes, uses on other streams, and a limit.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use vramp_alloc::StreamEnd;
use vramp_alloc::backend::{Backend, BackendBlock, Refused, StreamEnds, StreamTable, captures};
use vramp_core::{Bytes, Counters, DeviceAddr, Shortage, StreamId};
use vramp_driver::{Driver, DriverError, DriverResult, Event, PoolUsage, Stream};

/// Frees that failed before and are repeated by a free that succeeded.
const RETRIES: usize = 2;

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
    /// Blocks whose free failed, with the stream. Each later free repeats a few, and so does the
    /// close.
    unfreed: VecDeque<(Held, StreamId)>,
    next_slot: u64,
    fence: Option<Event>,
    /// The ends of streams whose work is not known to be over.
    ends: StreamEnds,
    /// Stream of the pool's own, on which blocks of ended streams are freed.
    own: Option<Stream>,
    placed: u64,
    /// The most that was reserved before a trim that a malloc needed.
    trimmed: Bytes,
}

/// Whether an allocation fits below the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// Even if none of the pool's free memory serves it.
    Enough,
    /// If the pool's free memory serves it as far as that goes.
    IfReused,
    None,
}

impl OrderedPool {
    pub(crate) fn new(driver: Arc<dyn Driver>, limit: Option<Bytes>) -> DriverResult<OrderedPool> {
        driver.set_pool_threshold(Bytes::new(u64::MAX))?;
        Ok(OrderedPool {
            driver,
            limit,
            held: BTreeMap::new(),
            unfreed: VecDeque::new(),
            next_slot: 0,
            fence: None,
            ends: StreamEnds::default(),
            own: None,
            placed: 0,
            trimmed: Bytes::ZERO,
        })
    }

    /// Returns the shortage of a request, with the driver's call that failed. One driver call.
    fn short(
        &self,
        (requested, stream): (Bytes, StreamId),
        limit: Option<Bytes>,
        failed_call: Option<DriverError>,
    ) -> DriverResult<Refused> {
        let PoolUsage { reserved, used, .. } = self.driver.pool_usage()?;
        let free = reserved.saturating_sub(used);
        let (waiting, block_for) = (Bytes::ZERO, Some(stream));
        let shortage =
            Shortage { requested, reserved, used, free, largest: free, waiting, limit, block_for };
        Ok(Refused::Short(Box::new(shortage), failed_call))
    }

    /// Returns whether the driver's pool stays below `limit` if it allocates `len`. One driver call.
    ///
    /// The pool grows in whole steps, by what its free memory does not cover.
    fn room(&self, len: Bytes, limit: Bytes) -> DriverResult<Room> {
        let PoolUsage { reserved, used, .. } = self.driver.pool_usage()?;
        let step = self.driver.info().limits.pool_step;
        let grown = |by: Bytes| by.checked_round_up(step).map(|by| reserved.saturating_add(by));
        let is_below = |after: Option<Bytes>| after.is_some_and(|after| after <= limit);
        let missing = used.saturating_add(len).saturating_sub(reserved);
        Ok(match (is_below(grown(len)), missing.is_zero() || is_below(grown(missing))) {
            (true, _) => Room::Enough,
            (false, true) => Room::IfReused,
            (false, false) => Room::None,
        })
    }

    /// Returns memory to the card whose work is known to be over. No wait: the stream may wait for the
    /// caller.
    fn trim_known(&mut self, stream: Stream) -> DriverResult<()> {
        let reserved = self.driver.pool_usage()?.reserved;
        self.trimmed = self.trimmed.max(reserved);
        let event = self.driver.create_event()?;
        let known = self.driver.record_outside(event, stream);
        let known = known.and_then(|recorded| match recorded {
            true => self.driver.query(event),
            false => Ok(false),
        });
        known.and(self.driver.destroy_event(event))?;
        self.driver.trim_pool(Bytes::ZERO)
    }

    fn free_behind(
        &mut self,
        held: &Held,
        id: StreamId,
        streams: &StreamTable<Stream>,
    ) -> DriverResult<()> {
        let stream = match streams.get(id) {
            Some(&stream) => stream,
            None => {
                let own = self.own_stream()?;
                if let Some(end) = self.ends.get(id) {
                    self.driver.wait(own, end.event())?;
                }
                own
            }
        };
        for &user in held.uses.iter().filter(|&&user| user != id) {
            match streams.get(user) {
                Some(&raw) => {
                    let fence = self.fence()?;
                    if !self.driver.record_outside(fence, raw)? {
                        return Err(captures(user));
                    }
                    self.driver.wait(stream, fence)?;
                }
                None => {
                    if let Some(end) = self.ends.get(user) {
                        self.driver.wait(stream, end.event())?;
                    }
                }
            }
        }
        self.driver.free_async(stream, held.addr)
    }

    fn own_stream(&mut self) -> DriverResult<Stream> {
        match self.own {
            Some(stream) => Ok(stream),
            None => Ok(*self.own.insert(self.driver.create_stream()?)),
        }
    }

    fn fence(&mut self) -> DriverResult<Event> {
        match self.fence {
            Some(event) => Ok(event),
            None => Ok(*self.fence.insert(self.driver.create_event()?)),
        }
    }
}

impl Backend for OrderedPool {
    fn name(&self) -> &'static str {
        "stream-ordered"
    }

    fn end_stream(&mut self, id: StreamId, end: Option<&Arc<StreamEnd>>) {
        let Some(end) = end else { return };
        self.ends.push(id, Arc::clone(end));
        if self.ends.is_sweep_due() {
            self.ends.sweep(StreamEnd::is_known_over);
        }
    }

    /// One driver call; with a limit one before it, and near the limit one after it.
    fn malloc(
        &mut self,
        size: Bytes,
        id: StreamId,
        stream: Stream,
    ) -> Result<BackendBlock, Refused> {
        let (request, len) = ((size, id), size.max(Bytes::new(1)));
        // More than the card has is a shortage, whichever error the driver returns.
        if len > self.driver.info().limits.memory {
            return Err(self.short(request, None, None)?);
        }
        let near = match self.limit {
            Some(limit) => {
                let mut room = self.room(len, limit)?;
                if room == Room::None {
                    self.trim_known(stream)?;
                    room = self.room(len, limit)?;
                }
                if room == Room::None {
                    return Err(self.short(request, Some(limit), None)?);
                }
                (room == Room::IfReused).then_some(limit)
            }
            None => None,
        };
        let addr = match self.driver.malloc_async(stream, len) {
            Ok(addr) => addr,
            Err(error) if error.is_out_of_memory() => {
                return Err(self.short(request, None, Some(error))?);
            }
            Err(error) => return Err(error.into()),
        };
        // A card's pool may grow although it has enough free memory, if that is fragmented.
        if let Some(limit) = near {
            let usage = self.driver.pool_usage()?;
            if usage.reserved > limit {
                if let Err(error) = self.driver.free_async(stream, addr) {
                    self.unfreed.push_back((Held { addr, uses: vec![id] }, id));
                    return Err(error.into());
                }
                self.trim_known(stream)?;
                return Err(self.short(request, Some(limit), None)?);
            }
        }
        let slot = self.next_slot;
        self.next_slot += 1;
        self.held.insert(slot, Held { addr, uses: vec![id] });
        self.placed += 1;
        Ok(BackendBlock { addr, len, id: slot, at: None, hit: false })
    }

    fn record_use(&mut self, slot: u64, stream: StreamId) {
        if let Some(held) = self.held.get_mut(&slot)
            && let Err(place) = held.uses.binary_search(&stream)
        {
            held.uses.insert(place, stream);
        }
    }

    /// One driver call, and two more for each other stream that used the block: the driver requires that
    /// the free is ordered behind the allocation. A block freed on a stream that ended is freed on a
    /// stream of the pool's own, behind that stream's end. A call that fails is repeated later.
    fn free(&mut self, slot: u64, id: StreamId, streams: &StreamTable<Stream>) -> DriverResult<()> {
        let Some(held) = self.held.remove(&slot) else { return Ok(()) };
        let freed = self.free_behind(&held, id, streams);
        if freed.is_err() {
            self.unfreed.push_back((held, id));
            return freed;
        }
        for _ in 0..RETRIES {
            let Some((held, id)) = self.unfreed.pop_front() else { break };
            // A wait or a free on a stream that captures would become part of its graph. That it failed
            // was reported by its own free.
            let capturing = streams
                .get(id)
                .is_some_and(|&stream| self.driver.is_capturing(stream).unwrap_or(true));
            if capturing || self.free_behind(&held, id, streams).is_err() {
                self.unfreed.push_back((held, id));
            }
        }
        Ok(())
    }

    fn holds(&self, slot: u64, addr: DeviceAddr) -> bool {
        self.held.get(&slot).is_some_and(|held| held.addr == addr)
    }

    fn trim(&mut self, to: Bytes) -> DriverResult<()> {
        self.driver.trim_pool(to)
    }

    fn set_limit(&mut self, limit: Option<Bytes>) {
        self.limit = limit;
    }

    /// The blocks placed, and as a peak the most that was reserved before a trim that a malloc needed.
    fn counters(&self) -> Counters {
        Counters { placed: self.placed, reserved_peak: self.trimmed, ..Counters::default() }
    }

    fn reset_peaks(&mut self) {
        self.trimmed = Bytes::ZERO;
    }

    fn driver_usage(&self) -> DriverResult<Option<PoolUsage>> {
        self.driver.pool_usage().map(Some)
    }

    fn release_all(&mut self) -> DriverResult<()> {
        let mut first: DriverResult<()> = Ok(());
        let unfreed = std::mem::take(&mut self.unfreed).into_iter().map(|(held, _)| held);
        let held: Vec<Held> = std::mem::take(&mut self.held).into_values().chain(unfreed).collect();
        if !held.is_empty() {
            first = self.own_stream().and_then(|stream| {
                let mut first = Ok(());
                for held in held {
                    first = first.and(self.driver.free_async(stream, held.addr));
                }
                first.and(self.driver.synchronize_stream(stream))
            });
        }
        if let Some(own) = self.own.take() {
            let waited = self.driver.synchronize_stream(own);
            first = first.and(waited).and(self.driver.destroy_stream(own));
        }
        self.ends = StreamEnds::default();
        if let Some(event) = self.fence.take() {
            first = first.and(self.driver.destroy_event(event));
        }
        first.and(self.driver.trim_pool(Bytes::ZERO))
    }
}

impl fmt::Debug for OrderedPool {
    /// The blocks in address order. The driver does not tell where the rest of its memory is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "blocks of the driver's pool: {}", self.held.len())?;
        let mut held: Vec<&Held> = self.held.values().collect();
        held.sort_by_key(|held| held.addr);
        for Held { addr, uses } in held {
            writeln!(f, "{addr} used, {uses:?}")?;
        }
        Ok(())
    }
}
