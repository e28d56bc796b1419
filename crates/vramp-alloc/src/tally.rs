//! Counts of one thread, so that a hit writes no shared cache line.
//!
//! 1. A request without the allocator's lock is counted in its thread's [`Tally`]. Only the owning
//!    thread writes it; any thread may read it.
//! 2. A request with the lock is counted in the allocator's [`Base`], after the thread's own tally
//!    was folded in ([`Base::fold`]). So the sums are exact at any time.
//! 3. A tally that counted nothing since costs a few loads. Other threads' tallies are read only
//!    where a peak may have risen: a request that stays below the peak costs the same with any
//!    number of threads.
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

/// Change of live bytes, and of those requested.
pub(crate) type Change = [i64; PEAK_KINDS.len()];

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
    fn now(&self) -> Change {
        [0, 1].map(|index| self.now[index].load(Relaxed))
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
        for index in 0..PEAK_KINDS.len() {
            self.now[index].store(0, Relaxed);
            self.high[index].store(0, Relaxed);
        }
        self.misses.store(0, Relaxed);
    }
}

#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed) + amount, Relaxed);
}

/// Counts of an allocator: those of requests with the lock, and the sums that threads folded in.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Base {
    /// By class of requests: small, large, all.
    now: Grid<i64>,
    peak: Grid<i64>,
    /// Small and large.
    placed: [[u64; KINDS]; ALL],
    freed: [[u64; KINDS]; ALL],
    misses: u64,
    /// Peak of the bytes requested over all requests since the last restart, where a scope is open.
    stretch: Option<i64>,
}

/// Returns the change of live bytes that the tallies have not folded in yet.
pub(crate) fn unfolded<'a>(tallies: impl Iterator<Item = &'a Tally>) -> Change {
    tallies.fold([0; PEAK_KINDS.len()], |sum, tally| {
        let now = tally.now();
        [0, 1].map(|index| sum[index] + now[index])
    })
}

impl Base {
    /// Counts a block that was placed with the lock held. The thread's own tally was folded in
    /// before; `others` returns what the other threads' have not folded in.
    #[inline]
    pub(crate) fn placed(
        &mut self,
        len: Bytes,
        requested: Bytes,
        hit: bool,
        others: impl FnOnce() -> Change,
    ) {
        let class = class_of(requested);
        for (kind, amount) in [1, len.count(), requested.count()].into_iter().enumerate() {
            self.placed[class][kind] += amount;
            self.now[class][kind] += amount as i64;
            self.now[ALL][kind] += amount as i64;
        }
        self.misses += u64::from(!hit);
        self.note_now_of(class);
        self.note_peaks([0; PEAK_KINDS.len()], others);
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
    }

    /// Adds a tally and clears it. Only the owning thread may call this, or another thread after
    /// the owner ended. `others` returns what the other tallies have not folded in, which enters a
    /// peak that rises: one thread may free what another allocated.
    #[inline]
    pub(crate) fn fold(&mut self, tally: &Tally, others: impl FnOnce() -> Change) {
        if tally.is_dirty() {
            self.fold_dirty(tally, others);
        }
    }

    fn fold_dirty(&mut self, tally: &Tally, others: impl FnOnce() -> Change) {
        self.note_peaks(most(tally), others);
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
        for tally in all.clone() {
            let others = all.clone().filter(|other| !std::ptr::eq(*other, tally));
            self.note_peaks(most(tally), || unfolded(others));
        }
        all.for_each(|tally| self.add(tally));
        (0..ALL).for_each(|class| self.note_now_of(class));
        self.note_peaks([0; PEAK_KINDS.len()], || [0; PEAK_KINDS.len()]);
        self
    }

    /// Updates the peaks of bytes, where one thread reached `most` above the folded values and the
    /// other threads have `others` unfolded.
    #[inline]
    fn note_peaks(&mut self, most: Change, others: impl FnOnce() -> Change) {
        let reached = [0, 1].map(|index| self.now[ALL][PEAK_KINDS[index]] + most[index]);
        let rises = |index: usize| reached[index] > self.peak[ALL][PEAK_KINDS[index]];
        let rises_in_stretch = self.stretch.is_some_and(|peak| reached[1] > peak);
        if rises(0) || rises(1) || rises_in_stretch {
            let others = others();
            self.stretch = self.stretch.map(|peak| peak.max(reached[1] + others[1]));
            for (index, kind) in PEAK_KINDS.into_iter().enumerate() {
                let peak = &mut self.peak[ALL][kind];
                *peak = (*peak).max(reached[index] + others[index]);
            }
        }
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

    /// Begins a stretch. Returns the peak of requested bytes in the stretch before, if there was one,
    /// and their present sum.
    pub(crate) fn restart_stretch<'a>(
        &mut self,
        tallies: impl Iterator<Item = &'a Tally> + Clone,
    ) -> (Bytes, Bytes) {
        for tally in tallies.clone() {
            let others = tallies.clone().filter(|other| !std::ptr::eq(*other, tally));
            self.note_peaks(most(tally), || unfolded(others));
        }
        let now = self.now[ALL][2] + unfolded(tallies.clone())[1];
        let peak = self.stretch.map_or(now, |peak| peak.max(now));
        self.stretch = Some(now);
        for tally in tallies {
            for (high, now) in tally.high.iter().zip(tally.now()) {
                high.store(now.max(0), Relaxed);
            }
        }
        [peak, now].map(|bytes| Bytes::new(bytes.max(0) as u64)).into()
    }

