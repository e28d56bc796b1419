//! Data on its way through blocks of the host, piece by piece: one piece leaves while others come.
//!
//! 1. The first end fills a piece of staging, the second one drains it. Both begin in order.
//! 2. A piece that was drained is filled again. So staging is a few pieces, whatever the length.
//! 3. After a failure, or cancelled, nothing begins any more; what is in flight is waited for.

use std::collections::VecDeque;
use std::sync::Arc;

use vramp_core::Bytes;

use super::error::MoveError;
use super::gpu::GpuEndpoint;
use super::mover::{CopyDependency, Shared};
use super::transfer::TransferProgress;
use crate::host::{HostAllocation, HostPoolError};
use crate::ledger::shell::wait::CancelToken;

/// A part of what is transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedPiece {
    /// Where it begins.
    pub offset: Bytes,
    /// How long it is.
    pub len: Bytes,
}

/// Something that fills staging or drains it: a range of a device, a file.
pub trait CopyEndpoint: Send {
    /// A part in flight.
    type InFlightCopy: InFlightCopy;

    /// False if parts go without staging.
    fn uses_staging(&self) -> bool {
        true
    }

    /// Begins one part; staging is used from its first byte on. `None` if there is no room now.
    ///
    /// # Errors
    /// It could not begin. Nothing of it is in flight, as far as can be known.
    fn begin(
        &mut self,
        part: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<Self::InFlightCopy>, MoveError>;

    /// Waits until something in flight is done.
    ///
    /// # Errors
    /// What is in flight failed.
    fn wait_for_room(&mut self) -> Result<(), MoveError>;

    /// Takes a flight that is done. In order.
    fn finished(&mut self, flight: Self::InFlightCopy) {
        drop(flight);
    }

    /// Notes that staging must not serve others before this end's work is done, which is not known.
    fn keep_until_idle(&self, staging: &mut HostAllocation);
}

/// A part that an [`CopyEndpoint`] has begun.
pub trait InFlightCopy: Send {
    /// True if it is done. Never blocks.
    ///
    /// # Errors
    /// It failed.
    fn is_done(&mut self) -> Result<bool, MoveError>;

    /// Waits for it.
    ///
    /// # Errors
    /// It failed.
    fn wait(&mut self) -> Result<(), MoveError>;

    /// Waits until nothing of it is in flight, after it failed.
    ///
    /// # Errors
    /// It cannot be known.
    fn settle(&mut self) -> Result<(), MoveError>;
}

enum Stage<F, D> {
    Filling(F),
    Filled,
    Draining(D),
}

struct Slot<F, D> {
    part: StagedPiece,
    staging: Option<HostAllocation>,
    stage: Stage<F, D>,
}

/// Data on its way from one [`CopyEndpoint`] to another. It advances only when it is asked.
///
/// Dropped before its end it is cancelled, and what is in flight is waited for.
#[must_use = "nothing moves until it is asked"]
pub struct StagedTransfer<F: CopyEndpoint, D: CopyEndpoint> {
    mover: Arc<Shared>,
    fill: F,
    /// Taken when it ends.
    drain: Option<D>,
    len: Bytes,
    piece: Bytes,
    begun: Bytes,
    moved: Bytes,
    slots: VecDeque<Slot<F::InFlightCopy, D::InFlightCopy>>,
    idle: Vec<HostAllocation>,
    cancel: Option<CancelToken>,
    failure: Option<MoveError>,
}

const HERE: &str = "an end is there until it is taken";

impl<F: CopyEndpoint, D: CopyEndpoint> StagedTransfer<F, D> {
    pub(super) fn new(mover: &Arc<Shared>, fill: F, drain: D, len: Bytes) -> StagedTransfer<F, D> {
        StagedTransfer {
            mover: Arc::clone(mover),
            fill,
            drain: Some(drain),
            len,
            piece: mover.config.step,
            begun: Bytes::ZERO,
            moved: Bytes::ZERO,
            slots: VecDeque::new(),
            idle: Vec::new(),
            cancel: None,
            failure: None,
        }
    }

    /// The same in pieces of another length.
    pub(super) fn in_pieces_of(mut self, piece: Bytes) -> StagedTransfer<F, D> {
        self.piece = piece;
        self
    }

    /// Lets the token end it, between two pieces.
    pub fn cancelled_by(mut self, token: &CancelToken) -> Self {
        self.cancel = Some(token.clone());
        self
    }

    /// Notes what is done and begins what can begin. True if all has arrived. Never blocks, unless
    /// something fails: then it waits for what is in flight.
    ///
    /// # Errors
    /// It failed or was cancelled, now or before.
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

    /// Waits until all has arrived.
    ///
    /// # Errors
    /// As [`poll`](Staged::poll).
    pub fn wait(&mut self) -> Result<(), MoveError> {
        while !self.poll()? {
            if let Err(error) = self.wait_for_one() {
                return Err(self.fail(error));
            }
        }
        Ok(())
    }

    /// Begins nothing more, waits for what is in flight, and tells how much has arrived, from the
    /// front.
    pub fn cancel(&mut self) -> Bytes {
        self.settle();
        if !self.is_done() {
            let (moved, of) = (self.moved, self.len);
            self.failure.get_or_insert(MoveError::Cancelled { moved, of });
        }
        self.moved
    }

    /// How far it is. No driver call.
    pub fn progress(&self) -> TransferProgress {
        TransferProgress { moved: self.moved, in_flight: self.begun - self.moved, total: self.len }
    }

    /// True if all has arrived, as far as is known.
    pub fn is_done(&self) -> bool {
        self.moved == self.len
    }

