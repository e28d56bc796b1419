//! Small allocations, carved from shared blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::extents::{Extent, ExtentAllocator};
use vramp_alloc::Driver;
use vramp_core::Bytes;
use vramp_driver::{HostSlice, Stream};
use vramp_host::{HostSpan, OutOfBounds};

use super::allocation::Part;
use super::pool::{HostPoolError, Shared};
use super::returns::{Returned, Uses};
use crate::ledger::shell::charge::Charge;
use crate::sync::lock;

/// Least size class. Classes are powers of two, and the whole block.
const SMALLEST: u64 = 512;

/// A block divided into pieces of one size class.
struct Slab {
    part: Part,
    charge: Charge,
    free: Vec<u32>,
    pieces: usize,
}

/// Identifies a piece: its size class, its slab, and its index in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Piece {
    class: u64,
    slab: u64,
    index: u32,
}

/// All slabs, by size class and number.
#[derive(Default)]
pub(super) struct Slabs {
    slabs: BTreeMap<(u64, u64), Slab>,
    made: u64,
}

impl Slabs {
    /// Allocates a piece of the smallest class that holds `len`.
    pub fn allocate(
        shared: &Arc<Shared>,
        len: Bytes,
    ) -> Result<SmallHostAllocation, HostPoolError> {
        let block = shared.config.block.count();
        if len.count() > block {
            return Err(HostPoolError::Config(
                "a small allocation is at most a block: use allocate for more",
            ));
        }
        let class = len.count().next_power_of_two().max(SMALLEST).min(block);
        loop {
            if let Some(slab) = Slabs::pick(shared, class, len) {
                return Ok(slab);
            }
            if shared.sweep(&mut lock(&shared.state)) {
                continue;
            }
            let charge = shared.space.charge(shared.config.block)?;
            let part = shared.take(&charge)?.pop().expect("a block lies in a part");
            let free: Vec<u32> = (0..(block / class) as u32).rev().collect();
            let mut state = lock(&shared.state);
            state.slabs.made += 1;
            let number = state.slabs.made;
            let pieces = free.len();
            state.slabs.slabs.insert((class, number), Slab { part, charge, free, pieces });
        }
    }

    /// Frees a piece that no work uses.
    pub fn free(&mut self, piece: Piece) {
        let slab = self.slabs.get_mut(&(piece.class, piece.slab));
        slab.expect("a slab outlives its pieces").free.push(piece.index);
    }

    /// Frees the blocks of slabs without allocated pieces, and returns their charges.
    pub fn end_idle(&mut self, blocks: &mut ExtentAllocator) -> Vec<Charge> {
        let (idle, used) = std::mem::take(&mut self.slabs)
            .into_iter()
            .partition(|(_, slab)| slab.free.len() == slab.pieces);
        self.slabs = used;
        let idle: BTreeMap<_, Slab> = idle;
        let ended = idle.into_values().map(|slab| {
            blocks.free(slab.part.run).expect("a slab's block is returned once");
            slab.charge
        });
        ended.collect()
    }

    fn pick(shared: &Arc<Shared>, class: u64, len: Bytes) -> Option<SmallHostAllocation> {
        let mut state = lock(&shared.state);
        let of_class = (class, 0)..=(class, u64::MAX);
        let mut usable =
            state.slabs.slabs.range_mut(of_class).filter(|(_, slab)| !slab.free.is_empty());
        let (&key, slab) = usable.next()?;
        let index = slab.free.pop().expect("a slab with free pieces has one");
        let piece = Piece { class, slab: key.1, index };
        let part = slab.part.clone();
        Some(SmallHostAllocation {
            shared: Arc::clone(shared),
            piece,
            part,
            len,
            uses: Uses::new(),
        })
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
        let whole = super::pool::span_of(&self.part);
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
