//! Free, without the allocator's lock and with it; and the uses recorded before it.

use std::sync::atomic::Ordering;

use vramp_core::{ArenaId, BlockId, Freed, StreamId};
use vramp_driver::DriverError;
use vramp_host::fork::is_forked;

use super::Allocator;
use crate::allocation::{Allocation, Owner};
use crate::cache::{BLOCK_ALIGN, CachedBlock, Tag};
use crate::error::{FreeError, UseError};
use crate::local::{self, Local};
use crate::observe::Event;
use crate::shared::Inner;
use crate::virtual_pool::HeapCell;

/// # Freeing, and uses on other streams
impl Allocator {
    /// Records that work queued on `stream` so far uses the allocation: once freed, it is reused
    /// only after that work. No driver call.
    ///
    /// # Errors
    /// [`UseError::Foreign`] and [`UseError::UnknownStream`] change nothing.
    pub fn record_use(&self, allocation: &Allocation, stream: StreamId) -> Result<(), UseError> {
        let mut inner = self.shared.lock_asleep()?;
        inner.open_stream(stream).ok_or(UseError::UnknownStream(stream))?;
        if !self.owns(&inner, allocation) {
            return Err(UseError::Foreign(allocation.addr));
        }
        inner.check_host()?;
        allocation.has_recorded_uses.store(true, Ordering::Relaxed);
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            pool.note_use_in_capture(allocation, stream);
        }
        inner.manager.record_use(allocation, stream);
        Ok(())
    }

    /// Frees an allocation. All work on it must be queued on `stream`, ordered before the stream's
    /// present end, or recorded with [`Allocator::record_use`]. `stream` may be another one than
    /// the allocation's, and one that was destroyed.
    ///
    /// No driver call in the default preset. Never waits.
    ///
    /// # Errors
    /// [`FreeError::Foreign`] and [`FreeError::UnknownStream`] return the allocation and change
    /// nothing.
    #[inline]
    pub fn free(&self, allocation: Allocation, stream: StreamId) -> Result<(), FreeError> {
        if self.shared.observers.is_observed() {
            return self.free_observed(allocation, stream);
        }
        self.free_unobserved(allocation, stream)
    }

    /// Tells observers of a free before the memory can be allocated again.
    #[cold]
    fn free_observed(&self, allocation: Allocation, stream: StreamId) -> Result<(), FreeError> {
        let allocation = self.check_free(allocation, stream)?;
        self.notify_freed(&allocation, stream);
        self.free_unobserved(allocation, stream)
    }

    /// Returns the allocation if it can be freed. Nothing that happens until then can change that,
    /// because its owner passes it by value.
    pub(crate) fn check_free(
        &self,
        allocation: Allocation,
        stream: StreamId,
    ) -> Result<Allocation, FreeError> {
        // The allocator made it for that stream. Not taking the lock keeps threads from contending
        // for it because they are observed.
        if allocation.allocator == self.shared.number && allocation.stream == stream {
            return Ok(allocation);
        }
        let inner = self.shared.lock_asleep()?;
        if !inner.knows_stream(stream) {
            return Err(FreeError::UnknownStream { stream, allocation });
        }
        if !self.owns(&inner, &allocation) {
            return Err(FreeError::Foreign(allocation));
        }
        Ok(allocation)
    }

    pub(crate) fn notify_freed(&self, allocation: &Allocation, stream: StreamId) {
        let Allocation { addr, len, requested, .. } = *allocation;
        self.shared.observers.notify(&Event::Freed { addr, len, requested, stream });
    }

    /// Frees an allocation as [`Allocator::free`] does if the thread's cache takes it, which needs no
    /// lock, and no observer is registered. See [`Allocator::malloc_at_hand`].
    ///
    /// # Errors
    /// The allocation, which is as it was.
    #[inline]
    pub fn free_at_hand(&self, allocation: Allocation, stream: StreamId) -> Result<(), Allocation> {
        let is_at_hand = !self.shared.observers.is_observed()
            && self.stays_with_thread(&allocation, stream)
            && local::with(self.shared.number, |local| self.free_local(local, &allocation, false))
                .is_some_and(|freed| freed);
        if is_at_hand { Ok(()) } else { Err(allocation) }
    }

    #[inline]
    fn free_unobserved(&self, allocation: Allocation, stream: StreamId) -> Result<(), FreeError> {
        if self.stays_with_thread(&allocation, stream)
            && local::with(self.shared.number, |local| self.free_local(local, &allocation, true))
                .is_some_and(|freed| freed)
        {
            return Ok(());
        }
        self.free_shared(allocation, stream)
    }

    /// Returns true if a free needs no more than the thread's cache or the stream's heap.
    #[inline]
    fn stays_with_thread(&self, allocation: &Allocation, stream: StreamId) -> bool {
        self.shared.heaps_serve.is_some()
            && stream == allocation.stream
            && allocation.allocator == self.shared.number
            && allocation.tag == 0
            && !allocation.has_recorded_uses()
            && !self.shared.has_waiters()
            && self.shared.captures.load(Ordering::Relaxed) == 0
    }

    /// Puts a block into the thread's cache, or frees it into its heap if `to_heap` is true. Returns
    /// false if it has to be freed with the allocator's lock.
    #[inline]
    fn free_local(&self, local: &Local, allocation: &Allocation, to_heap: bool) -> bool {
        let units = allocation.len.count() / BLOCK_ALIGN;
        let (id, at, of_pool) = match allocation.owner {
            Owner::Pool { id, at } => (id, at, true),
            Owner::Heap { id, at } => (id, at, false),
            Owner::Driver { .. } | Owner::Backend { .. } | Owner::Arena { .. } => return false,
        };
        // A block in a cache would serve requests for a stream that takes no work any more.
        let Some(heap) = local.heap(allocation.stream) else { return false };
        let Some(tag) = Tag::new(allocation.stream.index(), units) else { return false };
        let tag = if of_pool { tag.of_pool() } else { tag };
        let block =
            CachedBlock { addr: allocation.addr.number(), at: at.number(), id: id.number() };
        if !local.cache.put(tag, block) {
            // In a forked child a thread of the parent may hold the heap's lock.
            let freed = match (of_pool, is_forked()) {
                (true, _) => local.cache.delay(tag, block),
                (false, _) if !to_heap => false,
                (false, true) => false,
                (false, false) => {
                    self.free_in_heap(heap, id, allocation.stream);
                    true
                }
            };
            if !freed {
                return false;
            }
        }
        local.tally.freed(allocation.len, allocation.requested);
        true
    }

    fn free_in_heap(&self, heap: &HeapCell, id: BlockId, stream: StreamId) {
        let freed = heap.lock().free_in_order(id).expect("an allocation is freed once");
        if let Freed::Surplus(slab) = freed {
            let mut inner = self.shared.lock_anyway();
            let pool = inner.manager.virtual_pool_mut().expect("a heap has a pool");
            pool.pool.take_back(slab, stream);
        }
    }

    #[inline(never)]
    fn free_shared(&self, allocation: Allocation, stream: StreamId) -> Result<(), FreeError> {
        let mut guard = self.shared.lock_for_request()?;
        let inner = &mut *guard;
        if !inner.knows_stream(stream) {
            return Err(FreeError::UnknownStream { stream, allocation });
        }
        if !self.owns(inner, &allocation) {
            return Err(FreeError::Foreign(allocation));
        }
        let local = self.shared.fold_local(inner);
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            if let Some(local) = &local {
                pool.drain_large(&local.cache);
            }
            // A captured node may use it whenever the graph runs, so the graph owns it from now on.
            if let Some(arena) = pool.keeper_of(&allocation, stream) {
                inner.keep_for_graph(arena, allocation, stream);
                return Ok(());
            }
        }
        // Other processes may have it open.
        let Some(allocation) = inner.exports.keep(allocation, stream) else { return Ok(()) };
        let freed = inner.free_folded(&allocation, stream);
        self.shared.update_local(inner, local);
        drop(guard);
        self.shared.notify_waiters();
        Ok(freed?)
    }

    /// Returns false for an allocation of another allocator.
    pub(crate) fn owns(&self, inner: &Inner, allocation: &Allocation) -> bool {
        allocation.allocator == self.shared.number && inner.manager.owns(allocation)
    }
}

