//! The one lock, what it protects, and what is done behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::core::{
    BufferId, DeferConfig, Deferrables, Drop as CopyDrop, Extent, Lower, PieceId, RangeId, Rates,
    Room, UseToken,
};
use vramp_alloc::range::StableRange;
use vramp_alloc::{Allocator, Driver, DriverError, StreamId};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::Stream;

use super::config::SpillConfig;
use super::error::SpillError;
use super::events::Events;
use super::hosted::{Hosted, Readable};
use super::lease::Ending;
use super::report::{History, SpillStats};
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use vramp_tiers::Charge;
use vramp_tiers::DiskStore;
use vramp_tiers::HostAllocation;
use vramp_tiers::MemorySpace;
use vramp_tiers::{DiskCopy, Mover, MoverConfig};

/// The copies of a piece below the card.
#[derive(Default)]
pub(super) struct Below {
    /// In blocks.
    pub host: Option<HostAllocation>,
    /// On the host as well, mapped for the device.
    pub hosted: Option<Hosted>,
    pub disk: Option<Arc<DiskCopy>>,
}

/// Addresses of a buffer, or of a group.
pub(super) struct Home {
    pub range: Arc<StableRange>,
    /// Of several small buffers.
    pub is_group: bool,
    /// Nothing was lent since all of it was brought.
    pub whole: bool,
    /// What its memory was brought behind: others' work on that memory may not be over before.
    pub behind: Option<UseToken>,
}

pub(super) struct State {
    pub core: Deferrables,
    pub events: Events,
    pub copies: BTreeMap<PieceId, Below>,
    pub homes: BTreeMap<RangeId, Home>,
    /// Buffers that nobody has any more, and that something still holds.
    pub dying: Vec<BufferId>,
    /// Leases that end once their streams capture no more.
    pub late: Vec<Ending>,
    /// Ranges of which less is needed, and whose memory others' work may still use.
    pub unlent: Vec<RangeId>,
    /// Memory that others can have since buffers and leases ended.
    pub came_back: Bytes,
    /// Groups that get no more buffers.
    pub ended_groups: Vec<RangeId>,
    /// What pays for the memory on the card, where a space is charged.
    pub charges: Vec<Charge>,
    /// What is being charged.
    pub paying: Bytes,
    pub rates: Rates,
    /// What buffers share that are readable while spilled; none before the first.
    pub readable: Option<Readable>,
    /// Ranges of which memory was lent, and copies may be mapped there instead.
    pub unmounted: Vec<RangeId>,
    /// Ranges where copies are being mapped, with the lock free.
    pub mounting: BTreeSet<RangeId>,
    /// How many transfers are on their way to or from the disk.
    pub staged: usize,
    pub stats: SpillStats,
    pub history: History,
    /// What is not needed any more. To drop it tells those who wait for budgets, and calls theirs.
    pub gone: Vec<Box<dyn Send>>,
}

/// The lock. What became needless behind it is dropped once it is free, and what is to be mapped is
/// mapped then.
pub(super) struct Locked<'a> {
    guard: Option<MutexGuard<'a, State>>,
    shared: &'a Shared,
}

const LOCKED: &str = "the lock is held until this is dropped";

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.guard.as_ref().expect(LOCKED)
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.guard.as_mut().expect(LOCKED)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Some(mut state) = self.guard.take() {
            let gone = std::mem::take(&mut state.gone);
            let mounts = state.begin_mounts();
            drop(state);
            self.shared.mount(mounts);
            drop(gone);
        }
    }
}

pub(super) struct Shared {
    pub allocator: Arc<Allocator>,
    pub driver: Arc<dyn Driver>,
    pub mover: Mover,
    pub disk: Option<Arc<DiskStore>>,
    pub budget: Option<MemorySpace>,
    pub config: SpillConfig,
    /// Behind it memory is brought, and ahead of need data.
    pub stream: (StreamId, Stream),
    /// It passes the ends of copies to the host.
    pub leaving: Stream,
    state: Mutex<State>,
    /// A lease ended, a move settled, or work is known to be over.
    changed: Condvar,
}

const HOME: &str = "a range of the core has addresses";

