//! What an arena shares with its thread.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vramp_core::{AddrRange, StreamId};

use super::core::geometry::{Geometry, Layout};
use super::core::pages::{Begun, Marks, Refused};
use super::error::KvError;
use super::tables::{Part, TableId, runs};
use crate::allocator::Relief;
use crate::error::{AllocError, Unusable};
use crate::shared::Shared;

/// Shared with the arena's thread.
pub(super) struct Inner {
    pub shared: Arc<Shared>,
    pub id: TableId,
    pub layout: Layout,
    pub geometry: Geometry,
    pub range: AddrRange,
    pub patience: Duration,
    /// Counts moves of pages that ended, for those who wait for one.
    pub moves: Mutex<u64>,
    pub moved: Condvar,
}

impl Inner {
    pub fn lock_moves(&self) -> MutexGuard<'_, u64> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those that wait for a page that was being backed.
    pub fn note_moved(&self) {
        *self.lock_moves() += 1;
        self.moved.notify_all();
    }

    /// Waits until more moves ended than `seen`.
    pub fn wait_for_move(&self, seen: u64) {
        let mut moves = self.lock_moves();
        while *moves == seen {
            moves = self.moved.wait(moves).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub fn refusal(&self, refused: Refused, limit: u32) -> KvError {
        let pages = self.geometry.pages;
        match refused {
            Refused::Beyond { page } => KvError::Beyond { page, pages },
            Refused::Twice { page } => KvError::Twice { page },
            Refused::Committed { page } => KvError::Committed { page },
            Refused::NotCommitted { page } => KvError::NotCommitted { page },
            Refused::Limit { over } => KvError::Limit {
                over: self.geometry.page_bytes() * u64::from(over),
                limit: self.geometry.page_bytes() * u64::from(limit),
            },
            Refused::Moving => unreachable!("the caller waits for the move"),
        }
    }

    /// Backs what a commit found absent, and ends it.
    pub fn back_begun(&self, begun: Begun, stream: StreamId) -> Result<(), KvError> {
        let mut mapped = false;
        let backed = self.make_room(begun.over).and_then(|()| {
            mapped = true;
            self.back(&begun.absent, stream)
        });
        let mut guard = self.shared.lock_anyway();
        if guard.closed {
            drop(guard);
            self.note_moved();
            return Err(Unusable::Closed.into());
        }
        let pool = guard.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let table = pool.tables.get_mut(self.id);
        match &backed {
            Ok(()) => table.pages.finish_commit(begun, stream),
            Err(_) => {
                // What was backed is ordered behind older work only on the stream.
                let now = pool.pool.now(stream);
                table.undo_commit(&pool.pool, begun, mapped.then(|| Marks::from_iter([now])));
            }
        }
        drop(guard);
        self.note_moved();
        backed
    }

    /// Backs pages in all tensors.
    pub fn back(&self, pages: &[Range<u32>], stream: StreamId) -> Result<(), KvError> {
        let mut relief = Relief::of_range(self.patience);
        for Part { cell, from, len } in self.parts(pages)? {
            relief.begin_next();
            self.shared.back_range(cell, (from, len), stream, &mut relief)?;
        }
        Ok(())
    }

    /// The parts of cells that pages lie in.
    pub fn parts(&self, pages: &[Range<u32>]) -> Result<Vec<Part>, Unusable> {
        let mut guard = self.shared.lock()?;
        let pool = guard.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let table = pool.tables.get_mut(self.id);
        let runs = runs(self.geometry, pages);
        Ok(runs.into_iter().flat_map(|run| table.parts(run)).collect())
    }

    /// Lends so many parked pages, because of the limit; waits for their work.
    pub fn make_room(&self, pages: u32) -> Result<(), KvError> {
        let mut left = pages;
        let mut waited = false;
        while left > 0 {
            let lent = self.lend(left)?;
            left = left.saturating_sub(lent);
            if lent == 0 {
                if waited || !self.shared.wait_until_idle()? {
                    let page = self.geometry.page_bytes();
                    return Err(KvError::InUse { over: page * u64::from(left) });
                }
                waited = true;
            }
        }
        Ok(())
    }

    /// Lends up to so many parked pages, as far as their work is over. Returns how many left.
    pub fn lend(&self, pages: u32) -> Result<u32, KvError> {
        if pages == 0 {
            return Ok(0);
        }
        let mut guard = self.shared.lock()?;
        let inner = &mut *guard;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        let needed = self.geometry.page_bytes() * u64::from(pages);
        let before = pool.tables.get_mut(self.id).pages.counts().parked;
        let lent = pool.lend_parked_of(self.id, needed);
        let after = pool.tables.get_mut(self.id).pages.counts().parked;
        self.shared.refresh(inner);
        drop(guard);
        self.shared.notify_waiters();
        lent.map_err(AllocError::Driver)?;
        Ok(before - after)
    }
}
