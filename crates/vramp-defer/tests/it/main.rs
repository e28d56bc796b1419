//! Deferrable buffers on the simulated card: bytes, addresses, leases, and what moves when.

#![allow(clippy::unwrap_used, reason = "a test ends where something is missing")]

mod adopted;
mod below;
mod budget;
mod cards;
mod cards_in_need;
mod compressed;
mod edges;
mod ends;
mod fair;
mod faulty;
mod growth;
mod in_place;
mod leases;
mod machine;
mod moves;
mod random;
mod random_cards;
mod scenarios;
mod sharing;
mod stuck;
mod tiers;
mod waiting;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vramp_alloc::{Allocator, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_defer::{Access, DeferrableBuffer, SpillConfig, SpillManager, SpillParts};
use vramp_driver::Stream;
use vramp_driver::sim::{Contents, FaultPlan, Simulator, SimulatorBuilder};
use vramp_host::{BlockIo, IoChoice, open_io};
use vramp_tiers::disk::{CompressionConfig, DiskConfig, FileNames, ObjectStore, ObjectStoreConfig};
use vramp_tiers::host::HostPoolConfig;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::{Bytes, DiskStore, HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};

const MIB: fn(u64) -> Bytes = Bytes::mib;
const PIECE: Bytes = Bytes::mib(8);

/// Parts of a rig.
struct Plan {
    limit: Bytes,
    host: Bytes,
    disk: Option<Bytes>,
    budget: bool,
    /// A store of the program in place of files.
    objects: Option<Arc<dyn ObjectStore>>,
    /// Engine of the disk, if not the usual one.
    io: Option<Arc<dyn BlockIo>>,
    names: FileNames,
    compression: Option<CompressionConfig>,
    /// Directory of the disk's files, if not one of the rig's own.
    directory: Option<PathBuf>,
    config: SpillConfig,
}

impl Default for Plan {
    /// Returns 64 MiB of a card, 512 MiB of the host, and no disk.
    fn default() -> Plan {
        let config = SpillConfig {
            piece: PIECE,
            patience: Duration::from_millis(300),
            // A disk that heals is used again well within the patience.
            disk_backoff_max: Duration::from_millis(20),
            ..SpillConfig::default()
        };
        Plan {
            limit: MIB(64),
            host: MIB(512),
            disk: None,
            budget: false,
            objects: None,
            io: None,
            names: FileNames::Hidden,
            compression: None,
            directory: None,
            config,
        }
    }
}

struct Rig {
    sim: Arc<Simulator>,
    allocator: Arc<Allocator>,
    pool: HostPool,
    store: Option<Arc<DiskStore>>,
    spaces: ReservationManager,
    manager: SpillManager,
    stream: StreamId,
    queue: Stream,
    own: tempfile::TempDir,
}

/// A simulator that checks every access against earlier ones.
fn simulator() -> SimulatorBuilder {
    Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored).checked()
}

/// Longer than any wait of a test.
const LONG: Duration = Duration::from_secs(60);

/// A plan whose leases wait until they are granted.
fn patient() -> Plan {
    let usual = Plan::default();
    Plan { config: SpillConfig { patience: LONG, ..usual.config.clone() }, ..usual }
}

fn rig() -> Rig {
    Plan::default().build()
}

impl Plan {
    fn build(self) -> Rig {
        self.build_on(simulator())
    }

    fn build_on(self, card: SimulatorBuilder) -> Rig {
        let sim = Arc::new(card.build());
        self.build_behind(sim.clone(), sim)
    }

