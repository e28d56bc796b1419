//! Free space below the card, and the order in which its tiers are tried.
//!
//! [`EvictionRounds`] are the rounds of one spill request. A round chooses victims and evicts them. It may free less than chosen, since a physical handle
//! can be longer than a piece and is free only as a whole; another round then chooses more.

use std::fmt;

use smallvec::SmallVec;

use super::{PeerId, PeerTable, Rates, SpillTier};
use vramp_core::{Bytes, Shortage};

/// Free bytes of each spill tier. The planner subtracts what moves in flight will take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillRoom {
    /// Memory of other cards that copies may take.
    pub peers: PeerTable<Bytes>,
    /// Free pinned memory.
    pub host: Bytes,
    /// Free disk space.
    pub disk: Bytes,
}

/// Cards in the order in which they are tried, those before the host and those after it. The disk is
/// the last.
#[derive(Clone, Debug, Default)]
pub(super) struct TierOrder {
    before_host: SmallVec<[PeerId; 4]>,
    after_host: SmallVec<[PeerId; 4]>,
}

impl TierOrder {
    /// Returns the order by rate, the fastest first. Cards without room are left out.
    pub fn by_rate(room: &SpillRoom, rates: &Rates) -> TierOrder {
        let rate = |peer: PeerId| rates.out_rate(SpillTier::Peer(peer));
        let with_room = room.peers.iter().filter(|(_, free)| !free.is_zero());
        let mut peers: SmallVec<[PeerId; 4]> = with_room.map(|(peer, _)| peer).collect();
        peers.sort_by_key(|&peer| std::cmp::Reverse(rate(peer)));
        let host = rates.out_rate(SpillTier::Host);
        let (before_host, after_host) = peers.into_iter().partition(|&peer| rate(peer) > host);
        TierOrder { before_host, after_host }
    }

    fn tiers(&self) -> impl Iterator<Item = SpillTier> {
        let peer = |&peer: &PeerId| SpillTier::Peer(peer);
        let before = self.before_host.iter().map(peer).chain([SpillTier::Host]);
        before.chain(self.after_host.iter().map(peer)).chain([SpillTier::Disk])
    }
}

/// Contents that leave the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub len: Bytes,
    /// Other cards may hold them. False for what is to be read in place on the host.
    pub may_use_peers: bool,
}

impl SpillRoom {
    pub(super) fn of(&mut self, tier: SpillTier) -> &mut Bytes {
        match tier {
            SpillTier::Peer(peer) => &mut self.peers[peer],
            SpillTier::Host => &mut self.host,
            SpillTier::Disk => &mut self.disk,
        }
    }

    /// Returns the room less what was promised.
    pub(super) fn beside(mut self, promised: SpillRoom) -> SpillRoom {
        for (peer, taken) in promised.peers.iter() {
            self.peers[peer] = self.peers[peer].saturating_sub(*taken);
        }
        SpillRoom {
            peers: self.peers,
            host: self.host.saturating_sub(promised.host),
            disk: self.disk.saturating_sub(promised.disk),
        }
    }

    /// Returns the room of all cards together.
    pub(super) fn of_peers(&self) -> Bytes {
        self.peers.iter().map(|(_, free)| *free).sum()
    }

    /// Takes room for contents that leave the card, on one tier.
    pub(super) fn take_of(&mut self, out: Outgoing, tier: SpillTier) -> Option<SpillTier> {
        let is_allowed = out.may_use_peers || !matches!(tier, SpillTier::Peer(_));
        if !is_allowed || *self.of(tier) < out.len {
            return None;
        }
        *self.of(tier) -= out.len;
        Some(tier)
    }

    /// Takes room for contents that leave the card, on the first tier that has enough. O(cards).
    pub(super) fn take(&mut self, out: Outgoing, order: &TierOrder) -> Option<SpillTier> {
        let allowed = |tier: &SpillTier| out.may_use_peers || !matches!(tier, SpillTier::Peer(_));
        let mut tiers = order.tiers().filter(allowed);
        let tier = tiers.find(|&tier| *self.of(tier) >= out.len)?;
        *self.of(tier) -= out.len;
        Some(tier)
    }
}

