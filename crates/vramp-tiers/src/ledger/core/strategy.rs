//! Strategies: which spaces are candidates for a request, the best first.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use smallvec::SmallVec;

use super::{SpaceId, Tier};

/// Spaces in order of preference.
pub type Candidates = SmallVec<[SpaceId; 4]>;

/// How the candidates of a request are chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// This space alone.
    Specific(SpaceId),
    /// Any space of a tier, the nearest first.
    AnyInTier(Tier),
    /// This space first, then the others of its tier, the nearest first.
    Prefer(SpaceId),
    /// Any space of these tiers, in this order; within a tier the nearest first.
    AnyInTiers(SmallVec<[Tier; 3]>),
    /// Spaces to which data of this space can be spilled: the lower tiers, the next one first.
    Downgrade(SpaceId),
    /// Spaces to which data of this space can be restored: the higher tiers, the next one first.
    Upgrade(SpaceId),
    /// Spaces of one lower tier to which data of a space can be spilled.
    DowngradeTo {
        /// Space of the data.
        from: SpaceId,
        /// Tier below it.
        tier: Tier,
    },
    /// Spaces of one higher tier to which data of a space can be restored.
    UpgradeTo {
        /// Space of the data.
        from: SpaceId,
        /// Tier above it.
        tier: Tier,
    },
}

/// Why a strategy has no candidate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// The strategy starts from a space that does not exist.
    #[error("there is no space {space}: the spaces are {}", names(known))]
    UnknownSpace {
        /// The given space.
        space: SpaceId,
        /// Spaces that exist.
        known: Candidates,
    },
    /// No space is of a tier that the strategy allows.
    #[error("no space is a candidate for {strategy:?}: the spaces are {}", names(known))]
    NoCandidate {
        /// The given strategy.
        strategy: Strategy,
        /// Spaces that exist.
        known: Candidates,
    },
}

fn names(spaces: &[SpaceId]) -> String {
    let names: Vec<String> = spaces.iter().map(SpaceId::to_string).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

impl Strategy {
    /// Returns the candidates among `known`, the best first, each once. Among spaces that the
    /// strategy ranks equal, a smaller `distance` (in any unit) comes first, then a smaller index.
    /// O(n log n).
    ///
    /// # Errors
    /// There is no candidate.
    pub fn candidates<D: Ord>(
        &self,
        known: &[SpaceId],
        distance: impl Fn(SpaceId) -> D,
    ) -> Result<Candidates, StrategyError> {
        if let Some(space) = self.start().filter(|space| !known.contains(space)) {
            return Err(StrategyError::UnknownSpace { space, known: known.into() });
        }
        let mut ranked: SmallVec<[(usize, D, SpaceId); 4]> = known
            .iter()
            .filter_map(|&space| Some((self.rank(space)?, distance(space), space)))
            .collect();
        ranked.sort();
        ranked.dedup_by_key(|&mut (_, _, space)| space);
        if ranked.is_empty() {
            return Err(StrategyError::NoCandidate { strategy: self.clone(), known: known.into() });
        }
        Ok(ranked.into_iter().map(|(_, _, space)| space).collect())
    }

    /// The space that the strategy starts from: distances are measured from it.
    pub fn start(&self) -> Option<SpaceId> {
        match *self {
            Strategy::Specific(space)
            | Strategy::Prefer(space)
            | Strategy::Downgrade(space)
            | Strategy::Upgrade(space)
            | Strategy::DowngradeTo { from: space, .. }
            | Strategy::UpgradeTo { from: space, .. } => Some(space),
            Strategy::AnyInTier(_) | Strategy::AnyInTiers(_) => None,
        }
    }

    /// Rank of a space, the best first; `None` if it is no candidate.
    fn rank(&self, space: SpaceId) -> Option<usize> {
        let down = |from: Tier| (space.tier as usize).checked_sub(from as usize);
        let up = |from: Tier| (from as usize).checked_sub(space.tier as usize);
        match self {
            Strategy::Specific(wanted) => (space == *wanted).then_some(0),
            Strategy::AnyInTier(tier) => (space.tier == *tier).then_some(0),
            Strategy::Prefer(wanted) => {
                (space.tier == wanted.tier).then_some(usize::from(space != *wanted))
            }
            Strategy::AnyInTiers(tiers) => tiers.iter().position(|&tier| tier == space.tier),
            Strategy::Downgrade(from) => down(from.tier).filter(|&steps| steps > 0),
            Strategy::Upgrade(from) => up(from.tier).filter(|&steps| steps > 0),
            Strategy::DowngradeTo { from, tier } => {
                down(from.tier).filter(|&steps| steps > 0 && space.tier == *tier)
            }
            Strategy::UpgradeTo { from, tier } => {
                up(from.tier).filter(|&steps| steps > 0 && space.tier == *tier)
            }
        }
    }
}

/// Source and destination of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkKey {
    /// Source space.
    pub from: SpaceId,
    /// Destination space.
    pub to: SpaceId,
}

/// A transfer rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate {
    /// Bytes per second.
    pub bytes_per_s: u64,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} GB/s", self.bytes_per_s as f64 / 1e9)
    }
}

/// Distance of a space by the rate of its link: the space itself, then faster before slower links,
/// then links of unknown rate. Of equals a [`Strategy`] takes the smallest index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// The space itself.
    Here,
    /// A link of known rate: the faster, the nearer.
    Link(Reverse<Rate>),
    /// A link of unknown rate.
    Unknown,
}

/// Known transfer rates between spaces, for each direction. The spaces need not exist.
///
/// ```
/// use vramp_tiers::links::{LinkKey, Links, Rate};
/// use vramp_tiers::{SpaceId, Strategy};
/// let (gpu, near, far) = (SpaceId::gpu(0), SpaceId::host(1), SpaceId::host(0));
/// let mut links = Links::default();
/// links.set(LinkKey { from: gpu, to: near }, Rate { bytes_per_s: 55_000_000_000 });
/// let down = Strategy::Downgrade(gpu).candidates(&[gpu, far, near], links.distance_from(gpu))?;
/// assert_eq!(down.as_slice(), [near, far]);
/// # Ok::<(), vramp_tiers::reserve::StrategyError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    rates: BTreeMap<LinkKey, Rate>,
}

impl Links {
    /// Sets the rate of a link.
    pub fn set(&mut self, link: LinkKey, rate: Rate) {
        self.rates.insert(link, rate);
    }

    /// Removes a rate and returns it.
    pub fn forget(&mut self, link: LinkKey) -> Option<Rate> {
        self.rates.remove(&link)
    }

    /// Returns the rate of a link; `None` if it is unknown. O(log n).
    pub fn rate(&self, link: LinkKey) -> Option<Rate> {
        self.rates.get(&link).copied()
    }

    /// All known rates, in the order of the spaces.
    pub fn iter(&self) -> impl Iterator<Item = (LinkKey, Rate)> {
        self.rates.iter().map(|(&link, &rate)| (link, rate))
    }

    /// Returns the distance of each space from `from`, for
    /// [`Strategy::candidates`](super::Strategy::candidates).
    pub fn distance_from(&self, from: SpaceId) -> impl Fn(SpaceId) -> Distance {
        move |to| match self.rate(LinkKey { from, to }) {
            _ if from == to => Distance::Here,
            Some(rate) => Distance::Link(Reverse(rate)),
            None => Distance::Unknown,
        }
    }
}

impl FromIterator<(LinkKey, Rate)> for Links {
    fn from_iter<I: IntoIterator<Item = (LinkKey, Rate)>>(rates: I) -> Links {
        Links { rates: rates.into_iter().collect() }
    }
}
