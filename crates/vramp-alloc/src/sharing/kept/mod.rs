//! Memory that outlives its process: a [keeper](vramp_ipc::keep) holds its descriptors under a name.
//!
//! 1. [`Allocator::draft_kept`] starts memory of a name. [`KeptDraft::place`] returns addresses in it, which work
//!    fills; [`KeptDraft::commit`] makes it visible to other processes, as a whole.
//! 2. [`Allocator::open_kept`] maps the memory of a name, for reading only or for writing, without a copy.
//! 3. A [`KeptMemory`] has a lock: many processes read, or one writes ([`KeptMemory::write`]) and commits the next
//!    epoch. Between two steps a reader calls [`KeptMemory::yield_to_writer`].
//! 4. When a process ends, also killed, its maps and locks are gone and the memory stays the keeper's.
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use vramp_alloc::sharing::kept::{Keeper, KeeperConfig, KeeperServer, KeptOptions, MapAs, OpenKept};
//! use vramp_alloc::{Allocator, Bytes, Config};
//!
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path().join("vramp");
//! # let server = KeeperServer::start(&KeeperConfig { directory: &directory, limit: None, idle_exit: None })?;
//! # let device = vramp_alloc::open("sim:h200")?;
//! let allocator = Allocator::new(device, Config::default())?;
//! let keeper = Keeper::new(&directory, Duration::from_secs(5));      // of `vramp keep`
//! let soon = || Instant::now() + Duration::from_secs(1);
//!
//! let options = KeptOptions { bytes: Bytes::mib(64), ..KeptOptions::default() };
//! let mut draft = allocator.draft_kept(&keeper, "model/0", &options, soon())?;
//! let weights = draft.place(Bytes::mib(48))?;                        // fill it: load a file, copy a tensor
//! println!("{weights}");
//! let digest = [0; 32];                                              // of what was loaded
//! let published = draft.commit(b"48 MiB of weights", digest, MapAs::ReadOnly)?;
//! drop(published);                                                   // or the end of the process
//!
//! // In another process, later:
//! let opened = allocator.open_kept(&keeper, "model/0", OpenKept::default(), soon())?;
//! assert_eq!((opened.layout(), opened.epoch()), (&b"48 MiB of weights"[..], 1));
//! opened.close()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Cost
//!
//! Memory is created in parts of [`KeptOptions::part`], 1 GiB, because the costs of access and of its end go with
//! the number of handles and not with the bytes. A part takes five driver calls of the process that creates it,
//! about 300 us, and three of each that opens it, about 90 us. A lock, a commit and a wait are one message each
//! way, and no driver call.
//!
//! # What it counts as
//!
//! It is on the card once, however many processes map it. No allocator's limit, statistics or [budget](crate::budget)
//! counts it: those of a card with 16 GiB of kept memory have a capacity that is 16 GiB smaller. The keeper has a
//! limit of its own, and drops memory that no process has open. Creating it makes room as a request of
//! [`Allocator::malloc`] does.
//!
//! Deliberately absent: the protocol and the server (`vramp-ipc`), what lies in the memory, and the order of work
//! of several processes: locks are taken and given back on the host, once the work that was recorded is over.

mod draft;
mod error;
mod layout;
mod memory;

pub use draft::{CommitKeptError, KeptDraft, KeptOptions};
pub use error::KeptError;
pub use memory::{KeptMemory, MapAs, OpenKept};
pub use vramp_ipc::keep::{
    CurrentStatus, EntryStatus, Hold, HolderStatus, KeepError, KeepServeError, Keeper,
    KeeperConfig, KeeperServer, Lock,
};

use vramp_driver::DeviceInfo;

#[cfg(doc)]
use crate::Allocator;

/// Returns the name by which processes know a card: its UUID, or the id of a simulated one.
fn card_of(info: &DeviceInfo) -> &str {
    info.uuid.as_deref().unwrap_or(&info.id)
}
