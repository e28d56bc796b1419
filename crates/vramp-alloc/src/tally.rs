//! Counts that a thread keeps for itself, so that a hit writes nothing that others read.
//!
//! Only the owner writes; anybody may read. What a thread did goes into the allocator's base when it
//! next takes the allocator's lock, so the sums are exact at any time. The peaks of bytes over all
//! requests are exact as long as one thread allocates. With several they take one thread's most together with
//! what the others hold at a later moment, and so may be off either way by what those held
//! differently: 1 % in a PyTorch job, whose backward passes have a thread of their own. The peaks of
//! counts and those by pool may always miss what lies between two such moments.

use vramp_core::Bytes;
use vramp_model::{Stat, StatByPool};

use crate::sync::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// Requests up to this size are PyTorch's small ones.
const SMALL_MOST: Bytes = Bytes::mib(1);

/// Small, large, all.
pub(crate) const CLASSES: usize = 3;
const ALL: usize = 2;
/// Blocks, their bytes, the bytes asked for.
pub(crate) const KINDS: usize = 3;

type Grid<T> = [[T; KINDS]; CLASSES];

/// Kinds whose peak over all requests is watched at every step: bytes, and bytes asked for.
const WATCHED: [usize; 2] = [1, 2];

/// One thread's counts since its last fold.
#[derive(Default)]
pub(crate) struct Tally {
    placed: [[AtomicU64; KINDS]; ALL],
    freed: [[AtomicU64; KINDS]; ALL],
    now: [AtomicI64; WATCHED.len()],
    high: [AtomicI64; WATCHED.len()],
    misses: AtomicU64,
}

fn class_of(requested: Bytes) -> usize {
    usize::from(requested > SMALL_MOST)
}

impl Tally {
    #[inline]
    pub(crate) fn placed(&self, len: Bytes, requested: Bytes, hit: bool) {
        let amounts = [1, len.count(), requested.count()];
        let placed = &self.placed[class_of(requested)];
        for (counter, amount) in placed.iter().zip(amounts) {
            add(counter, amount);
        }
        for (watched, kind) in WATCHED.into_iter().enumerate() {
            let now = self.now[watched].load(Relaxed) + amounts[kind] as i64;
            self.now[watched].store(now, Relaxed);
            if now > self.high[watched].load(Relaxed) {
                self.high[watched].store(now, Relaxed);
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
        for (watched, kind) in WATCHED.into_iter().enumerate() {
            let now = &self.now[watched];
            now.store(now.load(Relaxed) - amounts[kind] as i64, Relaxed);
        }
    }

    /// Bytes, and bytes asked for, that are held more than at the last fold.
    fn now(&self) -> [i64; WATCHED.len()] {
        [0, 1].map(|watched| self.now[watched].load(Relaxed))
    }
}

#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed) + amount, Relaxed);
}

/// The allocator's counts: what threads folded in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Base {
    now: Grid<i64>,
    peak: Grid<i64>,
    placed: Grid<u64>,
    freed: Grid<u64>,
    misses: u64,
}

/// What threads hold more, or less, than the base knows.
fn unfolded<'a>(tallies: impl Iterator<Item = &'a Tally>) -> [i64; WATCHED.len()] {
    tallies.fold([0; WATCHED.len()], |sum, tally| {
        let now = tally.now();
        [0, 1].map(|watched| sum[watched] + now[watched])
    })
}

impl Base {
    /// Takes a tally over. Only its owner may call this, or whoever comes after the owner's end.
    /// What `all` have not folded counts for the peaks: one thread may free what another made.
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

    /// The counts with what threads have not folded yet.
    pub(crate) fn with<'a>(mut self, all: impl Iterator<Item = &'a Tally> + Clone) -> Base {
        for tally in all.clone() {
            let others = all.clone().filter(|other| !std::ptr::eq(*other, tally));
            self.note_peaks(tally, unfolded(others));
        }
        all.for_each(|tally| self.add(tally));
        self.note_now();
        self
    }

    /// The most that was held while `tally` counted and others had not folded `others`.
    fn note_peaks(&mut self, tally: &Tally, others: [i64; WATCHED.len()]) {
        for (watched, kind) in WATCHED.into_iter().enumerate() {
            let before = self.now[ALL][kind] + others[watched];
            let peak = &mut self.peak[ALL][kind];
            // A thread that only gave back counts as it is: before it did, others held less.
            let high = tally.high[watched].load(Relaxed);
            let most = if high > 0 { high } else { tally.now[watched].load(Relaxed) };
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

    /// What is held at this moment counts for every peak.
    fn note_now(&mut self) {
        for (peaks, nows) in self.peak.iter_mut().zip(&self.now) {
            for (peak, now) in peaks.iter_mut().zip(nows) {
                *peak = (*peak).max(*now);
            }
        }
    }

    /// Lets the peaks begin anew at what is held now. With several threads at work a peak between
    /// this moment and their next fold may count from before.
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

    /// Blocks that needed a plan, or that the driver's pool placed.
    pub(crate) fn misses(&self) -> u64 {
        self.misses
    }

    /// Blocks (0), their bytes (1) or the bytes asked for (2).
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