    /// The end that data goes to, after what is in flight.
    pub(super) fn into_target(mut self) -> D {
        self.settle();
        self.drain.take().expect(HERE)
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
            if let Stage::Filling(flight) = &mut slot.stage {
                if !flight.is_done()? {
                    break;
                }
                slot.stage = Stage::Filled;
            }
        }
        Ok(())
    }

    fn begin_drains(&mut self) -> Result<(), MoveError> {
        let drain = self.drain.as_mut().expect(HERE);
        for slot in &mut self.slots {
            match slot.stage {
                Stage::Draining(_) => continue,
                Stage::Filling(_) => break,
                Stage::Filled => match drain.begin(slot.part, slot.staging.as_ref())? {
                    Some(flight) => slot.stage = Stage::Draining(flight),
                    None => break,
                },
            }
        }
        Ok(())
    }

    fn note_drained(&mut self) -> Result<(), MoveError> {
        while let Some(Slot { stage: Stage::Draining(flight), .. }) = self.slots.front_mut() {
            if !flight.is_done()? {
                break;
            }
            self.take_drained();
        }
        Ok(())
    }

    fn take_drained(&mut self) {
        let Some(slot) = self.slots.pop_front() else { return };
        self.moved += slot.part.len;
        self.idle.extend(slot.staging);
        if let Stage::Draining(flight) = slot.stage {
            self.drain.as_mut().expect(HERE).finished(flight);
        }
    }

    fn begin_fills(&mut self) -> Result<(), MoveError> {
        let most = self.mover.config.staging_pieces as usize;
        while self.slots.len() < most && self.begun < self.len {
            let len = self.piece.min(self.len - self.begun);
            let part = StagedPiece { offset: self.begun, len };
            let staging = match self.take_staging() {
                Ok(staging) => staging,
                // It goes on with less.
                Err(_) if !self.slots.is_empty() => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let begun = self.fill.begin(part, staging.as_ref());
            match begun {
                Ok(Some(flight)) => {
                    let stage = Stage::Filling(flight);
                    self.slots.push_back(Slot { part, staging, stage });
                    self.begun += len;
                }
                Ok(None) => {
                    self.idle.extend(staging);
                    return Ok(());
                }
                Err(error) => {
                    self.give_up(staging);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// A piece of staging, if any is needed.
    fn take_staging(&mut self) -> Result<Option<HostAllocation>, HostPoolError> {
        if !self.fill.uses_staging() && !self.drain.as_ref().expect(HERE).uses_staging() {
            return Ok(None);
        }
        if let Some(idle) = self.idle.pop() {
            return Ok(Some(idle));
        }
        self.mover.pool.allocate(self.piece.min(self.len)).map(Some)
    }

    /// Waits for one thing that lets others begin.
    fn wait_for_one(&mut self) -> Result<(), MoveError> {
        let filling = |slot: &&mut Slot<_, _>| matches!(slot.stage, Stage::Filling(_));
        if let Some(Slot { stage: Stage::Filling(flight), .. }) =
            self.slots.iter_mut().find(filling)
        {
            return flight.wait();
        }
        match self.slots.front_mut().map(|slot| &mut slot.stage) {
            Some(Stage::Draining(flight)) => flight.wait(),
            Some(_) => self.drain.as_mut().expect(HERE).wait_for_room(),
            None => self.fill.wait_for_room(),
        }
    }

    fn fail(&mut self, error: MoveError) -> MoveError {
        self.settle();
        let (moved, of) = (self.moved, self.len);
        let error = match error {
            MoveError::Device { error, .. } => MoveError::Device { moved, of, error },
            MoveError::Disk { error, .. } => MoveError::Disk { moved, of, error },
            other => other,
        };
        self.failure.get_or_insert(error).clone()
    }

    /// Waits for all that is in flight. What arrived without a gap counts.
    fn settle(&mut self) {
        let mut gap = false;
        while let Some(mut slot) = self.slots.pop_front() {
            let (known, arrived) = match &mut slot.stage {
                Stage::Filling(flight) => (ended(flight).0, false),
                Stage::Filled => (true, false),
                Stage::Draining(flight) => ended(flight),
            };
            gap |= !arrived;
            if !gap {
                self.moved += slot.part.len;
            }
            match known {
                true => self.idle.extend(slot.staging),
                false => self.give_up(slot.staging),
            }
        }
        self.begun = self.moved;
        self.idle.clear();
    }

    /// Gives staging away that copies may still use.
    fn give_up(&self, staging: Option<HostAllocation>) {
        let Some(mut staging) = staging else { return };
        self.fill.keep_until_idle(&mut staging);
        if let Some(drain) = &self.drain {
            drain.keep_until_idle(&mut staging);
        }
    }
}

impl<D: CopyEndpoint> StagedTransfer<GpuEndpoint, D> {
    /// Lets it come behind other work on the device it comes from.
    ///
    /// # Errors
    /// The stream captures a graph, or a driver call failed.
    pub fn after(self, after: CopyDependency) -> Result<Self, MoveError> {
        self.fill.order(after)?;
        Ok(self)
    }
}

impl<F: CopyEndpoint> StagedTransfer<F, GpuEndpoint> {
    /// Lets it come behind other work on the device it goes to.
    ///
    /// # Errors
    /// The stream captures a graph, or a driver call failed.
    pub fn after_at_target(self, after: CopyDependency) -> Result<Self, MoveError> {
        self.drain.as_ref().expect(HERE).order(after)?;
        Ok(self)
    }
}

/// Whether nothing of it is in flight, and whether it arrived.
fn ended(flight: &mut impl InFlightCopy) -> (bool, bool) {
    match flight.wait() {
        Ok(()) => (true, true),
        Err(_) => (flight.settle().is_ok(), false),
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
        write!(f, "{moved} of {total} moved, {in_flight} in between")
    }
}
