//! How far the pool may grow for a request, and how large new chunks are.

use crate::Bytes;
use crate::pool::config::Mixed;
use crate::pool::request::{Attempt, Growth};
use crate::pool::view::View;

/// Up to the largest chunk there is, an arena is made of about so many.
const CHUNKS_PER_ARENA: u64 = 8;

/// The slack while threads contend for the pool, in slacks.
const CONTENDED_SLACK: u64 = 3;

/// What the pool may grow by beyond that for each thread that contends. Threads whose heaps are as large
/// as they need at times take the pool's lock no more: 16 threads on an H200 machine make 62 million pairs
/// of malloc and free a second with 8 MiB for each and with any more, and one million with none.
const CONTENDED_ROOM: Bytes = Bytes::mib(16);

impl View<'_> {
    /// How much the pool may still grow: up to its limit, or not at all once the device was full.
    pub(in crate::pool) fn growth_allowed(self, attempt: &Attempt) -> Bytes {
        match attempt.growth {
            Growth::Never => Bytes::ZERO,
            Growth::WithSlack | Growth::Needed => self.below_limit().round_down(self.config.page),
        }
    }

    /// How much the pool may grow for `len` more bytes without exceeding its slack.
    pub(in crate::pool) fn growth_budget(
        self,
        len: Bytes,
        attempt: &Attempt,
        mixed: &Mixed,
    ) -> Bytes {
        let peak = self.peak_with(len);
        let mut target = match attempt.growth {
            Growth::WithSlack if attempt.contenders > 0 => {
                let room = CONTENDED_ROOM * attempt.contenders as u64;
                with_slack(peak, CONTENDED_SLACK * mixed.slack_per_mille).saturating_add(room)
            }
            Growth::WithSlack => with_slack(peak, mixed.slack_per_mille),
            Growth::Needed | Growth::Never => with_slack(peak, 0),
        };
        if attempt.robbed && attempt.growth == Growth::WithSlack {
            // The block that each stream freed last, beside what is in use. Beyond that they find other
            // streams' memory because sizes differ, whatever the pool holds.
            let separate = peak.saturating_add(self.streams.last_freed());
            target = target.max(with_slack(separate, mixed.slack_per_mille));
        }
        let budget = target.saturating_sub(self.chunks.bytes());
        budget.min(self.growth_allowed(attempt)).round_down(self.config.page)
    }

    /// The high-water mark of memory in use once a request of `len` bytes is served. Freed blocks that wait
    /// for work of other streams are in use: nothing can be made of their memory.
    pub(in crate::pool) fn peak_with(self, len: Bytes) -> Bytes {
        self.used_peak.max((self.used + self.waiting_bytes).saturating_add(len))
    }

    /// The length of new chunks of an arena of `len` bytes: large beside it, because bringing a
    /// chunk back costs the same at any size.
    pub(in crate::pool) fn arena_chunk(self, len: Bytes, mixed: &Mixed) -> Bytes {
        power_of_two_below(len.count() / CHUNKS_PER_ARENA).clamp(self.config.page, mixed.chunk_max)
    }
}

fn with_slack(peak: Bytes, per_mille: u64) -> Bytes {
    Bytes::new((u128::from(peak.count()) * u128::from(1000 + per_mille) / 1000) as u64)
}

fn power_of_two_below(amount: u64) -> Bytes {
    Bytes::new(1u64 << amount.max(1).ilog2())
}

/// Memory stranded in partly used chunks, in thousandths of the high-water mark, from which on new
/// chunks are half as long, a quarter as long, and so on.
const STRANDED: &[u64] = &[30, 60, 90, 120];

/// The same where several streams share the pool.
const STRANDED_SHARED: &[u64] = &[40, 80];

impl View<'_> {
    /// The longest new chunk for a request of `len` bytes, while `stranded` bytes lie in partly used
    /// chunks. Small pools and small requests get small chunks: what a partly used chunk strands stays
    /// small beside what the pool holds. Where more is stranded all the same, chunks get smaller.
    pub(in crate::pool) fn longest_chunk(
        self,
        len: Bytes,
        stranded: Bytes,
        mixed: &Mixed,
    ) -> Bytes {
        if let Some(long) = self.long_chunk(len, mixed) {
            return long;
        }
        let peak = self.peak_with(len);
        let shared = self.shares_idle();
        let thresholds = if shared { STRANDED_SHARED } else { STRANDED };
        let per_mille = stranded.count().saturating_mul(1000) / peak.count().max(1);
        let halved = thresholds.iter().filter(|&&from| per_mille >= from).count() as u32;
        let page = self.config.page;
        let half = Bytes::new(mixed.chunk_min.count() / 2).max(page);
        let min = if shared { half } else { mixed.chunk_min };
        let min = Bytes::new(min.count() >> halved).max(page);
        let by_request = power_of_two_below(len.count() / mixed.chunks_per_request.max(1));
        let by_pool = power_of_two_below(peak.count() / mixed.chunks_per_pool.max(1));
        let by_pool = Bytes::new(by_pool.min(mixed.chunk_usual).count() >> halved).max(min);
        let by_pool = by_pool.min(self.longest_below_limit(len, mixed));
        by_request.max(by_pool).min(mixed.chunk_max)
    }
}

