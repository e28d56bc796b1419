//! An allocation for other processes.
//!
//! 1. [`Allocator::export`] pins the handles that a block lies in and keeps the block.
//! 2. [`Export::description`] says how to put the handles together, and [`Export::descriptor`] makes one
//!    of them a file descriptor. The caller sends both to another process, which imports them.
//! 3. A free of the block meanwhile takes effect once the [`Export`] is dropped. So the caller keeps it
//!    for as long as another process uses the memory.
//!
//! An importer's mapping outlives all of that: the memory behind it is freed once nothing maps it and no
//! descriptor of it is open. But once the export is dropped, other blocks of this process use it too.
//!
//! Growth: one entry for each exported block, and 16 bytes for each handle. A free looks up the table
//! only for blocks that were exported at some time.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use vramp_core::{AddrRange, Bytes, ChunkAt, DeviceAddr, NotPoolMemory};
use vramp_driver::{DriverError, ExportedHandle, Handle, HandleType};
use vramp_host::fork::is_forked;
use vramp_ipc::Watchers;

use crate::allocation::Owner;
use crate::error::Unusable;
use crate::manager::Manager;
use crate::shared::{Inner, Shared};
use crate::sharing::descriptors::Descriptors;
use crate::sharing::{Access, range_of};
use crate::virtual_pool::VirtualPool;
use crate::{Allocation, Allocator};

/// How an exported block lies in its handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Lengths of the handles, in address order.
    pub handles: Vec<Bytes>,
    /// Distance of the block's first byte from the first handle's.
    pub offset: Bytes,
    /// Bytes of the block.
    pub len: Bytes,
}

impl Description {
    /// Returns the length of all handles together.
    pub fn mapped(&self) -> Bytes {
        self.handles.iter().copied().sum()
    }

    /// Returns true if the block lies in its handles.
    pub fn is_possible(&self) -> bool {
        let mut sum = Some(Bytes::ZERO);
        for &len in &self.handles {
            sum = sum.filter(|_| !len.is_zero()).and_then(|sum| sum.checked_add(len));
        }
        let end = self.offset.checked_add(self.len);
        !self.len.is_zero() && end.zip(sum).is_some_and(|(end, sum)| end <= sum)
    }
}

/// A pool that exported a block of more handles gets few long ones for large blocks from then on.
const MANY: usize = 4;

/// A block that other processes may have open. Dropping it ends that: the block's handles are no longer
/// pinned, and if the block was freed its memory serves other requests.
pub struct Export {
    shared: Arc<Shared>,
    addr: DeviceAddr,
    /// A block, which is kept; otherwise addresses, whose handles are pinned.
    of_block: bool,
    description: Description,
    is_fabric: bool,
    handles: Vec<Handle>,
    /// Where the handles lie; `None` of a segment.
    place: Option<Place>,
    /// The chunks of the handles, which are pinned; none of a segment, whose handles stay because the block
    /// does.
    chunks: Vec<ChunkAt>,
    /// Those of the pool. Those of a segment end with the export, because no call says that its handles are released.
    descriptors: Arc<Descriptors>,
}

/// Where exported handles lie side by side in the exporter's addresses, for importers that map them likewise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Number of the pool, unique in the exporter's process.
    pub pool: u64,
    /// Number of the reservation in the pool.
    pub span: u64,
    /// Distance of the first handle from the reservation's start.
    pub at: Bytes,
    /// A key of each handle, unique in the exporter's process.
    pub keys: Vec<u64>,
}

/// What an export keeps: lengths of handles, the address of the first, and the handles.
struct PinnedHandles {
    lens: Vec<Bytes>,
    start: DeviceAddr,
    handles: Vec<Handle>,
    chunks: Vec<ChunkAt>,
    descriptors: Arc<Descriptors>,
}

