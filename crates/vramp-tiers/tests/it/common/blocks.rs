//! Small host pools for the tests of pools and of movers.

use vramp_tiers::host::{HostPoolConfig, PageKind};
use vramp_tiers::{Bytes, MemorySpace, ReservationManager, SpaceConfig, SpaceId};

pub const MIB: Bytes = Bytes::mib(1);

/// Four blocks of 1 MiB at a time, none spare. Idle memory stays.
pub const BLOCKS: HostPoolConfig = HostPoolConfig {
    block: MIB,
    blocks_per_pool: 4,
    initial_pools: 1,
    spare_blocks: 0,
    node: None,
    pages: PageKind::Small,
    idle: None,
    keep: None,
};

pub fn space(capacity: Bytes) -> MemorySpace {
    let host = SpaceId::host(0);
    let manager = ReservationManager::new([(host, SpaceConfig::host(capacity))]).unwrap();
    manager.space(host).unwrap()
}