/// Why too little could be chosen, in bytes of memory on the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shortfall {
    /// Bytes that are missing.
    pub missing: Bytes,
    /// Held by leases.
    pub leased: Bytes,
    /// Pinned.
    pub pinned: Bytes,
    /// In flight: chosen before, or being copied out.
    pub moving: Bytes,
    /// Dirty, with no room on host and disk.
    pub no_room: Bytes,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} more cannot leave the card:", self.missing)?;
        let Shortfall { leased, pinned, moving, no_room, .. } = self;
        write!(f, " {leased} are leased, {pinned} pinned, {moving} in flight,")?;
        write!(f, " {no_room} have no room on host and disk")
    }
}

/// Most rounds of one request.
const MAX_ROUNDS: usize = 8;

/// One spill request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvictionRounds {
    deficit: Bytes,
    freed: Bytes,
    begun: usize,
    host_was_reclaimed: bool,
}

/// What follows a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterRound {
    /// Begin the next round.
    Continue,
    /// Wait for the work behind which memory is pending release; stop if there is none.
    WaitForPendingRelease,
    /// Nothing is missing any more.
    Stop,
}

impl EvictionRounds {
    /// A request to free `deficit` bytes.
    pub fn new(deficit: Bytes) -> EvictionRounds {
        EvictionRounds { deficit, freed: Bytes::ZERO, begun: 0, host_was_reclaimed: false }
    }

    /// Bytes freed so far.
    pub fn freed(&self) -> Bytes {
        self.freed
    }

    /// Bytes still to free.
    pub fn missing(&self) -> Bytes {
        self.deficit.saturating_sub(self.freed)
    }

    /// Begins a round. Returns false if nothing is missing, or all rounds were used.
    pub fn begin(&mut self) -> bool {
        let begins = self.begun < MAX_ROUNDS && !self.missing().is_zero();
        self.begun += usize::from(begins);
        begins
    }

    /// Adds bytes that became free.
    pub fn add(&mut self, freed: Bytes) {
        self.freed += freed;
    }

    /// Returns true if pinned memory is to be reclaimed before the next round: victims found no
    /// room below the card. Once for each request.
    pub fn reclaims_host(&mut self, short: Option<&Shortfall>) -> bool {
        let no_room = short.is_some_and(|short| !short.no_room.is_zero());
        let reclaims = no_room && !self.host_was_reclaimed;
        self.host_was_reclaimed |= reclaims;
        reclaims
    }
}

impl AfterRound {
    /// Decides by what the round freed, and by what the caller of the spill still misses.
    pub fn of(still_missing: Bytes, freed: Bytes) -> AfterRound {
        if still_missing.is_zero() {
            AfterRound::Stop
        } else if freed.is_zero() {
            AfterRound::WaitForPendingRelease
        } else {
            AfterRound::Continue
        }
    }
}

/// Bytes to spill for an allocation that failed: what it lacks beside the largest free region and
/// the growth that the limit leaves, at least one page.
pub(crate) fn allocation_deficit(shortage: &Shortage, page: Bytes) -> Bytes {
    let growth =
        shortage.limit.map_or(Bytes::ZERO, |limit| limit.saturating_sub(shortage.reserved));
    shortage.requested.saturating_sub(shortage.largest + growth).max(page)
}

/// Bytes that a request of another pool lacks of the card: in whole pages what neither the free memory of
/// its pool nor `room` serves, the bytes that the pool may create now.
pub(crate) fn other_pool_deficit(shortage: &Shortage, page: Bytes, room: Bytes) -> Bytes {
    let beyond = shortage.requested.saturating_sub(shortage.largest);
    let missing = beyond.checked_round_up(page).unwrap_or(beyond);
    missing.saturating_sub(room.round_down(page))
}

#[cfg(test)]
mod spill_rounds_tests {
    use super::*;

    fn b(count: u64) -> Bytes {
        Bytes::new(count)
    }

