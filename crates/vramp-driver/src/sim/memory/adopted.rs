//! Memory that a device adopted: of other code, or its own.
//!
//! 1. [`Memory::adopt`] refuses what is not one allocation, as a card does.
//! 2. While it is adopted, [`Memory::owner`] names the device for it.
//! 3. [`Memory::forget`] ends it. Each step is O(log n).

use vramp_core::AddrRange;

use super::{Allocator, Memory};
use crate::sim::refusal::{Outcome, Refusal};

impl Memory {
    /// Adopts a range for a device. `is_own` says that it is the device's already.
    pub fn adopt(&mut self, device: usize, range: AddrRange, is_own: bool) -> Outcome<()> {
        let no_range =
            || Refusal::invalid(format!("{range} is empty or ends beyond the addresses"));
        let end = range.checked_end().filter(|_| !range.len.is_zero()).ok_or_else(no_range)?;
        let (start, end) = (range.start.number(), end.number());
        if self.adopted.overlaps(start, end) {
            return Err(Refusal::invalid(format!("{range} overlaps adopted memory")));
        }
        let other = self.allocations.range(..=start).next_back().filter(|(at, known)| {
            known.by == Allocator::Other
                && end <= **at + known.len
                && self.allocated_by(**at) == Some(device)
        });
        if !is_own && other.is_none() {
            let detail = format!("{range} is not inside one allocation of this device's memory");
            return Err(Refusal::invalid(detail));
        }
        self.adopted.0.insert(start, (range.len.count(), device));
        Ok(())
    }

    /// Forgets an adopted range. Returns false if the device did not adopt it.
    pub fn forget(&mut self, device: usize, range: AddrRange) -> bool {
        let start = range.start.number();
        let is_adopted = self.adopted.0.get(&start) == Some(&(range.len.count(), device));
        if is_adopted {
            self.adopted.0.remove(&start);
        }
        is_adopted
    }

    /// Returns the number of ranges that a device adopted. O(n).
    pub fn adoptions(&self, device: usize) -> usize {
        self.adopted.0.values().filter(|(_, owner)| *owner == device).count()
    }
}
