//! The exports, imports and pins of one allocator, looked up by id and address.
//!
//! An id is unique in the process, so the id of another allocator, or of an object that ended, is
//! unknown. Driver calls and messages are made without the lock of the tables. The close of the allocator
//! drops the tables after it waited for the streams.
//!
//! Growth: O(1) for each call, whatever number of objects there is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::sharing::{OpenedMemory, PinnedRange, SharedMemory, Ticket};

use crate::ids::unknown;
use crate::status::{Failure, Kind, Result};

/// Tables of exports, imports and pins.
#[derive(Default)]
pub(crate) struct Shares {
    tables: Mutex<Tables>,
}

/// Fields are dropped in this order.
#[derive(Default)]
pub(crate) struct Tables {
    pub exports: FxHashMap<u64, Arc<SharedMemory>>,
    /// By address, the longest first: memory that is open twice has one address.
    pub imports: FxHashMap<u64, Vec<OpenedMemory>>,
    pub pins: FxHashMap<u64, PinnedRange>,
}

pub(crate) fn unknown_export(id: u64) -> Failure {
    unknown(Kind::UnknownExport, "export", "vramp_export", id)
}

pub(crate) fn unknown_pin(id: u64) -> Failure {
    unknown(Kind::UnknownPin, "pin", "vramp_pin", id)
}

#[cold]
pub(crate) fn unknown_import(addr: u64) -> Failure {
    let text = format!(
        "no import of this allocator begins at {addr:#x}: it is closed, or belongs to another \
         allocator"
    );
    Failure::new(Kind::UnknownPointer, text)
}

impl Shares {
    pub fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an export.
    pub fn export(&self, id: u64) -> Result<Arc<SharedMemory>> {
        self.lock().exports.get(&id).cloned().ok_or_else(|| unknown_export(id))
    }

    /// Returns the number of imports.
    pub fn imports(&self) -> usize {
        self.lock().imports.values().map(Vec::len).sum()
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
