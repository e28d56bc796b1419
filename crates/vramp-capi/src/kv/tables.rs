//! The arenas for caches of one allocator, looked up by id.
//!
//! An id is unique in the process, so the id of another allocator, or of an arena that ended, is unknown. Calls on an
//! arena are made without the lock of the table.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::StreamId;
use vramp_alloc::kv::Arena;

use crate::ids::unknown;
use crate::status::{Failure, Kind, Result};

/// The arenas for caches of one allocator that C has, by number, and the stream of calls that name none.
#[derive(Default)]
pub(crate) struct Caches {
    arenas: Mutex<FxHashMap<u64, Arc<Arena>>>,
    pub stream: OnceLock<StreamId>,
}

impl Caches {
    pub fn lock(&self) -> MutexGuard<'_, FxHashMap<u64, Arc<Arena>>> {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, id: u64) -> Result<Arc<Arena>> {
        self.lock().get(&id).cloned().ok_or_else(|| unknown_kv(id))
    }
}

pub(crate) fn unknown_kv(id: u64) -> Failure {
    unknown(Kind::UnknownArena, "cache arena", "vramp_kv_create", id)
}
