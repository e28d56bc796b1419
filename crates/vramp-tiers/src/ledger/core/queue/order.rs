//! The order of the wait queue, and how far waiters may still be overtaken.

use std::cmp::Reverse;

use smallvec::SmallVec;

use super::{Overtaking, Priority, Request, WaiterId};
use crate::ledger::core::SpaceId;
use vramp_core::Bytes;

/// A waiter's position: urgent waiters by age, then the others by priority and age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub urgent: Reverse<bool>,
    pub priority: Reverse<Priority>,
    pub id: WaiterId,
}

#[derive(Clone, Debug)]
pub(super) struct Waiter {
    /// The request, with only those candidates that are large enough.
    pub request: Request,
    pub urgent: bool,
    /// Overtaking that this waiter still permits.
    pub left: Overtaking,
    /// Grants to younger requests of higher priority so far.
    pub passed: u32,
}

impl Waiter {
    pub(super) fn rank(&self, id: WaiterId) -> Rank {
        // Urgent waiters are ordered by age alone: by priority they could overtake one another
        // without end.
        let priority = if self.urgent { Priority::default() } else { self.request.priority };
        Rank { urgent: Reverse(self.urgent), priority: Reverse(priority), id }
    }

    pub(super) fn waits_for(&self, space: SpaceId) -> bool {
        self.request.candidates.contains(&space)
    }
}

/// Overtaking that the waiters seen so far permit, for each space.
#[derive(Default)]
pub(super) struct Allowances(SmallVec<[(SpaceId, Overtaking); 8]>);

impl Allowances {
    /// True if a request of `bytes` may overtake all waiters seen so far in `space`.
    pub(super) fn admit(&self, space: SpaceId, bytes: Bytes) -> bool {
        let allowance = self.0.iter().find(|(restricted, _)| *restricted == space);
        allowance.is_none_or(|(_, left)| left.count > 0 && left.bytes >= bytes)
    }

    /// Adds one more waiter. True if less is permitted than before.
    pub(super) fn restrict(&mut self, waiter: &Waiter) -> bool {
        let mut restricted = false;
        for &space in &waiter.request.candidates {
            match self.0.iter_mut().find(|(known, _)| *known == space) {
                Some((_, left)) => {
                    let before = *left;
                    left.count = left.count.min(waiter.left.count);
                    left.bytes = left.bytes.min(waiter.left.bytes);
                    restricted |= before != *left;
                }
                None => {
                    self.0.push((space, waiter.left));
                    restricted = true;
                }
            }
        }
        restricted
    }
}
