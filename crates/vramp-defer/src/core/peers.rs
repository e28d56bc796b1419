//! The indexes of copies: which copies lie on each card and on the host, in the order in which they are
//! reclaimed.
//!
//! A change of a copy or of its buffer's last use is O(log n), and so is each copy that
//! [`reclaim_peer`](super::Deferrables::reclaim_peer) takes.

use std::collections::BTreeSet;

use super::buffer_state::{Buffer, ContentPlace, HostCopyUse, HostKey, PeerKey, Piece};
use super::{BufferId, Deferrables, PeerId, PieceId};
use vramp_core::Bytes;

impl Deferrables {
    /// Returns where a piece belongs in the index; `None` without a copy on a card.
    pub(super) fn peer_key(&self, id: PieceId) -> Option<PeerKey> {
        let piece = self.piece(id);
        let peer = piece.copies.peer?;
        let below = piece.place == ContentPlace::SpillTier;
        let is_sole = below && !piece.copies.host && !piece.copies.disk;
        Some(PeerKey { peer, is_sole, last_use_ns: self.buffers[id.buffer].last_use_ns })
    }

    /// Updates the indexes and sums after a change of a piece's place or copies. O(log n).
    pub(super) fn reindex(&mut self, id: PieceId) {
        self.touch(id.buffer);
        self.note_changed(id);
        let peer_key = self.peer_key(id);
        let buffer = &mut self.buffers[id.buffer];
        let host_key = HostKey::of(&buffer.pieces[id.index as usize], buffer);
        let piece = &mut buffer.pieces[id.index as usize];
        move_key(&mut self.peer_copies, id, &mut piece.peer_key, peer_key);
        move_key(&mut self.host_copies, id, &mut piece.host_key, host_key);
        let is_clean = piece.place == ContentPlace::Card && piece.copies.any();
        match (std::mem::replace(&mut piece.is_counted_clean, is_clean), is_clean) {
            (false, true) => self.clean += piece.len,
            (true, false) => self.clean -= piece.len,
            (false, false) | (true, true) => {}
        }
    }

    /// Updates the indexes after a change of a buffer. O(pieces log n).
    pub(super) fn reindex_buffer(&mut self, buffer: BufferId) {
        for index in 0..self.buffers[buffer].pieces.len() as u32 {
            self.reindex(PieceId { buffer, index });
        }
    }

    /// Returns the bounds of the copies on a card in the index.
    pub(super) fn peer_bounds(
        peer: PeerId,
        is_sole: bool,
    ) -> std::ops::RangeInclusive<(PeerKey, PieceId)> {
        let key = |last_use_ns| PeerKey { peer, is_sole, last_use_ns };
        let (first, last) = PieceId::bounds();
        (key(0), first)..=(key(u64::MAX), last)
    }
}

/// Moves a piece within an index from its old key to its new one.
fn move_key<K: Ord + Copy>(
    index: &mut BTreeSet<(K, PieceId)>,
    id: PieceId,
    key: &mut Option<K>,
    now: Option<K>,
) {
    let before = std::mem::replace(key, now);
    if before == now {
        return;
    }
    if let Some(before) = before {
        index.remove(&(before, id));
    }
    if let Some(now) = now {
        index.insert((now, id));
    }
}

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
