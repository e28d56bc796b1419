//! A disk as one end of a staged transfer.

use std::sync::Arc;

use vramp_core::Bytes;

use super::error::MoveError;
use super::staged::{CopyEndpoint, InFlightCopy, StagedPiece, StagedTransfer};
use crate::disk::{ChargeTo, DiskStore, DiskTierError, DiskTransfer, StoredBytes};
use crate::host::HostAllocation;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::tracked::LimitRule;

/// Who pays for what goes to a disk.
#[derive(Clone)]
pub enum DiskBudget {
    /// The store's space, up to its capacity.
    Space,
    /// A reservation in the store's space. The rule decides about what exceeds it.
    Reservation(Arc<Reservation>, Arc<dyn LimitRule>),
}

impl DiskBudget {
    fn paid(&self) -> ChargeTo<'_> {
        match self {
            DiskBudget::Space => ChargeTo::Space,
            DiskBudget::Reservation(reservation, rule) => {
                ChargeTo::Reservation(reservation, &**rule)
            }
        }
    }
}

/// What a move to a disk leaves there, until it is dropped.
#[derive(Debug)]
#[must_use = "what is on the disk is freed when this is dropped"]
pub struct DiskCopy {
    store: Arc<DiskStore>,
    pieces: Vec<StoredBytes>,
    piece: Bytes,
    len: Bytes,
}

impl DiskCopy {
    /// Writes `len` bytes of blocks of the host, charged to the store's space, in pieces of `piece`,
    /// and waits.
    ///
    /// # Errors
    /// The disk is full or failed. What was written is given back.
    pub fn write(
        store: &Arc<DiskStore>,
        host: &HostAllocation,
        len: Bytes,
        piece: Bytes,
    ) -> Result<DiskCopy, MoveError> {
        let mut written = DiskCopy { store: Arc::clone(store), pieces: Vec::new(), piece, len };
        let mut transfers = Vec::new();
        let mut at = Bytes::ZERO;
        while at < len {
            let now = piece.min(len - at);
            let spans = host.spans(at, now)?;
            transfers.push(store.begin_write(&spans, ChargeTo::Space).map_err(failed)?);
            at += now;
        }
        for transfer in transfers {
            written.pieces.push(transfer.wait().map_err(failed)?);
        }
        Ok(written)
    }

    /// How much it is.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// True for no bytes.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Who keeps it.
    pub fn store(&self) -> &Arc<DiskStore> {
        &self.store
    }

    pub(super) fn piece(&self) -> Bytes {
        self.piece
    }
}

fn failed(error: DiskTierError) -> MoveError {
    MoveError::Disk { moved: Bytes::ZERO, of: Bytes::ZERO, error }
}

/// Writes pieces to a disk.
pub struct DiskTarget {
    payer: DiskBudget,
    copy: DiskCopy,
}

impl DiskTarget {
    pub(super) fn new(store: &Arc<DiskStore>, payer: DiskBudget, piece: Bytes) -> DiskTarget {
        let (store, pieces, len) = (Arc::clone(store), Vec::new(), Bytes::ZERO);
        DiskTarget { payer, copy: DiskCopy { store, pieces, piece, len } }
    }
}

/// A piece on its way to a disk.
pub struct InFlightWrite {
    transfer: Option<DiskTransfer<StoredBytes>>,
    stored: Option<StoredBytes>,
}

impl CopyEndpoint for DiskTarget {
    type InFlightCopy = InFlightWrite;

    fn begin(
        &mut self,
        part: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<InFlightWrite>, MoveError> {
        let spans = staging.map(|host| host.spans(Bytes::ZERO, part.len)).transpose()?;
        let transfer = self.copy.store.begin_write(&spans.unwrap_or_default(), self.payer.paid());
        Ok(Some(InFlightWrite { transfer: Some(transfer.map_err(failed)?), stored: None }))
    }

    fn wait_for_room(&mut self) -> Result<(), MoveError> {
        Ok(())
    }

    fn finished(&mut self, flight: InFlightWrite) {
        if let Some(stored) = flight.stored {
            self.copy.len += stored.len();
            self.copy.pieces.push(stored);
        }
    }

    fn keep_until_idle(&self, _staging: &mut HostAllocation) {}
}

impl InFlightCopy for InFlightWrite {
    fn is_done(&mut self) -> Result<bool, MoveError> {
        match &self.transfer {
            Some(transfer) if !transfer.is_done() => Ok(false),
            _ => self.wait().map(|()| true),
        }
    }

    fn wait(&mut self) -> Result<(), MoveError> {
        if let Some(transfer) = self.transfer.take() {
            self.stored = Some(transfer.wait().map_err(failed)?);
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), MoveError> {
        // A transfer that was waited for has ended, well or not.
        self.transfer = None;
        Ok(())
    }
}

impl<F: CopyEndpoint> StagedTransfer<F, DiskTarget> {
    /// Waits until all is on the disk.
    ///
    /// # Errors
    /// As [`poll`](Staged::poll). What was written is given back, and the source is as it was.
    pub fn finish(mut self) -> Result<DiskCopy, MoveError> {
        self.wait()?;
        Ok(self.into_target().copy)
    }
}

/// Reads pieces from a disk.
pub struct DiskSource {
    copy: Arc<DiskCopy>,
}

impl DiskSource {
    pub(super) fn new(copy: &Arc<DiskCopy>) -> DiskSource {
        DiskSource { copy: Arc::clone(copy) }
    }
}

/// A piece on its way from a disk.
pub struct InFlightRead {
    transfer: Option<DiskTransfer<()>>,
}

impl CopyEndpoint for DiskSource {
    type InFlightCopy = InFlightRead;

    fn begin(
        &mut self,
        part: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<InFlightRead>, MoveError> {
        let spans = staging.map(|host| host.spans(Bytes::ZERO, part.len)).transpose()?;
        let index = part.offset.count() / self.copy.piece.count();
        let stored = &self.copy.pieces[index as usize];
        let transfer = self.copy.store.begin_read(stored, &spans.unwrap_or_default());
        Ok(Some(InFlightRead { transfer: Some(transfer.map_err(failed)?) }))
    }

    fn wait_for_room(&mut self) -> Result<(), MoveError> {
        Ok(())
    }

    fn keep_until_idle(&self, _staging: &mut HostAllocation) {}
}

impl InFlightCopy for InFlightRead {
    fn is_done(&mut self) -> Result<bool, MoveError> {
        match &self.transfer {
            Some(transfer) if !transfer.is_done() => Ok(false),
            _ => self.wait().map(|()| true),
        }
    }

    fn wait(&mut self) -> Result<(), MoveError> {
        self.transfer.take().map_or(Ok(()), |transfer| transfer.wait().map_err(failed))
    }

    fn settle(&mut self) -> Result<(), MoveError> {
        // A transfer that was waited for has ended, well or not.
        self.transfer = None;
        Ok(())
    }
}
