//! Strategies: which spaces are candidates for a request, the best first.

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
