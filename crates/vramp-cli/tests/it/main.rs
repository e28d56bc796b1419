//! Tests of `vramp-cli` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adversary;
mod analysis;
mod bench;
mod budgets;
mod convert;
mod devices;
mod exec;
mod exec_attacks;
mod exec_cuda;
mod graph;
mod keep;
mod program;
mod wrong;
