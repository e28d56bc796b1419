//! Why a GPU job ran out of memory, and what saves it.
//!
//! - [`mod@replay`] runs a recorded job on one allocator and one device, and returns an
//!   [`replay::Outcome`].
//! - [`number`] formats counts for messages.
//!
//! Deliberately absent: allocation policy (`vramp-core`), trace formats (`vramp-trace`), arguments,
//! tables and progress (`vramp-cli`).
#![forbid(unsafe_code)]

pub mod number;
pub mod replay;
