//! Planning: the layout that an arena's next capture follows.
//!
//! 1. A capture ends. If it has the shape of the capture that the layout was planned from, the layout
//!    stays: the second identical capture plans nothing.
//! 2. Otherwise its recording is packed, and the best layout found is used; there always is one, the
//!    capture's own. That ends after a fixed number of visited blocks, which take 3 to 9 ms, or after
//!    as many as fit into a hundredth of the capture's own time if that is more. Visits are counted and
//!    no clock is read, so the same recording gives the same layout on every machine.
//! 3. If that was too few to find anything better than the capture's own layout, which takes more than
//!    20,000 blocks, the next capture of the same shape continues, within the same limit.
//! 4. The next capture begins. If other memory is live than the layout goes around, the recording is
//!    packed again, within the same limit.
//!
//! O(n log n) for a capture of n blocks. No lock is held meanwhile. An arena keeps the recording of
//! one capture.

use std::time::{Duration, Instant};

use vramp_core::{ArenaPolicy, Bytes, CaptureRecording, Packing};

use super::{CaptureReport, GraphArena};
use crate::arenas::ArenaState;

/// Part of the capture's own time that planning may take: a hundredth.
const PLANNING_PART: u32 = 100;

/// Time of a visit.
const NS_PER_VISIT: u128 = 3;

/// Number of visits for a capture that took this time.
fn visits_for(capture: Duration) -> u64 {
    let visits = (capture / PLANNING_PART).as_nanos() / NS_PER_VISIT;
    u64::try_from(visits).unwrap_or(u64::MAX).max(Packing::VISITS_PER_GO)
}

/// Where the layout comes from that packing begins with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// The capture itself: a valid layout, with the reuse that the capture made.
    Capture,
    /// None fits what is live now: the blocks lie on one another without reuse, which is no plan.
    OtherMemory,
}

/// What came of a go.
struct Planned {
    high_water: Bytes,
    visits: u64,
    stopped: bool,
}

impl GraphArena {
    /// Plans a layout for the next capture of the same shape, if configured and not done before.
    /// `begun` is when this capture began. Returns its report.
    pub(super) fn plan(
        &self,
        recording: CaptureRecording,
        kept: Bytes,
        begun: Instant,
    ) -> CaptureReport {
        let (config, visits) = (&self.0.config, visits_for(begun.elapsed()));
        let mut report = CaptureReport {
            blocks: recording.blocks(),
            escaped: recording.escaped(),
            monotone: recording.monotone(),
            taken: recording.high_water(),
            planned: None,
            plan_visits: 0,
            plan_stopped: false,
            lower_bound: recording.lower_bound(),
            kept,
        };
        if !config.replan || config.policy != ArenaPolicy::Reusing {
            return report;
        }
        let planned = self.state(ArenaState::take_plan).flatten();
        let packing = planned.filter(|planned| planned.recording().is_same_shape(&recording));
        let before = packing.as_ref().map(Packing::high_water);
        let packing = packing.unwrap_or_else(|| Packing::new(recording));
        let planned = self.go_on(packing, Start::Capture, before, visits);
        report.planned = Some(planned.high_water);
        (report.plan_visits, report.plan_stopped) = (planned.visits, planned.stopped);
        report
    }

    /// Plans again if other memory is live now than the plan goes around.
    pub(super) fn refresh_plan(&self) {
        if let Some((planned, live)) = self.state(ArenaState::take_outdated_plan).flatten() {
            let packing = Packing::new(planned.recording().among(live));
            self.go_on(packing, Start::OtherMemory, None, Packing::VISITS_PER_GO);
        }
    }

    /// Goes on packing, unless nothing is left to try. Sets the layout unless it is as high as the one
    /// before.
    fn go_on(
        &self,
        mut packing: Packing,
        start: Start,
        before: Option<Bytes>,
        visits: u64,
    ) -> Planned {
        let visited = packing.visits();
        packing.go_on(visits);
        let high_water = packing.high_water();
        let visits = packing.visits() - visited;
        let planned = Planned { high_water, visits, stopped: packing.is_spent() };
        let better = high_water < packing.recording().high_water();
        let layout = (before != Some(high_water) && (better || start == Start::Capture))
            .then(|| packing.layout());
        self.state(|state| state.set_plan(packing, layout));
        planned
    }

    /// Calls a function with the arena's state, unless the allocator was closed. Only one capture at a
    /// time uses its plan.
    fn state<R>(&self, with: impl FnOnce(&mut ArenaState) -> R) -> Option<R> {
        let mut inner = self.0.shared.lock_anyway();
        if inner.closed {
            return None;
        }
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        Some(with(pool.arenas.get_mut(self.0.id)))
    }
}
