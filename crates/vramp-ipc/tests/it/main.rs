//! Opens, closes, ends of processes and limits, with real sockets and processes.

mod child;
mod common;
mod deaths;
mod directories;
mod holders;
mod hostile;
mod limits;
mod numbers;
mod opens;
mod stalls;
