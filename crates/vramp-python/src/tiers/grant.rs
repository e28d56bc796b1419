//! A lease that was granted, as its views and their capsules keep it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::prelude::*;

use super::shared::{OpenHold, end};
use crate::calls::order;
use crate::dlpack::Holder;
use crate::error::refuse;
use vramp_capi::process::{OpenAllocator, StreamName};

/// A lease that was granted.
pub struct Grant {
    /// `None` only while it is dropped.
    pub(super) set: Option<(vramp_defer::LeaseSet, OpenHold)>,
    /// Where the buffers are, in the order of the request.
    pub(super) addrs: Vec<u64>,
    pub(super) allocator: OpenAllocator,
    pub(super) stream: StreamName,
    /// Keeps the stream alive.
    pub(super) _stream_object: Option<Py<PyAny>>,
    /// True once the program ended it.
    pub(super) is_released: AtomicBool,
}

impl Grant {
    pub fn is_released(&self) -> bool {
        self.is_released.load(Ordering::Acquire)
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        end(self.set.take());
    }
}

/// What a capsule of a view keeps.
pub struct Hold(pub Arc<Grant>);

impl Holder for Hold {
    fn allocator(&self) -> OpenAllocator {
        self.0.allocator
    }

    fn stream(&self) -> StreamName {
        self.0.stream
    }

    /// The lease ends at what its stream waits for then.
    fn used_by(&self, consumer: StreamName) {
        // If it fails, the pool is closed or the process ends: nothing moves then.
        drop(order(self.0.allocator, self.0.stream, consumer));
    }
}

/// Returns the exception for the use of a lease after its end.
#[cold]
pub fn ended(py: Python<'_>) -> PyErr {
    let text = "the lease has ended, so the memory may be gone: lease the buffer again";
    refuse(py, "LeaseEndedError", text)
}