impl Inner {
    /// Keeps an allocation that is freed on `stream` for the graph of a capture. Work that was
    /// queued there before the capture is remembered until the graph frees it.
    pub(crate) fn keep_for_graph(
        &mut self,
        arena: ArenaId,
        allocation: Allocation,
        stream: StreamId,
    ) {
        self.manager.record_use(&allocation, stream);
        let pool = self.manager.virtual_pool_mut().expect("only a virtual pool has arenas");
        pool.keep_for_graph(arena, allocation);
    }

    /// Frees an allocation that the manager owns, and counts it. One that is exported is kept until that
    /// ends.
    pub(crate) fn free(
        &mut self,
        allocation: Allocation,
        stream: StreamId,
        number: u64,
    ) -> Result<(), DriverError> {
        let Some(allocation) = self.exports.keep(allocation, stream) else { return Ok(()) };
        local::with(number, |local| self.fold(&local.tally));
        self.free_folded(&allocation, stream)
    }

    /// Frees an allocation as [`Inner::free`] does, after the calling thread's counts were folded
    /// in.
    #[inline]
    fn free_folded(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DriverError> {
        let freed = self.manager.free(allocation, stream, &self.streams);
        let requested = allocation.requested;
        self.base.freed(allocation.len, requested);
        if let Some(tag) = usize::from(allocation.tag).checked_sub(1) {
            self.tags[tag].live -= requested;
            self.tags[tag].blocks -= 1;
        }
        freed
    }
}
