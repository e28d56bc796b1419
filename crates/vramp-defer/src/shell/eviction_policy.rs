//! A policy of the program decides which buffers are evicted first.
//!
//! 1. [`SpillManager::set_eviction_policy`](super::SpillManager::set_eviction_policy) installs it.
//! 2. When memory is short, the planner lists buffers that may leave. The policy returns some of them in
//!    its order; the thread that needs memory calls it, with no lock held.
//! 3. The planner checks the answer under the lock and takes victims in that order until enough is freed:
//!    a buffer that is held by then, or is unknown, is ignored and counted. What is still missing is chosen
//!    by cost, as without a policy.
//!
//! Growth: O(candidates log candidates) for a round, of which the policy says the most; not by the number of
//! buffers. Without a policy a round compares one pointer.
//!
//! Deliberately absent: buffers that a policy protects. Priorities, pins and leases do that.

use std::sync::Arc;

use crate::planner::{BufferId, EvictionCandidate};
use vramp_core::Bytes;

/// Decides which buffers are evicted first. A closure that takes an [`EvictionRequest`] is one.
pub trait EvictionPolicy: Send + Sync {
    /// Returns buffers in the order in which they shall leave. They need not be among the candidates.
    /// Victims are taken from the front until enough is freed; if the list ends before, the manager chooses
    /// the rest. An empty list leaves all to the manager.
    ///
    /// Called by a thread that needs memory, perhaps in the middle of an allocation or with the locks of the
    /// program that it holds there. No lock of the manager is held: the policy may query it, lease buffers
    /// without waiting, and set priorities. Evictions that it causes itself are chosen without it. A panic
    /// is caught and counted ([`SpillStats::policy_panics`](super::SpillStats::policy_panics)), and the
    /// manager chooses.
    fn order(&self, request: &EvictionRequest<'_>) -> Vec<BufferId>;

    /// Returns how many pieces or groups are looked at for candidates; 256 by default. Queried once, when
    /// the policy is installed.
    fn most_candidates(&self) -> usize {
        256
    }
}

impl<F> EvictionPolicy for F
where
    F: Fn(&EvictionRequest<'_>) -> Vec<BufferId> + Send + Sync,
{
    fn order(&self, request: &EvictionRequest<'_>) -> Vec<BufferId> {
        self(request)
    }
}

/// What an [`EvictionPolicy`] decides about.
#[derive(Clone, Copy, Debug)]
pub struct EvictionRequest<'a> {
    /// Bytes of the card to free.
    pub missing: Bytes,
    /// Buffers that may leave, in the order in which the manager would choose.
    pub candidates: &'a [EvictionCandidate],
}

/// An installed policy.
#[derive(Clone)]
pub(super) struct Installed {
    pub policy: Arc<dyn EvictionPolicy>,
    pub most: usize,
}
