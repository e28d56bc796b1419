//! Short runs of every program, on simulated cards.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod conformance;
mod lifecycle;
mod soaks;
