//! Out of the card: what is chosen is copied, waited for, and its memory lent.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use vramp_core::Bytes;
use vramp_core::defer::{
    CopyOut, Lower, MoveId, PieceId, Rates, SettleError, Settled, Short, UseToken, Why,
};

use super::error::SpillError;
use super::hosted::Hosted;
use super::report::{MoveRecord, Moved, Spilled};
use super::state::{Shared, State};
use crate::host::HostAllocation;
use crate::movers::{After, DiskPayer, DiskTarget, GpuEnd, MoveError, OnDisk, Staged, Transfer};

/// What was chosen is sent; if it freed less than it should, because handles are longer than
/// pieces, more is chosen. So often.
const ROUNDS_MOST: usize = 8;

/// A piece on its way out.
struct Flying {
    out: CopyOut,
    why: Option<Why>,
    began_ns: u64,
    copy: Copy,
}

enum Copy {
    /// There is a copy, or nothing to keep.
    None,
    ToHost(Transfer),
    /// To what the device maps; the token is none where the copy is over.
    ToHosted(Hosted, Option<UseToken>),
    ToDisk(Staged<GpuEnd, DiskTarget>),
}

/// What was copied.
enum Copied {
    None,
    ToHost(HostAllocation),
    ToHosted(Hosted),
    ToDisk(OnDisk),
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
        for _ in 0..ROUNDS_MOST {
            let missing = deficit.saturating_sub(spilled.freed);
            if missing.is_zero() {
                break;
            }
            let came_back = self.take_what_is_over();
            spilled.freed += came_back;
            let missing = missing.saturating_sub(came_back);
            if missing.is_zero() {
                break;
            }
            // What is dropped is gone once the lock was free.
            self.lock().drop_needless(self, missing);
            let choice = {
                let mut state = self.lock();
                let short = Short { deficit: missing, rates: state.rates, room: self.room() };
                state.core.choose(&short, self.driver.now_ns())
            };
            let moves = choice.victims.into_iter().flat_map(|victim| {
                victim.moves.into_iter().map(move |out| (out, Some(victim.why)))
            });
            let freed = self.send(moves.collect(), left);
            spilled.freed += freed;
            spilled.short = choice.short;
            let no_room = choice.short.is_some_and(|short| !short.no_room.is_zero());
            if no_room && !room_was_made {
                room_was_made = true;
                if !self.lower(missing).is_zero() {
                    continue;
                }
            }
            if left().is_zero() || (freed.is_zero() && !self.wait_for_unlent()) {
                break;
            }
        }
        let mut state = self.lock();
        state.stats.freed_bytes += spilled.freed.count();
        if spilled.freed >= deficit {
            spilled.short = None;
        }
        drop(state);
        self.tell();
        spilled
    }

    /// Learns what is over. Returns the memory that others can have since.
    fn take_what_is_over(&self) -> Bytes {
        let mut state = self.lock();
        let before = state.came_back;
        // What cannot be asked counts as in use.
        let _ = state.poll();
        state.came_back - before
    }

    /// Waits for the work behind which memory that nobody needs can be lent. False if there is none.
    fn wait_for_unlent(&self) -> bool {
        let behind: Vec<UseToken> = {
            let state = self.lock();
            let homes = state.unlent.iter().filter_map(|range| state.homes.get(range));
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

    /// Performs moves, a few at a time, until nothing is missing any more. Returns what was freed.
    fn send(&self, mut moves: VecDeque<(CopyOut, Option<Why>)>, left: &dyn Fn() -> Bytes) -> Bytes {
        let mut flying: VecDeque<Flying> = VecDeque::new();
        let mut freed = Bytes::ZERO;
        let mut enough = false;
        loop {
            while flying.len() < self.config.in_flight.max(1)
                && let Some((out, why)) = moves.pop_front()
            {
                // The tenants of a group leave together or not at all.
                if enough {
                    self.give_up(out.id);
                    continue;
                }
                let id = out.id;
                match self.launch_in_any_case(out, why) {
                    Ok(started) => flying.push_back(started),
                    Err(_) => self.fail(id),
                }
            }
            let Some(first) = flying.pop_front() else { return freed };
            freed += self.land(first);
            enough = enough || left().is_zero();
        }
    }

    fn give_up(&self, id: MoveId) {
        let mut state = self.lock();
        if let Ok(abandoned) = state.core.abandon(id)
            && let Some(range) = abandoned.less
        {
            state.lend(range);
            state.settle_charges();
        }
    }

    pub(super) fn fail(&self, id: MoveId) {
        self.lock().stats.failures += 1;
        self.give_up(id);
    }

    /// The same as [`launch`](Shared::launch), but what has a copy leaves even if one more, to be read
    /// below, cannot be made.
    fn launch_in_any_case(&self, out: CopyOut, why: Option<Why>) -> Result<Flying, SpillError> {
        self.launch(out.clone(), why).or_else(|error| {
            let mut state = self.lock();
            if !state.core.leave_without_copy(out.id) {
                return Err(error);
            }
            state.stats.failures += 1;
            drop(state);
            self.launch(CopyOut { to: None, ..out }, why)
        })
    }

    /// Starts the copy of a piece, behind the work that writes it.
    fn launch(&self, out: CopyOut, why: Option<Why>) -> Result<Flying, SpillError> {
        let began_ns = self.driver.now_ns();
        let (range, after) = {
            let state = self.lock();
            let after = out.copy_after.iter().filter_map(|&token| state.events.of(token));
            (state.addresses(out.at), after.map(After::Event).collect::<Vec<_>>())
        };
        let copy = match (out.to, &self.disk) {
            (None, _) => Copy::None,
            (Some(Lower::Host), _) => {
                if let Some(hosted) = self.hosted_for(out.piece, out.at.len) {
                    let token = self.copy_to_hosted(out.at, &hosted, &out.copy_after)?;
                    let copy = Copy::ToHosted(hosted, token);
                    return Ok(Flying { out, why, began_ns, copy });
                }
                let host = self.mover.pool().allocate(out.at.len).map_err(MoveError::from)?;
                let moving = after
                    .into_iter()
                    .fold(self.mover.to_host(range, host), |moving, on| moving.after(on));
                Copy::ToHost(moving.start().map_err(|failed| failed.error)?)
            }
            (Some(Lower::Disk), Some(store)) => {
                let mut staged = self.mover.to_disk(range, store, DiskPayer::Space)?;
                for on in after {
                    staged = staged.after(on)?;
                }
                Copy::ToDisk(staged)
            }
            (Some(Lower::Disk), None) => unreachable!("there is room on no disk"),
        };
        Ok(Flying { out, why, began_ns, copy })
    }

    /// Waits for the copy and for the work on the piece, and lends its memory. Returns how much
    /// others can have.
    fn land(&self, Flying { out, why, began_ns, copy }: Flying) -> Bytes {
        let copied = match copy {
            Copy::None => Ok(Copied::None),
            Copy::ToHost(mut transfer) => {
                transfer.wait().map(|()| Copied::ToHost(transfer.into_host()))
            }
            Copy::ToHosted(hosted, token) => {
                let behind: SmallVec<[UseToken; 1]> = token.into_iter().collect();
                match self.wait_for(&behind) {
                    Ok(()) => Ok(Copied::ToHosted(hosted)),
                    Err(_) => {
                        // The copy may be under way.
                        self.lock().retire(out.piece.buffer, hosted, &behind);
                        self.fail(out.id);
                        return Bytes::ZERO;
                    }
                }
            }
            Copy::ToDisk(staged) => staged.finish().map(Copied::ToDisk),
        };
        let Ok(copied) = copied else {
            self.fail(out.id);
            return Bytes::ZERO;
        };
        let took_ns = self.driver.now_ns().saturating_sub(began_ns);
        let mut uses = out.lend_after.clone();
        let mut copied = Some(copied);
        loop {
            if self.wait_for(&uses).is_err() {
                self.fail(out.id);
                return Bytes::ZERO;
            }
            let mut guard = self.lock();
            let state = &mut *guard;
            if state.poll().is_err() {
                drop(guard);
                self.fail(out.id);
                return Bytes::ZERO;
            }
            let settled = match state.core.settle(out.id) {
                Ok(settled) => settled,
                Err(SettleError::StillUsed { uses: more, .. }) => {
                    uses = more;
                    continue;
                }
                // Given up by whoever removed the buffer.
                Err(_) => return Bytes::ZERO,
            };
            let copied = copied.take().expect("a move settles once");
            let freed = state.note_out(&out, settled, copied);
            state.note_rate(out.to, out.at.len, took_ns);
            let what = match settled {
                Settled::Spilled { .. } => Some(Moved::Spilled(out.to)),
                Settled::Cleaned { to, .. } => Some(Moved::Cleaned(to)),
                _ => None,
            };
            if let Some(what) = what {
                let (piece, bytes) = (out.piece, out.at.len);
                state.history.push(MoveRecord { piece, bytes, what, began_ns, took_ns, why });
            }
            state.bury();
            drop(guard);
            self.tell();
            return freed;
        }
    }
}

impl State {
    /// Keeps the copy, if it counts, and lends the memory, if the piece left.
    fn note_out(&mut self, out: &CopyOut, settled: Settled, copied: Copied) -> Bytes {
        let counts = !matches!(settled, Settled::Stays { .. });
        match copied {
            copied if counts => self.keep_copy(out.piece, copied),
            Copied::ToHosted(stale) => self.retire(out.piece.buffer, stale, &[]),
            _ => {}
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
            Copied::ToHosted(hosted) => below.hosted = Some(hosted),
            Copied::ToDisk(stored) => below.disk = Some(Arc::new(stored)),
        }
    }

    /// Learns from a copy how fast copies are, the last ones the most.
    pub(super) fn note_rate(&mut self, to: Option<Lower>, bytes: Bytes, took_ns: u64) {
        let Rates { to_host, to_disk, .. } = &mut self.rates;
        match to {
            None => {}
            Some(Lower::Host) => {
                self.stats.to_host_bytes += bytes.count();
                self.stats.to_host_ns += took_ns;
                learn(to_host, bytes, took_ns);
            }
            Some(Lower::Disk) => {
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
