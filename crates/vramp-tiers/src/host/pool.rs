//! The pool: its pinned memory, and how it grows and shrinks.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::extents::{BackingId, Extent, ExtentAllocator, ExtentList};
use crate::ledger::core::Tier;
use vramp_alloc::{Driver, DriverError};
use vramp_core::Bytes;
use vramp_driver::{HostBuffer, HostSlice};
use vramp_host::{HostMemory, HostMemoryError, HostSpan, NumaNode, OutOfBounds, PageKind};

use super::allocation::{HostAllocation, Part};
use super::background::{Background, Wake};
use super::core::growth::Held;
use super::returns::{Free, Return, Returned, Returns, Uses};
use super::small::{Slabs, SmallHostAllocation};
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::error::SpaceFull;
use crate::ledger::shell::space::MemorySpace;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};

/// Threads that touch the pages of newly mapped memory.
const TOUCH_THREADS: usize = 8;

/// Options of a [`HostPool`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPoolConfig {
    /// Length of a block: whole pages of 4 KiB, and whole granules of the space.
    pub block: Bytes,
    /// Blocks pinned at a time.
    pub blocks_per_pool: u32,
    /// Number of such groups of blocks pinned by [`HostPool::new`].
    pub initial_pools: u32,
    /// Least number of free blocks. With fewer, a background thread pins more. Zero for never.
    pub spare_blocks: u32,
    /// NUMA node of the memory. `None` leaves the choice to the kernel.
    pub node: Option<NumaNode>,
    /// Kind of pages.
    pub pages: PageKind,
    /// Memory that is wholly free for this long is unpinned, at most as long again later. `None` keeps it until
    /// [`HostPool::shrink`].
    pub idle: Option<Duration>,
    /// Least bytes that stay pinned however long they are free. `None` is what the initial pools have.
    pub keep: Option<Bytes>,
}

impl HostPoolConfig {
    /// Returns the bytes that stay pinned however long they are free.
    pub fn floor(&self) -> Bytes {
        let blocks = u64::from(self.initial_pools) * u64::from(self.blocks_per_pool);
        self.keep.unwrap_or(Bytes::new(self.block.count().saturating_mul(blocks)))
    }
}

impl Default for HostPoolConfig {
    /// 128 blocks of 1 MiB at a time, once at first, and at least 32 blocks free. What is idle for ten seconds is
    /// unpinned, down to the first 128.
    fn default() -> HostPoolConfig {
        HostPoolConfig {
            block: Bytes::mib(1),
            blocks_per_pool: 128,
            initial_pools: 1,
            spare_blocks: 32,
            node: None,
            pages: PageKind::Transparent,
            idle: Some(Duration::from_secs(10)),
            keep: None,
        }
    }
}

/// Why blocks could not be allocated. Nothing is charged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostPoolError {
    /// The space or reservation cannot be charged.
    #[error(transparent)]
    Full(#[from] SpaceFull),
    /// The kernel has no memory.
    #[error(transparent)]
    NoMemory(#[from] HostMemoryError),
    /// A device could not pin the memory.
    #[error("host memory could not be pinned: {0}")]
    Pin(#[from] DriverError),
    /// The configuration is invalid.
    #[error("invalid host pool configuration: {0}")]
    Config(&'static str),
    /// The charge is to another space, or not for whole blocks.
    #[error(
        "a charge of {0} cannot pay for {1} of this pool: charge its own space, in whole blocks"
    )]
    WrongCharge(String, Bytes),
    /// The pool is not pinned for the device.
    #[error("the pool is not pinned for {0}: pass all devices to HostPool::new")]
    NotPinnedFor(String),
    /// The range lies outside the allocation.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    /// The charge was accepted, but the blocks cannot be pinned: the space has other users.
    #[error(
        "{asked} host blocks are neither free nor can be pinned, of {total}: the space is charged \
         for other memory too; use one space for each pool"
    )]
    Exhausted {
        /// Number of blocks requested.
        asked: u64,
        /// Number of blocks that the capacity of the space allows.
        total: u64,
    },
}

