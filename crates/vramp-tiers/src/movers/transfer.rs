//! Transfers between a range of a device and host blocks.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use vramp_alloc::DriverError;
use vramp_core::Bytes;
use vramp_driver::Stream;

use super::copy_queue::{CopyQueue, QueueError, StepCopies};
use super::core::gather::Gather;
use super::core::window::StepId;
use super::error::{MoveError, MoveFailed};
use super::shared::{CopyDirection, Shared};
use crate::host::{HostAllocation, HostPoolError};
use crate::ledger::shell::wait::CancelToken;

/// Progress of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferProgress {
    /// Bytes that have arrived, from the front.
    pub moved: Bytes,
    /// Bytes queued after those.
    pub in_flight: Bytes,
    /// Bytes to transfer.
    pub total: Bytes,
}

/// A transfer in flight. It advances only when the caller polls or waits.
///
/// Dropping it cancels the transfer and waits for copies in flight: no copy outlives it, unless the
/// wait fails.
#[must_use = "dropping this cancels the transfer"]
pub struct Transfer {
    mover: Arc<Shared>,
    direction: CopyDirection,
    memory: Gather,
    /// Bytes that may be queued.
    ready: Bytes,
    /// `None` once the transfer has ended.
    host: Option<HostAllocation>,
    offset: Bytes,
    cancel: Option<CancelToken>,
    queued: Bytes,
    moved: Bytes,
    in_flight: VecDeque<(StepId, Bytes)>,
    failure: Option<MoveError>,
    /// True if copies may be in flight that `in_flight` does not list.
    unsettled: bool,
}

const TAKEN: &str = "the blocks are taken once, at the end";

impl Transfer {
    pub(super) fn start(
        mover: Arc<Shared>,
        direction: CopyDirection,
        memory: Gather,
        ready: Bytes,
        host: HostAllocation,
        offset: Bytes,
        cancel: Option<CancelToken>,
    ) -> Result<Transfer, Box<MoveFailed>> {
        let mut transfer = Transfer {
            mover,
            direction,
            memory,
            ready,
            host: Some(host),
            offset,
            cancel,
            queued: Bytes::ZERO,
            moved: Bytes::ZERO,
            in_flight: VecDeque::new(),
            failure: None,
            unsettled: false,
        };
        match transfer.queue_steps() {
            Ok(()) | Err(MoveError::Cancelled { .. }) => Ok(transfer),
            Err(error) => Err(Box::new(MoveFailed { error, host: transfer.into_host() })),
        }
    }

    /// Records completed steps and queues further ones. Returns true if all bytes have arrived.
    /// Never blocks, unless a driver call fails: then it waits for copies in flight. One driver
    /// call for each completed step, and at least two for each queued step.
    ///
    /// # Errors
    /// The transfer failed or was cancelled, now or before.
    pub fn poll(&mut self) -> Result<bool, MoveError> {
        self.check()?;
        self.note_arrivals()?;
        self.queue_steps()?;
        Ok(self.is_done())
    }

    /// Waits until all bytes have arrived.
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

    /// Cancels the transfer, waits for copies in flight, and returns the bytes that arrived, from
    /// the front. A transfer of which all bytes arrive counts as complete, not as cancelled.
    ///
    /// # Errors
    /// The transfer failed, now or before.
    pub fn cancel(&mut self) -> Result<Bytes, MoveError> {
        if let Some(error) = self.settle() {
            return Err(self.fail(error));
        }
        match self.end_cancelled() {
            Some(MoveError::Cancelled { .. }) | None => Ok(self.moved),
            Some(other) => Err(other),
        }
    }

    /// Returns the progress. No driver call.
    pub fn progress(&self) -> TransferProgress {
        let in_flight = self.in_flight.iter().map(|(_, bytes)| *bytes).sum();
        TransferProgress { moved: self.moved, in_flight, total: self.memory.len() }
    }

    /// Returns true if all bytes have arrived, as of the last poll.
    pub fn is_done(&self) -> bool {
        self.moved == self.memory.len()
    }

    /// Cancels the rest, waits for copies in flight, and returns the blocks.
    pub fn into_host(mut self) -> HostAllocation {
        self.end()
    }

    /// Queues the rest and orders work queued on `stream` later behind it. The host does not wait,
    /// and the bytes in flight are not bounded. The returned blocks record the copies: once
    /// dropped, they are reused only after them.
    ///
    /// # Errors
    /// The transfer failed or was cancelled, the stream captures a graph, or a driver call failed.
    /// No copy is in flight, unless the error is [`MoveError::Unsettled`].
    pub fn finish_on(mut self, stream: Stream) -> Result<HostAllocation, Box<MoveFailed>> {
        match self.queue_rest(stream) {
            Ok(()) => {
                self.in_flight.clear();
                self.moved = self.memory.len();
                Ok(self.host.take().expect(TAKEN))
            }
            Err(error) => {
                let host = self.end();
                let error = error.unless_settled(!self.unsettled);
                Err(Box::new(MoveFailed { error, host }))
            }
        }
    }

    fn queue(&self) -> &CopyQueue {
        self.direction.queue(&self.mover)
    }

