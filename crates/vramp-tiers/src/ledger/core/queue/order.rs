//! Who stands where in the queue, and how far those ahead may be passed.

use std::cmp::Reverse;

use smallvec::SmallVec;

use super::{Overtaking, Priority, Request, WaiterId};
use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

/// A place in the order: urgent ones by age, then the others by priority and age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub urgent: Reverse<bool>,
    pub priority: Reverse<Priority>,
    pub id: WaiterId,
}

#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// With those candidates that are large enough.
    pub request: Request,
    pub urgent: bool,
    /// What those behind it may still take before it.
    pub left: Overtaking,
    /// How often it was passed by younger ones of higher priority.
    pub passed: u32,
}

impl Waiter {
    pub(super) fn rank(&self, id: WaiterId) -> Rank {
        // Among the urgent only age counts: by priority they could pass one another for ever.
        let priority = if self.urgent { Priority::default() } else { self.request.priority };
        Rank { urgent: Reverse(self.urgent), priority: Reverse(priority), id }
    }

    pub(super) fn waits_for(&self, space: SpaceId) -> bool {
        self.request.candidates.contains(&space)
    }
}

/// What those ahead leave to the others, by space.
#[derive(Default)]
pub(super) struct Allowances(SmallVec<[(SpaceId, Overtaking); 8]>);

impl Allowances {
    pub(super) fn admit(&self, space: SpaceId, bytes: Bytes) -> bool {
        let gate = self.0.iter().find(|(gated, _)| *gated == space);
        gate.is_none_or(|(_, left)| left.count > 0 && left.bytes >= bytes)
    }

    /// True if less is left than before.
    pub(super) fn narrow(&mut self, waiter: &Waiter) -> bool {
        let mut narrower = false;
        for &space in &waiter.request.candidates {
            match self.0.iter_mut().find(|(gated, _)| *gated == space) {
                Some((_, left)) => {
                    let before = *left;
                    left.count = left.count.min(waiter.left.count);
                    left.bytes = left.bytes.min(waiter.left.bytes);
                    narrower |= before != *left;
                }
                None => {
                    self.0.push((space, waiter.left));
                    narrower = true;
                }
            }
        }
        narrower
    }
}
