//! Why a region was not paused or resumed.

use vramp_alloc::sleep::SleepError;
use vramp_alloc::{AllocError, CreateError};
use vramp_core::{AddrRange, Bytes};

use crate::host::HostPoolError;
use crate::movers::MoveError;

/// Why a callback failed, in the program's words.
pub type CallbackError = Box<dyn std::error::Error + Send + Sync>;

/// A callback that failed.
#[derive(Debug)]
pub struct FailedCallback {
    /// Name of the pair.
    pub name: String,
    /// Why, in the program's words.
    pub error: CallbackError,
}

impl FailedCallback {
    pub(super) fn new(name: &str, error: CallbackError) -> FailedCallback {
        FailedCallback { name: name.to_owned(), error }
    }
}

impl std::fmt::Display for FailedCallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.name, self.error)
    }
}

/// Why a call on regions failed. Unless it is [`RegionError::Stuck`], the region is as before; after
/// [`RegionError::After`] it is awake.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// There is no region with that tag.
    #[error("there is no region {tag:?}: {}", listed(known))]
    Unknown {
        /// The tag.
        tag: String,
        /// All tags.
        known: Vec<String>,
    },
    /// The region exists with other options.
    #[error("the region {tag:?} has other options: use the same ones, or another tag")]
    OtherOptions {
        /// The tag.
        tag: String,
    },
    /// The region has memory, so it is not removed.
    #[error(
        "the region {tag:?} has {allocated} allocated, {on_card} on the card and {asleep} asleep: resume it if it \
         sleeps, and free what is allocated, exported, pinned or kept for graphs before it is removed"
    )]
    HasMemory {
        /// The tag.
        tag: String,
        /// Bytes of live blocks, as requested.
        allocated: Bytes,
        /// Bytes of the card.
        on_card: Bytes,
        /// Bytes that are its own but not on the card.
        asleep: Bytes,
    },
    /// Something uses the region now, so it is not removed.
    #[error(
        "the region {tag:?} is in use, by a call of another thread or by a memory pool of graphs: let that end \
         before it is removed"
    )]
    InUse {
        /// The tag.
        tag: String,
    },
    /// Its pool could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// Its pool cannot sleep now.
    #[error("the region {tag:?} cannot sleep: {error}")]
    NotNow {
        /// The tag.
        tag: String,
        /// The pool's reason.
        error: SleepError,
    },
    /// The host has no room for the copies.
    #[error(
        "the region {tag:?} stays on the card, because {needed} of its contents find no room on the host: {error}"
    )]
    HostFull {
        /// The tag.
        tag: String,
        /// Bytes to copy.
        needed: Bytes,
        /// Error of the host pool.
        error: HostPoolError,
    },
    /// The region has its backup on a disk, and there is no disk.
    #[error(
        "the backup of the region {tag:?} is on a disk, and there is none: name a directory for the backups of \
         regions first, or use a backup on the host"
    )]
    NoDisk {
        /// The tag.
        tag: String,
    },
    /// The host has no room to read contents ahead. They are on the disk, and a resume needs no such room.
    #[error(
        "{needed} of the region {tag:?} cannot be read ahead, because they find no room on the host: {error}; \
         resume it from the disk, or make room on the host"
    )]
    NoRoomToPrefetch {
        /// The tag.
        tag: String,
        /// Bytes to read.
        needed: Bytes,
        /// Error of the host pool.
        error: HostPoolError,
    },
    /// The region is awake: its memory has the contents, and a copy may have other ones.
    #[error("the region {tag:?} is awake: read its memory on the card")]
    Awake {
        /// The tag.
        tag: String,
    },
    /// The region sleeps, and no copy has these bytes.
    #[error(
        "the region {tag:?} has no copy of {range}: it has no backup, or that part is on the card"
    )]
    NoBackup {
        /// The tag.
        tag: String,
        /// What was asked for.
        range: AddrRange,
    },
    /// The range is in no region, or something in it was not allocated when its region fell asleep.
    #[error("{range} is not in the contents of a region: use the addresses of a block")]
    NotContents {
        /// What was asked for.
        range: AddrRange,
    },
    /// A copy failed.
    #[error("the contents of the region {tag:?} could not be copied: {error}")]
    Copy {
        /// The tag.
        tag: String,
        /// Error of the mover.
        error: MoveError,
    },
    /// Memory could not be released or created.
    #[error("the memory of the region {tag:?} could not be changed: {error}")]
    Memory {
        /// The tag.
        tag: String,
        /// Error of the allocator: out of memory, or a driver call.
        error: AllocError,
    },
    /// A call failed, and what was done before could not be undone. The contents are safe, and a later
    /// resume goes on.
    #[error(
        "{error}; {asleep} of the region {tag:?} sleep, because they could not be brought back: {undo}. Make \
         room on the card and resume it"
    )]
    Stuck {
        /// The tag.
        tag: String,
        /// Bytes that sleep.
        asleep: Bytes,
        /// The first error.
        error: Box<RegionError>,
        /// Why it could not be undone.
        undo: Box<RegionError>,
    },
    /// A callback before the pause failed, so no memory left. Those that were called before it were undone.
    #[error("no memory left, because the callback {0}")]
    Before(FailedCallback),
    /// The memory is back, and callbacks failed. The others were called.
    #[error(
        "the memory is back, and then failed the callback {}: resume again, which calls it again",
        all(failed)
    )]
    After {
        /// Those that failed, in the order of the calls.
        failed: Vec<FailedCallback>,
    },
    /// A call failed, and then callbacks failed that undo or follow it.
    #[error("{error}; and then failed the callback {}: a resume calls it again", all(failed))]
    AndAfter {
        /// The first error.
        error: Box<RegionError>,
        /// Those that failed, in the order of the calls.
        failed: Vec<FailedCallback>,
    },
    /// A callback around a sleep runs on this thread.
    #[error(
        "a callback around a sleep runs on this thread, in the middle of a pause or a resume: return from it, and \
         move or read regions then"
    )]
    InCallback,
    /// The region was closed.
    #[error("the region {tag:?} was closed")]
    Closed {
        /// The tag.
        tag: String,
    },
}

fn all(failed: &[FailedCallback]) -> String {
    failed.iter().map(FailedCallback::to_string).collect::<Vec<_>>().join(", and the callback ")
}

/// Returns which regions there are, in words.
fn listed(known: &[String]) -> String {
    match known {
        [] => "there is none, because nothing was allocated in one yet".to_owned(),
        known => format!("there are {known:?}"),
    }
}