/// Parts of the limit in hundredths, from which on new chunks are at most of the least length, and at most half
/// of it.
const FILLED: [u64; 2] = [25, 50];

impl View<'_> {
    /// The longest chunk that may be made for a request of `len` bytes that is not huge, or stay whole where it
    /// enters. Near the limit a request has to find what others leave of chunks, so these get short, and
    /// early: memory that is there when the limit is met is made of the chunks from before. Not where other
    /// pools share the limit: their memory comes and goes by chunks, and each is a driver call.
    pub(in crate::pool) fn longest_below_limit(self, len: Bytes, mixed: &Mixed) -> Bytes {
        let alone = self.config.limit.filter(|_| self.elsewhere.is_none());
        // Below that chunks are of the least length anyway.
        let Some(limit) = alone.filter(|&limit| limit >= mixed.chunk_min * mixed.chunks_per_pool)
        else {
            return mixed.chunk_max;
        };
        let limit = limit.count().max(1);
        let filled = u128::from(self.peak_with(len).count()) * 100 / u128::from(limit);
        match FILLED.iter().filter(|&&from| filled >= u128::from(from)).count() {
            0 => mixed.chunk_max,
            1 => mixed.chunk_min,
            _ => Bytes::new(mixed.chunk_min.count() / 2).max(self.config.page),
        }
    }
}

