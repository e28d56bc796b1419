//! Parts of an arena with memory that is not the pool's: a host's, mapped for the device.
//!
//! 1. The arena lends the part, [`Pool::lend`](crate::Pool::lend), or never had memory there.
//! 2. [`Pool::vacate`](crate::Pool::vacate) returns the plans after which nothing is mapped there.
//! 3. The shell maps other memory there and notes that by
//!    [`Pool::set_hosted`](crate::Pool::set_hosted). The pool places nothing there, and backs
//!    nothing there.
//! 4. The shell unmaps it, [`Pool::clear_hosted`](crate::Pool::clear_hosted): a gap, which can be
//!    backed again.
//!
//! Deliberately absent: the memory itself, and the work that reads it.

use crate::Bytes;
use crate::ids::{ArenaId, PoolAddr};
use crate::pool::chunks::Mapped;
use crate::pool::free_chunks::FreeChunk;
use crate::pool::index::RegionKey;
use crate::pool::ops::{Plan, Range};
use crate::pool::regions::{Kind, Region};
use crate::pool::view::View;

/// Why a part of an arena cannot get memory that is not the pool's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotVacant {
    /// The arena's own memory is mapped there.
    #[error("the arena's own memory is mapped there: lend it first")]
    Backed,
    /// Work in flight uses the memory there, or used it before it was moved away.
    #[error("work in flight uses the memory there: try again when it is over")]
    InUse,
    /// The memory there is pinned.
    #[error("the memory there is pinned: unpin it first")]
    Pinned,
    /// Other memory is mapped there already.
    #[error("other memory is mapped there already: unmap it first")]
    Hosted,
    /// A failed driver call left a mapping there in an unknown state.
    #[error("a failed driver call left part of it unusable: try again, or use other addresses")]
    Quarantined,
}

impl View<'_> {
    /// The next plan towards a part of an arena where nothing is mapped. `None` once that is so.
    pub(in crate::pool) fn vacate(
        self,
        arena: ArenaId,
        part: Range,
    ) -> Result<Option<Plan>, NotVacant> {
        for (key, region) in self.arena_regions(arena) {
            if !part.touches(region.at, region.len) {
                continue;
            }
            match &region.kind {
                Kind::Gap { .. } => {}
                Kind::Retired { mark, .. } => {
                    let ranges = vec![Range::new(region.at, region.len)];
                    let over = self.streams.is_over(*mark);
                    return over.then(|| Some(Plan::unmap(ranges))).ok_or(NotVacant::InUse);
                }
                Kind::Free(_) => return self.release_first(key, part).map(Some),
                Kind::Arena { .. } => return Err(NotVacant::Backed),
                Kind::Hosted { .. } => return Err(NotVacant::Hosted),
                Kind::Quarantined { .. } => return Err(NotVacant::Quarantined),
                other => panic!("region {key} of {arena} is {other:?}"),
            }
        }
        Ok(None)
    }

    /// A plan that releases the first chunk of a lent region that touches the addresses.
    fn release_first(self, key: RegionKey, part: Range) -> Result<Plan, NotVacant> {
        let found = self.chunks_in(key).find(|mapped| part.touches(mapped.home, mapped.len));
        let Mapped { chunk, home, .. } = found.expect("lent memory is whole chunks");
        let region_len = self.regions.get(key).len;
        if self.chunks.is_pinned(chunk) {
            return Err(NotVacant::Pinned);
        }
        match self.is_idle(chunk, key) {
            true => Ok(self.release_plan(vec![FreeChunk { region_len, home, chunk, region: key }])),
            false => Err(NotVacant::InUse),
        }
    }

    /// The parts of an arena with memory that is not the pool's: offsets and lengths, sorted.
    pub(in crate::pool) fn hosted(self, arena: ArenaId) -> Vec<(Bytes, Bytes)> {
        let start = self.arenas.get(arena).at;
        let hosted = self.arena_regions(arena).map(|(_, region)| region);
        let hosted = hosted.filter(|region| matches!(region.kind, Kind::Hosted { .. }));
        hosted.map(|region| (region.at - start, region.len)).collect()
    }

    /// The hosted region that begins at `from`.
    pub(in crate::pool) fn hosted_at(self, arena: ArenaId, from: Bytes) -> RegionKey {
        let at: PoolAddr = self.arenas.get(arena).at + from;
        let begins =
            |region: &Region| region.at == at && matches!(region.kind, Kind::Hosted { .. });
        let found = self.arena_regions(arena).find(|(_, region)| begins(region));
        found.unwrap_or_else(|| panic!("nothing is hosted at {at:?} of {arena}")).0
    }
}
