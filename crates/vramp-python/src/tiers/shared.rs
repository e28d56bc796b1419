//! What the objects of one `vramp.Tiers` share, and its close.
//!
//! 1. A [`Core`] is open until [`Core::close`]. A call takes the open parts for its own time.
//! 2. Buffers and reservations are members. A close ends them: later calls of them fail.
//! 3. Leases, waiting requests and pins are holds. While there are some a close fails.
//!
//! Growth: O(1) for each member that begins or ends; a close is O(members).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use vramp_capi::process::{Failure, HostLoan, Kind, OpenAllocator, check_fork};
use vramp_defer::BufferId;

use crate::python::detached;

/// The parts of open tiers.
pub struct Open {
    /// The regions' use of the host memory.
    pub host: Option<HostLoan>,
    pub tiers: vramp_defer::Tiers,
    pub allocator: OpenAllocator,
    /// How long a lease waits whose request names no time.
    pub patience: Duration,
}

/// What a close ends.
pub trait Member: Send + Sync {
    /// Frees what it has. Called detached from the interpreter, without a lock.
    fn end(&self);
}

/// Tiers for the objects of Python that belong to them.
pub struct Core {
    pub allocator: OpenAllocator,
    /// Upper part of the numbers of its buffers.
    number: u64,
    /// Held for a few instructions, while no Python code runs.
    life: Mutex<Life>,
}

struct Life {
    /// `None` once it was closed.
    open: Option<Arc<Open>>,
    holds: usize,
    members: HashMap<u64, Weak<dyn Member>>,
    next_member: u64,
}

/// A close that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StillHeld {
    /// Number of leases, requests that wait, and pins.
    pub holds: usize,
}

/// Keeps the tiers open.
pub struct OpenHold {
    core: Arc<Core>,
    pub open: Arc<Open>,
}

/// The place of a member in the list of its tiers.
pub struct Membership {
    core: Arc<Core>,
    key: u64,
}

impl Core {
    pub fn new(open: Open, number: u64) -> Arc<Core> {
        let allocator = open.allocator;
        let open = Some(Arc::new(open));
        let life = Life { open, holds: 0, members: HashMap::new(), next_member: 0 };
        Arc::new(Core { allocator, number, life: Mutex::new(life) })
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of a buffer in Python: unique in the process.
    pub fn buffer_number(&self, id: BufferId) -> u128 {
        u128::from(self.number) << 64 | u128::from(id.number())
    }

    pub fn is_closed(&self) -> bool {
        self.life().open.is_none()
    }

    /// Returns the open parts for one call.
    pub fn open(&self) -> Result<Arc<Open>, Failure> {
        check_fork()?;
        self.life().open.clone().ok_or_else(closed)
    }

    /// Keeps the tiers open until the hold is dropped.
    pub fn hold(self: &Arc<Core>) -> Result<OpenHold, Failure> {
        check_fork()?;
        let mut life = self.life();
        let open = life.open.clone().ok_or_else(closed)?;
        life.holds += 1;
        Ok(OpenHold { core: Arc::clone(self), open })
    }

    /// Adds a member.
    pub fn join(self: &Arc<Core>, member: Weak<dyn Member>) -> Result<Membership, Failure> {
        let mut life = self.life();
        if life.open.is_none() {
            return Err(closed());
        }
        let key = life.next_member;
        life.next_member += 1;
        life.members.insert(key, member);
        Ok(Membership { core: Arc::clone(self), key })
    }

    /// Ends all members, and closes the tiers. The caller is detached from the interpreter.
    pub fn close(&self) -> Result<(), StillHeld> {
        let (open, members) = {
            let mut life = self.life();
            if life.open.is_some() && life.holds > 0 {
                return Err(StillHeld { holds: life.holds });
            }
            (life.open.take(), std::mem::take(&mut life.members))
        };
        for member in members.into_values().filter_map(|member| member.upgrade()) {
            member.end();
        }
        drop(open);
        Ok(())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let life = self.life.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = life.open.take() {
            end(open);
        }
    }
}

impl Drop for OpenHold {
    fn drop(&mut self) {
        self.core.life().holds -= 1;
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.core.life().members.remove(&self.key);
    }
}

#[cold]
fn closed() -> Failure {
    Failure::new(Kind::Closed, "the tiers are closed: open others")
}

/// Drops an object detached from the interpreter. In a forked child it is left as it is, because a thread
/// of the parent may hold its locks.
pub fn end<T: Send>(object: T) {
    match check_fork() {
        Ok(()) => detached(move || drop(object)),
        Err(_) => std::mem::forget(object),
    }
}
