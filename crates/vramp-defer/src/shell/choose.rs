//! The choice of victims, by the program's policy if there is one.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::planner::{BufferId, PeerTable, SpillDemand, SpillRoom, VictimChoice};
use vramp_core::Bytes;

use super::eviction_policy::{EvictionPolicy, EvictionRequest, Installed};
use super::manager::SpillManager;
use super::state::{Shared, State};

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
