//! Free space of the host, the disk and other cards for copies.

use crate::planner::{PeerTable, SpillRoom};
use vramp_core::Bytes;
use vramp_tiers::MemorySpace;
use vramp_tiers::movers::MoverConfig;

use super::state::Shared;

impl Shared {
    /// Returns the free space below the card and on other cards, promises included. A driver call for
    /// each of them.
    pub fn room(&self) -> SpillRoom {
        SpillRoom { peers: self.peers.room(), ..self.room_below() }
    }

    /// Returns the free space of host and disk, promises included. With a disk, the last blocks of
    /// the host are kept as [staging](staging_room). A disk that failed a moment ago has no space.
    pub fn room_below(&self) -> SpillRoom {
        let peers = PeerTable::default();
        let free = |space: &MemorySpace| space.capacity().saturating_sub(space.total());
        let space = self.mover.pool().space();
        let host = free(space);
        let Some(store) = &self.disk else {
            return SpillRoom { peers, host, disk: Bytes::ZERO };
        };
        let staging = staging_room(self.mover.config(), self.config.piece, space.capacity());
        let disk = if self.disk_gate.is_closed() { Bytes::ZERO } else { free(store.space()) };
        SpillRoom { peers, host: host.saturating_sub(staging), disk }
    }
}

/// Returns the host memory that a disk keeps as staging: all buffers of one transfer, at most half of the
/// host, and at least one buffer, without which nothing reaches the disk. So a host that has less than two
/// buffers is staging alone.
fn staging_room(mover: &MoverConfig, piece: Bytes, host: Bytes) -> Bytes {
    let all = mover.step * u64::from(mover.staging_pieces);
    let one = mover.step.min(piece);
    all.min(Bytes::new(host.count() / 2).max(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_takes_at_most_half_of_a_host_and_at_least_one_buffer() {
        let mover = MoverConfig { step: Bytes::mib(16), steps_in_flight: 4, staging_pieces: 4 };
        let rows = [(8, 16), (16, 16), (32, 16), (48, 24), (64, 32), (128, 64), (1024, 64)];
        for (host, staging) in rows {
            let found = staging_room(&mover, Bytes::mib(32), Bytes::mib(host));
            assert_eq!(found, Bytes::mib(staging), "of {host} MiB");
        }
        let small = staging_room(&mover, Bytes::mib(4), Bytes::mib(8));
        assert_eq!(small, Bytes::mib(4), "a transfer is one piece");
    }
}