/// Error of [`Allocator::export`] and [`Export::descriptor`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The allocation belongs to another allocator.
    #[error("the allocation at {0} belongs to another allocator: export it there")]
    Foreign(DeviceAddr),
    /// The memory was created for this process only.
    #[error("this memory cannot be exported: {reason}")]
    NotExportable {
        /// Why, and what to do.
        reason: &'static str,
    },
    /// There is no such handle.
    #[error("the export has {count} handles, and no number {index}")]
    NoSuchHandle {
        /// Number that was given.
        index: usize,
        /// Number of handles.
        count: usize,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// # Export to other processes
impl Allocator {
    /// Exports an allocation: pins its handles, and keeps it beyond a free until the result is dropped.
    /// No driver call. A block may be exported several times.
    ///
    /// The memory of neighbours in the same handles becomes readable and writable for the importer too.
    ///
    /// # Errors
    /// It belongs to another allocator, or its memory was created for this process only.
    pub fn export(&self, allocation: &Allocation) -> Result<Export, ExportError> {
        let mut guard = self.shared().lock()?;
        let inner = &mut *guard;
        if !self.owns(inner, allocation) {
            return Err(ExportError::Foreign(allocation.addr()));
        }
        let pinned = inner.manager.memory_to_export(allocation)?;
        let entry = inner.exports.blocks.entry(allocation.addr()).or_default();
        entry.count += 1;
        // Its free takes the lock from now on, where the table is looked up.
        allocation.has_recorded_uses.store(true, Ordering::Relaxed);
        Ok(self.exported_of(inner, range_of(allocation), true, pinned))
    }

    /// Exports addresses with memory, as the pages of an arena for caches or a stable range: pins their
    /// handles until the result is dropped, so that what is parked or lent of them stays. No driver call.
    ///
    /// The memory of neighbours in the same handles becomes readable and writable for the importer too. The
    /// caller keeps blocks that lie there; [`export`](Allocator::export) keeps its block itself.
    ///
    /// # Errors
    /// [`ExportError::NotExportable`] where part of it has no memory of the pool, or memory that was created
    /// for this process only.
    pub fn export_range(&self, range: AddrRange) -> Result<Export, ExportError> {
        let mut guard = self.shared().lock()?;
        let inner = &mut *guard;
        let reason = "addresses are exported of the preset vramp alone: export a block";
        let pool = inner.manager.virtual_pool_mut().ok_or(ExportError::NotExportable { reason })?;
        let pinned = pool.pin_to_export(range)?;
        Ok(self.exported_of(inner, range, false, pinned))
    }

    fn exported_of(
        &self,
        inner: &mut Inner,
        range: AddrRange,
        of_block: bool,
        pinned: PinnedHandles,
    ) -> Export {
        let PinnedHandles { lens, start, handles, chunks, descriptors } = pinned;
        let offset = range.start.checked_offset_from(start);
        let offset = offset.expect("the first handle holds the first byte");
        let description = Description { handles: lens, offset, len: range.len };
        let (shared, addr) = (Arc::clone(self.shared()), range.start);
        let properties = inner.manager.access_mut().map(|access| access.properties);
        let is_fabric = properties.is_some_and(|of| of.handle_type == HandleType::Fabric);
        let keys = descriptors.enter(&handles);
        let place = chunks.first().map(|first| Place {
            pool: shared.number,
            span: first.at.span().index() as u64,
            at: first.at.offset(),
            keys,
        });
        Export {
            shared,
            addr,
            of_block,
            description,
            is_fabric,
            handles,
            place,
            chunks,
            descriptors,
        }
    }

    /// Returns the number of exported blocks.
    pub fn exported(&self) -> usize {
        let inner = self.shared().lock_anyway();
        if inner.closed { 0 } else { inner.exports.count() }
    }
}

impl Manager {
    /// Returns the lengths of the handles of a block, the address of the first, and pins them.
    fn memory_to_export(&mut self, allocation: &Allocation) -> Result<PinnedHandles, ExportError> {
        let refuse = |reason| Err(ExportError::NotExportable { reason });
        match self {
            Manager::Virtual { pool, .. } => pool.pin_to_export(range_of(allocation)),
            Manager::Backend(backend) => {
                let id = allocation.owner.backend_id();
                let held = id.and_then(|id| backend.handles_of(id));
                let has_handles =
                    |access: &mut Access| access.properties.handle_type != HandleType::None;
                match held {
                    Some((start, held)) if backend.access_mut().is_some_and(has_handles) => {
                        let (handles, lens) = held.into_iter().unzip();
                        let (chunks, descriptors) = (Vec::new(), Arc::default());
                        Ok(PinnedHandles { lens, start, handles, chunks, descriptors })
                    }
                    Some(_) => refuse("it was created for one process: set `sharing` to posix-fd"),
                    None if matches!(allocation.owner, Owner::Driver { .. }) => {
                        refuse("it is memory of the driver's pool: use the preset vramp")
                    }
                    None => {
                        refuse("it is a plain allocation: use the preset vramp, or a comm pool")
                    }
                }
            }
        }
    }
}

impl VirtualPool {
    /// Pins the handles of addresses.
    fn pin_to_export(&mut self, range: AddrRange) -> Result<PinnedHandles, ExportError> {
        let refuse = |reason| Err(ExportError::NotExportable { reason });
        if self.exec.access.properties.handle_type == HandleType::None {
            return refuse("it was created for one process: set `sharing` to posix-fd");
        }
        let Some(place) = self.exec.find(range) else {
            return refuse("it is a block of the driver's pool: allocate a page or more");
        };
        let Ok::<_, NotPoolMemory>(chunks) = self.pool.pin(place) else {
            return refuse("part of it is not memory of the pool");
        };
        let start = self.exec.addr(chunks[0].at);
        if chunks.len() > MANY {
            self.pool.prefer_few_chunks();
        }
        let lens = chunks.iter().map(|chunk| chunk.len).collect();
        let handles = chunks.iter().map(|chunk| self.exec.handle(chunk.chunk)).collect();
        let descriptors = Arc::clone(&self.exec.descriptors);
        Ok(PinnedHandles { lens, start, handles, chunks, descriptors })
    }
}

impl Export {
    /// Returns how the block lies in its handles.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns an error once the allocator is closed, when the memory is no longer its own.
    pub(super) fn check_open(&self) -> Result<(), Unusable> {
        self.shared.lock().map(drop)
    }

    /// Returns true if its handles are fabric handles.
    pub(super) fn is_fabric(&self) -> bool {
        self.is_fabric
    }

    /// Returns one of its handles as the outside sees it: by number, in address order. One driver call,
    /// 185 us, unless the descriptor of the handle is kept from an earlier one, also for another block in the
    /// same handle. The descriptor keeps the memory alive until it is closed.
    ///
    /// # Errors
    /// There is no such handle, the allocator is closed, or the driver call failed.
    pub fn descriptor(&self, index: usize) -> Result<ExportedHandle, ExportError> {
        let count = self.handles.len();
        let handle = *self.handles.get(index).ok_or(ExportError::NoSuchHandle { index, count })?;
        let inner = self.shared.lock()?;
        // The call takes long and needs no lock: the pin keeps the handle, except from a close.
        let exporting = self.shared.exporting.read().unwrap_or_else(PoisonError::into_inner);
        drop(inner);
        let exported = self.descriptors.get(handle, || self.shared.driver.export(handle));
        drop(exporting);
        Ok(exported?)
    }

    /// Returns a descriptor for an importer in another process, as [`Export::descriptor`] does.
    pub(super) fn descriptor_to_send(&self, index: usize) -> Result<ExportedHandle, ExportError> {
        if let Some(&handle) = self.handles.get(index) {
            self.descriptors.note_sent(handle);
        }
        self.descriptor(index)
    }

    /// Returns where the handles lie; `None` where that says nothing to importers.
    pub(super) fn place(&self) -> Option<&Place> {
        self.place.as_ref()
    }

    /// Has importers of a server unmap what they closed before one of the pool's exported handles is released.
    pub(super) fn notify(&self, watchers: &Arc<Watchers>) {
        self.descriptors.add_watchers(watchers);
    }

    /// Makes the descriptors for the first importer, as far as the process may keep them. Those that cannot
    /// be made now are made when an importer asks.
    pub(super) fn prepare(&self) {
        if self.is_fabric {
            return;
        }
        for (index, &handle) in self.handles.iter().enumerate() {
            if !self.descriptors.can_keep(handle) || self.descriptor(index).is_err() {
                return;
            }
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if is_forked() {
            // Dropping the device would make calls, and take locks that no thread releases.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let mut guard = self.shared.lock_anyway();
        let inner: &mut Inner = &mut guard;
        self.descriptors.leave(&self.handles);
        if inner.closed {
            return;
        }
        if let Some(pool) = inner.manager.virtual_pool_mut() {
            pool.pool.unpin(&self.chunks);
        }
        let ended = self.of_block.then(|| inner.exports.end(self.addr)).flatten();
        if let Some((allocation, stream)) = ended {
            // A drop cannot report a failure. The memory is free all the same, unless the device is lost.
            let _ = inner.free(allocation, stream, self.shared.number);
            self.shared.refresh(inner);
        }
        drop(guard);
        self.shared.notify_waiters();
    }
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Description { handles, len, .. } = &self.description;
        write!(f, "{len} at {} exported in {} handles", self.addr, handles.len())
    }
}
