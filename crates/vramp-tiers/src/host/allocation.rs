//! Allocations of whole blocks.

use std::sync::Arc;

use crate::extents::{Extent, ExtentList};
use vramp_alloc::Driver;
use vramp_core::Bytes;
use vramp_driver::{HostSlice, Stream};
use vramp_host::{HostSpan, OutOfBounds};

use super::config::HostPoolError;
use super::part::{Part, span_of};
use super::returns::{Returned, Uses};
use super::shared::{Shape, Shared};
use crate::ledger::shell::charge::Charge;
use crate::sync::{Mutex, lock};

/// Whole blocks of pinned host memory. Offsets count through all of them, in whatever runs they
/// lie.
///
/// Dropping this credits the charge, once no [`HostReader`] is left. The blocks are reused once the work noted by
/// [`record_stream`](HostAllocation::record_stream) is complete.
#[must_use = "the blocks are freed when this is dropped"]
pub struct HostAllocation {
    shared: Arc<Shared>,
    parts: Vec<Part>,
    charges: Vec<Charge>,
    uses: Uses,
    /// True if work may use the blocks until the process ends.
    in_use_forever: bool,
    /// Shared with the readers, once there was one.
    hold: Option<Arc<Hold>>,
}

/// Blocks of an allocation that was dropped, and their charges. They go back with this.
struct Remains {
    shared: Arc<Shared>,
    runs: ExtentList,
    charges: Vec<Charge>,
    uses: Uses,
}

impl Drop for Remains {
    fn drop(&mut self) {
        let (runs, uses) = (std::mem::take(&mut self.runs), std::mem::take(&mut self.uses));
        self.shared.put_back(Returned::Runs(runs), uses);
        // Credited after the blocks are returned, so that a waiter woken by the credit finds them.
        self.charges.clear();
    }
}

/// What an allocation leaves to its last reader.
#[derive(Default)]
struct Hold {
    remains: Mutex<Vec<Remains>>,
}

/// Bytes of an allocation, to be read while its owner goes on, or after it has dropped the allocation. The
/// blocks are neither reused nor credited before this is dropped.
///
/// The bytes stay as they are only if no work writes the blocks meanwhile.
#[must_use = "it keeps the blocks in use"]
pub struct HostReader {
    spans: Vec<HostSpan>,
    _hold: Arc<Hold>,
}

impl HostReader {
    /// Copies the bytes to `into`.
    ///
    /// # Errors
    /// `into` is longer than the range of the reader.
    pub fn read(&self, into: &mut [u8]) -> Result<(), OutOfBounds> {
        let len = self.spans.iter().map(HostSpan::len).sum();
        let wanted = Bytes::new(into.len() as u64);
        if wanted > len {
            return Err(OutOfBounds { offset: Bytes::ZERO, len: wanted, size: len });
        }
        copy(&self.spans, into)
    }
}

fn copy(spans: &[HostSpan], into: &mut [u8]) -> Result<(), OutOfBounds> {
    let mut rest = into;
    for span in spans {
        let len = rest.len().min(span.len().count() as usize);
        let (now, later) = rest.split_at_mut(len);
        span.read(Bytes::ZERO, now)?;
        rest = later;
    }
    Ok(())
}

impl HostAllocation {
    pub(super) fn new(shared: &Arc<Shared>, parts: Vec<Part>, charge: Charge) -> HostAllocation {
        let shared = Arc::clone(shared);
        let (charges, uses) = (vec![charge], Uses::new());
        HostAllocation { shared, parts, charges, uses, in_use_forever: false, hold: None }
    }

    /// Returns the length: whole blocks.
    pub fn len(&self) -> Bytes {
        self.parts.iter().map(|part| part.run.len).sum()
    }

