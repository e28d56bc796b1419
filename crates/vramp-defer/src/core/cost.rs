//! The cost of an eviction: the time to write back, plus the time to restore times the probability
//! of an early use.

use std::fmt;

use super::buffer_state::{Buffer, Hint};
use super::piece::ContentPlace;
use super::{DeferConfig, Rates, SpillTier};
use vramp_core::Bytes;

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

    /// Adds a piece that leaves together with this one.
    pub(super) fn join(&mut self, other: EvictionCost) {
        self.standing = self.standing.max(other.standing);
        self.priority = self.priority.max(other.priority);
        self.dirty += other.dirty;
        self.write_back_ns = self.write_back_ns.saturating_add(other.write_back_ns);
        self.refill_ns = self.refill_ns.saturating_add(other.refill_ns);
        self.need_per_mille = self.need_per_mille.max(other.need_per_mille);
        self.idle_ns = self.idle_ns.min(other.idle_ns);
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

/// What the cost of a buffer's pieces depends on.
pub(super) struct CostModel<'a> {
    pub config: &'a DeferConfig,
    pub rates: &'a Rates,
    pub now_ns: u64,
}

impl CostModel<'_> {
    /// Returns the cost of one piece; `to` is the tier that dirty contents go to.
    pub fn cost(&self, buffer: &Buffer, index: usize, to: Option<SpillTier>) -> EvictionCost {
        let piece = &buffer.pieces[index];
        let idle_ns = self.now_ns.saturating_sub(buffer.last_use_ns);
        let base = EvictionCost {
            standing: self.standing(buffer),
            priority: buffer.priority,
            idle_ns,
            ..EvictionCost::default()
        };
        if piece.place != ContentPlace::Card {
            return base;
        }
        let dirty = if piece.copies.any() { Bytes::ZERO } else { piece.len };
        let write_back_ns = to.map_or(0, |to| self.rates.out_ns(to, dirty));
        let source = piece.copies.best().or(to);
        let refill_ns = source.map_or(0, |from| self.rates.in_ns(from, piece.len));
        let need_per_mille = self.need_per_mille(buffer.hint, idle_ns);
        EvictionCost { dirty, write_back_ns, refill_ns, need_per_mille, ..base }
    }

    fn standing(&self, buffer: &Buffer) -> EvictionClass {
        let cool_at = buffer.retrieved_ns.map(|at| at.saturating_add(self.config.cooldown_ns));
        if !buffer.uses.is_empty() {
            EvictionClass::InUse
        } else if buffer.hint == Hint::WillNeed || cool_at.is_some_and(|at| self.now_ns < at) {
            EvictionClass::NeededSoon
        } else {
            EvictionClass::Idle
        }
    }

    /// Probability of an early use: nearly 1 right after a use, one half after the recency, falling
    /// towards 0.
    fn need_per_mille(&self, hint: Hint, idle_ns: u64) -> u32 {
        let recency = u128::from(self.config.recency_ns.max(1));
        match hint {
            Hint::WillNeed => 1000,
            Hint::WontNeed => 0,
            Hint::None => (1000 * recency / (recency + u128::from(idle_ns))) as u32,
        }
    }
}
