//! Counts of one thread, so that a hit writes no shared cache line.
//!
//! Only the owning thread writes them; any thread may read. A thread's counts are folded into the
//! allocator's when it next takes the allocator's lock, so the sums are exact at any time.
//!
//! The peaks of bytes over all requests are exact as long as one thread allocates. With several
//! threads a peak is one thread's maximum plus the others' values at a later moment, so it may be
//! off either way: 1 % in a PyTorch job, whose backward passes have a thread of their own. The
//! peaks of counts, and those by pool, may miss what lies between two folds.

use vramp_core::Bytes;
use vramp_model::{Stat, StatByPool};

use crate::sync::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// Largest request of PyTorch's small pool.
const SMALL_MAX: Bytes = Bytes::mib(1);

/// Classes of requests: small, large, all.
pub(crate) const CLASSES: usize = 3;
const ALL: usize = 2;
/// Kinds of counts: blocks, their bytes, the bytes requested.
pub(crate) const KINDS: usize = 3;

type Grid<T> = [[T; KINDS]; CLASSES];

/// Kinds whose peak over all requests is updated at every step: bytes, and bytes requested.
const PEAK_KINDS: [usize; 2] = [1, 2];

/// Counts of one thread since its last fold.
#[derive(Default)]
pub(crate) struct Tally {
    placed: [[AtomicU64; KINDS]; ALL],
    freed: [[AtomicU64; KINDS]; ALL],
    now: [AtomicI64; PEAK_KINDS.len()],
    high: [AtomicI64; PEAK_KINDS.len()],
    misses: AtomicU64,
}

fn class_of(requested: Bytes) -> usize {
    usize::from(requested > SMALL_MAX)
}

impl Tally {
    #[inline]
    pub(crate) fn placed(&self, len: Bytes, requested: Bytes, hit: bool) {
        let amounts = [1, len.count(), requested.count()];
        let placed = &self.placed[class_of(requested)];
        for (counter, amount) in placed.iter().zip(amounts) {
            add(counter, amount);
        }
        for (index, kind) in PEAK_KINDS.into_iter().enumerate() {
            let now = self.now[index].load(Relaxed) + amounts[kind] as i64;
            self.now[index].store(now, Relaxed);
            if now > self.high[index].load(Relaxed) {
                self.high[index].store(now, Relaxed);
            }
        }
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
        for (index, kind) in PEAK_KINDS.into_iter().enumerate() {
            let now = &self.now[index];
            now.store(now.load(Relaxed) - amounts[kind] as i64, Relaxed);
        }
    }

    /// Returns the change of live bytes, and of those requested, since the last fold.
    fn now(&self) -> [i64; PEAK_KINDS.len()] {
        [0, 1].map(|index| self.now[index].load(Relaxed))
    }
}

#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed) + amount, Relaxed);
}

/// Counts of an allocator: the sums that its threads folded in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Base {
    now: Grid<i64>,
    peak: Grid<i64>,
    placed: Grid<u64>,
    freed: Grid<u64>,
    misses: u64,
}

/// Returns the change of live bytes that the tallies have not folded in yet.
fn unfolded<'a>(tallies: impl Iterator<Item = &'a Tally>) -> [i64; PEAK_KINDS.len()] {
    tallies.fold([0; PEAK_KINDS.len()], |sum, tally| {
        let now = tally.now();
        [0, 1].map(|index| sum[index] + now[index])
    })
}

impl Base {
    /// Adds a tally and clears it. Only the owning thread may call this, or another thread after
    /// the owner ended. Counts of `all` that are not folded yet enter the peaks: one thread may
    /// free what another allocated.
    pub(crate) fn fold<'a>(&mut self, tally: &Tally, all: impl Iterator<Item = &'a Tally>) {
        let others = unfolded(all.filter(|other| !std::ptr::eq(*other, tally)));
        self.note_peaks(tally, others);
        self.add(tally);
        let totals = tally.placed.iter().chain(&tally.freed).flatten();
        totals.for_each(|total| total.store(0, Relaxed));
        tally.now.iter().chain(&tally.high).for_each(|sum| sum.store(0, Relaxed));
        tally.misses.store(0, Relaxed);
        self.note_now();
    }

    /// Returns the counts including those that threads have not folded yet.
    pub(crate) fn with<'a>(mut self, all: impl Iterator<Item = &'a Tally> + Clone) -> Base {
        for tally in all.clone() {
            let others = all.clone().filter(|other| !std::ptr::eq(*other, tally));
            self.note_peaks(tally, unfolded(others));
        }
        all.for_each(|tally| self.add(tally));
        self.note_now();
        self
    }

    /// Updates the peaks with the maximum of `tally`, while other threads had `others` unfolded.
    fn note_peaks(&mut self, tally: &Tally, others: [i64; PEAK_KINDS.len()]) {
        for (index, kind) in PEAK_KINDS.into_iter().enumerate() {
            let before = self.now[ALL][kind] + others[index];
            let peak = &mut self.peak[ALL][kind];
            // A thread that only freed counts as it is now: before its frees others had less.
            let high = tally.high[index].load(Relaxed);
            let most = if high > 0 { high } else { tally.now[index].load(Relaxed) };
            *peak = (*peak).max(before + most);
        }
    }

    fn add(&mut self, tally: &Tally) {
        for class in 0..ALL {
            for kind in 0..KINDS {
                let placed = tally.placed[class][kind].load(Relaxed);
                let freed = tally.freed[class][kind].load(Relaxed);
                for class in [class, ALL] {
                    self.placed[class][kind] += placed;
                    self.freed[class][kind] += freed;
                    self.now[class][kind] += placed as i64 - freed as i64;
                }
            }
        }
        self.misses += tally.misses.load(Relaxed);
    }

    /// Updates every peak with the current values.
    fn note_now(&mut self) {
        for (peaks, nows) in self.peak.iter_mut().zip(&self.now) {
            for (peak, now) in peaks.iter_mut().zip(nows) {
                *peak = (*peak).max(*now);
            }
        }
    }

    /// Resets the peaks to the current values. While several threads allocate, a peak may include
    /// values from before, until their next fold.
    pub(crate) fn reset_peaks<'a>(&mut self, tallies: impl Iterator<Item = &'a Tally>) {
        self.peak = self.now;
        for tally in tallies {
            for (high, now) in tally.high.iter().zip(tally.now()) {
                high.store(now.max(0), Relaxed);
            }
        }
    }

    pub(crate) fn live(&self) -> Bytes {
        Bytes::new(self.now[ALL][2].max(0) as u64)
    }

    pub(crate) fn live_peak(&self) -> Bytes {
        Bytes::new(self.peak[ALL][2].max(0) as u64)
    }

    pub(crate) fn placed(&self) -> u64 {
        self.placed[ALL][0]
    }

    pub(crate) fn freed(&self) -> u64 {
        self.freed[ALL][0]
    }

    /// Returns the blocks that needed a plan, or that the driver's pool placed.
    pub(crate) fn misses(&self) -> u64 {
        self.misses
    }

    /// Returns blocks (0), their bytes (1) or the bytes requested (2).
    pub(crate) fn stats(&self, kind: usize) -> StatByPool {
        let stat = |class: usize| Stat {
            current: self.now[class][kind].max(0) as u64,
            peak: self.peak[class][kind].max(0) as u64,
            allocated: self.placed[class][kind],
            freed: self.freed[class][kind],
        };
        StatByPool { all: stat(ALL), small_pool: stat(0), large_pool: stat(1) }
    }
}
