//! Transfer rates between the card and the spill tiers: estimates of the time that a move takes.

use super::{PeerTable, SpillTier};
use vramp_core::Bytes;

/// Measured bytes per second. An unknown rate counts as 300 GB/s for another card, 25 GB/s for the
/// host and 2.5 GB/s for the disk: only their order matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// From the card to other cards.
    pub to_peer: PeerTable<Option<u64>>,
    /// From other cards to the card.
    pub from_peer: PeerTable<Option<u64>>,
    /// From the card to the host.
    pub to_host: Option<u64>,
    /// From the host to the card.
    pub from_host: Option<u64>,
    /// From the card to the disk.
    pub to_disk: Option<u64>,
    /// From the disk to the card.
    pub from_disk: Option<u64>,
}

impl Rates {
    /// Records a copy to `to`.
    pub fn record_out(&mut self, to: SpillTier, bytes: Bytes, took_ns: u64) {
        let rate = match to {
            SpillTier::Peer(peer) => &mut self.to_peer[peer],
            SpillTier::Host => &mut self.to_host,
            SpillTier::Disk => &mut self.to_disk,
        };
        *rate = Some(averaged(*rate, bytes, took_ns));
    }

    /// Records a copy from `from`.
    pub fn record_in(&mut self, from: SpillTier, bytes: Bytes, took_ns: u64) {
        let rate = match from {
            SpillTier::Peer(peer) => &mut self.from_peer[peer],
            SpillTier::Host => &mut self.from_host,
            SpillTier::Disk => &mut self.from_disk,
        };
        *rate = Some(averaged(*rate, bytes, took_ns));
    }

    /// Returns the rate of copies to `to`, assumed if it is unknown.
    pub(super) fn out_rate(&self, to: SpillTier) -> u64 {
        let rate = match to {
            SpillTier::Peer(peer) => self.to_peer[peer],
            SpillTier::Host => self.to_host,
            SpillTier::Disk => self.to_disk,
        };
        known_or_assumed(rate, to)
    }

    pub(super) fn out_ns(&self, to: SpillTier, bytes: Bytes) -> u64 {
        move_ns(self.out_rate(to), bytes)
    }

    pub(super) fn in_ns(&self, from: SpillTier, bytes: Bytes) -> u64 {
        let rate = match from {
            SpillTier::Peer(peer) => self.from_peer[peer],
            SpillTier::Host => self.from_host,
            SpillTier::Disk => self.from_disk,
        };
        move_ns(known_or_assumed(rate, from), bytes)
    }
}

/// Exponential moving average: the new sample weighs one seventh. The first sample counts in full.
fn averaged(known: Option<u64>, bytes: Bytes, took_ns: u64) -> u64 {
    let sample = u128::from(bytes.count()) * 1_000_000_000 / u128::from(took_ns.max(1));
    let sample = u64::try_from(sample).unwrap_or(u64::MAX);
    known.map_or(sample, |known| known / 7 * 6 + sample / 7)
}

fn known_or_assumed(rate: Option<u64>, tier: SpillTier) -> u64 {
    let assumed = match tier {
        SpillTier::Peer(_) => 300_000_000_000,
        SpillTier::Host => 25_000_000_000,
        SpillTier::Disk => 2_500_000_000,
    };
    rate.filter(|&rate| rate > 0).unwrap_or(assumed)
}

/// Nanoseconds to move `bytes`, in either direction.
fn move_ns(rate: u64, bytes: Bytes) -> u64 {
    let ns = u128::from(bytes.count()) * 1_000_000_000 / u128::from(rate);
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_average_of_its_samples_weighted_to_the_new() {
        for (known, bytes, took_ns, then) in [
            (None, 700, 1_000_000_000, 700),
            (Some(700), 700, 1_000_000_000, 700),
            (Some(700), 1400, 1_000_000_000, 800),
            (Some(700), 0, 1_000_000_000, 600),
            (Some(7), 7, 0, 6 + 1_000_000_000),
        ] {
            let averaged = averaged(known, Bytes::new(bytes), took_ns);
            assert_eq!(averaged, then, "{bytes} B in {took_ns} ns after {known:?}");
        }
    }

    #[test]
    fn each_direction_has_a_rate_of_its_own() {
        let mut rates = Rates::default();
        let second = 1_000_000_000;
        rates.record_out(SpillTier::Host, Bytes::new(1), second);
        rates.record_in(SpillTier::Host, Bytes::new(2), second);
        rates.record_out(SpillTier::Disk, Bytes::new(3), second);
        rates.record_in(SpillTier::Disk, Bytes::new(4), second);
        let Rates { to_host, from_host, to_disk, from_disk, .. } = rates;
        assert_eq!([to_host, from_host, to_disk, from_disk], [1, 2, 3, 4].map(Some));
    }

    #[test]
    fn an_unknown_rate_makes_the_disk_slower_than_the_host() {
        let rates = Rates::default();
        let gigabyte = Bytes::new(1_000_000_000);
        assert_eq!(rates.out_ns(SpillTier::Host, gigabyte), 40_000_000);
        assert_eq!(rates.in_ns(SpillTier::Disk, gigabyte), 400_000_000);
    }
}
