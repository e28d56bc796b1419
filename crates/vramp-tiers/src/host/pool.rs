//! The pools of blocks, and how they grow and shrink.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use crate::extents::{BackingId, Extent, ExtentAllocator, ExtentList};
use crate::ledger::core::Tier;
use vramp_alloc::{Driver, DriverError};
use vramp_core::Bytes;
use vramp_driver::{HostBuffer, HostSlice};
use vramp_host::{HostMemory, HostMemoryError, HostSpan, NumaNode, OutOfBounds, PageKind};

use super::allocation::{HostAllocation, Part};
use super::grower::Grower;
use super::returns::{Free, Return, Returned, Returns, Uses};
use super::small::{Slabs, SmallHostAllocation};
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::error::SpaceFull;
use crate::ledger::shell::space::MemorySpace;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};

/// Threads that make the kernel give the pages of a new pool.
const TOUCHING_THREADS: usize = 8;

/// How a pool of the host's blocks is built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPoolConfig {
    /// The length of a block: whole pages of 4 KiB, and whole granules of the space.
    pub block: Bytes,
    /// How many blocks are pinned at a time.
    pub blocks_per_pool: u32,
    /// How many pools are pinned from the start.
    pub initial_pools: u32,
    /// When fewer blocks are free, more are pinned in the background. Zero for never.
    pub spare_blocks: u32,
    /// Where the memory lies. `None` for wherever the kernel puts it.
    pub node: Option<NumaNode>,
    /// Which pages it is made of.
    pub pages: PageKind,
}

impl Default for HostPoolConfig {
    /// Pools of 128 blocks of 1 MiB, one at first, a quarter of a pool always spare.
    fn default() -> HostPoolConfig {
        HostPoolConfig {
            block: Bytes::mib(1),
            blocks_per_pool: 128,
            initial_pools: 1,
            spare_blocks: 32,
            node: None,
            pages: PageKind::Transparent,
        }
    }
}

/// Why the host gave no blocks. Nothing is charged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostPoolError {
    /// The budget is used up.
    #[error(transparent)]
    Full(#[from] SpaceFull),
    /// The kernel gave no memory.
    #[error(transparent)]
    NoMemory(#[from] HostMemoryError),
    /// A device could not pin it.
    #[error("host memory could not be pinned: {0}")]
    Pin(#[from] DriverError),
    /// The configuration makes no sense.
    #[error("a pool of host blocks cannot be made: {0}")]
    Config(&'static str),
    /// The charge is another space's, or not as much as is needed.
    #[error("{0} do not pay for {1} of this pool: charge its own space, in whole blocks")]
    WrongCharge(String, Bytes),
    /// The pool is not pinned for this device.
    #[error("the pool is not pinned for {0}: name all devices when it is made")]
    NotPinnedFor(String),
    /// A part that is not there.
    #[error(transparent)]
    Outside(#[from] OutOfBounds),
    /// What is charged fits, but the blocks are not to be had.
    #[error(
        "{asked} blocks of the host are not free and cannot be made, of {total}: somebody \
         charges the space without using this pool; give each its own space"
    )]
    Exhausted {
        /// How many were asked for.
        asked: u64,
        /// How many there are.
        total: u64,
    },
}

/// What a pool did and has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolStats {
    /// Blocks that there are.
    pub blocks: u64,
    /// Blocks that nobody has.
    pub free_blocks: u64,
    /// Blocks that were returned while work still used them.
    pub pending_blocks: u64,
    /// Pools that were pinned because somebody waited for blocks.
    pub pools_on_demand: u64,
    /// Pools that were pinned before anybody needed them, the first ones included.
    pub pools_ahead: u64,
    /// Pools that were unpinned.
    pub pools_unpinned: u64,
    /// Times that blocks were waited for until work was done.
    pub waits_for_work: u64,
}

/// One pool's memory, and its name at each device.
pub(super) struct Pinned {
    pub memory: Arc<HostMemory>,
    buffers: Vec<HostBuffer>,
}

impl Pinned {
    fn len(&self) -> Bytes {
        self.memory.len()
    }
}

pub(super) struct State {
    /// Which blocks are free, in one segment a pool.
    pub blocks: ExtentAllocator,
    pub pools: BTreeMap<BackingId, Pinned>,
    pub returns: Returns,
    pub slabs: Slabs,
    growing: bool,
    /// How many threads wait for the work of a return that they took out.
    waiting_for_work: usize,
    stats: HostPoolStats,
}

pub(super) struct Shared {
    pub space: MemorySpace,
    pub config: HostPoolConfig,
    pub devices: Vec<Arc<dyn Driver>>,
    pub state: Mutex<State>,
    /// A pool was added, or could not be; or what was waited for came back.
    changed: Condvar,
    /// What the space holds, in whole blocks.
    most: Bytes,
}

/// Why a pool is pinned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Growth {
    Needed,
    Ahead,
}

