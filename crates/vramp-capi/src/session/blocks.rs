//! Blocks of a session, by address.

use std::sync::Arc;

use vramp_alloc::error::HostShortage;
use vramp_alloc::graph::AttachedCapture;
use vramp_alloc::sharing::{Export, ExportError};
use vramp_alloc::{AllocError, Allocation, Bytes, DeviceAddr, FreeError, StreamId};
use vramp_core::AddrRange;
use vramp_tiers::regions::Region;
use vramp_tiers::reserve::Charge;

use super::streams::PER_THREAD;
use super::{Block, SMALL_MAX, Session, StreamName};
use crate::addresses::Taken;
use crate::regions::not_allocated;
use crate::status::{Failure, Kind, Result, unknown_stream};

impl Session {
    /// Allocates a block and returns its length too.
    #[inline]
    pub fn place(&self, size: u64, stream: StreamId) -> Result<Block> {
        self.place_in(self.region_of_thread()?, size, stream)
    }

    /// Allocates a block in a region, or in the pool if that is `None`.
    #[inline]
    pub(crate) fn place_in(
        &self,
        region: Option<Arc<Region>>,
        size: u64,
        stream: StreamId,
    ) -> Result<Block> {
        self.place_with(region, size, stream, |allocation| {
            let inserted = self.blocks.try_insert(allocation);
            inserted.map_err(|allocation| (allocation, no_host_memory()))
        })
    }

    /// Allocates a block in a region, or in the pool if that is `None`, and stores it with `keep`. What that
    /// returns with an error is freed.
    #[inline]
    pub(crate) fn place_with(
        &self,
        region: Option<Arc<Region>>,
        size: u64,
        stream: StreamId,
        keep: impl FnOnce(Allocation) -> std::result::Result<(), (Allocation, Failure)>,
    ) -> Result<Block> {
        let mut rejected = None;
        // Observers may look the block up.
        let allocator = region.as_ref().map_or(self.allocator(), |region| region.allocator());
        let block = allocator.malloc_with(Bytes::new(size), stream, |allocation| {
            let (addr, len) = (allocation.addr().number(), allocation.len().count());
            let is_small = is_small(&allocation);
            rejected = keep(allocation).err();
            Block { addr, len, is_small }
        });
        let block = block.map_err(|error| match &region {
            Some(region) => not_allocated(region.tag(), error),
            None => error.into(),
        })?;
        match rejected {
            None => Ok(block),
            Some((allocation, failure)) => {
                allocator.free(allocation, stream)?;
                Err(failure)
            }
        }
    }

    /// Stores a new block that a reservation pays for.
    pub(crate) fn keep_paid(
        &self,
        allocation: Allocation,
        charge: Charge,
    ) -> std::result::Result<(), (Allocation, Failure)> {
        let inserted = self.blocks.try_insert_paid(allocation, Box::new(charge));
        inserted.map_err(|(allocation, _)| (allocation, no_host_memory()))
    }

    /// Allocates a block as `place` does if no lock has to be taken that is held during driver calls.
    #[inline]
    pub(crate) fn place_at_hand(&self, size: u64, stream: StreamName) -> Option<Block> {
        let stream = self.named_at_hand(stream)?;
        let region = self.region_at_hand().ok()?;
        let allocator = region.as_ref().map_or(self.allocator(), |region| region.allocator());
        let allocation = allocator.malloc_at_hand(Bytes::new(size), stream)?;
        let (addr, len) = (allocation.addr().number(), allocation.len().count());
        let is_small = is_small(&allocation);
        match self.blocks.insert_at_once(allocation) {
            Ok(()) => Some(Block { addr, len, is_small }),
            Err(allocation) => {
                // The thread's cache has the place that the block came from.
                let freed = allocator.free_at_hand(allocation, stream);
                let _ = freed.or_else(|allocation| allocator.free(allocation, stream));
                None
            }
        }
    }

    /// Frees a block as `free` does if no lock has to be taken that is held during driver calls.
    /// Otherwise returns false and does nothing.
    #[inline]
    pub(crate) fn free_at_hand(&self, addr: u64, stream: StreamName) -> bool {
        let Some(stream) = self.named_at_hand(stream) else { return false };
        let free = |allocation: Allocation| {
            let owner = self.owner(allocation.pool_number());
            owner.free_block_at_hand(allocation, stream)
        };
        self.blocks.take_at_once(addr, free)
    }

