//! Data on its way between tiers: in steps, on streams of its own, and never behind anybody's back.
//!
//! 1. [`Mover::new`] makes two streams for each direction of one device, once.
//! 2. [`Mover::to_host`] and [`Mover::to_device`] describe a move, in the words of [`TransferBuilder`];
//!    [`TransferBuilder::start`] makes it a [`Transfer`].
//! 3. A transfer cuts its range into steps and keeps a few of them in flight. It has no thread: it
//!    advances when somebody asks ([`Transfer::poll`]), waits ([`Transfer::wait`]) or looks for the
//!    next part that has arrived ([`Transfer::wait_part`]).
//! 4. [`Transfer::cancel`], a [`CancelToken`](crate::CancelToken) or dropping it ends it between two
//!    steps, after what is in flight. [`Transfer::finish_on`] queues all that is left and orders a
//!    stream behind it; the host does not wait.
//! 5. [`Mover::to_disk`], [`Mover::from_disk`] and [`Mover::between`] go through a few pinned blocks
//!    of the host ([`StagedTransfer`]): one piece leaves them while the next one comes.
//! 6. [`Profiler`] measures how fast all this is.
//!
//! Nothing here waits for a whole device: what has to be ordered is ordered by events.
//!
//! Deliberately absent: threads, budgets (blocks are charged by their pool, extents by their
//! store), and choosing what moves.

mod disk;
mod error;
mod gpu;
mod lane;
mod mover;
mod profile;
mod profiler;
mod staged;
mod transfer;

pub use disk::{DiskBudget, DiskCopy, DiskSource, DiskTarget, InFlightRead, InFlightWrite};
pub use error::{MoveError, MoveFailed};
pub use gpu::{GpuEndpoint, InFlightGpuCopy};
pub use mover::{CopyDependency, Mover, MoverConfig, TransferBuilder};
pub use profile::{MeasuredLink, MeasuredPair, Profile, UnmeasuredLink};
pub use profiler::{Profiler, ProfilerConfig};
pub use staged::{CopyEndpoint, InFlightCopy, StagedPiece, StagedTransfer};
pub use transfer::{Transfer, TransferProgress};
