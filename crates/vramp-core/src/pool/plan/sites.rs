//! Addresses where a region can be built: beside one, where chunks lay before, or in a hole of its
//! own.
//!
//! A retired mapping whose work is over is as good as a hole; if its chunk is free, it is better: the
//! chunk is taken back there without a call.
//!
//! Deliberately absent: which place is the cheapest (`build.rs`).

use crate::Bytes;
use crate::ids::PoolAddr;
use crate::pool::index::RegionKey;
use crate::pool::plan::build::{Source, Sources};
use crate::pool::plan::{Change, Op, Plan};
use crate::pool::regions::Kind;
use crate::pool::state::Pool;

/// Old places looked at: the longest rows of retired mappings.
const OLD_PLACES: usize = 4;

/// Where the region may be built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// In the hole behind the base.
    Behind,
    /// In the hole before the base.
    Before,
    /// In the hole behind the base, up to the next free region.
    Bridge(RegionKey),
    /// Where retired mappings of free chunks lie in a row, from this one on.
    Return(RegionKey),
    /// In a hole of its own.
    Fresh,
}

/// Addresses next to a region that can be filled: holes, and retired mappings whose work is over.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    pub len: u64,
    /// The region that ends it, if it is not the end of the span.
    pub stopped_by: Option<RegionKey>,
}

impl Pool {
    pub(crate) fn fillable(&self, key: RegionKey) -> bool {
        match &self.regions.get(key).kind {
            Kind::Hole => true,
            Kind::Retired { mark, arena: None, .. } => self.streams.is_over(*mark),
            _ => false,
        }
    }

    /// Looks no further than `enough` bytes.
    pub(crate) fn room_behind(&self, key: RegionKey, enough: u64) -> Room {
        let (mut len, mut next) = (0, self.regions.next(key));
        while let Some(here) = next.filter(|&here| len < enough && self.fillable(here)) {
            len += self.regions.get(here).len;
            next = self.regions.next(here);
        }
        Room { len, stopped_by: next }
    }

    pub(crate) fn room_before(&self, key: RegionKey, enough: u64) -> Room {
        let (mut len, mut prev) = (0, self.regions.prev(key));
        while let Some(here) = prev.filter(|&here| len < enough && self.fillable(here)) {
            len += self.regions.get(here).len;
            prev = self.regions.prev(here);
        }
        Room { len, stopped_by: prev }
    }

    /// Where retired mappings whose chunks are free now lie in a row: the first of each of the longest
    /// rows. O(retired mappings).
    pub(crate) fn old_places(&self, sources: &Sources) -> Vec<RegionKey> {
        let mut rows: Vec<(u64, RegionKey)> = Vec::new();
        let mut end = None;
        for (&at, &key) in &self.retired {
            let region = self.regions.get(key);
            let Kind::Retired { chunk, arena: None, .. } = region.kind else { continue };
            if !sources.by_chunk.contains_key(&chunk) {
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
        rows.into_iter().map(|(_, key)| key).collect()
    }

    /// Retired mappings in a row next to the base whose chunks are free now, nearest first.
    pub(crate) fn reactivable(
        &self,
        base: Option<RegionKey>,
        side: Side,
        need: u64,
        bridged: Option<RegionKey>,
        sources: &Sources,
    ) -> Vec<usize> {
        let step = |key| match side {
            Side::Before => self.regions.prev(key),
            _ => self.regions.next(key),
        };
        let (mut found, mut had) = (Vec::new(), 0);
        let mut next = match (side, base) {
            (Side::Return(first), _) => Some(first),
            (_, Some(base)) => step(base),
            _ => return Vec::new(),
        };
        while let Some(here) = next.filter(|_| had < need) {
            let Kind::Retired { chunk, arena: None, .. } = self.regions.get(here).kind else {
                break;
            };
            let Some(&index) = sources.by_chunk.get(&chunk) else { break };
            let Source { region, len, .. } = sources.all[index];
            let own = Some(region) == base || Some(region) == bridged;
            if own || found.contains(&index) || (bridged.is_some() && had + len > need) {
                break;
            }
            found.push(index);
            had += len;
            next = step(here);
        }
        found
    }

    /// Where a region of its own goes: in the largest hole, with room to grow on both sides.
    /// If there is none, the plan that makes one.
    pub(crate) fn fresh_hole(&self, placed: u64) -> Result<PoolAddr, Plan> {
        let page = self.config.page.count();
        match self.holes.last() {
            Some(&(hole_len, at, _)) if hole_len >= placed => {
                if !at.offset().is_zero() {
                    return Ok(at);
                }
                let headroom = self.config.span.count() / 16;
                let before = headroom.min((hole_len - placed) / 2) / page * page;
                Ok(at.plus(before))
            }
            // Old mappings may be all that fills the address space.
            _ => Err(match self.unmap_retired(usize::MAX) {
                Some(plan) => plan,
                None => self.reserve_plan(placed),
            }),
        }
    }

    pub(crate) fn reserve_plan(&self, least: u64) -> Plan {
        let span = crate::ids::SpanId::new(
            u32::try_from(self.regions.span_count()).expect("fewer than four billion spans"),
        );
        let wanted = self.config.span.count().max(least);
        let op = Op::Reserve { span, least: Bytes::new(least), wanted: Bytes::new(wanted) };
        Plan { ops: vec![op], change: Change::Reserve { span, len: wanted } }
    }
}
