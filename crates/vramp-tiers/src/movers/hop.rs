//! One hop of a transfer: how pieces are copied between host memory and a card or a disk.

use std::sync::Arc;

use smallvec::smallvec;
use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::DeviceCopy;

use super::copy_queue::{CopyQueue, QueueError, QueuedCopy, StepCopies};
use super::core::gather::Gather;
use super::core::pipeline::Piece;
use super::core::window::StepId;
use super::error::MoveError;
use super::shared::{CopyDependency, CopyDirection, Shared};
use super::stored::{DiskBudget, DiskCopy};
use crate::disk::{DiskTransfer, StoredBytes};
use crate::host::HostAllocation;

/// What copies pieces, and where from or to.
pub(super) enum Hop {
    /// Copies between host memory and ranges of a card, which follow each other.
    Ranges { mover: Arc<Shared>, direction: CopyDirection, memory: Gather },
    /// Copies within a card, without host memory.
    Within { mover: Arc<Shared>, from: DeviceAddr, to: DeviceAddr },
    /// Appends to a copy on a disk, which no other transfer uses.
    Write { copy: Arc<DiskCopy>, payer: DiskBudget },
    /// Reads a copy on a disk from the byte `from` on.
    Read { copy: Arc<DiskCopy>, from: Bytes },
}

/// A piece that a hop has begun to copy.
pub(super) enum InFlight {
    Step(StepId),
    Write(DiskTransfer<StoredBytes>),
    Read(DiskTransfer<()>),
    /// Complete. A write has its bytes.
    Done(Option<StoredBytes>),
    /// Failed, and over.
    Failed,
}

pub(super) fn check_range(range: AddrRange) -> Result<AddrRange, MoveError> {
    range.checked_end().map(|_| range).ok_or(MoveError::BadRange(range))
}

/// The end of a piece that was waited for.
pub(super) struct Settled {
    /// True if no part of the copy is in flight.
    pub known: bool,
    pub arrived: bool,
    pub error: Option<MoveError>,
}

const UNUSED: &str = "a copy that is written has no other user";

impl Hop {
    /// Orders copies that begin later behind other work. A disk has no other work.
    pub fn order(&self, after: CopyDependency) -> Result<(), MoveError> {
        match self.card() {
            Some((mover, queue)) => mover.order(queue, after),
            None => Ok(()),
        }
    }

    /// Returns an error if memory of a card ends beyond the address space.
    pub fn check(&self) -> Result<(), MoveError> {
        let Hop::Ranges { memory, .. } = self else { return Ok(()) };
        memory.ranges().iter().try_for_each(|&range| check_range(range).map(drop))
    }

    fn card(&self) -> Option<(&Arc<Shared>, &CopyQueue)> {
        match self {
            Hop::Ranges { mover, direction, .. } => Some((mover, direction.queue(mover))),
            // They share the queue of copies to the card.
            Hop::Within { mover, .. } => Some((mover, &mover.to_device)),
            Hop::Write { .. } | Hop::Read { .. } => None,
        }
    }

    /// Returns the queue of a hop that copies steps.
    pub fn queue(&self) -> &CopyQueue {
        self.card().expect("only a hop of a card has steps").1
    }

    /// Returns the copy on a disk.
    pub fn disk_copy(&self) -> Option<&Arc<DiskCopy>> {
        match self {
            Hop::Write { copy, .. } | Hop::Read { copy, .. } => Some(copy),
            Hop::Ranges { .. } | Hop::Within { .. } => None,
        }
    }

    /// Returns the part of a piece that can be copied into one buffer.
    pub fn cut(&self, piece: Piece) -> Piece {
        let Hop::Read { copy, from } = self else { return piece };
        let part = copy.part_at(*from + piece.offset);
        Piece { len: piece.len.min(part.len), skip: part.skip, ..piece }
    }

    /// Returns the copies of a piece from or to the byte `at` of host memory.
    pub fn copies(
        &self,
        piece: Piece,
        host: Option<(&HostAllocation, Bytes)>,
    ) -> Result<StepCopies, MoveError> {
        let mut copies = StepCopies::new();
        match (self, host) {
            (Hop::Ranges { mover, direction, memory }, Some((host, mut at))) => {
                for part in memory.pieces(piece.offset, piece.offset + piece.len) {
                    copies.extend(direction.copies(mover, part, host, at)?);
                    at += part.len;
                }
            }
            (&Hop::Within { from, to, .. }, _) => {
                let (from, to) = (from + piece.offset, to + piece.offset);
                copies = smallvec![QueuedCopy::Within(DeviceCopy { from, to, len: piece.len })];
            }
            _ => {}
        }
        Ok(copies)
    }

