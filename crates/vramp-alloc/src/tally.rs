//! Counts of one thread, so that a hit writes no shared cache line.
//!
//! 1. A request without the allocator's lock is counted in its thread's [`Tally`]. Only the owning
//!    thread writes it; any thread may read it.
//! 2. A request with the lock is counted in the allocator's [`Base`], after the thread's own tally
//!    was folded in ([`Base::fold`]). So the sums are exact at any time.
//! 3. A tally that counted nothing since costs a few loads. No request reads other threads' tallies.
//!
//! The bytes of all requests and their peaks are those of [`LiveBytes`]. The peaks of counts, and those
//! by pool, may miss what lies between two folds.

use std::sync::Arc;

use vramp_core::{Bytes, Stat, StatByPool};

use crate::live_bytes::{Change, LiveBytes, Unpublished};
use crate::sync::{AtomicU64, Ordering::Relaxed};

/// Largest request of PyTorch's small pool.
const SMALL_MAX: Bytes = Bytes::mib(1);

/// Classes of requests: small, large, all.
pub(crate) const CLASSES: usize = 3;
const ALL: usize = 2;
/// Kinds of counts: blocks, their bytes, the bytes requested.
pub(crate) const KINDS: usize = 3;

type Grid<T> = [[T; KINDS]; CLASSES];

/// Counts of one thread since its last fold.
pub(crate) struct Tally {
    placed: [[AtomicU64; KINDS]; ALL],
    freed: [[AtomicU64; KINDS]; ALL],
    misses: AtomicU64,
    pub(crate) bytes: Unpublished,
}

fn class_of(requested: Bytes) -> usize {
    usize::from(requested > SMALL_MAX)
}

/// Returns the change of live bytes by one block.
fn change(len: Bytes, requested: Bytes) -> Change {
    [len, requested].map(|bytes| bytes.count() as i64)
}

impl Tally {
    pub(crate) fn new(live: &Arc<LiveBytes>) -> Tally {
        let [placed, freed] = [(); 2].map(|()| Default::default());
        Tally { placed, freed, misses: AtomicU64::new(0), bytes: Unpublished::new(live) }
    }

    #[inline]
    pub(crate) fn placed(&self, len: Bytes, requested: Bytes, hit: bool) {
        let amounts = [1, len.count(), requested.count()];
        let placed = &self.placed[class_of(requested)];
        for (counter, amount) in placed.iter().zip(amounts) {
            add(counter, amount);
        }
        self.bytes.add(change(len, requested));
        if !hit {
            add(&self.misses, 1);
        }
    }

    #[inline]
    pub(crate) fn freed(&self, len: Bytes, requested: Bytes) {
        let amounts = [1, len.count(), requested.count()];
        let freed = &self.freed[class_of(requested)];
        for (counter, amount) in freed.iter().zip(amounts) {
            add(counter, amount);
        }
        self.bytes.add(change(len, requested).map(std::ops::Neg::neg));
    }

    /// Returns true if it counted something since the last fold.
    #[inline]
    fn is_dirty(&self) -> bool {
        (0..ALL).any(|class| self.is_dirty_in(class))
    }

    #[inline]
    fn is_dirty_in(&self, class: usize) -> bool {
        self.placed[class][0].load(Relaxed) | self.freed[class][0].load(Relaxed) != 0
    }

    fn clear(&self) {
        for class in 0..ALL {
            for kind in 0..KINDS {
                self.placed[class][kind].store(0, Relaxed);
                self.freed[class][kind].store(0, Relaxed);
            }
        }
        self.misses.store(0, Relaxed);
    }
}

#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed) + amount, Relaxed);
}

/// Counts of an allocator: those of requests with the lock, and the sums that threads folded in.
#[derive(Clone, Default)]
pub(crate) struct Base {
    /// By class of requests: small, large, all.
    now: Grid<i64>,
    /// That of all bytes is filled in by [`Base::with`].
    peak: Grid<i64>,
    /// Small and large.
    placed: [[u64; KINDS]; ALL],
    freed: [[u64; KINDS]; ALL],
    misses: u64,
    pub(crate) live: Arc<LiveBytes>,
}

impl Base {
    /// Counts a block that was placed with the lock held, after the thread's own tally was folded in.
    #[inline]
    pub(crate) fn placed(&mut self, len: Bytes, requested: Bytes, hit: bool) {
        let class = class_of(requested);
        for (kind, amount) in [1, len.count(), requested.count()].into_iter().enumerate() {
            self.placed[class][kind] += amount;
            self.now[class][kind] += amount as i64;
            self.now[ALL][kind] += amount as i64;
        }
        self.misses += u64::from(!hit);
        self.note_now_of(class);
        let change = change(len, requested);
        self.live.publish(change, change);
    }

    /// Counts a block that was freed with the lock held, after the thread's own tally was folded in.
    #[inline]
    pub(crate) fn freed(&mut self, len: Bytes, requested: Bytes) {
        let class = class_of(requested);
        for (kind, amount) in [1, len.count(), requested.count()].into_iter().enumerate() {
            self.freed[class][kind] += amount;
            self.now[class][kind] -= amount as i64;
            self.now[ALL][kind] -= amount as i64;
        }
        self.live.publish(change(len, requested).map(std::ops::Neg::neg), Change::default());
    }

    /// Adds a tally and clears it. Only the owning thread may call this, or another thread after
    /// the owner ended.
    #[inline]
    pub(crate) fn fold(&mut self, tally: &Tally) {
        if tally.is_dirty() {
            self.fold_dirty(tally);
        }
    }

