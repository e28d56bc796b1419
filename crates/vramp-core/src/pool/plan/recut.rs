//! Cutting a huge free chunk into small ones before a small block enters it.
//!
//! A chunk moves only whole, so a block of 2 MiB in a chunk of 128 MiB pins all of it. Chunks longer than
//! usual are made for huge requests only. Once such a request is over, small blocks would enter its
//! chunks one by one, and a few that stay would keep nearly all of the card from being moved.
//!
//! 1. A small request is about to be carved from a wholly free chunk that is longer than usual.
//! 2. If no event shows yet that the chunk's work is over, one is recorded and queried, once for each
//!    request. If the work is not over the block enters the chunk as it is.
//! 3. The chunk is released, and its addresses are filled with small chunks.
//!
//! Near the limit that is done to any free chunk that is longer than a new one would be and than the block,
//! but for what an arena lends: it is to come back to the arena as it is.
//!
//! Cost: one release, and a create, a map and a set-access for each small chunk; at most once for each
//! huge chunk, and for each request. Nothing where the pool has no huge chunk.

use crate::Bytes;
use crate::ids::StreamId;
use crate::pool::chunks::Mapped;
use crate::pool::config::Mixed;
use crate::pool::free_chunks::FreeChunk;
use crate::pool::index::RegionKey;
use crate::pool::ops::{Fill, Range};
use crate::pool::plan::fill::Filling;
use crate::pool::request::{Attempt, Recut, Step};
use crate::pool::view::View;

/// A block pins a chunk too much that is this many times as long.
const TOO_LONG: u64 = 16;

impl View<'_> {
    /// The step that cuts the huge chunk which the front of a free region would pin, or `None`.
    pub(in crate::pool) fn recut_for(
        self,
        region: RegionKey,
        len: Bytes,
        attempt: &mut Attempt,
        mixed: &Mixed,
    ) -> Option<Step> {
        let longest = self.chunks.longest().filter(|_| attempt.huge_chunk != Recut::Done)?;
        let short = self.longest_below_limit(len, mixed);
        let is_near_limit = short < mixed.chunk_max;
        let is_huge = |chunk| match is_near_limit {
            true => chunk > short && chunk > len,
            false => chunk > mixed.chunk_usual && chunk >= len * TOO_LONG,
        };
        if !is_huge(longest) {
            return None;
        }
        let at = self.regions.get(region).at;
        let Mapped { chunk, home, len: chunk_len } = self.chunks_in(region).next()?;
        let mut mappings = self.chunks.get(chunk).aliases.iter().chain([&home]);
        let is_lent = is_near_limit && mappings.any(|&at| self.arenas.at(at).is_some());
        if !is_huge(chunk_len) || is_lent || home >= at + len || self.chunks.is_pinned(chunk) {
            return None;
        }
        let mark = self.source_mark(chunk, region);
        if attempt.huge_chunk == Recut::Untried && !self.streams.is_over(mark) {
            attempt.huge_chunk = Recut::Asked;
            return Some(match self.can_be_recorded(mark) {
                true => Step::Record(vec![mark]),
                false => Step::Poll,
            });
        }
        if !self.is_idle(chunk, region) {
            return None;
        }
        attempt.huge_chunk = Recut::Released(Range::new(home, chunk_len), None);
        attempt.note_plan();
        let region_len = self.regions.get(region).len;
        Some(Step::Perform(self.release_plan(vec![FreeChunk { region_len, home, chunk, region }])))
    }

    /// The step that fills the addresses of a huge chunk that was released, for a request of `len`
    /// bytes. `None` if there is none, or if it could not be released.
    pub(in crate::pool) fn fill_recut(
        self,
        len: Bytes,
        stream: StreamId,
        attempt: &mut Attempt,
        mixed: &Mixed,
    ) -> Option<Step> {
        let Recut::Released(Range { at: home, len: whole }, piece) = attempt.huge_chunk else {
            return None;
        };
        attempt.huge_chunk = Recut::Done;
        let hole = self.holes.at(home)?;
        if hole.at + hole.len < home + whole || whole > self.below_limit() {
            return None;
        }
        let twice = Bytes::new((len.count() * 2).next_power_of_two());
        let half = Bytes::new(mixed.chunk_min.count() / 2).max(self.config.page);
        let short = twice.max(half).min(whole).min(self.longest_below_limit(len, mixed));
        let piece = piece.unwrap_or(short);
        let fills = (0..whole.count().div_ceil(piece.count())).map(|n| Fill::New {
            chunk: self.chunks.upcoming(n as usize),
            len: piece.min(whole - piece * n),
        });
        let fills = fills.collect();
        let filling = Filling { at: home, fills, stream, waits: Vec::new(), arena: None };
        Some(Step::Perform(self.fill_plan(filling).next()))
    }
}
