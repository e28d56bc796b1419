//! Blocks that somebody has.

use std::sync::Arc;

use crate::extents::Extent;
use vramp_alloc::Driver;
use vramp_core::Bytes;
use vramp_driver::{HostSlice, Stream};
use vramp_host::{HostMemory, HostSpan, OutOfBounds};

use super::pool::{HostPoolError, Shared, span_of};
use super::returns::{Returned, Uses};
use crate::ledger::shell::charge::Charge;
use crate::sync::lock;

/// A run with its memory.
#[derive(Clone)]
pub(super) struct Part {
    pub run: Extent,
    pub memory: Arc<HostMemory>,
}

/// Whole blocks of the host's memory. Its bytes are numbered through, whatever runs they lie in.
///
/// Dropped, it is no longer charged, and its blocks serve again once the work that was noted by
/// [`record_stream`](HostAllocation::record_stream) is done.
#[must_use = "the blocks go back to their pool when this is dropped"]
pub struct HostAllocation {
    shared: Arc<Shared>,
    parts: Vec<Part>,
    charges: Vec<Charge>,
    uses: Uses,
}

impl HostAllocation {
    pub(super) fn new(shared: &Arc<Shared>, parts: Vec<Part>, charge: Charge) -> HostAllocation {
        let shared = Arc::clone(shared);
        HostAllocation { shared, parts, charges: vec![charge], uses: Uses::new() }
    }

    /// How much it is: whole blocks.
    pub fn len(&self) -> Bytes {
        self.parts.iter().map(|part| part.run.len).sum()
    }

    /// True if it has no blocks.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// How many blocks it has.
    pub fn blocks(&self) -> usize {
        (self.len().count() / self.shared.config.block.count()) as usize
    }

    /// The length of a block.
    pub fn block_size(&self) -> Bytes {
        self.shared.config.block
    }

    /// The bytes of one block, counted from zero. `None` if it has no such block.
    pub fn block(&self, index: usize) -> Option<HostSpan> {
        let block = self.shared.config.block;
        let offset = block.count().checked_mul(u64::try_from(index).ok()?)?;
        self.spans(Bytes::new(offset), block).ok()?.into_iter().next()
    }

