//! Malloc, without the allocator's lock and with it.

use std::sync::atomic::{AtomicBool, Ordering};

use vramp_core::{BlockId, Bytes, Counters, DeviceAddr, PoolAddr, Request, Shortage, StreamId};
use vramp_driver::{DriverError, Stream};
use vramp_host::fork::is_forked;

use super::shortage::Relief;
use super::{Allocator, TagId};
use crate::allocation::Found;
use crate::allocation::{Allocation, Owner};
use crate::cache::{BLOCK_ALIGN, CachedBlock, Tag};
use crate::error::AllocError;
use crate::local::{self, Local};
use crate::observe::Event;
use crate::shared::Inner;
use crate::virtual_pool::{HeapsServe, Refusal};

/// What an attempt with the lock lacked.
enum Missing {
    /// Memory, with the driver call that failed, if one did.
    Memory(Box<Shortage>, Option<DriverError>),
    Other(AllocError),
}

impl Missing {
    #[cold]
    fn other(error: impl Into<AllocError>) -> Box<Missing> {
        Box::new(Missing::Other(error.into()))
    }

    #[cold]
    fn of(refusal: Refusal) -> Box<Missing> {
        match refusal {
            Refusal::Driver(error) => Missing::other(error),
            Refusal::Arena(refused) => Missing::other(AllocError::Arena(Box::new(refused))),
            Refusal::Host(short) => Missing::other(short),
            Refusal::Short(shortage, failed_call) => {
                Box::new(Missing::Memory(shortage, failed_call))
            }
        }
    }
}

/// # Allocating
impl Allocator {
    /// Allocates at least `size` bytes for work on `stream`. A request for zero bytes gets an
    /// address of its own too.
    ///
    /// Cost: no driver call for memory that the stream itself freed; a query for each open event
    /// before memory of another stream is used; one call in the driver's pool. A miss costs one
    /// create, map and set-access for each new chunk, and a map and a set-access for each chunk
    /// moved.
    ///
    /// A request that would fail waits before, without a lock: for the time of
    /// [`Config::patience`](crate::Config::patience), and then on the host for the work that uses freed
    /// memory of this pool and of the group's others, as PyTorch's allocator does. Work that itself waits
    /// for this thread never ends.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] reports memory by stream and tag, and the remedies. Any other
    /// error leaves the allocator as it was.
    #[inline]
    pub fn malloc(&self, size: Bytes, stream: StreamId) -> Result<Allocation, AllocError> {
        let (found, from_cache) = match self.find_hit(size, stream) {
            Some(hit) => hit,
            None => (self.find_with_lock(size, stream, None)?, false),
        };
        let allocation = self.allocation(found, size, stream, from_cache, None);
        if self.shared.observers.is_observed() {
            self.shared.observers.notify(&allocated(&allocation));
        }
        Ok(allocation)
    }

    /// Allocates as [`Allocator::malloc`] does and passes the allocation to `store`, before
    /// observers hear of it: for tables that observers, and threads that they tell, look it up in.
    /// Returns the result of `store`, which runs without a lock.
    ///
    /// # Errors
    /// As of [`Allocator::malloc`]; `store` was not called.
    #[inline]
    pub fn malloc_with<R>(
        &self,
        size: Bytes,
        stream: StreamId,
        store: impl FnOnce(Allocation) -> R,
    ) -> Result<R, AllocError> {
        let (found, from_cache) = match self.find_hit(size, stream) {
            Some(hit) => hit,
            None => (self.find_with_lock(size, stream, None)?, false),
        };
        let allocation = self.allocation(found, size, stream, from_cache, None);
        if !self.shared.observers.is_observed() {
            return Ok(store(allocation));
        }
        let event = allocated(&allocation);
        let stored = store(allocation);
        self.shared.observers.notify(&event);
        Ok(stored)
    }

    /// Allocates a block as [`Allocator::malloc`] does if that takes no lock that is held during driver
    /// calls, and no observer is registered. `None` otherwise. For callers that hold a lock which other
    /// threads need, such as the one of an interpreter.
    #[inline]
    pub fn malloc_at_hand(&self, size: Bytes, stream: StreamId) -> Option<Allocation> {
        if self.shared.observers.is_observed() {
            return None;
        }
        let (found, from_cache) = self.find_hit(size, stream)?;
        Some(self.allocation(found, size, stream, from_cache, None))
    }

