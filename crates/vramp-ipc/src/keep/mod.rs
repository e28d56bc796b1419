//! The keeper: descriptors that outlive the process that made them, under names.
//!
//! A [`KeeperServer`] keeps descriptors of memory, so that the memory outlives the process that made it. It never
//! opens what they refer to: it is a table of names, descriptors and locks.
//!
//! ```
//! use std::os::fd::OwnedFd;
//! use std::time::{Duration, Instant};
//!
//! use vramp_ipc::keep::{DraftOptions, Keeper, KeeperConfig, KeeperServer, Lock};
//!
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path();
//! # std::fs::set_permissions(directory, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
//! let server = KeeperServer::start(&KeeperConfig { directory, limit: None, idle_exit: None })?;
//! let keeper = Keeper::new(directory, Duration::from_secs(5));
//! let soon = || Instant::now() + Duration::from_secs(30);
//!
//! // One process makes memory and publishes it. A file stands for memory here.
//! let memory: OwnedFd = std::fs::File::open("/proc/version")?.into();
//! let options = DraftOptions { device: "sim:h200", bytes: 4096, ..DraftOptions::default() };
//! let mut draft = keeper.draft("llama/weights", &options, soon())?;
//! draft.add(4096, memory);
//! drop(draft.commit(b"one tensor", [0; 32], Lock::None)?); // It ends; the entry stays.
//!
//! // Another one opens it.
//! let hold = keeper.open("llama/weights", Lock::Read, soon())?;
//! assert_eq!((hold.layout(), hold.parts().len(), hold.epoch()), (&b"one tensor"[..], 1, 1));
//! # drop(server);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adrift;
mod client;
mod core;
mod draft;
mod error;
mod hold;
mod kept;
mod link;
mod server;
mod service;
mod shared;
mod status;
mod turn;

pub use client::{DraftOptions, Keeper, OpenOrDraft};
pub use core::lock::Lock;
pub use draft::Draft;
pub use error::{KeepError, KeepServeError};
pub use hold::{Hold, Part};
pub use server::{KeeperConfig, KeeperServer};
pub use status::{CurrentStatus, EntryStatus, HolderStatus};
