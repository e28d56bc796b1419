//! Pure parts: the lock of a version, the table of names, and the bytes of messages.
//!
//! No socket, descriptor, thread or clock. Times are nanoseconds of the caller's clock.

pub mod lock;
pub mod message;
#[cfg(test)]
mod model;
pub mod page;
pub mod registry;
