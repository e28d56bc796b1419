//! A policy of the program decides which buffers are evicted first.
//!
//! 1. [`SpillManager::set_eviction_policy`] installs it.
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

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::planner::{
    BufferId, EvictionCandidate, PeerTable, SpillDemand, SpillRoom, VictimChoice,
};
use vramp_core::Bytes;

use super::manager::SpillManager;
use super::state::{Shared, State};

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
    policy: Arc<dyn EvictionPolicy>,
    most: usize,
}

thread_local!(static IN_POLICY: Cell<bool> = const { Cell::new(false) });

impl SpillManager {
    /// Installs a policy that decides which buffers are evicted first, or removes it. It lives as long as
    /// the manager: one that keeps a clone of the manager, or a buffer, keeps both for ever. O(1).
    ///
    /// ```
    /// use std::sync::Arc;
    /// use vramp_defer::Tiers;
    /// use vramp_defer::policy::EvictionRequest;
    /// use vramp_tiers::Bytes;
    ///
    /// let config = r#"
    ///     device = "sim:h200"
    ///     [[gpu]]
    ///     index = 0
    ///     capacity = "256MiB"
    ///     limit = 1.0
    ///     [[host]]
    ///     index = 0
    ///     capacity = "1GiB"
    /// "#;
    /// let tiers = Tiers::from_toml(config)?;
    /// // The most recently used first: for a loop over more buffers than fit.
    /// let policy = |request: &EvictionRequest<'_>| {
    ///     let mut order = request.candidates.to_vec();
    ///     order.sort_by_key(|candidate| candidate.cost.idle_ns);
    ///     order.iter().map(|candidate| candidate.buffer).collect()
    /// };
    /// tiers.manager().set_eviction_policy(Some(Arc::new(policy)));
    /// let buffers = (0..6).map(|_| tiers.buffer(Bytes::mib(64))).collect::<Result<Vec<_>, _>>()?;
    /// for buffer in &buffers {
    ///     buffer.write(Bytes::ZERO, b"contents")?;
    /// }
    /// let resident = buffers.iter().filter(|buffer| buffer.is_resident()).count();
    /// assert_eq!((resident, buffers[0].is_resident()), (4, true));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_eviction_policy(&self, policy: Option<Arc<dyn EvictionPolicy>>) {
        let installed = policy.map(|policy| Installed { most: policy.most_candidates(), policy });
        let before = std::mem::replace(&mut self.shared.lock().policy, installed);
        // After unlocking: it is the program's.
        drop(before);
    }
}

impl Shared {
    /// Chooses victims, by the policy first.
    pub(super) fn choose(&self, missing: Bytes, peers: PeerTable<Bytes>) -> VictimChoice {
        let mut state = self.lock();
        let demand = self.demand_now(&mut state, missing, peers);
        let now_ns = self.driver.now_ns();
        let Some(Installed { policy, most }) = state.policy.clone() else {
            return state.core.choose(&demand, now_ns);
        };
        if IN_POLICY.try_with(Cell::get).unwrap_or(true) {
            return state.core.choose(&demand, now_ns);
        }
        let candidates = state.core.candidates(most, &demand, now_ns);
        state.stats.policy_calls += 1;
        drop(state);
        let order = call(&*policy, &EvictionRequest { missing, candidates: &candidates });
        // It may be the last clone of a policy that was replaced meanwhile.
        drop(policy);

        let mut state = self.lock();
        let demand = self.demand_now(&mut state, missing, peers);
        let now_ns = self.driver.now_ns();
        let Some(order) = order else {
            state.stats.policy_panics += 1;
            return state.core.choose(&demand, now_ns);
        };
        let ordered = state.core.choose_in_order(&order, &demand, now_ns);
        state.stats.policy_ignored += ordered.ignored;
        let chosen = ordered.choice;
        let deficit = missing.saturating_sub(chosen.frees);
        let rest = state.core.choose(&SpillDemand { deficit, ..demand }, now_ns);
        let mut victims = chosen.victims;
        victims.extend(rest.victims);
        VictimChoice { victims, frees: chosen.frees + rest.frees, short: rest.short }
    }

    fn demand_now(
        &self,
        state: &mut State,
        deficit: Bytes,
        peers: PeerTable<Bytes>,
    ) -> SpillDemand {
        state.note_pins(&self.allocator);
        let room = SpillRoom { peers, ..self.room_below() };
        SpillDemand { deficit, rates: state.rates, room }
    }
}

/// Returns the answer of a policy; `None` if it panicked.
fn call(policy: &dyn EvictionPolicy, request: &EvictionRequest<'_>) -> Option<Vec<BufferId>> {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            let _ = IN_POLICY.try_with(|inside| inside.set(false));
        }
    }
    let _ = IN_POLICY.try_with(|inside| inside.set(true));
    let _leave = Leave;
    match catch_unwind(AssertUnwindSafe(|| policy.order(request))) {
        Ok(order) => Some(order),
        Err(panic) => {
            // What was thrown may panic when it is dropped.
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                std::mem::forget(second);
            }
            None
        }
    }
}
