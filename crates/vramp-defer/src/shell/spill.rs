//! Out of the card: what is chosen is copied, waited for, and its memory lent.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::planner::{
    CopyOut, EvictionCost, MoveId, PieceId, Rates, SettleError, Settled, SpillDemand, SpillTier,
    UseToken,
};
use vramp_core::{AddrRange, Bytes};

use super::mapped_copy::MappedCopy;
use super::report::{FailedMove, MoveKind, MoveRecord, Spilled};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::host::HostAllocation;
use vramp_tiers::movers::{CopyDependency, DiskBudget, DiskCopy, MoveError};

/// What was chosen is sent; if it freed less than it should, because handles are longer than
/// pieces, more is chosen. So often.
const MAX_ROUNDS: usize = 8;

/// A piece on its way out.
struct CopyInFlight {
    out: CopyOut,
    why: Option<EvictionCost>,
    began_ns: u64,
    copy: Copy,
}

/// The tokens are none where the copy is over.
enum Copy {
    /// There is a copy, or nothing to keep.
    None,
    ToHost(HostAllocation, Option<UseToken>),
    /// To what the device maps.
    ToMapped(MappedCopy, Option<UseToken>),
    /// It begins when it is waited for: staging is for one after the other.
    ToDisk,
}

/// What came of a few moves.
#[derive(Default)]
struct Sent {
    freed: Bytes,
    failed: Option<FailedMove>,
}

/// What was copied.
enum Copied {
    None,
    ToHost(HostAllocation),
    ToMapped(MappedCopy),
    ToDisk(DiskCopy),
}

impl Shared {
    /// Frees at least `deficit` of the card, and no more than one piece beyond it, or what there is.
    /// `left` tells between pieces what is still missing. The thread that calls waits for copies and
    /// for the work that still uses what leaves, each by its event.
    pub(super) fn spill(&self, deficit: Bytes, left: &dyn Fn() -> Bytes) -> Spilled {
        let mut spilled = Spilled::default();
        // A device that cannot say what is over frees nothing: its buffers count as used.
        if deficit.is_zero() || self.allocator.any_captures().unwrap_or(true) {
            return spilled;
        }
        self.lock().stats.spills += 1;
        let mut room_was_made = false;
        for _ in 0..MAX_ROUNDS {
            let missing = deficit.saturating_sub(spilled.freed);
            if missing.is_zero() {
                break;
            }
            let reclaimed = self.reap_completed();
            spilled.freed += reclaimed;
            let missing = missing.saturating_sub(reclaimed);
            if missing.is_zero() {
                break;
            }
            // What is dropped is gone once the lock was free.
            self.lock().drop_needless(self, missing);
            let choice = {
                let mut state = self.lock();
                let short = SpillDemand { deficit: missing, rates: state.rates, room: self.room() };
                state.core.choose(&short, self.driver.now_ns())
            };
            let moves = choice.victims.into_iter().flat_map(|victim| {
                victim.moves.into_iter().map(move |out| (out, Some(victim.why)))
            });
            let Sent { freed, failed } = self.send(moves.collect(), left);
            spilled.freed += freed;
            spilled.failed = spilled.failed.or(failed);
            spilled.short = choice.short;
            let no_room = choice.short.is_some_and(|short| !short.no_room.is_zero());
            if no_room && !room_was_made {
                room_was_made = true;
                if !self.lower(missing).is_zero() {
                    continue;
                }
            }
            if left().is_zero() || (freed.is_zero() && !self.wait_for_pending_release()) {
                break;
            }
        }
        let mut state = self.lock();
        state.stats.freed_bytes += spilled.freed.count();
        if spilled.freed >= deficit {
            (spilled.short, spilled.failed) = (None, None);
        }
        drop(state);
        self.notify();
        spilled
    }

    /// Learns what is over. Returns the memory that others can have since.
    fn reap_completed(&self) -> Bytes {
        let mut state = self.lock();
        let before = state.reclaimed;
        // What cannot be asked counts as in use.
        let _ = state.poll();
        state.reclaimed - before
    }

