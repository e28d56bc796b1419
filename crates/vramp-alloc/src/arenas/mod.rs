//! Graph arenas on a device: the capture of a request, leases for replays, and lending.
//!
//! The core's [`Arena`] places blocks at offsets, and its pool backs them with memory. This module
//! connects both to the driver: it reads captured nodes from the stream, backs memory before a
//! block is returned and before a replay, and lends idle arenas when the pool runs short. All of it
//! runs while the allocator's lock is held.
//!
//! A request never looks at every arena: those with a capture and those that may have memory to lend
//! are in lists of their own. An arena is looked at for memory to lend once after each time that it was
//! backed, that a capture or a lease of it ended or that one of its blocks was freed, and as long as
//! its work is not over; with 10,000 idle arenas none is. One that was removed leaves nothing but its
//! number in the list of arenas to shorten.
//!
//! This file has the state of each arena; `capture.rs`, `blocks.rs`, `memory.rs` and `replay.rs`
//! have the operations.

mod blocks;
mod capture;
mod memory;
mod replay;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use vramp_core::{
    AddedArena, Arena, ArenaBlockId, ArenaId, ArenaPolicy, Bytes, CaptureRecording, DeviceAddr,
    Layout, Leases, Mark, Packing, StreamId,
};
use vramp_driver::{DriverError, Graph};

use crate::allocation::Allocation;
use crate::exec::is_capacity_error;
use crate::virtual_pool::{Refusal, VirtualPool};

/// Addresses that an arena keeps, at least, when others need them; more if it has used more than half
/// of them.
const LEAST_KEPT: Bytes = Bytes::gib(1);

/// All arenas of a pool.
#[derive(Default)]
pub(crate) struct Arenas {
    by_id: BTreeMap<ArenaId, ArenaState>,
    /// Those with a capture, or one about to begin: few, where there are many arenas.
    capturing: BTreeSet<ArenaId>,
    /// The arena of each capture that is served, by the driver's number.
    serving: BTreeMap<u64, ArenaId>,
    /// Those that may have memory to lend: all others lent what they can, or will be listed when what
    /// keeps them from it ends.
    may_lend: BTreeSet<ArenaId>,
    /// Reusing arenas that have as many addresses as they were made with, the oldest first. Removed
    /// ones are among them until they come up.
    generous: VecDeque<ArenaId>,
    /// True if the driver refused to reserve more.
    out_of_addresses: bool,
}

/// One arena and its uses.
pub(crate) struct ArenaState {
    pub arena: Arena,
    pub leases: Leases,
    capturing: Option<Capturing>,
    /// The capture that the layout of the next one is planned from, and how far that has come.
    planned: Option<Packing>,
    /// Graphs of it that the driver is making ready, which looks at the memory of their nodes: it does
    /// not lend meanwhile.
    instantiating: u32,
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
    /// True if this allocator began it and has not ended it with the driver.
    own: bool,
    /// Length of the arena's start that is backed.
    backed: Bytes,
    /// Memory from outside the arena that was freed on the capture's streams: its nodes may use it.
    kept: Vec<Allocation>,
    /// Addresses of memory from outside the arena whose use was recorded on the capture's streams.
    used: BTreeSet<DeviceAddr>,
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

    /// Sets what is planned, and the layout that the next capture follows if it is a new one.
    pub(crate) fn set_plan(&mut self, packing: Packing, layout: Option<Layout>) {
        if layout.is_some() {
            self.arena.set_plan(layout);
        }
        self.planned = Some(packing);
    }

    /// Takes out what is planned. The layout stays.
    pub(crate) fn take_plan(&mut self) -> Option<Packing> {
        self.planned.take()
    }

    /// Takes out what is planned if other memory is live now than the layout goes around, with the
    /// ranges that are live.
    pub(crate) fn take_outdated_plan(&mut self) -> Option<(Packing, Vec<(Bytes, Bytes)>)> {
        let planned = self.planned.take_if(|plan| !self.arena.is_as_before(plan.recording()))?;
        Some((planned, self.arena.live_ranges().collect()))
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
        self.serving.get(&number).copied()
    }

    fn any_capture(&self) -> bool {
        !self.capturing.is_empty()
    }

    /// Returns the captures that are served, by arena.
    fn captures(&self) -> impl Iterator<Item = (ArenaId, &Capturing)> {
        let capturing = |&id: &ArenaId| Some((id, self.get(id).capturing.as_ref()?));
        self.capturing.iter().filter_map(capturing)
    }

    /// Begins a capture into an arena that has none.
    fn begin(&mut self, id: ArenaId) {
        self.get_mut(id).arena.begin().expect("its owner begins one capture at a time");
        self.capturing.insert(id);
    }

    /// Ends the capture that was begun but is not served.
    fn abort(&mut self, id: ArenaId) {
        self.get_mut(id).arena.abort().expect("it was begun before");
        self.capturing.remove(&id);
        self.list_to_lend(id);
    }

    /// Serves the driver's capture by the one that was begun.
    fn serve(&mut self, id: ArenaId, capturing: Capturing) {
        self.serving.insert(capturing.number, id);
        self.get_mut(id).capturing = Some(capturing);
    }

