//! The decision of malloc: a hit, a plan, or a shortage.
//!
//! Each call climbs from the attempt's rung up to the first that has something to do, in the order
//! of [`Rung`]. `arena.rs` and `vpmm.rs` have the same climb for arenas and for the preset `vpmm`.
//! The end of the ladder is the [`Shortage`](crate::Shortage), which is the user's error.
//!
//! Where many threads allocate at once, growth comes before other streams' memory: threads that
//! took from each other's heaps and streams at every miss would do nothing else.

use crate::Bytes;
use crate::pool::config::{BLOCK_ALIGN, Mixed, Policy};
use crate::pool::plan::build::Build;
use crate::pool::plan::decision::{Climb, Decision};
use crate::pool::request::{Attempt, Rung, Step, Want};
use crate::pool::view::View;

impl View<'_> {
    /// Decides what the pool, or the shell, does next for a request. No heap memory on a hit.
    pub(in crate::pool) fn decide(self, attempt: &mut Attempt) -> Decision {
        loop {
            let rung = attempt.rung;
            let climb = match (&self.config.policy, attempt.want) {
                (Policy::Vpmm, _) => self.climb_vpmm(attempt),
                (Policy::Mixed(mixed), Want::Arena { arena, from }) => {
                    self.climb_arena(arena, from, attempt, mixed)
                }
                (Policy::Mixed(mixed), Want::Block | Want::Slab { .. }) => {
                    let Some(len) = attempt.request.size.checked_round_up(BLOCK_ALIGN) else {
                        return Decision::Return(Step::Short(self.shortage(attempt)));
                    };
                    self.climb_block(len, attempt, mixed)
                }
            };
            match climb {
                Climb::Up => attempt.rung = rung.next(),
                Climb::ThenUp(decision) => {
                    attempt.rung = rung.next();
                    return decision;
                }
                Climb::Stay(decision) => return decision,
            }
        }
    }

    fn climb_block(self, len: Bytes, attempt: &mut Attempt, mixed: &Mixed) -> Climb {
        let stream = attempt.request.stream;
        let carve = |region| Climb::Stay(Decision::Carve { region, len });
        match attempt.rung {
            Rung::Own => {
                let preferred = attempt.want.carved(len, Bytes::MAX);
                let fit = self.fit(stream, preferred).or_else(|| self.fit(stream, len));
                fit.map_or(Climb::Up, carve)
            }
            Rung::Early if attempt.prefer_growth => self.grow_first(len, attempt, mixed),
            Rung::Learn if self.streams.any_pending() => {
                Climb::ThenUp(Decision::Return(Step::Poll))
            }
            Rung::Promote => Climb::ThenUp(Decision::Promote),
            Rung::Idle => match self.fit(stream, len) {
                Some(region) => carve(region),
                None => self
                    .smallest_idle(stream, len)
                    .map_or(Climb::Up, |idle| Climb::ThenUp(Decision::TakeOver { idle, len })),
            },
            Rung::Gather => Climb::ThenUp(Decision::Return(Step::Gather)),
            Rung::Adopt => Climb::ThenUp(Decision::Adopt),
            Rung::Merged => self.fit(stream, len).map_or(Climb::Up, carve),
            Rung::Build => {
                attempt.note_plan();
                let build = self.build(len, attempt, mixed);
                Climb::Stay(Decision::Return(self.step_for(build, attempt, Rung::Own)))
            }
            Rung::Retired | Rung::Unmap | Rung::Early | Rung::Learn | Rung::Return => Climb::Up,
        }
    }

    fn grow_first(self, len: Bytes, attempt: &mut Attempt, mixed: &Mixed) -> Climb {
        match self.build(len, attempt, mixed) {
            Build::ClearFirst(plan) | Build::Fill { plan, over_slack: Bytes::ZERO } => {
                attempt.note_plan();
                attempt.rung = Rung::Own;
                Climb::Stay(Decision::Return(Step::Perform(plan)))
            }
            Build::Fill { .. } | Build::Short { .. } => {
                attempt.prefer_growth = false;
                Climb::Up
            }
        }
    }
}