    /// Returns true for zero blocks.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        (self.len().count() / self.shared.config.block.count()) as usize
    }

    /// Returns the length of a block.
    pub fn block_size(&self) -> Bytes {
        self.shared.config.block
    }

    /// Returns the memory of one block, or `None` if `index` is out of range.
    pub fn block(&self, index: usize) -> Option<HostSpan> {
        let block = self.shared.config.block;
        let offset = block.count().checked_mul(u64::try_from(index).ok()?)?;
        self.spans(Bytes::new(offset), block).ok()?.into_iter().next()
    }

    /// Returns the memory of `len` bytes from `offset`, one span for each run.
    ///
    /// # Errors
    /// The range lies outside the allocation.
    pub fn spans(&self, offset: Bytes, len: Bytes) -> Result<Vec<HostSpan>, OutOfBounds> {
        self.cut(offset, len, |part, within, len| {
            span_of(part).part(within, len).expect("the range lies in the run")
        })
    }

    /// Returns the same range as `device` addresses it in copies.
    ///
    /// # Errors
    /// The range lies outside the allocation, or the pool is not pinned for the device.
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

    /// Calls `piece` for each run of the range, with the offset in the run and the length.
    fn cut<T>(
        &self,
        offset: Bytes,
        len: Bytes,
        mut piece: impl FnMut(&Part, Bytes, Bytes) -> T,
    ) -> Result<Vec<T>, OutOfBounds> {
        let size = self.len();
        let outside = OutOfBounds { offset, len, size };
        let end = offset.checked_add(len).filter(|end| *end <= size).ok_or(outside)?;
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

    /// Copies bytes from `offset` to `into`. Work that writes them must be complete.
    ///
    /// # Errors
    /// The range lies outside the allocation.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<(), OutOfBounds> {
        copy(&self.spans(offset, Bytes::new(into.len() as u64))?, into)
    }

    /// Returns a reader of `len` bytes from `offset`, for any thread. Work that writes them must be
    /// complete. O(runs).
    ///
    /// # Errors
    /// The range lies outside the allocation.
    pub fn reader(&mut self, offset: Bytes, len: Bytes) -> Result<HostReader, OutOfBounds> {
        let spans = self.spans(offset, len)?;
        let hold = self.hold.get_or_insert_default();
        Ok(HostReader { spans, _hold: Arc::clone(hold) })
    }

    /// Overwrites the bytes from `offset` with `bytes`. Work that uses them must be complete.
    ///
    /// # Errors
    /// The range lies outside the allocation.
    pub fn write(&mut self, offset: Bytes, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let mut rest = bytes;
        for span in self.spans(offset, Bytes::new(rest.len() as u64))? {
            let (now, later) = rest.split_at(span.len().count() as usize);
            span.write(Bytes::ZERO, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Copies `len` bytes from `from` down to `to`, which is not above `from`. The two may overlap. Work that uses the
    /// blocks must be complete.
    ///
    /// # Errors
    /// The range at `from` lies outside the allocation.
    pub(crate) fn copy_down(
        &mut self,
        from: Bytes,
        to: Bytes,
        len: Bytes,
    ) -> Result<(), OutOfBounds> {
        self.spans(from, len)?;
        assert!(
            to <= from,
            "{to} is above {from}: what is there would be overwritten before it is copied"
        );
        let mut buffer = vec![0; len.min(Bytes::kib(256)).count() as usize];
        let mut done = Bytes::ZERO;
        while done < len {
            let now = len.saturating_sub(done).min(Bytes::kib(256));
            let part = &mut buffer[..now.count() as usize];
            self.read(from + done, part)?;
            self.write(to + done, part)?;
            done += now;
        }
        Ok(())
    }

    /// Notes that work queued on `stream` uses the blocks. Once dropped, they are reused only after
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

    /// As [`record_stream`](HostAllocation::record_stream), for streams whose work may be in flight.
    /// If it cannot be noted, the end of that work is unknown: once dropped, the blocks stay pinned
    /// and charged, and are never reused.
    pub(crate) fn record_unsettled(&mut self, device: &Arc<dyn Driver>, streams: [Stream; 2]) {
        for stream in streams {
            self.in_use_forever |= self.record_stream(device, stream).is_err();
        }
    }

    /// Appends `by` in whole blocks, charged to the space.
    ///
    /// # Errors
    /// As [`HostPool::allocate`](super::HostPool::allocate). The allocation is unchanged.
    pub fn grow(&mut self, by: Bytes) -> Result<(), HostPoolError> {
        let charge = self.shared.space.charge(self.shared.whole(by))?;
        self.grow_with(charge)
    }

    /// Appends the blocks that `charge` pays for.
    ///
    /// # Errors
    /// As [`HostPool::allocate_with`](super::HostPool::allocate_with). The allocation is unchanged.
    pub fn grow_with(&mut self, charge: Charge) -> Result<(), HostPoolError> {
        self.parts.extend(self.shared.take(&charge, Shape::Runs)?);
        self.charges.push(charge);
        Ok(())
    }

    /// Shortens the allocation to `len` in whole blocks, and returns the rest with its part of the
    /// charge. `None` if there is no rest.
    pub fn split_off(&mut self, len: Bytes) -> Option<HostAllocation> {
        let keep = self.shared.whole(len);
        let mut rest = Some(self.len().saturating_sub(keep)).filter(|rest| !rest.is_zero())?;
        let mut tail = HostAllocation {
            shared: Arc::clone(&self.shared),
            parts: Vec::new(),
            charges: self.cut_charges(rest),
            uses: Uses::new(),
            in_use_forever: self.in_use_forever,
            hold: self.hold.clone(),
        };
        while !rest.is_zero() {
            let part = self.parts.last_mut().expect("the rest lies in runs");
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
            // The same work may use both. If it cannot be noted for the rest, wait for it now.
            let noted = state.returns.note(
                &self.shared.devices,
                &mut tail.uses,
                (used.device, used.stream),
            );
            if noted.is_err() {
                let waited = self.shared.devices[used.device].synchronize_stream(used.stream);
                tail.in_use_forever |= waited.is_err();
            }
        }
        drop(state);
        Some(tail)
    }

    /// Splits `bytes` off the charges, the newest first.
    fn cut_charges(&mut self, mut bytes: Bytes) -> Vec<Charge> {
        let mut cut = Vec::new();
        while !bytes.is_zero() {
            let charge = self.charges.last_mut().expect("all blocks are charged");
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
        if self.in_use_forever {
            self.shared.leak(self.len());
            return std::mem::forget(std::mem::take(&mut self.charges));
        }
        let remains = Remains {
            shared: Arc::clone(&self.shared),
            runs: self.parts.drain(..).map(|part| part.run).collect(),
            charges: std::mem::take(&mut self.charges),
            uses: std::mem::take(&mut self.uses),
        };
        match self.hold.take() {
            // The last of the allocation and its readers drops them.
            Some(hold) => lock(&hold.remains).push(remains),
            None => drop(remains),
        }
    }
}

impl std::fmt::Debug for HostAllocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of host blocks in {} runs", self.len(), self.parts.len())
    }
}
