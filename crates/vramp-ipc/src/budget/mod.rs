//! Budgets: processes that share the memory of a card without a server.
//!
//! Several processes of one user, serving engines for instance, use one card at the same time. They join
//! a *group* by its name. Each has a guaranteed part, a limit and a priority, *claims* bytes before it
//! creates memory, and gives them back after it released memory. A member that is short requests memory
//! from the others.
//!
//! ```
//! use std::time::Duration;
//! use vramp_ipc::budget::{Budget, BudgetConfig, ClaimError};
//!
//! # let folder = tempfile::tempdir()?;
//! # let directory = folder.path().join("vramp");
//! const GIB: u64 = 1 << 30;
//! let join = |program, guaranteed| {
//!     Budget::join(&BudgetConfig {
//!         directory: &directory,
//!         card: "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
//!         group: "serving",
//!         program,
//!         capacity: 80 * GIB,
//!         guaranteed,
//!         limit: None,
//!         priority: 0,
//!         timeout: Duration::from_secs(5),
//!     })
//! };
//! let chat = join("chat", 20 * GIB)?;
//! chat.claim(70 * GIB, Duration::ZERO)?;
//! chat.on_request(|request| {
//!     // Here it releases memory of its cache.
//!     request.bytes
//! })?;
//!
//! // Another process sees what it can really have, and gets it.
//! let search = join("search", 5 * GIB)?;
//! assert_eq!(search.room()?.available, 10 * GIB);
//! search.claim(30 * GIB, Duration::from_secs(5))?;
//! assert_eq!(chat.claimed(), 50 * GIB);
//!
//! // What the other is guaranteed stays the other's.
//! let refused = search.claim(31 * GIB, Duration::from_secs(5));
//! assert!(matches!(refused, Err(ClaimError::Impossible(_))));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Life of a claim
//!
//! 1. [`Budget::join`] takes a slot in the group's ledger and claims the guaranteed part.
//! 2. [`Budget::claim`] claims bytes. If they are free it costs some atomic instructions; otherwise the
//!    member waits, and requests memory from the others.
//! 3. The others' handlers ([`Budget::on_request`]) release memory: first those that published idle
//!    memory ([`Budget::publish`]) what is idle; then those of at most this one's priority what their
//!    programs can spare. `core/order.rs` has the order.
//! 4. [`Budget::give_back`] gives bytes back and wakes the first that wait.
//! 5. Dropping the budget, or the end of the process, gives everything back.
//!
//! # How it works
//!
//! The ledger is a file that all members map: a slot for each, of numbers that change by single atomic
//! instructions. There is no lock that a process could keep while it is stopped. A claim is announced,
//! checked against all slots, and granted by one exchange; `core/claim.rs` has the proof that
//! the sum of what is granted passes the capacity at no moment. A member is alive as long as the kernel
//! has its lock on a byte of the file, which ends with the process; no process id is relied on.
//!
//! # What holds when a process stops or ends
//!
//! - Killed, at any instruction: what it had claimed is free for the next claim that needs it, and its
//!   wait is passed over. A waiting member looks every 15 ms. The driver may take longer to free a dead
//!   process's memory than the ledger: creating memory can fail for that time.
//! - Stopped (SIGSTOP): it keeps what it was granted, for its memory stays on the card. A claim that it
//!   had announced is taken away after 4 ms, its wait is passed over after 45 ms, and a request that it
//!   does not answer after 30 ms. It goes on where it was, and is served in its place.
//! - Forked: every call fails in the child with [`BudgetError::Forked`], which does not keep its parent's
//!   claims. Children of a raw `clone` or `vfork` that do not call `exec` keep them.
//! - The ledger is removed while it is used: claims that wait, and joins, fail with
//!   [`BudgetError::Removed`].
//!
//! # Costs, with n members
//!
//! | call | atomic accesses | system calls |
//! |---|---|---|
//! | [`Budget::claim`] within the guarantee | 5 | 0 |
//! | the same of free bytes | 14 n | 0 |
//! | [`Budget::give_back`], none waits | n | 0 |
//! | the same, others wait | 12 n | 2 |
//! | [`Budget::join`] | 16 n | about 20, and one for each slot before it |
//! | a wait, for each look | 12 n | 3 if it is the first, and one for each other member |
//! | [`Budget::room`], [`Budget::status`] | 14 n | one to three for each member |
//!
//! A member has a thread that sleeps until a request, 3 descriptors, and 256 bytes of the ledger. A dead
//! one leaves its slot, which the next that joins takes. A group has at most 512 members, and claims are
//! counted in pages of 2 MiB, up to 4 TiB.
//!
//! # Containers
//!
//! As for [`turns`](crate::turns): the same directory, user and kernel. With time namespaces that shift
//! the monotonic clock, waits are served in an order that differs from that of arrival.
//!
//! Deliberately absent: memory, cards, and a way to take granted bytes from a process: only it can
//! release its memory. Programs of other users, and those that claim more than they release, are not
//! kept out.

mod clock;
mod command;
mod core;
mod error;
mod facts;
mod gate;
mod handlers;
mod inner;
mod ledger;
#[cfg(all(test, loom))]
mod loom_models;
mod member;
mod server;
mod status;
mod waiting;

pub use command::{Command, Outcome};
pub use error::{BudgetError, ClaimError, Shortfall};
pub use facts::{Member, Usage};
pub use handlers::{Request, Sleep};
pub use member::{Budget, BudgetConfig};
pub use status::{Group, GroupName, GroupStatus, Room, groups};
