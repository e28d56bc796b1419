//! Stable ranges: fixed addresses whose memory comes and goes.
//!
//! 1. [`Allocator::stable_range`] reserves addresses for the life of the range. No memory yet.
//! 2. [`StableRange::back`] backs all of it with memory, in stream order.
//! 3. [`StableRange::lend`] lends unused memory to the pool. No driver call: the memory stays
//!    mapped until another request needs it, and is remapped then.
//! 4. [`StableRange::back`] again reclaims lent memory that is still there and backs the rest with
//!    other memory, at the same addresses.
//!
//! Parts can be backed by host memory instead (`host_backing.rs`).
//!
//! Lending loses the contents. The caller copies them first.
//!
//! ```
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device.clone(), Config::default())?;
//! let stream = allocator.create_stream()?;
//! let range = allocator.stable_range(Bytes::mib(256), Bytes::mib(32))?;
//! range.back(stream)?;
//! // ... work on range.range(), then wait for it:
//! device.synchronize_stream(allocator.stream(stream).expect("it was created above"))?;
//! assert_eq!(range.lend(&[]), Bytes::mib(256));
//! range.back(stream)?;                        // the same addresses
//! assert_eq!(range.memory().backed, Bytes::mib(256));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Deliberately absent: copies, and the order of the range's users.

mod host_backing;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use vramp_core::{ArenaId, Bytes, Mark, PoolAddr, StreamId};

pub use vramp_core::{AddrRange, NotVacant};

pub use crate::graph::ArenaError;
pub use host_backing::{HostBacking, HostBackingError};

use crate::allocator::{Allocator, Relief};
use crate::error::AllocError;
use crate::observe::Event;
use crate::shared::Shared;
use crate::virtual_pool::Refusal;

/// Memory of a stable range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RangeMemory {
    /// Bytes backed by memory of its own.
    pub backed: Bytes,
    /// Bytes lent: still mapped, and free for other requests.
    pub lent: Bytes,
    /// Bytes backed by host memory.
    pub host: Bytes,
}

/// A range of addresses, reserved until it is dropped or its allocator is closed. Calls after the
/// close are refused, or return nothing.
///
/// Once it is dropped, its memory serves other requests as soon as the work recorded with
/// [`record_use`](StableRange::record_use) is over.
pub struct StableRange {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: ArenaId,
    range: AddrRange,
    patience: Duration,
    uses: Mutex<Vec<Mark>>,
}

/// # Stable ranges
impl Allocator {
    /// Reserves `len` addresses, rounded up to whole pages. One driver call at most, and no memory.
    /// New memory for the range is created in handles of length `handle`, so that parts of that
    /// length can be lent.
    ///
    /// # Errors
    /// [`ArenaError::NotSupported`] unless the preset is vramp and the device has virtual memory
    /// management; [`ArenaError::Capacity`] for zero addresses or more than one reservation can
    /// have.
    pub fn stable_range(&self, len: Bytes, handle: Bytes) -> Result<StableRange, ArenaError> {
        let shared = self.shared();
        let mut inner = shared.lock()?;
        inner.check_host()?;
        let pool = inner.manager.virtual_pool_mut().filter(|pool| pool.heaps_serve.is_some());
        let pool = pool.ok_or(ArenaError::NotSupported)?;
        let max = PoolAddr::SPAN_LIMIT.round_down(pool.pool.config().page);
        if len.is_zero() || len > max {
            return Err(ArenaError::Capacity { capacity: len, max });
        }
        let id = pool.add_range(len)?;
        pool.pool.set_arena_chunk(id, handle);
        let range = pool.pool.arena_range(id);
        let range = AddrRange::new(pool.exec.addr(range.at), range.len);
        Ok(StableRange {
            shared: Arc::clone(shared),
            id,
            range,
            patience: self.patience(),
            uses: Mutex::default(),
        })
    }
}

impl StableRange {
    /// Returns the addresses.
    pub fn range(&self) -> AddrRange {
        self.range
    }

    /// Returns how its addresses are backed. O(its parts).
    pub fn memory(&self) -> RangeMemory {
        let mut inner = self.shared.lock_anyway();
        if inner.closed {
            return RangeMemory::default();
        }
        let Some(pool) = inner.manager.virtual_pool_mut() else { return RangeMemory::default() };
        let memory = pool.pool.arena_memory(self.id);
        let host = pool.pool.hosted(self.id).iter().map(|&(_, len)| len).sum();
        RangeMemory { backed: memory.backed, lent: memory.lent, host }
    }

    /// Backs all of it for work on `stream`, which is ordered behind work that still uses the
    /// memory. No driver call if all of it is backed; else a map and a set-access for each handle,
    /// and a create where the pool has to grow.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] after handlers and waiting, as for a malloc;
    /// [`AllocError::HostMapped`] where host memory is mapped. What was backed stays backed.
    pub fn back(&self, stream: StreamId) -> Result<(), AllocError> {
        self.back_part(Bytes::ZERO, self.range.len, stream)
    }

    /// Backs `len` bytes from `from` on, in whole handles where handles are mapped.
    ///
    /// # Errors
    /// As of [`back`](StableRange::back).
    ///
    /// # Panics
    /// If the part does not lie in the range.
    pub fn back_part(&self, from: Bytes, len: Bytes, stream: StreamId) -> Result<(), AllocError> {
        let inside = from.checked_add(len).is_some_and(|end| end <= self.range.len);
        assert!(inside, "{len} from {from} on do not lie in {self:?}");
        self.shared.back_range(self.id, (from, len), stream, &mut Relief::of_range(self.patience))
    }

