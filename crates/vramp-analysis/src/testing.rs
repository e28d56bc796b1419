//! Traces for tests.

use vramp::{Bytes, DeviceAddr};
use vramp_trace::{EventKind, StackId, StreamIndex, Trace};

pub use vramp_trace::Event;

/// An event at address `at` times 4 GiB.
pub fn event(kind: EventKind, at: u64, size: u64) -> Event {
    Event {
        kind,
        device: 0,
        stream: StreamIndex(0),
        address: DeviceAddr::new(at << 32),
        size: Bytes::new(size),
        time_us: 0,
        stack: None,
    }
}

/// Allocates a block at address `at`.
pub fn alloc(at: u64, size: u64) -> Event {
    event(EventKind::Alloc, at, size)
}

/// Allocates a block with a stack.
pub fn alloc_by(stack: Option<StackId>, at: u64, size: u64) -> Event {
    Event { stack, ..alloc(at, size) }
}

/// Frees the block at address `at`.
pub fn free(at: u64) -> Event {
    event(EventKind::FreeRequested, at, 0)
}

/// Completes the free of the block at address `at`.
pub fn completed(at: u64) -> Event {
    event(EventKind::FreeCompleted, at, 0)
}

/// A trace of one device with one stream.
pub fn trace(events: &[Event]) -> Trace {
    Trace {
        name: "made".to_owned(),
        device_count: 1,
        streams: vec![0],
        events: events.to_vec(),
        ..Trace::default()
    }
}