    /// Ends the capture that an arena serves.
    fn end(&mut self, id: ArenaId) -> (CaptureRecording, Capturing) {
        let state = self.get_mut(id);
        let recording = state.arena.end().expect("a capture ends once");
        let capturing = state.capturing.take().expect("a capture ends once");
        self.capturing.remove(&id);
        self.serving.remove(&capturing.number);
        self.list_to_lend(id);
        (recording, capturing)
    }

    /// Lists an arena whose memory changed, or what keeps it from lending: it may have some to lend.
    /// Does nothing for a range that is no arena.
    fn list_to_lend(&mut self, id: ArenaId) {
        if self.by_id.contains_key(&id) {
            self.may_lend.insert(id);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ArenaId, &ArenaState)> {
        self.by_id.iter().map(|(&id, state)| (id, state))
    }
}

impl VirtualPool {
    /// Reserves the addresses of an arena: fewer than `capacity` if there are too few, unless it is
    /// monotone, which needs all of them. One driver call at most.
    pub(crate) fn add_arena(
        &mut self,
        policy: ArenaPolicy,
        capacity: Bytes,
    ) -> Result<ArenaId, DriverError> {
        let least = match policy {
            ArenaPolicy::Monotone => capacity,
            ArenaPolicy::Reusing => capacity.min(LEAST_KEPT),
        };
        let id = self.reserve_range(capacity, least)?;
        let state = ArenaState {
            arena: Arena::new(id, policy, self.pool.arena_range(id).len),
            leases: Leases::default(),
            capturing: None,
            planned: None,
            instantiating: 0,
            unguarded: false,
            abandoned: false,
        };
        self.arenas.by_id.insert(id, state);
        if policy == ArenaPolicy::Reusing {
            self.arenas.generous.push_back(id);
        }
        Ok(id)
    }

    /// Reserves the addresses of a range that no capture uses. One driver call at most.
    pub(crate) fn add_range(&mut self, len: Bytes) -> Result<ArenaId, DriverError> {
        self.reserve_range(len, len)
    }

    /// Reserves `len` addresses, or at least `least` once the driver has no more: arenas then give
    /// back what they do not use, one after the other, each once.
    fn reserve_range(&mut self, len: Bytes, least: Bytes) -> Result<ArenaId, DriverError> {
        let mut trimmed = false;
        loop {
            let mut refused = None;
            if !self.arenas.out_of_addresses || self.pool.longest_hole() >= len {
                match self.pool.add_arena(len) {
                    AddedArena::Added(id) => return Ok(id),
                    AddedArena::ReserveFirst(plan) => {
                        match self.exec.perform(&mut self.pool, plan) {
                            Ok(()) => continue,
                            Err(error) if is_capacity_error(&error) => refused = Some(error),
                            Err(error) => return Err(error),
                        }
                    }
                }
            }
            // Blocks and other arenas need addresses too: half of a hole, unless all of it is needed.
            let take = |hole: Bytes| Bytes::new(hole.count() / 2).max(least.min(hole)).min(len);
            let enough = Bytes::new(len.count() / 4).max(least);
            while take(self.pool.longest_hole()) < enough && self.shorten_next() {}
            let found = take(self.pool.longest_hole());
            if found >= least
                && let AddedArena::Added(id) = self.pool.add_arena(found)
            {
                // Until an arena is removed the driver would refuse again.
                self.arenas.out_of_addresses = true;
                return Ok(id);
            }
            match refused {
                // The driver was not called.
                None => self.arenas.out_of_addresses = false,
                // Memory of removed arenas may lie between the free addresses.
                Some(_) if !trimmed => {
                    trimmed = true;
                    self.trim(Bytes::ZERO)?;
                }
                Some(error) => return Err(error),
            }
        }
    }

    /// Takes addresses from the oldest arena that still has more than it needs, and serves no capture
    /// now. False if there is none.
    fn shorten_next(&mut self) -> bool {
        for _ in 0..self.arenas.generous.len() {
            let Some(id) = self.arenas.generous.pop_front() else { break };
            let Some(state) = self.arenas.by_id.get_mut(&id) else { continue };
            if state.is_capturing() {
                self.arenas.generous.push_back(id);
                continue;
            }
            let keep = (state.arena.highest() * 2).max(LEAST_KEPT);
            let kept = self.pool.shorten_arena(id, keep);
            state.arena.shorten(kept);
            return true;
        }
        false
    }

    /// Removes an arena whose owner was dropped, now or with its last live block.
    pub(crate) fn abandon_arena(&mut self, id: ArenaId) {
        self.arenas.get_mut(id).abandoned = true;
        self.remove_if_abandoned(id);
    }

    fn remove_if_abandoned(&mut self, id: ArenaId) {
        let state = self.arenas.get(id);
        if state.abandoned && state.arena.blocks() == 0 && !state.is_capturing() {
            let marks: Vec<Mark> = state.leases.unfinished().collect();
            self.arenas.by_id.remove(&id);
            self.arenas.may_lend.remove(&id);
            self.arenas.out_of_addresses = false;
            self.pool.remove_arena(id, &marks);
        }
    }
}
