//! A pause and a resume of one region.
//!
//! Chunks leave from the first one on, and come back from the first one on. Contents are copied in the
//! order of their addresses. So a region that sleeps in part lacks its first chunks, and a copy is valid
//! up to some byte.

use std::ops::Range;

use vramp_alloc::AllocError;
use vramp_core::{AddrRange, Bytes};

use super::copies::{Below, Contents, Copy, Moving, Place};
use super::error::RegionError;
use super::region::{Asleep, Backup, Phase, ReadLate, Region, State};
use super::set::PauseOptions;
use crate::host::HostPoolError;
use crate::movers::{MoveError, Stored};
use crate::sync::MutexGuard;

/// Memory that is released, or created, at a time: a driver call takes a contiguous run of handles, and
/// copies go on meanwhile.
const BATCH: Bytes = Bytes::mib(64);

/// The copy of a region that did not fall asleep, memory that is read late, and why it did not.
type NotAsleep = (Option<Copy>, Option<ReadLate>, RegionError);

impl Region {
    pub(super) fn copy_error(&self, error: MoveError) -> RegionError {
        RegionError::Copy { tag: self.tag.clone(), error }
    }

    fn memory_error(&self, error: AllocError) -> RegionError {
        RegionError::Memory { tag: self.tag.clone(), error }
    }

    /// Returns the allocations that its pool made so far.
    pub(super) fn allocations(&self) -> u64 {
        // The preset has no pool of the driver, which alone may fail to answer.
        self.allocator.stats().map_or(u64::MAX, |stats| stats.placed)
    }

    /// Fails where a stream captures a graph: a pause would as well.
    pub(super) fn refuse_captures(&self) -> Result<(), RegionError> {
        let not_now = |error| RegionError::NotNow { tag: self.tag.clone(), error };
        self.allocator.refuse_captures().map_err(not_now)
    }

    /// Gives memory to the card until at most `options.keep` is left on it.
    pub(super) fn pause(&self, below: &Below, options: PauseOptions) -> Result<(), RegionError> {
        self.pause_locked(self.state(), below, options)
    }

    /// Pauses the region as [`pause`](Region::pause) does, unless a move of it is in progress: that one
    /// may wait for the caller.
    pub(super) fn pause_at_once(
        &self,
        below: &Below,
        options: PauseOptions,
    ) -> Option<Result<(), RegionError>> {
        Some(self.pause_locked(self.try_state()?, below, options))
    }

    fn pause_locked(
        &self,
        mut state: MutexGuard<'_, State>,
        below: &Below,
        options: PauseOptions,
    ) -> Result<(), RegionError> {
        self.set_phase(Phase::Pausing);
        let before = std::mem::replace(&mut *state, State::AWAKE);
        let (after, result) = match self.fall_asleep(before) {
            Ok(mut asleep) => {
                if options.discard {
                    (asleep.backup, asleep.copy) = (Backup::None, None);
                }
                self.give_up(below, asleep, options.keep)
            }
            Err(refused) => {
                let (copy, lost, error) = *refused;
                (State::Awake { copy: self.lasting(copy), lost }, Err(error))
            }
        };
        *state = after;
        self.note(&state);
        result
    }

    /// Returns the copy of a region that is awake and may be written from now on, if it stays valid.
    fn lasting(&self, copy: Option<Copy>) -> Option<Copy> {
        copy.filter(|_| self.options.read_only)
    }

    /// Returns the region asleep, with all that was on the card still there.
    fn fall_asleep(&self, state: State) -> Result<Asleep, Box<NotAsleep>> {
        let (copy, lost) = match state {
            State::Asleep(asleep) => return Ok(asleep),
            State::Awake { copy, lost } => (copy, lost),
        };
        if let Some(Err(error)) = lost.as_ref().map(|lost| lost.mover.settle()) {
            return Err(Box::new((copy, lost, self.copy_error(error))));
        }
        // A pool with pins cannot sleep.
        drop(lost);
        let sleep = match self.allocator.begin_sleep() {
            Ok(sleep) => sleep,
            Err(error) => {
                let error = RegionError::NotNow { tag: self.tag.clone(), error };
                return Err(Box::new((copy, None, error)));
            }
        };
        let mut asleep = Asleep::new(sleep, self.options.backup, None);
        asleep.copy = copy.filter(|copy| self.is_valid(copy, &asleep.contents));
        Ok(asleep)
    }

