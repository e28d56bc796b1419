//! Tests of `vramp-driver` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod captures;
mod faults;
mod growth;
mod hazards;
mod machines;
mod memory_rules;
mod random_captures;
mod random_machines;
mod random_programs;
mod sharing;
mod stream_ordered_pool;
mod virtual_time;