    fn fold_dirty(&mut self, tally: &Tally) {
        tally.bytes.publish();
        self.add(tally);
        for class in 0..ALL {
            if tally.placed[class][0].load(Relaxed) != 0 {
                self.note_now_of(class);
            }
        }
        tally.clear();
    }

    /// Returns the counts including those that threads have not folded yet.
    pub(crate) fn with<'a>(mut self, all: impl Iterator<Item = &'a Tally> + Clone) -> Base {
        let [bytes, requested] = self.live.peaks(all.clone().map(|tally| &tally.bytes));
        all.for_each(|tally| self.add(tally));
        (0..ALL).for_each(|class| self.note_now_of(class));
        self.peak[ALL][1] = bytes.max(self.now[ALL][1]);
        self.peak[ALL][2] = requested.max(self.now[ALL][2]);
        self
    }

    #[inline]
    fn add(&mut self, tally: &Tally) {
        for class in (0..ALL).filter(|&class| tally.is_dirty_in(class)) {
            for kind in 0..KINDS {
                let placed = tally.placed[class][kind].load(Relaxed);
                let freed = tally.freed[class][kind].load(Relaxed);
                self.placed[class][kind] += placed;
                self.freed[class][kind] += freed;
                let change = placed as i64 - freed as i64;
                self.now[class][kind] += change;
                self.now[ALL][kind] += change;
            }
        }
        self.misses += tally.misses.load(Relaxed);
    }

    /// Updates the peaks of a class, and of the number of blocks, with the current values.
    #[inline]
    fn note_now_of(&mut self, class: usize) {
        for (peak, now) in self.peak[class].iter_mut().zip(&self.now[class]) {
            *peak = (*peak).max(*now);
        }
        self.peak[ALL][0] = self.peak[ALL][0].max(self.now[ALL][0]);
    }

    /// Resets the peaks to the current values. While several threads allocate, those of counts may
    /// include values from before, until their next fold.
    pub(crate) fn reset_peaks<'a>(&mut self, all: impl Iterator<Item = &'a Tally> + Clone) {
        self.peak = self.now;
        self.live.reset_peaks(all.map(|tally| &tally.bytes));
    }

    pub(crate) fn live(&self) -> Bytes {
        Bytes::new(self.now[ALL][2].max(0) as u64)
    }

    pub(crate) fn live_peak(&self) -> Bytes {
        Bytes::new(self.peak[ALL][2].max(0) as u64)
    }

    /// Returns the number of blocks placed.
    pub(crate) fn blocks_placed(&self) -> u64 {
        self.placed.iter().map(|amounts| amounts[0]).sum()
    }

    /// Returns the number of blocks freed.
    pub(crate) fn blocks_freed(&self) -> u64 {
        self.freed.iter().map(|amounts| amounts[0]).sum()
    }

    /// Returns the blocks that needed a plan, or that the driver's pool placed.
    pub(crate) fn misses(&self) -> u64 {
        self.misses
    }

    /// Returns blocks (0), their bytes (1) or the bytes requested (2).
    pub(crate) fn stats(&self, kind: usize) -> StatByPool {
        let stat = |class: usize, counted: std::ops::Range<usize>| Stat {
            current: self.now[class][kind].max(0) as u64,
            peak: self.peak[class][kind].max(0) as u64,
            allocated: self.placed[counted.clone()].iter().map(|amounts| amounts[kind]).sum(),
            freed: self.freed[counted].iter().map(|amounts| amounts[kind]).sum(),
        };
        StatByPool { all: stat(ALL, 0..ALL), small_pool: stat(0, 0..1), large_pool: stat(1, 1..2) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SIZE: Bytes = Bytes::mib(4);

    fn base_and_tally() -> (Base, Tally) {
        let base = Base::default();
        let tally = Tally::new(&base.live);
        (base, tally)
    }

    #[test]
    fn a_clean_tally_is_not_folded() {
        let (mut base, own) = base_and_tally();
        assert!(!own.is_dirty());
        for act in [Tally::placed_small as fn(&Tally), Tally::freed_large] {
            act(&own);
            assert!(own.is_dirty());
            base.fold(&own);
            assert!(!own.is_dirty());
        }
    }

    #[test]
    fn the_peak_of_one_thread_is_exact_whichever_requests_take_the_lock() {
        let (mut base, own) = base_and_tally();
        // 64 KiB without the lock, 4 MiB with it, both freed, and 1 MiB and 1 B at the end.
        own.placed(Bytes::kib(64), Bytes::kib(64), true);
        base.fold(&own);
        base.placed(SIZE, SIZE, true);
        own.placed(Bytes::kib(8), Bytes::kib(8), true);
        own.freed(Bytes::kib(8), Bytes::kib(8));
        base.fold(&own);
        base.freed(SIZE, SIZE);
        own.freed(Bytes::kib(64), Bytes::kib(64));
        let all = base.with([&own].into_iter());
        assert_eq!(all.live_peak(), SIZE + Bytes::kib(72));
        assert_eq!((all.live(), all.blocks_placed(), all.blocks_freed()), (Bytes::ZERO, 3, 3));
        let [blocks, bytes] = [0, 1].map(|kind| all.stats(kind));
        assert_eq!((blocks.small_pool.allocated, blocks.large_pool.allocated), (2, 1));
        assert_eq!(bytes.large_pool.peak, SIZE.count());
        assert_eq!((bytes.all.allocated, bytes.all.current), ((SIZE + Bytes::kib(72)).count(), 0));
    }

    impl Tally {
        fn placed_small(&self) {
            self.placed(Bytes::kib(4), Bytes::kib(4), true);
        }

        fn freed_large(&self) {
            self.freed(SIZE, SIZE);
        }
    }
}
