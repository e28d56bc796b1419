//! Transfers through host memory, piece by piece.
//!
//! 1. One endpoint fills a staging buffer, the other drains it. Both begin in order.
//! 2. A drained buffer is filled again, so a few buffers suffice for any length.
//! 3. After a failure or cancellation no piece begins, and pieces in flight are waited for.

use std::collections::VecDeque;
use std::sync::Arc;

use vramp_core::Bytes;

use super::core::pipeline::{NextWait, Pipeline, Stage, StagedPiece, next_wait};
use super::endpoint::{CopyEndpoint, InFlightCopy};
use super::error::MoveError;
use super::gpu::GpuEndpoint;
use super::shared::{CopyDependency, Shared};
use super::transfer::TransferProgress;
use crate::host::{HostAllocation, HostPoolError};
use crate::ledger::shell::wait::CancelToken;

enum SlotState<F, D> {
    Filling(F),
    Filled,
    Draining(D),
}

impl<F, D> SlotState<F, D> {
    fn stage(&self) -> Stage {
        match self {
            SlotState::Filling(_) => Stage::Filling,
            SlotState::Filled => Stage::Filled,
            SlotState::Draining(_) => Stage::Draining,
        }
    }
}

/// A piece between the endpoints, with its staging buffer.
struct Slot<F, D> {
    piece: StagedPiece,
    staging: Option<HostAllocation>,
    state: SlotState<F, D>,
}

/// A transfer through staging buffers. It advances only when the caller polls or waits.
///
/// Dropping it cancels the transfer and waits for pieces in flight.
#[must_use = "a staged transfer advances only when polled"]
pub struct StagedTransfer<F: CopyEndpoint, D: CopyEndpoint> {
    mover: Arc<Shared>,
    fill: F,
    /// `None` once it was taken by [`into_target`](StagedTransfer::into_target).
    drain: Option<D>,
    pipeline: Pipeline,
    /// Bytes of a staging buffer.
    staging: Bytes,
    /// Bytes that may be drained.
    ready: Bytes,
    begun: Bytes,
    moved: Bytes,
    slots: VecDeque<Slot<F::InFlight, D::InFlight>>,
    idle: Vec<HostAllocation>,
    cancel: Option<CancelToken>,
    failure: Option<MoveError>,
    /// True if copies may be in flight that no slot lists.
    unsettled: bool,
}

const TAKEN: &str = "the endpoint is taken once";

impl<F: CopyEndpoint, D: CopyEndpoint> StagedTransfer<F, D> {
    pub(super) fn new(mover: &Arc<Shared>, fill: F, drain: D, len: Bytes) -> StagedTransfer<F, D> {
        StagedTransfer {
            mover: Arc::clone(mover),
            fill,
            drain: Some(drain),
            pipeline: Pipeline {
                len,
                piece: mover.config.step,
                most: mover.config.staging_pieces as usize,
            },
            staging: mover.config.step.min(len),
            ready: len,
            begun: Bytes::ZERO,
            moved: Bytes::ZERO,
            slots: VecDeque::new(),
            idle: Vec::new(),
            cancel: None,
            failure: None,
            unsettled: false,
        }
    }

    /// Sets the length of a piece, and of a staging buffer.
    pub(super) fn with_piece(mut self, piece: Bytes) -> StagedTransfer<F, D> {
        (self.pipeline.piece, self.staging) = (piece, piece);
        self
    }

    /// Lets only the first `ready` bytes be drained, until [`allow`](StagedTransfer::allow). Others are
    /// filled ahead, as far as there are buffers.
    pub(crate) fn ready(mut self, ready: Bytes) -> StagedTransfer<F, D> {
        self.ready = ready;
        self
    }

    /// Lets the first `ready` bytes be drained.
    pub(crate) fn allow(&mut self, ready: Bytes) {
        self.ready = self.ready.max(ready);
    }

    /// Polls, and waits for one copy if some bytes have not arrived.
    ///
    /// # Errors
    /// As [`poll`](StagedTransfer::poll).
    pub(crate) fn wait_for_some(&mut self) -> Result<(), MoveError> {
        if self.poll()? {
            return Ok(());
        }
        self.wait_for_one().map_err(|error| self.fail(error))
    }

