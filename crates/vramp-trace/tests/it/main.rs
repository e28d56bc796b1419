//! Tests of `vramp-trace` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod histories;
mod hostile;
mod rmm_logs;
mod snapshots;
mod timelines;
mod workloads;
mod written_snapshots;
