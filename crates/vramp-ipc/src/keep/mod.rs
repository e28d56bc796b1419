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
//!
//! # Life of an entry
//!
//! 1. A client gets the right to build ([`Keeper::draft`], or [`Keeper::open_or_draft`] if it would rather open what
//!    another one built), adds descriptors and commits. The version becomes current as a whole, and the client has
//!    it open as a [`Hold`].
//! 2. Others open the name, with a [`Lock`] or without. The descriptors of a version never change.
//! 3. A client with the write lock changes bytes in place and commits. Each commit, of a version and of bytes, has the
//!    next *epoch* of the entry. A writer that ends without a commit leaves the version *torn*: read locks fail until
//!    another writer has committed. Who must never lose committed bytes publishes a new version instead.
//! 4. A new version supersedes the old one, which stays for its holders. They open the name again when they want.
//! 5. An entry that no client has open stays for as long as its draft said, until it is removed, or until its bytes are
//!    needed under the keeper's limit.
//!
//! Locks, holds and drafts end with their connection, so with their process, by SIGKILL too. The write lock of a
//! process that is killed ends when it is gone: by then the driver has ended its work on the GPU.
//!
//! # When the keeper ends
//!
//! What is mapped stays mapped. Every hold has its own copies of the descriptors, and a thread of the client restores
//! them, the epoch and the lock at the next keeper, within milliseconds of its start. What no client had open is gone:
//! nothing is written to a disk. A new keeper does not grant what clients of the old one may still have before all
//! holds are restored, or a second has passed. A client that is stopped for longer than that can lose its lock: then
//! [`Hold::held_lock`] is [`Lock::None`] and a commit fails, but what it writes until it looks is not prevented.
//!
//! Epoch, torn, superseded and waiting writers are numbers in a page of memory that all holders of a version map, so
//! asking for them is no call, and they are true without a keeper.
//!
//! # Costs
//!
//! | call | messages |
//! |---|---|
//! | [`Keeper::open`] | 3 each way, and 1 for each 253 descriptors and each 31 KiB of the layout |
//! | [`Keeper::draft`] | 2 each way |
//! | [`Draft::commit`] | 1 each way, and 1 for each 253 descriptors and each 31 KiB |
//! | [`Hold::lock`], [`Hold::commit`], [`Hold::release_unchanged`], [`Hold::wait_newer`] | 1 each way |
//! | [`Hold::yield_to_writer`] | 0 without a waiting writer, otherwise 2 each way |
//! | [`Hold::epoch`] and the other questions | 0 |
//! | [`Hold::remove`] | 1 each way |
//! | [`Keeper::remove`], [`Keeper::evict`], [`Keeper::stop`] | 2 each way |
//!
//! # Growth
//!
//! | what grows | cost |
//! |---|---|
//! | entries | O(log n) for a request; eviction O(log n) for each dropped entry |
//! | versions, at the keeper | a descriptor for each part, and one |
//! | connections, at the keeper | 2 descriptors: the socket and the process; at most [`MAX_CONNECTIONS`](crate::MAX_CONNECTIONS) |
//! | holds, at the client | a descriptor for each part, 2 more, and a page; one thread and 2 descriptors for all of them |
//! | waiting requests | one place in a queue and one in the timers |
//! | clients of an entry | a commit wakes those that wait for it |
//! | clients and versions that ended | nothing |
//!
//! # Limits
//!
//! - The keeper raises its limit of open files to the hard one. Versions have seven eighths of it; a commit that would
//!   need more is [`KeepError::TooManyFiles`], and others go on.
//! - Over the limit of bytes, idle entries are evicted, those of a low priority and the longest idle first. If that is
//!   not enough, a draft is [`KeepError::Full`] and nothing is evicted.
//! - A stopped client that has a lock or a draft keeps it. Others get [`KeepError::Busy`] with its process id at their
//!   deadline. One that reads nothing stops no other one.
//! - A stopped keeper: calls return within the timeout of their [`Keeper`], and at most 60 ms after their deadline.
//!   One that finds a new keeper restores its hold first, and has the timeout for that.
//! - One thread serves, and another one closes descriptors, because the last one of GPU memory frees it: 34 ms for
//!   64 GiB. [`Keeper::remove`], [`Keeper::evict`] and commits that end an old version return when it is freed.
//! - A version has 65,536 parts and a layout of 16 MiB at most.
//!
//! A forked child has no part of its parent's holds and drafts; its own calls work.
//!
//! Deliberately absent: GPUs and what descriptors mean, a copy on a disk, other users, other machines, and priorities
//! among those that wait.

mod adrift;
mod client;
mod close;
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
