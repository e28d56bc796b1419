//! Errors of kept memory.

use vramp_core::Bytes;
use vramp_driver::DriverError;
use vramp_ipc::keep::KeepError;

use crate::error::{AllocError, Unusable};

/// A call with kept memory failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeptError {
    /// The keeper refused, or is gone.
    #[error(transparent)]
    Keeper(#[from] KeepError),
    /// The memory is on another card.
    #[error(
        "`{name}` is on the card {kept}, and this allocator is of {here}: open it with one of that card"
    )]
    OtherCard {
        /// Name of the entry.
        name: String,
        /// Its card.
        kept: String,
        /// The allocator's card.
        here: String,
    },
    /// Other software published the name.
    #[error("`{name}` was not published by vramp's allocators: use another name")]
    Unknown {
        /// Name of the entry.
        name: String,
    },
    /// The draft has fewer bytes left.
    #[error(
        "{asked} do not fit into the {left} that are left of a draft of {bytes}: begin it with more"
    )]
    DraftFull {
        /// Bytes requested, with their alignment.
        asked: Bytes,
        /// Bytes that are left.
        left: Bytes,
        /// Bytes of the whole draft.
        bytes: Bytes,
    },
    /// Nothing was placed in the draft.
    #[error("the draft of `{name}` is empty: place something in it before it is committed")]
    Empty {
        /// Name of the entry.
        name: String,
    },
    /// The memory is mapped for reading only.
    #[error("`{name}` is mapped for reading only: open it as writable")]
    ReadOnly {
        /// Name of the entry.
        name: String,
    },
    /// No more descriptors can be opened.
    #[error("cannot open another descriptor: {0}; raise RLIMIT_NOFILE (ulimit -n)")]
    Descriptor(#[source] std::io::Error),
    /// The device cannot export memory, an amount of the options is zero, or a draft takes no more.
    #[error("{0}")]
    Option(&'static str),
    /// The card has too little memory, or the allocator is closed.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}
