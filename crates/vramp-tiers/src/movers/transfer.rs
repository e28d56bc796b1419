//! Transfers of one hop, between a card and host memory, or of two, through staging buffers.
//!
//! 1. Pieces begin in order. With one hop each is copied the whole way, in a step of the card's copy queue.
//! 2. With two, one hop fills a staging buffer, and the other drains it. A drained buffer is filled again,
//!    so a few buffers suffice for any length.
//! 3. After a failure or cancellation no piece begins, and pieces in flight are waited for.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::Arc;

use smallvec::SmallVec;
use vramp_core::Bytes;
use vramp_driver::Stream;

use super::copy_queue::QueueError;
use super::core::pipeline::{NextWait, Piece, Pipeline, Stage, next_wait};
use super::core::window::StepId;
use super::error::{MoveError, MoveFailed};
use super::hop::{Hop, InFlight, Settled};
use super::shared::{CopyDependency, Shared};
use super::stored::{DiskCopy, Stored};
use crate::host::{HostAllocation, HostPoolError};
use crate::ledger::shell::wait::CancelToken;

/// Progress of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferProgress {
    /// Bytes that have arrived, from the front.
    pub moved: Bytes,
    /// Bytes that have begun, after those.
    pub in_flight: Bytes,
    /// Bytes to transfer.
    pub total: Bytes,
}

/// A piece that has begun, with its staging buffer.
struct Slot {
    piece: Piece,
    staging: Option<HostAllocation>,
    /// With one hop a piece is drained from the start.
    stage: Stage,
    /// The copy by the hop of the stage.
    copy: InFlight,
}

/// A transfer in flight, which yields a `T`: the [`HostAllocation`] of a transfer with host memory, the
/// [`DiskCopy`] of one to a disk, or nothing. It advances only when the caller polls or waits.
///
/// Dropping it cancels the transfer and waits for copies in flight: no copy outlives it, unless the
/// wait fails.
#[must_use = "dropping this cancels the transfer"]
pub struct Transfer<T = HostAllocation> {
    mover: Arc<Shared>,
    /// Fills staging buffers; `None` with one hop.
    fill: Option<Hop>,
    /// The last hop.
    drain: Hop,
    /// Host memory of a transfer with one hop, until the transfer has ended.
    pub(super) host: Option<HostAllocation>,
    /// Where the transfer begins in the host memory.
    pub(super) offset: Bytes,
    pipeline: Pipeline,
    /// Bytes that the last hop may copy.
    ready: Bytes,
    begun: Bytes,
    moved: Bytes,
    /// Length of a staging buffer.
    staging: Bytes,
    slots: VecDeque<Slot>,
    idle: Vec<HostAllocation>,
    cancel: Option<CancelToken>,
    failure: Option<MoveError>,
    /// True if copies may be in flight that no slot lists.
    unsettled: bool,
    result: PhantomData<fn() -> T>,
}

const TAKEN: &str = "the blocks are taken once, at the end";

impl<T> Transfer<T> {
    pub(super) fn new(
        mover: &Arc<Shared>,
        fill: Option<Hop>,
        drain: Hop,
        len: Bytes,
    ) -> Transfer<T> {
        let (step, most) = (mover.config.step, mover.config.staging_pieces as usize);
        let (piece, staging, most) = match &fill {
            // Pieces are read as they were written.
            Some(Hop::Read { copy, .. }) => (copy.longest(), copy.longest(), most),
            Some(_) => (step, step.min(len), most),
            // The copy queue bounds what is in flight.
            None => (step, Bytes::ZERO, usize::MAX),
        };
        Transfer {
            mover: Arc::clone(mover),
            fill,
            drain,
            host: None,
            offset: Bytes::ZERO,
            pipeline: Pipeline { len, piece, most },
            ready: len,
            begun: Bytes::ZERO,
            moved: Bytes::ZERO,
            staging,
            slots: VecDeque::new(),
            idle: Vec::new(),
            cancel: None,
            failure: None,
            unsettled: false,
            result: PhantomData,
        }
    }

    /// Lets the last hop copy only the first `ready` bytes, until [`allow`](Transfer::allow). Staging
    /// buffers are filled ahead, as far as there are any.
    pub(crate) fn ready(mut self, ready: Bytes) -> Transfer<T> {
        self.ready = ready;
        self
    }

    /// Lets the last hop copy the first `ready` bytes.
    pub(crate) fn allow(&mut self, ready: Bytes) {
        self.ready = self.ready.max(ready);
    }

    /// Lets `token` cancel the transfer, between two pieces.
    pub fn cancelled_by(mut self, token: &CancelToken) -> Transfer<T> {
        self.cancel = Some(token.clone());
        self
    }