    /// Returns true if the process may access the memory at an address: that of a simulated card which
    /// has the host's memory. Blocks of the simulated driver's own pool have none; their addresses are
    /// above those of any process.
    pub fn is_host_memory(&self, addr: u64) -> bool {
        self.device.is_mapped && addr < 1 << 47
    }

    #[inline]
    pub(crate) fn free(&self, addr: u64, stream: StreamId) -> Result<()> {
        let Taken { allocation, charge } =
            self.blocks.remove(addr).ok_or_else(|| self.unknown_pointer(addr))?;
        let freed = self.owner(allocation.pool_number()).free_block(allocation, stream);
        freed.or_else(|error| self.not_freed(addr, error, charge))
    }

    /// Frees a block on the stream of this name. `cudaStreamPerThread` does not say which thread's: the block
    /// is freed on its own stream, after what the calling thread has queued on its default stream. So a
    /// collector of garbage may free what another thread uses.
    ///
    /// # Safety
    /// On a card a raw stream is null or a `CUstream` of the card's primary context, and lives until it is forgotten or
    /// the allocator is closed.
    pub unsafe fn free_named(&self, addr: u64, name: StreamName) -> Result<()> {
        // SAFETY: this function's contract is the same.
        let stream = unsafe { self.named(name) }?;
        if matches!(name, StreamName::Raw(raw) if raw == PER_THREAD as u64)
            && let Some((_, _, home)) = self.block(addr)
            && home != stream
        {
            self.record_use(addr, stream)?;
            return self.free(addr, home);
        }
        self.free(addr, stream)
    }

    /// Frees a block on the stream that it was allocated for. Returns it, its requested bytes and that
    /// stream; `None` if no block begins at `addr`.
    #[inline]
    pub(crate) fn free_on_own_stream(&self, addr: u64) -> Result<Option<(Block, u64, StreamId)>> {
        let Some(Taken { allocation, charge }) = self.blocks.remove(addr) else { return Ok(None) };
        let described = described(&allocation);
        let stream = allocation.stream();
        let freed = self.owner(allocation.pool_number()).free_block(allocation, stream);
        freed.or_else(|error| self.not_freed(addr, error, charge))?;
        Ok(Some(described))
    }

    /// Returns the block that begins at `addr`, its requested bytes and its stream.
    pub(crate) fn block(&self, addr: u64) -> Option<(Block, u64, StreamId)> {
        self.blocks.with(addr, described)
    }

    /// Frees a block, but keeps its memory for the graph of a capture that may use it. Returns
    /// false and does nothing if no block begins at `addr`.
    pub(crate) fn free_for_capture(
        &self,
        addr: u64,
        stream: StreamId,
        capture: &AttachedCapture,
    ) -> Result<bool> {
        let Some(Taken { allocation, charge }) = self.blocks.remove(addr) else { return Ok(false) };
        let owner = self.owner(allocation.pool_number());
        let freed = owner.free_for_capture(allocation, stream, capture);
        freed.or_else(|error| self.not_freed(addr, error, charge))?;
        Ok(true)
    }

    /// Puts a block that the caller still owns back into the map, with what a reservation pays for it.
    #[cold]
    fn not_freed(&self, addr: u64, error: FreeError, charge: Option<Box<Charge>>) -> Result<()> {
        match error {
            FreeError::UnknownStream { allocation, .. } => {
                self.blocks.insert(Taken { allocation, charge });
                Err(unknown_stream())
            }
            FreeError::Foreign(allocation) => {
                self.blocks.insert(Taken { allocation, charge });
                Err(self.unknown_pointer(addr))
            }
            error => Err(error.into()),
        }
    }

    /// Records that work queued on `stream` so far uses the block at `addr`. No driver call.
    ///
    /// # Errors
    /// No block begins there, or the stream is unknown.
    pub fn record_use(&self, addr: u64, stream: StreamId) -> Result<()> {
        let noted = self
            .blocks
            .with(addr, |block| self.owner(block.pool_number()).record_use(block, stream));
        Ok(noted.ok_or_else(|| self.unknown_pointer(addr))??)
    }

    /// Calls `f` with the block that begins at `addr`, which cannot be freed meanwhile.
    pub(crate) fn with_block<R>(&self, addr: u64, f: impl FnOnce(&Allocation) -> R) -> Result<R> {
        self.blocks.with(addr, f).ok_or_else(|| self.unknown_pointer(addr))
    }