/// Blocks of the host's memory. Clones are the same pool; it ends with the last clone and the last
/// allocation, after the work that was noted.
#[derive(Clone)]
pub struct HostPool {
    shared: Arc<Shared>,
    grower: Arc<Grower>,
}

impl HostPool {
    /// A pool that is charged to `space` and pinned for `devices`, or for none.
    ///
    /// # Errors
    /// The space is no host's, the configuration makes no sense, or there is no memory.
    pub fn new(
        space: &MemorySpace,
        config: HostPoolConfig,
        devices: impl IntoIterator<Item = Arc<dyn Driver>>,
    ) -> Result<HostPool, HostPoolError> {
        let levels = space.levels();
        let bad = HostPoolError::Config;
        if space.id().tier != Tier::Host {
            return Err(bad("the space is not one of the host"));
        }
        if config.block.is_zero() || !config.block.is_multiple_of(Bytes::kib(4)) {
            return Err(bad("a block has to be whole pages of 4 KiB"));
        }
        if !config.block.is_multiple_of(levels.granule) {
            return Err(bad("a block has to be whole granules of the space"));
        }
        if config.blocks_per_pool == 0 {
            return Err(bad("a pool needs a block at least"));
        }
        let most = levels.capacity.round_down(config.block);
        let first = u64::from(config.initial_pools) * u64::from(config.blocks_per_pool);
        if first > most.count() / config.block.count() {
            return Err(bad("the first pools exceed the capacity of the space"));
        }
        let state = State {
            blocks: ExtentAllocator::new(config.block),
            pools: BTreeMap::new(),
            returns: Returns::default(),
            slabs: Slabs::default(),
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
            most,
        });
        for _ in 0..initial_pools {
            shared.grow(Growth::Ahead)?;
        }
        let grower = Arc::new(Grower::new(&shared));
        Ok(HostPool { shared, grower })
    }

    /// The space that is charged.
    pub fn space(&self) -> &MemorySpace {
        &self.shared.space
    }

    /// The length of a block.
    pub fn block(&self) -> Bytes {
        self.shared.config.block
    }

    /// Refuses a device that the pool is not pinned for.
    pub(crate) fn check_device(&self, device: &Arc<dyn Driver>) -> Result<(), HostPoolError> {
        self.shared.device(device).map(|_| ())
    }

    /// `len` of the host's memory in whole blocks, charged to the space. No driver call if blocks
    /// are free.
    ///
    /// # Errors
    /// The budget is used up, or more memory could not be pinned.
    pub fn allocate(&self, len: Bytes) -> Result<HostAllocation, HostPoolError> {
        let charge = self.shared.space.charge(self.shared.whole(len))?;
        self.allocate_with(charge)
    }

    /// As much of the host's memory as was charged, to a reservation for example
    /// ([`Reservation::charge`](crate::Reservation::charge)), in whole blocks.
    ///
    /// # Errors
    /// The charge is another space's or no whole number of blocks, or more memory could not be
    /// pinned. The charge is credited.
    pub fn allocate_with(&self, charge: Charge) -> Result<HostAllocation, HostPoolError> {
        let parts = self.shared.take(&charge)?;
        self.grower.wake_if_low(&self.shared);
        Ok(HostAllocation::new(&self.shared, parts, charge))
    }

    /// A piece of 64 KiB or less, cut from a block that is shared with others. The block is charged
    /// to the space.
    ///
    /// # Errors
    /// As [`allocate`](HostPool::allocate), or `len` is zero or larger.
    pub fn allocate_small(&self, len: Bytes) -> Result<SmallHostAllocation, HostPoolError> {
        let slab = Slabs::allocate(&self.shared, len)?;
        self.grower.wake_if_low(&self.shared);
        Ok(slab)
    }

    /// Ends blocks of small pieces that nobody uses, and unpins pools that are wholly free until no more than `keep` is held, and returns how much
    /// was unpinned. Work in progress is not waited for. Two driver calls a pool and device.
    pub fn shrink(&self, keep: Bytes) -> Bytes {
        let mut unpinned = Vec::new();
        let charges;
        {
            let mut state = lock(&self.shared.state);
            self.shared.sweep(&mut state);
            let State { blocks, pools, slabs, stats, .. } = &mut *state;
            charges = slabs.end_idle(blocks);
            let idle: Vec<BackingId> = blocks.idle().collect();
            let mut held: Bytes = pools.values().map(Pinned::len).sum();
            // The newest first: blocks are taken from the oldest.
            for pool in idle.into_iter().rev() {
                let len = pools.get(&pool).map_or(Bytes::ZERO, Pinned::len);
                if held >= keep + len && blocks.remove(pool).is_ok() {
                    held -= len;
                    stats.pools_unpinned += 1;
                    unpinned.extend(pools.remove(&pool));
                }
            }
        }
        drop(charges);
        unpinned.into_iter().map(|pinned| self.shared.unpin(pinned)).sum()
    }

    /// What the pool did and has.
    pub fn stats(&self) -> HostPoolStats {
        let mut state = lock(&self.shared.state);
        self.shared.sweep(&mut state);
        HostPoolStats {
            blocks: self.shared.count(state.held()),
            free_blocks: self.shared.count(state.blocks.free_bytes()),
            pending_blocks: self.shared.count(state.returns.bytes()),
            ..state.stats
        }
    }

    /// Checks what must always hold.
    ///
    /// # Errors
    /// What does not.
    pub fn audit(&self) -> Result<(), vramp_core::Inconsistency> {
        let state = lock(&self.shared.state);
        let bad = |what| Err(vramp_core::Inconsistency { what });
        if let Err(what) = state.blocks.audit() {
            return bad(what);
        }
        let (held, listed) = (state.held(), state.blocks.census().capacity);
        if held > self.shared.most || held != listed {
            return bad(format!("{held} pinned, {listed} listed, of {}", self.shared.most));
        }
        Ok(())
    }
}