    /// Waits for the work behind which memory that nobody needs can be lent. False if there is none.
    fn wait_for_pending_release(&self) -> bool {
        let behind: Vec<UseToken> = {
            let state = self.lock();
            let homes = state.pending_release.iter().filter_map(|range| state.homes.get(range));
            homes.filter_map(|home| home.behind).collect()
        };
        !behind.is_empty() && self.wait_for(&behind).is_ok()
    }

    /// Copies contents out that stay on the card. Returns how much.
    pub(super) fn clean(&self, budget: Bytes) -> Bytes {
        if self.allocator.any_captures().unwrap_or(true) {
            return Bytes::ZERO;
        }
        let moves = {
            let mut state = self.lock();
            if state.poll().is_err() {
                return Bytes::ZERO;
            }
            state.core.clean(budget, self.room(), self.driver.now_ns())
        };
        let bytes = moves.iter().map(|out| out.at.len).sum();
        self.send(moves.into_iter().map(|out| (out, None)).collect(), &|| Bytes::new(u64::MAX));
        bytes
    }

    /// Performs moves, a few at a time, until nothing is missing any more.
    fn send(
        &self,
        mut moves: VecDeque<(CopyOut, Option<EvictionCost>)>,
        left: &dyn Fn() -> Bytes,
    ) -> Sent {
        let mut flying: VecDeque<CopyInFlight> = VecDeque::new();
        let mut sent = Sent::default();
        let mut enough = false;
        loop {
            while flying.len() < self.config.in_flight.max(1)
                && let Some((mut out, why)) = moves.pop_front()
            {
                // The tenants of a group leave together or not at all.
                if enough {
                    self.give_up(out.id);
                    continue;
                }
                match self.start_copy_or_skip(&mut out) {
                    Ok(copy) => {
                        flying.push_back(CopyInFlight {
                            out,
                            why,
                            began_ns: self.driver.now_ns(),
                            copy,
                        });
                    }
                    Err(error) => self.fail_out(&out, &error, &mut sent),
                }
            }
            let Some(CopyInFlight { out, why, began_ns, copy }) = flying.pop_front() else {
                return sent;
            };
            match self.land(&out, why, began_ns, copy) {
                Ok(freed) => sent.freed += freed,
                Err(error) => self.fail_out(&out, &error, &mut sent),
            }
            enough = enough || left().is_zero();
        }
    }

    fn fail_out(&self, out: &CopyOut, error: &SpillError, sent: &mut Sent) {
        let failed = self.fail(out.id, out.piece, MoveKind::Spilled(out.to), error);
        sent.failed = sent.failed.take().or(failed);
    }

    pub(super) fn give_up(&self, id: MoveId) {
        let mut state = self.lock();
        state.stats.given_up += 1;
        state.abandon(id);
    }

    /// A move came to nothing. Returns what is told of it, if something is broken.
    pub(super) fn fail(
        &self,
        id: MoveId,
        piece: PieceId,
        what: MoveKind,
        error: &SpillError,
    ) -> Option<FailedMove> {
        if error.is_capacity_error() {
            self.give_up(id);
            return None;
        }
        let mut state = self.lock();
        state.abandon(id);
        Some(state.note_failed(piece, what, error))
    }

    /// The same as [`launch`](Shared::launch), but what has a copy leaves even if one more, to be read
    /// below, cannot be made.
    fn start_copy_or_skip(&self, out: &mut CopyOut) -> Result<Copy, SpillError> {
        let error = match self.launch(out) {
            Ok(copy) => return Ok(copy),
            Err(error) => error,
        };
        let mut state = self.lock();
        if !state.core.leave_without_copy(out.id) {
            return Err(error);
        }
        if !error.is_capacity_error() {
            state.note_failed(out.piece, MoveKind::Spilled(out.to), &error);
        }
        out.to = None;
        Ok(Copy::None)
    }

