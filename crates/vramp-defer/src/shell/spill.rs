//! Spilling: rounds of choosing victims and evicting them, a few pieces in flight at a time.
//!
//! One buffer that the caller names is evicted as a whole.
//!
//! When a round ends, and what follows it, is decided by [`EvictionRounds`] and [`AfterRound`].
//! `copy_out.rs` moves one piece.

use std::collections::VecDeque;

use crate::planner::{
    AfterRound, BufferId, CopyOut, EvictError, EvictionCost, EvictionRounds, MoveId, PieceId,
    SpillDemand, SpillRoom, SpillTier, UseToken,
};
use vramp_core::Bytes;
use vramp_tiers::movers::MoveError;

use super::copy_out::{CopyInFlight, StartedCopy};
use super::homes::RangeBacking;
use super::pool_request::SpillInProgress;
use super::report::{FailedMove, MoveKind, Spilled};
use super::spill_error::SpillError;
use super::state::{Shared, State};

/// Moves that are evicted together with others of one choice.
pub(super) type Moves = VecDeque<(CopyOut, Option<EvictionCost>)>;

/// Result of a batch of moves.
#[derive(Default)]
pub(super) struct Evicted {
    pub freed: Bytes,
    pub failed: Option<FailedMove>,
}

impl Shared {
    /// Frees at least `deficit` bytes of the card, and less than one piece more, or what can be
    /// freed. `left` returns what the caller still misses; it is called between pieces. The calling
    /// thread waits for copies and for the work that uses the victims, each by its event.
    pub(super) fn spill(&self, deficit: Bytes, left: &dyn Fn() -> Bytes) -> Spilled {
        let mut spilled = Spilled::default();
        // If captures cannot be queried, no event can be either: nothing can leave.
        if deficit.is_zero() || self.allocator.any_captures().unwrap_or(true) {
            return spilled;
        }
        let _in_progress = SpillInProgress::begin(self);
        self.lock().stats.spills += 1;
        let mut rounds = EvictionRounds::new(deficit);
        while rounds.begin() {
            rounds.add(self.reap_completed());
            let missing = rounds.missing();
            if missing.is_zero() {
                break;
            }
            let room = self.room();
            // A statement of its own: dropped copies are freed when the lock is released.
            self.lock().drop_excess_host_copies(&room, missing);
            self.demote(&room, missing);
            let choice = self.choose(missing, room.peers);
            let moves = choice.victims.into_iter().flat_map(|victim| {
                victim.moves.into_iter().map(move |out| (out, Some(victim.cost)))
            });
            let Evicted { freed, failed } = self.evict(moves.collect(), left);
            rounds.add(freed);
            spilled.failed = spilled.failed.or(failed);
            spilled.short = choice.short;
            if rounds.reclaims_host(choice.short.as_ref()) && !self.relieve_host(missing).is_zero()
            {
                continue;
            }
            match AfterRound::of(left(), freed) {
                AfterRound::Continue => {}
                AfterRound::WaitForPendingRelease if self.wait_for_pending_release() => {}
                AfterRound::WaitForPendingRelease | AfterRound::Stop => break,
            }
        }
        spilled.freed = rounds.freed();
        self.lock().stats.freed_bytes += spilled.freed.count();
        if rounds.missing().is_zero() {
            (spilled.short, spilled.failed) = (None, None);
        }
        if !spilled.freed.is_zero() {
            self.retry_stalled();
        }
        spilled
    }

    /// Moves older host copies to the disk so that victims find room on the host, where that pays.
    fn demote(&self, room: &SpillRoom, deficit: Bytes) {
        let pushes = {
            let mut state = self.lock();
            let room = SpillRoom { peers: room.peers, ..self.room_below() };
            let demand = SpillDemand { deficit, rates: state.rates, room };
            state.core.demote(&demand, self.driver.now_ns())
        };
        self.push_to_disk(&pushes);
    }

    /// Processes completed work. Returns the bytes that became free by it.
    fn reap_completed(&self) -> Bytes {
        let mut state = self.lock();
        let before = state.reclaimed;
        // Work that cannot be queried counts as in flight.
        let _ = state.poll();
        state.reclaimed - before
    }

