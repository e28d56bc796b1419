//! A GPU memory allocator that avoids running out of memory through fragmentation: it remaps free
//! physical pages into contiguous virtual ranges where a large block is needed.
//!
//! This is the crate to depend on. Without a GPU everything runs on a simulated one.
//!
//! ```
//! use vramp::{AllocError, Allocator, Bytes, Config};
//!
//! let device = vramp::open("sim:h200")?;          // or "auto", "cuda:0"
//! let config = Config { limit: Some(Bytes::gib(1)), ..Config::default() };
//! let allocator = Allocator::new(device, config)?;
//! let (compute, copies) = (allocator.create_stream()?, allocator.create_stream()?);
//!
//! let block = allocator.malloc(Bytes::mib(64), compute)?;
//! allocator.record_use(&block, copies)?;                 // the other stream uses it too
//! allocator.free(block, compute)?;                       // never waits
//!
//! let weights = allocator.malloc(Bytes::mib(700), compute)?;
//! match allocator.malloc(Bytes::mib(400), compute) {
//!     Err(AllocError::OutOfMemory(report)) => eprintln!("{report}"),
//!     Err(other) => return Err(other.into()),
//!     Ok(block) => allocator.free(block, compute)?,
//! }
//! allocator.free(weights, compute)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to do this | use | feature |
//! |---|---|---|
//! | allocate and free on streams, limit, trim, measure | [`Allocator`] | |
//! | keep addresses for captured CUDA graphs | [`graph`] | |
//! | grow and shrink the caches of a serving engine at fixed addresses | [`kv`] | |
//! | react to a shortage, or watch every request | [`observe`] | |
//! | record events, write snapshots for PyTorch's viewers, read recordings | `history`, `trace` | `history` |
//! | compare with PyTorch's allocator, the driver's pool, VPMM | `peers` | `peers` |
//! | share memory with processes, cards and networks | [`sharing`] | |
//! | reserve memory of cards, hosts and disks before using it | `tiers` | `tiers` |
//! | take memory off the card by tag, and bring it back where it was | `tiers::regions` | `tiers` |
//! | keep more data than fits on the card | `defer` | `defer` |
//! | take turns at a card with other processes | [`turns`] | |
//! | share a card's memory with other processes at the same time | [`budget`] | |
//!
//! The features are on by default, so that all examples compile after `cargo add vramp`.
//! `default-features = false` leaves the allocator; feature `sim` is the simulated GPU.
//!
//! Programs that use all of it are in `examples/`: `allocator`, `reservations`, `spill_manager`,
//! `regions`.
#![forbid(unsafe_code)]

mod failure;

pub use failure::Error;
pub use vramp_alloc::*;
pub use vramp_ipc::turns;

#[cfg(feature = "defer")]
pub use vramp_defer as defer;
#[cfg(feature = "peers")]
pub use vramp_peers as peers;
#[cfg(feature = "tiers")]
pub use vramp_tiers as tiers;
#[cfg(feature = "history")]
pub use vramp_trace as trace;

/// The front page of the project: its examples are tests here.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The programs of the guides are tests too.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/tiers.md")]
    struct Reservations;
    #[doc = include_str!("../../../docs/deferrable.md")]
    struct DeferrableBuffers;
    #[doc = include_str!("../../../docs/sleep.md")]
    struct Regions;
    #[doc = include_str!("../../../docs/sharing.md")]
    struct Sharing;
    #[doc = include_str!("../../../docs/keep.md")]
    struct Kept;
    #[doc = include_str!("../../../docs/reference/rust.md")]
    struct Reference;
    #[doc = include_str!("../../../docs/turns.md")]
    struct Turns;
    #[doc = include_str!("../../../docs/kv.md")]
    struct Caches;
    #[doc = include_str!("../../../docs/budgets.md")]
    struct Budgets;
    #[doc = include_str!("../../../docs/tutorials/more-than-the-card.md")]
    struct MoreThanTheCard;
}
