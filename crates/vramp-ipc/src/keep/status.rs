//! What a keeper says of its entries.

use std::time::Duration;

use super::core::lock::Lock;
use super::core::registry::types::{Holder, Status};

/// A client that has the current version of an entry open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HolderStatus {
    /// Its process; 0 if the keeper cannot see it.
    pub pid: u32,
    /// Its lock.
    pub lock: Lock,
}

/// The current version of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentStatus {
    /// The device, as the publisher named it.
    pub device: String,
    /// Bytes of its parts.
    pub bytes: u64,
    /// Epoch of its last commit.
    pub epoch: u64,
    /// A client changed bytes and ended without a commit.
    pub is_torn: bool,
    /// Clients that have it open; 256 at most.
    pub holders: Vec<HolderStatus>,
    /// How many clients have it open.
    pub holder_count: u64,
    /// How long no client has had it open; `None` while one has.
    pub idle: Option<Duration>,
    /// Idle entries of a lower priority are evicted first.
    pub priority: i32,
    /// How long it stays after its last hold; `None` for ever.
    pub kept_for: Option<Duration>,
}

/// One entry of a keeper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryStatus {
    /// Its name.
    pub name: String,
    /// Its current version; `None` if there is only a draft, or older versions that clients have open.
    pub current: Option<CurrentStatus>,
    /// Clients that wait for a lock of the current version or for the right to build.
    pub waiting: u64,
    /// Process of the client that has the right to build.
    pub draft_pid: Option<u32>,
    /// Older versions that clients have open.
    pub superseded: u64,
}

impl EntryStatus {
    pub(super) fn from_status(status: Status) -> EntryStatus {
        let holder = |holder: Holder| HolderStatus { pid: holder.pid, lock: holder.lock };
        let current = status.current.map(|current| CurrentStatus {
            device: current.terms.device,
            bytes: current.terms.bytes,
            epoch: current.epoch,
            is_torn: current.is_torn,
            holders: current.holders.into_iter().map(holder).collect(),
            holder_count: current.holders_len,
            idle: current.idle_ns.map(Duration::from_nanos),
            priority: current.terms.priority,
            kept_for: current.terms.kept_for_ns.map(Duration::from_nanos),
        });
        EntryStatus {
            name: status.name,
            current,
            waiting: status.waiting,
            draft_pid: status.draft_pid,
            superseded: status.superseded,
        }
    }
}
