//! Reading contents on the host from their copies there, so that they need no room on the card.
//!
//! 1. While holding the lock, readers of the copies are made ([`Shared::host_copies`]). The contents are
//!    read as they are at that time.
//! 2. After unlocking, the bytes are copied ([`HostCopies::read`]). Other threads go on meanwhile. A copy
//!    that they invalidate is dropped, and its blocks are reused after the read.

use smallvec::SmallVec;

use crate::planner::{BufferId, PieceId};
use vramp_core::Bytes;
use vramp_tiers::host::HostReader;

use super::state::Shared;

/// Copies on the host of a part of a buffer, in order.
pub(super) struct HostCopies {
    pieces: SmallVec<[(Bytes, HostReader); 2]>,
}

impl Shared {
    /// Returns the copies on the host of a part of a buffer; `None` if a piece has none in blocks of the
    /// host. A copy is equal to the contents as long as it is valid. O(pieces).
    pub(super) fn host_copies(
        &self,
        buffer: BufferId,
        offset: Bytes,
        len: Bytes,
    ) -> Option<HostCopies> {
        let mut state = self.lock();
        let piece = self.config.piece;
        let end = offset.checked_add(len)?;
        let (mut at, mut pieces) = (offset, SmallVec::new());
        while at < end {
            let index = at.count() / piece.count();
            let start = piece * index;
            let len = end.min(start + piece) - at;
            let id = PieceId { buffer, index: u32::try_from(index).ok()? };
            let host = state.copies.get_mut(&id)?.host.as_mut()?;
            pieces.push((len, host.reader(at - start, len).ok()?));
            at += len;
        }
        Some(HostCopies { pieces })
    }
}

impl HostCopies {
    /// Copies the bytes to `into`, which is as long as the part.
    pub fn read(self, into: &mut [u8]) {
        let mut rest = into;
        for (len, copy) in self.pieces {
            let (now, later) = rest.split_at_mut(len.count() as usize);
            copy.read(now).expect("the reader has as many bytes");
            rest = later;
        }
    }
}

#[cfg(test)]
mod tests;
