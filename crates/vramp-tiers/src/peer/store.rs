//! The store: its chunks, their free parts, and how it grows and shrinks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vramp_alloc::Driver;
use vramp_core::{AddrRange, Bytes, Inconsistency};
use vramp_host::fork::is_forked;

use super::chunks::{Chunk, Unreleased};
use super::config::{PeerStoreConfig, PeerStoreError, PeerStoreStats};
use crate::extents::{BackingId, Extent, ExtentAllocator};
use crate::ledger::core::Tier;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::space::MemorySpace;
use crate::sync::{Mutex, lock};

/// Allocations are multiples of it.
const UNIT: Bytes = Bytes::kib(64);

struct State {
    /// Free parts. Each chunk is a backing.
    extents: ExtentAllocator,
    chunks: BTreeMap<BackingId, Chunk>,
    /// Chunks of which nothing is used.
    unused: BTreeSet<BackingId>,
    limit: Bytes,
    /// Bytes of chunks that are being created.
    growing: Bytes,
    /// No allocations before this time.
    closed_until_ns: u64,
    lost: Vec<Charge>,
    stats: PeerStoreStats,
}

struct Shared {
    driver: Arc<dyn Driver>,
    /// Ordinal of the other card.
    peer: u32,
    space: MemorySpace,
    config: PeerStoreConfig,
    state: Mutex<State>,
}

/// Memory of another card that this one copies to and from. Clones are one store.
#[derive(Clone)]
pub struct PeerStore {
    shared: Arc<Shared>,
}

/// A part of a chunk. Dropping it frees it: all work on it must be complete.
#[must_use = "the memory is free once this is dropped"]
pub struct PeerAllocation {
    shared: Arc<Shared>,
    extent: Extent,
    range: AddrRange,
}

impl PeerStore {
    /// Creates a store of `driver`'s card on the card with the ordinal `peer`, charged to the space of that
    /// card, and the chunks that are to exist ahead.
    ///
    /// # Errors
    /// The configuration is invalid, the space is no GPU's, or no link leads to the other card. A
    /// chunk that cannot be created ahead is no error.
    pub fn new(
        driver: &Arc<dyn Driver>,
        peer: u32,
        space: &MemorySpace,
        config: PeerStoreConfig,
    ) -> Result<PeerStore, PeerStoreError> {
        let info = driver.info();
        if space.id().tier != Tier::Gpu {
            return Err(PeerStoreError::Config("the space must be of the tier GPU"));
        }
        let page = info.limits.page;
        if config.chunk.is_zero() || !config.chunk.is_multiple_of(page) {
            return Err(PeerStoreError::Config("a chunk must be whole pages"));
        }
        if !info.peers.contains(&peer) {
            let (device, peers) = (info.id.clone(), info.peers.clone());
            return Err(PeerStoreError::NotAPeer { peer, device, peers });
        }
        let state = State {
            extents: ExtentAllocator::new(UNIT),
            chunks: BTreeMap::new(),
            unused: BTreeSet::new(),
            limit: config.limit,
            growing: Bytes::ZERO,
            closed_until_ns: 0,
            lost: Vec::new(),
            stats: PeerStoreStats::default(),
        };
        let (driver, space) = (Arc::clone(driver), space.clone());
        let shared = Shared { driver, peer, space, config, state: Mutex::new(state) };
        let store = PeerStore { shared: Arc::new(shared) };
        store.prepare();
        Ok(store)
    }

    /// Creates chunks until as many bytes are free as should be ahead, or no more can be created.
    /// Four driver calls for each.
    pub fn prepare(&self) {
        let shared = &self.shared;
        let lacks = || {
            let state = lock(&shared.state);
            state.extents.free_bytes() + shared.config.chunk <= shared.config.ahead
                && !shared.is_closed(&state)
        };
        let mut keep = |state: &mut State, id| {
            state.unused.insert(id);
        };
        while lacks() && shared.grow(&mut keep).is_ok() {}
    }