    /// Orders pieces that begin later behind other work on the card that the transfer reads, or writes if
    /// it reads no card.
    ///
    /// # Errors
    /// The stream captures a graph, or a driver call failed.
    pub fn after(self, after: CopyDependency) -> Result<Transfer<T>, MoveError> {
        match &self.fill {
            Some(fill @ Hop::Ranges { .. }) => fill.order(after)?,
            _ => self.drain.order(after)?,
        }
        Ok(self)
    }

    /// Orders pieces that arrive later behind other work on the card that the transfer writes.
    ///
    /// # Errors
    /// The stream captures a graph, or a driver call failed.
    pub fn after_at_target(self, after: CopyDependency) -> Result<Transfer<T>, MoveError> {
        self.drain.order(after)?;
        Ok(self)
    }

    /// Orders a transfer with host memory behind other work, and begins its first pieces.
    pub(super) fn start(
        mut self,
        after: Vec<CopyDependency>,
    ) -> Result<Transfer<T>, Box<MoveFailed>> {
        let begun = self.drain.check().and_then(|()| {
            // Also refuses an offset that overflows.
            self.host.as_ref().expect(TAKEN).spans(self.offset, self.pipeline.len)?;
            after.into_iter().try_for_each(|after| self.drain.order(after))?;
            self.fill_window()
        });
        match begun {
            Ok(_) | Err(MoveError::Cancelled { .. }) => Ok(self),
            Err(error) => Err(Box::new(MoveFailed { error, host: self.end() })),
        }
    }

