//! The pool: its creation, and allocations of its blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::extents::ExtentAllocator;
use crate::ledger::core::Tier;
use vramp_alloc::Driver;
use vramp_core::Bytes;

use super::allocation::HostAllocation;
use super::background::Background;
use super::config::{HostPoolConfig, HostPoolError, HostPoolStats};
use super::returns::Returns;
use super::shared::{Growth, Shape, Shared, State};
use super::slabs::Slabs;
use super::small::SmallHostAllocation;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::space::MemorySpace;
use crate::sync::{Condvar, Mutex, lock};

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
        self.allocate_as(charge, Shape::Runs)
    }

    /// Allocates `len` in whole blocks that lie one behind the other, charged to the space. No driver call if
    /// enough such blocks are free and no returned block is in use.
    ///
    /// # Errors
    /// `len` is zero, the space is full, or more memory could not be pinned.
    pub fn allocate_in_one(&self, len: Bytes) -> Result<HostAllocation, HostPoolError> {
        if len.is_zero() {
            return Err(HostPoolError::Config("memory in one piece has at least a byte"));
        }
        let charge = self.shared.space.charge(self.shared.whole(len))?;
        self.allocate_as(charge, Shape::One)
    }

    fn allocate_as(&self, charge: Charge, shape: Shape) -> Result<HostAllocation, HostPoolError> {
        let parts = self.shared.take(&charge, shape)?;
        self.shared.grow_ahead();
        Ok(HostAllocation::new(&self.shared, parts, charge))
    }

    /// Allocates zero bytes to a block from a block that such allocations share. The block is charged
    /// to the space.
    ///
    /// # Errors
    /// As [`allocate`](HostPool::allocate), or `len` is more than a block.
    pub fn allocate_small(&self, len: Bytes) -> Result<SmallHostAllocation, HostPoolError> {
        let slab = self.shared.allocate_small(len)?;
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

impl std::fmt::Debug for HostPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = self.stats();
        write!(f, "{} of {} blocks free", stats.free_blocks, stats.blocks)
    }
}
