//! What a pool has pinned, and how it grows.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use crate::extents::{BackingId, Extent, ExtentAllocator, ExtentList};
use vramp_alloc::Driver;
use vramp_core::Bytes;
use vramp_driver::{HostBuffer, HostSlice};
use vramp_host::HostMemory;

use super::background::{Background, Wake};
use super::config::{HostPoolConfig, HostPoolError, HostPoolStats};
use super::core::growth::Held;
use super::part::Part;
use super::returns::{Free, Return, Returned, Returns, Uses};
use super::slabs::Slabs;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::space::MemorySpace;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};

/// Threads that touch the pages of newly mapped memory.
const TOUCH_THREADS: usize = 8;

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
    pub growing: bool,
    /// Number of threads that wait for the work of a return they took from `returns`.
    pub waiting_for_work: usize,
    pub stats: HostPoolStats,
}

pub(super) struct Shared {
    pub space: MemorySpace,
    pub config: HostPoolConfig,
    pub devices: Vec<Arc<dyn Driver>>,
    pub state: Mutex<State>,
    /// Memory was pinned or unpinned or could not be, or blocks were returned.
    pub changed: Condvar,
    pub background: Background,
    /// Capacity of the space, in whole blocks.
    pub most: Bytes,
}

/// How the blocks of an allocation lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// In as few runs as possible.
    Runs,
    /// One behind the other.
    One,
}

/// Why memory is pinned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Growth {
    /// At least so much.
    Needed(Bytes),
    Ahead,
}

impl Shared {
    /// Returns the number of blocks in `len`.
    pub fn count(&self, len: Bytes) -> u64 {
        len.count() / self.config.block.count()
    }

    /// Rounds up to whole blocks. Saturates at a length that no space has.
    pub fn whole(&self, len: Bytes) -> Bytes {
        len.checked_round_up(self.config.block).unwrap_or(Bytes::new(u64::MAX))
    }

    /// Allocates the blocks that `charge` pays for.
    pub fn take(&self, charge: &Charge, shape: Shape) -> Result<Vec<Part>, HostPoolError> {
        let len = charge.bytes();
        if !self.space.has_charge(charge) || !len.is_multiple_of(self.config.block) {
            return Err(HostPoolError::WrongCharge(format!("{charge:?}"), len));
        }
        loop {
            let mut state = lock(&self.state);
            if let Some(runs) = state.alloc(len, shape) {
                return Ok(state.parts(runs));
            }
            if self.sweep(&mut state) {
                continue;
            }
            let least = if shape == Shape::One { len } else { self.config.block };
            let full = state.pinned() + least > self.most;
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
                false => match self.grow(Growth::Needed(least)) {
                    Ok(()) => continue,
                    Err(error) => error,
                },
            };
            if !self.wait_for_work(len, shape)? {
                return Err(failure);
            }
        }
    }

    /// Waits for the work that uses the blocks returned first. Returns false if no returned block
    /// is in use and too few are free.
    fn wait_for_work(&self, len: Bytes, shape: Shape) -> Result<bool, HostPoolError> {
        let mut state = lock(&self.state);
        if state.has(len, shape) {
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
        if begins && !self.wake(Wake::Age) {
            lock(&self.state).is_aging = false;
        }
    }

    /// Has the background thread pin more if few blocks are free. Never blocks on pinning. Without a thread the pool grows on
    /// demand, in the thread that allocates.
    pub fn grow_ahead(self: &Arc<Shared>) {
        if self.config.spare_blocks > 0 && self.is_low() {
            self.wake(Wake::Grow);
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
            let group = self.config.block * u64::from(self.config.blocks_per_pool);
            let wanted = match why {
                Growth::Needed(least) => group.max(least),
                Growth::Ahead => group,
            };
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
                Growth::Needed(_) => state.stats.pools_on_demand += 1,
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
    fn alloc(&mut self, len: Bytes, shape: Shape) -> Option<ExtentList> {
        match shape {
            Shape::Runs => self.blocks.alloc(len).ok(),
            Shape::One => self.blocks.alloc_one(len).map(|run| [run].into_iter().collect()),
        }
    }

    /// Returns true if [`State::alloc`] would succeed.
    fn has(&mut self, len: Bytes, shape: Shape) -> bool {
        match shape {
            Shape::Runs => self.blocks.free_bytes() >= len,
            Shape::One => self.blocks.alloc_one(len).is_some_and(|run| {
                self.blocks.free(run).expect("it was allocated just now");
                true
            }),
        }
    }

    fn finish(&mut self, returned: Return) {
        let State { returns, blocks, slabs, .. } = self;
        returns.finish(returned, Free { blocks, slabs });
    }

    /// Returns the pinned bytes. O(groups).
    pub fn pinned(&self) -> Bytes {
        self.usable() + self.unpinning + self.quarantined()
    }

    pub fn quarantined(&self) -> Bytes {
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
