//! Why a GPU job ran out of memory, and what saves it.
//!
//! - [`mod@replay`] runs a recorded job on one allocator and one device, and returns an
//!   [`replay::Outcome`].
//! - [`blocks`] and [`frames`] say which blocks are live when, and which line of the program
//!   allocated them.
//! - [`category`] says what a block is for, [`steps`] where one iteration of the job ends.
//! - [`number`] formats counts for messages.
//!
//! Deliberately absent: allocation policy (`vramp-core`), trace formats (`vramp-trace`), arguments,
//! tables and progress (`vramp-cli`).
#![forbid(unsafe_code)]

pub mod advise;
pub mod blocks;
pub mod candidates;
pub mod category;
pub mod explain;
pub mod fit;
pub mod frames;
pub mod growth;
pub mod job;
pub mod layout;
pub mod moment;
pub mod number;
pub mod replay;
pub mod steps;
#[cfg(test)]
mod testing;
pub mod verdict;
