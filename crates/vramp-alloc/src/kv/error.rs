//! Why a call of an arena for caches was refused.

use vramp_core::{Bytes, StreamId};

use super::core::geometry::Layout;
use crate::error::{AllocError, Unusable};
use crate::graph::ArenaError;
use crate::kind::{Classify, Kind, Room};

/// Error of an arena for caches. Nothing was committed, parked or lost.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// No arena can have this layout.
    #[error("{} tensors of {} in pages of {}: {why}", layout.tensors, layout.bytes_each, layout.page)]
    Layout {
        /// The layout.
        layout: Layout,
        /// What to change.
        why: &'static str,
    },
    /// There is no such page.
    #[error(
        "there are {pages} pages, counted from 0, and not {page}: make the arena's tensors longer"
    )]
    Beyond {
        /// The first page that there is not.
        page: u32,
        /// Pages of each tensor.
        pages: u32,
    },
    /// A page was given twice in one call.
    #[error("page {page} is given twice: give each page once")]
    Twice {
        /// The page.
        page: u32,
    },
    /// A page that is to be committed is committed.
    #[error("page {page} is committed already: park it first, or leave it out")]
    Committed {
        /// The first such page.
        page: u32,
    },
    /// A page that is to be parked is not committed.
    #[error("page {page} is not committed: only what is committed can be parked, and once")]
    NotCommitted {
        /// The first such page.
        page: u32,
    },
    /// Fewer pages are left than were asked for.
    #[error("{left} pages are left: park some, or make the arena's tensors longer")]
    NoPages {
        /// Pages that are left.
        left: u32,
    },
    /// The arena's limit is too low.
    #[error("{over} above the arena's limit of {limit}: park pages, or raise the limit")]
    Limit {
        /// Bytes above the limit, with all that is parked given up.
        over: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// The arena is at its limit, and what is parked cannot be given up yet.
    #[error(
        "{over} above the arena's limit, and parked pages share handles with committed ones, are pinned, or \
         their work does not end: park whole superpages, or raise the limit"
    )]
    InUse {
        /// Bytes above the limit.
        over: Bytes,
    },
    /// The stream is not one of the allocator's, or was destroyed.
    #[error("{0} is unknown to this allocator: use a stream that its create_stream returned")]
    UnknownStream(StreamId),
    /// The system has no thread for [`ahead`](super::Options::ahead).
    #[error("no thread can be started for what is made ahead: {0}; set ahead to zero")]
    Thread(std::io::Error),
    /// No memory, or a driver call failed.
    #[error(transparent)]
    Memory(#[from] AllocError),
    /// The addresses cannot be reserved.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

impl Classify for KvError {
    fn kind(&self) -> Kind {
        match self {
            KvError::Layout { .. } | KvError::Beyond { .. } | KvError::NoPages { .. } => {
                Kind::Range
            }
            KvError::Twice { .. } | KvError::Committed { .. } | KvError::NotCommitted { .. } => {
                Kind::Range
            }
            KvError::Limit { .. } | KvError::InUse { .. } => Kind::OutOfMemory,
            KvError::UnknownStream(_) => Kind::UnknownStream,
            KvError::Thread(_) => Kind::OutOfMemory,
            KvError::Memory(error) => error.kind(),
            KvError::Arena(error) => error.kind(),
            KvError::Unusable(why) => why.kind(),
        }
    }

    fn region(&self) -> Option<&str> {
        match self {
            KvError::Memory(error) => error.region(),
            KvError::Arena(error) => error.region(),
            KvError::Unusable(why) => why.region(),
            _ => None,
        }
    }

    fn room(&self) -> Room {
        match self {
            KvError::Memory(error) => error.room(),
            _ => Room::default(),
        }
    }
}