    /// `len` bytes from `offset` on, in as few pieces as they lie in.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn spans(&self, offset: Bytes, len: Bytes) -> Result<Vec<HostSpan>, OutOfBounds> {
        self.cut(offset, len, |part, within, len| {
            span_of(part).part(within, len).expect("it was cut to lie inside")
        })
    }

    /// The same as `device` names it in copies.
    ///
    /// # Errors
    /// They do not lie inside, or the pool is not pinned for the device.
    pub fn slices(
        &self,
        device: &Arc<dyn Driver>,
        offset: Bytes,
        len: Bytes,
    ) -> Result<Vec<HostSlice>, HostPoolError> {
        let device = self.shared.device(device)?;
        Ok(self.cut(offset, len, |part, within, len| {
            let offset = part.run.offset + within;
            self.shared.slice(device, Extent { offset, len, ..part.run })
        })?)
    }

    /// Calls `piece` with each part of `len` bytes from `offset` on: the run, where in it, how long.
    fn cut<T>(
        &self,
        offset: Bytes,
        len: Bytes,
        mut piece: impl FnMut(&Part, Bytes, Bytes) -> T,
    ) -> Result<Vec<T>, OutOfBounds> {
        let whole = self.len();
        let outside = OutOfBounds { offset, len, whole };
        let end = offset.checked_add(len).filter(|end| *end <= whole).ok_or(outside)?;
        let mut pieces = Vec::new();
        let mut start = Bytes::ZERO;
        for part in &self.parts {
            let part_end = start + part.run.len;
            let (from, to) = (offset.max(start), end.min(part_end));
            if from < to {
                pieces.push(piece(part, from - start, to - from));
            }
            start = part_end;
        }
        Ok(pieces)
    }

    /// Copies the bytes from `offset` on into `into`. Work that writes them has to be done.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<(), OutOfBounds> {
        let mut rest = into;
        for span in self.spans(offset, Bytes::new(rest.len() as u64))? {
            let (now, later) = rest.split_at_mut(span.len().count() as usize);
            span.read(Bytes::ZERO, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Replaces the bytes from `offset` on by `bytes`. Work that touches them has to be done.
    ///
    /// # Errors
    /// They do not lie inside.
    pub fn write(&mut self, offset: Bytes, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let mut rest = bytes;
        for span in self.spans(offset, Bytes::new(rest.len() as u64))? {
            let (now, later) = rest.split_at(span.len().count() as usize);
            span.write(Bytes::ZERO, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Notes that the work queued on `stream` by now uses the blocks: once dropped, they serve
    /// others only when it is done. Two driver calls at most.
    ///
    /// # Errors
    /// The pool is not pinned for the device, or its driver refused.
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

    /// Adds `by` in whole blocks at the end, charged to the space.
    ///
    /// # Errors
    /// As [`HostPool::allocate`](super::HostPool::allocate). It stays as it is.
    pub fn grow(&mut self, by: Bytes) -> Result<(), HostPoolError> {
        let charge = self.shared.space.charge(self.shared.whole(by))?;
        self.grow_with(charge)
    }

    /// Adds as much as was charged at the end.
    ///
    /// # Errors
    /// As [`HostPool::allocate_with`](super::HostPool::allocate_with). It stays as it is.
    pub fn grow_with(&mut self, charge: Charge) -> Result<(), HostPoolError> {
        self.parts.extend(self.shared.take(&charge)?);
        self.charges.push(charge);
        Ok(())
    }

    /// Cuts it to `len` in whole blocks and returns the rest, with what paid for it. `None` if it
    /// is no longer than that.
    pub fn trim(&mut self, len: Bytes) -> Option<HostAllocation> {
        let keep = self.shared.whole(len);
        let mut rest = Some(self.len().saturating_sub(keep)).filter(|rest| !rest.is_zero())?;
        let mut tail = HostAllocation {
            shared: Arc::clone(&self.shared),
            parts: Vec::new(),
            charges: self.cut_charges(rest),
            uses: Uses::new(),
        };
        while !rest.is_zero() {
            let part = self.parts.last_mut().expect("what is cut off lies in parts");
            let len = rest.min(part.run.len);
            part.run.len -= len;
            let run = Extent { offset: part.run.end(), len, ..part.run };
            tail.parts.push(Part { run, ..part.clone() });
            rest -= len;
            if part.run.len.is_zero() {
                self.parts.pop();
            }
        }
        tail.parts.reverse();
        let mut state = lock(&self.shared.state);
        for used in &self.uses {
            // The same work may use both. If it cannot be noted, neither goes back too early.
            let noted = state.returns.note(
                &self.shared.devices,
                &mut tail.uses,
                (used.device, used.stream),
            );
            if noted.is_err() {
                let _ = self.shared.devices[used.device].synchronize_stream(used.stream);
            }
        }
        drop(state);
        Some(tail)
    }

    /// Takes `bytes` of what was paid, the newest first.
    fn cut_charges(&mut self, mut bytes: Bytes) -> Vec<Charge> {
        let mut cut = Vec::new();
        while !bytes.is_zero() {
            let charge = self.charges.last_mut().expect("blocks are paid for");
            let now = bytes.min(charge.bytes());
            cut.push(charge.split(now));
            bytes -= now;
            if charge.bytes().is_zero() {
                self.charges.pop();
            }
        }
        cut
    }
}

impl Drop for HostAllocation {
    fn drop(&mut self) {
        let runs = self.parts.drain(..).map(|part| part.run).collect();
        self.shared.give(Returned::Runs(runs), std::mem::take(&mut self.uses));
        // Only now may others charge what they then find free.
        self.charges.clear();
    }
}

impl std::fmt::Debug for HostAllocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {} runs of the host's blocks", self.len(), self.parts.len())
    }
}
