//! Counts the memory of a reader against [`ReadLimits::memory`].

use crate::{ReadError, ReadLimits};

/// Bytes that an entry of a hash table costs besides the heap memory of its contents: a bucket of
/// 24 bytes and a slot of 9, both twice because tables double, the copy while they do, and the
/// rounding of a small heap block.
pub(crate) const ENTRY: usize = 128;

/// The memory held, which grows by [`Meter::take`] before it is allocated.
pub(crate) struct Meter {
    held: u64,
    allowed: u64,
}

impl Meter {
    pub fn new(limits: &ReadLimits) -> Meter {
        Meter { held: 0, allowed: limits.memory.count() }
    }

    pub fn take(&mut self, bytes: usize, offset: u64) -> Result<(), ReadError> {
        self.held += bytes as u64;
        if self.held <= self.allowed {
            return Ok(());
        }
        Err(ReadError::Limit {
            limit: "memory",
            what: "bytes of memory",
            allowed: self.allowed,
            offset,
        })
    }

    pub fn release(&mut self, bytes: usize) {
        self.held = self.held.saturating_sub(bytes as u64);
    }

    /// Makes room for `more` items and counts it. Grows by a quarter, since doubling would cost twice
    /// the memory of a long list. The old items are counted too while they are copied.
    pub fn reserve<T>(
        &mut self,
        items: &mut Vec<T>,
        more: usize,
        offset: u64,
    ) -> Result<(), ReadError> {
        let spare = items.capacity() - items.len();
        if more <= spare {
            return Ok(());
        }
        let growth = (more - spare).max(items.capacity() / 4).max(4);
        let old = items.capacity() * size_of::<T>();
        self.take(old + growth * size_of::<T>(), offset)?;
        items.reserve_exact(spare + growth);
        self.release(old);
        Ok(())
    }

    /// Pushes an item with [`Meter::reserve`].
    pub fn push<T>(&mut self, items: &mut Vec<T>, item: T, offset: u64) -> Result<(), ReadError> {
        self.reserve(items, 1, offset)?;
        items.push(item);
        Ok(())
    }
}