    /// Lets `token` cancel the transfer, between two pieces.
    pub fn cancelled_by(mut self, token: &CancelToken) -> Self {
        self.cancel = Some(token.clone());
        self
    }

    /// Records completed copies and begins further ones. Returns true if all bytes have arrived.
    /// Never blocks, unless a copy fails: then it waits for pieces in flight.
    ///
    /// # Errors
    /// The transfer failed or was cancelled, now or before.
    pub fn poll(&mut self) -> Result<bool, MoveError> {
        self.check()?;
        if self.cancel.as_ref().is_some_and(CancelToken::is_cancelled) && !self.is_done() {
            self.cancel();
            self.check()?;
        }
        match self.advance() {
            Ok(()) => Ok(self.is_done()),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Waits until all bytes have arrived.
    ///
    /// # Errors
    /// As [`poll`](StagedTransfer::poll).
    pub fn wait(&mut self) -> Result<(), MoveError> {
        while !self.is_done() {
            self.wait_for_some()?;
        }
        self.check()
    }

    /// Cancels the transfer, waits for pieces in flight, and returns the bytes that arrived, from
    /// the front.
    pub fn cancel(&mut self) -> Bytes {
        self.settle();
        if !self.is_done() {
            let (moved, of) = (self.moved, self.pipeline.len);
            self.record_failure(MoveError::Cancelled { moved, of });
        }
        self.moved
    }

    /// Returns the progress. No driver call.
    pub fn progress(&self) -> TransferProgress {
        TransferProgress {
            moved: self.moved,
            in_flight: self.begun - self.moved,
            total: self.pipeline.len,
        }
    }

    /// Returns true if all bytes have arrived, as of the last poll.
    pub fn is_done(&self) -> bool {
        self.moved == self.pipeline.len
    }

    /// Waits for pieces in flight and returns the endpoint that drains.
    pub(super) fn into_target(mut self) -> D {
        self.settle();
        self.drain.take().expect(TAKEN)
    }

    fn check(&self) -> Result<(), MoveError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn advance(&mut self) -> Result<(), MoveError> {
        self.note_filled()?;
        self.begin_drains()?;
        self.note_drained()?;
        self.begin_fills()
    }

    fn note_filled(&mut self) -> Result<(), MoveError> {
        for slot in &mut self.slots {
            if let SlotState::Filling(copy) = &mut slot.state {
                if !copy.is_done()? {
                    break;
                }
                slot.state = SlotState::Filled;
            }
        }
        Ok(())
    }

    fn begin_drains(&mut self) -> Result<(), MoveError> {
        let drain = self.drain.as_mut().expect(TAKEN);
        for slot in &mut self.slots {
            match slot.state {
                SlotState::Draining(_) => continue,
                SlotState::Filling(_) => break,
                SlotState::Filled if slot.piece.offset + slot.piece.len > self.ready => break,
                SlotState::Filled => match drain.begin(slot.piece, slot.staging.as_ref()) {
                    Ok(Some(copy)) => slot.state = SlotState::Draining(copy),
                    Ok(None) => break,
                    Err(error) => {
                        let staging = slot.staging.take();
                        self.discard(staging);
                        return Err(error);
                    }
                },
            }
        }
        Ok(())
    }

    fn note_drained(&mut self) -> Result<(), MoveError> {
        while let Some(Slot { state: SlotState::Draining(copy), .. }) = self.slots.front_mut() {
            if !copy.is_done()? {
                break;
            }
            self.take_drained();
        }
        Ok(())
    }

    fn take_drained(&mut self) {
        let Some(slot) = self.slots.pop_front() else { return };
        self.moved += slot.piece.len;
        self.idle.extend(slot.staging);
        if let SlotState::Draining(copy) = slot.state {
            self.drain.as_mut().expect(TAKEN).finished(copy);
        }
    }

    fn begin_fills(&mut self) -> Result<(), MoveError> {
        while let Some(piece) = self.pipeline.next_piece(self.begun, self.slots.len()) {
            let piece = self.fill.cut(piece);
            let staging = match self.take_staging() {
                Ok(staging) => staging,
                // Continue with fewer buffers.
                Err(_) if !self.slots.is_empty() => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let begun = self.fill.begin(piece, staging.as_ref());
            match begun {
                Ok(Some(copy)) => {
                    let state = SlotState::Filling(copy);
                    self.slots.push_back(Slot { piece, staging, state });
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

    /// Takes a staging buffer, if the endpoints need one.
    fn take_staging(&mut self) -> Result<Option<HostAllocation>, HostPoolError> {
        if !self.fill.uses_staging() && !self.drain.as_ref().expect(TAKEN).uses_staging() {
            return Ok(None);
        }
        if let Some(idle) = self.idle.pop() {
            return Ok(Some(idle));
        }
        self.mover.pool.allocate(self.staging).map(Some)
    }

    /// Waits for a copy whose completion lets another begin.
    fn wait_for_one(&mut self) -> Result<(), MoveError> {
        match next_wait(self.slots.iter().map(|slot| slot.state.stage())) {
            NextWait::Piece(index) => match &mut self.slots[index].state {
                SlotState::Filling(copy) => copy.wait(),
                SlotState::Draining(copy) => copy.wait(),
                SlotState::Filled => Ok(()),
            },
            NextWait::Drain => self.drain.as_mut().expect(TAKEN).wait_for_capacity(),
            NextWait::Fill => self.fill.wait_for_capacity(),
        }
    }

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

    /// Records the first failure, which all later calls return. Pieces in flight were waited for.
    fn record_failure(&mut self, error: MoveError) -> MoveError {
        self.failure.get_or_insert(error.unless_settled(!self.unsettled)).clone()
    }

    /// Waits for all pieces in flight. Counts those that arrived without a gap, and hands them to the
    /// endpoint that drains.
    fn settle(&mut self) {
        let mut gap = false;
        while let Some(mut slot) = self.slots.pop_front() {
            let (known, arrived) = match &mut slot.state {
                SlotState::Filling(copy) => (ended(copy).0, false),
                SlotState::Filled => (true, false),
                SlotState::Draining(copy) => ended(copy),
            };
            gap |= !arrived;
            self.unsettled |= !known;
            match known {
                true => self.idle.extend(slot.staging),
                false => self.discard(slot.staging),
            }
            if let (false, SlotState::Draining(copy)) = (gap, slot.state) {
                self.moved += slot.piece.len;
                self.drain.as_mut().expect(TAKEN).finished(copy);
            }
        }
        self.begun = self.moved;
        self.idle.clear();
    }

    /// Drops a buffer that copies may still use.
    fn discard(&self, staging: Option<HostAllocation>) {
        let Some(mut staging) = staging else { return };
        self.fill.record_use(&mut staging);
        if let Some(drain) = &self.drain {
            drain.record_use(&mut staging);
        }
    }
}

impl<D: CopyEndpoint> StagedTransfer<GpuEndpoint, D> {
    /// Orders the transfer behind other work on the source device.
    ///
    /// # Errors
    /// The stream captures a graph, or a driver call failed.
    pub fn after(self, after: CopyDependency) -> Result<Self, MoveError> {
        self.fill.order(after)?;
        Ok(self)
    }
}

impl<F: CopyEndpoint> StagedTransfer<F, GpuEndpoint> {
    /// Orders the transfer behind other work on the target device.
    ///
    /// # Errors
    /// The stream captures a graph, or a driver call failed.
    pub fn after_at_target(self, after: CopyDependency) -> Result<Self, MoveError> {
        self.drain.as_ref().expect(TAKEN).order(after)?;
        Ok(self)
    }
}

/// Returns whether no part of the copy is in flight, and whether it succeeded.
fn ended(copy: &mut impl InFlightCopy) -> (bool, bool) {
    match copy.wait() {
        Ok(()) => (true, true),
        Err(_) => (copy.settle().is_ok(), false),
    }
}

impl<F: CopyEndpoint, D: CopyEndpoint> Drop for StagedTransfer<F, D> {
    fn drop(&mut self) {
        if self.drain.is_some() {
            self.settle();
        }
    }
}

impl<F: CopyEndpoint, D: CopyEndpoint> std::fmt::Debug for StagedTransfer<F, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TransferProgress { moved, in_flight, total } = self.progress();
        write!(f, "{moved} of {total} transferred, {in_flight} between the endpoints")
    }
}
