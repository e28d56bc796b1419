//! Opens, closes, ends of processes and limits, with real sockets and processes.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod budget;
mod common;
mod holders;
mod hostile;
mod keep;
mod limits;
mod opens;
mod turns;
mod watches;