/// The lengths of the new chunks that make up `bytes`, in address order.
pub(in crate::pool) fn cut(bytes: Bytes, longest: Bytes) -> impl ExactSizeIterator<Item = Bytes> {
    let count = bytes.count().div_ceil(longest.count());
    (0..count as usize).map(move |n| longest.min(bytes - longest * n as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use crate::pool::config::{Policy, PoolConfig};
    use crate::pool::request::Request;
    use crate::pool::streams::Streams;

    #[test]
    fn new_memory_is_cut_into_the_longest_chunks_and_a_rest() {
        let mib = Bytes::mib;
        for (longest, bytes, expected) in
            [(8, 20, vec![8, 8, 4]), (128, 64, vec![64]), (8, 16, vec![8, 8]), (8, 0, vec![])]
        {
            let expected: Vec<Bytes> = expected.into_iter().map(mib).collect();
            let chunks: Vec<Bytes> = cut(mib(bytes), mib(longest)).collect();
            assert_eq!(chunks, expected, "{bytes} MiB by {longest}");
        }
    }

    #[test]
    fn chunks_grow_with_the_request_and_the_pool_and_shrink_with_what_is_stranded() {
        let mib = Bytes::mib;
        let config = PoolConfig {
            page: mib(2),
            span: Bytes::tib(1),
            first_span: Bytes::tib(1),
            limit: None,
            policy: Policy::Mixed(Mixed::default()),
        };
        let mut pool = Pool::new(config).expect("it is valid");
        pool.add_stream();
        let mixed = Mixed::default();
        // A request in MiB, stranded MiB, and the longest chunk.
        let longest = |pool: &Pool, len: u64, stranded: u64| {
            pool.view().longest_chunk(mib(len), mib(stranded), &mixed)
        };
        for (len, stranded, expected) in [
            // A small pool: the smallest chunk.
            (20, 0, 8),
            // A 64th of the pool.
            (1024, 0, 16),
            // At most the usual chunk, except for huge requests, which get a 64th of them.
            (2048, 0, 32),
            (4096, 0, 64),
            (65536, 0, 128),
        ] {
            assert_eq!(longest(&pool, len, stranded), mib(expected), "{len}, {stranded} stranded");
        }
        // A request that is small beside the pool, while so much of 1,024 MiB is stranded.
        let mixed = Mixed { chunks_per_request: 1 << 20, ..mixed };
        let longest = |pool: &Pool, stranded: u64| {
            pool.view().longest_chunk(mib(1024), mib(stranded), &mixed)
        };
        let lengths = |pool: &Pool| [20, 21, 30, 31, 41, 62].map(|n| longest(pool, n));
        assert_eq!(lengths(&pool), [16, 16, 16, 8, 8, 4].map(mib));
        // A second stream that the pool knows changes nothing, one that uses it does.
        let request = |stream| Attempt::new(Request { size: mib(2), stream });
        let [first, second] = [crate::StreamId::new(0), pool.add_stream()];
        drop(pool.place(&mut request(first)));
        assert_eq!(lengths(&pool), [16, 16, 16, 8, 8, 4].map(mib));
        drop(pool.place(&mut request(second)));
        assert_eq!(lengths(&pool), [16, 16, 16, 16, 8, 8].map(mib));
        // The usual chunk of a large pool is halved, too.
        let large = [0, 5, 9]
            .map(|part| pool.view().longest_chunk(mib(65_536), mib(65_536 * part / 100), &mixed));
        assert_eq!(large, [32, 16, 8].map(mib));
    }

    #[test]
    fn near_the_limit_chunks_are_short_where_one_pool_has_it() {
        let (mib, page) = (Bytes::mib, Bytes::mib(2));
        let mixed = Mixed { chunks_per_request: 1 << 20, ..Mixed::default() };
        // Limit, memory of other pools below it and a request in MiB; its longest chunk.
        for (limit, elsewhere, len, expected) in [
            (None, None, 8_192, 32),
            (Some(65_536), None, 8_192, 32),
            // A quarter is in use.
            (Some(32_768), None, 8_190, 32),
            (Some(32_768), None, 8_192, 8),
            // One half is.
            (Some(16_384), None, 8_192, 4),
            (Some(8_192), None, 8_192, 4),
            (Some(511), None, 400, 8),
            // Another pool may have a part of it.
            (Some(16_384), Some(Bytes::ZERO), 8_192, 32),
        ] {
            let config = PoolConfig {
                page,
                span: Bytes::tib(1),
                first_span: Bytes::tib(1),
                limit: None,
                policy: Policy::Mixed(mixed),
            };
            let mut pool = Pool::new(config).expect("it is valid");
            pool.set_limit(limit.map(mib), elsewhere);
            let longest = pool.view().longest_chunk(mib(len), Bytes::ZERO, &mixed);
            let row = (limit, elsewhere, len);
            assert_eq!(longest, mib(expected), "{row:?}");
        }
    }

    #[test]
    fn threads_that_contend_have_room_each() {
        let mixed = Mixed { slack_per_mille: 10, ..Mixed::default() };
        let (page, span) = (Bytes::mib(2), Bytes::tib(1));
        let policy = Policy::Mixed(mixed);
        let config = PoolConfig { page, span, first_span: span, limit: None, policy };
        let mut pool = Pool::new(config).expect("it is valid");
        let request = Request { size: Bytes::gib(1), stream: pool.add_stream() };
        let budget = |contenders| {
            let attempt = Attempt::new(request).contended_by(contenders);
            pool.view().growth_budget(request.size, &attempt, &mixed)
        };
        let expected = [10, 30 + 16, 30 + 16 * 16].map(|more| Bytes::mib(1024 + more));
        assert_eq!([0, 1, 16].map(budget), expected.map(|bytes| bytes.round_down(page)));
    }

    #[test]
    fn a_robbed_stream_has_room_for_what_each_freed_last_and_lately_while_the_card_has() {
        let mib = Bytes::mib;
        let mixed = Mixed { slack_per_mille: 0, ..Mixed::default() };
        let (page, span, policy) = (mib(2), Bytes::tib(1), Policy::Mixed(mixed));
        let config = PoolConfig { page, span, first_span: span, limit: None, policy };
        let mut pool = Pool::new(config).expect("it is valid");
        let request = Request { size: mib(100), stream: pool.add_stream() };
        let other = pool.add_stream();
        let mut streams = pool.view().streams.clone();
        streams.note_freed(request.stream, mib(40));
        let budget = |streams: &Streams, robbed, growth| {
            let mut attempt = Attempt::new(request);
            (attempt.robbed, attempt.growth) = (robbed, growth);
            let view = View { streams, ..pool.view() };
            view.growth_budget(request.size, &attempt, &mixed)
        };
        assert_eq!(budget(&streams, false, Growth::WithSlack), mib(100));
        assert_eq!(budget(&streams, true, Growth::WithSlack), mib(140));
        // The card was full: no more than the request needs.
        assert_eq!(budget(&streams, true, Growth::Needed), mib(100));
        // A stream's next free takes the place of its last one, and only the last thousands count.
        streams.note_freed(other, mib(60));
        for (frees, room) in [(1, 42), (1022, 42), (1024, 2)] {
            (0..frees).for_each(|_| streams.note_freed(other, mib(2)));
            assert_eq!(budget(&streams, true, Growth::WithSlack), mib(100 + room), "{frees} more");
        }
    }

    #[test]
    fn slack_is_a_part_of_the_peak() {
        assert_eq!(with_slack(Bytes::gib(1), 0), Bytes::gib(1));
        assert_eq!(with_slack(Bytes::new(1000), 12), Bytes::new(1012));
        assert_eq!(with_slack(Bytes::new(999), 12), Bytes::new(1010));
    }
}
