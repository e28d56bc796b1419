//! How far the pool may grow for a request, and how large new chunks are.

use crate::Bytes;
use crate::pool::config::Mixed;
use crate::pool::request::{Attempt, Growth};
use crate::pool::view::View;

/// Up to the largest chunk there is, an arena is made of about so many.
const CHUNKS_PER_ARENA: u64 = 8;

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
        let peak = self.used_peak.max(self.used.saturating_add(len));
        let target = match attempt.growth {
            Growth::WithSlack if attempt.prefer_growth => Bytes::MAX,
            Growth::WithSlack => with_slack(peak, mixed.slack_per_mille),
            Growth::Needed | Growth::Never => with_slack(peak, 0),
        };
        let budget = target.saturating_sub(self.chunks.bytes());
        budget.min(self.growth_allowed(attempt)).round_down(self.config.page)
    }

    /// The high-water mark of memory in use once a request of `len` bytes is served.
    pub(in crate::pool) fn peak_with(self, len: Bytes) -> Bytes {
        self.used_peak.max(self.used + len)
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

/// The lengths of the new chunks that make up `bytes` for a request of `len`, in a pool whose
/// high-water mark is `peak`. Small pools and small requests get small chunks: what a partly used
/// chunk strands stays small beside what the pool holds.
pub(in crate::pool) fn new_chunks(
    bytes: Bytes,
    len: Bytes,
    peak: Bytes,
    mixed: &Mixed,
) -> Vec<Bytes> {
    let by_request = power_of_two_below(len.count() / mixed.chunks_per_request.max(1));
    let by_pool = power_of_two_below(peak.count() / mixed.chunks_per_pool.max(1))
        .clamp(mixed.chunk_min, mixed.chunk_usual);
    let largest = by_request.max(by_pool).min(mixed.chunk_max);
    let mut chunks = Vec::new();
    let mut rest = bytes;
    while !rest.is_zero() {
        let chunk = rest.min(largest);
        chunks.push(chunk);
        rest -= chunk;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_chunks_grow_with_the_request_and_with_the_pool() {
        let mixed = Mixed::default();
        let (mib, gib) = (Bytes::mib, Bytes::gib);
        for (bytes, len, peak, expected) in [
            // A small pool: the smallest chunk.
            (mib(20), mib(20), mib(20), vec![mib(8), mib(8), mib(4)]),
            // A 64th of the pool.
            (mib(32), mib(32), gib(1), vec![mib(16), mib(16)]),
            // At most the usual chunk, however large the pool.
            (mib(64), mib(64), gib(64), vec![mib(32), mib(32)]),
            // A 64th of a huge request.
            (mib(128), gib(4), gib(4), vec![mib(64), mib(64)]),
            // At most the largest chunk.
            (mib(256), gib(64), gib(64), vec![mib(128), mib(128)]),
            // Nothing to make.
            (Bytes::ZERO, gib(1), gib(1), vec![]),
        ] {
            let made = new_chunks(bytes, len, peak, &mixed);
            assert_eq!(made, expected, "{bytes} for {len} at a peak of {peak}");
        }
    }

    #[test]
    fn slack_is_a_part_of_the_peak() {
        assert_eq!(with_slack(Bytes::gib(1), 0), Bytes::gib(1));
        assert_eq!(with_slack(Bytes::new(1000), 12), Bytes::new(1012));
        assert_eq!(with_slack(Bytes::new(999), 12), Bytes::new(1010));
    }
}