    /// Returns true if a copy from before still has what the region contains.
    pub(super) fn is_valid(&self, copy: &Copy, contents: &Contents) -> bool {
        copy.allocations == self.allocations() && copy.contents.ranges() == contents.ranges()
    }

    /// Releases chunks of a region that sleeps until at most `keep` is left on the card.
    fn give_up(
        &self,
        below: &Below,
        mut asleep: Asleep,
        keep: Bytes,
    ) -> (State, Result<(), RegionError>) {
        // What a failed resume brought back leaves again: its copy is valid.
        if let Err(error) = self.release_given_up(&mut asleep) {
            return (State::Asleep(asleep), Err(error));
        }
        let from = asleep.gone;
        let mut left: Bytes = asleep.sleep.chunks()[from..].iter().map(|chunk| chunk.len).sum();
        let mut to = from;
        while left > keep {
            left -= asleep.sleep.chunks()[to].len;
            to += 1;
        }
        let moved = match asleep.backup {
            Backup::None => {
                self.begin_copies(Bytes::ZERO);
                self.release(&mut asleep, to)
            }
            Backup::Host | Backup::Disk => self.copy_and_release(below, &mut asleep, to),
        };
        let Err(error) = moved else { return (State::Asleep(asleep), Ok(())) };
        let undone = self.bring_back(below, &mut asleep, from);
        // What is on the card may be written from now on.
        let kept = asleep.contents_of(asleep.gone);
        if let Some(copy) = &mut asleep.copy {
            copy.shorten(kept);
        }
        let error = match undone {
            Ok(()) => error,
            Err(undo) => {
                // What came back without its contents leaves again, so that others can use the memory.
                let _ = self.release_lost(&mut asleep);
                let asleep = asleep.lost_bytes();
                let (error, undo) = (Box::new(error), Box::new(undo));
                RegionError::Stuck { tag: self.tag.clone(), asleep, error, undo }
            }
        };
        if asleep.gone > 0 || matches!(error, RegionError::Stuck { .. }) {
            return (State::Asleep(asleep), Err(error));
        }
        let Asleep { sleep, backup, copy, .. } = asleep;
        match sleep.wake() {
            Ok(()) => (State::AWAKE, Err(error)),
            Err(sleep) => (State::Asleep(Asleep::new(sleep, backup, copy)), Err(error)),
        }
    }

    /// Releases chunks up to `to`, in batches.
    fn release(&self, asleep: &mut Asleep, to: usize) -> Result<(), RegionError> {
        while asleep.gone < to {
            let end = batch(asleep.sleep.chunks(), asleep.gone..to);
            self.release_batch(asleep, end)?;
        }
        Ok(())
    }

    fn release_batch(&self, asleep: &mut Asleep, end: usize) -> Result<(), RegionError> {
        let released = asleep.sleep.release(asleep.gone..end);
        while asleep.gone < end && !asleep.sleep.is_backed(asleep.gone) {
            asleep.lost[asleep.gone] = true;
            asleep.gone += 1;
        }
        released.map_err(|error| self.memory_error(error))
    }

    /// Copies the contents of chunks up to `to`, and releases chunks as their copies arrive.
    fn copy_and_release(
        &self,
        below: &Below,
        asleep: &mut Asleep,
        to: usize,
    ) -> Result<(), RegionError> {
        let need = asleep.contents_of(to);
        let valid = asleep.copy.as_ref().map_or(Bytes::ZERO, |copy| copy.valid);
        if need <= valid {
            self.begin_copies(Bytes::ZERO);
            return self.release(asleep, to);
        }
        self.make_room_for(below, asleep, need)?;
        let Copy { contents, place, allocations, .. } =
            asleep.copy.take().expect("it was made above");
        self.begin_copies(need - valid);
        asleep.begin_copies(&below.mover);
        let pieces: Vec<_> = asleep.contents.pieces(valid..need).collect();
        let (place, valid, done) = match Moving::out(&below.mover, pieces, place, valid) {
            Ok(mut out) => {
                let done = self.release_behind(&mut out, asleep, valid, to);
                let (place, moved) = out.end();
                (place, valid + moved, done)
            }
            Err(failed) => {
                let (place, error) = *failed;
                (place, valid, Err(self.copy_error(error)))
            }
        };
        asleep.copy = Some(Copy { contents, place, valid, allocations });
        done
    }