    fn check(&self) -> Result<(), MoveError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn note_arrivals(&mut self) -> Result<(), MoveError> {
        while let Some(&(step, bytes)) = self.in_flight.front() {
            match self.queue().is_done(step) {
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

    /// Queues the steps that the window admits. Returns true if all bytes have arrived.
    pub(crate) fn fill_window(&mut self) -> Result<bool, MoveError> {
        self.check()?;
        self.queue_steps()?;
        Ok(self.is_done())
    }

    /// Returns the length of the step in flight that arrives first.
    pub(super) fn next_in_flight(&self) -> Option<Bytes> {
        self.in_flight.front().map(|(_, bytes)| *bytes)
    }

    /// Queues further steps, and waits for the next step to arrive.
    pub(crate) fn advance(&mut self) -> Result<(), MoveError> {
        self.queue_steps()?;
        let waited = match self.in_flight.front() {
            Some(&(step, _)) => self.queue().wait(step),
            // Other transfers use the whole window.
            None => self.queue().wait_for_capacity(),
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

    fn step_len(&self, queued: Bytes) -> Bytes {
        self.mover.config.step.min(self.memory.len().min(self.ready) - queued)
    }

    /// Lets the transfer queue its first `ready` bytes, if it was started with less.
    pub(crate) fn allow(&mut self, ready: Bytes) {
        self.ready = self.ready.max(ready);
    }

    /// Returns the copies of the step that begins at `queued`.
    fn next_step(&self, queued: Bytes) -> Result<StepCopies, HostPoolError> {
        let end = queued + self.step_len(queued);
        let host = self.host.as_ref().expect(TAKEN);
        let mut copies = StepCopies::new();
        let mut offset = self.offset + queued;
        for part in self.memory.pieces(queued, end) {
            copies.extend(self.direction.copies(&self.mover, part, host, offset)?);
            offset += part.len;
        }
        Ok(copies)
    }

    fn queue_steps(&mut self) -> Result<(), MoveError> {
        while self.queued < self.memory.len().min(self.ready) {
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
                    return Err(self.record_failure(error.into()));
                }
            };
            let len = self.step_len(self.queued);
            match self.queue().queue(&step) {
                Ok(None) => return Ok(()),
                Ok(Some(step)) => {
                    self.queued += len;
                    self.in_flight.push_back((step, len));
                }
                Err(QueueError { error, settled }) => {
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
            let (moved, of) = (self.moved, self.memory.len());
            return Err(MoveError::Cancelled { moved, of });
        }
        self.ready = self.memory.len();
        let mut steps = Vec::new();
        while self.queued < self.memory.len() {
            steps.push(self.next_step(self.queued)?);
            self.queued += self.step_len(self.queued);
        }
        let queued = self.queue().queue_all(&steps);
        let queued = queued.map_err(|QueueError { error, settled }| {
            self.unsettled |= !settled;
            self.fail_after_settling(error)
        })?;
        let mine = self.in_flight.iter().map(|(step, _)| *step);
        let all: SmallVec<[StepId; 8]> = mine.chain(queued).collect();
        if all.is_empty() {
            return Ok(());
        }
        // From here on copies are in flight that `in_flight` does not list.
        self.unsettled = true;
        let queue = self.direction.queue(&self.mover);
        let ordered = queue.order_before(stream, &all);
        let host = self.host.as_mut().expect(TAKEN);
        let noted = ordered.map_err(HostPoolError::Pin).and_then(|()| {
            let mut used = queue.streams().into_iter();
            used.try_for_each(|on| host.record_stream(&self.mover.driver, on))
        });
        match noted {
            Ok(()) => {
                self.unsettled = false;
                Ok(())
            }
            Err(error) => {
                let waited =
                    all.iter().map(|step| queue.wait(*step).or_else(|_| queue.settle(*step)));
                self.unsettled = waited.filter(Result::is_err).count() > 0;
                self.in_flight.clear();
                Err(self.record_failure(error.into()))
            }
        }
    }

    /// Waits for all steps in flight, and counts those that arrived without a gap. Returns the
    /// first error.
    fn settle(&mut self) -> Option<DriverError> {
        let mut first = None;
        let mut gap = false;
        while let Some((step, bytes)) = self.in_flight.pop_front() {
            if let Err(error) = self.queue().wait(step) {
                first.get_or_insert(error);
                gap |= self.queue().settle(step).is_err();
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
        let (moved, of) = (self.moved, self.memory.len());
        self.record_failure(MoveError::Device { moved, of, error })
    }

    fn end_cancelled(&mut self) -> Option<MoveError> {
        let (moved, of) = (self.moved, self.memory.len());
        match self.failure {
            None if moved == of => None,
            None => Some(self.record_failure(MoveError::Cancelled { moved, of })),
            Some(ref failure) => Some(failure.clone()),
        }
    }

    /// Records the first failure, which all later calls return.
    fn record_failure(&mut self, error: MoveError) -> MoveError {
        self.failure.get_or_insert(error.unless_settled(!self.unsettled)).clone()
    }

    /// Waits for copies in flight and takes the blocks.
    fn end(&mut self) -> HostAllocation {
        self.settle();
        let mut host = self.host.take().expect(TAKEN);
        if self.unsettled {
            host.record_unsettled(&self.mover.driver, self.queue().streams());
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
        write!(f, "{moved} of {total} transferred, {in_flight} in flight")
    }
}
