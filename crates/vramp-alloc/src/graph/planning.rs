//! Planning: the layout that an arena's next capture follows.
//!
//! 1. A capture ends. If it has the shape of the capture that the layout was planned from, the layout
//!    stays: the second identical capture plans nothing.
//! 2. Otherwise its recording is packed. That ends after a fixed number of visited blocks, with the
//!    same layout on each machine, or when time is up. The best layout so far is used; there always is
//!    one, the capture's own.
//! 3. If time was up while a capture of many thousand blocks was packed for the first time, the next
//!    capture of the same shape continues, within the same limit.
//! 4. The next capture begins. If other memory is live than the layout goes around, the recording is
//!    packed again, within the same limit.
//!
//! O(n log n) for a capture of n blocks. No lock is held meanwhile. An arena keeps the recording of
//! one capture.

use std::time::{Duration, Instant};

use vramp_core::{ArenaPolicy, Bytes, CaptureRecording, Packing};

use super::{CaptureReport, GraphArena};
use crate::arenas::ArenaState;

/// Planning takes no longer than the larger of this, with some milliseconds around it, and a part of
/// the capture's own time.
const PLANNING_MOST: Duration = Duration::from_millis(8);

/// That part: a hundredth.
const PLANNING_PART: u32 = 100;

/// Where the layout comes from that packing begins with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// The capture itself: a valid layout, with the reuse that the capture made.
    Capture,
    /// None fits what is live now: the blocks lie on one another without reuse, which is no plan.
    OtherMemory,
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
        let (config, ended) = (&self.0.config, Instant::now());
        let mut report = CaptureReport {
            blocks: recording.blocks(),
            escaped: recording.escaped(),
            monotone: recording.monotone(),
            taken: recording.high_water(),
            planned: None,
            plan_visits: 0,
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
        let deadline = Instant::now() + PLANNING_MOST.max((ended - begun) / PLANNING_PART);
        (report.planned, report.plan_visits) =
            self.go_on(packing, Start::Capture, before, deadline);
        report
    }

    /// Plans again if other memory is live now than the plan goes around.
    pub(super) fn refresh_plan(&self) {
        if let Some((planned, live)) = self.state(ArenaState::take_outdated_plan).flatten() {
            let deadline = Instant::now() + PLANNING_MOST;
            let packing = Packing::new(planned.recording().among(live));
            self.go_on(packing, Start::OtherMemory, None, deadline);
        }
    }

    /// Goes on packing. Sets the layout unless it is as high as the one before. Returns its high-water
    /// mark, and the number of blocks visited.
    fn go_on(
        &self,
        mut packing: Packing,
        start: Start,
        before: Option<Bytes>,
        deadline: Instant,
    ) -> (Option<Bytes>, u64) {
        let visited = packing.visits();
        packing.go_on(|| Instant::now() < deadline);
        let (high_water, visits) = (packing.high_water(), packing.visits() - visited);
        let better = high_water < packing.recording().high_water();
        let layout = (before != Some(high_water) && (better || start == Start::Capture))
            .then(|| packing.layout());
        self.state(|state| state.set_plan(packing, layout));
        (Some(high_water), visits)
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
