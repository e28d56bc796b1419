//! Tests of `vramp-tiers` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod config;
mod counting;
mod disk;
mod host;
mod monte_carlo;
mod movers;
mod peers;
mod regions;
mod regions_pressure;
mod spaces;
mod spilling;
mod tracked;
mod waiting;
