//! Tests of the public interface of `vramp-trace`, in one binary.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod containers;
mod devices;
mod foreign;
mod histories;
mod hostile;
mod labels;
mod large;
mod rmm_logs;
mod snapshots;
mod timelines;
mod workloads;
mod written_snapshots;
