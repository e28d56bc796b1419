//! Free space below the card, and the order in which its tiers are tried.

use smallvec::SmallVec;

use super::{PeerId, PeerTable, Rates, SpillTier};
use vramp_core::Bytes;

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
