//! Addresses where a region can be built: beside a free region, where chunks were mapped before, or
//! in a hole of its own.
//!
//! A retired mapping whose work is over is as good as a hole; if its chunk is free, it is better: the
//! chunk is reactivated there without a driver call.
//!
//! Deliberately absent: the choice among the sites (`build.rs`).

use crate::Bytes;
use crate::ids::{PoolAddr, StreamId};
use crate::pool::index::RegionKey;
use crate::pool::ops::Plan;
use crate::pool::plan::sources::{Source, Sources};
use crate::pool::regions::Kind;
use crate::pool::view::View;

/// Number of old places considered: the longest rows of retired mappings.
const OLD_PLACES: usize = 4;

/// Where a region may be built. The base is a free region that becomes part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) enum BuildSite {
    /// In the hole behind the base.
    Behind { base: RegionKey },
    /// In the hole before the base.
    Before { base: RegionKey },
    /// In the hole between the base and the next free region, which is filled exactly.
    Bridge { base: RegionKey, next: RegionKey },
    /// Where retired mappings of free chunks lie in a row, from this one on.
    Return { first: RegionKey },
    /// In a hole of its own.
    Fresh,
}

impl BuildSite {
    /// The free region to which the new memory is joined.
    pub(in crate::pool) fn base(self) -> Option<RegionKey> {
        match self {
            BuildSite::Behind { base }
            | BuildSite::Before { base }
            | BuildSite::Bridge { base, .. } => Some(base),
            BuildSite::Return { .. } | BuildSite::Fresh => None,
        }
    }

    /// The free region behind the new memory that becomes part of it too.
    pub(in crate::pool) fn bridged(self) -> Option<RegionKey> {
        match self {
            BuildSite::Bridge { next, .. } => Some(next),
            _ => None,
        }
    }
}

/// Addresses next to a region that can be filled: holes, and retired mappings whose work is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) struct Fillable {
    pub len: Bytes,
    /// The region that ends it, if it is not the end of the span.
    pub stopped_by: Option<RegionKey>,
}

/// Where a region of its own is built.
#[derive(Debug)]
pub(in crate::pool) enum FreshSite {
    At(PoolAddr),
    /// This plan makes a hole; then plan again.
    MakeFirst(Plan),
}

impl View<'_> {
    /// True if nothing is mapped in a region, or only what may be unmapped.
    pub(in crate::pool) fn is_fillable(self, key: RegionKey) -> bool {
        match &self.regions.get(key).kind {
            Kind::Hole => true,
            Kind::Retired { mark, arena: None, .. } => self.streams.is_over(*mark),
            _ => false,
        }
    }

    /// The fillable addresses behind a region. Looks no further than `enough` bytes.
    pub(in crate::pool) fn fillable_behind(self, key: RegionKey, enough: Bytes) -> Fillable {
        self.fillable_along(enough, self.regions.next(key), |key| self.regions.next(key))
    }

    /// The fillable addresses before a region. Looks no further than `enough` bytes.
    pub(in crate::pool) fn fillable_before(self, key: RegionKey, enough: Bytes) -> Fillable {
        self.fillable_along(enough, self.regions.prev(key), |key| self.regions.prev(key))
    }

    fn fillable_along(
        self,
        enough: Bytes,
        first: Option<RegionKey>,
        step: impl Fn(RegionKey) -> Option<RegionKey>,
    ) -> Fillable {
        let (mut len, mut next) = (Bytes::ZERO, first);
        while let Some(here) = next.filter(|&here| len < enough && self.is_fillable(here)) {
            len += self.regions.get(here).len;
            next = step(here);
        }
        Fillable { len, stopped_by: next }
    }

    /// The sites next to a free region, for a region of `len` bytes.
    pub(in crate::pool) fn sites_beside(
        self,
        base: RegionKey,
        len: Bytes,
        stream: StreamId,
    ) -> Vec<BuildSite> {
        let mut sites = vec![BuildSite::Behind { base }, BuildSite::Before { base }];
        let gap = self.fillable_behind(base, len);
        if let Some(next) = gap.stopped_by
            && self.is_usable(next, stream)
            && self.regions.get(base).len + gap.len + self.regions.get(next).len >= len
        {
            sites.push(BuildSite::Bridge { base, next });
        }
        sites
    }

    /// The longest rows of retired mappings whose chunks are free. O(retired mappings).
    pub(in crate::pool) fn old_places(self, sources: &Sources<'_>) -> Vec<BuildSite> {
        let mut rows: Vec<(Bytes, RegionKey)> = Vec::new();
        let mut end = None;
        for (&at, &key) in self.retired {
            let region = self.regions.get(key);
            let Kind::Retired { chunk, arena: None, .. } = region.kind else { continue };
            if sources.find(chunk).is_none() {
                continue;
            }
            match rows.last_mut() {
                Some((len, _)) if end == Some(at) => *len += region.len,
                _ => rows.push((region.len, key)),
            }
            end = Some(region.end());
        }
        rows.sort_by_key(|&(len, _)| std::cmp::Reverse(len));
        rows.truncate(OLD_PLACES);
        rows.into_iter().map(|(_, first)| BuildSite::Return { first }).collect()
    }

    /// Sources whose retired mappings lie in a row at a site, nearest to the base first, up to
    /// `need` bytes.
    pub(in crate::pool) fn reactivable(
        self,
        site: BuildSite,
        need: Bytes,
        sources: &Sources<'_>,
    ) -> Vec<Source> {
        let step = |key| match site {
            BuildSite::Before { .. } => self.regions.prev(key),
            _ => self.regions.next(key),
        };
        let (mut found, mut bytes): (Vec<Source>, Bytes) = (Vec::new(), Bytes::ZERO);
        let mut next = match site {
            BuildSite::Return { first } => Some(first),
            BuildSite::Fresh => None,
            BuildSite::Behind { base }
            | BuildSite::Before { base }
            | BuildSite::Bridge { base, .. } => step(base),
        };
        while let Some(here) = next.filter(|_| bytes < need) {
            let Kind::Retired { chunk, arena: None, .. } = self.regions.get(here).kind else {
                break;
            };
            let Some(source) = sources.find(chunk) else { break };
            let Source { region, len, .. } = source;
            let own = Some(region) == site.base() || Some(region) == site.bridged();
            let too_long = site.bridged().is_some() && bytes + len > need;
            if own || found.contains(&source) || too_long {
                break;
            }
            found.push(source);
            bytes += len;
            next = step(here);
        }
        found
    }

    /// Where a region of its own is built: in the largest hole, with addresses left on both sides
    /// to grow into.
    pub(in crate::pool) fn fresh_site(self, placed: Bytes) -> FreshSite {
        match self.holes.largest() {
            Some(hole) if hole.len >= placed => {
                if !hole.at.offset().is_zero() {
                    return FreshSite::At(hole.at);
                }
                let headroom = Bytes::new(hole.len.count() / 16);
                let half = Bytes::new((hole.len - placed).count() / 2);
                FreshSite::At(hole.at + headroom.min(half).round_down(self.config.page))
            }
            // Retired mappings may be all that fills the address space.
            _ => FreshSite::MakeFirst(match self.unmap_retired(None) {
                Some(plan) => plan,
                None => self.reserve_plan(placed),
            }),
        }
    }
}
