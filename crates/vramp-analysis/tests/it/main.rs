//! Tests of `vramp-analysis` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod devices;
mod fidelity;
mod order;
mod remedies;
mod report;
mod verdicts;
