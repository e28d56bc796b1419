//! Decisions of the shell as pure state machines: no lock, clock, thread or device.

mod contention;
mod windows;

pub(crate) use contention::Contention;
pub(crate) use windows::{Gone, Piece, WindowId, Windows, stretches};
