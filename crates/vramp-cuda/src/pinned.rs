//! Pinned host memory as the device knows it: its bytes, and the work that uses it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vramp_core::Bytes;
use vramp_driver::{Call, DriverResult, HostMemory};

use crate::error::invalid;
use crate::sys::CUevent_st;
use crate::table::Opaque;

/// A pinned buffer.
pub(crate) struct Pinned {
    pub(crate) bytes: Source,
    pub(crate) len: Bytes,
    pub(crate) uses: Uses,
}

/// Origin of a pinned buffer.
pub(crate) enum Source {
    /// The driver allocated it.
    Allocated {
        start: Opaque<u8>,
        /// Held by the host thread that copies in or out. Streams order the accesses of the device.
        copying: Mutex<()>,
    },
    /// Memory of the caller, registered with the driver.
    Registered(Arc<HostMemory>),
}

impl Pinned {
    /// Returns the first byte of a part, which must lie inside the buffer.
    pub(crate) fn part(&self, call: Call, offset: Bytes, len: Bytes) -> DriverResult<*mut u8> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || len.is_zero() {
            let whole = self.len;
            return Err(invalid(
                call,
                format!("{len} at offset {offset} are not inside a buffer of {whole}"),
            ));
        }
        Ok(self.start().wrapping_add(size(offset)))
    }

    pub(crate) fn start(&self) -> *mut u8 {
        match &self.bytes {
            Source::Allocated { start, .. } => start.0,
            Source::Registered(memory) => memory.as_ptr(),
        }
    }

    /// Leaks registered memory, because work in flight may still access it.
    pub(crate) fn leak(&self) {
        if let Source::Registered(memory) = &self.bytes {
            std::mem::forget(Arc::clone(memory));
        }
    }
}

/// Buffers that the captures of this device copy from or to: by the number of the capture, then by
/// the address of the buffer's record, so that each is listed once.
pub(crate) type Captured = HashMap<u64, BTreeMap<usize, Arc<Pinned>>>;

/// Work in flight of one buffer.
#[derive(Default)]
pub(crate) struct Uses {
    marks: Mutex<Marks>,
    /// True once work uses the buffer whose end cannot be observed.
    forever: AtomicBool,
}

impl Uses {
    pub(crate) fn marks(&self) -> MutexGuard<'_, Marks> {
        // Nothing panics while holding the lock, so the content is consistent.
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if work may use the buffer until the process ends.
    pub(crate) fn never_end(&self) -> bool {
        self.forever.load(Ordering::Acquire)
    }

    pub(crate) fn set_forever(&self) {
        self.forever.store(true, Ordering::Release);
    }
}

#[derive(Default)]
pub(crate) struct Marks {
    /// Event behind the last copy on each stream.
    pub(crate) events: BTreeMap<u64, Opaque<CUevent_st>>,
    /// Number of events at which complete ones are looked for; zero at first.
    pub(crate) prune_at: usize,
}

/// Returns a length as the driver's `size_t`. vramp supports 64-bit hosts only.
pub(crate) fn size(len: Bytes) -> usize {
    len.count() as usize
}