    /// Builds on a device that forwards calls to the simulator.
    fn build_behind(self, driver: Arc<dyn Driver>, sim: Arc<Simulator>) -> Rig {
        let config = Config { limit: Some(self.limit), ..Config::default() };
        let allocator = Arc::new(Allocator::new(Arc::clone(&driver), config).unwrap());
        let (gpu, host, disk) = (SpaceId::gpu(0), SpaceId::host(0), SpaceId::disk(0));
        let spaces = ReservationManager::new([
            (gpu, SpaceConfig::gpu(self.limit)),
            (host, SpaceConfig::host(self.host)),
            (disk, SpaceConfig::disk(self.disk.unwrap_or(MIB(1)))),
        ])
        .unwrap();
        let usual = HostPoolConfig::default();
        let initial_pools = if self.host < MIB(16) { 0 } else { usual.initial_pools };
        let config =
            HostPoolConfig { blocks_per_pool: 16, spare_blocks: 0, initial_pools, ..usual };
        let pool =
            HostPool::new(&spaces.space(host).unwrap(), config, [Arc::clone(&driver)]).unwrap();
        let mover =
            Mover::new(driver, &pool, MoverConfig { step: MIB(4), ..MoverConfig::default() });
        let own = tempfile::tempdir().unwrap();
        let store = self.disk.map(|_| {
            let (names, compression) = (self.names, self.compression);
            let config =
                DiskConfig { file_size: MIB(32), names, compression, ..DiskConfig::default() };
            let space = spaces.space(disk).unwrap();
            if let Some(objects) = self.objects {
                let config = ObjectStoreConfig::default();
                return Arc::new(DiskStore::with_objects(objects, config, &space).unwrap());
            }
            let io = self.io.unwrap_or_else(|| open_io(IoChoice::Auto, config.depth).unwrap().io);
            let directory = self.directory.as_deref().unwrap_or(own.path());
            Arc::new(DiskStore::open_with(directory, config, &space, io).unwrap())
        });
        let parts = SpillParts {
            allocator: Arc::clone(&allocator),
            mover: mover.unwrap(),
            disk: store.clone(),
            budget: self.budget.then(|| spaces.space(gpu).unwrap()),
            peers: Vec::new(),
        };
        let manager = SpillManager::new(parts, self.config).unwrap();
        let stream = allocator.create_stream().unwrap();
        let queue = allocator.stream(stream).unwrap();
        Rig { sim, allocator, pool, store, spaces, manager, stream, queue, own }
    }
}

impl Rig {
    /// A mover of its own to the rig's host.
    fn mover(&self) -> Mover {
        let config = MoverConfig { step: MIB(4), ..MoverConfig::default() };
        Mover::new(Arc::clone(self.allocator.driver()), &self.pool, config).unwrap()
    }

    /// Returns a buffer filled with one byte, under a lease that has ended.
    fn filled(&self, len: Bytes, byte: u8) -> DeferrableBuffer {
        let buffer = self.manager.buffer(len).unwrap();
        self.fill(&buffer, byte);
        buffer
    }

    fn fill(&self, buffer: &DeferrableBuffer, byte: u8) {
        let lease = buffer.lease(Access::Exclusive, self.stream).unwrap();
        self.sim.fill(self.queue, lease.address(0), byte).unwrap();
    }

    /// Checks the bytes that a kernel on the stream finds at the ends of each page, under a lease.
    fn expect(&self, buffer: &DeferrableBuffer, byte: u8) {
        let lease = buffer.lease(Access::Shared, self.stream).unwrap();
        let range = lease.address(0);
        self.sim.synchronize_stream(self.queue).unwrap();
        for page in (0..range.len.count()).step_by(2 << 20) {
            let last = (page + (2 << 20)).min(range.len.count()) - 1;
            for at in [page, last] {
                let one = AddrRange::new(range.start + Bytes::new(at), Bytes::new(1));
                assert_eq!(self.sim.peek(one).unwrap(), [byte], "byte {at} of {buffer:?}");
            }
        }
    }

    fn check(&self) {
        self.manager.audit().unwrap();
        self.allocator.audit().unwrap();
        self.pool.audit().unwrap();
        if let Some(store) = &self.store {
            store.audit().unwrap();
        }
        assert!(self.sim.hazards().is_empty(), "{:?}", self.sim.hazards());
        assert!(self.sim.device_loss().is_none(), "{:?}", self.sim.device_loss());
    }

    fn fail(&self, plan: FaultPlan) {
        self.sim.set_faults(plan);
    }
}
