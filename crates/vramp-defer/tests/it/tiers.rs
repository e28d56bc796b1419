//! Tiers opened from a configuration: their parts, what keeps them open, and what is refused.

use std::sync::Arc;
use std::time::Duration;

use vramp_alloc::{Allocator, Config, Driver};
use vramp_defer::{Access, SpillConfig, Tiers, TiersError, TiersOptions};
use vramp_driver::sim::Simulator;
use vramp_tiers::config::{
    ConfigError, DiskSpaceConfig, GpuSpaceConfig, HostBlocks, HostSpaceConfig, PeerConfig,
    SpaceLevels, TiersConfig,
};
use vramp_tiers::{Bytes, SpaceId, Tier};

use super::{MIB, PIECE, simulator};

/// A simulated machine of `cards` with 64 MiB each, and a host of 256 MiB.
fn config(cards: u32) -> TiersConfig {
    let gpu = |index| GpuSpaceConfig::new(index, MIB(64), SpaceLevels::default());
    let blocks = HostBlocks { blocks_per_pool: 16, ..HostBlocks::default() };
    let host = HostSpaceConfig::new(0, None, MIB(256), SpaceLevels::default());
    TiersConfig {
        device: Some(format!("sim:h200x{cards}")),
        gpus: (0..cards).map(gpu).collect(),
        hosts: vec![host.with_blocks(blocks)],
        ..TiersConfig::default()
    }
}

fn options() -> TiersOptions {
    let spill = SpillConfig { piece: PIECE, ..SpillConfig::default() };
    TiersOptions { spill, ..TiersOptions::default() }
}

/// Tiers on a simulator that checks every access.
fn checked() -> (Arc<Simulator>, Arc<Allocator>, Tiers) {
    let sim = Arc::new(simulator().build());
    let settings = Config { limit: Some(MIB(64)), ..Config::default() };
    let allocator = Arc::new(Allocator::new(sim.clone(), settings).unwrap());
    let tiers = options().on(Arc::clone(&allocator), &config(1)).unwrap();
    (sim, allocator, tiers)
}

fn bytes_of(nth: usize) -> Vec<u8> {
    (0..4096).map(|byte| (byte * 7 + nth * 31) as u8).collect()
}

#[test]
fn buffers_beyond_card_and_host_come_back_from_the_disk_to_the_byte() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(1);
    config.hosts[0].capacity = MIB(128);
    let disk = DiskSpaceConfig::new(0, directory.path().into(), MIB(512), SpaceLevels::default());
    config.disks.push(disk);
    let tiers = options().open(&config).unwrap();
    let buffers: Vec<_> = (0..20).map(|_| tiers.buffer(MIB(16)).unwrap()).collect();
    for (nth, buffer) in buffers.iter().enumerate() {
        buffer.write(MIB(15), &bytes_of(nth)).unwrap();
    }
    assert!(tiers.manager().census().disk_copies > Bytes::ZERO);
    for (nth, buffer) in buffers.iter().enumerate() {
        let mut back = vec![0; 4096];
        buffer.read(MIB(15), &mut back).unwrap();
        assert_eq!(back, bytes_of(nth), "buffer {nth}");
    }
    for tier in [Tier::Gpu, Tier::Host, Tier::Disk] {
        assert!(tiers.space(tier).unwrap().total() > Bytes::ZERO, "{tier:?}");
    }
    tiers.manager().audit().unwrap();
}

