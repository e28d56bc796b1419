//! One range on its way between a device and blocks of the host.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use vramp_alloc::DriverError;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::Stream;

use super::error::{MoveError, MoveFailed};
use super::lane::{Lane, LaneError, Piece, Pieces, Ticket};
use super::mover::Shared;
use crate::host::{HostAllocation, HostPoolError};
use crate::ledger::shell::wait::CancelToken;

/// Which way data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    ToHost,
    ToDevice,
}

impl Way {
    pub fn lane(self, mover: &Shared) -> &Lane {
        match self {
            Way::ToHost => &mover.to_host,
            Way::ToDevice => &mover.to_device,
        }
    }

    /// The copies of a part of a device's memory: one for each run of blocks.
    pub fn pieces(
        self,
        mover: &Shared,
        part: AddrRange,
        host: &HostAllocation,
        offset: Bytes,
    ) -> Result<Pieces, HostPoolError> {
        let mut at = part.start;
        let slices = host.slices(&mover.driver, offset, part.len)?;
        let piece = |slice: vramp_driver::HostSlice| {
            let device = at;
            at = at + slice.len;
            match self {
                Way::ToHost => Piece::ToHost { from: device, to: slice },
                Way::ToDevice => Piece::ToDevice { from: slice, to: device },
            }
        };
        Ok(slices.into_iter().map(piece).collect())
    }
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferProgress {
    /// Known to have arrived, from the front.
    pub moved: Bytes,
    /// Queued behind that.
    pub in_flight: Bytes,
    /// All of it.
    pub total: Bytes,
}

/// A range on its way. It advances only when it is asked; see the
/// [movers' page](crate::Mover).
///
/// Dropped before its end it is cancelled, and what is in flight is waited for: no copy outlives it.
#[must_use = "dropped, it is cancelled"]
pub struct Transfer {
    mover: Arc<Shared>,
    way: Way,
    range: AddrRange,
    /// Taken when it ends.
    host: Option<HostAllocation>,
    offset: Bytes,
    cancel: Option<CancelToken>,
    queued: Bytes,
    moved: Bytes,
    told: Bytes,
    in_flight: VecDeque<(Ticket, Bytes)>,
    failure: Option<MoveError>,
    /// Copies may be in flight that no ticket stands for.
    unsettled: bool,
}

const HERE: &str = "a transfer has its blocks until it ends";

impl Transfer {
    pub(super) fn start(
        mover: Arc<Shared>,
        way: Way,
        range: AddrRange,
        host: HostAllocation,
        offset: Bytes,
        cancel: Option<CancelToken>,
    ) -> Result<Transfer, Box<MoveFailed>> {
        let mut transfer = Transfer {
            mover,
            way,
            range,
            host: Some(host),
            offset,
            cancel,
            queued: Bytes::ZERO,
            moved: Bytes::ZERO,
            told: Bytes::ZERO,
            in_flight: VecDeque::new(),
            failure: None,
            unsettled: false,
        };
        match transfer.queue_steps() {
            Ok(()) | Err(MoveError::Cancelled { .. }) => Ok(transfer),
            Err(error) => Err(Box::new(MoveFailed { error, host: transfer.into_host() })),
        }
    }

    /// Notes what has arrived and queues what there is room for. True if all has arrived. Never
    /// blocks, unless a driver call fails: then it waits for what is in flight. A driver call for
    /// each step that arrived, and two and more for each that is queued.
    ///
    /// # Errors
    /// It failed or was cancelled, now or before.
    pub fn poll(&mut self) -> Result<bool, MoveError> {
        self.check()?;
        self.note_arrivals()?;
        self.queue_steps()?;
        Ok(self.is_done())
    }

    /// Waits until all has arrived.
    ///
    /// # Errors
    /// As [`poll`](Transfer::poll).
    pub fn wait(&mut self) -> Result<(), MoveError> {
        self.check()?;
        while !self.is_done() {
            self.advance()?;
        }
        Ok(())
    }

    /// The next part of the range that has arrived and was not told before, in order. `None` if
    /// there is none yet, or all was told. Never blocks.
    ///
    /// # Errors
    /// As [`poll`](Transfer::poll), once all that arrived was told.
    pub fn poll_part(&mut self) -> Result<Option<AddrRange>, MoveError> {
        let polled = self.poll();
        match self.tell() {
            Some(part) => Ok(Some(part)),
            None => polled.map(|_| None),
        }
    }

