//! Tests of `vramp-cli` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adversary;
mod bench;
mod calibrate;
mod captures;
mod fidelity;
mod graph;
mod order;
mod program;
mod tiers;