impl Shared {
    /// How many blocks that is.
    fn count(&self, len: Bytes) -> u64 {
        len.count() / self.config.block.count()
    }

    /// `len` in whole blocks. What no number can hold is what no space has.
    pub fn whole(&self, len: Bytes) -> Bytes {
        len.checked_round_up(self.config.block).unwrap_or(Bytes::new(u64::MAX))
    }

    /// Takes the blocks that were paid for.
    pub fn take(&self, charge: &Charge) -> Result<Vec<Part>, HostPoolError> {
        let len = charge.bytes();
        if !charge.is_in(&self.space) || !len.is_multiple_of(self.config.block) {
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
            if state.growing {
                self.wait_for_others(state);
                continue;
            }
            let full = state.held() >= self.most;
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

    /// Waits until the work is done that uses the blocks returned first. False if there is nothing
    /// to wait for and too little is free.
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

    /// Waits until another thread added a pool or brought something back, or could not.
    fn wait_for_others(&self, state: MutexGuard<'_, State>) {
        drop(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes back what no work uses any more. True if there was something.
    pub fn sweep(&self, state: &mut State) -> bool {
        let State { returns, blocks, slabs, .. } = state;
        returns.sweep(&self.devices, Free { blocks, slabs })
    }

    /// Takes something back, at once or once the work is done.
    pub fn give(&self, what: Returned, uses: Uses) {
        let mut state = lock(&self.state);
        let State { returns, blocks, slabs, .. } = &mut *state;
        returns.give(&self.devices, Free { blocks, slabs }, Return::new(what, uses));
    }

    /// Pins one pool more, or less where the space holds no whole one. One at a time.
    pub fn grow(&self, why: Growth) -> Result<(), HostPoolError> {
        let len = {
            let mut state = lock(&self.state);
            let pool = self.config.block * u64::from(self.config.blocks_per_pool);
            let len = pool.min(self.most - state.held());
            if state.growing || len.is_zero() {
                return Ok(());
            }
            state.growing = true;
            len
        };
        // The lock is free while the kernel and the driver work: that takes milliseconds.
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

    /// True if few blocks are left and there may be more.
    pub fn is_low(&self) -> bool {
        let state = lock(&self.state);
        let free = state.blocks.free_bytes() + state.returns.bytes();
        free < self.config.block * u64::from(self.config.spare_blocks) && state.held() < self.most
    }

    fn pin(&self, len: Bytes) -> Result<Pinned, HostPoolError> {
        let memory = HostMemory::new(len, self.config.node, self.config.pages)?;
        memory.prefault(TOUCHING_THREADS);
        let mut pinned = Pinned { memory, buffers: Vec::new() };
        for device in &self.devices {
            match device.register_host(&pinned.memory) {
                Ok(buffer) => pinned.buffers.push(buffer),
                Err(error) => {
                    self.unpin(pinned);
                    return Err(error.into());
                }
            }
        }
        Ok(pinned)
    }

    /// Returns how much it was. A device that fails here keeps it pinned, and alive with it.
    fn unpin(&self, pinned: Pinned) -> Bytes {
        for (device, buffer) in self.devices.iter().zip(&pinned.buffers) {
            let _ = device.free_host(*buffer);
        }
        pinned.memory.len()
    }

    /// The number of a device among those that the pool is pinned for.
    pub fn device(&self, driver: &Arc<dyn Driver>) -> Result<usize, HostPoolError> {
        let known = self.devices.iter().position(|device| Arc::ptr_eq(device, driver));
        known.ok_or_else(|| HostPoolError::NotPinnedFor(driver.info().id.clone()))
    }

    /// A part of a pool's memory as a device names it.
    pub fn slice(&self, device: usize, run: Extent) -> HostSlice {
        let state = lock(&self.state);
        let pinned = state.pools.get(&run.backing);
        let pinned = pinned.expect("a pool with allocated blocks is not unpinned");
        HostSlice { buffer: pinned.buffers[device], offset: run.offset, len: run.len }
    }
}

impl State {
    fn finish(&mut self, returned: Return) {
        let State { returns, blocks, slabs, .. } = self;
        returns.finish(returned, Free { blocks, slabs });
    }

    /// How much is pinned. O(pools).
    fn held(&self) -> Bytes {
        self.pools.values().map(Pinned::len).sum()
    }

    /// The runs with their memory.
    fn parts(&self, runs: ExtentList) -> Vec<Part> {
        let part = |run: Extent| {
            let pinned = self.pools.get(&run.backing).expect("runs lie in pools that there are");
            Part { run, memory: Arc::clone(&pinned.memory) }
        };
        runs.into_iter().map(part).collect()
    }
}

/// The bytes of a run.
pub(super) fn span_of(part: &Part) -> HostSpan {
    let Extent { offset, len, .. } = part.run;
    HostSpan::new(&part.memory, offset, len).expect("a run lies in its pool's memory")
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut state = lock(&self.state);
        // Memory that work still uses must not go before it.
        while let Some(oldest) = state.returns.take_oldest() {
            let _ = oldest.wait(&self.devices);
            state.finish(oldest);
        }
        state.returns.end(&self.devices);
        let pools = std::mem::take(&mut state.pools);
        drop(state);
        for pinned in pools.into_values() {
            self.unpin(pinned);
        }
    }
}

impl std::fmt::Debug for HostPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = self.stats();
        write!(f, "{} of {} blocks free", stats.free_blocks, stats.blocks)
    }
}