    /// The same, and waits for it. `None` once all was told.
    ///
    /// # Errors
    /// As [`poll`](Transfer::poll), once all that arrived was told.
    pub fn wait_part(&mut self) -> Result<Option<AddrRange>, MoveError> {
        loop {
            if let Some(part) = self.tell() {
                return Ok(Some(part));
            }
            self.check()?;
            if self.is_done() {
                return Ok(None);
            }
            if let Err(error) = self.advance() {
                return self.tell().map(Some).ok_or(error);
            }
        }
    }

    /// Queues nothing more, waits for what is in flight, and tells how much has arrived, from the
    /// front. If that is all, it is not cancelled but done.
    ///
    /// # Errors
    /// It failed, now or before.
    pub fn cancel(&mut self) -> Result<Bytes, MoveError> {
        if let Some(error) = self.settle() {
            return Err(self.fail(error));
        }
        match self.end_cancelled() {
            Some(MoveError::Cancelled { .. }) | None => Ok(self.moved),
            Some(other) => Err(other),
        }
    }

    /// How far it is. No driver call.
    pub fn progress(&self) -> TransferProgress {
        let in_flight = self.in_flight.iter().map(|(_, bytes)| *bytes).sum();
        TransferProgress { moved: self.moved, in_flight, total: self.range.len }
    }

    /// True if all has arrived, as far as is known.
    pub fn is_done(&self) -> bool {
        self.moved == self.range.len
    }

    /// The blocks, after what is in flight; what was not queued stays where it is.
    pub fn into_host(mut self) -> HostAllocation {
        self.end()
    }

    /// Queues all that is left, and lets what is queued on `stream` later come behind it. The host
    /// does not wait, and what may be in flight is not bounded. The blocks are noted as used: dropped,
    /// they serve others only once the copies are done.
    ///
    /// # Errors
    /// It failed or was cancelled, the stream captures a graph, or a driver call failed. Nothing is
    /// in flight any more.
    pub fn finish_on(mut self, stream: Stream) -> Result<HostAllocation, Box<MoveFailed>> {
        match self.queue_rest(stream) {
            Ok(()) => {
                self.in_flight.clear();
                self.moved = self.range.len;
                Ok(self.host.take().expect(HERE))
            }
            Err(error) => Err(Box::new(MoveFailed { error, host: self.end() })),
        }
    }

    fn lane(&self) -> &Lane {
        self.way.lane(&self.mover)
    }

    fn check(&self) -> Result<(), MoveError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn tell(&mut self) -> Option<AddrRange> {
        let part = AddrRange::new(self.range.start + self.told, self.moved - self.told);
        self.told = self.moved;
        (!part.len.is_zero()).then_some(part)
    }

    fn note_arrivals(&mut self) -> Result<(), MoveError> {
        while let Some(&(ticket, bytes)) = self.in_flight.front() {
            match self.lane().is_done(ticket) {
                Ok(false) => return Ok(()),
                Ok(true) => {
                    self.in_flight.pop_front();
                    self.moved += bytes;
                }
                Err(error) => return Err(self.fail_after_settling(error)),
            }
        }
        Ok(())
    }

    /// Queues what there is room for, and waits for the step that is to arrive next.
    fn advance(&mut self) -> Result<(), MoveError> {
        self.queue_steps()?;
        let waited = match self.in_flight.front() {
            Some(&(ticket, _)) => self.lane().wait(ticket),
            // Others have taken all the room.
            None => self.lane().wait_for_room(),
        };
        match waited {
            Ok(()) => {}
            Err(error) => return Err(self.fail_after_settling(error)),
        }
        if let Some((_, bytes)) = self.in_flight.pop_front() {
            self.moved += bytes;
        }
        Ok(())
    }

    /// The part of the range from `queued` on that makes one step.
    fn next_step(&self, queued: Bytes) -> Result<Pieces, HostPoolError> {
        let len = self.mover.config.step.min(self.range.len - queued);
        let part = AddrRange::new(self.range.start + queued, len);
        let host = self.host.as_ref().expect(HERE);
        self.way.pieces(&self.mover, part, host, self.offset + queued)
    }

