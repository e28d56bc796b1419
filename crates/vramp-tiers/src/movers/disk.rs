//! A disk as one end of a staged transfer.

use std::sync::Arc;

use vramp_core::Bytes;

use super::error::MoveError;
use super::staged::{End, Flight, Part, Staged};
use crate::disk::{DiskStore, DiskTierError, DiskTransfer, PaidBy, StoredBytes};
use crate::host::HostAllocation;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::tracked::LimitRule;

/// Who pays for what goes to a disk.
#[derive(Clone)]
pub enum DiskPayer {
    /// The store's space, up to its capacity.
    Space,
    /// A reservation in the store's space. The rule decides about what exceeds it.
    Reservation(Arc<Reservation>, Arc<dyn LimitRule>),
}

impl DiskPayer {
    fn paid(&self) -> PaidBy<'_> {
        match self {
            DiskPayer::Space => PaidBy::Space,
            DiskPayer::Reservation(reservation, rule) => PaidBy::Reservation(reservation, &**rule),
        }
    }
}

/// What a move to a disk leaves there, until it is dropped.
#[derive(Debug)]
#[must_use = "what is on the disk is freed when this is dropped"]
pub struct OnDisk {
    store: Arc<DiskStore>,
    pieces: Vec<StoredBytes>,
    piece: Bytes,
    len: Bytes,
}

impl OnDisk {
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
    ) -> Result<OnDisk, MoveError> {
        let mut written = OnDisk { store: Arc::clone(store), pieces: Vec::new(), piece, len };
        let mut transfers = Vec::new();
        let mut at = Bytes::ZERO;
        while at < len {
            let now = piece.min(len - at);
            let spans = host.spans(at, now)?;
            transfers.push(store.begin_write(&spans, PaidBy::Space).map_err(failed)?);
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
    payer: DiskPayer,
    copy: OnDisk,
}

impl DiskTarget {
    pub(super) fn new(store: &Arc<DiskStore>, payer: DiskPayer, piece: Bytes) -> DiskTarget {
        let (store, pieces, len) = (Arc::clone(store), Vec::new(), Bytes::ZERO);
        DiskTarget { payer, copy: OnDisk { store, pieces, piece, len } }
    }
}

/// A piece on its way to a disk.
pub struct Writing {
    transfer: Option<DiskTransfer<StoredBytes>>,
    stored: Option<StoredBytes>,
}

impl End for DiskTarget {
    type Flight = Writing;

    fn begin(
        &mut self,
        part: Part,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<Writing>, MoveError> {
        let spans = staging.map(|host| host.spans(Bytes::ZERO, part.len)).transpose()?;
        let transfer = self.copy.store.begin_write(&spans.unwrap_or_default(), self.payer.paid());
        Ok(Some(Writing { transfer: Some(transfer.map_err(failed)?), stored: None }))
    }

    fn wait_for_room(&mut self) -> Result<(), MoveError> {
        Ok(())
    }

    fn finished(&mut self, flight: Writing) {
        if let Some(stored) = flight.stored {
            self.copy.len += stored.len();
            self.copy.pieces.push(stored);
        }
    }

    fn keep_until_idle(&self, _staging: &mut HostAllocation) {}
}

impl Flight for Writing {
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

impl<F: End> Staged<F, DiskTarget> {
    /// Waits until all is on the disk.
    ///
    /// # Errors
    /// As [`poll`](Staged::poll). What was written is given back, and the source is as it was.
    pub fn finish(mut self) -> Result<OnDisk, MoveError> {
        self.wait()?;
        Ok(self.into_target().copy)
    }
}

/// Reads pieces from a disk.
pub struct DiskSource {
    copy: Arc<OnDisk>,
}

impl DiskSource {
    pub(super) fn new(copy: &Arc<OnDisk>) -> DiskSource {
        DiskSource { copy: Arc::clone(copy) }
    }
}

/// A piece on its way from a disk.
pub struct Reading {
    transfer: Option<DiskTransfer<()>>,
}

impl End for DiskSource {
    type Flight = Reading;

    fn begin(
        &mut self,
        part: Part,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<Reading>, MoveError> {
        let spans = staging.map(|host| host.spans(Bytes::ZERO, part.len)).transpose()?;
        let index = part.offset.count() / self.copy.piece.count();
        let stored = &self.copy.pieces[index as usize];
        let transfer = self.copy.store.begin_read(stored, &spans.unwrap_or_default());
        Ok(Some(Reading { transfer: Some(transfer.map_err(failed)?) }))
    }

    fn wait_for_room(&mut self) -> Result<(), MoveError> {
        Ok(())
    }

    fn keep_until_idle(&self, _staging: &mut HostAllocation) {}
}

impl Flight for Reading {
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