    /// Allocates as [`Allocator::malloc`] does and counts the bytes under a tag. Takes the
    /// allocator's lock, and so does the free.
    ///
    /// # Errors
    /// As of [`Allocator::malloc`], and [`AllocError::UnknownTag`].
    pub fn malloc_tagged(
        &self,
        size: Bytes,
        stream: StreamId,
        tag: TagId,
    ) -> Result<Allocation, AllocError> {
        let found = self.find_with_lock(size, stream, Some(tag))?;
        let allocation = self.allocation(found, size, stream, false, Some(tag));
        self.shared.observers.notify(&allocated(&allocation));
        Ok(allocation)
    }

    /// Returns a block that needs no lock of the allocator, with true if it comes from the thread's
    /// cache. `None` where the lock has to be taken.
    #[inline]
    fn find_hit(&self, size: Bytes, stream: StreamId) -> Option<(Found, bool)> {
        let serve = self.shared.heaps_serve?;
        if self.shared.captures.load(Ordering::Relaxed) != 0 {
            return None;
        }
        local::with(self.shared.number, |local| self.hit(local, size, stream, serve)).flatten()
    }

    /// Returns a block of the thread's cache, with true, or of the stream's heap. The caller builds
    /// the allocation in its final place: copying one costs as much as all the rest of a hit.
    #[inline]
    fn hit(
        &self,
        local: &Local,
        size: Bytes,
        stream: StreamId,
        serve: HeapsServe,
    ) -> Option<(Found, bool)> {
        let units = size.count().div_ceil(BLOCK_ALIGN).max(1);
        let (addr, owner, len, recycled) = match local.cache.take(Tag::new(stream.index(), units)?)
        {
            Some((tag, CachedBlock { addr, at, id })) => {
                let (id, at) = (BlockId::from_number(id), PoolAddr::from_number(at));
                let owner = match tag.is_of_pool() {
                    true => Owner::Pool { id, at },
                    false => Owner::Heap { id, at },
                };
                (DeviceAddr::new(addr), owner, Bytes::new(units * BLOCK_ALIGN), true)
            }
            // In a forked child a thread of the parent may hold the heap's lock.
            None if size <= serve.limit(self.shared.is_contended()) && !is_forked() => {
                let heap = local.heap(stream)?;
                let block = heap.lock().take(size)?;
                let owner = Owner::Heap { id: block.id, at: block.at };
                // Another thread may have added the heap's slab, in a span that is new to this one.
                let addr = local.addr(block.at).unwrap_or_else(|| self.shared.addr(block.at));
                local.cache.note_new(units, addr.number());
                (addr, owner, block.len, false)
            }
            None => return None,
        };
        local.tally.placed(len, size, true);
        Some((Found { addr, len, owner, hit: true }, recycled))
    }

    #[inline]
    pub(super) fn allocation(
        &self,
        found: Found,
        requested: Bytes,
        stream: StreamId,
        from_cache: bool,
        tag: Option<TagId>,
    ) -> Allocation {
        Allocation {
            addr: found.addr,
            len: found.len,
            requested,
            stream,
            owner: found.owner,
            allocator: self.shared.number,
            tag: tag.map_or(0, |TagId(tag)| tag),
            from_cache,
            has_recorded_uses: AtomicBool::new(false),
        }
    }

    /// Returns a block that is found with the allocator's lock; on a shortage runs every remedy
    /// before it fails. The caller tells observers of the block.
    #[inline(never)]
    fn find_with_lock(
        &self,
        size: Bytes,
        stream: StreamId,
        tag: Option<TagId>,
    ) -> Result<Found, AllocError> {
        match self.try_find(size, stream, tag) {
            Ok(found) => Ok(found),
            Err(missing) => self.find_after_relief(size, stream, tag, *missing),
        }
    }