    fn queue_steps(&mut self) -> Result<(), MoveError> {
        while self.queued < self.range.len {
            if self.cancel.as_ref().is_some_and(CancelToken::is_cancelled) {
                return Err(match self.settle() {
                    Some(error) => self.fail(error),
                    None => self.end_cancelled().expect("what is not queued has not arrived"),
                });
            }
            let step = match self.next_step(self.queued) {
                Ok(step) => step,
                Err(error) => {
                    self.settle();
                    return Err(self.keep(error.into()));
                }
            };
            let len = self.mover.config.step.min(self.range.len - self.queued);
            match self.lane().queue(&step) {
                Ok(None) => return Ok(()),
                Ok(Some(ticket)) => {
                    self.queued += len;
                    self.in_flight.push_back((ticket, len));
                }
                Err(LaneError { error, settled }) => {
                    self.unsettled |= !settled;
                    return Err(self.fail_after_settling(error));
                }
            }
        }
        Ok(())
    }

    fn queue_rest(&mut self, stream: Stream) -> Result<(), MoveError> {
        self.check()?;
        self.mover.refuse_capturing(stream)?;
        if self.cancel.as_ref().is_some_and(CancelToken::is_cancelled) {
            let (moved, of) = (self.moved, self.range.len);
            return Err(MoveError::Cancelled { moved, of });
        }
        let mut steps = Vec::new();
        while self.queued < self.range.len {
            steps.push(self.next_step(self.queued)?);
            self.queued += self.mover.config.step.min(self.range.len - self.queued);
        }
        let queued = self.lane().queue_all(&steps);
        let queued = queued.map_err(|LaneError { error, settled }| {
            self.unsettled |= !settled;
            self.fail_after_settling(error)
        })?;
        let mine = self.in_flight.iter().map(|(ticket, _)| *ticket);
        let all: SmallVec<[Ticket; 8]> = mine.chain(queued).collect();
        if all.is_empty() {
            return Ok(());
        }
        // From here on there are copies that no step of ours stands for.
        self.unsettled = true;
        let lane = self.way.lane(&self.mover);
        let ordered = lane.order_before(stream, &all);
        let host = self.host.as_mut().expect(HERE);
        let noted = ordered.map_err(HostPoolError::Pin).and_then(|()| {
            let mut used = lane.streams().into_iter();
            used.try_for_each(|on| host.record_stream(&self.mover.driver, on))
        });
        match noted {
            Ok(()) => {
                self.unsettled = false;
                Ok(())
            }
            Err(error) => {
                let waited =
                    all.iter().map(|step| lane.wait(*step).or_else(|_| lane.settle(*step)));
                self.unsettled = waited.filter(Result::is_err).count() > 0;
                self.in_flight.clear();
                Err(self.keep(error.into()))
            }
        }
    }

    /// Waits for all that is in flight. What arrived without a gap counts. The first error, if any.
    fn settle(&mut self) -> Option<DriverError> {
        let mut first = None;
        let mut gap = false;
        while let Some((ticket, bytes)) = self.in_flight.pop_front() {
            if let Err(error) = self.lane().wait(ticket) {
                first.get_or_insert(error);
                gap |= self.lane().settle(ticket).is_err();
            }
            if !gap {
                self.moved += bytes;
            }
        }
        self.unsettled |= gap;
        first
    }

    fn fail_after_settling(&mut self, error: DriverError) -> MoveError {
        self.settle();
        self.fail(error)
    }

    fn fail(&mut self, error: DriverError) -> MoveError {
        let (moved, of) = (self.moved, self.range.len);
        self.keep(MoveError::Device { moved, of, error })
    }

    fn end_cancelled(&mut self) -> Option<MoveError> {
        let (moved, of) = (self.moved, self.range.len);
        match self.failure {
            None if moved == of => None,
            None => Some(self.keep(MoveError::Cancelled { moved, of })),
            Some(ref failure) => Some(failure.clone()),
        }
    }

    /// The first failure is the one that is told from now on.
    fn keep(&mut self, error: MoveError) -> MoveError {
        self.failure.get_or_insert(error).clone()
    }

    /// Waits for what is in flight and gives the blocks away.
    fn end(&mut self) -> HostAllocation {
        self.settle();
        let mut host = self.host.take().expect(HERE);
        if self.unsettled {
            for stream in self.lane().streams() {
                // A device that cannot even say this does not copy any more.
                let _ = host.record_stream(&self.mover.driver, stream);
            }
        }
        host
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.host.is_some() {
            drop(self.end());
        }
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TransferProgress { moved, in_flight, total } = self.progress();
        write!(f, "{moved} of {total} moved, {in_flight} in flight")
    }
}
