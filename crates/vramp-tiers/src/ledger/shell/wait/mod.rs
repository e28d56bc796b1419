//! How requests wait: the request builder, the slot in which a waiter sleeps, and cancellation.
//!
//! 1. [`RequestBuilder::wait`] submits the request to the core's wait queue.
//! 2. A request that is queued gets a [`WaitSlot`]. Its thread calls spillers, then sleeps there.
//! 3. Whatever ends the wait (a grant, a deadline, a cancellation, a deadlock, the shutdown) takes
//!    the waiter out of the queue and completes its slot, once the lock is free.

mod cancel;
#[cfg(all(test, loom))]
mod models;
mod request;
mod slot;

pub use cancel::CancelToken;
pub use request::{Deadline, RequestBuilder};
pub(crate) use slot::WaitSlot;
