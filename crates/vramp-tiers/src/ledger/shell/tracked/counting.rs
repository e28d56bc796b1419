//! What a part of a program allocates and frees, counted while somebody wants to know.
//!
//! Counters nest and overlap as they like: each counts from where it was begun, and an inner one
//! takes nothing from an outer one. Without any, counting costs one look at a number.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ThreadId};

use vramp_core::Bytes;

use super::TrackedAllocator;
use crate::sync::{Mutex, lock};

/// One amount over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// What came less what went. Negative if more of what was there before went.
    pub now: i64,
    /// The largest that `now` ever was; at least zero.
    pub peak: i64,
    /// All that came.
    pub total: u64,
}

impl Count {
    fn come(&mut self, amount: u64) {
        self.now = self.now.saturating_add_unsigned(amount);
        self.peak = self.peak.max(self.now);
        self.total = self.total.saturating_add(amount);
    }

    fn go(&mut self, amount: u64) {
        self.now = self.now.saturating_sub_unsigned(amount);
    }
}

/// What a [`Counter`] has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes, in the exact lengths that the allocator gave.
    pub bytes: Count,
    /// Allocations.
    pub blocks: Count,
}

struct Open {
    number: u64,
    /// Whose calls it counts; `None` for everybody's.
    thread: Option<ThreadId>,
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
    /// How many are open.
    open: AtomicUsize,
    list: Mutex<List>,
}

impl Counters {
    fn begin(&self, thread: Option<ThreadId>) -> u64 {
        let mut list = lock(&self.list);
        let number = list.next;
        list.next += 1;
        list.open.push(Open { number, thread, counts: Counts::default() });
        self.open.store(list.open.len(), Ordering::Relaxed);
        number
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
                counts.bytes.come(len.count());
                counts.blocks.come(1);
            });
        }
    }

    #[inline]
    pub(super) fn freed(&self, len: Bytes) {
        if self.open.load(Ordering::Relaxed) > 0 {
            self.count(|counts| {
                counts.bytes.go(len.count());
                counts.blocks.go(1);
            });
        }
    }

    #[cold]
    fn count(&self, count: impl Fn(&mut Counts)) {
        let this = thread::current().id();
        for open in &mut lock(&self.list).open {
            if open.thread.is_none_or(|thread| thread == this) {
                count(&mut open.counts);
            }
        }
    }
}

/// Counts from its beginning until it is dropped.
#[must_use = "it counts no more once it is dropped"]
pub struct Counter<'a> {
    tracked: &'a TrackedAllocator,
    number: u64,
}

impl Counter<'_> {
    /// What it has seen so far.
    pub fn counts(&self) -> Counts {
        let list = lock(&self.tracked.counters.list);
        let this = list.open.iter().find(|open| open.number == self.number);
        this.map_or_else(Counts::default, |open| open.counts)
    }
}

impl Drop for Counter<'_> {
    fn drop(&mut self) {
        self.tracked.counters.end(self.number);
    }
}

impl std::fmt::Debug for Counter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.counts().fmt(f)
    }
}

impl TrackedAllocator {
    /// Counts what all threads allocate and free here from now on. Another lock for each call while
    /// there is a counter.
    pub fn count(&self) -> Counter<'_> {
        Counter { tracked: self, number: self.counters.begin(None) }
    }

    /// Counts what the calling thread allocates and frees: a free counts where it happens.
    pub fn count_this_thread(&self) -> Counter<'_> {
        Counter { tracked: self, number: self.counters.begin(Some(thread::current().id())) }
    }
}