    /// Waits on the host for the work queued on a stream so far.
    pub fn synchronize(&self, stream: StreamId) -> Result<()> {
        let raw = self.allocator.stream(stream).ok_or_else(unknown_stream)?;
        Ok(self.device.driver.synchronize_stream(raw)?)
    }

    /// Exports the block that begins at `addr`.
    pub(crate) fn export(&self, addr: u64) -> Result<std::result::Result<Export, ExportError>> {
        let exported =
            self.blocks.with(addr, |block| self.owner(block.pool_number()).export(block));
        exported.ok_or_else(|| self.unknown_pointer(addr))
    }

    /// Returns the usable bytes of a block.
    pub fn usable(&self, addr: u64) -> Result<u64> {
        let len = self.blocks.with(addr, |block| block.len().count());
        len.ok_or_else(|| self.unknown_pointer(addr))
    }

    /// Runs `work` while the table of blocks is locked at `addr`, where a block begins.
    #[cfg(test)]
    pub(crate) fn with_locked_block<R>(&self, addr: u64, work: impl FnOnce() -> R) -> R {
        self.blocks.with(addr, |_| work()).expect("a block begins there")
    }

    /// Returns true if a block begins at `addr`.
    pub(crate) fn has(&self, addr: u64) -> bool {
        self.blocks.with(addr, |_| ()).is_some()
    }

    /// Returns true if a block of a graph arena begins at `addr`.
    pub(crate) fn is_of_arena(&self, addr: u64) -> bool {
        self.blocks.with(addr, Allocation::is_in_arena).unwrap_or(false)
    }

    /// Returns true if a block of a graph arena of that pool begins at `addr`.
    pub(crate) fn is_of_arena_in(&self, addr: u64, pool_number: u64) -> bool {
        let is_of = |block: &Allocation| block.is_in_arena() && block.pool_number() == pool_number;
        self.blocks.with(addr, is_of).unwrap_or(false)
    }

    /// Returns the start and length of the block that contains `addr`. O(n).
    pub(crate) fn containing(&self, addr: u64) -> Option<(DeviceAddr, u64)> {
        self.blocks.containing(addr, usize::MAX)
    }

    /// Returns the addresses of all live blocks, ascending; blocks without a gap are one range. O(n log n).
    pub(crate) fn live_stretches(&self) -> Vec<AddrRange> {
        let mut ranges = self.blocks.ranges();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut stretches: Vec<AddrRange> = Vec::new();
        for range in ranges {
            match stretches.last_mut() {
                Some(last) if last.start + last.len == range.start => last.len += range.len,
                _ => stretches.push(range),
            }
        }
        stretches
    }

    /// Returns the error for an address at which no block begins.
    #[cold]
    pub(crate) fn unknown_pointer(&self, addr: u64) -> Failure {
        // A program may free wrong addresses all the time, with many blocks live.
        let text = match self.blocks.containing(addr, 1 << 14) {
            Some((start, len)) => format!(
                "{addr:#x} lies {} bytes inside the block of {len} bytes at {start}: pass the \
                 address that vramp_malloc returned",
                addr - start.number()
            ),
            None if addr == 0 => {
                "the address is null: pass one that vramp_malloc returned".to_owned()
            }
            None => format!(
                "no block of this allocator begins at {addr:#x}: it was freed already, belongs to \
                 another allocator, or lies inside a block"
            ),
        };
        Failure::new(Kind::UnknownPointer, text)
    }
}

#[cold]
fn no_host_memory() -> Failure {
    AllocError::HostMemory(HostShortage).into()
}

/// Returns true for a block that PyTorch's statistics count in the small pool: in a slab, or, of allocators
/// without slabs, up to 1 MiB.
#[inline]
fn is_small(allocation: &Allocation) -> bool {
    let has_slabs = allocation.is_in_slab() || allocation.is_in_pool();
    allocation.is_in_slab() || !has_slabs && allocation.len().count() <= SMALL_MAX
}

#[inline]
fn described(allocation: &Allocation) -> (Block, u64, StreamId) {
    let (addr, len) = (allocation.addr().number(), allocation.len().count());
    let block = Block { addr, len, is_small: is_small(allocation) };
    (block, allocation.requested().count(), allocation.stream())
}
