//! The memory that the program holds, by address.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::DEVICES;

/// Who gave a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The driver.
    Driver,
    /// The driver, in memory that moves between host and device.
    Managed,
    /// The pool, for any stream: a `cuMemAlloc`.
    Segment,
    /// The pool, in the order of a stream: a `cuMemAllocAsync`.
    Block,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub size: u64,
    pub device: usize,
    /// The context in which it was requested, as a number.
    pub context: usize,
    pub source: Source,
    /// Number of its ticket for other processes; zero without one.
    pub ticket: u64,
}

impl Block {
    /// Returns true for a block of the pool.
    pub fn is_pooled(self) -> bool {
        matches!(self.source, Source::Segment | Source::Block)
    }
}

#[derive(Debug)]
struct Table {
    blocks: BTreeMap<u64, Block>,
    live: [u64; DEVICES],
    peak: [u64; DEVICES],
    /// Tickets given so far.
    tickets: u64,
}

/// All blocks of the process. A call costs O(log n) and a lock.
#[derive(Debug)]
pub struct Ledger(Mutex<Table>);

impl Ledger {
    pub const fn new() -> Ledger {
        let blocks = BTreeMap::new();
        Ledger(Mutex::new(Table { blocks, live: [0; DEVICES], peak: [0; DEVICES], tickets: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a block. One that was there under its address was freed by a way that is not seen.
    pub fn insert(&self, address: u64, block: Block) {
        let mut table = self.lock();
        if let Some(lost) = table.blocks.insert(address, block) {
            table.live[lost.device] -= lost.size;
        }
        table.live[block.device] += block.size;
        table.peak[block.device] = table.peak[block.device].max(table.live[block.device]);
    }

    /// Gives the block that begins at an address a ticket, whose number is unique in the process. Returns the number,
    /// the same for the same block. `None` without such a block.
    pub fn give_ticket(&self, address: u64) -> Option<u64> {
        let mut table = self.lock();
        let next = table.tickets + 1;
        let block = table.blocks.get_mut(&address)?;
        if block.ticket == 0 {
            block.ticket = next;
        }
        let number = block.ticket;
        table.tickets = table.tickets.max(number);
        Some(number)
    }

    /// Takes the block that begins at an address out.
    pub fn remove(&self, address: u64) -> Option<Block> {
        let mut table = self.lock();
        let block = table.blocks.remove(&address)?;
        table.live[block.device] -= block.size;
        Some(block)
    }

    /// Returns the block that begins at an address.
    pub fn get(&self, address: u64) -> Option<Block> {
        self.lock().blocks.get(&address).copied()
    }

    /// Returns the first address of the block that contains an address, and the block.
    pub fn containing(&self, address: u64) -> Option<(u64, Block)> {
        let table = self.lock();
        let (&start, &block) = table.blocks.range(..=address).next_back()?;
        (address - start < block.size).then_some((start, block))
    }

    /// Takes all blocks out that a test finds. O(n).
    pub fn take(&self, test: impl Fn(&Block) -> bool) -> Vec<(u64, Block)> {
        let mut table = self.lock();
        let found = table.blocks.iter().filter(|(_, block)| test(block));
        let found: Vec<_> = found.map(|(&address, &block)| (address, block)).collect();
        for (address, block) in &found {
            table.blocks.remove(address);
            table.live[block.device] -= block.size;
        }
        found
    }

    /// Returns the bytes that the program holds on a device, and the most it held.
    pub fn held(&self, device: usize) -> (u64, u64) {
        let table = self.lock();
        (table.live[device], table.peak[device])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(size: u64, device: usize) -> Block {
        Block { size, device, context: 0, source: Source::Driver, ticket: 0 }
    }

    #[test]
    fn blocks_are_found_by_any_address_in_them() {
        let ledger = Ledger::new();
        ledger.insert(4096, block(512, 0));
        ledger.insert(8192, block(512, 1));
        assert_eq!(ledger.containing(4607), Some((4096, block(512, 0))));
        assert_eq!(ledger.containing(4608), None);
        assert_eq!(ledger.containing(0), None);
        assert_eq!(ledger.get(8192), Some(block(512, 1)));
        assert_eq!(ledger.give_ticket(8192), Some(1));
        assert_eq!(ledger.give_ticket(8192), Some(1));
        assert_eq!(ledger.give_ticket(4096), Some(2));
        assert_eq!(ledger.give_ticket(4097), None);
    }

    #[test]
    fn held_bytes_and_peaks_are_those_of_each_device() {
        let ledger = Ledger::new();
        ledger.insert(4096, block(512, 0));
        ledger.insert(8192, block(100, 1));
        // The address was freed unseen.
        ledger.insert(4096, block(200, 0));
        assert_eq!((ledger.held(0), ledger.held(1)), ((200, 512), (100, 100)));
        assert_eq!(ledger.remove(4096), Some(block(200, 0)));
        assert_eq!(ledger.remove(4096), None);
        assert_eq!(ledger.take(|block| block.device == 1), vec![(8192, block(100, 1))]);
        assert_eq!((ledger.held(0), ledger.held(1)), ((0, 512), (0, 100)));
    }
}