    #[test]
    fn another_pool_lacks_whole_pages_beside_what_it_has_and_may_create() {
        let lacks = |requested, largest, room| {
            let (requested, largest, zero) = (b(requested), b(largest), b(0));
            let (reserved, used, free, waiting) = (zero, zero, zero, zero);
            let (limit, block_for) = (None, None);
            let shortage =
                Shortage { requested, reserved, used, free, largest, waiting, limit, block_for };
            other_pool_deficit(&shortage, b(4), b(room))
        };
        assert_eq!(lacks(16, 0, 0), b(16));
        assert_eq!(lacks(16, 6, 0), b(12));
        assert_eq!(lacks(16, 6, 7), b(8));
        assert_eq!(lacks(1, 0, 3), b(4));
        assert_eq!(lacks(16, 6, 12), b(0));
    }

    #[test]
    fn rounds_end_when_nothing_is_missing() {
        let mut rounds = EvictionRounds::new(b(10));
        assert!(rounds.begin());
        rounds.add(b(7));
        assert_eq!(rounds.missing(), b(3));
        assert!(rounds.begin());
        rounds.add(b(5));
        assert!(!rounds.begin());
        assert_eq!((rounds.freed(), rounds.missing()), (b(12), b(0)));
        assert!(!EvictionRounds::new(b(0)).begin());
    }

    #[test]
    fn rounds_end_after_eight_that_free_too_little() {
        let mut rounds = EvictionRounds::new(b(100));
        let begun = (0..20).take_while(|_| rounds.begin()).count();
        assert_eq!(begun, 8);
    }

    #[test]
    fn the_host_is_reclaimed_once_and_only_where_room_was_lacking() {
        let mut rounds = EvictionRounds::new(b(100));
        let leased = Shortfall { leased: b(1), ..Shortfall::default() };
        let no_room = Shortfall { no_room: b(1), ..Shortfall::default() };
        let asked = [None, Some(&leased), Some(&no_room), Some(&no_room)];
        let reclaims = asked.map(|short| rounds.reclaims_host(short));
        assert_eq!(reclaims, [false, false, true, false]);
    }

    #[test]
    fn what_follows_a_round() {
        for (missing, freed, after) in [
            (0, 0, AfterRound::Stop),
            (0, 5, AfterRound::Stop),
            (5, 0, AfterRound::WaitForPendingRelease),
            (5, 5, AfterRound::Continue),
        ] {
            assert_eq!(AfterRound::of(b(missing), b(freed)), after, "{missing} {freed}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn b(count: u64) -> Bytes {
        Bytes::new(count)
    }

    fn peer(ordinal: u32) -> PeerId {
        PeerId::new(ordinal).expect("a small ordinal")
    }

    #[test]
    fn the_fastest_tier_with_room_is_taken_and_the_disk_last() {
        let mut rates = Rates { to_host: Some(50), ..Rates::default() };
        for (ordinal, rate) in [(1, 300), (2, 400), (3, 20)] {
            rates.to_peer[peer(ordinal)] = Some(rate);
        }
        let mut room = SpillRoom { host: b(16), disk: b(16), ..SpillRoom::default() };
        (1..=3).for_each(|ordinal| room.peers[peer(ordinal)] = b(16));
        let order = TierOrder::by_rate(&room, &rates);
        let out = Outgoing { len: b(16), may_use_peers: true };
        let taken: Vec<_> = std::iter::from_fn(|| room.take(out, &order)).collect();
        let [one, two, three] = [1, 2, 3].map(|ordinal| SpillTier::Peer(peer(ordinal)));
        assert_eq!(taken, [two, one, SpillTier::Host, three, SpillTier::Disk]);
    }

    #[test]
    fn what_is_to_be_read_in_place_goes_to_no_card() {
        let mut room = SpillRoom { host: b(8), ..SpillRoom::default() };
        room.peers[peer(1)] = b(100);
        let order = TierOrder::by_rate(&room, &Rates::default());
        let out = Outgoing { len: b(8), may_use_peers: false };
        assert_eq!(room.take(out, &order), Some(SpillTier::Host));
        assert_eq!(room.take(out, &order), None);
        let out = Outgoing { may_use_peers: true, ..out };
        assert_eq!(room.take(out, &order), Some(SpillTier::Peer(peer(1))), "unknown rates too");
    }
}
