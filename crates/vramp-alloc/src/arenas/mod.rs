//! Graph arenas on a device: which capture a request belongs to, who may replay, what is lent.
//!
//! The core's [`Arena`] places blocks at offsets, its pool keeps memory behind them. Here the two
//! meet the driver: captured nodes are read off the stream, memory is backed before a block is
//! handed out and before a replay, and idle arenas lend when the pool runs short. All of it happens
//! behind the allocator's lock.
//!
//! Here is what is known of each arena; `capture.rs`, `blocks.rs`, `memory.rs` and `replay.rs` have
//! what is done with it.

mod blocks;
mod capture;
mod memory;
mod replay;

use std::collections::BTreeMap;

use vramp_core::{
    Arena, ArenaBlockId, ArenaId, ArenaPolicy, Bytes, DeviceAddr, Leases, Mark, Recording, StreamId,
};
use vramp_driver::{DriverError, Graph};

use crate::allocation::Allocation;
use crate::exec::is_full;
use crate::virtual_pool::{Refusal, VirtualPool};

/// All arenas of a pool.
#[derive(Default)]
pub(crate) struct Arenas {
    by_id: BTreeMap<ArenaId, ArenaState>,
}

/// One arena and who uses it.
pub(crate) struct ArenaState {
    pub arena: Arena,
    pub leases: Leases,
    capturing: Option<Capturing>,
    /// The capture that the next one is planned by.
    planned: Option<Recording>,
    /// Graphs that somebody else launches, unseen, may use it at any time: it never lends.
    unguarded: bool,
    /// Its owner is gone: it goes with its last block.
    abandoned: bool,
}

/// A capture under way.
struct Capturing {
    /// The driver's number of it.
    number: u64,
    /// Where it began.
    stream: StreamId,
    /// It was begun here, and ends here.
    own: bool,
    /// Up to where memory is behind the arena.
    backed: Bytes,
    /// Memory of others that was freed on the capture's streams: its nodes may use it.
    kept: Vec<Allocation>,
    /// Where memory of others is whose use was noted on the capture's streams.
    noted: Vec<DeviceAddr>,
}

/// What came of a capture.
pub(crate) struct Captured {
    pub graph: Result<Graph, DriverError>,
    pub recording: Recording,
    pub kept: Vec<Allocation>,
}

/// Why a capture is not served.
pub(crate) enum NotAttached {
    /// The stream is part of none.
    NoCapture,
    /// An arena serves it already.
    Served,
    Refused(Refusal),
}

impl From<Refusal> for NotAttached {
    fn from(refusal: Refusal) -> NotAttached {
        NotAttached::Refused(refusal)
    }
}

/// Why a replay was not launched.
pub(crate) enum NoLease {
    Busy(vramp_core::ArenaBusy),
    Refused(Refusal),
}

impl From<DriverError> for NoLease {
    fn from(error: DriverError) -> NoLease {
        NoLease::Refused(Refusal::Driver(error))
    }
}

impl ArenaState {
    /// Also while a capture that is about to begin gets its memory.
    pub(crate) fn is_capturing(&self) -> bool {
        self.arena.is_capturing()
    }
}

impl Arenas {
    pub(crate) fn get(&self, id: ArenaId) -> &ArenaState {
        self.by_id.get(&id).unwrap_or_else(|| panic!("{id} is gone while somebody holds it"))
    }

    pub(crate) fn get_mut(&mut self, id: ArenaId) -> &mut ArenaState {
        self.by_id.get_mut(&id).unwrap_or_else(|| panic!("{id} is gone while somebody holds it"))
    }

    /// True if the arena holds the block.
    pub(crate) fn knows(&self, block: ArenaBlockId) -> bool {
        self.by_id.get(&block.arena()).is_some_and(|state| state.arena.block(block).is_ok())
    }

    /// The arena that serves the capture with this number.
    fn serving(&self, number: u64) -> Option<ArenaId> {
        let serves = |state: &ArenaState| {
            state.capturing.as_ref().is_some_and(|capturing| capturing.number == number)
        };
        self.iter().find(|(_, state)| serves(state)).map(|(id, _)| id)
    }

    fn any_capture(&self) -> bool {
        self.by_id.values().any(ArenaState::is_capturing)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ArenaId, &ArenaState)> {
        self.by_id.iter().map(|(&id, state)| (id, state))
    }
}

impl VirtualPool {
    /// Sets addresses aside. One driver call at most.
    pub(crate) fn add_arena(
        &mut self,
        policy: ArenaPolicy,
        capacity: Bytes,
    ) -> Result<ArenaId, DriverError> {
        let id = self.add_range(capacity)?;
        let state = ArenaState {
            arena: Arena::new(id, policy, self.pool.arena_range(id).len),
            leases: Leases::default(),
            capturing: None,
            planned: None,
            unguarded: false,
            abandoned: false,
        };
        self.arenas.by_id.insert(id, state);
        Ok(id)
    }

    /// The same for a range that no capture knows of.
    pub(crate) fn add_range(&mut self, capacity: Bytes) -> Result<ArenaId, DriverError> {
        let mut tidied = false;
        loop {
            match self.pool.add_arena(capacity) {
                Ok(id) => return Ok(id),
                Err(plan) => match self.exec.perform(&mut self.pool, plan) {
                    Ok(()) => {}
                    // Memory of former arenas may lie between the free addresses.
                    Err(error) if is_full(&error) && !tidied => {
                        tidied = true;
                        self.trim(Bytes::ZERO)?;
                    }
                    Err(error) => return Err(error),
                },
            }
        }
    }

    /// The owner of an arena is gone. Blocks that are still held keep it.
    pub(crate) fn abandon_arena(&mut self, id: ArenaId) {
        self.arenas.get_mut(id).abandoned = true;
        self.remove_if_abandoned(id);
    }

    fn remove_if_abandoned(&mut self, id: ArenaId) {
        let state = self.arenas.get(id);
        if state.abandoned && state.arena.census().blocks == 0 && !state.is_capturing() {
            let marks: Vec<Mark> = state.leases.unfinished().collect();
            self.arenas.by_id.remove(&id);
            self.pool.remove_arena(id, &marks);
        }
    }
}