    /// Waits for the work behind which memory is pending release. Returns false if there is none.
    fn wait_for_pending_release(&self) -> bool {
        let uses: Vec<UseToken> = {
            let state = self.lock();
            let homes = state.pending_release.iter().filter_map(|range| state.homes.get(range));
            homes.flat_map(RangeBacking::lend_after).collect()
        };
        !uses.is_empty() && self.wait_for(&uses).is_ok()
    }

    /// Copies out contents that stay on the card. Returns the number of bytes chosen.
    pub(super) fn clean(&self, budget: Bytes) -> Bytes {
        if self.allocator.any_captures().unwrap_or(true) {
            return Bytes::ZERO;
        }
        let moves = {
            let mut state = self.lock();
            if state.poll().is_err() {
                return Bytes::ZERO;
            }
            state.note_pins(&self.allocator);
            let demand = SpillDemand { deficit: budget, rates: state.rates, room: self.room() };
            state.core.clean(budget, &demand, self.driver.now_ns())
        };
        let bytes = moves.iter().map(|out| out.at.len).sum();
        self.evict(moves.into_iter().map(|out| (out, None)).collect(), &|| Bytes::new(u64::MAX));
        bytes
    }

    /// Performs moves, a few in flight at a time, until `left` is zero.
    pub(super) fn evict(&self, mut moves: Moves, left: &dyn Fn() -> Bytes) -> Evicted {
        let mut in_flight: VecDeque<CopyInFlight> = VecDeque::new();
        let mut evicted = Evicted::default();
        let mut enough = false;
        loop {
            while in_flight.len() < self.config.in_flight.max(1)
                && let Some((mut out, cost)) = moves.pop_front()
            {
                // The tenants of a group leave together or not at all.
                if enough {
                    self.give_up(out.id);
                    continue;
                }
                match self.start_copy_or_skip(&mut out) {
                    Ok(copy) => {
                        let began_ns = self.driver.now_ns();
                        in_flight.push_back(CopyInFlight { out, cost, began_ns, copy });
                    }
                    Err(error) => self.fail_copy_out(&out, &error, &mut evicted),
                }
            }
            let Some(CopyInFlight { out, cost, began_ns, copy }) = in_flight.pop_front() else {
                return evicted;
            };
            if matches!(copy, StartedCopy::ToDisk) && self.disk_gate.is_closed() {
                self.give_up(out.id);
                continue;
            }
            match self.finish_copy_out(&out, cost, began_ns, copy) {
                Ok(freed) => evicted.freed += freed,
                Err(error) => self.fail_copy_out(&out, &error, &mut evicted),
            }
            enough = enough || left().is_zero();
        }
    }

    fn fail_copy_out(&self, out: &CopyOut, error: &SpillError, evicted: &mut Evicted) {
        let failed = self.fail(out.id, out.piece, MoveKind::Spilled(out.to), error);
        evicted.failed = evicted.failed.take().or(failed);
    }

    /// Gives a move up without a failure record.
    pub(super) fn give_up(&self, id: MoveId) {
        let mut state = self.lock();
        state.stats.given_up += 1;
        state.abandon(id);
    }

    /// Abandons a move that failed. Returns the failure record; `None` if something was only full.
    pub(super) fn fail(
        &self,
        id: MoveId,
        piece: PieceId,
        what: MoveKind,
        error: &SpillError,
    ) -> Option<FailedMove> {
        if error.failure().is_capacity() {
            self.give_up(id);
            return None;
        }
        let mut state = self.lock();
        state.abandon(id);
        let failed = state.note_failed(piece, what, error);
        let is_of_disk = matches!(error, SpillError::Move(MoveError::Disk { .. }));
        if is_of_disk && !matches!(what, MoveKind::Restored(_)) {
            state.stats.disk_backoffs += u64::from(self.disk_gate.failed(failed.clone()));
        }
        Some(failed)
    }
}

impl State {
    /// Abandons a move.
    fn abandon(&mut self, id: MoveId) {
        if let Ok(abandoned) = self.core.abandon(id)
            && let Some(range) = abandoned.less
        {
            self.lend(range);
            self.settle_charges();
        }
    }

