//! The exports, imports and pins of one allocator, looked up by id and address.
//!
//! An id is unique in the process, so the id of another allocator, or of an object that ended, is
//! unknown. Driver calls and messages are made without the lock of the tables. The close of the allocator
//! drops the tables after it waited for the streams.
//!
//! Growth: O(1) for each call, whatever number of objects there is.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::device::AddrRange;
use vramp_alloc::sharing::{DmaBuf, OpenedMemory, PinnedRange, SharedMemory, Ticket};
use vramp_alloc::{Bytes, DeviceAddr, StreamId};

use crate::exchange::exchange;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};

/// Tables of exports, imports and pins.
#[derive(Default)]
pub(crate) struct Shares {
    tables: Mutex<Tables>,
}

/// Fields are dropped in this order.
#[derive(Default)]
struct Tables {
    exports: FxHashMap<u64, Arc<SharedMemory>>,
    /// By address.
    imports: FxHashMap<u64, OpenedMemory>,
    pins: FxHashMap<u64, PinnedRange>,
}

fn next_id() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

#[cold]
fn unknown_export(id: u64) -> Failure {
    let text = match id {
        0 => "the export is zero: use one from vramp_export".to_owned(),
        id => format!(
            "export {id:#x} is closed, or does not belong to this allocator: use one from vramp_export"
        ),
    };
    Failure::new(Kind::UnknownExport, text)
}

#[cold]
fn unknown_pin(id: u64) -> Failure {
    let text = match id {
        0 => "the pin is zero: use one from vramp_pin".to_owned(),
        id => format!("pin {id:#x} has ended, or does not belong to this allocator"),
    };
    Failure::new(Kind::UnknownPin, text)
}

#[cold]
fn unknown_import(addr: u64) -> Failure {
    let text = format!(
        "no import of this allocator begins at {addr:#x}: it is closed, or belongs to another \
         allocator"
    );
    Failure::new(Kind::UnknownPointer, text)
}

impl Shares {
    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an export.
    pub fn export(&self, id: u64) -> Result<Arc<SharedMemory>> {
        self.lock().exports.get(&id).cloned().ok_or_else(|| unknown_export(id))
    }

    /// Returns the number of imports.
    pub fn imports(&self) -> usize {
        self.lock().imports.len()
    }
}

/// The end of the allocator, or of what is left of it: also for exports that threads wait for.
impl Drop for Shares {
    fn drop(&mut self) {
        let tables = self.tables.get_mut().unwrap_or_else(PoisonError::into_inner);
        tables.exports.values().for_each(|shared| shared.close());
    }
}

/// Returns a ticket of an export.
pub(crate) fn ticket_of(shared: &SharedMemory, keep_until_opened: bool) -> Result<Ticket> {
    match keep_until_opened {
        true => Ok(shared.grant()?),
        false => Ok(shared.ticket()),
    }
}

impl Session {
    /// Publishes the block that begins at `addr`.
    pub fn share(&self, addr: u64) -> Result<SharedMemory> {
        let exported =
            self.with_block(addr, |block| self.owner(block.pool_number()).export(block))??;
        Ok(exchange().share(exported)?)
    }

    /// Publishes the block that begins at `addr` and returns the export's id.
    pub(crate) fn add_export(&self, addr: u64) -> Result<u64> {
        let shared = Arc::new(self.share(addr)?);
        let id = next_id();
        self.shares.lock().exports.insert(id, shared);
        Ok(id)
    }

    pub(crate) fn close_export(&self, id: u64) -> Result<()> {
        let shared = self.shares.lock().exports.remove(&id);
        shared.ok_or_else(|| unknown_export(id))?.close();
        Ok(())
    }

    /// Opens the memory of a ticket.
    pub fn open_shared(&self, ticket: &[u8]) -> Result<OpenedMemory> {
        Ok(exchange().open(self.allocator(), ticket)?)
    }

    /// Opens the memory of a ticket and returns its addresses.
    pub(crate) fn add_import(&self, ticket: &[u8]) -> Result<AddrRange> {
        let opened = self.open_shared(ticket)?;
        let range = opened.range();
        self.shares.lock().imports.insert(range.start.number(), opened);
        Ok(range)
    }

    pub(crate) fn record_import(&self, addr: u64, stream: StreamId) -> Result<()> {
        let tables = self.shares.lock();
        let opened = tables.imports.get(&addr).ok_or_else(|| unknown_import(addr))?;
        Ok(opened.record_use(stream)?)
    }

    /// Waits for the recorded work and unmaps an import.
    pub(crate) fn close_import(&self, addr: u64) -> Result<()> {
        let opened = self.shares.lock().imports.remove(&addr);
        Ok(opened.ok_or_else(|| unknown_import(addr))?.close()?)
    }

    /// Pins a range.
    pub fn pin(&self, addr: u64, len: u64) -> Result<PinnedRange> {
        let range = AddrRange::new(DeviceAddr::new(addr), Bytes::new(len));
        Ok(self.in_pool_of(range, |pool| pool.pin_range(range))?)
    }

    /// Pins a range and returns the pin's id.
    pub(crate) fn add_pin(&self, addr: u64, len: u64) -> Result<u64> {
        Ok(self.keep_pin(self.pin(addr, len)?))
    }

    /// Stores a pin and returns its id.
    pub(crate) fn keep_pin(&self, pinned: PinnedRange) -> u64 {
        let id = next_id();
        self.shares.lock().pins.insert(id, pinned);
        id
    }

    pub(crate) fn unpin(&self, id: u64) -> Result<()> {
        let pinned = self.shares.lock().pins.remove(&id);
        drop(pinned.ok_or_else(|| unknown_pin(id))?);
        Ok(())
    }

    /// Pins a range and exports it as a dma-buf.
    pub(crate) fn dma_buf(&self, addr: u64, len: u64) -> Result<DmaBuf> {
        let range = AddrRange::new(DeviceAddr::new(addr), Bytes::new(len));
        Ok(self.in_pool_of(range, |pool| pool.export_dma_buf(range))?)
    }
}
