//! Where bytes lie below a card, and what pays for them.

use std::sync::Arc;

use vramp_core::Bytes;
use vramp_host::HostSpan;

use super::error::MoveError;
use crate::disk::{ChargeTo, DiskStore, DiskTransfer, StoredBytes};
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
    pub(super) fn paid(&self) -> ChargeTo<'_> {
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
            transfers.push(store.begin_write(&spans, ChargeTo::Space).map_err(MoveError::disk)?);
            at += now;
        }
        for transfer in transfers {
            written.push(transfer.wait().map_err(MoveError::disk)?);
        }
        Ok(written)
    }

    /// Returns a copy of nothing.
    pub(crate) fn empty(store: &Arc<DiskStore>) -> DiskCopy {
        let (longest, len) = (Bytes::ZERO, Bytes::ZERO);
        DiskCopy { store: Arc::clone(store), pieces: Vec::new(), longest, len }
    }

    pub(super) fn push(&mut self, stored: StoredBytes) {
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
        self.store.begin_read(&self.pieces[part.index].stored, spans).map_err(MoveError::disk)
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

/// Bytes that lie below a card. Dropping it frees them and credits their charge.
pub(crate) enum Stored {
    Host(HostAllocation),
    Disk(Arc<DiskCopy>),
}
