//! How fast data moves between spaces, as it was measured.

use crate::ledger::core::{LinkKey, Rate, SpaceId};
use serde::{Deserialize, Serialize};
use vramp_core::Bytes;

/// One size on its way from one space to another, with nothing else on the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredLink {
    /// From where.
    #[serde(with = "space_text")]
    pub from: SpaceId,
    /// To where.
    #[serde(with = "space_text")]
    pub to: SpaceId,
    /// How much.
    pub size_bytes: u64,
    /// How long that took, from the first call until the host knew that all had arrived: the median
    /// over rounds.
    pub took_ns: u64,
    /// The rate that this makes.
    pub bytes_per_s: u64,
}

/// One size each way at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredPair {
    /// The card.
    #[serde(with = "space_text")]
    pub gpu: SpaceId,
    /// The host's memory.
    #[serde(with = "space_text")]
    pub host: SpaceId,
    /// How much each way.
    pub size_bytes: u64,
    /// Until both had arrived: the median over rounds.
    pub took_ns: u64,
    /// Both rates together.
    pub bytes_per_s: u64,
}

/// What could not be measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmeasuredLink {
    /// From where.
    #[serde(with = "space_text")]
    pub from: SpaceId,
    /// To where.
    #[serde(with = "space_text")]
    pub to: SpaceId,
    /// How much.
    pub size_bytes: u64,
    /// Why not.
    pub reason: String,
}

/// What a [`Profiler`](super::Profiler) found. To be kept as TOML, JSON or the like.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// How much was queued at a time.
    pub step_bytes: u64,
    /// How often each was measured.
    pub rounds: u32,
    /// Each way and size alone.
    #[serde(default)]
    pub links: Vec<MeasuredLink>,
    /// Card and host both ways at once.
    #[serde(default)]
    pub both_ways: Vec<MeasuredPair>,
    /// What could not be measured.
    #[serde(default)]
    pub unmeasured: Vec<UnmeasuredLink>,
}

impl Profile {
    /// For each way the rate of the largest size, ready to be collected into [`Links`](crate::ledger::core::Links).
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

    /// How long the smallest size takes from one space to the other. `None` if it was not measured.
    pub fn latency_ns(&self, from: SpaceId, to: SpaceId) -> Option<u64> {
        let of_way = self.links.iter().filter(|link| (link.from, link.to) == (from, to));
        of_way.min_by_key(|link| link.size_bytes).map(|link| link.took_ns)
    }
}

/// So many bytes in so many nanoseconds, in bytes per second.
pub(super) fn rate(bytes: Bytes, took_ns: u64) -> u64 {
    let rate = u128::from(bytes.count()) * 1_000_000_000 / u128::from(took_ns.max(1));
    rate.try_into().unwrap_or(u64::MAX)
}

/// Spaces as they are printed: `gpu0`.
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
        parsed.ok_or_else(|| D::Error::custom(format!("{text} is no space: write gpu0 or host1")))
    }
}