/// Blocks and activity of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolStats {
    /// Pinned blocks, free or not.
    pub blocks: u64,
    /// Free blocks.
    pub free_blocks: u64,
    /// Blocks that were dropped while work on a stream uses them.
    pub pending_blocks: u64,
    /// Blocks that are never reused: the device could not tell when the work that uses them ends.
    pub leaked_blocks: u64,
    /// Blocks that a device could not unpin: pinned, and never used. Each [`HostPool::shrink`] tries again.
    pub quarantined_blocks: u64,
    /// Times that memory was pinned while an allocation waited.
    pub pools_on_demand: u64,
    /// Times that memory was pinned ahead of need, including by [`HostPool::new`].
    pub pools_ahead: u64,
    /// Times that memory was unpinned.
    pub pools_unpinned: u64,
    /// Times that a device could not unpin memory.
    pub unpins_failed: u64,
    /// Times that an allocation waited for work on a stream.
    pub waits_for_work: u64,
}

/// Blocks pinned together, with their handle on each device.
pub(super) struct Pinned {
    pub memory: Arc<HostMemory>,
    /// `None` on a device that has unpinned it.
    pub buffers: Vec<Option<HostBuffer>>,
    /// No block was taken since a pass of the background thread found all of them free.
    pub is_idle: bool,
}

impl Pinned {
    pub fn len(&self) -> Bytes {
        self.memory.len()
    }
}

pub(super) struct State {
    /// Free blocks. Each `Pinned` is a backing.
    pub blocks: ExtentAllocator,
    pub pools: BTreeMap<BackingId, Pinned>,
    pub returns: Returns,
    pub slabs: Slabs,
    /// Memory that a device could not unpin.
    pub quarantined: Vec<Pinned>,
    /// Bytes that threads unpin now.
    pub unpinning: Bytes,
    /// The background thread looks for idle memory from time to time.
    pub is_aging: bool,
    growing: bool,
    /// Number of threads that wait for the work of a return they took from `returns`.
    waiting_for_work: usize,
    pub stats: HostPoolStats,
}

pub(super) struct Shared {
    pub space: MemorySpace,
    pub config: HostPoolConfig,
    pub devices: Vec<Arc<dyn Driver>>,
    pub state: Mutex<State>,
    /// Memory was pinned or unpinned or could not be, or blocks were returned.
    pub changed: Condvar,
    background: Background,
    /// Capacity of the space, in whole blocks.
    most: Bytes,
}

/// Why memory is pinned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Growth {
    Needed,
    Ahead,
}

/// Pinned host memory in blocks. Clones share the pool. Its memory is unpinned with the last clone
/// and the last allocation, which wait for all noted work. If a wait fails it stays pinned.
#[derive(Clone)]
pub struct HostPool {
    pub(super) shared: Arc<Shared>,
}

