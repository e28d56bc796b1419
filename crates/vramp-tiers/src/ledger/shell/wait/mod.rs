//! How requests wait: the request builder, the slot in which a waiter sleeps, and cancellation.
//!
//! 1. [`RequestBuilder::enqueue`] submits the request to the core's wait queue, and
//!    [`RequestBuilder::wait`] also waits.
//! 2. A request that is queued ([`QueuedReservation`]) has a [`WaitSlot`]. Its thread calls spillers, then
//!    sleeps there. A task polls it instead.
//! 3. Whatever ends the wait (a grant, a deadline, a cancellation, a deadlock, the shutdown) takes
//!    the waiter out of the queue and completes its slot, once the lock is free.

mod cancel;
mod deadline;
#[cfg(all(test, loom))]
mod models;
mod queued;
mod request;
mod slot;

pub use cancel::CancelToken;
pub use deadline::Deadline;
pub use queued::{Enqueued, QueuedReservation, ReservationPoll};
pub use request::RequestBuilder;
pub(crate) use slot::WaitSlot;
