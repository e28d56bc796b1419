//! Tests of `vramp-driver` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod captures;
mod hazards;
mod machines;
mod memory_rules;
mod random_machines;
mod random_programs;
mod virtual_time;