impl HostPool {
    /// Creates a pool that is charged to `space` and pinned for `devices`. Without devices the
    /// memory is pageable.
    ///
    /// # Errors
    /// The space is not of the tier Host, the configuration is invalid, or memory could not be
    /// pinned.
    pub fn new(
        space: &MemorySpace,
        config: HostPoolConfig,
        devices: impl IntoIterator<Item = Arc<dyn Driver>>,
    ) -> Result<HostPool, HostPoolError> {
        let levels = space.levels();
        let bad = HostPoolError::Config;
        if space.id().tier != Tier::Host {
            return Err(bad("the space is not of the tier Host"));
        }
        if config.block.is_zero() || !config.block.is_multiple_of(Bytes::kib(4)) {
            return Err(bad("a block must be whole pages of 4 KiB"));
        }
        if !config.block.is_multiple_of(levels.granule) {
            return Err(bad("a block must be whole granules of the space"));
        }
        if config.blocks_per_pool == 0 {
            return Err(bad("at least one block must be pinned at a time"));
        }
        let most = levels.capacity.round_down(config.block);
        let first = u64::from(config.initial_pools) * u64::from(config.blocks_per_pool);
        if first > most.count() / config.block.count() {
            return Err(bad("the initial pools exceed the capacity of the space"));
        }
        let state = State {
            blocks: ExtentAllocator::new(config.block),
            pools: BTreeMap::new(),
            returns: Returns::default(),
            slabs: Slabs::default(),
            quarantined: Vec::new(),
            unpinning: Bytes::ZERO,
            is_aging: false,
            growing: false,
            waiting_for_work: 0,
            stats: HostPoolStats::default(),
        };
        let initial_pools = config.initial_pools;
        let shared = Arc::new(Shared {
            space: space.clone(),
            config,
            devices: devices.into_iter().collect(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            background: Background::default(),
            most,
        });
        for _ in 0..initial_pools {
            shared.grow(Growth::Ahead)?;
        }
        Ok(HostPool { shared })
    }

    /// Returns the space that is charged.
    pub fn space(&self) -> &MemorySpace {
        &self.shared.space
    }

    /// Returns true for clones of one pool.
    pub fn is_same(&self, other: &HostPool) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Returns the length of a block.
    pub fn block(&self) -> Bytes {
        self.shared.config.block
    }

    /// Returns an error if the pool is not pinned for `device`.
    pub(crate) fn check_device(&self, device: &Arc<dyn Driver>) -> Result<(), HostPoolError> {
        self.shared.device(device).map(|_| ())
    }

    /// Allocates `len` in whole blocks, charged to the space. No driver call if enough blocks are
    /// free and no returned block is in use.
    ///
    /// # Errors
    /// The space is full, or more memory could not be pinned.
    pub fn allocate(&self, len: Bytes) -> Result<HostAllocation, HostPoolError> {
        let charge = self.shared.space.charge(self.shared.whole(len))?;
        self.allocate_with(charge)
    }

    /// Allocates the blocks that `charge` pays for, for example a charge to a reservation
    /// ([`Reservation::charge`](crate::Reservation::charge)).
    ///
    /// # Errors
    /// The charge is to another space or not for whole blocks, or more memory could not be pinned.
    /// The charge is credited.
    pub fn allocate_with(&self, charge: Charge) -> Result<HostAllocation, HostPoolError> {
        let parts = self.shared.take(&charge)?;
        self.shared.grow_ahead();
        Ok(HostAllocation::new(&self.shared, parts, charge))
    }

    /// Allocates zero bytes to a block from a block that such allocations share. The block is charged
    /// to the space.
    ///
    /// # Errors
    /// As [`allocate`](HostPool::allocate), or `len` is more than a block.
    pub fn allocate_small(&self, len: Bytes) -> Result<SmallHostAllocation, HostPoolError> {
        let slab = Slabs::allocate(&self.shared, len)?;
        self.shared.grow_ahead();
        Ok(slab)
    }

    /// Returns statistics. Queries events of returned blocks.
    pub fn stats(&self) -> HostPoolStats {
        let mut state = lock(&self.shared.state);
        self.shared.sweep(&mut state);
        HostPoolStats {
            blocks: self.shared.count(state.pinned()),
            free_blocks: self.shared.count(state.blocks.free_bytes()),
            pending_blocks: self.shared.count(state.returns.bytes()),
            quarantined_blocks: self.shared.count(state.quarantined()),
            ..state.stats
        }
    }

    /// Checks every invariant.
    ///
    /// # Errors
    /// Describes the first invariant that does not hold.
    pub fn audit(&self) -> Result<(), vramp_core::Inconsistency> {
        let state = lock(&self.shared.state);
        let bad = |what| Err(vramp_core::Inconsistency { what });
        if let Err(what) = state.blocks.audit() {
            return bad(what);
        }
        let leaving = state.unpinning + state.quarantined();
        let (pinned, listed) = (state.pinned(), state.blocks.census().capacity + leaving);
        if pinned > self.shared.most || pinned != listed {
            return bad(format!(
                "{pinned} pinned, {listed} as extents, at most {}",
                self.shared.most
            ));
        }
        Ok(())
    }
}

impl Shared {
    /// Returns the number of blocks in `len`.
    fn count(&self, len: Bytes) -> u64 {
        len.count() / self.config.block.count()
    }

    /// Rounds up to whole blocks. Saturates at a length that no space has.
    pub fn whole(&self, len: Bytes) -> Bytes {
        len.checked_round_up(self.config.block).unwrap_or(Bytes::new(u64::MAX))
    }

