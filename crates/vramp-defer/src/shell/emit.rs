//! Recording changes of buffers' states for subscribers, while the manager's lock is held.

use crate::planner::{BufferId, BufferLeaseId, BufferStatus, PieceId, Restore};
use vramp_core::Bytes;

use super::buffer_events::{BufferChange, BufferEvent};
use super::state::State;

impl State {
    /// Records a change of a buffer that exists.
    pub(super) fn emit(&mut self, buffer: BufferId, change: BufferChange) {
        if self.subscribers.is_empty() {
            return;
        }
        if let Ok(status) = self.core.status(buffer) {
            self.emit_with(buffer, change, status);
        }
    }

    pub(super) fn emit_with(
        &mut self,
        buffer: BufferId,
        change: BufferChange,
        status: BufferStatus,
    ) {
        let at_ns = self.events.now_ns();
        self.subscribers.push(BufferEvent { buffer, change, status, at_ns });
    }

    /// Records that a piece left the card, if it has contents.
    pub(super) fn emit_deferred(&mut self, piece: PieceId, bytes: Bytes) {
        if let Some(to) = self.core.spilled_to(piece) {
            self.emit(piece.buffer, BufferChange::Deferred { to, bytes });
        }
    }

    /// Records that a piece is on the card again.
    pub(super) fn emit_retrieved(&mut self, restore: &Restore) {
        let (from, bytes) = (restore.from, restore.at.len);
        self.emit(restore.piece.buffer, BufferChange::Retrieved { from, bytes });
    }

    /// Records that a lease begins.
    pub(super) fn emit_locked(&mut self, lease: BufferLeaseId) {
        for (buffer, _) in self.leased_for_events(lease) {
            self.emit(buffer, BufferChange::Locked);
        }
    }

    /// Returns the buffers of a lease, and what is deferred of each; none without subscribers.
    pub(super) fn leased_for_events(&self, lease: BufferLeaseId) -> Vec<(BufferId, Bytes)> {
        if self.subscribers.is_empty() {
            return Vec::new();
        }
        let deferred = |id| self.core.status(id).map_or(Bytes::ZERO, |status| status.deferred);
        self.core.leased(lease).map(|id| (id, deferred(id))).collect()
    }

    /// Records that a lease on these buffers ended, of which so much was deferred before.
    pub(super) fn emit_unlocked(&mut self, leased: &[(BufferId, Bytes)]) {
        for &(buffer, before) in leased {
            let now = self.core.status(buffer).map_or(before, |status| status.deferred);
            let bytes = before.saturating_sub(now);
            if !bytes.is_zero() {
                self.emit(buffer, BufferChange::Overwritten { bytes });
            }
            self.emit(buffer, BufferChange::Unlocked);
        }
    }

    /// Records that a buffer was removed, with its state before that.
    pub(super) fn emit_freed(&mut self, buffer: BufferId, status: BufferStatus) {
        if !self.subscribers.is_empty() {
            self.emit_with(buffer, BufferChange::Freed, status);
        }
    }
}
