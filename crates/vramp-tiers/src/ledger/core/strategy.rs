//! Which spaces will do, the best first.

use smallvec::SmallVec;

use super::{SpaceId, Tier};

/// Spaces in order of preference.
pub type Candidates = SmallVec<[SpaceId; 4]>;

/// How to choose spaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// This one, and no other.
    Specific(SpaceId),
    /// Any of a tier, the nearest first.
    AnyInTier(Tier),
    /// This one first, then the others of its tier, the nearest first.
    Prefer(SpaceId),
    /// Any of these tiers, in their order; in a tier the nearest first.
    AnyInTiers(SmallVec<[Tier; 3]>),
    /// Where data of this space can go to make room: the tiers below it, the next one first.
    Downgrade(SpaceId),
    /// Where data of this space can go to be used: the tiers above it, the next one first.
    Upgrade(SpaceId),
}

/// Why a strategy names no space.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// It starts from a space that does not exist.
    #[error("there is no space {space}: {} exist", names(known))]
    UnknownSpace {
        /// What was given.
        space: SpaceId,
        /// What exists.
        known: Candidates,
    },
    /// No space is of the kinds it allows.
    #[error("no space will do for {strategy:?}: {} exist", names(known))]
    NoCandidate {
        /// What was given.
        strategy: Strategy,
        /// What exists.
        known: Candidates,
    },
}

fn names(spaces: &[SpaceId]) -> String {
    let names: Vec<String> = spaces.iter().map(SpaceId::to_string).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

impl Strategy {
    /// The spaces of `known` that will do, the best first, each once. Of those that the strategy
    /// holds equal the one with the smallest `distance` (in any unit: hops, nanoseconds a byte)
    /// comes first, then the one with the smallest index. O(n log n).
    ///
    /// # Errors
    /// There is none.
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

    /// The space that the strategy starts from, whose links tell which of its equals are near.
    pub fn start(&self) -> Option<SpaceId> {
        match *self {
            Strategy::Specific(space)
            | Strategy::Prefer(space)
            | Strategy::Downgrade(space)
            | Strategy::Upgrade(space) => Some(space),
            Strategy::AnyInTier(_) | Strategy::AnyInTiers(_) => None,
        }
    }

    /// How good a space is, the smaller the better; `None` for one that will not do.
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
        }
    }
}
