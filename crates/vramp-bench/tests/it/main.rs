//! Tests of `vramp-bench` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod calibrate;
