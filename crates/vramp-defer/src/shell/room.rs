//! Free space: of the card for other pools, of the host, the disk and other cards for copies.

use crate::planner::{PeerTable, SpillRoom};
use vramp_core::Bytes;
use vramp_tiers::MemorySpace;
use vramp_tiers::movers::MoverConfig;

use super::state::Shared;

impl Shared {
    /// Returns the bytes that pools of the allocator's group can create now. A driver call.
    pub fn room_of_card(&self) -> Bytes {
        let free = self.driver.memory_info().map_or(Bytes::ZERO, |info| info.free);
        let together = self.allocator.reserved_together();
        self.allocator.limit().map_or(free, |limit| free.min(limit.saturating_sub(together)))
    }

    /// Returns the free space below the card and on other cards, promises included. A driver call for
    /// each of them.
    pub fn room(&self) -> SpillRoom {
        SpillRoom { peers: self.peers.room(), ..self.room_below() }
    }

    /// Returns the free space of host and disk, promises included. With a disk, the last blocks of
    /// the host are kept as staging. A disk that failed a moment ago has no space.
    pub fn room_below(&self) -> SpillRoom {
        let peers = PeerTable::default();
        let free = |space: &MemorySpace| space.capacity().saturating_sub(space.total());
        let host = free(self.mover.pool().space());
        let Some(store) = &self.disk else {
            return SpillRoom { peers, host, disk: Bytes::ZERO };
        };
        let MoverConfig { step, staging_pieces, .. } = *self.mover.config();
        let staging = step * u64::from(staging_pieces);
        let disk = if self.disk_gate.is_closed() { Bytes::ZERO } else { free(store.space()) };
        SpillRoom { peers, host: host.saturating_sub(staging), disk }
    }
}