    #[cold]
    fn find_after_relief(
        &self,
        size: Bytes,
        stream: StreamId,
        tag: Option<TagId>,
        mut missing: Missing,
    ) -> Result<Found, AllocError> {
        let mut relief = Relief::new(self.config.patience);
        loop {
            let (shortage, failed_call) = match missing {
                Missing::Memory(shortage, failed_call) => (shortage, failed_call),
                Missing::Other(error) => return Err(error),
            };
            self.shared.observers.notify(&Event::Short(&shortage));
            if !self.shared.relieve(&mut relief, &shortage)? {
                let report = self.shared.report(*shortage, failed_call, stream);
                self.shared.observers.notify(&Event::OutOfMemory(&report));
                return Err(AllocError::OutOfMemory(Box::new(report)));
            }
            missing = match self.try_find(size, stream, tag) {
                Ok(found) => return Ok(found),
                Err(missing) => *missing,
            };
        }
    }

    /// Makes one attempt with the allocator's lock. Small results all the way up: a hit that copies
    /// them costs a third more.
    #[inline]
    fn try_find(
        &self,
        size: Bytes,
        stream: StreamId,
        tag: Option<TagId>,
    ) -> Result<Found, Box<Missing>> {
        let mut guard = self.shared.lock_for_malloc().map_err(Missing::other)?;
        let inner = &mut *guard;
        let Some(raw) = inner.open_stream(stream) else {
            return Err(Missing::other(AllocError::UnknownStream(stream)));
        };
        if let Some(TagId(tag)) = tag
            && inner.tags.len() < usize::from(tag)
        {
            return Err(Missing::other(AllocError::UnknownTag));
        }
        inner.check_host().map_err(Missing::other)?;
        let observed = self.shared.observers.is_observed();
        let before = observed.then(|| inner.manager.known_counters());
        let local = self.shared.fold_local(inner);
        let found = self.place(inner, local.as_deref(), Request { size, stream }, raw);
        if let Ok(found) = &found {
            inner.count_placed(found.len, size, found.hit);
            if let Some(local) = &local {
                local.cache.note_new(found.len.count() / BLOCK_ALIGN, found.addr.number());
            }
            if let Some(TagId(tag)) = tag {
                let tagged = &mut inner.tags[usize::from(tag) - 1];
                tagged.live += size;
                tagged.peak = tagged.peak.max(tagged.live);
                tagged.blocks += 1;
            }
        }
        self.shared.update_local(inner, local);
        if found.as_ref().is_ok_and(|found| !found.hit) {
            self.collect_garbage(inner);
        }
        let after = observed.then(|| inner.manager.known_counters());
        drop(guard);
        if let (Some(before), Some(after)) = (before, after) {
            self.notify_changes(&before, &after);
        }
        found.map_err(Missing::of)
    }

    /// Returns a block of the manager, or of the arena whose capture the stream is part of.
    #[inline]
    fn place(
        &self,
        inner: &mut Inner,
        local: Option<&Local>,
        Request { size, stream }: Request,
        raw: Stream,
    ) -> Result<Found, Refusal> {
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            if let Some(local) = local {
                // Blocks of other sizes in this thread's cache are free memory.
                pool.drain_own(&local.cache);
            }
            if let Some((arena, tips)) = pool.capture_of(stream).map_err(Refusal::Driver)? {
                return pool.malloc_in_arena(arena, &tips, size, stream);
            }
        }
        inner.manager.malloc(size, stream, raw, self.shared.is_contended())
    }

    fn notify_changes(&self, before: &Counters, after: &Counters) {
        let chunks = after.chunks_moved + after.chunks_reactivated
            - before.chunks_moved
            - before.chunks_reactivated;
        if chunks > 0 {
            let bytes = after.moved - before.moved;
            self.shared.observers.notify(&Event::Remapped { chunks, bytes });
        }
        if after.reserved > before.reserved {
            let bytes = after.reserved - before.reserved;
            self.shared.observers.notify(&Event::Grown { bytes });
        }
        if after.reserved < before.reserved {
            let bytes = before.reserved - after.reserved;
            self.shared.observers.notify(&Event::Shrunk { bytes });
        }
    }
}

fn allocated(allocation: &Allocation) -> Event<'static> {
    let Allocation { addr, len, requested, stream, .. } = *allocation;
    Event::Allocated { addr, len, requested, stream }
}
