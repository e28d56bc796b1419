//! Tests of the public interface of `vramp-trace`, in one binary.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod containers;
mod devices;
mod hostile;
mod snapshots;
mod spools;
mod timelines;
mod workloads;
