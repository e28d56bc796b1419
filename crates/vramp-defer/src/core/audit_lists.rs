//! The invariants of the lists by which victims, host copies and gaps are found.

use std::collections::{BTreeMap, BTreeSet};

use super::audit::{Check, agree};
use super::bucket::Unit;
use super::copy_index::HostKey;
use super::lists::Listing;
use super::piece::ContentPlace;
use super::range::Range;
use super::{BufferId, Deferrables, Shortfall};
use vramp_core::Bytes;

impl Deferrables {
    /// The index has each copy on the host once, at its place, and the sum of clean contents is right.
    pub(super) fn host_copies_are_listed(&self) -> Check {
        let (mut count, mut clean) = (0, Bytes::ZERO);
        for id in self.buffers.keys().flat_map(|buffer| self.pieces_of(buffer)) {
            let piece = self.piece(id);
            let key = HostKey::of(piece, &self.buffers[id.buffer]);
            let listed = key.is_none_or(|key| self.host_copies.contains(&(key, id)));
            if !listed || piece.host_key != key {
                return Err(format!("the host copy of {id} is not listed as {key:?}"));
            }
            count += usize::from(key.is_some());
            let is_clean = piece.place == ContentPlace::Card && piece.copies.any();
            clean += if is_clean { piece.len } else { Bytes::ZERO };
        }
        agree("clean contents", self.clean, clean)?;
        match count == self.host_copies.len() {
            true => Ok(()),
            false => Err(format!("{count} copies on the host, {} listed", self.host_copies.len())),
        }
    }

    /// What did not change since is listed as it is now.
    pub(super) fn units_are_listed(&self) -> Check {
        let lists = &self.lists;
        let mut sums = Shortfall::default();
        let mut in_buckets = 0;
        for (&unit, listed) in &lists.listed {
            let sum = match listed.listing {
                Listing::Leased => &mut sums.leased,
                Listing::Pinned => &mut sums.pinned,
                Listing::Moving => &mut sums.moving,
                Listing::Candidate { bucket, last_use_ns } => {
                    let units = lists.buckets.get(&bucket);
                    if !units.is_some_and(|units| units.contains(&(last_use_ns, unit))) {
                        return Err(format!("{unit:?} is not in its bucket {bucket:?}"));
                    }
                    in_buckets += 1;
                    continue;
                }
            };
            *sum += listed.frees;
        }
        let held: usize = lists.buckets.values().map(BTreeSet::len).sum();
        if (sums, in_buckets) != (lists.staying, held) {
            return Err(format!("{sums:?} stay, {:?} are listed", lists.staying));
        }
        let mut units: BTreeMap<Unit, bool> =
            lists.listed.keys().map(|&unit| (unit, false)).collect();
        for id in self.buffers.keys().flat_map(|buffer| self.pieces_of(buffer)) {
            let piece = self.piece(id);
            let range = self.buffers[id.buffer].range;
            let is_changed = piece.is_changed;
            if is_changed != lists.changed.contains(&id) {
                return Err(format!("{id} changed, or did not: {is_changed}"));
            }
            let dirty = piece.clean_key.is_some_and(|key| lists.dirty.contains(&(key, id)));
            if dirty != piece.clean_key.is_some() {
                return Err(format!("{id} is not listed to be cleaned"));
            }
            if !is_changed && piece.clean_key != self.clean_key(id) {
                return Err(format!("{id} is listed to be cleaned as it was"));
            }
            let unit = match self.ranges[range].leaves_together() {
                true => Unit::Group(range),
                false => Unit::Piece(id),
            };
            *units.entry(unit).or_default() |= is_changed || lists.changed_groups.contains(&range);
        }
        for (unit, is_changed) in units {
            let exists = match unit {
                Unit::Piece(id) => self.buffers.contains_key(id.buffer),
                Unit::Group(range) => self.ranges.contains_key(range),
            };
            let now = if exists { self.listing_of(unit) } else { None };
            let was = lists.listed.get(&unit).copied();
            let group_changed =
                matches!(unit, Unit::Group(range) if lists.changed_groups.contains(&range));
            if !is_changed && !group_changed && was != now {
                return Err(format!("{unit:?} is listed as {was:?} and is {now:?}"));
            }
        }
        let cooling = |&(end, id): &(u64, BufferId)| {
            self.buffers.get(id).is_some_and(|buffer| buffer.cools_at == Some(end))
        };
        let count = self.buffers.values().filter(|buffer| buffer.cools_at.is_some()).count();
        match lists.cooling.len() == count && lists.cooling.iter().all(cooling) {
            true => Ok(()),
            false => Err(format!("{count} buffers cool down, {} listed", lists.cooling.len())),
        }
    }

    /// The gaps of a group are what its tenants leave free, and its set lists the longest.
    pub(super) fn gaps_agree(&self) -> Check {
        for (id, range) in self.ranges.iter().filter(|(_, range)| range.is_group) {
            let gaps = range.gaps.as_ref().ok_or(format!("{id} has no gaps"))?;
            let mut end = Bytes::ZERO;
            let mut found = Vec::new();
            let whole = (range.len, None);
            let tenants = range.tenants.iter().map(|(&offset, tenant)| (offset, Some(tenant.len)));
            for (offset, len) in tenants.chain([whole]) {
                if offset > end {
                    found.push((end, offset - end));
                }
                end = offset + len.unwrap_or_default();
            }
            let longest = found.iter().map(|&(_, len)| len).max().unwrap_or_default();
            let mut pages = Range::group(range.len, self.config.page, None);
            for id in self.tenants(id).flat_map(|tenant| self.pieces_of(tenant)) {
                let (piece, buffer) = (self.piece(id), &self.buffers[id.buffer]);
                if piece.backed {
                    pages.count_pages(buffer.offset, piece.len, self.config.page, true);
                }
            }
            let agree = gaps.iter().eq(found.iter().copied())
                && pages.backed_in_page == range.backed_in_page
                && gaps.counts() == [found.len(); 2]
                && range.listed_gap == longest;
            if !agree {
                return Err(format!("{id} has the gaps {found:?}, not {gaps:?}"));
            }
            let listed = range.set.and_then(|set| self.group_sets.get(set));
            if listed.is_some_and(|set| !set.contains(&(longest, id))) {
                return Err(format!("{id} is not listed in its set"));
            }
        }
        let listed: usize = self.group_sets.values().map(BTreeSet::len).sum();
        let in_sets =
            |range: &&Range| range.set.is_some_and(|set| self.group_sets.contains_key(set));
        match listed == self.ranges.values().filter(in_sets).count() {
            true => Ok(()),
            false => Err(format!("{listed} ranges are listed in sets")),
        }
    }
}