    /// Starts the copy of a piece, behind the work that writes it. Who writes it next comes behind
    /// the copy.
    fn launch(&self, out: &CopyOut) -> Result<Copy, SpillError> {
        match out.to {
            None => Ok(Copy::None),
            Some(SpillTier::Disk) => Ok(Copy::ToDisk),
            Some(SpillTier::Host) => {
                if let Some(hosted) = self.mapped_copy_for(out.piece, out.at.len) {
                    let token = self.copy_to_mapped(out, &hosted)?;
                    return Ok(Copy::ToMapped(hosted, token));
                }
                let (range, after) = self.source(out);
                let host = self.mover.pool().allocate(out.at.len).map_err(MoveError::from)?;
                let moving = after
                    .into_iter()
                    .fold(self.mover.to_host(range, host), |moving, on| moving.after(on));
                let host = moving.start()?.finish_on(self.leaving)?;
                let mut guard = self.lock();
                let token = guard.events.note_or_wait(self.leaving);
                guard.note_copy_queued(out, token);
                Ok(Copy::ToHost(host, token))
            }
        }
    }

    /// Where contents are that leave, and what a copy of them comes behind.
    fn source(&self, out: &CopyOut) -> (AddrRange, Vec<CopyDependency>) {
        let state = self.lock();
        let after = out.copy_after.iter().filter_map(|&token| state.events.of(token));
        (state.addresses(out.at), after.map(CopyDependency::Event).collect())
    }

    fn copy_to_disk(&self, out: &CopyOut) -> Result<DiskCopy, SpillError> {
        let store = self.disk.as_ref().expect("without a disk there is no room on it");
        self.with_staging(|| {
            let (range, after) = self.source(out);
            let mut staged = self.mover.to_disk(range, store, DiskBudget::Space)?;
            for on in after {
                staged = staged.after(on)?;
            }
            Ok(staged.finish()?)
        })
    }

    /// Moves something to or from the disk. Others on that way may have all of the blocks that are
    /// kept for it: then it waits for one of them to be done. A transfer that has some goes on with
    /// those, so one at least always does.
    pub(super) fn with_staging<T>(
        &self,
        mut transfer: impl FnMut() -> Result<T, SpillError>,
    ) -> Result<T, SpillError> {
        loop {
            let (way, before) = StagedTransfer::begin(self);
            let done = transfer();
            let after = way.end();
            if !done.as_ref().is_err_and(SpillError::lacks_host_blocks) || (before, after) == (0, 0)
            {
                return done;
            }
            // Those who were there before may be done by now.
            if after > 0 {
                drop(self.wait_briefly(self.lock()));
            }
        }
    }

    /// Waits for the copy and for the work on the piece, and lends its memory. Returns how much
    /// others can have.
    fn land(
        &self,
        out: &CopyOut,
        why: Option<EvictionCost>,
        mut began_ns: u64,
        copy: Copy,
    ) -> Result<Bytes, SpillError> {
        let copied = match copy {
            Copy::None => Copied::None,
            Copy::ToHost(host, token) => {
                // If that fails and the copy is under way, the blocks serve nobody before its end.
                self.wait_for(token.as_slice())?;
                Copied::ToHost(host)
            }
            Copy::ToMapped(hosted, token) => match self.wait_for(token.as_slice()) {
                Ok(()) => Copied::ToMapped(hosted),
                Err(error) => {
                    // The copy may be under way.
                    self.lock().retire(out.piece.buffer, hosted, token.as_slice());
                    return Err(error.into());
                }
            },
            Copy::ToDisk => {
                began_ns = self.driver.now_ns();
                Copied::ToDisk(self.copy_to_disk(out)?)
            }
        };
        let took_ns = self.driver.now_ns().saturating_sub(began_ns);
        let mut uses = out.lend_after.clone();
        let mut copied = Some(copied);
        loop {
            self.wait_for(&uses)?;
            let mut guard = self.lock();
            let state = &mut *guard;
            state.poll()?;
            let settled = match state.core.settle(out.id) {
                Ok(settled) => settled,
                Err(SettleError::StillUsed { uses: more, .. }) => {
                    uses = more;
                    continue;
                }
                // Given up by whoever removed the buffer.
                Err(_) => return Ok(Bytes::ZERO),
            };
            let copied = copied.take().expect("a move settles once");
            let freed = state.note_out(out, settled, copied);
            state.note_rate(out.to, out.at.len, took_ns);
            let what = match settled {
                Settled::Spilled { .. } => Some(MoveKind::Spilled(out.to)),
                Settled::Cleaned { to, .. } => Some(MoveKind::Cleaned(to)),
                _ => None,
            };
            if let Some(what) = what {
                let (piece, bytes) = (out.piece, out.at.len);
                state.history.push(MoveRecord { piece, bytes, what, began_ns, took_ns, why });
            }
            state.reap();
            drop(guard);
            self.notify();
            return Ok(freed);
        }
    }
}