    /// Begins to copy a piece from or to the byte `at` of host memory. Returns `None` if too much is in
    /// flight.
    ///
    /// # Errors
    /// The copy could not begin. None of it is in flight, unless the error is
    /// [`MoveError::Unsettled`].
    pub fn begin(
        &self,
        piece: Piece,
        host: Option<(&HostAllocation, Bytes)>,
    ) -> Result<Option<InFlight>, MoveError> {
        let spans = |len| host.map(|(host, _)| host.spans(Bytes::ZERO, len)).transpose();
        match self {
            Hop::Ranges { .. } | Hop::Within { .. } => {
                match self.queue().queue(&self.copies(piece, host)?) {
                    Ok(step) => Ok(step.map(InFlight::Step)),
                    Err(QueueError { error, settled }) => {
                        Err(MoveError::device(error).unless_settled(settled))
                    }
                }
            }
            Hop::Write { copy, payer } => {
                let spans = spans(piece.len)?.unwrap_or_default();
                let transfer = copy.store().begin_write(&spans, payer.paid());
                Ok(Some(InFlight::Write(transfer.map_err(MoveError::disk)?)))
            }
            Hop::Read { copy, from } => {
                let part = copy.part_at(*from + piece.offset);
                let spans = spans(part.stored)?.unwrap_or_default();
                Ok(Some(InFlight::Read(copy.begin_read(part, &spans)?)))
            }
        }
    }

    /// Returns true if a copy is complete. Never blocks.
    pub fn is_done(&self, copy: &mut InFlight) -> Result<bool, MoveError> {
        match copy {
            InFlight::Step(step) => self.queue().is_done(*step).map_err(MoveError::device),
            InFlight::Write(transfer) if !transfer.is_done() => Ok(false),
            InFlight::Read(transfer) if !transfer.is_done() => Ok(false),
            _ => self.wait(copy).map(|()| true),
        }
    }

    /// Waits for a copy.
    pub fn wait(&self, copy: &mut InFlight) -> Result<(), MoveError> {
        if let InFlight::Step(step) = copy {
            return self.queue().wait(*step).map_err(MoveError::device);
        }
        let ended = match std::mem::replace(copy, InFlight::Failed) {
            InFlight::Write(transfer) => transfer.wait().map(Some),
            InFlight::Read(transfer) => transfer.wait().map(|()| None),
            other => {
                *copy = other;
                return Ok(());
            }
        };
        *copy = InFlight::Done(ended.map_err(MoveError::disk)?);
        Ok(())
    }

    /// Waits until no part of a copy is in flight.
    pub fn settle(&self, copy: &mut InFlight) -> Settled {
        let error = self.wait(copy).err();
        let (known, arrived) = match copy {
            InFlight::Step(step) => {
                // If its event failed, the stream tells.
                let known = error.is_none() || self.queue().settle(*step).is_ok();
                (known, known)
            }
            copy => (true, matches!(copy, InFlight::Done(_))),
        };
        Settled { known, arrived, error }
    }

    /// Waits until a copy in flight completes.
    pub fn wait_for_capacity(&self) -> Result<(), MoveError> {
        match self.card() {
            Some((_, queue)) => queue.wait_for_capacity().map_err(MoveError::device),
            None => Ok(()),
        }
    }

    /// Takes a complete piece. Pieces complete in order.
    pub fn finished(&mut self, copy: InFlight) {
        if let (Hop::Write { copy, .. }, InFlight::Done(Some(stored))) = (self, copy) {
            Arc::get_mut(copy).expect(UNUSED).push(stored);
        }
    }

    /// Notes on host memory that copies may still use it, after their completion could not be determined.
    /// If that fails too, the blocks are never reused.
    pub fn record_use(&self, host: &mut HostAllocation) {
        if let Some((mover, queue)) = self.card() {
            host.record_unsettled(&mover.driver, queue.streams());
        }
    }
}
