//! Counts that a thread keeps for itself, so that a hit writes nothing that others read.
//!
//! Only the owner writes; anybody may read. What a thread did goes into the allocator's base when it
//! next takes the allocator's lock, so the sums are exact at any time and the peaks are exact as long
//! as one thread allocates; with several they may miss what lies between two such moments.

use vramp_core::Bytes;

use crate::sync::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// Requests up to this size are PyTorch's small ones.
const SMALL_MOST: Bytes = Bytes::mib(1);

/// Small, large, all.
pub(crate) const CLASSES: usize = 3;
const ALL: usize = 2;
/// Blocks, their bytes, the bytes asked for.
pub(crate) const KINDS: usize = 3;

type Grid<T> = [[T; KINDS]; CLASSES];

/// One thread's counts since its last fold.
#[derive(Default)]
pub(crate) struct Tally {
    now: Grid<AtomicI64>,
    high: Grid<AtomicI64>,
    placed: Grid<AtomicU64>,
    freed: Grid<AtomicU64>,
    hits: AtomicU64,
}

fn class_of(requested: Bytes) -> usize {
    usize::from(requested > SMALL_MOST)
}

impl Tally {
    #[inline]
    pub(crate) fn placed(&self, len: Bytes, requested: Bytes, hit: bool) {
        let amounts = [1, len.count(), requested.count()];
        let class = class_of(requested);
        for (kind, amount) in amounts.into_iter().enumerate() {
            for class in [class, ALL] {
                let now = self.now[class][kind].load(Relaxed) + amount as i64;
                self.now[class][kind].store(now, Relaxed);
                if now > self.high[class][kind].load(Relaxed) {
                    self.high[class][kind].store(now, Relaxed);
                }
            }
            add(&self.placed[class][kind], amount);
        }
        add(&self.hits, u64::from(hit));
    }

    #[inline]
    pub(crate) fn freed(&self, len: Bytes, requested: Bytes) {
        let amounts = [1, len.count(), requested.count()];
        let class = class_of(requested);
        for (kind, amount) in amounts.into_iter().enumerate() {
            for class in [class, ALL] {
                let now = &self.now[class][kind];
                now.store(now.load(Relaxed) - amount as i64, Relaxed);
            }
            add(&self.freed[class][kind], amount);
        }
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
    hits: u64,
}

/// One quantity as PyTorch tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most since the peaks were last reset.
    pub peak: u64,
    /// All that was ever added.
    pub allocated: u64,
    /// All that was ever taken away.
    pub freed: u64,
}

/// One quantity for all requests, for those up to 1 MiB, and for larger ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatsByPool {
    /// All requests.
    pub all: Stat,
    /// Requests up to 1 MiB.
    pub small_pool: Stat,
    /// Requests above 1 MiB.
    pub large_pool: Stat,
}

impl Base {
    /// Takes a tally over. Only its owner may call this, or whoever comes after the owner's end.
    pub(crate) fn fold(&mut self, tally: &Tally) {
        self.note(tally);
        for class in 0..CLASSES {
            for kind in 0..KINDS {
                tally.now[class][kind].store(0, Relaxed);
                tally.high[class][kind].store(0, Relaxed);
                tally.placed[class][kind].store(0, Relaxed);
                tally.freed[class][kind].store(0, Relaxed);
            }
        }
        tally.hits.store(0, Relaxed);
    }

    /// The counts with what threads have not folded yet.
    pub(crate) fn with<'a>(mut self, tallies: impl Iterator<Item = &'a Tally>) -> Base {
        tallies.for_each(|tally| self.note(tally));
        self
    }

    fn note(&mut self, tally: &Tally) {
        for class in 0..CLASSES {
            for kind in 0..KINDS {
                let now = &mut self.now[class][kind];
                let peak = &mut self.peak[class][kind];
                *peak = (*peak).max(*now + tally.high[class][kind].load(Relaxed));
                *now += tally.now[class][kind].load(Relaxed);
                *peak = (*peak).max(*now);
                self.placed[class][kind] += tally.placed[class][kind].load(Relaxed);
                self.freed[class][kind] += tally.freed[class][kind].load(Relaxed);
            }
        }
        self.hits += tally.hits.load(Relaxed);
    }

    /// Lets the peaks begin anew at what is held now. With several threads at work a peak between
    /// this moment and their next fold may count from before.
    pub(crate) fn reset_peaks<'a>(&mut self, tallies: impl Iterator<Item = &'a Tally>) {
        self.peak = self.now;
        for tally in tallies {
            for class in 0..CLASSES {
                for kind in 0..KINDS {
                    let now = tally.now[class][kind].load(Relaxed);
                    tally.high[class][kind].store(now.max(0), Relaxed);
                }
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
        self.placed[0][0] + self.placed[1][0]
    }

    pub(crate) fn freed(&self) -> u64 {
        self.freed[0][0] + self.freed[1][0]
    }

    pub(crate) fn hits(&self) -> u64 {
        self.hits
    }

    /// Blocks (0), their bytes (1) or the bytes asked for (2).
    pub(crate) fn stats(&self, kind: usize) -> StatsByPool {
        let stat = |class: usize, placed: u64, freed: u64| Stat {
            current: self.now[class][kind].max(0) as u64,
            peak: self.peak[class][kind].max(0) as u64,
            allocated: placed,
            freed,
        };
        let [small, large] = [0, 1]
            .map(|class: usize| stat(class, self.placed[class][kind], self.freed[class][kind]));
        let all = stat(ALL, small.allocated + large.allocated, small.freed + large.freed);
        StatsByPool { all, small_pool: small, large_pool: large }
    }
}
