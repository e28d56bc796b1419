//! The decision of malloc: a hit, a plan, or a shortage.
//!
//! Each call climbs from the attempt's rung up to the first that has something to do, in the order
//! of [`Rung`]. `arena.rs` and `vpmm.rs` have the same climb for arenas and for the preset `vpmm`.
//! The end of the ladder is the [`Shortage`](crate::Shortage), which is the user's error.
//!
//! Where many threads allocate at once, growth comes before other streams' memory: threads that
//! took from each other's heaps and streams at every miss would do nothing else.

use crate::Bytes;
use crate::ids::{Mark, StreamId};
use crate::pool::config::{BLOCK_ALIGN, Mixed, Policy};
use crate::pool::index::RegionKey;
use crate::pool::plan::build::{BASES, Build};
use crate::pool::plan::decision::{Climb, Decision};
use crate::pool::request::{Attempt, Rung, Step, Want};
use crate::pool::streams::IDLE;
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
            Rung::Watch if self.watched > 0 => self.learn_of_all(),
            Rung::Own => {
                let preferred = attempt.want.carved(len, Bytes::MAX);
                if let Some(step) = self.fill_recut(len, stream, attempt, mixed) {
                    return Climb::Stay(Decision::Return(step));
                }
                let fit = self.fit(stream, preferred).or_else(|| self.fit(stream, len));
                let Some(region) = fit else { return Climb::ThenUp(Decision::Miss) };
                let step = self.lengthen_for(region, len, attempt, mixed);
                match step.or_else(|| self.recut_for(region, len, attempt, mixed)) {
                    Some(step) => Climb::Stay(Decision::Return(step)),
                    None => carve(region),
                }
            }
            Rung::Early if attempt.contenders > 0 || attempt.robbed => {
                self.grow_first(len, attempt, mixed)
            }
            Rung::Learn => self.learn(),
            Rung::LearnAgain => self.learn_of_all(),
            Rung::Idle => self.fit(stream, len).map_or(Climb::Up, carve),
            Rung::Gather => Climb::ThenUp(Decision::Return(Step::Gather)),
            Rung::Merged => match self.fit(stream, len) {
                Some(region) => carve(region),
                None => self
                    .joinable(stream, len)
                    .map_or(Climb::Up, |region| Climb::Stay(Decision::Join { region, len })),
            },
            Rung::Build => {
                attempt.note_plan();
                let build = self.build(len, attempt, mixed);
                Climb::Stay(Decision::Return(self.step_for(build, attempt, Rung::Own)))
            }
            Rung::Retired | Rung::Unmap | Rung::Watch | Rung::Early | Rung::Return => Climb::Up,
        }
    }

    /// Finds out what is idle: records an event where memory was freed after the last one, and queries
    /// those that are pending.
    pub(in crate::pool) fn learn(self) -> Climb {
        self.learn_from(self.unrecorded_frees())
    }

    /// The same, also where freed memory of other streams waits for work.
    fn learn_of_all(self) -> Climb {
        let mut marks = self.unrecorded_frees();
        marks.extend(self.unrecorded_waits());
        marks.sort_unstable();
        marks.dedup();
        self.learn_from(marks)
    }

    fn learn_from(self, marks: Vec<Mark>) -> Climb {
        if !marks.is_empty() {
            return Climb::ThenUp(Decision::Return(Step::Record(marks)));
        }
        match self.streams.any_pending() {
            true => Climb::ThenUp(Decision::Return(Step::Poll)),
            false => Climb::Up,
        }
    }

    /// A large free region of the stream that fits once it is joined with the idle memory beside it.
    fn joinable(self, stream: StreamId, len: Bytes) -> Option<RegionKey> {
        let idle_len = |key: Option<RegionKey>| {
            let idle = key.filter(|&key| self.is_free_of(key, IDLE));
            idle.map_or(Bytes::ZERO, |key| self.regions.get(key).len)
        };
        let largest = self.streams.get(stream).free.iter().rev().take(BASES);
        let mut joined = largest.filter(|&(_, own, key)| {
            self.looked_at.add(1);
            let (prev, next) = (self.regions.prev(key), self.regions.next(key));
            own + idle_len(prev) + idle_len(next) >= len
        });
        joined.next().map(|(_, _, key)| key)
    }

    fn grow_first(self, len: Bytes, attempt: &mut Attempt, mixed: &Mixed) -> Climb {
        match self.build(len, attempt, mixed) {
            Build::ClearFirst(plan) | Build::Fill { plan, over_slack: Bytes::ZERO } => {
                attempt.note_plan();
                attempt.rung = Rung::Own;
                Climb::Stay(Decision::Return(Step::Perform(plan)))
            }
            Build::Fill { .. } | Build::Short { .. } => {
                attempt.contenders = 0;
                attempt.robbed = false;
                Climb::Up
            }
        }
    }
}
