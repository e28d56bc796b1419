//! How requests for reservations wait: the request builder, and cancellation.
//!
//! 1. [`RequestBuilder::enqueue`] submits the request to the core's wait queue, and
//!    [`RequestBuilder::wait`] also waits.
//! 2. A request that is queued ([`QueuedReservation`]) has a [slot](crate::wait::WaitSlot). Its thread or
//!    task calls spillers, then sleeps until its slot has an outcome.
//! 3. Whatever ends the wait (a grant, a deadline, a cancellation, a deadlock, the shutdown) takes
//!    the waiter out of the queue, and wakes it once the lock is free.

mod cancel;
#[cfg(all(test, loom))]
mod models;
mod queued;
mod request;

pub use cancel::CancelToken;
pub use queued::{Enqueued, QueuedReservation};
pub use request::RequestBuilder;
