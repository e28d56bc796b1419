//! Why a GPU job ran out of memory, and what saves it.
//!
//! 1. [`job::Job`] collects one device of a recording: requests, [`blocks`], call stacks
//!    ([`frames`]), what blocks are for ([`category`]), and the [`steps`] of the job.
//! 2. [`explain`](mod@explain) sums up a [`moment`], lays out the recorded segments ([`layout`]), looks
//!    for [`growth`], replays the job to find what [`fit`]s, and gives the [`verdict`] and
//!    the [`remedy`]s, best first.
//! 3. [`advise`](mod@advise) replays the job with [`candidates`]: PyTorch's settings, the driver's pool
//!    and vramp. [`diff`](mod@diff) compares two runs.
//!
//! [`mod@replay`] runs a recorded job on one allocator and one device. [`report`] writes one HTML page
//! about a recorded job.
//!
//! # How it grows
//!
//! | with | time | memory |
//! |---|---|---|
//! | events | linear; each replay too | 36 bytes a request and 33 a block, beside the trace |
//! | blocks live at a moment | n log n for a layout | 48 bytes each |
//! | different stacks and frames | each is labelled once | the labels |
//! | segments | n log n | 32 bytes each |
//!
//! Deliberately absent: allocation policy (`vramp-core`), trace formats (`vramp-trace`), arguments,
//! tables and progress (`vramp-cli`).
#![forbid(unsafe_code)]

pub mod advise;
pub mod blocks;
pub mod candidates;
pub mod category;
pub mod conclusion;
pub mod diff;
pub mod explain;
pub mod fit;
pub mod frames;
pub mod growth;
pub mod job;
pub mod layout;
pub mod limit;
pub mod moment;
mod native;
pub mod number;
pub mod remedy;
pub mod replay;
pub mod report;
pub mod steps;
#[cfg(test)]
mod testing;
pub mod verdict;