    /// Returns the ordinal of the other card.
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal()
    }

    /// Returns the driver that its memory is mapped through.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.shared.driver
    }

    /// Returns the space that is charged.
    pub fn space(&self) -> &MemorySpace {
        &self.shared.space
    }

    /// Returns the options that it was made with.
    pub fn config(&self) -> &PeerStoreConfig {
        &self.shared.config
    }

    /// Allocates `len` bytes. No driver call if a part of a chunk is free; five for a new chunk.
    ///
    /// # Errors
    /// The limit, the space or the other card has no room, or a driver call failed. It never waits.
    pub fn allocate(&self, len: Bytes) -> Result<PeerAllocation, PeerStoreError> {
        let shared = &self.shared;
        let chunk = shared.config.chunk;
        if len.is_zero() || len > chunk {
            return Err(PeerStoreError::Length { len, chunk });
        }
        let taken = {
            let mut state = lock(&shared.state);
            if shared.is_closed(&state) {
                state.stats.refused += 1;
                return Err(PeerStoreError::GaveWay { peer: self.ordinal() });
            }
            state.take(len)
        };
        let taken = match taken {
            Some(taken) => taken,
            None => {
                let mut made = None;
                let grown = shared.grow(&mut |state, id| {
                    state.unused.insert(id);
                    made = state.take(len);
                });
                grown.inspect_err(|_| lock(&shared.state).stats.refused += 1)?;
                made.expect("a new chunk is long enough")
            }
        };
        let (extent, start) = taken;
        let range = AddrRange::new(start.start, len);
        Ok(PeerAllocation { shared: Arc::clone(shared), extent, range })
    }

    /// Returns the bytes that it can take and those that are free in it. Zero while it gives way.
    /// Allocations of different lengths may find less. One driver call, none if the limit is zero.
    pub fn room(&self) -> Bytes {
        let shared = &self.shared;
        let (free, below_limit) = {
            let state = lock(&shared.state);
            if shared.is_closed(&state) {
                return Bytes::ZERO;
            }
            let taken = state.taken() + state.growing;
            (state.extents.free_bytes(), state.limit.saturating_sub(taken))
        };
        if below_limit < shared.config.chunk {
            return free;
        }
        let space = shared.space.capacity().saturating_sub(shared.space.total());
        let physical = shared.free_on_peer().unwrap_or_default();
        let grows = below_limit.min(space).min(physical.saturating_sub(shared.config.reserve));
        let chunk = shared.config.chunk.count();
        free + shared.config.chunk * (grows.count() / chunk)
    }

    /// Sets the limit. Free chunks beyond it are released. Returns the bytes that are taken beyond it
    /// still: their owner has to free them.
    pub fn set_limit(&self, limit: Bytes) -> Bytes {
        lock(&self.shared.state).limit = limit;
        self.shared.release_unused();
        self.excess()
    }

    /// Returns the bytes taken beyond the limit.
    pub fn excess(&self) -> Bytes {
        let state = lock(&self.shared.state);
        state.taken().saturating_sub(state.limit)
    }

    /// Returns the memory that it has of the other card. O(1).
    pub fn taken(&self) -> Bytes {
        lock(&self.shared.state).taken()
    }

    /// Gives way to the other card's own needs: releases free chunks and refuses allocations until the
    /// backoff is over. Returns the bytes released.
    pub fn give_way(&self) -> Bytes {
        {
            let mut state = lock(&self.shared.state);
            let backoff = u64::try_from(self.shared.config.backoff.as_nanos()).unwrap_or(u64::MAX);
            state.closed_until_ns = self.shared.driver.now_ns().saturating_add(backoff);
            state.stats.gave_way += 1;
        }
        self.shared.release_unused()
    }

    /// Returns the statistics. O(chunks).
    pub fn stats(&self) -> PeerStoreStats {
        let state = lock(&self.shared.state);
        let (free, taken) = (state.extents.free_bytes(), state.taken());
        let lost = state.lost.iter().map(Charge::bytes).sum();
        PeerStoreStats { limit: state.limit, taken, used: taken - free, free, lost, ..state.stats }
    }

    /// Checks the invariants. O(n log n).
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let state = lock(&self.shared.state);
        let bad = |what: String| Err(Inconsistency { what });
        state.extents.audit().map_err(|what| Inconsistency { what })?;
        let backings: BTreeMap<BackingId, Bytes> = state.extents.backings().collect();
        let chunks: BTreeMap<BackingId, Bytes> =
            state.chunks.iter().map(|(&id, chunk)| (id, chunk.range.len)).collect();
        if backings != chunks {
            return bad(format!("free parts are of {backings:?}, chunks are {chunks:?}"));
        }
        let unused: BTreeSet<BackingId> = state.extents.idle().collect();
        if unused != state.unused {
            return bad(format!("{:?} are listed as unused, {unused:?} are", state.unused));
        }
        let charged: Bytes = state.chunks.values().map(|chunk| chunk.charge.bytes()).sum();
        match charged == state.taken() {
            true => Ok(()),
            false => bad(format!("{charged} are charged for chunks of {}", state.taken())),
        }
    }
}

impl State {
    /// Returns the length of all chunks.
    fn taken(&self) -> Bytes {
        self.stats.taken
    }

    fn take(&mut self, len: Bytes) -> Option<(Extent, AddrRange)> {
        let extent = self.extents.alloc_one(len)?;
        self.unused.remove(&extent.backing);
        let chunk = &self.chunks[&extent.backing];
        Some((extent, AddrRange::new(chunk.range.start + extent.offset, extent.len)))
    }