    /// Allocates the blocks that `charge` pays for.
    pub fn take(&self, charge: &Charge) -> Result<Vec<Part>, HostPoolError> {
        let len = charge.bytes();
        if !self.space.has_charge(charge) || !len.is_multiple_of(self.config.block) {
            return Err(HostPoolError::WrongCharge(format!("{charge:?}"), len));
        }
        loop {
            let mut state = lock(&self.state);
            if let Ok(runs) = state.blocks.alloc(len) {
                return Ok(state.parts(runs));
            }
            if self.sweep(&mut state) {
                continue;
            }
            let full = state.pinned() >= self.most;
            if state.growing || (full && !state.unpinning.is_zero()) {
                self.wait_for_others(state);
                continue;
            }
            drop(state);
            let failure = match full {
                true => HostPoolError::Exhausted {
                    asked: self.count(len),
                    total: self.count(self.most),
                },
                false => match self.grow(Growth::Needed) {
                    Ok(()) => continue,
                    Err(error) => error,
                },
            };
            if !self.wait_for_work(len)? {
                return Err(failure);
            }
        }
    }

    /// Waits for the work that uses the blocks returned first. Returns false if no returned block
    /// is in use and too few are free.
    fn wait_for_work(&self, len: Bytes) -> Result<bool, HostPoolError> {
        let mut state = lock(&self.state);
        if state.blocks.free_bytes() >= len {
            return Ok(true);
        }
        let Some(oldest) = state.returns.take_oldest() else {
            let others_wait = state.waiting_for_work > 0;
            if others_wait {
                self.wait_for_others(state);
            }
            return Ok(others_wait);
        };
        state.stats.waits_for_work += 1;
        state.waiting_for_work += 1;
        drop(state);
        let waited = oldest.wait(&self.devices);
        let mut state = lock(&self.state);
        state.waiting_for_work -= 1;
        self.changed.notify_all();
        match waited {
            Ok(()) => {
                state.finish(oldest);
                Ok(true)
            }
            Err(error) => {
                state.returns.put_back(oldest);
                Err(error.into())
            }
        }
    }

