//! Graph arenas on a device: the capture of a request, leases for replays, and lending.
//!
//! The core's [`Arena`] places blocks at offsets, and its pool backs them with memory. This module
//! connects both to the driver: it reads captured nodes from the stream, backs memory before a
//! block is returned and before a replay, and lends idle arenas when the pool runs short. All of it
//! runs while the allocator's lock is held.
//!
//! This file has the state of each arena; `capture.rs`, `blocks.rs`, `memory.rs` and `replay.rs`
//! have the operations.

mod blocks;
mod capture;
mod memory;
mod replay;

use std::collections::BTreeMap;

use vramp_core::{
    AddedArena, Arena, ArenaBlockId, ArenaId, ArenaPolicy, Bytes, CaptureRecording, DeviceAddr,
    Leases, Mark, StreamId,
};
use vramp_driver::{DriverError, Graph};

use crate::allocation::Allocation;
use crate::exec::is_capacity_error;
use crate::virtual_pool::{Refusal, VirtualPool};

/// All arenas of a pool.
#[derive(Default)]
pub(crate) struct Arenas {
    by_id: BTreeMap<ArenaId, ArenaState>,
}

/// One arena and its uses.
pub(crate) struct ArenaState {
    pub arena: Arena,
    pub leases: Leases,
    capturing: Option<Capturing>,
    /// The capture that the layout of the next one was planned from.
    planned: Option<CaptureRecording>,
    /// True if graphs launched without leases may use it at any time: it never lends.
    unguarded: bool,
    /// True once its owner was dropped: it is removed with its last block.
    abandoned: bool,
}

/// A capture under way.
struct Capturing {
    /// The driver's number of the capture.
    number: u64,
    /// Stream that it began on.
    stream: StreamId,
    /// True if this allocator began it and ends it.
    own: bool,
    /// Length of the arena's start that is backed.
    backed: Bytes,
    /// Memory from outside the arena that was freed on the capture's streams: its nodes may use it.
    kept: Vec<Allocation>,
    /// Addresses of memory from outside the arena whose use was recorded on the capture's streams.
    used: Vec<DeviceAddr>,
}

/// Result of a capture.
pub(crate) struct Captured {
    pub graph: Result<Graph, DriverError>,
    pub recording: CaptureRecording,
    pub kept: Vec<Allocation>,
}

/// Why an arena cannot serve a capture.
pub(crate) enum NotAttached {
    /// The stream is part of no capture.
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

/// Why there is no lease for a replay.
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
    /// Returns true during a capture, and while one that is about to begin is backed.
    pub(crate) fn is_capturing(&self) -> bool {
        self.arena.is_capturing()
    }
}

impl Arenas {
    pub(crate) fn get(&self, id: ArenaId) -> &ArenaState {
        self.by_id.get(&id).unwrap_or_else(|| panic!("{id} was removed while a handle exists"))
    }

    pub(crate) fn get_mut(&mut self, id: ArenaId) -> &mut ArenaState {
        self.by_id.get_mut(&id).unwrap_or_else(|| panic!("{id} was removed while a handle exists"))
    }

    /// Returns true if the block is live in its arena.
    pub(crate) fn is_live(&self, block: ArenaBlockId) -> bool {
        self.by_id.get(&block.arena()).is_some_and(|state| state.arena.block(block).is_ok())
    }

    /// Returns the arena that serves the capture with this number.
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
    /// Reserves the addresses of an arena. One driver call at most.
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

    /// Reserves the addresses of a range that no capture uses. One driver call at most.
    pub(crate) fn add_range(&mut self, capacity: Bytes) -> Result<ArenaId, DriverError> {
        let mut trimmed = false;
        loop {
            match self.pool.add_arena(capacity) {
                AddedArena::Added(id) => return Ok(id),
                AddedArena::ReserveFirst(plan) => match self.exec.perform(&mut self.pool, plan) {
                    Ok(()) => {}
                    // Memory of removed arenas may lie between the free addresses.
                    Err(error) if is_capacity_error(&error) && !trimmed => {
                        trimmed = true;
                        self.trim(Bytes::ZERO)?;
                    }
                    Err(error) => return Err(error),
                },
            }
        }
    }

    /// Removes an arena whose owner was dropped, now or with its last live block.
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
