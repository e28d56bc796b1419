//! Counters of the allocations and frees of a part of a program.
//!
//! Counters may nest and overlap: each counts from its start, whatever others count. Without a
//! counter an allocation costs one atomic load more.

use std::sync::atomic::{AtomicUsize, Ordering};

use vramp_core::Bytes;

use crate::sync::{Mutex, lock};

/// A count with its peak and total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Allocated minus freed. Negative if memory from before the start was freed.
    pub now: i64,
    /// High-water mark of `now`; at least zero.
    pub peak: i64,
    /// Sum of all allocations.
    pub total: u64,
}

impl Count {
    fn add(&mut self, amount: u64) {
        self.now = self.now.saturating_add_unsigned(amount);
        self.peak = self.peak.max(self.now);
        self.total = self.total.saturating_add(amount);
    }

    fn subtract(&mut self, amount: u64) {
        self.now = self.now.saturating_sub_unsigned(amount);
    }
}

/// Counts of a [`Counter`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes, by the exact lengths of the allocations.
    pub bytes: Count,
    /// Number of allocations.
    pub blocks: Count,
}

struct Open {
    number: u64,
    counts: Counts,
}

#[derive(Default)]
struct List {
    open: Vec<Open>,
    next: u64,
}

/// The counters of one allocator.
#[derive(Default)]
pub(super) struct Counters {
    /// Number of open counters.
    open: AtomicUsize,
    list: Mutex<List>,
}

impl Counters {
    pub(super) fn begin(&self) -> Counter<'_> {
        let mut list = lock(&self.list);
        let number = list.next;
        list.next += 1;
        list.open.push(Open { number, counts: Counts::default() });
        self.open.store(list.open.len(), Ordering::Relaxed);
        Counter { counters: self, number }
    }

    fn end(&self, number: u64) {
        let mut list = lock(&self.list);
        list.open.retain(|open| open.number != number);
        self.open.store(list.open.len(), Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn allocated(&self, len: Bytes) {
        if self.open.load(Ordering::Relaxed) > 0 {
            self.count(|counts| {
                counts.bytes.add(len.count());
                counts.blocks.add(1);
            });
        }
    }

    #[inline]
    pub(super) fn freed(&self, len: Bytes) {
        if self.open.load(Ordering::Relaxed) > 0 {
            self.count(|counts| {
                counts.bytes.subtract(len.count());
                counts.blocks.subtract(1);
            });
        }
    }

    #[cold]
    fn count(&self, count: impl Fn(&mut Counts)) {
        for open in &mut lock(&self.list).open {
            count(&mut open.counts);
        }
    }
}

/// Counts from its creation until it is dropped.
#[must_use = "a counter stops when it is dropped"]
pub struct Counter<'a> {
    counters: &'a Counters,
    number: u64,
}

impl Counter<'_> {
    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        let list = lock(&self.counters.list);
        let this = list.open.iter().find(|open| open.number == self.number);
        this.map_or_else(Counts::default, |open| open.counts)
    }
}

impl Drop for Counter<'_> {
    fn drop(&mut self) {
        self.counters.end(self.number);
    }
}

impl std::fmt::Debug for Counter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.counts().fmt(f)
    }
}
