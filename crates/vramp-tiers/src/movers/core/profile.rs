//! Measured transfer rates between spaces.

use crate::ledger::core::{LinkKey, Rate, SpaceId};
use serde::{Deserialize, Serialize};
use vramp_core::Bytes;

/// One size, moved from one space to another without other traffic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredLink {
    /// Space of the source.
    #[serde(with = "space_text")]
    pub from: SpaceId,
    /// Space of the target.
    #[serde(with = "space_text")]
    pub to: SpaceId,
    /// Bytes moved.
    pub size_bytes: u64,
    /// Nanoseconds from the first call until the host saw all bytes arrive. Median over rounds.
    pub took_ns: u64,
    /// Bytes per second.
    pub bytes_per_s: u64,
}

/// One size, moved in both directions at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredPair {
    /// Space of the device.
    #[serde(with = "space_text")]
    pub gpu: SpaceId,
    /// Space of the host memory.
    #[serde(with = "space_text")]
    pub host: SpaceId,
    /// Bytes moved in each direction.
    pub size_bytes: u64,
    /// Nanoseconds until both had arrived. Median over rounds.
    pub took_ns: u64,
    /// Bytes per second, both directions added.
    pub bytes_per_s: u64,
}

/// A link and size that could not be measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmeasuredLink {
    /// Space of the source.
    #[serde(with = "space_text")]
    pub from: SpaceId,
    /// Space of the target.
    #[serde(with = "space_text")]
    pub to: SpaceId,
    /// Bytes that were to move.
    pub size_bytes: u64,
    /// Error text.
    pub reason: String,
}

/// Results of a [`Profiler`](crate::movers::Profiler). Serializable, for example as TOML or JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Bytes that the movers queued at a time.
    pub step_bytes: u64,
    /// Timed rounds for each link and size.
    pub rounds: u32,
    /// Each link and size alone.
    #[serde(default)]
    pub links: Vec<MeasuredLink>,
    /// Device and host in both directions at once.
    #[serde(default)]
    pub both_ways: Vec<MeasuredPair>,
    /// Links and sizes that could not be measured.
    #[serde(default)]
    pub unmeasured: Vec<UnmeasuredLink>,
}

impl Profile {
    /// Returns the rate of the largest size of each link. Collect it into
    /// [`Links`](crate::links::Links).
    pub fn rates(&self) -> impl Iterator<Item = (LinkKey, Rate)> {
        let largest = |link: &&MeasuredLink| {
            let same = |other: &&MeasuredLink| (other.from, other.to) == (link.from, link.to);
            let most = self.links.iter().filter(same).map(|other| other.size_bytes).max();
            most == Some(link.size_bytes)
        };
        self.links.iter().filter(largest).map(|link| {
            let MeasuredLink { from, to, bytes_per_s, .. } = *link;
            (LinkKey { from, to }, Rate { bytes_per_s })
        })
    }
}

/// Returns bytes per second.
pub(in crate::movers) fn rate(bytes: Bytes, took_ns: u64) -> u64 {
    let rate = u128::from(bytes.count()) * 1_000_000_000 / u128::from(took_ns.max(1));
    rate.try_into().unwrap_or(u64::MAX)
}

/// Returns the median of `times`, the higher one of two. Zero for none.
pub(in crate::movers) fn median(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Serializes spaces as they are printed: `gpu0`.
mod space_text {
    use crate::ledger::core::{SpaceId, Tier};
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(space: &SpaceId, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(space)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SpaceId, D::Error> {
        let text = String::deserialize(from)?;
        let parsed = Tier::ALL.iter().find_map(|tier| {
            let index = text.strip_prefix(&tier.to_string())?.parse().ok()?;
            Some(SpaceId { tier: *tier, index })
        });
        parsed.ok_or_else(|| {
            D::Error::custom(format!("{text} is no space: use a name like gpu0 or host1"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_bytes_per_second_and_never_divide_by_zero() {
        let gib = Bytes::gib(1);
        for (bytes, took_ns, expected) in [
            (Bytes::new(500), 1_000_000_000, 500),
            (gib, 1_000_000, gib.count() * 1000),
            (Bytes::ZERO, 10, 0),
            (Bytes::new(3), 0, 3_000_000_000),
            (Bytes::new(u64::MAX), 1, u64::MAX),
        ] {
            assert_eq!(rate(bytes, took_ns), expected, "{bytes} in {took_ns} ns");
        }
    }

    #[test]
    fn the_median_ignores_outliers() {
        for (times, expected) in
            [(vec![], 0), (vec![7], 7), (vec![900, 3, 4], 4), (vec![1, 9, 5, 2], 5)]
        {
            assert_eq!(median(times.clone()), expected, "{times:?}");
        }
    }

    #[test]
    fn the_largest_size_gives_the_rate_and_the_smallest_the_latency() {
        let (from, to) = (SpaceId::gpu(0), SpaceId::host(0));
        let link = |size_bytes, took_ns, bytes_per_s| MeasuredLink {
            from,
            to,
            size_bytes,
            took_ns,
            bytes_per_s,
        };
        let links = vec![link(64, 2, 32), link(4, 1, 4), link(16, 5, 3)];
        let profile = Profile { links, ..Profile::default() };
        let rates: Vec<_> = profile.rates().map(|(_, rate)| rate.bytes_per_s).collect();
        assert_eq!(rates, [32]);
    }
}
