//! Few long chunks for blocks that other processes map: each chunk costs an importer about 80 us.
//!
//! Once a block of many chunks was shared ([`Pool::prefer_few_chunks`](crate::Pool::prefer_few_chunks)), and for
//! requests from 128 MiB on:
//!
//! 1. New chunks have half the request's length, 1 GiB at most.
//! 2. Free memory of short chunks that a request would be carved from is released, and created again in long chunks
//!    at the same addresses, once no work uses it. If it is in use, or the card was full, the block
//!    gets the short ones.
//!
//! Cost: an unmap and a release for each short chunk, 31 us, and a create, a map and a set-access for each long one.
//! Nothing where nothing was shared.

use crate::Bytes;
use crate::pool::chunks::Mapped;
use crate::pool::config::Mixed;
use crate::pool::free_chunks::FreeChunk;
use crate::pool::index::RegionKey;
use crate::pool::ops::Range;
use crate::pool::request::{Attempt, Growth, Recut, Step};
use crate::pool::view::View;

/// Requests of so many usual chunks, 128 MiB, get long chunks.
const FROM: u64 = 4;
/// The longest chunk, in the longest of other pools: 1 GiB.
const LONGEST: u64 = 8;
/// Fewer short chunks than that stay as they are.
const MANY: usize = 6;

impl View<'_> {
    /// The length of new chunks for a request that is to have few. `None` for other requests.
    pub(in crate::pool) fn long_chunk(self, len: Bytes, mixed: &Mixed) -> Option<Bytes> {
        let wanted = self.few_chunks && len >= mixed.chunk_usual * FROM;
        wanted.then(|| Bytes::new(1 << (len.count() / 2).ilog2()).min(mixed.chunk_max * LONGEST))
    }

    /// The step that releases the short chunks from which a request would be carved, or `None`.
    pub(in crate::pool) fn lengthen_for(
        self,
        region: RegionKey,
        len: Bytes,
        attempt: &mut Attempt,
        mixed: &Mixed,
    ) -> Option<Step> {
        let long = self.long_chunk(len, mixed).filter(|_| attempt.huge_chunk != Recut::Done)?;
        // On a card that was full another process may take what is released.
        if attempt.growth != Growth::WithSlack {
            return None;
        }
        let end = self.regions.get(region).at + len;
        let mut run: Vec<Mapped> = Vec::new();
        for mapped in self.movable_in(region).take_while(|mapped| mapped.home < end) {
            let is_next = run.last().is_none_or(|last| last.home + last.len == mapped.home);
            if !is_next || mapped.len >= long {
                break;
            }
            run.push(mapped);
        }
        if run.len() < MANY {
            return None;
        }
        let is_lent = run.iter().any(|mapped| {
            let aliases = self.chunks.get(mapped.chunk).aliases.iter();
            aliases.chain([&mapped.home]).any(|&at| self.arenas.at(at).is_some())
        });
        if is_lent {
            return None;
        }
        let mut marks: Vec<_> =
            run.iter().map(|mapped| self.source_mark(mapped.chunk, region)).collect();
        marks.retain(|&mark| !self.streams.is_over(mark));
        if attempt.huge_chunk == Recut::Untried && !marks.is_empty() {
            attempt.huge_chunk = Recut::Asked;
            marks.retain(|&mark| self.can_be_recorded(mark));
            marks.sort_unstable();
            marks.dedup();
            return Some(if marks.is_empty() { Step::Poll } else { Step::Record(marks) });
        }
        if !run.iter().all(|mapped| self.is_idle(mapped.chunk, region)) {
            return None;
        }
        let whole = Range::new(run[0].home, run.iter().map(|mapped| mapped.len).sum());
        attempt.huge_chunk = Recut::Released(whole, Some(long));
        attempt.note_plan();
        let region_len = self.regions.get(region).len;
        let free = |Mapped { chunk, home, .. }| FreeChunk { region_len, home, chunk, region };
        Some(Step::Perform(self.release_plan(run.into_iter().map(free).collect())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use crate::pool::config::{Policy, PoolConfig};

    #[test]
    fn large_requests_of_a_pool_that_shares_get_half_their_length() {
        let (page, span, mixed) = (Bytes::mib(2), Bytes::tib(1), Mixed::default());
        let policy = Policy::Mixed(mixed);
        let config = PoolConfig { page, span, first_span: span, limit: None, policy };
        let mut pool = Pool::new(config).expect("it is valid");
        let longest =
            |pool: &Pool, len: u64| pool.view().longest_chunk(Bytes::mib(len), Bytes::ZERO, &mixed);
        let lens = [2, 127, 128, 1000, 1024, 65_536];
        let usual = lens.map(|len| longest(&pool, len));
        assert_eq!(usual, [8, 8, 8, 8, 16, 128].map(Bytes::mib));
        pool.prefer_few_chunks();
        let few = lens.map(|len| longest(&pool, len));
        assert_eq!(few, [8, 8, 64, 256, 512, 1024].map(Bytes::mib));
    }
}
