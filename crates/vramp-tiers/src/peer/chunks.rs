//! Chunks: memory of another card, created and mapped through this card's driver.

use std::sync::Arc;

use vramp_alloc::{Driver, DriverError};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::{Handle, MemoryLocation, MemoryProperties};

use crate::ledger::shell::charge::Charge;

/// A mapped chunk and what it is charged to.
pub(super) struct Chunk {
    pub range: AddrRange,
    handle: Handle,
    pub charge: Charge,
}

impl Chunk {
    /// Creates memory on the card with the ordinal and maps it. Four driver calls.
    ///
    /// # Errors
    /// A driver call failed. Nothing stays but what could not be undone.
    pub fn create(
        driver: &Arc<dyn Driver>,
        ordinal: u32,
        len: Bytes,
        charge: Charge,
    ) -> Result<Chunk, DriverError> {
        let start = driver.reserve(len, driver.info().limits.page)?;
        let range = AddrRange::new(start, len);
        let properties = MemoryProperties::at(MemoryLocation::Peer(ordinal));
        let made = driver.create(len, properties).and_then(|handle| {
            let undo = |error, is_mapped: bool| {
                // The first error is returned. What cannot be undone ends with the device.
                if !is_mapped || driver.unmap(range).is_ok() {
                    let _ = driver.release(handle);
                }
                error
            };
            driver.map(start, handle).map_err(|error| undo(error, false))?;
            driver.set_access(range, &[]).map_err(|error| undo(error, true))?;
            Ok(handle)
        });
        match made {
            Ok(handle) => Ok(Chunk { range, handle, charge }),
            Err(error) => {
                let _ = driver.free_addresses(range);
                Err(error)
            }
        }
    }

    /// Unmaps and releases it. Three driver calls. All work on it is complete.
    ///
    /// # Errors
    /// It could not be unmapped and is as before, or it was unmapped and its memory could not be
    /// released: then only its charge is left.
    pub fn release(self, driver: &Arc<dyn Driver>) -> Result<Charge, Unreleased> {
        if driver.unmap(self.range).is_err() {
            return Err(Unreleased::Mapped(self));
        }
        // Addresses that stay reserved take no memory.
        let _ = driver.free_addresses(self.range);
        match driver.release(self.handle) {
            Ok(()) => Ok(self.charge),
            Err(_) => Err(Unreleased::Lost(self.charge)),
        }
    }
}

/// A chunk whose memory did not return to its card.
pub(super) enum Unreleased {
    /// It is whole.
    Mapped(Chunk),
    /// It is mapped nowhere.
    Lost(Charge),
}
