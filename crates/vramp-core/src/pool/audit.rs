//! Every invariant of the pool, checked from scratch. One named check each.

use std::collections::BTreeMap;

use crate::Bytes;
use crate::ids::{Epoch, PoolAddr};
use crate::pool::block::Slab;
use crate::pool::chunks::Mapped;
use crate::pool::free_chunks::FreeChunk;
use crate::pool::index::{Hole, RegionKey};
use crate::pool::regions::{Free, Kind, Region};
use crate::pool::streams::IDLE;
use crate::pool::view::View;

/// An invariant that does not hold: a bug of the library, never a user's mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pool is inconsistent: {what}")]
pub struct Inconsistency {
    /// The violated invariant, with the ids.
    pub what: String,
}

type Check = Result<(), String>;

impl View<'_> {
    /// Checks every invariant.
    pub(crate) fn audit(self) -> Result<(), Inconsistency> {
        let checks = [
            self.regions_follow_one_another(),
            self.neighbours_are_merged(),
            self.free_parts_add_up(),
            self.free_regions_are_indexed(),
            self.free_chunks_are_listed(),
            self.holes_are_indexed(),
            self.chunks_lie_end_to_end(),
            self.retired_mappings_are_aliases(),
            self.quarantined_is_listed(),
            self.waiting_regions_are_listed(),
            self.epochs_are_possible(),
            self.arenas_are_whole(),
            self.sums_agree(),
        ];
        checks.into_iter().collect::<Check>().map_err(|what| Inconsistency { what })
    }

    fn regions_follow_one_another(self) -> Check {
        let mut last: Option<(PoolAddr, RegionKey)> = None;
        for (key, region) in self.regions.iter() {
            if region.len.is_zero() {
                return Err(format!("region {key} at {:?} is empty", region.at));
            }
            match last.filter(|(end, _)| end.span() == region.at.span()) {
                Some((end, prev)) if end != region.at || self.regions.prev(key) != Some(prev) => {
                    return Err(format!("region {key} at {:?} does not follow {prev}", region.at));
                }
                None if !region.at.offset().is_zero() => {
                    return Err(format!("region {key} at {:?} begins no span", region.at));
                }
                _ => {}
            }
            last = Some((region.end(), key));
        }
        Ok(())
    }

    fn neighbours_are_merged(self) -> Check {
        for (key, region) in self.regions.iter() {
            let Some(next) = self.regions.next(key) else { continue };
            let mergeable = match (&region.kind, &self.regions.get(next).kind) {
                (Kind::Hole, Kind::Hole) => true,
                (Kind::Free(a), Kind::Free(b)) if a.lent_by.or(b.lent_by).is_some() => false,
                (Kind::Free(a), Kind::Free(b)) => a.owner == b.owner,
                _ => false,
            };
            if mergeable {
                return Err(format!("regions {key} and {next} at {:?} are not merged", region.at));
            }
        }
        Ok(())
    }

    fn free_parts_add_up(self) -> Check {
        for (key, region) in self.regions.iter() {
            if let Kind::Free(free) = &region.kind {
                let sum: Bytes = free.parts.iter().map(|part| part.len).sum();
                if sum != region.len || free.parts.iter().any(|part| part.len.is_zero()) {
                    return Err(format!(
                        "region {key} has {} bytes, parts {:?}",
                        region.len, free.parts
                    ));
                }
            }
        }
        Ok(())
    }

    fn free_regions_are_indexed(self) -> Check {
        let mut indexed = 0;
        let idle = (IDLE, self.streams.get(IDLE));
        for (id, stream) in self.streams.iter().chain([idle]) {
            for (at, len, key) in stream.free.iter() {
                let region = self.regions.get(key);
                if !self.is_free_of(key, id) || region.at != at || region.len != len {
                    return Err(format!("{id} indexes region {key} at {at:?} len={len} wrongly"));
                }
                indexed += 1;
            }
        }
        for key in self.arenas.lent() {
            let region = self.regions.get(key);
            let is_over = |free: &Free| free.parts.iter().all(|part| part.epoch == Epoch::START);
            let is_lent = |free: &Free| free.lent_by.is_some() && is_over(free);
            let lent = matches!(&region.kind, Kind::Free(free) if is_lent(free));
            if !lent || self.lent_at(region.at) != Some(key) {
                return Err(format!("region {key} at {:?} is indexed as lent", region.at));
            }
            indexed += 1;
        }
        let free = self.regions.iter().filter(|(_, r)| matches!(r.kind, Kind::Free(_))).count();
        (free == indexed).then_some(()).ok_or(format!("{free} free regions, {indexed} indexed"))
    }

    /// Once all changes are listed, exactly the wholly free chunks are.
    fn free_chunks_are_listed(self) -> Check {
        if !self.free_chunks.is_fresh() {
            return Ok(());
        }
        let mut listed = 0;
        for (owner, len, entry) in self.free_chunks.iter() {
            let FreeChunk { region_len, home, chunk, region: key } = entry;
            let region = self.regions.get(key);
            let lies = region.holds(home) && home + len <= region.end() && region.len == region_len;
            let known = self.chunks.get(chunk);
            if !self.is_free_of(key, owner) || !lies || known.home != Some(home) || known.len != len
            {
                return Err(format!(
                    "{chunk} is listed as free in region {key}, which is {region:?}"
                ));
            }
            listed += 1;
        }
        let is_own =
            |region: &Region| matches!(&region.kind, Kind::Free(free) if free.lent_by.is_none());
        let free = self.regions.iter().filter(|(_, region)| is_own(region));
        let found: usize = free.map(|(key, _)| self.movable_in(key).count()).sum();
        (found == listed).then_some(()).ok_or(format!("{found} chunks are free, {listed} listed"))
    }

    fn holes_are_indexed(self) -> Check {
        for Hole { len, at, region: key } in self.holes.iter() {
            let region = self.regions.get(key);
            if region.kind != Kind::Hole || region.at != at || region.len != len {
                return Err(format!("hole {key} at {at:?} len={len} is indexed wrongly"));
            }
        }
        let holes = self.regions.iter().filter(|(_, r)| r.kind == Kind::Hole).count();
        let indexed = self.holes.iter().len();
        (holes == indexed).then_some(()).ok_or(format!("{holes} holes, {indexed} indexed"))
    }

    /// Every stretch of used, free and waiting memory is covered by chunks, end to end, and every
    /// home lies in such a stretch.
    fn chunks_lie_end_to_end(self) -> Check {
        let mut homes = 0;
        let mut stretch: Option<(PoolAddr, PoolAddr)> = None;
        let mut stretches = Vec::new();
        for (_, region) in self.regions.iter() {
            let foreign = matches!(
                region.kind,
                Kind::Retired { .. } | Kind::Hosted { .. } | Kind::Quarantined { .. }
            );
            let mapped = region.kind.is_mapped() && !foreign;
            match (&mut stretch, mapped) {
                (Some((_, end)), true) if *end == region.at => *end = region.end(),
                (open, _) => {
                    stretches.extend(open.take());
                    *open = mapped.then(|| (region.at, region.end()));
                }
            }
        }
        stretches.extend(stretch);
        for (start, end) in stretches {
            let mut here = start;
            for mapped in self.chunks.within(start, end - start) {
                if mapped.home != here {
                    let Mapped { chunk, home, .. } = mapped;
                    return Err(format!("{chunk} is at home at {home:?}, expected {here:?}"));
                }
                here = mapped.end();
                homes += 1;
            }
            if here != end {
                return Err(format!("no chunk covers {here:?} up to {end:?}"));
            }
        }
        let at_home = self.chunks.iter().filter(|(_, chunk)| chunk.home.is_some()).count();
        (homes == at_home).then_some(()).ok_or(format!("{at_home} homes, {homes} in mapped memory"))
    }

    fn retired_mappings_are_aliases(self) -> Check {
        for (key, region) in self.regions.iter() {
            let Kind::Retired { chunk, .. } = region.kind else { continue };
            let known = self.chunks.get(chunk);
            if known.len != region.len || !known.aliases.contains(&region.at) {
                return Err(format!("region {key} at {:?} is no alias of {chunk}", region.at));
            }
            if self.retired.get(&region.at) != Some(&key) {
                return Err(format!("retired region {key} at {:?} is not indexed", region.at));
            }
        }
        let retired = self.regions.iter().filter(|(_, r)| matches!(r.kind, Kind::Retired { .. }));
        let (retired, indexed) = (retired.count(), self.retired.len());
        (retired == indexed).then_some(()).ok_or(format!("{retired} retired, {indexed} indexed"))
    }

    fn quarantined_is_listed(self) -> Check {
        let mut found = 0;
        for (key, region) in self.regions.iter() {
            let Kind::Quarantined { chunk, .. } = region.kind else { continue };
            found += 1;
            let is_alias = |id| {
                let chunk = self.chunks.get(id);
                chunk.len == region.len && chunk.aliases.contains(&region.at)
            };
            if self.quarantined.get(&region.at) != Some(&key) || !chunk.is_none_or(is_alias) {
                return Err(format!("quarantined region {key} at {:?} is not known", region.at));
            }
        }
        let listed = self.quarantined.len();
        if found != listed {
            return Err(format!("{found} mappings are quarantined, {listed} listed"));
        }
        let homeless = self.chunks.iter().filter(|(_, chunk)| chunk.home.is_none());
        let homeless: Vec<_> = homeless.map(|(id, _)| id).collect();
        let listed: Vec<_> = self.chunks.homeless().collect();
        (homeless == listed)
            .then_some(())
            .ok_or(format!("{homeless:?} have no home, not {listed:?}"))
    }

    fn waiting_regions_are_listed(self) -> Check {
        let mut waiting = BTreeMap::new();
        for (key, region) in self.regions.iter() {
            if let Kind::Waiting { owner, .. } = region.kind {
                waiting.insert(key, owner);
            }
        }
        for entry in self.waiting.iter() {
            if waiting.remove(&entry.item) != Some(entry.owner) {
                return Err(format!("region {} is listed as waiting", entry.item));
            }
        }
        if let Some((key, owner)) = waiting.pop_first() {
            return Err(format!("waiting region {key} of {owner} is not listed once"));
        }
        self.waiting.audit(self.streams)?;
        self.heap_waits.audit(self.streams)
    }

    /// The pool's side of a slab, for the audit of the heap that has it.
    pub(crate) fn check_slab(self, slab: &Slab) -> Check {
        let Slab { region: key, at, len } = *slab;
        let region = self.regions.get(key);
        match &region.kind {
            Kind::Used(used) if used.slab && region.at == at && region.len == len => Ok(()),
            other => Err(format!("a slab at {at:?} lies in region {key}, which is {other:?}")),
        }
    }

    fn epochs_are_possible(self) -> Check {
        for (id, stream) in self.streams.iter() {
            if stream.reached > stream.recorded() {
                return Err(format!("{id} reached {:?} unrecorded", stream.reached));
            }
            let is_done = stream.ended && stream.reached == stream.recorded();
            if is_done && stream.free.iter().next().is_none() {
                return Err(format!("{id} ended, is done and has not left"));
            }
        }
        for (key, region) in self.regions.iter() {
            if let Kind::Free(free) = &region.kind {
                let current = self.streams.get(free.owner).current;
                if free.parts.iter().any(|part| part.epoch > current) {
                    return Err(format!("region {key} waits for an epoch to come"));
                }
            }
        }
        Ok(())
    }

    /// Every arena's addresses are its own regions, and no other region is an arena's.
    fn arenas_are_whole(self) -> Check {
        let claimed = |kind: &Kind| match kind {
            Kind::Arena { arena, .. } | Kind::Gap { arena } | Kind::Hosted { arena } => {
                Some(*arena)
            }
            Kind::Retired { arena, .. } | Kind::Quarantined { arena, .. } => *arena,
            Kind::Free(free) => free.lent_by,
            _ => None,
        };
        let mut found = 0;
        for arena in self.arenas.ids() {
            let range = self.arenas.get(arena).range();
            let mut here = range.at;
            for (key, region) in self.arena_regions(arena) {
                if region.at != here || claimed(&region.kind) != Some(arena) {
                    return Err(format!("region {key} at {:?} lies within {arena}", region.at));
                }
                found += 1;
                here = region.end();
            }
            if here != range.end() {
                return Err(format!("{arena} ends at {here:?}"));
            }
        }
        let all = self.regions.iter().filter(|(_, r)| claimed(&r.kind).is_some()).count();
        (all == found).then_some(()).ok_or(format!("{all} regions of arenas, {found} within them"))
    }

    fn sums_agree(self) -> Check {
        let census = self.census();
        let reserved = self.chunks.bytes();
        let in_use = |kind: &Kind| matches!(kind, Kind::Used(_) | Kind::Arena { .. });
        let used = self.regions.iter().filter(|(_, region)| in_use(&region.kind));
        let used: Bytes = used.map(|(_, region)| region.len).sum();
        let free = self.regions.iter().filter(|(_, region)| matches!(region.kind, Kind::Free(_)));
        let longest = free.map(|(_, region)| region.len).max().unwrap_or_default();
        let pairs = [
            ("addresses", census.addresses, {
                let unusable = census.quarantined_addresses;
                census.holes + census.retired + census.hosted + unusable + census.mapped
            }),
            ("addresses of spans", census.addresses, self.regions.addresses()),
            ("reserved", census.reserved, census.mapped + census.quarantined_memory),
            ("reserved counter", census.reserved, reserved),
            ("live counter", census.requested, self.counters.live),
            ("used counter", used, self.used),
            ("free counters", census.free, self.free_bytes()),
            ("waiting counter", census.waiting, self.waiting_bytes),
            ("lent counter", census.lent, self.arenas.lent_bytes()),
            ("longest free region", longest, self.longest_free()),
            ("last freed", self.streams.last_freed_by_stream(), self.streams.last_freed()),
        ];
        for (name, left, right) in pairs {
            if left != right {
                return Err(format!("{name}: {left:?} is not {right:?}\n{census}"));
            }
        }
        Ok(())
    }
}