    /// Releases chunks as a transfer that begins at the byte `valid` of the contents advances.
    fn release_behind(
        &self,
        out: &mut Moving,
        asleep: &mut Asleep,
        valid: Bytes,
        to: usize,
    ) -> Result<(), RegionError> {
        loop {
            let moved = out.moved();
            self.set_copied(moved);
            let arrived = valid + moved;
            while asleep.gone < to {
                let end = batch(asleep.sleep.chunks(), asleep.gone..to);
                if asleep.ends[end - 1] > arrived {
                    break;
                }
                self.release_batch(asleep, end)?;
            }
            if out.transfer.is_done() {
                return Ok(());
            }
            out.transfer.advance().map_err(|error| self.copy_error(error))?;
        }
    }

    fn host_full(&self, needed: Bytes, error: HostPoolError) -> RegionError {
        RegionError::HostFull { tag: self.tag.clone(), needed, error }
    }

    /// Makes room in the copy of a region for the first `need` bytes of its contents. What the copy has
    /// stays, also after an error.
    fn make_room_for(
        &self,
        below: &Below,
        asleep: &mut Asleep,
        need: Bytes,
    ) -> Result<(), RegionError> {
        match &mut asleep.copy {
            Some(Copy { place: Place { stored: Stored::Host(host), .. }, .. }) => {
                let more = need.saturating_sub(host.len());
                if more.is_zero() {
                    return Ok(());
                }
                host.grow(more).map_err(|error| self.host_full(more, error))
            }
            Some(_) => Ok(()),
            None => {
                asleep.copy = Some(self.empty_copy(below, &asleep.contents, need)?);
                Ok(())
            }
        }
    }

    /// Returns a copy of nothing yet, with room for `need` bytes.
    pub(super) fn empty_copy(
        &self,
        below: &Below,
        contents: &Contents,
        need: Bytes,
    ) -> Result<Copy, RegionError> {
        let place = match (self.options.backup, &below.disk) {
            (Backup::Disk, Some(disk)) => Place::disk(disk),
            (Backup::Disk, None) => return Err(RegionError::NoDisk { tag: self.tag.clone() }),
            (Backup::Host | Backup::None, _) => {
                let host = below.mover.pool().allocate(need);
                Place::host(host.map_err(|error| self.host_full(need, error))?)
            }
        };
        let allocations = self.allocations();
        Ok(Copy { contents: contents.clone(), place, valid: Bytes::ZERO, allocations })
    }

    /// Brings all memory back, and serves requests again.
    pub(super) fn resume(&self, below: &Below) -> Result<(), RegionError> {
        let mut state = self.state();
        self.set_phase(Phase::Resuming);
        let before = std::mem::replace(&mut *state, State::AWAKE);
        let (after, result) = match before {
            State::Awake { copy, lost } => {
                // Pins of copies that are over by now would keep memory from a trim.
                let lost = lost.filter(|lost| lost.mover.settle().is_err());
                (State::Awake { copy: self.lasting(copy), lost }, Ok(()))
            }
            State::Asleep(asleep) => self.wake(below, asleep),
        };
        *state = after;
        self.note(&state);
        result
    }

    fn wake(&self, below: &Below, mut asleep: Asleep) -> (State, Result<(), RegionError>) {
        if let Err(error) = self.bring_back(below, &mut asleep, 0) {
            // What came back without its contents leaves again, so that others can use the memory.
            let _ = self.release_lost(&mut asleep);
            return (State::Asleep(asleep), Err(error));
        }
        let Asleep { sleep, backup, copy, .. } = asleep;
        let mut copy = self.lasting(copy);
        if let Some(copy) = &mut copy {
            copy.free_ahead();
        }
        match sleep.wake() {
            Ok(()) => (State::Awake { copy, lost: None }, Ok(())),
            Err(sleep) => {
                let closed = RegionError::Closed { tag: self.tag.clone() };
                (State::Asleep(Asleep::new(sleep, backup, copy)), Err(closed))
            }
        }
    }

