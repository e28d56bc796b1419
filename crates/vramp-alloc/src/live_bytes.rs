//! The bytes in live blocks over all threads, with their peaks, so that a hit writes no shared cache
//! line.
//!
//! 1. A thread adds its requests to its own [`Unpublished`] change. Once that exceeds a batch, or the
//!    thread takes the allocator's lock, the thread publishes it: it adds the change to [`LiveBytes`] and
//!    raises the peaks.
//! 2. A batch is 1/256 of the peak divided by the number of threads. So what all threads have not
//!    published is below 1/256 of the peak, and each peak is exact within 1/128 of it: one thread may
//!    publish a maximum that it reached before others published. The peaks of one thread are exact.
//! 3. A request costs the same with any number of threads. Each publishes at most once in a batch.

use std::sync::Arc;

use vramp_core::Bytes;

use crate::sync::{AtomicI64, Ordering::Relaxed};

/// Bytes of blocks, and bytes requested.
pub(crate) const AMOUNTS: usize = 2;

/// Index of the bytes requested.
const REQUESTED: usize = 1;

/// Change of the bytes of live blocks, and of those requested.
pub(crate) type Change = [i64; AMOUNTS];

/// Share of the peak that all threads together may not have published.
const UNPUBLISHED_SHARE: i64 = 256;

/// What all threads have published.
#[derive(Default)]
pub(crate) struct LiveBytes {
    now: [AtomicI64; AMOUNTS],
    peak: [AtomicI64; AMOUNTS],
    /// Peak of the bytes requested since the last restart.
    stretch: AtomicI64,
    threads: AtomicI64,
}

/// What one thread has not published. Only this thread writes it, but for the batch; any thread may
/// read it.
pub(crate) struct Unpublished {
    now: [AtomicI64; AMOUNTS],
    high: [AtomicI64; AMOUNTS],
    batch: AtomicI64,
    live: Arc<LiveBytes>,
}

impl LiveBytes {
    fn now(&self) -> Change {
        [0, 1].map(|index| self.now[index].load(Relaxed))
    }

    /// Returns the largest change that a thread does not publish.
    fn batch(&self) -> i64 {
        let threads = self.threads.load(Relaxed).max(1);
        self.peak[REQUESTED].load(Relaxed) / (UNPUBLISHED_SHARE * threads)
    }

    /// Adds a change. `high` is the highest value that the thread reached meanwhile, from the value
    /// before the change.
    pub(crate) fn publish(&self, change: Change, high: Change) {
        for index in [0, 1] {
            let before = self.now[index].fetch_add(change[index], Relaxed);
            self.rise(index, before + high[index]);
        }
    }

    fn rise(&self, index: usize, reached: i64) {
        raise(&self.peak[index], reached);
        if index == REQUESTED {
            raise(&self.stretch, reached);
        }
    }

    /// Returns the peaks, with what threads have not published.
    pub(crate) fn peaks<'a>(&self, all: impl Iterator<Item = &'a Unpublished>) -> Change {
        all.for_each(|thread| thread.raise_peaks());
        [0, 1].map(|index| self.peak[index].load(Relaxed))
    }

    /// Resets the peaks to the current values.
    pub(crate) fn reset_peaks<'a>(&self, all: impl Iterator<Item = &'a Unpublished> + Clone) {
        for (peak, now) in self.peak.iter().zip(self.now()) {
            peak.store(now, Relaxed);
        }
        all.clone().for_each(Unpublished::restart);
        self.update_batches(all);
    }

    /// Begins a stretch. Returns the peak of requested bytes in the stretch before, and their present
    /// sum.
    pub(crate) fn restart_stretch<'a>(
        &self,
        all: impl Iterator<Item = &'a Unpublished> + Clone,
    ) -> (Bytes, Bytes) {
        all.clone().for_each(|thread| thread.raise_peaks());
        let unpublished: i64 = all.clone().map(|thread| thread.now()[REQUESTED]).sum();
        let now = self.now()[REQUESTED] + unpublished;
        let peak = self.stretch.swap(now, Relaxed).max(now);
        all.for_each(Unpublished::restart);
        [peak, now].map(|bytes| Bytes::new(bytes.max(0) as u64)).into()
    }

    /// Stores the number of threads and their batches, after one was added or removed: O(threads).
    pub(crate) fn update_batches<'a>(&self, all: impl Iterator<Item = &'a Unpublished> + Clone) {
        self.threads.store(all.clone().count() as i64, Relaxed);
        let batch = self.batch();
        all.for_each(|thread| thread.batch.store(batch, Relaxed));
    }
}

impl Unpublished {
    pub(crate) fn new(live: &Arc<LiveBytes>) -> Unpublished {
        let [now, high] = [(); 2].map(|()| Default::default());
        Unpublished { now, high, batch: AtomicI64::new(0), live: Arc::clone(live) }
    }

