//! Programs that look for broken promises of vramp. They measure nothing, and users need none of them.
//!
//! | module | checks |
//! |---|---|
//! | [`conformance`] | that a device keeps the rules of `vramp_driver::Driver` |
//! | [`lifecycle`] | random programs of objects that begin and end, through Rust, C and what Python calls |
//! | [`soaks`] | bytes: memory nearly full, buffers that are evicted, regions that sleep |
//!
//! 1. The tests run each of them for a short time, on simulated cards.
//! 2. The program `vramp-check` runs one for as long as wanted, also on a card: `cargo run --release -p
//!    vramp-check -- --help`.
//! 3. `cargo xtask nightly` runs all of them, and `cargo xtask plant` proves with planted bugs that the
//!    life-cycle programs find broken promises.
//! 4. The fuzz target `capi` draws the operations of a life-cycle program from bytes.
//!
//! Deliberately absent: hostile patterns of requests, which `vramp bench adversary` measures.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod lifecycle;
pub mod soaks;