    /// Releases chunks that were given up and that memory backs.
    fn release_given_up(&self, asleep: &mut Asleep) -> Result<(), RegionError> {
        asleep.settle().map_err(|error| self.copy_error(error))?;
        let released = asleep.sleep.release(0..asleep.gone);
        for index in 0..asleep.gone {
            asleep.lost[index] |= !asleep.sleep.is_backed(index);
        }
        released.map_err(|error| self.memory_error(error))
    }

    /// Releases chunks that memory backs without their contents.
    fn release_lost(&self, asleep: &mut Asleep) -> Result<(), RegionError> {
        asleep.settle().map_err(|error| self.copy_error(error))?;
        let mut from = 0;
        while let Some(run) = asleep.next_lost(from) {
            from = run.end;
            asleep.sleep.release(run).map_err(|error| self.memory_error(error))?;
        }
        Ok(())
    }

    /// Brings chunks from `from` on back, with their contents. After an error those that came back are
    /// intact, and the others lost as before.
    fn bring_back(
        &self,
        below: &Below,
        asleep: &mut Asleep,
        from: usize,
    ) -> Result<(), RegionError> {
        asleep.settle().map_err(|error| self.copy_error(error))?;
        while let Some(run) = asleep.next_lost(from) {
            match asleep.backup {
                Backup::None => self.back(asleep, run)?,
                Backup::Host | Backup::Disk => self.restore(below, asleep, run)?,
            }
        }
        asleep.gone = from;
        Ok(())
    }

    fn back(&self, asleep: &mut Asleep, run: Range<usize>) -> Result<(), RegionError> {
        asleep.sleep.back(run.clone()).map_err(|error| self.memory_error(error))?;
        asleep.lost[run].fill(false);
        Ok(())
    }

    /// Backs a run of chunks, and copies their contents behind that.
    fn restore(
        &self,
        below: &Below,
        asleep: &mut Asleep,
        run: Range<usize>,
    ) -> Result<(), RegionError> {
        let (low, high) = (asleep.contents_of(run.start), asleep.contents_of(run.end));
        if low == high {
            return self.back(asleep, run);
        }
        self.begin_copies(high - low);
        asleep.begin_copies(&below.mover);
        let Copy { contents, place, valid, allocations } =
            asleep.copy.take().expect("what is lost and has contents has a copy");
        let pieces: Vec<_> = asleep.contents.pieces(low..high).collect();
        let (place, restored) = match Moving::back(&below.mover, pieces, place, low..high) {
            Ok(mut back) => {
                let restored = self.copy_behind(&mut back, asleep, run.clone(), low);
                (back.end().0, restored)
            }
            Err(failed) => {
                let (place, error) = *failed;
                (place, Err(self.copy_error(error)))
            }
        };
        asleep.copy = Some(Copy { contents, place, valid, allocations });
        restored?;
        asleep.lost[run].fill(false);
        Ok(())
    }

    /// Backs chunks, and lets a transfer of their contents, which begin at the byte `low`, follow.
    fn copy_behind(
        &self,
        back: &mut Moving,
        asleep: &Asleep,
        run: Range<usize>,
        low: Bytes,
    ) -> Result<(), RegionError> {
        let mut backed = run.start;
        while backed < run.end {
            let end = batch(asleep.sleep.chunks(), backed..run.end);
            asleep.sleep.back(backed..end).map_err(|error| self.memory_error(error))?;
            backed = end;
            back.transfer.allow(asleep.contents_of(backed) - low);
            back.transfer.poll().map_err(|error| self.copy_error(error))?;
            self.set_copied(back.moved());
        }
        while !back.transfer.is_done() {
            back.transfer.advance().map_err(|error| self.copy_error(error))?;
            self.set_copied(back.moved());
        }
        Ok(())
    }
}

/// Returns the end of the first batch of `range`.
fn batch(chunks: &[AddrRange], range: Range<usize>) -> usize {
    let (mut end, mut len) = (range.start, Bytes::ZERO);
    while end < range.end && (len < BATCH || end == range.start) {
        len += chunks[end].len;
        end += 1;
    }
    end
}