impl Shared {
    pub fn new(
        allocator: &Arc<Allocator>,
        mover: Mover,
        disk: Option<Arc<DiskStore>>,
        budget: Option<MemorySpace>,
        config: SpillConfig,
    ) -> Result<Shared, SpillError> {
        let driver = Arc::clone(mover.driver());
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let core = Deferrables::new(DeferConfig {
            piece: config.piece,
            page: driver.info().limits.page,
            capacity: config.capacity.unwrap_or(driver.info().limits.memory),
            cooldown_ns: nanoseconds(config.cooldown),
            recency_ns: nanoseconds(config.recency),
            clean_after_ns: nanoseconds(config.clean_after),
            promote_after: config.promote_after,
        })?;
        let id = allocator.create_stream()?;
        let raw = allocator.stream(id).expect("it was made just now");
        let leaving = allocator.create_stream()?;
        let leaving = allocator.stream(leaving).expect("it was made just now");
        let state = State {
            core,
            events: Events::new(allocator),
            copies: BTreeMap::new(),
            homes: BTreeMap::new(),
            dying: Vec::new(),
            late: Vec::new(),
            unlent: Vec::new(),
            came_back: Bytes::ZERO,
            ended_groups: Vec::new(),
            charges: Vec::new(),
            paying: Bytes::ZERO,
            rates: config.rates,
            readable: None,
            unmounted: Vec::new(),
            mounting: BTreeSet::new(),
            staged: 0,
            stats: SpillStats::default(),
            history: History::keeping(config.history),
            gone: Vec::new(),
        };
        Ok(Shared {
            allocator: Arc::clone(allocator),
            driver,
            mover,
            disk,
            budget,
            config,
            stream: (id, raw),
            leaving,
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    pub fn lock(&self) -> Locked<'_> {
        Locked { guard: Some(lock(&self.state)), shared: self }
    }

    /// Tells those who wait that something changed.
    pub fn tell(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change, but not long: work that ends tells nobody.
    pub fn wait_a_moment<'a>(&'a self, mut state: Locked<'a>) -> Locked<'a> {
        if !state.gone.is_empty() || state.has_mounts() {
            drop(state);
            return self.lock();
        }
        let moment = Duration::from_micros(200);
        let waited = self.changed.wait_timeout(state.guard.take().expect(LOCKED), moment);
        let guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        Locked { guard: Some(guard), shared: self }
    }

    /// What leased buffers may have on the card now.
    pub fn capacity(&self) -> Bytes {
        let all = || {
            let card = self.driver.info().limits.memory;
            let limit = self.allocator.limit().unwrap_or(card).min(card);
            limit.saturating_sub(self.allocator.live())
        };
        self.config.capacity.unwrap_or_else(all)
    }

    /// What is free below the card, promised or not. Where there is a disk, the last blocks of the
    /// host are kept for the way there and back.
    pub fn room(&self) -> Room {
        let free = |space: &MemorySpace| space.capacity().saturating_sub(space.total());
        let host = free(self.mover.pool().space());
        let Some(store) = &self.disk else { return Room { host, disk: Bytes::ZERO } };
        let MoverConfig { step, staging_pieces, .. } = *self.mover.config();
        let staging = step * u64::from(staging_pieces);
        Room { host: host.saturating_sub(staging), disk: free(store.space()) }
    }

    /// Waits on the host until work is over.
    pub fn wait_for(&self, uses: &[UseToken]) -> Result<(), DriverError> {
        for &token in uses {
            let event = self.lock().events.of(token);
            if let Some(event) = event {
                self.driver.synchronize_event(event)?;
            }
        }
        Ok(())
    }
}

/// Boxed, to be dropped once the lock is free.
fn needless<T: Send + 'static>(what: T) -> Box<dyn Send> {
    Box::new(what)
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The addresses go with the state, and their memory to others: not before the work on it.
        let mut state = self.lock();
        let _ = state.poll();
        state.unmounted.clear();
        let mut over = state.late.is_empty();
        for event in state.events.last() {
            over &= self.driver.synchronize_event(event).is_ok();
        }
        if !over {
            // Nobody can tell when it is.
            std::mem::forget(std::mem::take(&mut state.homes));
            std::mem::forget(std::mem::take(&mut state.copies));
            std::mem::forget(state.readable.take());
        }
    }
}

impl State {
    /// Learns which work is over, and does what waited for it. A query for each stream with work.
    ///
    /// # Errors
    /// Some could not be asked: their work counts as under way.
    pub fn poll(&mut self) -> Result<(), DriverError> {
        for ending in std::mem::take(&mut self.late) {
            self.end_lease(ending);
        }
        let (over, asked) = self.events.poll();
        for token in over {
            self.core.use_over(token);
        }
        for range in std::mem::take(&mut self.unlent) {
            let lent = self.lend(range);
            self.came_back += lent;
        }
        self.restock();
        if !self.dying.is_empty() || !self.ended_groups.is_empty() {
            self.bury();
        }
        asked
    }

