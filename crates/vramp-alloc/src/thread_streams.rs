//! Per-thread default streams: what `cudaStreamPerThread` means in each thread.
//!
//! The handle stands for another stream in each thread, and only the thread itself can name its own. So
//! every thread that uses it has a stream id of its own in a group of pools:
//!
//! 1. The first call of a thread makes the id.
//! 2. Until the thread ends, it is a stream as any other one. Events are recorded on it by the thread
//!    itself, when it makes a request or a free with the pool's lock after memory was freed there. Before
//!    that other threads grow rather than use what is free there.
//! 3. When the thread ends its stream ends, as [`Allocator::destroy_stream`] ends one: an event recorded
//!    then stands for its work. Blocks that live on are freed as before, by any thread.
//!
//! *Why no memory is used too early.* Memory freed on the stream of thread A is used at once by requests
//! for that stream only, so by A. All others need an event recorded after the free: A recorded it, on its
//! own stream, or another thread did through the legacy default stream, which the driver orders behind the
//! work of all threads' streams ([`Driver::thread_stream`]). The second makes the threads' streams wait for
//! each other. So it is done only where the host waits anyway, or the memory is needed now: a request that
//! would fail otherwise, a trim, a close, and the end of a stream by another thread. While a stream of a
//! thread captures a graph it is refused; what it would free stays where it is.
//!
//! A thread that ends in the middle of a capture, or while the driver fails, leaves its stream open. Later
//! threads that get or end one end it too, so that nothing stays.
//!
//! [`Allocator::destroy_stream`]: crate::Allocator::destroy_stream
//! [`Driver::thread_stream`]: vramp_driver::Driver::thread_stream

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use vramp_core::StreamId;
use vramp_driver::{Call, DriverError};
use vramp_host::fork::is_forked;

use crate::group::Group;
use crate::shared::Shared;

/// Code of the driver for what it does not support.
const NOT_SUPPORTED: i32 = 801;

/// The stream of a thread in a group. Dropping it ends the stream.
struct OwnStream {
    group: Weak<Group>,
    stream: StreamId,
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if let Some(group) = self.group.upgrade() {
            group.end_thread_stream(self.stream);
        }
    }
}

thread_local! {
    /// The thread's streams, one for each group that it used.
    static OWN: RefCell<Vec<OwnStream>> = const { RefCell::new(Vec::new()) };
}

/// Returns the calling thread's stream in the group of a pool.
pub(crate) fn of(shared: &Shared) -> Result<StreamId, DriverError> {
    let ending = || {
        let text = "the thread is ending, and its default stream with it";
        DriverError::from_code(Call::CreateStream, NOT_SUPPORTED, text)
    };
    let group = &shared.group;
    let is_of = |own: &OwnStream| own.group.as_ptr() == Arc::as_ptr(group);
    let known =
        OWN.try_with(|own| own.borrow().iter().find(|own| is_of(own)).map(|own| own.stream));
    let known = known.map_err(|_| ending())?;
    if let Some(stream) = known.filter(|&stream| group.open_stream(stream).is_some()) {
        return Ok(stream);
    }
    // The driver makes its stream before this thread gets a value to drop, so that it ends later.
    let raw = shared.driver.thread_stream()?;
    let stream = group.add_stream(raw, true);
    let added = OwnStream { group: Arc::downgrade(group), stream };
    let ended = OWN.try_with(|own| {
        let mut own = own.borrow_mut();
        // Of groups that are gone, and one of this group that the caller ended.
        let (stay, gone) =
            own.drain(..).partition(|own| own.group.strong_count() > 0 && !is_of(own));
        *own = stay;
        own.push(added);
        gone
    });
    let _: Vec<OwnStream> = ended.map_err(|_| ending())?;
    group.end_left_streams();
    Ok(stream)
}

impl Group {
    /// Ends the stream of a thread that ends, or notes that it is left.
    fn end_thread_stream(&self, stream: StreamId) {
        self.leave_stream(stream);
        self.end_left_streams();
    }

    /// Ends the streams that threads left. What fails is tried again by the next thread.
    fn end_left_streams(&self) {
        let Some(member) = self.members().into_iter().next() else { return };
        for stream in self.take_left_streams() {
            if member.destroy_stream(stream).is_err() && self.open_stream(stream).is_some() {
                self.leave_stream(stream);
            }
        }
    }
}
