//! Options, errors and statistics of a store.

use std::time::Duration;

use vramp_alloc::DriverError;
use vramp_core::Bytes;
use vramp_driver::ErrorKind;

use crate::ledger::shell::error::SpaceFull;

/// Options of a [`PeerStore`](super::PeerStore).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStoreConfig {
    /// Most bytes that it takes of the other card. Zero by default: it takes nothing.
    pub limit: Bytes,
    /// Bytes of the other card that stay free: it takes no memory below them.
    pub reserve: Bytes,
    /// Length of a chunk, in whole pages; the longest allocation.
    pub chunk: Bytes,
    /// Bytes of chunks created at the start, and kept while they are free.
    pub ahead: Bytes,
    /// Time without new allocations after the other card needed its memory.
    pub backoff: Duration,
}

impl Default for PeerStoreConfig {
    /// Returns a limit of zero, a reserve of 1 GiB, chunks of 32 MiB made on demand, and a backoff of
    /// one second.
    fn default() -> PeerStoreConfig {
        PeerStoreConfig {
            limit: Bytes::ZERO,
            reserve: Bytes::gib(1),
            chunk: Bytes::mib(32),
            ahead: Bytes::ZERO,
            backoff: Duration::from_secs(1),
        }
    }
}

/// Why a store was not made, or has no memory for an allocation. Nothing is charged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerStoreError {
    /// The configuration or a part is invalid.
    #[error("invalid store on another card: {0}")]
    Config(&'static str),
    /// No link leads to the other card.
    #[error(
        "card {peer} is no peer of {device}, whose peers are {peers:?}: name one of them, or leave this card out"
    )]
    NotAPeer {
        /// Ordinal of the other card.
        peer: u32,
        /// Id of this card.
        device: String,
        /// Ordinals of its peers.
        peers: Vec<u32>,
    },
    /// The allocation is longer than a chunk, or empty.
    #[error("{len} do not fit a chunk of {chunk}: allocate parts, or configure longer chunks")]
    Length {
        /// Requested bytes.
        len: Bytes,
        /// Length of a chunk.
        chunk: Bytes,
    },
    /// The limit is reached.
    #[error("the limit of {limit} on card {peer} is reached: raise it, or free copies there")]
    Limit {
        /// Ordinal of the other card.
        peer: u32,
        /// The limit.
        limit: Bytes,
    },
    /// The other card's space has no room.
    #[error(transparent)]
    Space(#[from] SpaceFull),
    /// The other card has no free memory beside its reserve.
    #[error("card {peer} has {free} free, of which {reserve} are reserved: use the host instead")]
    NoMemory {
        /// Ordinal of the other card.
        peer: u32,
        /// Free bytes there.
        free: Bytes,
        /// Bytes that stay free.
        reserve: Bytes,
    },
    /// The other card needed its memory a short time ago.
    #[error("card {peer} needs its memory itself: use the host until the backoff is over")]
    GaveWay {
        /// Ordinal of the other card.
        peer: u32,
    },
    /// A driver call failed.
    #[error("memory of card {peer} could not be mapped: {error}")]
    Device {
        /// Ordinal of the other card.
        peer: u32,
        /// The driver's error.
        error: DriverError,
    },
}

impl PeerStoreError {
    /// Returns true if memory lacks that may become free. Contents go elsewhere then.
    pub fn is_full(&self) -> bool {
        match self {
            PeerStoreError::Limit { .. }
            | PeerStoreError::Space(_)
            | PeerStoreError::NoMemory { .. }
            | PeerStoreError::GaveWay { .. } => true,
            PeerStoreError::Device { error, .. } => error.kind == ErrorKind::OutOfMemory,
            PeerStoreError::Config(_)
            | PeerStoreError::NotAPeer { .. }
            | PeerStoreError::Length { .. } => false,
        }
    }
}

/// Memory and activity of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerStoreStats {
    /// The limit.
    pub limit: Bytes,
    /// Memory of the other card: `used + free`.
    pub taken: Bytes,
    /// Allocated bytes.
    pub used: Bytes,
    /// Free bytes of chunks.
    pub free: Bytes,
    /// Chunks created.
    pub created: u64,
    /// Chunks released.
    pub released: u64,
    /// Allocations refused.
    pub refused: u64,
    /// Times that the other card needed its memory.
    pub gave_way: u64,
    /// Memory of chunks that were unmapped and could not be released. It stays charged.
    pub lost: Bytes,
}
