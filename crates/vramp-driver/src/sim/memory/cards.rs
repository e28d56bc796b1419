//! What each card has, and the counts of its device's live objects.

use vramp_core::Bytes;

use super::Memory;
use crate::sim::refusal::{Outcome, Refusal};

impl Memory {
    /// Allocates `len` bytes of a card, for a handle or for the driver's own pool.
    pub fn charge(&mut self, card: usize, len: Bytes) -> Outcome<()> {
        self.drop_closed_exports();
        let card = &mut self.cards[card];
        let free = card.capacity - card.used;
        if len.count() > free {
            return Err(Refusal::out_of_memory(format!(
                "{len} requested, {} free",
                Bytes::new(free)
            )));
        }
        card.used += len.count();
        card.used_peak = card.used_peak.max(card.used);
        Ok(())
    }

    /// Frees `len` bytes of a card.
    pub fn refund(&mut self, card: usize, len: Bytes) {
        self.cards[card].used -= len.count();
    }

    pub fn free(&mut self, card: usize) -> Bytes {
        self.drop_closed_exports();
        Bytes::new(self.cards[card].capacity - self.cards[card].used)
    }

    pub fn used(&mut self, card: usize) -> Bytes {
        self.drop_closed_exports();
        Bytes::new(self.cards[card].used)
    }

    pub fn used_peak(&self, card: usize) -> Bytes {
        Bytes::new(self.cards[card].used_peak)
    }

    pub fn reservations(&self, device: usize) -> usize {
        self.cards[device].reservations
    }

    pub fn reserved_addresses(&self, device: usize) -> Bytes {
        let own = self.reservations.values().filter(|reserved| reserved.device == device);
        own.map(|reserved| Bytes::new(reserved.len)).sum()
    }

    pub fn mappings(&self, device: usize) -> usize {
        self.cards[device].mappings
    }

    pub fn allocations(&self, device: usize) -> usize {
        self.cards[device].allocations
    }

    /// Returns the number of handles that are not released.
    pub fn handles(&self, device: usize) -> usize {
        self.cards[device].handles
    }

    pub fn handles_released_but_mapped(&self, device: usize) -> usize {
        self.cards[device].handles_released_but_mapped
    }
}
