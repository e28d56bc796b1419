//! Address ranges of buffers and groups, by id and by address.

use std::collections::BTreeMap;
use std::ops::Index;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use smallvec::SmallVec;

use super::spill_error::SpillError;
use crate::planner::{RangeId, UseToken};
use vramp_alloc::Driver;
use vramp_alloc::range::StableRange;
use vramp_core::{AddrRange, DeviceAddr};

/// Address range of a buffer or of a group.
pub(super) struct RangeBacking {
    pub range: Arc<StableRange>,
    /// Shared by several small buffers.
    pub is_group: bool,
    /// All of it is backed: nothing was lent since it was restored.
    pub fully_backed: bool,
    /// Work after which the memory may be used: earlier owners' work on it may be in flight until
    /// then.
    pub ready_after: Option<UseToken>,
    /// Copies whose transfer could not wait for them. The memory may be lent after them.
    pub unsettled: SmallVec<[UseToken; 4]>,
    /// Contents were being moved since the last lease: the memory may not be pinned.
    pub refuses_pins: bool,
    /// Memory of others that the contents are in, or were in.
    pub adopted: Option<AdoptedMemory>,
}

impl RangeBacking {
    /// Returns addresses without memory.
    pub fn new(range: Arc<StableRange>, is_group: bool) -> RangeBacking {
        RangeBacking {
            range,
            is_group,
            fully_backed: false,
            ready_after: None,
            unsettled: SmallVec::new(),
            refuses_pins: false,
            adopted: None,
        }
    }

    /// Returns the work after which the memory may be lent.
    pub fn lend_after(&self) -> impl Iterator<Item = UseToken> {
        self.ready_after.into_iter().chain(self.unsettled.iter().copied())
    }
}

/// All address ranges.
#[derive(Default)]
pub(super) struct Homes {
    by_range: BTreeMap<RangeId, RangeBacking>,
    by_address: BTreeMap<DeviceAddr, RangeId>,
}

impl Homes {
    pub fn insert(&mut self, range: RangeId, home: RangeBacking) {
        self.by_address.insert(home.range.range().start, range);
        self.by_range.insert(range, home);
    }

    pub fn remove(&mut self, range: &RangeId) -> Option<RangeBacking> {
        let home = self.by_range.remove(range)?;
        self.by_address.remove(&home.range.range().start);
        Some(home)
    }

    pub fn get(&self, range: &RangeId) -> Option<&RangeBacking> {
        self.by_range.get(range)
    }

    pub fn get_mut(&mut self, range: &RangeId) -> Option<&mut RangeBacking> {
        self.by_range.get_mut(range)
    }

    /// Returns the range that holds an address. O(log n).
    pub fn at(&self, address: DeviceAddr) -> Option<RangeId> {
        let (_, &range) = self.by_address.range(..=address).next_back()?;
        let end = self[&range].range.range().checked_end();
        end.is_none_or(|end| address < end).then_some(range)
    }

    /// Refuses memory that has addresses of a buffer or a group. O(log n).
    pub fn check_apart(&self, memory: AddrRange) -> Result<(), SpillError> {
        let end = memory.start + memory.len;
        let Some((_, range)) = self.by_address.range(..end).next_back() else { return Ok(()) };
        let home = self[range].range.range();
        match home.start + home.len > memory.start {
            true => Err(SpillError::AddressesOfBuffer(memory)),
            false => Ok(()),
        }
    }

    pub fn len(&self) -> usize {
        self.by_range.len()
    }
}

impl Index<&RangeId> for Homes {
    type Output = RangeBacking;

    fn index(&self, range: &RangeId) -> &RangeBacking {
        &self.by_range[range]
    }
}

/// Memory that was not adopted, with its owner.
#[derive(thiserror::Error)]
#[error("the memory was not adopted: {error}")]
pub struct AdoptFailed {
    /// The reason.
    pub error: SpillError,
    /// What keeps the memory.
    pub owner: Box<dyn Send>,
}

impl std::fmt::Debug for AdoptFailed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdoptFailed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl From<Box<AdoptFailed>> for SpillError {
    fn from(failed: Box<AdoptFailed>) -> SpillError {
        failed.error
    }
}

/// Memory that the driver adopted. Dropping it makes the driver forget it, and drops the owner.
pub(super) struct AdoptedMemory {
    pub range: AddrRange,
    driver: Arc<dyn Driver>,
    owner: Option<Box<dyn Send>>,
}

impl AdoptedMemory {
    pub fn new(
        driver: &Arc<dyn Driver>,
        range: AddrRange,
        owner: Box<dyn Send>,
    ) -> Result<AdoptedMemory, Box<AdoptFailed>> {
        match driver.adopt_memory(range) {
            Ok(()) => Ok(AdoptedMemory { range, driver: Arc::clone(driver), owner: Some(owner) }),
            Err(error) => {
                let error = SpillError::NotAdoptable { memory: range, error };
                Err(Box::new(AdoptFailed { error, owner }))
            }
        }
    }

    /// Ends the adoption without a drop of the owner.
    pub fn fail(mut self, error: SpillError) -> Box<AdoptFailed> {
        let owner = self.owner.take().expect("it has its owner until it is dropped");
        Box::new(AdoptFailed { error, owner })
    }
}

impl Drop for AdoptedMemory {
    fn drop(&mut self) {
        // First: the memory may be another allocation's once the owner is dropped.
        self.driver.forget_memory(self.range);
        let owner = self.owner.take();
        // A panic of the owner is its own: the memory is not used any more.
        let _ = catch_unwind(AssertUnwindSafe(move || drop(owner)));
    }
}