    /// Records a move that failed because something is broken.
    pub(super) fn note_failed(
        &mut self,
        piece: PieceId,
        what: MoveKind,
        error: &SpillError,
    ) -> FailedMove {
        let at_ns = self.events.now_ns();
        let failed = FailedMove { piece, what, at_ns, error: error.to_string() };
        self.stats.failures += 1;
        self.history.push_failed(failed.clone());
        failed
    }
}

/// Most times that room is made, or that what came back meanwhile is evicted again.
const ATTEMPTS: usize = 4;

impl Shared {
    /// Evicts a buffer, and moves its copies down to `to` if one is given. Returns the bytes of the card
    /// that became free. Waits for the copies and for work in flight on the buffer.
    pub(super) fn spill_buffer(
        &self,
        buffer: BufferId,
        to: Option<SpillTier>,
    ) -> Result<Bytes, SpillError> {
        if self.allocator.any_captures()? {
            return Err(SpillError::CaptureInProgress);
        }
        self.disk_gate.open();
        let freed = self.evict_buffer(buffer, to)?;
        if let Some(to) = to {
            self.push_buffer(buffer, to)?;
        }
        self.retry_stalled();
        Ok(freed)
    }

    fn evict_buffer(&self, buffer: BufferId, to: Option<SpillTier>) -> Result<Bytes, SpillError> {
        let mut freed = Bytes::ZERO;
        for attempt in 1.. {
            let room = self.room();
            let chosen = {
                let mut guard = self.lock();
                let state = &mut *guard;
                state.poll()?;
                state.note_pins(&self.allocator);
                let demand = state.demand(room);
                state.core.evict_buffer(buffer, to, &demand)
            };
            let moves = match chosen {
                Ok(moves) if moves.is_empty() => return Ok(freed),
                Ok(moves) => moves,
                Err(EvictError::NoRoom { needed, .. })
                    if attempt < ATTEMPTS && !self.relieve_host(needed).is_zero() =>
                {
                    continue;
                }
                Err(error) => return Err(self.no_room(error)),
            };
            let moves = moves.into_iter().map(|out| (out, None)).collect();
            let evicted = self.evict(moves, &|| Bytes::new(u64::MAX));
            freed += evicted.freed;
            if let Some(failed) = evicted.failed {
                return Err(SpillError::NotSpilled(Box::new(failed)));
            }
            if attempt == ATTEMPTS {
                break;
            }
        }
        // Room was taken by others each time, or leases brought pieces back.
        let status = self.lock().core.status(buffer)?;
        let needed = status.len.saturating_sub(status.deferred);
        Err(self.no_room(EvictError::NoRoom { buffer, needed }))
    }

    /// Returns the error of an eviction; that of the disk where it is closed.
    fn no_room(&self, error: EvictError) -> SpillError {
        let failed = self.disk_gate.failure().filter(|_| self.disk_gate.is_closed());
        match (&error, failed) {
            (EvictError::NoRoom { .. }, Some(failed)) => SpillError::NotSpilled(Box::new(failed)),
            _ => error.into(),
        }
    }

    /// Moves copies of a buffer from faster tiers down to one.
    fn push_buffer(&self, buffer: BufferId, to: SpillTier) -> Result<(), SpillError> {
        let room = self.room();
        let (choice, failures) = {
            let mut guard = self.lock();
            let state = &mut *guard;
            let demand = state.demand(room);
            let choice = state.core.push_buffer(buffer, to, &demand)?;
            state.drop_copies(&choice.stale);
            (choice, state.stats.failures)
        };
        let mut moved = Bytes::ZERO;
        let wanted: Bytes = choice.pushes.iter().map(|push| push.len).sum();
        for push in &choice.pushes {
            moved += self.push(push);
        }
        let needed = choice.missing + wanted.saturating_sub(moved);
        match self.failed_since(failures) {
            Some(failed) if moved < wanted => Err(SpillError::NotSpilled(failed)),
            _ if needed.is_zero() => Ok(()),
            _ => Err(EvictError::NoRoom { buffer, needed }.into()),
        }
    }
}

impl State {
    /// Returns the rates and the room for moves of one buffer.
    fn demand(&self, room: crate::planner::SpillRoom) -> SpillDemand {
        SpillDemand { deficit: Bytes::ZERO, rates: self.rates, room }
    }
}