    fn add(&mut self, chunk: Chunk) -> BackingId {
        self.stats.taken += chunk.range.len;
        let id = self.extents.add(chunk.range.len);
        self.chunks.insert(id, chunk);
        id
    }
}

impl Shared {
    fn ordinal(&self) -> u32 {
        self.peer
    }

    fn is_closed(&self, state: &State) -> bool {
        state.closed_until_ns > self.driver.now_ns()
    }

    fn free_on_peer(&self) -> Result<Bytes, PeerStoreError> {
        let peer = self.peer;
        let info = self.driver.peer_memory_info(peer);
        info.map(|info| info.free).map_err(|error| PeerStoreError::Device { peer, error })
    }

    /// Adds a chunk and passes it to `then`, in one step.
    fn grow(&self, then: &mut dyn FnMut(&mut State, BackingId)) -> Result<(), PeerStoreError> {
        let (len, peer) = (self.config.chunk, self.ordinal());
        {
            let mut state = lock(&self.state);
            let limit = state.limit;
            if state.taken() + state.growing + len > limit {
                return Err(PeerStoreError::Limit { peer, limit });
            }
            state.growing += len;
        }
        let made = self.create_chunk(len);
        let mut state = lock(&self.state);
        state.growing -= len;
        let id = state.add(made?);
        state.stats.created += 1;
        then(&mut state, id);
        Ok(())
    }

    fn create_chunk(&self, len: Bytes) -> Result<Chunk, PeerStoreError> {
        let (peer, reserve) = (self.ordinal(), self.config.reserve);
        let charge = self.space.charge(len)?;
        let free = self.free_on_peer()?;
        if free < len + reserve {
            return Err(PeerStoreError::NoMemory { peer, free, reserve });
        }
        let made = Chunk::create(&self.driver, peer, len, charge);
        made.map_err(|error| PeerStoreError::Device { peer, error })
    }

    /// Releases unused chunks beyond those kept ahead; all of them while it gives way or is beyond its
    /// limit. Returns the bytes released. Three driver calls for each.
    fn release_unused(&self) -> Bytes {
        let gone: Vec<Chunk> = {
            let mut state = lock(&self.state);
            let mut gone = Vec::new();
            loop {
                let over = self.is_closed(&state) || state.taken() > state.limit;
                let keep = if over { Bytes::ZERO } else { self.config.ahead };
                if self.config.chunk * state.unused.len() as u64 <= keep {
                    break gone;
                }
                let Some(id) = state.unused.pop_last() else { break gone };
                state.extents.remove(id).expect("nothing of it is used");
                let chunk = state.chunks.remove(&id).expect("each backing is a chunk");
                state.stats.taken -= chunk.range.len;
                gone.push(chunk);
            }
        };
        gone.into_iter().map(|chunk| self.release(chunk)).sum()
    }

    fn release(&self, chunk: Chunk) -> Bytes {
        let len = chunk.range.len;
        match chunk.release(&self.driver) {
            Ok(charge) => {
                lock(&self.state).stats.released += 1;
                // Callbacks of the space run without the lock.
                drop(charge);
                return len;
            }
            Err(Unreleased::Mapped(chunk)) => {
                let mut state = lock(&self.state);
                let id = state.add(chunk);
                state.unused.insert(id);
            }
            Err(Unreleased::Lost(charge)) => lock(&self.state).lost.push(charge),
        }
        Bytes::ZERO
    }
}

impl PeerAllocation {
    /// Returns its addresses, which this card's streams may copy from and to.
    pub fn range(&self) -> AddrRange {
        self.range
    }

    /// Returns the ordinal of the card that it lies on.
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal()
    }
}

impl Drop for PeerAllocation {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        let is_unused = {
            let mut state = lock(&self.shared.state);
            let freed = state.extents.free(self.extent);
            debug_assert!(freed.is_ok(), "an allocation is freed once: {freed:?}");
            let id = self.extent.backing;
            let is_unused = state.extents.is_unused(id);
            if is_unused {
                state.unused.insert(id);
            }
            is_unused
        };
        if is_unused {
            self.shared.release_unused();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        let chunks = std::mem::take(&mut lock(&self.state).chunks);
        for chunk in chunks.into_values() {
            // A drop reports no error. The memory ends with the device.
            let _ = chunk.release(&self.driver);
        }
    }
}

impl std::fmt::Debug for PeerStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PeerStoreStats { taken, limit, .. } = self.stats();
        write!(f, "{taken} of {limit} on card {}", self.ordinal())
    }
}

impl std::fmt::Debug for PeerAllocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on card {}", self.range, self.ordinal())
    }
}
