//! The cost of an eviction: the time to write back, plus the time to restore times the probability
//! of an early use.
//!
//! A bucket is what leaves together, and what the cost of its eviction depends on.

use std::fmt;

use super::buffer_state::{Buffer, ContentPlace, Hint, Piece};
use super::spill_room::{Outgoing, TierOrder};
use super::{DeferConfig, PieceId, RangeId, Rates, SpillRoom, SpillTier};
use vramp_core::Bytes;

/// Cost of evicting a victim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictionCost {
    /// Class; the lower one leaves first.
    pub standing: EvictionClass,
    /// Priority; within a class the lower one leaves first.
    pub priority: i32,
    /// Contents that have to be copied out.
    pub dirty: Bytes,
    /// Time to copy them out.
    pub write_back_ns: u64,
    /// Time to restore all contents.
    pub refill_ns: u64,
    /// Probability of an early use, in thousandths.
    pub need_per_mille: u32,
    /// Time since the last use.
    pub idle_ns: u64,
}

impl EvictionCost {
    /// Returns the cost: the time to write back, plus the expected time to restore.
    pub fn cost_ns(&self) -> u64 {
        let refill = u128::from(self.refill_ns) * u128::from(self.need_per_mille) / 1000;
        self.write_back_ns.saturating_add(u64::try_from(refill).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for EvictionCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        match self.dirty.is_zero() {
            true => f.write_str("clean, nothing to write")?,
            false => write!(f, "{} to write in {:.2} ms", self.dirty, ms(self.write_back_ns))?,
        }
        let percent = f64::from(self.need_per_mille) / 10.0;
        write!(f, "; {:.2} ms to refill, needed soon by {percent:.1} %", ms(self.refill_ns))?;
        write!(f, "; unused for {:.2} ms", ms(self.idle_ns))?;
        if self.priority != 0 {
            write!(f, "; priority {}", self.priority)?;
        }
        f.write_str(match self.standing {
            EvictionClass::Idle => "",
            EvictionClass::NeededSoon => "; wanted soon, nothing else was left",
            EvictionClass::InUse => "; in use, nothing idle was left",
        })
    }
}

/// What the cost of a unit depends on, beside its bucket and its last use.
pub(super) struct CostModel<'a> {
    pub config: &'a DeferConfig,
    pub rates: &'a Rates,
    pub room: SpillRoom,
    pub order: &'a TierOrder,
    pub now_ns: u64,
}

impl CostModel<'_> {
    /// Returns the cost of a unit of a bucket. In a bucket it is the lower the longer ago the last use.
    pub fn cost(&self, bucket: &BucketKey, last_use_ns: u64) -> EvictionCost {
        let BucketKey { standing, priority, hint, dirty, clean, from, .. } = *bucket;
        let idle_ns = self.now_ns.saturating_sub(last_use_ns);
        let base = EvictionCost { standing, priority, idle_ns, ..EvictionCost::default() };
        if dirty.is_zero() && clean.is_zero() {
            return base;
        }
        let to = if dirty.is_zero() { None } else { self.tier(bucket) };
        let write_back_ns = to.map_or(0, |to| self.rates.out_ns(to, dirty));
        let refill =
            |from: Option<SpillTier>, len| from.map_or(0, |from| self.rates.in_ns(from, len));
        let refill_ns = refill(to, dirty).saturating_add(refill(from, clean));
        let need_per_mille = self.need_per_mille(hint, idle_ns);
        EvictionCost { dirty, write_back_ns, refill_ns, need_per_mille, ..base }
    }

    /// Returns the tier that all dirty contents go to; the disk if none has room for all of them.
    fn tier(&self, bucket: &BucketKey) -> Option<SpillTier> {
        let out = Outgoing { len: bucket.dirty, may_use_peers: bucket.may_use_peers };
        self.room.clone().take(out, self.order).or(Some(SpillTier::Disk))
    }

    /// Probability of an early use: nearly 1 right after a use, one half after the recency, falling
    /// towards 0.
    pub fn need_per_mille(&self, hint: Hint, idle_ns: u64) -> u32 {
        let recency = u128::from(self.config.recency_ns.max(1));
        match hint {
            Hint::WillNeed => 1000,
            Hint::WontNeed => 0,
            Hint::None => (1000 * recency / (recency + u128::from(idle_ns))) as u32,
        }
    }
}

/// Classes of victims. A lower class leaves first, whatever it costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EvictionClass {
    /// No reason to keep it.
    #[default]
    Idle,
    /// Restored within the cooldown, or hinted as needed soon.
    NeededSoon,
    /// Work on it is in flight: freeing its memory takes a wait.
    InUse,
}

/// What leaves together: a piece, or all pieces of a group that have memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Unit {
    Piece(PieceId),
    Group(RangeId),
}

/// All that the cost of evicting a unit depends on, except for its last use. In the order of the
/// classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BucketKey {
    pub standing: EvictionClass,
    pub priority: i32,
    pub hint: Hint,
    /// Memory that becomes free.
    pub frees: Bytes,
    /// Contents without a copy, rounded up.
    pub dirty: Bytes,
    /// Contents with a copy, rounded up.
    pub clean: Bytes,
    /// Slowest tier that clean contents are restored from.
    pub from: Option<SpillTier>,
    /// Other cards may hold the contents.
    pub may_use_peers: bool,
}

impl BucketKey {
    /// Adds a piece that leaves together with the others.
    pub fn add(&mut self, piece: &Piece, buffer: &Buffer) {
        self.standing = self.standing.max(standing(buffer));
        self.priority = self.priority.max(buffer.priority);
        self.hint = self.hint.sooner(buffer.hint);
        if piece.place != ContentPlace::Card {
            return;
        }
        match piece.copies.best() {
            None => {
                self.dirty += piece.len;
                self.may_use_peers &= !buffer.readable;
            }
            Some(from) => {
                self.clean += piece.len;
                self.from = self.from.max(Some(from));
            }
        }
    }
}

fn standing(buffer: &Buffer) -> EvictionClass {
    if !buffer.uses.is_empty() {
        EvictionClass::InUse
    } else if buffer.hint == Hint::WillNeed || buffer.cools_at.is_some() {
        EvictionClass::NeededSoon
    } else {
        EvictionClass::Idle
    }
}