    /// Lends all of it except `keep`, a sorted list of offsets and lengths that do not overlap, to
    /// the pool. A handle that `keep` touches, or that is pinned, is not lent. Returns the bytes lent by this call. No
    /// driver call.
    ///
    /// The caller must have *seen* all work on the lent part complete: work of other requests may
    /// write there at once.
    pub fn lend(&self, keep: &[(Bytes, Bytes)]) -> Bytes {
        let mut guard = self.shared.lock_anyway();
        let inner = &mut *guard;
        if inner.closed {
            return Bytes::ZERO;
        }
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has ranges");
        let lent = pool.pool.lend(self.id, keep);
        self.shared.refresh(inner);
        drop(guard);
        self.shared.notify_waiters();
        lent
    }

    /// Returns true if some of its memory is pinned: something outside holds it physically. That memory
    /// is not lent. O(log n), no driver call.
    pub fn has_pins(&self) -> bool {
        let inner = self.shared.lock_anyway();
        !inner.closed
            && inner.manager.virtual_pool().is_some_and(|pool| pool.pool.has_pins(self.id))
    }

    /// Refuses pins of its memory until [`allow_pins`](StableRange::allow_pins): for an owner that moves
    /// the contents. Returns false, and refuses none, if some of it is pinned: the contents stay.
    /// O(log n), no driver call.
    #[must_use = "what is pinned must not be moved"]
    pub fn refuse_pins(&self) -> bool {
        let mut inner = self.shared.lock_anyway();
        if inner.closed {
            return true;
        }
        inner.manager.virtual_pool_mut().is_none_or(|pool| pool.pool.refuse_pins(self.id))
    }

    /// Allows pins of its memory again.
    pub fn allow_pins(&self) {
        let mut inner = self.shared.lock_anyway();
        if inner.closed {
            return;
        }
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            pool.pool.allow_pins(self.id);
        }
    }

    /// Records that work queued on `stream` so far uses the range: once it is dropped, its memory
    /// is reused only after that work. The stream may have been destroyed.
    pub fn record_use(&self, stream: StreamId) {
        let mut inner = self.shared.lock_anyway();
        inner.add_streams(&self.shared.group);
        // A stream of another allocator has no work here.
        if inner.closed || !inner.knows_stream(stream) {
            return;
        }
        let Some(pool) = inner.manager.virtual_pool() else { return };
        let mark = pool.pool.now(stream);
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        uses.retain(|other| other.stream != stream);
        uses.push(mark);
    }
}

impl Shared {
    /// Backs a part of an arena of the pool, as [`StableRange::back_part`] does.
    pub(crate) fn back_range<'a>(
        self: &'a Arc<Shared>,
        id: ArenaId,
        part: (Bytes, Bytes),
        stream: StreamId,
        relief: &mut Relief<'a>,
    ) -> Result<(), AllocError> {
        loop {
            let (shortage, call) = match self.try_back(id, part, stream)? {
                Ok(()) => return Ok(()),
                Err(Refusal::Short(shortage, call)) => (shortage, call),
                Err(Refusal::Driver(error)) => return Err(AllocError::Driver(error)),
                Err(Refusal::Arena(error)) => return Err(AllocError::Arena(Box::new(error))),
                Err(Refusal::Host(short)) => return Err(AllocError::HostMemory(short)),
            };
            self.observers.notify(&Event::Short(&shortage));
            if !self.relieve(relief, &shortage)? {
                let report = Box::new(self.report(*shortage, call, stream));
                self.observers.notify(&Event::OutOfMemory(&report));
                return Err(AllocError::OutOfMemory(report));
            }
        }
    }

    fn try_back(
        self: &Arc<Shared>,
        id: ArenaId,
        (from, len): (Bytes, Bytes),
        stream: StreamId,
    ) -> Result<Result<(), Refusal>, AllocError> {
        let mut guard = self.lock_for_memory()?;
        let inner = &mut *guard;
        inner.open_stream(stream).ok_or(AllocError::UnknownStream(stream))?;
        inner.check_host()?;
        let pool = inner.manager.virtual_pool_mut().expect("only a virtual pool has ranges");
        let end = from + len;
        let hosted = pool.pool.hosted(id).into_iter();
        if let Some((at, _)) = hosted.into_iter().find(|&(at, long)| at < end && from < at + long) {
            return Err(AllocError::HostMapped { at });
        }
        let backed = pool.back_part(id, from, len, stream).and_then(|()| {
            let mut before = pool.pool.arena_inherited(id);
            before.retain(|mark| mark.stream != stream);
            pool.order_behind(stream, &before).map_err(Refusal::Driver)
        });
        self.refresh(inner);
        Ok(backed)
    }
}

impl Drop for StableRange {
    fn drop(&mut self) {
        let mut inner = self.shared.lock_anyway();
        if inner.closed {
            return;
        }
        let uses = std::mem::take(self.uses.get_mut().unwrap_or_else(PoisonError::into_inner));
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            let over = uses.iter().all(|&mark| pool.pool.is_over(mark));
            pool.end_hosting(self.id, self.range, over);
            pool.pool.remove_arena(self.id, &uses);
        }
        self.shared.refresh(&mut inner);
        drop(inner);
        self.shared.notify_waiters();
    }
}

impl std::fmt::Debug for StableRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stable addresses {}", self.range)
    }
}