    /// Records completed copies and begins further ones. Returns true if all bytes have arrived.
    /// Never blocks, unless a copy fails: then it waits for copies in flight. One driver call for each
    /// completed step, and at least two for each that begins.
    ///
    /// # Errors
    /// The transfer failed or was cancelled, now or before.
    pub fn poll(&mut self) -> Result<bool, MoveError> {
        self.check()?;
        self.advance_all().map_err(|error| self.fail(error))?;
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

    /// Begins further pieces, and waits until one has advanced, if some bytes have not arrived.
    ///
    /// # Errors
    /// As [`poll`](Transfer::poll).
    pub(crate) fn advance(&mut self) -> Result<(), MoveError> {
        match self.fill_window()? {
            true => Ok(()),
            false => self.wait_for_one().map_err(|error| self.fail(error)),
        }
    }

    /// Begins the pieces that may begin. Returns true if all bytes have arrived. With one hop it asks for
    /// no copy whether it is complete.
    ///
    /// # Errors
    /// As [`poll`](Transfer::poll).
    pub(super) fn fill_window(&mut self) -> Result<bool, MoveError> {
        self.check()?;
        let begun = match self.fill {
            Some(_) => self.advance_all(),
            None => self.begin_pieces(),
        };
        begun.map_err(|error| self.fail(error))?;
        Ok(self.is_done())
    }

    /// Cancels the transfer, waits for copies in flight, and returns the bytes that arrived, from
    /// the front. A transfer of which all bytes arrive counts as complete, not as cancelled.
    ///
    /// # Errors
    /// The transfer failed, now or before.
    pub fn cancel(&mut self) -> Result<Bytes, MoveError> {
        match self.end_cancelled() {
            Ok(()) | Err(MoveError::Cancelled { .. }) => Ok(self.moved),
            Err(other) => Err(other),
        }
    }

    /// Returns the progress. No driver call.
    pub fn progress(&self) -> TransferProgress {
        let (moved, total) = (self.moved, self.pipeline.len);
        TransferProgress { moved, in_flight: self.begun - moved, total }
    }

    /// Returns true if all bytes have arrived, as of the last poll.
    pub fn is_done(&self) -> bool {
        self.moved == self.pipeline.len
    }

    /// Returns the length of the piece in flight that arrives first.
    pub(super) fn next_in_flight(&self) -> Option<Bytes> {
        self.slots.front().map(|slot| slot.piece.len)
    }

    fn check(&self) -> Result<(), MoveError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn advance_all(&mut self) -> Result<(), MoveError> {
        self.note_filled()?;
        self.begin_drains()?;
        self.note_drained()?;
        self.begin_pieces()
    }

    fn note_filled(&mut self) -> Result<(), MoveError> {
        let Some(fill) = &self.fill else { return Ok(()) };
        for slot in self.slots.iter_mut().filter(|slot| slot.stage == Stage::Filling) {
            if !fill.is_done(&mut slot.copy)? {
                break;
            }
            slot.stage = Stage::Filled;
        }
        Ok(())
    }

    fn begin_drains(&mut self) -> Result<(), MoveError> {
        for slot in self.slots.iter_mut().filter(|slot| slot.stage != Stage::Draining) {
            if slot.stage == Stage::Filling || slot.piece.offset + slot.piece.len > self.ready {
                break;
            }
            let host = slot.staging.as_ref().map(|host| (host, slot.piece.skip));
            match self.drain.begin(slot.piece, host) {
                Ok(Some(copy)) => (slot.stage, slot.copy) = (Stage::Draining, copy),
                Ok(None) => break,
                Err(error) => {
                    let staging = slot.staging.take();
                    self.discard(staging);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn note_drained(&mut self) -> Result<(), MoveError> {
        while let Some(slot) = self.slots.front_mut()
            && slot.stage == Stage::Draining
            && self.drain.is_done(&mut slot.copy)?
        {
            self.take_drained();
        }
        Ok(())
    }

    fn take_drained(&mut self) {
        let Some(slot) = self.slots.pop_front() else { return };
        self.moved += slot.piece.len;
        self.idle.extend(slot.staging);
        self.drain.finished(slot.copy);
    }

    /// Begins the first hop of further pieces, unless the token cancels the transfer.
    fn begin_pieces(&mut self) -> Result<(), MoveError> {
        let not_drained = |slot: &Slot| slot.stage != Stage::Draining;
        if self.cancel.as_ref().is_some_and(CancelToken::is_cancelled)
            && (self.begun < self.pipeline.len || self.slots.iter().any(not_drained))
        {
            return self.end_cancelled();
        }
        // Staging buffers are filled ahead of what the last hop may copy.
        let end = if self.fill.is_some() { self.pipeline.len } else { self.ready };
        while let Some(piece) = self.pipeline.next_piece(self.begun, self.slots.len(), end) {
            let (piece, staging, begun) = match &self.fill {
                None => {
                    let host = self.host.as_ref().map(|host| (host, self.offset + piece.offset));
                    (piece, None, self.drain.begin(piece, host))
                }
                Some(fill) => {
                    let piece = fill.cut(piece);
                    let staging = match self.idle.pop() {
                        Some(idle) => idle,
                        None => match self.mover.pool.allocate(self.staging) {
                            Ok(staging) => staging,
                            // Continue with fewer buffers.
                            Err(_) if !self.slots.is_empty() => return Ok(()),
                            Err(error) => return Err(error.into()),
                        },
                    };
                    // What is read as a whole begins at the first byte of the buffer.
                    let begun = fill.begin(piece, Some((&staging, Bytes::ZERO)));
                    (piece, Some(staging), begun)
                }
            };
            match begun {
                Ok(Some(copy)) => {
                    let stage = if self.fill.is_some() { Stage::Filling } else { Stage::Draining };
                    self.slots.push_back(Slot { piece, staging, stage, copy });
                    self.begun += piece.len;
                }
                Ok(None) => {
                    self.idle.extend(staging);
                    return Ok(());
                }
                Err(error) => {
                    self.discard(staging);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits for a copy whose completion lets another begin, or for the oldest one.
    fn wait_for_one(&mut self) -> Result<(), MoveError> {
        let first = self.fill.as_ref().unwrap_or(&self.drain);
        let index = match next_wait(self.slots.iter().map(|slot| slot.stage)) {
            NextWait::Piece(index) => index,
            NextWait::Drain => return self.drain.wait_for_capacity(),
            // Other transfers use the whole window.
            NextWait::Fill => return first.wait_for_capacity(),
        };
        let slot = &mut self.slots[index];
        if slot.stage == Stage::Filling {
            return first.wait(&mut slot.copy);
        }
        self.drain.wait(&mut slot.copy)?;
        self.take_drained();
        Ok(())
    }

    /// Waits for copies in flight, and records the failure of the transfer.
    fn fail(&mut self, error: MoveError) -> MoveError {
        self.unsettled |= error.is_unsettled();
        self.settle();
        let (moved, of) = (self.moved, self.pipeline.len);
        let error = match error {
            MoveError::Unsettled(error) => *error,
            error => error,
        };
        let error = match error {
            MoveError::Device { error, .. } => MoveError::Device { moved, of, error },
            MoveError::Disk { error, .. } => MoveError::Disk { moved, of, error },
            other => other,
        };
        self.record_failure(error)
    }

    /// Records the first failure, which all later calls return. Copies in flight were waited for.
    fn record_failure(&mut self, error: MoveError) -> MoveError {
        self.failure.get_or_insert(error.unless_settled(!self.unsettled)).clone()
    }

    /// Waits for copies in flight. Unless all bytes arrived, the transfer is cancelled.
    fn end_cancelled(&mut self) -> Result<(), MoveError> {
        if let Some(error) = self.settle() {
            return Err(self.fail(error));
        }
        self.check()?;
        let (moved, of) = (self.moved, self.pipeline.len);
        match moved == of {
            true => Ok(()),
            false => Err(self.record_failure(MoveError::Cancelled { moved, of })),
        }
    }

    /// Waits for all copies in flight, and takes the pieces that arrived without a gap. Returns the first
    /// error.
    fn settle(&mut self) -> Option<MoveError> {
        let (mut gap, mut first) = (false, None);
        while let Some(mut slot) = self.slots.pop_front() {
            let is_drained = slot.stage == Stage::Draining;
            let hop = if is_drained { Some(&self.drain) } else { self.fill.as_ref() };
            let settled = hop.map(|hop| hop.settle(&mut slot.copy));
            let Settled { known, arrived, error } = settled.expect("a piece has a hop");
            first = first.or(error);
            gap |= !(is_drained && arrived);
            self.unsettled |= !known;
            if !known {
                self.discard(slot.staging);
            }
            if !gap {
                self.moved += slot.piece.len;
                self.drain.finished(slot.copy);
            }
        }
        self.begun = self.moved;
        self.idle.clear();
        first
    }

    /// Drops a buffer that copies may still use.
    fn discard(&self, staging: Option<HostAllocation>) {
        let Some(mut staging) = staging else { return };
        self.record_use(&mut staging);
    }

    fn record_use(&self, host: &mut HostAllocation) {
        self.fill.iter().chain([&self.drain]).for_each(|hop| hop.record_use(host));
    }

    /// Waits for copies in flight and takes the host memory.
    fn end(&mut self) -> HostAllocation {
        self.settle();
        let mut host = self.host.take().expect(TAKEN);
        if self.unsettled {
            self.record_use(&mut host);
        }
        host
    }
}

impl Transfer<HostAllocation> {
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
                self.slots.clear();
                Ok(self.host.take().expect(TAKEN))
            }
            Err(error) => {
                let host = self.end();
                let error = error.unless_settled(!self.unsettled);
                Err(Box::new(MoveFailed { error, host }))
            }
        }
    }

    fn queue_rest(&mut self, stream: Stream) -> Result<(), MoveError> {
        self.check()?;
        self.mover.refuse_capturing(stream)?;
        if self.cancel.as_ref().is_some_and(CancelToken::is_cancelled) {
            let (moved, of) = (self.moved, self.pipeline.len);
            return Err(MoveError::Cancelled { moved, of });
        }
        let host = self.host.as_ref().expect(TAKEN);
        let mut steps = Vec::new();
        while let Some(piece) = self.pipeline.next_piece(self.begun, 0, self.pipeline.len) {
            steps.push(self.drain.copies(piece, Some((host, self.offset + piece.offset)))?);
            self.begun += piece.len;
        }
        let queued = self.drain.queue().queue_all(&steps);
        let queued = queued.map_err(|QueueError { error, settled }| {
            self.fail(MoveError::device(error).unless_settled(settled))
        })?;
        let mine = self.slots.iter().filter_map(|slot| match slot.copy {
            InFlight::Step(step) => Some(step),
            _ => None,
        });
        let all: SmallVec<[StepId; 8]> = mine.chain(queued).collect();
        if all.is_empty() {
            return Ok(());
        }
        // From here on copies are in flight that no slot lists.
        self.unsettled = true;
        let queue = self.drain.queue();
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
                self.slots.clear();
                Err(self.record_failure(error.into()))
            }
        }
    }
}

impl Transfer<DiskCopy> {
    /// Waits until all bytes are on the disk.
    ///
    /// # Errors
    /// As [`poll`](Transfer::poll). The bytes already written are freed, and the source is
    /// unchanged.
    pub fn finish(mut self) -> Result<DiskCopy, MoveError> {
        self.wait()?;
        let copy = self.drain.disk_copy().map(Arc::clone);
        drop(self);
        Ok(copy.and_then(Arc::into_inner).expect("only the transfer had the copy"))
    }
}

impl Transfer<Stored> {
    /// Ends the transfer, waits for pieces in flight, and returns what lies below the card, and the bytes that
    /// arrived, from the front. A copy that was written has these and no others.
    pub(crate) fn into_stored(mut self) -> (Stored, Bytes) {
        if self.host.is_some() {
            return (Stored::Host(self.end()), self.moved);
        }
        self.settle();
        let mut hops = self.fill.iter().chain([&self.drain]);
        let copy = hops.find_map(Hop::disk_copy).map(Arc::clone);
        (Stored::Disk(copy.expect("it lies on the host or on a disk")), self.moved)
    }
}

impl<T> Drop for Transfer<T> {
    fn drop(&mut self) {
        match self.host.is_some() {
            true => drop(self.end()),
            false => drop(self.settle()),
        }
    }
}

impl<T> std::fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TransferProgress { moved, in_flight, total } = self.progress();
        write!(f, "{moved} of {total} transferred, {in_flight} in flight")
    }
}