#[test]
fn cards_of_one_configuration_share_host_memory_and_reservations() {
    let cards = options().open_all(&config(2)).unwrap();
    assert_eq!(cards.iter().map(|card| card.gpu_space().id().index).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(cards[1].device().info().ordinal, 1);
    let buffers: Vec<_> = cards
        .iter()
        .flat_map(|card| (0..12).map(|_| card.buffer(MIB(8)).unwrap()).collect::<Vec<_>>())
        .collect();
    for (nth, buffer) in buffers.iter().enumerate() {
        buffer.write(Bytes::ZERO, &bytes_of(nth)).unwrap();
    }
    // Each card evicted at least four of its twelve buffers to the one host space.
    let host = cards[0].reservations().space(SpaceId::host(0)).unwrap();
    assert!(host.total() >= MIB(64), "{host:?}");
    assert_eq!(host.total(), cards[1].space(Tier::Host).unwrap().total());
    for (nth, buffer) in buffers.iter().enumerate() {
        let mut back = vec![0; 4096];
        buffer.read(Bytes::ZERO, &mut back).unwrap();
        assert_eq!(back, bytes_of(nth), "buffer {nth}");
    }
}

#[test]
fn opening_one_card_reserves_in_that_card_alone() {
    let tiers = Tiers::open(&config(2)).unwrap();
    assert!(tiers.reservations().space(SpaceId::gpu(0)).is_some());
    assert!(tiers.reservations().space(SpaceId::gpu(1)).is_none());
}

#[test]
fn a_buffer_that_outlives_its_tiers_is_evicted_for_mallocs_and_read_back() {
    let (sim, allocator, tiers) = checked();
    let buffer = tiers.buffer(MIB(48)).unwrap();
    buffer.write(MIB(40), &bytes_of(1)).unwrap();
    let stream = tiers.stream();
    drop(tiers);
    // What makes room for the buffer and for others is there as long as the buffer.
    let own = allocator.create_stream().unwrap();
    let block = allocator.malloc(MIB(60), own).unwrap();
    assert!(!buffer.is_resident());
    allocator.free(block, own).unwrap();
    let lease = buffer.lease(Access::Shared, stream).unwrap();
    lease.end();
    let mut back = vec![0; 4096];
    buffer.read(MIB(40), &mut back).unwrap();
    assert_eq!(back, bytes_of(1));
    drop(buffer);
    assert!(allocator.stream(stream).is_none(), "the tiers' stream ended with the last buffer");
    assert_eq!(Arc::strong_count(&allocator), 1);
    allocator.audit().unwrap();
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn handles_may_be_dropped_in_any_order() {
    for order in 0..24 {
        let (sim, allocator, tiers) = checked();
        let buffer = tiers.buffer(MIB(8)).unwrap();
        let group = tiers.manager().group();
        let tenant = group.buffer(Bytes::kib(64)).unwrap();
        let queue = tiers.queue();
        let set = [(&buffer, Access::Exclusive), (&tenant, Access::Exclusive)];
        let lease = tiers.lease(&set, tiers.stream()).unwrap();
        sim.fill(queue, lease.address(0), 1).unwrap();
        sim.fill(queue, lease.address(1), 2).unwrap();
        let mut handles: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(tiers), Box::new((buffer, tenant)), Box::new(group), Box::new(lease)];
        for (left, choice) in [(4, order / 6), (3, order % 6 / 2), (2, order % 2), (1, 0)] {
            assert_eq!(handles.len(), left);
            drop(handles.remove(choice));
        }
        assert_eq!(Arc::strong_count(&allocator), 1, "order {order}");
        allocator.audit().unwrap();
        assert!(sim.hazards().is_empty(), "order {order}: {:?}", sim.hazards());
    }
}

#[test]
fn an_allocator_without_a_configured_gpu_pays_from_its_own_limit() {
    let (_, allocator, tiers) = checked();
    drop(tiers);
    let without = TiersConfig { gpus: Vec::new(), device: None, ..config(1) };
    let tiers = Tiers::on(Arc::clone(&allocator), &without).unwrap();
    assert_eq!(tiers.gpu_space().capacity(), MIB(64));
    assert_eq!(tiers.gpu_space().limit(), MIB(64), "a limit of 90 % is of a named GPU");
    let buffer = tiers.buffer(MIB(64)).unwrap();
    drop(tiers.lease(&[(&buffer, Access::Exclusive)], tiers.stream()).unwrap());
    drop((buffer, tiers));
    let mut other = config(1);
    other.gpus[0].index = 5;
    let error = Tiers::on(allocator, &other).unwrap_err();
    assert!(matches!(error, TiersError::OtherGpu { ordinal: 0 }), "{error}");
    assert!(error.to_string().contains("index = 0"), "{error}");
}

#[test]
fn contents_go_to_free_memory_of_the_cards_that_the_configuration_names() {
    for opens_both in [false, true] {
        let mut config = config(2);
        config.peers = vec![PeerConfig::new(1, MIB(64)), PeerConfig::new(0, MIB(64))];
        let mut cards = match opens_both {
            true => options().open_all(&config).unwrap(),
            // The card 1 is no GPU of the configuration, and no allocator is opened on it.
            false => {
                config.gpus.truncate(1);
                vec![options().open(&config).unwrap()]
            }
        };
        let buffers: Vec<_> = (0..6).map(|_| cards[0].buffer(MIB(16)).unwrap()).collect();
        for (byte, buffer) in (0..).zip(&buffers) {
            buffer.write(Bytes::ZERO, &vec![byte; 16 << 20]).unwrap();
        }
        let stats = cards[0].manager().stats();
        assert!(stats.to_peer_bytes >= MIB(40).count() && stats.to_host_bytes == 0, "{stats:?}");
        if opens_both {
            assert_eq!(cards[1].gpu_space().total(), MIB(64), "the other card's space is charged");
            // The other card needs its space: contents move on to the host.
            let needs = cards[1].gpu_space().request(MIB(48)).deadline(Duration::from_secs(5));
            let reserved = needs.wait().unwrap();
            assert!(cards[0].manager().stats().moved_on_bytes >= MIB(32).count());
            drop(reserved);
            // It may be closed first.
            drop(cards.pop());
        }
        for (byte, buffer) in (0..).zip(&buffers) {
            let mut back = vec![99; 16 << 20];
            buffer.read(Bytes::ZERO, &mut back).unwrap();
            assert!(vramp_testing::is_filled(&back, byte), "buffer {byte}");
        }
        cards[0].manager().audit().unwrap();
    }
}

#[test]
fn a_configuration_says_after_how_many_reads_in_place_a_buffer_is_restored() {
    let config = TiersConfig { promote_after: Some(1), ..config(1) };
    let text = config.to_toml().unwrap();
    assert_eq!(TiersConfig::from_toml(&text).unwrap(), config);
    let tiers = options().open(&config).unwrap();
    let buffer = tiers.buffer(MIB(16)).unwrap();
    buffer.readable_while_spilled().unwrap();
    buffer.write(Bytes::ZERO, &vec![5; 16 << 20]).unwrap();
    assert_eq!(tiers.manager().spill(MIB(16)).freed, MIB(16));
    for is_in_place in [true, false] {
        let lease = buffer.read_in_place(tiers.stream()).unwrap();
        assert_eq!(lease.is_in_place(0), is_in_place);
    }
}

#[test]
fn what_cannot_be_opened_is_refused_with_what_to_do() {
    let refused = |config: TiersConfig| Tiers::open(&config).unwrap_err();
    let error = refused(TiersConfig { gpus: Vec::new(), ..config(1) });
    assert!(matches!(error, TiersError::NoGpu), "{error}");
    let error = refused(TiersConfig { hosts: Vec::new(), ..config(1) });
    assert!(matches!(error, TiersError::NoHost), "{error}");
    let error = refused(TiersConfig { device: Some("sim:h900".to_owned()), ..config(1) });
    assert!(matches!(error, TiersError::Device(_)), "{error}");
    let error = refused(TiersConfig { device: Some("sim:h200".to_owned()), ..config(2) }.second());
    assert!(error.to_string().contains("no device 1 of 'sim:h200'"), "{error}");
    let mut large = config(1);
    large.gpus[0].capacity = Bytes::tib(1);
    let error = refused(large);
    assert!(matches!(error, TiersError::Config(ConfigError::GpuTooSmall { .. })), "{error}");
    let mut far = config(1);
    far.peers.push(PeerConfig::new(3, MIB(64)));
    let error = refused(far.clone());
    assert!(error.to_string().contains("[[peer]] with index 3: card 3 is no peer"), "{error}");
    far.peers.push(PeerConfig::new(3, MIB(1)));
    let error = refused(far);
    assert!(
        matches!(error, TiersError::Config(ConfigError::DuplicatePeer { index: 3 })),
        "{error}"
    );
    let error = Tiers::from_toml("[[gpu]]\nindex = 0\nsize = 3").unwrap_err();
    assert!(matches!(error, TiersError::Config(ConfigError::Toml { .. })), "{error}");
    let mut nowhere = config(1);
    let directory = "/nonexistent/vramp".into();
    nowhere.disks.push(DiskSpaceConfig::new(0, directory, MIB(64), SpaceLevels::default()));
    let error = refused(nowhere);
    assert!(matches!(error, TiersError::Disk(_)), "{error}");
    let spill = SpillConfig { piece: MIB(1), ..SpillConfig::default() };
    let error = TiersOptions { spill, ..options() }.open(&config(1)).unwrap_err();
    assert!(matches!(error, TiersError::Manager(_)), "{error}");
}

/// Leaves out the first GPU.
trait Second {
    fn second(self) -> TiersConfig;
}

impl Second for TiersConfig {
    fn second(mut self) -> TiersConfig {
        self.gpus.remove(0);
        self
    }
}

#[test]
fn tiers_are_used_by_many_threads() {
    let (sim, allocator, tiers) = checked();
    std::thread::scope(|scope| {
        for nth in 0..4 {
            let tiers = tiers.clone();
            scope.spawn(move || {
                let buffer = tiers.buffer(MIB(24)).unwrap();
                buffer.write(MIB(20), &bytes_of(nth)).unwrap();
                let mut back = vec![0; 4096];
                buffer.read(MIB(20), &mut back).unwrap();
                assert_eq!(back, bytes_of(nth));
            });
        }
    });
    tiers.manager().audit().unwrap();
    allocator.audit().unwrap();
    assert!(sim.hazards().is_empty(), "{:?}", sim.hazards());
}

#[test]
fn a_small_copy_takes_a_block_of_the_host_as_long_as_the_configuration_says() {
    for block in [MIB(1), Bytes::kib(64)] {
        let mut config = config(1);
        let blocks = HostBlocks { block, blocks_per_pool: 16, ..HostBlocks::default() };
        config.hosts[0] = config.hosts[0].clone().with_blocks(blocks);
        let tiers = options().open(&config).unwrap();
        let group = tiers.manager().group();
        let own = (0..16).map(|_| tiers.buffer(Bytes::kib(4)).unwrap());
        let members = (0..16).map(|_| group.buffer(Bytes::kib(4)).unwrap());
        let buffers: Vec<_> = own.chain(members).collect();
        for (nth, buffer) in buffers.iter().enumerate() {
            buffer.write(Bytes::ZERO, &bytes_of(nth)).unwrap();
        }
        for buffer in &buffers {
            buffer.spill().unwrap();
        }
        assert!(buffers.iter().all(|buffer| !buffer.is_resident()));
        assert_eq!(tiers.space(Tier::Host).unwrap().total(), block * 32, "blocks of {block}");
        for (nth, buffer) in buffers.iter().enumerate() {
            let mut back = vec![0; 4096];
            buffer.read(Bytes::ZERO, &mut back).unwrap();
            assert!(back == bytes_of(nth), "buffer {nth} in blocks of {block}");
        }
        drop((buffers, group));
        assert_eq!(tiers.space(Tier::Host).unwrap().total(), Bytes::ZERO);
        tiers.manager().audit().unwrap();
    }
}