    /// Ends buffers that nobody has, as soon as nothing holds them.
    pub fn bury(&mut self) {
        let before = self.core.occupied();
        for buffer in std::mem::take(&mut self.dying) {
            let extent = self.core.extent(buffer);
            match (self.core.remove(buffer), extent) {
                (Ok(drops), Ok(extent)) => {
                    self.drop_copies(&drops);
                    self.leave(extent.range);
                }
                (Err(_), Ok(_)) => {
                    // Nobody reads it any more: it is not copied out.
                    if let Ok(drops) = self.core.discard(buffer) {
                        self.drop_copies(&drops);
                    }
                    self.dying.push(buffer);
                }
                (_, Err(_)) => {}
            }
        }
        for range in std::mem::take(&mut self.ended_groups) {
            if self.core.remove_group(range) {
                self.homes.remove(&range);
            } else if self.core.keep(range).is_ok() {
                self.ended_groups.push(range);
            }
        }
        self.came_back += before.saturating_sub(self.core.occupied());
        self.settle_charges();
    }

    /// A buffer of this range is gone: its addresses go with the last.
    fn leave(&mut self, range: RangeId) {
        if self.core.keep(range).is_err() {
            self.homes.remove(&range);
        } else {
            self.lend(range);
        }
    }

    /// Lets the pool have what the core does not need. Returns how much that was; nothing while
    /// others' work may still use the memory: then it is lent once that is over.
    pub fn lend(&mut self, range: RangeId) -> Bytes {
        let Ok(keep) = self.core.keep(range) else { return Bytes::ZERO };
        let home = self.homes.get_mut(&range).expect(HOME);
        home.whole = false;
        if home.behind.is_some_and(|token| !self.events.is_over(token)) {
            if !self.unlent.contains(&range) {
                self.unlent.push(range);
            }
            return Bytes::ZERO;
        }
        home.behind = None;
        if self.readable.is_some() && !self.unmounted.contains(&range) {
            self.unmounted.push(range);
        }
        home.range.lend(&keep)
    }

    /// Credits what is charged for more than what is on the card.
    pub fn settle_charges(&mut self) {
        let paid: Bytes = self.charges.iter().map(Charge::bytes).sum();
        let mut over = paid.saturating_sub(self.core.occupied());
        while !over.is_zero() {
            let Some(charge) = self.charges.last_mut() else { return };
            let now = over.min(charge.bytes());
            self.gone.push(Box::new(charge.split(now)));
            over -= now;
            if charge.bytes().is_zero() {
                self.charges.pop();
            }
        }
    }

    /// Drops copies that count no more. Blocks that queued copies still read serve again after them.
    pub fn drop_copies(&mut self, drops: &[CopyDrop]) {
        for gone in drops {
            let Some(below) = self.copies.get_mut(&gone.piece) else { continue };
            match gone.from {
                Lower::Host => {
                    self.gone.extend(below.host.take().map(needless));
                    if let Some(hosted) = below.hosted.take() {
                        self.retire(gone.piece.buffer, hosted, &gone.after);
                    }
                }
                Lower::Disk => self.gone.extend(below.disk.take().map(needless)),
            }
        }
    }

    /// The addresses of a part of a range.
    pub fn addresses(&self, at: Extent) -> AddrRange {
        let start = self.homes.get(&at.range).expect(HOME).range.range().start;
        AddrRange::new(start + at.offset, at.len)
    }
}