    /// Adds the bytes of a block, and those requested, of a malloc or (negative) of a free.
    #[inline]
    pub(crate) fn add(&self, change: Change) {
        let mut largest = 0;
        for (index, change) in change.into_iter().enumerate() {
            let now = self.now[index].load(Relaxed) + change;
            self.now[index].store(now, Relaxed);
            if now > self.high[index].load(Relaxed) {
                self.high[index].store(now, Relaxed);
            }
            largest = largest.max(now.abs());
        }
        if largest > self.batch.load(Relaxed) {
            self.publish();
        }
    }

    /// Publishes the change.
    #[cold]
    pub(crate) fn publish(&self) {
        self.live.publish(self.now(), self.high());
        for index in 0..AMOUNTS {
            self.now[index].store(0, Relaxed);
            self.high[index].store(0, Relaxed);
        }
        self.batch.store(self.live.batch(), Relaxed);
    }

    fn now(&self) -> Change {
        [0, 1].map(|index| self.now[index].load(Relaxed))
    }

    fn high(&self) -> Change {
        [0, 1].map(|index| self.high[index].load(Relaxed))
    }

    fn raise_peaks(&self) {
        let now = self.live.now();
        for (index, high) in self.high().into_iter().enumerate() {
            self.live.rise(index, now[index] + high);
        }
    }

    /// Lets the maximum begin at the current value.
    fn restart(&self) {
        for (high, now) in self.high.iter().zip(self.now()) {
            high.store(now.max(0), Relaxed);
        }
    }
}

/// Raises a peak. It is read first, because most values are below it.
fn raise(peak: &AtomicI64, reached: i64) {
    if reached > peak.load(Relaxed) {
        peak.fetch_max(reached, Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const KIB: i64 = 1024;

    struct Threads {
        live: Arc<LiveBytes>,
        all: Vec<Unpublished>,
    }

    impl Threads {
        fn new(count: usize) -> Threads {
            let live = Arc::new(LiveBytes::default());
            let all: Vec<_> = (0..count).map(|_| Unpublished::new(&live)).collect();
            live.update_batches(all.iter());
            Threads { live, all }
        }

        fn peak(&self) -> i64 {
            self.live.peaks(self.all.iter())[REQUESTED]
        }

        fn add(&self, thread: usize, bytes: i64) {
            self.all[thread].add([bytes; AMOUNTS]);
        }
    }

    #[test]
    fn the_peak_of_one_thread_is_exact() {
        let threads = Threads::new(1);
        threads.add(0, 1000 * KIB);
        threads.add(0, KIB);
        threads.add(0, -KIB);
        assert_eq!(threads.peak(), 1001 * KIB);
        threads.add(0, -1000 * KIB);
        threads.live.reset_peaks(threads.all.iter());
        threads.add(0, 3);
        threads.add(0, -2);
        assert_eq!(threads.peak(), 3);
    }

    /// Blocks go from a thread to the next, which frees them: what one thread has ever made says
    /// nothing about what lives.
    #[test]
    fn the_peak_of_threads_that_free_each_others_blocks_is_within_a_hundredth() {
        for count in [2, 3, 8, 100] {
            let threads = Threads::new(count);
            let (mut random, mut live, mut peak) = (7_u64, 0, 0);
            for step in 0..20_000_usize {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let bytes = (random >> 33) as i64 % (700 * KIB);
                // In each epoch a third of the threads makes what another third frees.
                let thread = (step % count + step / 1000) % count;
                threads.add(thread, bytes);
                live += bytes;
                peak = peak.max(live);
                if live > 300 * 1000 * KIB {
                    threads.add((thread + 1 + step / 2000) % count, -live / 2);
                    live -= live / 2;
                }
            }
            let error = (threads.peak() - peak).abs();
            assert!(error <= peak / 128, "{count} threads: {error} of {peak}");
        }
    }

    #[test]
    fn threads_that_stay_within_a_batch_publish_nothing() {
        let threads = Threads::new(8);
        threads.add(0, 1 << 30);
        threads.live.update_batches(threads.all.iter());
        let before = threads.live.now();
        for thread in 0..8 {
            for _ in 0..1000 {
                threads.add(thread, 64 * KIB);
                threads.add(thread, -64 * KIB);
            }
        }
        assert_eq!(threads.live.now(), before);
    }

    #[test]
    fn a_stretch_begins_at_what_is_live() {
        let threads = Threads::new(2);
        threads.add(0, 5 * KIB);
        assert_eq!(threads.live.restart_stretch(threads.all.iter()).1, Bytes::kib(5));
        threads.add(1, 2 * KIB);
        threads.add(0, -4 * KIB);
        let (peak, now) = threads.live.restart_stretch(threads.all.iter());
        assert_eq!((peak, now), (Bytes::kib(7), Bytes::kib(3)));
        assert_eq!(threads.live.restart_stretch(threads.all.iter()).0, Bytes::kib(3));
    }
}
