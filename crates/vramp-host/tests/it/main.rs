//! Tests of the public interface of `vramp-host`, in one binary.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engines;
mod topology;
