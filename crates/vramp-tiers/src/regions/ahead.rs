//! What is done ahead of a pause and of a resume, and reads of copies.

use vramp_core::{AddrRange, Bytes};

use super::copies::{Below, Contents, Copy, Moving, Place};
use super::error::RegionError;
use super::region::{Backup, Phase, ReadLate, Region, State};
use crate::movers::MoveError;

impl Region {
    /// Copies contents ahead, so that a pause copies nothing.
    pub(super) fn clean(&self, below: &Below) -> Result<(), RegionError> {
        let mut state = self.state();
        let State::Awake { copy, lost } = &mut *state else { return Ok(()) };
        if self.options.backup == Backup::None {
            return Ok(());
        }
        self.set_phase(Phase::Pausing);
        let cleaned = self.copy_ahead(below, copy, lost);
        self.note(&state);
        cleaned
    }

    fn copy_ahead(
        &self,
        below: &Below,
        copy: &mut Option<Copy>,
        lost: &mut Option<ReadLate>,
    ) -> Result<(), RegionError> {
        if let Some(lost) = lost {
            lost.mover.settle().map_err(|error| self.copy_error(error))?;
        }
        *lost = None;
        // Counted first: a block that is allocated meanwhile makes the copy invalid.
        let allocations = self.allocations();
        let listed = self.allocator.contents();
        let not_now = |error| RegionError::NotNow { tag: self.tag.clone(), error };
        let contents = Contents::new(&listed.map_err(not_now)?);
        let len = contents.len();
        if self.options.read_only
            && copy.as_ref().is_some_and(|copy| self.is_valid(copy, &contents) && copy.valid == len)
        {
            return Ok(());
        }
        *copy = None;
        let Copy { place, .. } = self.empty_copy(below, &contents, len)?;
        self.begin_copies(len);
        let ranges = contents.ranges().to_vec();
        // What is freed meanwhile stays mapped. What refuses a pin is memory of an arena, whose owner keeps it.
        let pins = ranges.iter().filter_map(|&range| self.allocator.pin_range(range).ok());
        let late = lost.insert(ReadLate { mover: below.mover.clone(), _pins: pins.collect() });
        let copied = self.copy_whole(late, ranges, place);
        if late.mover.settle().is_ok() {
            *lost = None;
        }
        let (place, valid) = copied?;
        *copy = Some(Copy { contents, place, valid, allocations });
        Ok(())
    }

    /// Copies ranges to a place, and returns it with the bytes that arrived.
    fn copy_whole(
        &self,
        late: &ReadLate,
        ranges: Vec<AddrRange>,
        place: Place,
    ) -> Result<(Place, Bytes), RegionError> {
        let mut out = Moving::out(&late.mover, ranges, place, Bytes::ZERO)
            .map_err(|failed| self.copy_error(failed.1))?;
        while !out.transfer.is_done() {
            out.transfer.advance().map_err(|error| self.copy_error(error))?;
            self.set_copied(out.moved());
        }
        Ok(out.end())
    }

    /// Reads contents on a disk into host memory.
    pub(super) fn prefetch(&self, below: &Below) -> Result<(), RegionError> {
        let mut state = self.state();
        let State::Asleep(asleep) = &mut *state else { return Ok(()) };
        let needed = asleep.contents_of(asleep.gone);
        let Some(Copy { place, .. }) = &mut asleep.copy else { return Ok(()) };
        if needed.is_zero() || !place.is_on_disk() {
            return Ok(());
        }
        let read = place.read_ahead(below.mover.pool(), needed, |all, read| {
            if read.is_zero() {
                self.begin_copies(all);
            }
            self.set_copied(read);
        });
        self.note(&state);
        read.map_err(|error| match error {
            MoveError::Host(error) => {
                RegionError::NoRoomToPrefetch { tag: self.tag.clone(), needed, error }
            }
            error => self.copy_error(error),
        })
    }

    /// Reads bytes of a block from the copy.
    pub(super) fn read_backup(
        &self,
        below: &Below,
        range: AddrRange,
        out: &mut [u8],
    ) -> Result<(), RegionError> {
        let state = self.state();
        let (copy, at) = self.find_backup(&state, range)?;
        copy.read(below.mover.pool(), at, out).map_err(|error| self.copy_error(error))
    }

    /// Fails as a read of these bytes would that reads nothing.
    pub(super) fn check_backup(&self, range: AddrRange) -> Result<(), RegionError> {
        self.find_backup(&self.state(), range).map(drop)
    }

    /// Returns the copy of bytes of a block, and where they begin in it.
    fn find_backup<'a>(
        &self,
        state: &'a State,
        range: AddrRange,
    ) -> Result<(&'a Copy, Bytes), RegionError> {
        let State::Asleep(asleep) = state else {
            return Err(RegionError::Awake { tag: self.tag.clone() });
        };
        let at = asleep.contents.find(range).ok_or(RegionError::NotContents { range })?;
        let copy = asleep.copy.as_ref().filter(|copy| at + range.len <= copy.valid);
        let copy = copy.ok_or_else(|| RegionError::NoBackup { tag: self.tag.clone(), range })?;
        Ok((copy, at))
    }
}
