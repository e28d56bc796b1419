//! Tests of the public interface of `vramp-capi`, in one binary.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "lists of calls that one promise covers")]

mod c_programs;
mod common;
mod graphs;
mod host_memory;
mod keep;
mod observing;
mod sharing;
mod sleep;
mod threads;
mod tiers;
mod wrong_arguments;
