//! Small allocations, carved from shared blocks.

use std::sync::Arc;

use crate::extents::Extent;
use vramp_alloc::Driver;
use vramp_core::Bytes;
use vramp_driver::{HostSlice, Stream};
use vramp_host::{HostSpan, OutOfBounds};

use super::config::HostPoolError;
use super::part::{Part, span_of};
use super::returns::{Returned, Uses};
use super::shared::{Shape, Shared};
use super::slabs::{Piece, Slab};
use crate::sync::lock;

/// Least size class. Classes are powers of two, and the whole block.
const SMALLEST: u64 = 512;

impl Shared {
    /// Allocates a piece of the smallest class that holds `len`.
    pub(super) fn allocate_small(
        self: &Arc<Shared>,
        len: Bytes,
    ) -> Result<SmallHostAllocation, HostPoolError> {
        let block = self.config.block.count();
        if len.count() > block {
            return Err(HostPoolError::Config(
                "a small allocation is at most a block: use allocate for more",
            ));
        }
        let class = len.count().next_power_of_two().max(SMALLEST).min(block);
        loop {
            if let Some(slab) = self.pick(class, len) {
                return Ok(slab);
            }
            if self.sweep(&mut lock(&self.state)) {
                continue;
            }
            let charge = self.space.charge(self.config.block)?;
            let part = self.take(&charge, Shape::Runs)?.pop().expect("a block lies in a part");
            let free: Vec<u32> = (0..(block / class) as u32).rev().collect();
            let mut state = lock(&self.state);
            state.slabs.made += 1;
            let number = state.slabs.made;
            let pieces = free.len();
            state.slabs.slabs.insert((class, number), Slab { part, charge, free, pieces });
        }
    }

    fn pick(self: &Arc<Shared>, class: u64, len: Bytes) -> Option<SmallHostAllocation> {
        let mut state = lock(&self.state);
        let of_class = (class, 0)..=(class, u64::MAX);
        let mut usable =
            state.slabs.slabs.range_mut(of_class).filter(|(_, slab)| !slab.free.is_empty());
        let (&key, slab) = usable.next()?;
        let index = slab.free.pop().expect("a slab with free pieces has one");
        let piece = Piece { class, slab: key.1, index };
        let part = slab.part.clone();
        Some(SmallHostAllocation { shared: Arc::clone(self), piece, part, len, uses: Uses::new() })
    }
}

/// Pinned host memory of at most a block, aligned to its size class, at most to 4 KiB. Its size class is
/// the next power of two, from 512 bytes to a block; an allocation of zero bytes has one too, so its
/// address is its own.
///
/// Dropping this frees the memory once noted work is complete.
#[must_use = "the memory is freed when this is dropped"]
pub struct SmallHostAllocation {
    shared: Arc<Shared>,
    piece: Piece,
    part: Part,
    len: Bytes,
    uses: Uses,
}

impl SmallHostAllocation {
    /// Returns the length that was requested.
    pub fn len(&self) -> Bytes {
        self.len
    }

    /// Returns true for an allocation of zero bytes.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// Returns the first byte in the block.
    fn offset(&self) -> Bytes {
        Bytes::new(self.piece.class * u64::from(self.piece.index))
    }

    /// Returns the memory.
    pub fn span(&self) -> HostSpan {
        let whole = span_of(&self.part);
        whole.part(self.offset(), self.len).expect("a piece lies in its block")
    }

    /// Returns the memory as `device` addresses it in copies.
    ///
    /// # Errors
    /// The pool is not pinned for the device.
    pub fn slice(&self, device: &Arc<dyn Driver>) -> Result<HostSlice, HostPoolError> {
        let device = self.shared.device(device)?;
        let Extent { backing, offset, .. } = self.part.run;
        let run = Extent { backing, offset: offset + self.offset(), len: self.len };
        Ok(self.shared.slice(device, run))
    }

    /// Copies bytes from `offset` to `into`.
    ///
    /// # Errors
    /// The range lies outside the allocation.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.span().read(offset, into)
    }

    /// Overwrites the bytes from `offset` with `bytes`.
    ///
    /// # Errors
    /// The range lies outside the allocation.
    pub fn write(&mut self, offset: Bytes, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.span().write(offset, bytes)
    }

    /// Notes that work queued on `stream` uses the memory. Once dropped, it is reused only after
    /// that work. At most two driver calls.
    ///
    /// # Errors
    /// The pool is not pinned for the device, or a driver call failed.
    pub fn record_stream(
        &mut self,
        device: &Arc<dyn Driver>,
        stream: Stream,
    ) -> Result<(), HostPoolError> {
        let device = self.shared.device(device)?;
        let mut state = lock(&self.shared.state);
        state.returns.note(&self.shared.devices, &mut self.uses, (device, stream))?;
        Ok(())
    }
}

impl Drop for SmallHostAllocation {
    fn drop(&mut self) {
        let uses = std::mem::take(&mut self.uses);
        self.shared.put_back(Returned::Piece(self.piece), uses);
    }
}

impl std::fmt::Debug for SmallHostAllocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of a shared host block", self.len)
    }
}
