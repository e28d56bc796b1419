//! Pushing mapped copies to the disk when the host is short.
//!
//! The host has no pointer to them: the device copies them into staging blocks, which are written.
//! When all is on the disk and no work reads the copy at its address, it is unmapped and its memory
//! freed. Until then the copy is valid, and a failure leaves it mapped.

use std::sync::Arc;

use crate::planner::{PieceId, Push, RangeId, SpillTier};
use vramp_alloc::range::HostBackingError;
use vramp_core::{AddrRange, Bytes};

use super::buffer_events::BufferChange;
use super::report::{MoveKind, MoveRecord};
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::DiskStore;
use vramp_tiers::movers::{DiskBudget, DiskCopy};

impl Shared {
    /// Moves a mapped copy to the disk. Returns the host bytes that this freed; `None` if the
    /// piece's copy is not mapped.
    pub(super) fn push_mapped(&self, push: &Push, store: &Arc<DiskStore>) -> Option<Bytes> {
        // A mapping in progress was marked before the push was chosen. None begins after it.
        let state = self.wait_until(|state| !state.is_mapping(push.piece.buffer));
        let mapped = state.copies.get(&push.piece)?.mapped.as_ref()?;
        let from = AddrRange::new(mapped.copy_mapping.range().start, push.len);
        drop(state);
        // Querying events would invalidate the capture.
        if self.allocator.any_captures().unwrap_or(true) {
            self.give_up(push.id);
            return Some(Bytes::ZERO);
        }
        let began_ns = self.driver.now_ns();
        let pushed = self.write_mapped(push, from, store).and_then(|stored| {
            let took_ns = self.driver.now_ns().saturating_sub(began_ns);
            self.unmap_pushed(push)?;
            Ok((stored, took_ns))
        });
        let freed = match pushed {
            Ok((stored, took_ns)) => {
                let mut state = self.lock();
                state.note_pushed(push, stored, began_ns, took_ns);
                state.drop_mapped_copy(push.piece)
            }
            Err(error) => {
                self.fail(push.id, push.piece, MoveKind::Pushed, &error);
                Bytes::ZERO
            }
        };
        self.retry_stalled();
        Some(freed)
    }

    /// Writes a copy to the disk. Its contents are complete since the piece left.
    fn write_mapped(
        &self,
        push: &Push,
        from: AddrRange,
        store: &Arc<DiskStore>,
    ) -> Result<DiskCopy, SpillError> {
        self.with_staging(|| {
            let staged = self.mover.to_disk(from, store, DiskBudget::Space)?;
            self.keep_unsettled(push.piece.buffer, staged.finish())
        })
    }

    /// Unmaps the copy once all its readers are done. No other can begin: a buffer that is pushed
    /// is not leased.
    fn unmap_pushed(&self, push: &Push) -> Result<(), SpillError> {
        let uses = self.lock().core.holds(push.piece.buffer)?.uses;
        self.wait_for(&uses)?;
        let mut state = self.lock();
        state.poll()?;
        let Some((range, at, len)) = state.mapping_of(push) else { return Ok(()) };
        let home = Arc::clone(&state.homes[&range].range);
        drop(state);
        home.unmap_host_part(at, len).map_err(|error| match error {
            HostBackingError::Driver(error) => SpillError::Driver(error),
            error => SpillError::HostBacking(error),
        })?;
        self.lock().forget_mapping(range, at);
        Ok(())
    }
}

impl State {
    /// Returns where the copy is mapped beside the copy mapping.
    fn mapping_of(&self, push: &Push) -> Option<(RangeId, Bytes, Bytes)> {
        let mapped = self.copies.get(&push.piece)?.mapped.as_ref()?;
        let (range, at) = mapped.mapped_at?;
        Some((range, at, mapped.memory.len()))
    }

    /// Records a completed push: the copy is on the disk alone.
    pub(super) fn note_pushed(
        &mut self,
        push: &Push,
        stored: DiskCopy,
        began_ns: u64,
        took_ns: u64,
    ) {
        let below = self.copies.entry(push.piece).or_default();
        below.disk = Some(Arc::new(stored));
        let settled = self.core.settle(push.id);
        debug_assert!(settled.is_ok(), "{} was pushed: {settled:?}", push.piece);
        self.note_rate(Some(SpillTier::Disk), push.len, took_ns);
        let (piece, bytes, what) = (push.piece, push.len, MoveKind::Pushed);
        self.history.push(MoveRecord { piece, bytes, what, began_ns, took_ns, cost: None });
        let Push { from, to, .. } = *push;
        self.emit(piece.buffer, BufferChange::Moved { from, to, bytes });
    }

    /// Drops the mapped copy of a piece. Returns the bytes that frees.
    fn drop_mapped_copy(&mut self, piece: PieceId) -> Bytes {
        let below = self.copies.get_mut(&piece).and_then(|below| below.mapped.take());
        let mapped = below.expect("what is pushed stays until it was");
        let freed = mapped.memory.len();
        self.to_drop.push(Box::new(mapped));
        freed
    }

    /// Frees the memory kept for later copies. Returns its length.
    pub fn release_spare_copies(&mut self) -> Bytes {
        let Some(readable) = self.readable.as_mut() else { return Bytes::ZERO };
        let stock = std::mem::take(&mut readable.stock);
        let freed = stock.iter().map(|mapped| mapped.memory.len()).sum();
        self.to_drop.extend(stock.into_iter().map(|mapped| Box::new(mapped) as Box<dyn Send>));
        freed
    }
}
