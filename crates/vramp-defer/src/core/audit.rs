//! The invariants of the state, each checked from scratch by a named function.

use std::collections::{BTreeMap, BTreeSet};

use super::buffer_state::{ContentPlace, HostKey, Piece, PieceMove};
use super::cost::Unit;
use super::lists::Listing;
use super::range::Range;
use super::uses::Holders;
use super::{BufferId, Deferrables, PeerId, PieceId, Shortfall, SpillRoom, SpillTier, UseToken};
use vramp_core::{Bytes, Inconsistency};

pub(super) type Check = Result<(), String>;

impl Deferrables {
    /// Checks every invariant. O(pieces log pieces): for tests, and after an error.
    ///
    /// # Errors
    /// The first invariant that does not hold: a bug in the planner, not in its use.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let checks = [
            self.pieces_are_possible(),
            self.pieces_add_up(),
            self.ranges_hold_their_tenants(),
            self.moves_agree(),
            self.leases_agree(),
            self.leased_pieces_have_memory(),
            self.uses_are_listed(),
            self.sums_agree(),
            self.queue_is_in_order(),
            self.peer_copies_are_listed(),
            self.host_copies_are_listed(),
            self.units_are_listed(),
            self.gaps_agree(),
        ];
        checks.into_iter().collect::<Check>().map_err(|what| Inconsistency { what })
    }

    fn pieces_are_possible(&self) -> Check {
        for id in self.buffers.keys().flat_map(|buffer| self.pieces_of(buffer)) {
            let piece = self.piece(id);
            let holds = match piece.place {
                ContentPlace::Empty => !piece.copies.any(),
                ContentPlace::Card => piece.backed,
                ContentPlace::SpillTier => piece.copies.any(),
            };
            if !holds || !motion_is_possible(piece) {
                return Err(format!("{id} cannot be like this: {piece:?}"));
            }
            let needs_memory = matches!(piece.motion, Some(PieceMove::Restore { .. }))
                || self.buffers[id.buffer].holders.use_card();
            if piece.place == ContentPlace::SpillTier && piece.backed != needs_memory {
                return Err(format!("{id} is spilled, with memory: {}", piece.backed));
            }
        }
        Ok(())
    }

    fn pieces_add_up(&self) -> Check {
        for (id, buffer) in &self.buffers {
            let sum: Bytes = buffer.pieces.iter().map(|piece| piece.len).sum();
            let (_, full) = buffer.pieces.split_last().ok_or(format!("{id} has no pieces"))?;
            let away = buffer.pieces.iter().filter(|piece| piece.place == ContentPlace::SpillTier);
            let away: Bytes = away.map(|piece| piece.len).sum();
            if away != buffer.deferred {
                return Err(format!("{id} counts {} deferred of {away}", buffer.deferred));
            }
            if sum != buffer.len || full.iter().any(|piece| piece.len != self.config.piece) {
                return Err(format!("{id} of {} has pieces of {sum} in all", buffer.len));
            }
        }
        Ok(())
    }

    fn ranges_hold_their_tenants(&self) -> Check {
        let mut tenants = 0;
        for (id, range) in &self.ranges {
            let mut end = Bytes::ZERO;
            for (&offset, tenant) in &range.tenants {
                let buffer = self.buffers.get(tenant.buffer);
                let fits = |b: &super::buffer_state::Buffer| {
                    b.range == id && b.offset == offset && b.len <= tenant.len && offset >= end
                };
                if !buffer.is_some_and(fits) {
                    return Err(format!("{} is not where {id} has it", tenant.buffer));
                }
                end = offset + buffer.map_or(Bytes::ZERO, |buffer| buffer.len);
                tenants += 1;
            }
            if end > range.len || !range.is_group && range.tenants.len() != 1 {
                return Err(format!("{id} of {} has tenants up to {end}", range.len));
            }
        }
        if tenants != self.buffers.len() {
            return Err(format!("{tenants} tenants are {} buffers", self.buffers.len()));
        }
        Ok(())
    }

    fn moves_agree(&self) -> Check {
        let moving = |id: &PieceId| self.piece(*id).motion.is_some();
        let pieces = self.buffers.keys().flat_map(|buffer| self.pieces_of(buffer));
        let count = pieces.filter(moving).count();
        for (&id, &piece) in &self.moves {
            let known =
                self.buffers.get(piece.buffer).and_then(|b| b.pieces.get(piece.index as usize));
            if known.and_then(|piece| piece.motion).map(PieceMove::id) != Some(id) {
                return Err(format!("{id} does not move {piece}"));
            }
        }
        if count != self.moves.len() {
            return Err(format!("{count} pieces move, {} moves are known", self.moves.len()));
        }
        Ok(())
    }

    fn leases_agree(&self) -> Check {
        let mut held = 0;
        for (&lease, record) in &self.leases {
            for &(buffer, access) in &record.buffers {
                let known = self.buffers.get(buffer).map(|buffer| &buffer.holders);
                let is_known = |holders: &Holders| holders.contains(lease, record.holder, access);
                if !known.is_some_and(is_known) {
                    return Err(format!("{lease} does not hold {buffer}"));
                }
                held += 1;
            }
        }
        let holders: usize = self.buffers.values().map(|buffer| buffer.holders.len()).sum();
        if holders != held {
            return Err(format!("{holders} holders of {held} leased buffers"));
        }
        let shared =
            |b: &&super::buffer_state::Buffer| b.holders.len() > 1 && b.holders.is_exclusive();
        match self.buffers.values().find(shared) {
            Some(buffer) => Err(format!("an exclusive lease is not alone: {:?}", buffer.holders)),
            None => Ok(()),
        }
    }

    fn queue_is_in_order(&self) -> Check {
        let given = |ticket: &super::Ticket| ticket.0 <= self.next;
        let once =
            |waiter: &super::wait_queue::Waiter| waiter.buffers.is_sorted_by(|a, b| a.0 < b.0);
        let mut waiters = self.wait_queue.waiters.iter();
        match waiters.find(|(ticket, waiter)| !given(ticket) || !once(waiter)) {
            Some((ticket, waiter)) => Err(format!("{ticket} was not given: {waiter:?}")),
            None => self
                .wait_queue
                .check_index(self.leases.iter().map(|(&id, l)| (id, l.holder, l.has_room()))),
        }
    }

    /// The index has each copy on a card once, at its place.
    fn peer_copies_are_listed(&self) -> Check {
        let mut count = 0;
        for id in self.buffers.keys().flat_map(|buffer| self.pieces_of(buffer)) {
            let key = self.peer_key(id);
            let listed = key.is_none_or(|key| self.peer_copies.contains(&(key, id)));
            if !listed || self.piece(id).peer_key != key {
                return Err(format!("the copy of {id} on a card is not listed as {key:?}"));
            }
            count += usize::from(key.is_some());
        }
        match count == self.peer_copies.len() {
            true => Ok(()),
            false => Err(format!("{count} copies on cards, {} listed", self.peer_copies.len())),
        }
    }

    /// A leased piece has memory, and no unevictable buffer is a victim.
    fn leased_pieces_have_memory(&self) -> Check {
        for (id, buffer) in &self.buffers {
            let is_filled = |piece: &Piece| matches!(piece.motion, Some(PieceMove::Restore { .. }));
            let lacks = |piece: &Piece| match buffer.holders.read_in_place() {
                true => piece.place == ContentPlace::Empty || is_filled(piece),
                false => buffer.holders.use_card() && !piece.backed,
            };
            if buffer.pieces.iter().any(lacks) {
                return Err(format!("{id} is leased and lacks memory"));
            }
            let leaves =
                |piece: &Piece| matches!(piece.motion, Some(PieceMove::Out { leaving: true, .. }));
            let stays = buffer.stays() || self.ranges[buffer.range].unevictable_count > 0;
            if stays && buffer.pieces.iter().any(leaves) {
                return Err(format!("{id} may not leave and was chosen"));
            }
        }
        Ok(())
    }

    fn uses_are_listed(&self) -> Check {
        for (id, buffer) in &self.buffers {
            let listed = |&token: &UseToken| self.uses.contains(token, id);
            if !buffer.uses.all().iter().all(listed) {
                return Err(format!("work on {id} is not in the index of uses"));
            }
        }
        let without_handles = self.buffers.values().filter(|buffer| buffer.is_ending).count();
        if without_handles != self.without_handles {
            return Err(format!("{without_handles} buffers have no handles"));
        }
        Ok(())
    }

    fn sums_agree(&self) -> Check {
        let (mut committed, mut occupied) = (Bytes::ZERO, Bytes::ZERO);
        let mut kept = Bytes::ZERO;
        for (id, range) in &self.ranges {
            let buffers = range.tenants.values().map(|tenant| &self.buffers[tenant.buffer]);
            let unevictable_count =
                buffers.clone().filter(|buffer| buffer.is_unevictable()).count();
            let pieces = buffers.flat_map(|buffer| &buffer.pieces).filter(|piece| piece.backed);
            let pages: Bytes = pieces.clone().map(|piece| self.config.pages(piece.len)).sum();
            let backed = pieces.count();
            if (range.unevictable_count as usize, range.backed as usize)
                != (unevictable_count, backed)
            {
                return Err(format!(
                    "{id} has {unevictable_count} unevictable tenants and {backed} pieces: {range:?}"
                ));
            }
            let kept_count = range.tenants.values().map(|tenant| &self.buffers[tenant.buffer]);
            let kept_count = kept_count.filter(|buffer| buffer.is_pinned()).count();
            if range.kept_count as usize != kept_count {
                return Err(format!("{id} has {kept_count} tenants that stay: {range:?}"));
            }
            kept += if kept_count > 0 { range.needs() } else { Bytes::ZERO };
            committed += if unevictable_count > 0 { range.needs() } else { Bytes::ZERO };
            if range.is_adopted {
                if backed == 0 {
                    return Err(format!("{id} is adopted and has no memory"));
                }
                continue;
            }
            occupied += match range.is_group {
                true if backed > 0 => range.len,
                true => Bytes::ZERO,
                false => pages,
            };
        }
        let mut promised = SpillRoom::default();
        for piece in self.buffers.values().flat_map(|buffer| &buffer.pieces) {
            if let Some(to) = piece.motion.and_then(PieceMove::promised) {
                *promised.of(to) += piece.len;
            }
        }
        for tier in PeerId::all().map(SpillTier::Peer).chain([SpillTier::Host, SpillTier::Disk]) {
            let (mut counted, mut summed) = (self.promised, promised);
            agree(&format!("promised of the {tier}"), *counted.of(tier), *summed.of(tier))?;
        }
        agree("committed", self.committed, committed)?;
        agree("kept", self.kept, kept)?;
        agree("occupied", self.occupied, occupied)?;
        let sum = self.census();
        agree("of all states", sum.total, sum.empty + sum.resident + sum.spilled + sum.restoring)?;
        agree("resident", sum.resident, sum.dirty + sum.clean)?;
        let below = sum.spilled_peer + sum.spilled_host + sum.spilled_disk;
        agree("spilled", sum.spilled, below)
    }
}

fn motion_is_possible(piece: &Piece) -> bool {
    match piece.motion {
        None => true,
        Some(PieceMove::Out { to: Some(_), .. }) => {
            piece.place == ContentPlace::Card && piece.backed
        }
        Some(PieceMove::Out { to: None, leaving: true, .. }) => piece.backed && !piece.is_dirty(),
        Some(PieceMove::Out { to: None, .. }) => piece.place != ContentPlace::SpillTier,
        Some(PieceMove::Restore { from, .. }) => {
            piece.place == ContentPlace::SpillTier
                && piece.backed
                && piece.copies.iter().any(|c| c == from)
        }
        Some(PieceMove::Push { from, to, .. }) => {
            piece.place == ContentPlace::SpillTier
                && piece.copies.iter().any(|c| c == from)
                && from < to
        }
    }
}

pub(super) fn agree(what: &str, counted: Bytes, summed: Bytes) -> Check {
    if counted == summed {
        return Ok(());
    }
    Err(format!("{what}: {counted} are counted, the sum is {summed}"))
}

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
