//! The disk endpoints of a staged transfer.

use std::sync::Arc;

use vramp_core::Bytes;

use super::core::pipeline::StagedPiece;
use super::error::MoveError;
use super::staged::{CopyEndpoint, InFlightCopy, StagedTransfer};
use crate::disk::{ChargeTo, DiskStore, DiskTierError, DiskTransfer, StoredBytes};
use crate::host::HostAllocation;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::tracked::LimitRule;

/// What pays for the bytes that a transfer writes to a disk.
#[derive(Clone)]
pub enum DiskBudget {
    /// The store's space, up to its capacity.
    Space,
    /// A reservation in the store's space. The rule decides about bytes that exceed it.
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

/// A copy of a range on a disk. Dropping it frees the bytes.
#[derive(Debug)]
#[must_use = "what is on the disk is freed when this is dropped"]
pub struct DiskCopy {
    store: Arc<DiskStore>,
    pieces: Vec<StoredBytes>,
    piece: Bytes,
    len: Bytes,
}

impl DiskCopy {
    /// Writes the first `len` bytes of `host` in pieces of `piece`, charged to the store's space,
    /// and waits.
    ///
    /// # Errors
    /// The disk is full or failed. The bytes already written are freed.
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

    /// Returns the length.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Returns true for zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Returns the bytes charged to the store's space.
    pub fn charged(&self) -> Bytes {
        self.pieces.iter().map(StoredBytes::charged).sum()
    }

    /// Returns the store that has the bytes.
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

/// A piece that is being written to a disk.
pub struct InFlightWrite {
    transfer: Option<DiskTransfer<StoredBytes>>,
    stored: Option<StoredBytes>,
}

impl CopyEndpoint for DiskTarget {
    type InFlight = InFlightWrite;

    fn begin(
        &mut self,
        piece: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<InFlightWrite>, MoveError> {
        let spans = staging.map(|host| host.spans(Bytes::ZERO, piece.len)).transpose()?;
        let transfer = self.copy.store.begin_write(&spans.unwrap_or_default(), self.payer.paid());
        Ok(Some(InFlightWrite { transfer: Some(transfer.map_err(failed)?), stored: None }))
    }

    fn wait_for_capacity(&mut self) -> Result<(), MoveError> {
        Ok(())
    }

    fn finished(&mut self, copy: InFlightWrite) {
        if let Some(stored) = copy.stored {
            self.copy.len += stored.len();
            self.copy.pieces.push(stored);
        }
    }

    fn record_use(&self, _staging: &mut HostAllocation) {}
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
        // A transfer that was waited for has ended.
        self.transfer = None;
        Ok(())
    }
}

impl<F: CopyEndpoint> StagedTransfer<F, DiskTarget> {
    /// Waits until all bytes are on the disk.
    ///
    /// # Errors
    /// As [`poll`](StagedTransfer::poll). The bytes already written are freed, and the source is
    /// unchanged.
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

/// A piece that is being read from a disk.
pub struct InFlightRead {
    transfer: Option<DiskTransfer<()>>,
}

impl CopyEndpoint for DiskSource {
    type InFlight = InFlightRead;

    fn begin(
        &mut self,
        piece: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<InFlightRead>, MoveError> {
        let spans = staging.map(|host| host.spans(Bytes::ZERO, piece.len)).transpose()?;
        let index = piece.offset.count() / self.copy.piece.count();
        let stored = &self.copy.pieces[index as usize];
        let transfer = self.copy.store.begin_read(stored, &spans.unwrap_or_default());
        Ok(Some(InFlightRead { transfer: Some(transfer.map_err(failed)?) }))
    }

    fn wait_for_capacity(&mut self) -> Result<(), MoveError> {
        Ok(())
    }

    fn record_use(&self, _staging: &mut HostAllocation) {}
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
        // A transfer that was waited for has ended.
        self.transfer = None;
        Ok(())
    }
}
