//! The virtual pool of one device: the tables, and everything that changes them.
//!
//! The fields of [`Pool`] are private to this folder, so nothing outside of it can change a pool.
//! Planners (`plan/`) get a read-only view and return decisions and plans.
//!
//! Life of a block:
//!
//! 1. `place.rs` applies the planner's decisions until there is a free region for it, or returns the
//!    plan that makes one.
//! 2. The region is carved (`blocks.rs`): its front becomes the block, the rest stays free.
//! 3. `free` stamps the region with its stream's epoch and merges it with its free neighbours
//!    (`free.rs`). No driver call: an event is recorded only when another stream wants the memory.
//! 4. The same stream may reuse it at once; another one once the epoch is reached, or behind a wait.
//!
//! Performed plans change the pool in `settle.rs`, what a failed call left behind is in
//! `quarantine.rs`; the tables of addresses in `holes.rs`, arenas in
//! `arenas.rs`, and the progress of streams in `progress.rs`.
//!
//! Deliberately absent: a device, a lock, a clock. Events that the shell queried come in through
//! [`Pool::reached`]; driver calls go out as a [`Plan`](crate::Plan).

mod arenas;
mod blocks;
mod free;
mod holes;
mod idle;
mod pins;
mod place;
mod progress;
mod quarantine;
mod reports;
mod settle;

use std::collections::{BTreeMap, BTreeSet};

use crate::Bytes;
use crate::ids::{PoolAddr, StreamId};
use crate::pool::arenas::ArenaRanges;
use crate::pool::chunks::Chunks;
use crate::pool::config::{ConfigError, Policy, PoolConfig};
use crate::pool::counters::{Counters, LookedAt};
use crate::pool::free_chunks::FreeChunks;
use crate::pool::heap_waits::HeapWaits;
use crate::pool::index::{Fit, Holes, RegionKey};
use crate::pool::regions::Regions;
use crate::pool::streams::Streams;
use crate::pool::view::View;
use crate::waiting::WaitQueue;

/// The virtual pool of one device. See the [crate's page](crate).
#[derive(Clone)]
pub struct Pool {
    config: PoolConfig,
    regions: Regions,
    chunks: Chunks,
    streams: Streams,
    holes: Holes,
    arenas: ArenaRanges,
    /// Every retired mapping by address.
    retired: BTreeMap<PoolAddr, RegionKey>,
    /// Every quarantined mapping by address.
    quarantined: BTreeMap<PoolAddr, RegionKey>,
    /// Freed regions that wait for other streams than their owner.
    waiting: WaitQueue<RegionKey>,
    /// Bytes of these regions.
    waiting_bytes: Bytes,
    /// Freed pieces of heaps that do.
    heap_waits: HeapWaits,
    /// Number of slabs in heaps.
    slabs: usize,
    /// Bytes in blocks, slabs and arenas: what must be mapped at least.
    used: Bytes,
    used_peak: Bytes,
    /// Physical memory outside of the pool that counts against the same limit.
    elsewhere: Option<Bytes>,
    /// See [`Pool::prefer_few_chunks`].
    few_chunks: bool,
    /// Number of regions that became free: orders them by age.
    births: u64,
    /// Wholly free chunks.
    free_chunks: FreeChunks,
    /// Streams that freed memory which no event covers yet.
    unrecorded: BTreeSet<StreamId>,
    /// Streams with free memory that is to become idle, see `idle.rs`.
    overdue: BTreeSet<StreamId>,
    /// Requests for which the streams' events are queried before memory is chosen.
    watched: u32,
    counters: Counters,
    looked_at: LookedAt,
}

impl Pool {
    /// Creates an empty pool. It reserves nothing before the first request.
    ///
    /// # Errors
    /// The configuration is not possible.
    pub fn new(config: PoolConfig) -> Result<Pool, ConfigError> {
        config.validate()?;
        let fit = match config.policy {
            Policy::Mixed(_) => Fit::BestThenFirst,
            Policy::Vpmm => Fit::BestHighest,
        };
        Ok(Pool {
            config,
            regions: Regions::default(),
            chunks: Chunks::default(),
            streams: Streams::new(fit),
            holes: Holes::default(),
            arenas: ArenaRanges::default(),
            retired: BTreeMap::new(),
            quarantined: BTreeMap::new(),
            waiting: WaitQueue::default(),
            waiting_bytes: Bytes::ZERO,
            heap_waits: HeapWaits::default(),
            slabs: 0,
            used: Bytes::ZERO,
            used_peak: Bytes::ZERO,
            few_chunks: false,
            elsewhere: None,
            births: 0,
            free_chunks: FreeChunks::default(),
            unrecorded: BTreeSet::new(),
            overdue: BTreeSet::new(),
            watched: 0,
            counters: Counters::default(),
            looked_at: LookedAt::default(),
        })
    }

    /// Makes room in the tables for what one request changes. Returns false if the host has no memory
    /// for it. O(1) on average.
    pub fn make_room(&mut self) -> bool {
        /// Regions and chunks of a large plan.
        const ROOM: usize = 64;
        self.regions.make_room(ROOM) && self.chunks.make_room(ROOM)
    }

    /// The pool's tables, read-only.
    pub(in crate::pool) fn view(&self) -> View<'_> {
        View {
            config: &self.config,
            regions: &self.regions,
            chunks: &self.chunks,
            streams: &self.streams,
            holes: &self.holes,
            arenas: &self.arenas,
            retired: &self.retired,
            quarantined: &self.quarantined,
            waiting: &self.waiting,
            waiting_bytes: self.waiting_bytes,
            heap_waits: &self.heap_waits,
            used: self.used,
            used_peak: self.used_peak,
            few_chunks: self.few_chunks,
            elsewhere: self.elsewhere,
            free_chunks: &self.free_chunks,
            unrecorded: &self.unrecorded,
            watched: self.watched,
            counters: &self.counters,
            looked_at: &self.looked_at,
        }
    }

    /// Counts entries of a table outside of the pool that a request looked at.
    pub(crate) fn note_looked_at(&self, count: usize) {
        self.looked_at.add(count);
    }

    /// Sets the limit of physical memory, and how much memory outside of the pool counts against
    /// it: `None` if no other pool shares it. What the pool has already stays: trim to release it.
    pub fn set_limit(&mut self, limit: Option<Bytes>, elsewhere: Option<Bytes>) {
        self.config.limit = limit;
        self.elsewhere = elsewhere;
    }

    /// Makes large requests get few long chunks from now on, also of memory that is free in many short ones: each
    /// chunk of a block costs the processes that map it driver calls.
    pub fn prefer_few_chunks(&mut self) {
        self.few_chunks = true;
    }

    /// Resets the peaks to the present values.
    pub fn reset_peaks(&mut self) {
        self.counters.reserved_peak = self.chunks.bytes();
        self.counters.live_peak = self.counters.live;
    }

    /// The place of the next region in the order of becoming free.
    fn next_birth(&mut self) -> u64 {
        let born = self.births;
        self.births += 1;
        born
    }

    fn note_used(&mut self, len: Bytes) {
        self.used += len;
        self.used_peak = self.used_peak.max(self.used);
    }
}
