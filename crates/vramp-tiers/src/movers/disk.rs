//! The disk endpoints of a staged transfer.

use std::sync::Arc;

use vramp_core::Bytes;
use vramp_host::HostSpan;

use super::core::pipeline::StagedPiece;
use super::endpoint::{CopyEndpoint, InFlightCopy};
use super::error::MoveError;
use super::staged::StagedTransfer;
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

/// A copy of device memory on a disk. Dropping it frees the bytes.
#[derive(Debug)]
#[must_use = "what is on the disk is freed when this is dropped"]
pub struct DiskCopy {
    store: Arc<DiskStore>,
    pieces: Vec<DiskPiece>,
    /// Length of the longest piece.
    longest: Bytes,
    len: Bytes,
}

/// Stored bytes of a copy, which begin at the byte `start` and end where the next piece begins. What is
/// stored behind that does not count.
#[derive(Debug)]
struct DiskPiece {
    start: Bytes,
    stored: StoredBytes,
}

/// A part of one piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskPart {
    index: usize,
    /// First byte in the piece.
    pub skip: Bytes,
    /// Bytes from there that count.
    pub len: Bytes,
    /// Length of the piece, which is read as a whole.
    pub stored: Bytes,
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
        let mut written = DiskCopy::empty(store);
        let mut transfers = Vec::new();
        let mut at = Bytes::ZERO;
        while at < len {
            let now = piece.min(len - at);
            let spans = host.spans(at, now)?;
            transfers.push(store.begin_write(&spans, ChargeTo::Space).map_err(failed)?);
            at += now;
        }
        for transfer in transfers {
            written.push(transfer.wait().map_err(failed)?);
        }
        Ok(written)
    }

    /// Returns a copy of nothing.
    pub(crate) fn empty(store: &Arc<DiskStore>) -> DiskCopy {
        let (longest, len) = (Bytes::ZERO, Bytes::ZERO);
        DiskCopy { store: Arc::clone(store), pieces: Vec::new(), longest, len }
    }

    fn push(&mut self, stored: StoredBytes) {
        self.longest = self.longest.max(stored.len());
        let start = self.len;
        self.len += stored.len();
        self.pieces.push(DiskPiece { start, stored });
    }

    /// Shortens the copy to `len`, and frees pieces that lie behind that.
    pub(crate) fn truncate(&mut self, len: Bytes) {
        self.pieces.truncate(self.pieces.partition_point(|piece| piece.start < len));
        self.len = self.len.min(len);
    }

    /// Returns the part of a piece that begins at a byte below the length. O(log pieces).
    pub(crate) fn part_at(&self, at: Bytes) -> DiskPart {
        let index = self.pieces.partition_point(|piece| piece.start <= at) - 1;
        let piece = &self.pieces[index];
        let end = self.pieces.get(index + 1).map_or(self.len, |next| next.start);
        DiskPart { index, skip: at - piece.start, len: end - at, stored: piece.stored.len() }
    }

    /// Starts to read the whole piece of a part.
    pub(crate) fn begin_read(
        &self,
        part: DiskPart,
        spans: &[HostSpan],
    ) -> Result<DiskTransfer<()>, MoveError> {
        self.store.begin_read(&self.pieces[part.index].stored, spans).map_err(failed)
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
        self.pieces.iter().map(|piece| piece.stored.charged()).sum()
    }

    /// Returns the store that has the bytes.
    pub fn store(&self) -> &Arc<DiskStore> {
        &self.store
    }

    /// Returns the bytes of the longest piece.
    pub(crate) fn longest(&self) -> Bytes {
        self.longest
    }
}

pub(crate) fn failed(error: DiskTierError) -> MoveError {
    MoveError::Disk { moved: Bytes::ZERO, of: Bytes::ZERO, error }
}

/// Writes pieces to a disk.
pub struct DiskTarget {
    payer: DiskBudget,
    copy: DiskCopy,
}

impl DiskTarget {
    /// Returns an endpoint that appends to `copy`.
    pub(super) fn new(copy: DiskCopy, payer: DiskBudget) -> DiskTarget {
        DiskTarget { payer, copy }
    }
}

/// A piece that is being written to a disk.
pub struct InFlightWrite {
    transfer: Option<DiskTransfer<StoredBytes>>,
    /// `None` until the transfer was waited for.
    written: Option<Result<StoredBytes, MoveError>>,
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
        Ok(Some(InFlightWrite { transfer: Some(transfer.map_err(failed)?), written: None }))
    }

    fn wait_for_capacity(&mut self) -> Result<(), MoveError> {
        Ok(())
    }

    fn finished(&mut self, copy: InFlightWrite) {
        if let Some(Ok(stored)) = copy.written {
            self.copy.push(stored);
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
            self.written = Some(transfer.wait().map_err(failed));
        }
        match &self.written {
            Some(Err(error)) => Err(error.clone()),
            _ => Ok(()),
        }
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

    /// Ends the transfer, waits for pieces in flight, and returns the copy of what arrived without a gap.
    pub(crate) fn into_copy(self) -> DiskCopy {
        self.into_target().copy
    }
}

/// Reads pieces from a disk.
pub struct DiskSource {
    copy: Arc<DiskCopy>,
    /// Byte of the copy at which the transfer begins.
    from: Bytes,
}

impl DiskSource {
    pub(super) fn new(copy: &Arc<DiskCopy>, from: Bytes) -> DiskSource {
        DiskSource { copy: Arc::clone(copy), from }
    }
}

/// A piece that is being read from a disk.
pub struct InFlightRead {
    transfer: Option<DiskTransfer<()>>,
}

impl CopyEndpoint for DiskSource {
    type InFlight = InFlightRead;

    fn cut(&self, piece: StagedPiece) -> StagedPiece {
        let part = self.copy.part_at(self.from + piece.offset);
        StagedPiece { len: piece.len.min(part.len), skip: part.skip, ..piece }
    }

    fn begin(
        &mut self,
        piece: StagedPiece,
        staging: Option<&HostAllocation>,
    ) -> Result<Option<InFlightRead>, MoveError> {
        let part = self.copy.part_at(self.from + piece.offset);
        let spans = staging.map(|host| host.spans(Bytes::ZERO, part.stored)).transpose()?;
        let transfer = self.copy.begin_read(part, &spans.unwrap_or_default())?;
        Ok(Some(InFlightRead { transfer: Some(transfer) }))
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
