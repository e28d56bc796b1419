//! Decisions of the shell as pure state machines: no lock, clock, thread or device.

mod contention;

pub(crate) use contention::Contention;
