//! Calls of an allocator with streams by name.

use vramp_alloc::StreamId;
use vramp_capi::abi::vramp_stream_t;
use vramp_capi::process::{CallResult, OpenAllocator, Session, StreamName};

/// Returns the allocator's id of a stream.
#[inline]
pub fn id_of(session: &Session, name: StreamName) -> CallResult<StreamId> {
    // SAFETY: the package's contract for streams: they are streams of the device and live until they are
    // forgotten.
    unsafe { session.named(name) }
}

/// Returns the address of a created stream as a number, for other libraries. `None` on the simulator.
pub fn number_of(allocator: OpenAllocator, stream: vramp_stream_t) -> CallResult<Option<u64>> {
    allocator.with(|session| Ok(session.stream_number(session.stream(stream)?)))
}

/// Makes later work on `stream` wait for the work queued on `before` so far.
pub fn order(allocator: OpenAllocator, stream: StreamName, before: StreamName) -> CallResult<()> {
    allocator.with(|session| session.order(id_of(session, stream)?, id_of(session, before)?))
}

/// Waits on the host for the work queued on a stream so far.
pub fn synchronize(allocator: OpenAllocator, stream: StreamName) -> CallResult<()> {
    allocator.with(|session| session.synchronize(id_of(session, stream)?))
}

/// Frees the block at an address.
#[inline]
pub fn free(allocator: OpenAllocator, addr: u64, stream: StreamName) -> CallResult<()> {
    // SAFETY: the package's contract for streams, as in `id_of`.
    allocator.with(|session| unsafe { session.free_named(addr, stream) })
}
