//! Copies on the host, in the order in which they are reclaimed.
//!
//! The order is an index, as that of the copies on other cards: a change of a copy or of its buffer's
//! last use is O(log n), and so is each copy that is taken.

use super::buffer_state::Buffer;
use super::copy_index::{HostCopyUse, HostKey};
use super::piece::{ContentPlace, Piece};
use super::{Deferrables, PieceId};
use vramp_core::Bytes;

impl HostKey {
    /// Returns where a piece belongs; `None` without a copy on the host.
    pub fn of(piece: &Piece, buffer: &Buffer) -> Option<HostKey> {
        let copies = piece.copies;
        let kept_for = match piece.place {
            _ if !copies.host => return None,
            ContentPlace::Empty => return None,
            ContentPlace::Card => HostCopyUse::OnCard,
            ContentPlace::SpillTier if buffer.readable && copies.disk => {
                HostCopyUse::MappedAndOnDisk
            }
            ContentPlace::SpillTier if buffer.readable => HostCopyUse::Mapped,
            ContentPlace::SpillTier if copies.peer.is_some() || copies.disk => {
                HostCopyUse::Elsewhere
            }
            ContentPlace::SpillTier => HostCopyUse::Sole,
        };
        Some(HostKey { kept_for, last_use_ns: buffer.last_use_ns })
    }
}

impl Deferrables {
    /// Returns the host copies that are kept for `kept_for`, the least recently used first.
    pub(super) fn host_copies_for(
        &self,
        kept_for: HostCopyUse,
    ) -> impl DoubleEndedIterator<Item = PieceId> {
        let key = |last_use_ns| HostKey { kept_for, last_use_ns };
        let (first, last) = PieceId::bounds();
        let copies = self.host_copies.range((key(0), first)..=(key(u64::MAX), last));
        copies.map(|&(_, id)| id)
    }

    /// Returns the bytes of contents on the card that have a copy. O(1).
    pub(super) fn clean_bytes(&self) -> Bytes {
        self.clean
    }
}
