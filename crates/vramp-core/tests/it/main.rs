//! Tests of `vramp-core` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod paper;
mod pins;
mod random;
mod streams;
mod trim;
mod vpmm;
