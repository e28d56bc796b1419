//! Reclaiming host memory: copies that are not needed are dropped, others are pushed to the disk.

use crate::planner::{HostDemand, Push, SpillRoom};
use vramp_core::Bytes;

use super::report::MoveKind;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::host::{HostAllocation, HostPoolError};
use vramp_tiers::movers::{DiskCopy, MoveError};

impl Shared {
    /// Allocates blocks of the host for a user's copy. Copies that are not needed are dropped for
    /// them.
    pub(super) fn blocks(&self, len: Bytes) -> Result<HostAllocation, SpillError> {
        let pool = self.mover.pool();
        let mut blocks = pool.allocate(len);
        if matches!(blocks, Err(HostPoolError::Full(_))) && !self.relieve_host(len).is_zero() {
            blocks = pool.allocate(len);
        }
        Ok(blocks.map_err(MoveError::from)?)
    }

    /// Reclaims host memory. Returns the bytes freed.
    pub(super) fn relieve_host(&self, deficit: Bytes) -> Bytes {
        let (shed, made, pushes) = {
            let mut state = self.lock();
            let disk_room = self.room_below().disk;
            let shed = state.release_spare_copies();
            let deficit = deficit.saturating_sub(shed);
            let choice = state.core.reclaim_host(&HostDemand { deficit, disk_room });
            state.drop_copies(&choice.stale);
            state.release_spare_copies();
            let moving: Bytes = choice.pushes.iter().map(|push| push.len).sum();
            let made = deficit.saturating_sub(choice.missing).saturating_sub(moving);
            (shed, made, choice.pushes)
        };
        shed + made + self.push_to_disk(&pushes)
    }

    /// Moves host copies to the disk. Returns the bytes freed.
    pub(super) fn push_to_disk(&self, pushes: &[Push]) -> Bytes {
        let mut made = Bytes::ZERO;
        for push in pushes {
            if self.disk_gate.is_closed() {
                self.give_up(push.id);
                continue;
            }
            made += self.push_from_host(push);
            self.retry_stalled();
        }
        made
    }

    /// Moves a copy from the host to the disk. Returns the host bytes that this freed.
    pub(super) fn push_from_host(&self, push: &Push) -> Bytes {
        let store = self.disk.as_ref().expect("without a disk there is no room on it");
        if let Some(freed) = self.push_mapped(push, store) {
            return freed;
        }
        let began_ns = self.driver.now_ns();
        let host = self.lock().copies.get_mut(&push.piece).and_then(|below| below.host.take());
        let host = host.expect("the planner counts the copy");
        let written = DiskCopy::write(store, &host, push.len, self.mover.config().step);
        let took_ns = self.driver.now_ns().saturating_sub(began_ns);
        match written {
            Ok(stored) => {
                self.lock().note_pushed(push, stored, began_ns, took_ns);
                drop(host);
                push.len
            }
            Err(error) => {
                self.lock().copies.entry(push.piece).or_default().host = Some(host);
                self.fail(push.id, push.piece, MoveKind::Pushed, &error.into());
                Bytes::ZERO
            }
        }
    }
}

impl State {
    /// Drops host copies that are not needed, if the host has less room than `leaving` bytes take.
    pub(super) fn drop_excess_host_copies(&mut self, room: &SpillRoom, leaving: Bytes) {
        let deficit = self.core.host_deficit(leaving, room);
        if !deficit.is_zero() {
            let deficit = deficit.saturating_sub(self.release_spare_copies());
            let demand = HostDemand { deficit, disk_room: Bytes::ZERO };
            let choice = self.core.reclaim_host(&demand);
            self.drop_copies(&choice.stale);
        }
    }
}
