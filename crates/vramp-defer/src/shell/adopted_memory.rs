//! Memory that the driver adopted, and its owner.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vramp_alloc::Driver;
use vramp_core::AddrRange;

use super::spill_error::SpillError;

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
