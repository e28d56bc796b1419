//! Counts that a thread keeps for itself, so that a hit writes nothing that others read.
//!
//! Only the owner writes; anybody may read. What a thread did goes into the allocator's base when it
//! next takes the allocator's lock, so the sums are exact at any time and the peak is exact as long
//! as one thread allocates; with several it may miss what lies between two such moments.

use vramp_core::Bytes;

use crate::sync::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// One thread's counts since its last fold.
#[derive(Default)]
pub(crate) struct Tally {
    live: AtomicI64,
    high: AtomicI64,
    placed: AtomicU64,
    freed: AtomicU64,
    hits: AtomicU64,
}

impl Tally {
    #[inline]
    pub(crate) fn placed(&self, requested: Bytes, hit: bool) {
        let live = self.live.load(Relaxed) + requested.count() as i64;
        self.live.store(live, Relaxed);
        if live > self.high.load(Relaxed) {
            self.high.store(live, Relaxed);
        }
        bump(&self.placed);
        if hit {
            bump(&self.hits);
        }
    }

    #[inline]
    pub(crate) fn freed(&self, requested: Bytes) {
        self.live.store(self.live.load(Relaxed) - requested.count() as i64, Relaxed);
        bump(&self.freed);
    }
}

#[inline]
fn bump(counter: &AtomicU64) {
    counter.store(counter.load(Relaxed) + 1, Relaxed);
}

/// The allocator's counts: what threads folded in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Base {
    pub live: i64,
    pub peak: i64,
    pub placed: u64,
    pub freed: u64,
    pub hits: u64,
}

impl Base {
    /// Takes a tally over. Only its owner may call this, or whoever comes after the owner's end.
    pub(crate) fn fold(&mut self, tally: &Tally) {
        self.peak = self.peak.max(self.live + tally.high.load(Relaxed));
        self.live += tally.live.load(Relaxed);
        self.placed += tally.placed.load(Relaxed);
        self.freed += tally.freed.load(Relaxed);
        self.hits += tally.hits.load(Relaxed);
        tally.live.store(0, Relaxed);
        tally.high.store(0, Relaxed);
        tally.placed.store(0, Relaxed);
        tally.freed.store(0, Relaxed);
        tally.hits.store(0, Relaxed);
    }

    /// The counts with what threads have not folded yet.
    pub(crate) fn with<'a>(mut self, tallies: impl Iterator<Item = &'a Tally>) -> Base {
        let before = self.live;
        for tally in tallies {
            self.peak = self.peak.max(before + tally.high.load(Relaxed));
            self.live += tally.live.load(Relaxed);
            self.placed += tally.placed.load(Relaxed);
            self.freed += tally.freed.load(Relaxed);
            self.hits += tally.hits.load(Relaxed);
        }
        self.peak = self.peak.max(self.live);
        self
    }
}