    /// Waits until another thread has pinned memory, returned blocks, or failed to.
    fn wait_for_others(&self, state: MutexGuard<'_, State>) {
        drop(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
    }

    /// Frees returned blocks whose work is complete. Returns true if there were any.
    pub fn sweep(&self, state: &mut State) -> bool {
        let State { returns, blocks, slabs, .. } = state;
        returns.sweep(&self.devices, Free { blocks, slabs })
    }

    /// Returns blocks, at once or after the work that uses them. No driver call.
    pub fn put_back(self: &Arc<Shared>, what: Returned, uses: Uses) {
        let mut state = lock(&self.state);
        let State { returns, blocks, slabs, .. } = &mut *state;
        returns.give(Free { blocks, slabs }, Return::new(what, uses));
        let begins = !state.is_aging && self.may_idle(&state);
        state.is_aging |= begins;
        drop(state);
        if begins && !self.background.wake(self, Wake::Age) {
            lock(&self.state).is_aging = false;
        }
    }

    /// Has the background thread pin more if few blocks are free. Never blocks on pinning. Without a thread the pool grows on
    /// demand, in the thread that allocates.
    fn grow_ahead(self: &Arc<Shared>) {
        if self.config.spare_blocks > 0 && self.is_low() {
            self.background.wake(self, Wake::Grow);
        }
    }

    /// Leaks the blocks of runs, and with them the pool: they stay pinned.
    pub fn leak(self: &Arc<Shared>, len: Bytes) {
        lock(&self.state).stats.leaked_blocks += self.count(len);
        std::mem::forget(Arc::clone(self));
    }

    /// Pins memory for one more group of blocks, shorter where the capacity ends. Does nothing
    /// while another thread pins.
    pub fn grow(&self, why: Growth) -> Result<(), HostPoolError> {
        let len = {
            let mut state = lock(&self.state);
            let wanted = self.config.block * u64::from(self.config.blocks_per_pool);
            let len = self.held(&state).next_len(wanted);
            if state.growing || len.is_zero() {
                return Ok(());
            }
            state.growing = true;
            len
        };
        // Unlocked while the kernel and the driver work, which takes milliseconds.
        let pinned = self.pin(len);
        let mut state = lock(&self.state);
        state.growing = false;
        let result = pinned.map(|pinned| {
            let pool = state.blocks.add(len);
            state.pools.insert(pool, pinned);
            match why {
                Growth::Needed => state.stats.pools_on_demand += 1,
                Growth::Ahead => state.stats.pools_ahead += 1,
            }
        });
        self.changed.notify_all();
        result
    }

    /// Returns true if few blocks are free and the capacity allows more.
    pub fn is_low(&self) -> bool {
        let spare = self.config.block * u64::from(self.config.spare_blocks);
        self.held(&lock(&self.state)).is_low(spare)
    }

    fn held(&self, state: &State) -> Held {
        let free = state.blocks.free_bytes() + state.returns.bytes();
        Held { pinned: state.pinned(), free, most: self.most }
    }

    fn pin(&self, len: Bytes) -> Result<Pinned, HostPoolError> {
        let memory = HostMemory::new(len, self.config.node, self.config.pages)?;
        memory.prefault(TOUCH_THREADS);
        let mut pinned = Pinned { memory, buffers: Vec::new(), is_idle: false };
        for device in &self.devices {
            match device.register_host(&pinned.memory) {
                Ok(buffer) => pinned.buffers.push(Some(buffer)),
                Err(error) => {
                    // What a device cannot unpin now stays pinned and mapped: it keeps the memory.
                    self.unpin(&mut pinned);
                    return Err(error.into());
                }
            }
        }
        Ok(pinned)
    }

    /// Returns the index of a device among those that the pool is pinned for.
    pub fn device(&self, driver: &Arc<dyn Driver>) -> Result<usize, HostPoolError> {
        let known = self.devices.iter().position(|device| Arc::ptr_eq(device, driver));
        known.ok_or_else(|| HostPoolError::NotPinnedFor(driver.info().id.clone()))
    }

    /// Returns a range of pinned memory as a device addresses it.
    pub fn slice(&self, device: usize, run: Extent) -> HostSlice {
        let state = lock(&self.state);
        let pinned = state.pools.get(&run.backing);
        let pinned = pinned.expect("memory with allocated blocks stays pinned");
        let buffer = pinned.buffers[device].expect("memory in use is pinned for every device");
        HostSlice { buffer, offset: run.offset, len: run.len }
    }
}

impl State {
    fn finish(&mut self, returned: Return) {
        let State { returns, blocks, slabs, .. } = self;
        returns.finish(returned, Free { blocks, slabs });
    }

    /// Returns the pinned bytes. O(groups).
    pub fn pinned(&self) -> Bytes {
        self.usable() + self.unpinning + self.quarantined()
    }

    fn quarantined(&self) -> Bytes {
        self.quarantined.iter().map(Pinned::len).sum()
    }

    /// Pairs runs that were taken with their memory.
    fn parts(&mut self, runs: ExtentList) -> Vec<Part> {
        let part = |run: Extent| {
            let pinned = self.pools.get_mut(&run.backing).expect("runs lie in pinned memory");
            pinned.is_idle = false;
            Part { run, memory: Arc::clone(&pinned.memory) }
        };
        runs.into_iter().map(part).collect()
    }
}

/// Returns the memory of a run.
pub(super) fn span_of(part: &Part) -> HostSpan {
    let Extent { offset, len, .. } = part.run;
    HostSpan::new(&part.memory, offset, len).expect("a run lies in its memory")
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        // Memory must stay until no work uses it. Waiting for an event invalidates no capture.
        let mut over = true;
        while let Some(oldest) = state.returns.take_oldest() {
            over &= oldest.wait(&self.devices).is_ok();
            state.finish(oldest);
        }
        state.returns.end(&self.devices);
        let pools = std::mem::take(&mut state.pools);
        let quarantined = std::mem::take(&mut state.quarantined);
        drop(state);
        if !over {
            // Nothing tells when the work is over: the memory stays pinned.
            return std::mem::forget(pools);
        }
        for mut pinned in pools.into_values().chain(quarantined) {
            // A device that cannot unpin it keeps it.
            self.unpin(&mut pinned);
        }
    }
}

impl std::fmt::Debug for HostPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = self.stats();
        write!(f, "{} of {} blocks free", stats.free_blocks, stats.blocks)
    }
}