/// A transfer to or from the disk, from when it asks for staging until it has given it back.
struct StagedTransfer<'a>(&'a Shared);

impl<'a> StagedTransfer<'a> {
    /// Returns how many there were before, too.
    fn begin(shared: &'a Shared) -> (StagedTransfer<'a>, usize) {
        let mut state = shared.lock();
        state.staged_transfers += 1;
        (StagedTransfer(shared), state.staged_transfers - 1)
    }

    /// Returns how many others there are.
    fn end(self) -> usize {
        let shared = self.0;
        drop(self);
        shared.lock().staged_transfers
    }
}

impl Drop for StagedTransfer<'_> {
    fn drop(&mut self) {
        self.0.lock().staged_transfers -= 1;
        self.0.notify();
    }
}

impl State {
    /// Gives a move up.
    fn abandon(&mut self, id: MoveId) {
        if let Ok(abandoned) = self.core.abandon(id)
            && let Some(range) = abandoned.less
        {
            self.lend(range);
            self.settle_charges();
        }
    }

    /// A move failed because something is broken.
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

    /// All of a copy out is queued and over when `token` is; without one it is over.
    pub(super) fn note_copy_queued(&mut self, out: &CopyOut, token: Option<UseToken>) {
        if let Some(token) = token {
            let noted = self.core.copy_queued(out.id, token);
            debug_assert!(noted.is_ok(), "{} was given out: {noted:?}", out.id);
        }
    }

    /// Keeps the copy, if it counts, and lends the memory, if the piece left.
    fn note_out(&mut self, out: &CopyOut, settled: Settled, copied: Copied) -> Bytes {
        let counts = !matches!(settled, Settled::Stays { .. });
        match copied {
            copied if counts => self.keep_copy(out.piece, copied),
            Copied::ToMapped(stale) => self.retire(out.piece.buffer, stale, &[]),
            // Its charge calls whoever waits for the host's budget: not behind the lock.
            stale => self.to_drop.push(Box::new(stale)),
        }
        match settled {
            Settled::Spilled { range, frees, .. } if !frees.is_zero() => {
                let lent = self.lend(range);
                self.settle_charges();
                lent
            }
            _ => Bytes::ZERO,
        }
    }

    fn keep_copy(&mut self, piece: PieceId, copied: Copied) {
        let below = self.copies.entry(piece).or_default();
        match copied {
            Copied::None => {}
            Copied::ToHost(host) => below.host = Some(host),
            Copied::ToMapped(hosted) => below.hosted = Some(hosted),
            Copied::ToDisk(stored) => below.disk = Some(Arc::new(stored)),
        }
    }

    /// Learns from a copy how fast copies are, the last ones the most.
    pub(super) fn note_rate(&mut self, to: Option<SpillTier>, bytes: Bytes, took_ns: u64) {
        let Rates { to_host, to_disk, .. } = &mut self.rates;
        match to {
            None => {}
            Some(SpillTier::Host) => {
                self.stats.to_host_bytes += bytes.count();
                self.stats.to_host_ns += took_ns;
                learn(to_host, bytes, took_ns);
            }
            Some(SpillTier::Disk) => {
                self.stats.to_disk_bytes += bytes.count();
                self.stats.to_disk_ns += took_ns;
                learn(to_disk, bytes, took_ns);
            }
        }
    }
}

/// A seventh of what is new, six of what was.
pub(super) fn learn(rate: &mut Option<u64>, bytes: Bytes, took_ns: u64) {
    let seen = u128::from(bytes.count()) * 1_000_000_000 / u128::from(took_ns.max(1));
    let seen = u64::try_from(seen).unwrap_or(u64::MAX);
    *rate = Some(rate.map_or(seen, |known| known / 7 * 6 + seen / 7));
}