    /// Ends the last stretch: no scope is open.
    pub(crate) fn end_stretch(&mut self) {
        self.stretch = None;
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

/// Returns the most that a thread reached since its last fold. One that only freed counts as it is
/// now: before its frees others had less.
fn most(tally: &Tally) -> Change {
    [0, 1].map(|index| {
        let high = tally.high[index].load(Relaxed);
        if high > 0 { high } else { tally.now[index].load(Relaxed) }
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    const SIZE: Bytes = Bytes::mib(4);

    /// Runs `work` with a function that sums up `tallies`. Returns how many tallies it read.
    fn tallies_read(tallies: &[Tally], work: impl FnOnce(&dyn Fn() -> Change)) -> usize {
        let read = Cell::new(0);
        work(&|| {
            read.set(read.get() + tallies.len());
            unfolded(tallies.iter())
        });
        read.get()
    }

    #[test]
    fn a_request_below_the_peak_reads_no_other_threads_tally() {
        for threads in [1, 10, 1000] {
            let others: Vec<Tally> = (0..threads).map(|_| Tally::default()).collect();
            let (mut base, own) = (Base::default(), Tally::default());
            let rising = tallies_read(&others, |sum| base.placed(SIZE, SIZE, false, sum));
            assert_eq!(rising, threads, "a peak includes what others have not folded in");
            let steady = tallies_read(&others, |sum| {
                for _ in 0..100 {
                    base.fold(&own, sum);
                    base.freed(SIZE, SIZE);
                    own.placed(Bytes::kib(4), Bytes::kib(4), true);
                    own.freed(Bytes::kib(4), Bytes::kib(4));
                    base.fold(&own, sum);
                    base.placed(SIZE, SIZE, true, sum);
                }
            });
            assert_eq!(steady, 0, "{threads} threads");
        }
    }

    #[test]
    fn a_clean_tally_is_not_folded() {
        let (mut base, own) = (Base::default(), Tally::default());
        assert!(!own.is_dirty());
        // A fold of nothing keeps the maximum since the last one, as there is none.
        base.fold(&own, || panic!("there is nothing to fold"));
        for act in [Tally::placed_small as fn(&Tally), Tally::freed_large] {
            act(&own);
            assert!(own.is_dirty());
            base.fold(&own, Change::default);
            assert!(!own.is_dirty());
        }
    }

    #[test]
    fn the_peak_of_one_thread_is_exact_whichever_requests_take_the_lock() {
        let (mut base, own) = (Base::default(), Tally::default());
        let none = Change::default;
        // 64 KiB without the lock, 4 MiB with it, both freed, and 1 MiB and 1 B at the end.
        own.placed(Bytes::kib(64), Bytes::kib(64), true);
        base.fold(&own, none);
        base.placed(SIZE, SIZE, true, none);
        own.placed(Bytes::kib(8), Bytes::kib(8), true);
        own.freed(Bytes::kib(8), Bytes::kib(8));
        base.fold(&own, none);
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

    #[test]
    fn a_peak_is_less_by_what_another_thread_freed() {
        let (mut base, own, other) = (Base::default(), Tally::default(), Tally::default());
        for _ in 0..10 {
            own.placed(Bytes::kib(64), Bytes::kib(64), true);
            other.freed(Bytes::kib(64), Bytes::kib(64));
        }
        base.fold(&own, || unfolded([&other].into_iter()));
        assert_eq!(base.live_peak(), Bytes::ZERO, "at most 64 KiB at once, which no thread saw");
        base.placed(SIZE, SIZE, true, || unfolded([&other].into_iter()));
        let all = base.with([&own, &other].into_iter());
        assert_eq!((all.live(), all.live_peak()), (SIZE, SIZE));
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
