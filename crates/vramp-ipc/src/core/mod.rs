//! Pure parts: the bytes of messages and of tickets, and who holds an export.
//!
//! No socket, lock, thread or clock.

pub mod holders;
pub mod message;
pub mod ticket;
