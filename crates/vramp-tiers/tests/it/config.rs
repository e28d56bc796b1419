//! Configurations: as text, in code, and drawn up for made machines.
use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use vramp_host::NumaNode;
use vramp_host::topology::{NodeInfo, Topology};
use vramp_tiers::config::{
    ConfigError, DiskSpaceConfig, GpuInfo, GpuSelection, GpuSpaceConfig, HostBlocks, HostCapacity,
    HostLayout, HostSpaceConfig, SpaceLevels, TiersBuilder, TiersConfig,
};
use vramp_tiers::host::HostPoolConfig;
use vramp_tiers::space::Level;
use vramp_tiers::{Bytes, HostPool, ReservationManager, SpaceId};

/// A node with so much memory.
fn node(number: u32, memory: Option<Bytes>, cpus: &str) -> NodeInfo {
    NodeInfo { node: NumaNode(number), memory, free: memory, cpus: cpus.parse().ok() }
}

/// Two nodes with 512 GiB each, and one that is a card's memory.
fn machine() -> Topology {
    let nodes = vec![
        node(0, Some(Bytes::gib(512)), "0-63"),
        node(1, Some(Bytes::gib(512)), "64-127"),
        node(8, Some(Bytes::gib(96)), ""),
    ];
    Topology { nodes, ..Topology::default() }
}

/// Four cards of 80 GiB: two at each node.
fn cards() -> Vec<GpuInfo> {
    let card = |index| GpuInfo { index, memory: Bytes::gib(80), node: Some(NumaNode(index / 2)) };
    (0..4).map(card).collect()
}

/// The number, node and capacity of each space of the host.
fn hosts(config: &TiersConfig) -> Vec<(u32, Option<u32>, Bytes)> {
    config.hosts.iter().map(|host| (host.index, host.node, host.capacity)).collect()
}

const FILE: &str = r#"
[[gpu]]
index = 0
capacity = "80GiB"
limit = 0.85
trigger = "60GiB"
stop = 0.5

[[host]]
index = 1
node = 1
capacity = "64GiB"
block = "2MiB"
blocks_per_pool = 64
initial_pools = 4

[[disk]]
index = 7
directory = "/var/tmp/spill"
capacity = 1099511627776
"#;

#[test]
fn a_file_says_amounts_and_parts_and_what_it_leaves_out_is_the_tiers_default() {
    let config = TiersConfig::from_toml(FILE).unwrap();
    let manager = ReservationManager::new(config.spaces()).unwrap();
    let gpu = manager.space(SpaceId::gpu(0)).unwrap().levels();
    assert_eq!(
        (gpu.limit, gpu.trigger, gpu.stop),
        (Bytes::gib(68), Bytes::gib(60), Bytes::gib(40))
    );
    let host = manager.space(SpaceId::host(1)).unwrap().levels();
    assert_eq!((host.granule, host.trigger), (Bytes::mib(2), Bytes::gib(48)));
    assert_eq!(config.hosts[0].pool().initial_pools, 4);
    let disk = manager.space(SpaceId::disk(7)).unwrap();
    assert_eq!((disk.capacity(), disk.limit()), (Bytes::tib(1), Bytes::tib(1)));
    assert_eq!(config.disks[0].directory, PathBuf::from("/var/tmp/spill"));

    let least = TiersConfig::from_toml("[[host]]\nindex = 0\ncapacity = \"1GiB\"").unwrap();
    let HostPoolConfig { block, blocks_per_pool, .. } = least.hosts[0].pool();
    assert_eq!((block, blocks_per_pool), (Bytes::mib(1), 128));
    let pool = |lines: &str| {
        let text = format!("[[host]]\nindex = 0\ncapacity = \"1GiB\"\n{lines}");
        TiersConfig::from_toml(&text).unwrap().hosts[0].pool()
    };
    let usual = pool("");
    assert_eq!((usual.floor(), usual.idle), (Bytes::mib(128), Some(Duration::from_secs(10))));
    let other = pool("keep = \"512MiB\"\nidle_ms = 500");
    assert_eq!((other.floor(), other.idle), (Bytes::mib(512), Some(Duration::from_millis(500))));
    assert_eq!(pool("keep = 0").floor(), Bytes::ZERO);
}

#[test]
fn the_file_in_the_documents_is_one() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiers.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, file) = page.split_once("```toml\n").unwrap();
    let (file, _) = file.split_once("```").unwrap();
    let config = TiersConfig::from_toml(file).unwrap();
    assert_eq!(config.spaces().len(), 3);
    assert_eq!(TiersConfig::from_toml(&config.to_toml().unwrap()), Ok(config));
}

#[test]
fn a_configured_host_is_pooled_as_configured() {
    let text = "[[host]]\nindex = 0\ncapacity = \"8MiB\"\nblock = \"64KiB\"\n\
                blocks_per_pool = 16\ninitial_pools = 2";
    let config = TiersConfig::from_toml(text).unwrap();
    let manager = ReservationManager::new(config.spaces()).unwrap();
    let space = manager.space(SpaceId::host(0)).unwrap();
    let pool = HostPool::new(&space, config.hosts[0].pool(), []).unwrap();
    assert_eq!(pool.block(), Bytes::kib(64));
    assert!(pool.stats().blocks >= 32);
}

#[test]
fn a_mistake_in_a_file_is_an_error_that_names_the_key() {
    let space = |lines: &str| format!("[[gpu]]\nindex = 0\ncapacity = \"8GiB\"\n{lines}");
    let host = |lines: &str| format!("[[host]]\nindex = 3\ncapacity = \"1GiB\"\n{lines}");
    for (text, words) in [
        (String::new(), "no space"),
        ("[[gpu]]\ncapacity = \"8GiB\"".to_owned(), "index"),
        ("[[gpu]]\nindex = 0".to_owned(), "capacity"),
        ("[[gpu]]\nindex = -1\ncapacity = \"8GiB\"".to_owned(), "index"),
        ("[[gpu]]\nindex = 0\ncapacity = \"much\"".to_owned(), "capacity = \"much\""),
        ("[[gpu]]\nindex = 0\ncapacity = -5".to_owned(), "capacity = -5"),
        ("[[tpu]]\nindex = 0".to_owned(), "tpu"),
        (space("limits = 0.5"), "limits"),
        (space("limit = 1"), "0.85"),
        (space("limit = \"0.9\""), "limit = \"0.9\""),
        (space("limit = 1.5"), "[[gpu]] with index 0: the limit"),
        (space("limit = nan"), "no fraction of the capacity"),
        (space("trigger = 0.95"), "[[gpu]] with index 0: the trigger"),
        (space("limit = \"9GiB\""), "above the capacity"),
        (space("stop = 0.75"), "not below the trigger"),
        (format!("{}{}", space(""), space("")), "gpu0 occurs twice"),
        (host("block = \"5KiB\""), "[[host]] with index 3: a block of 5.00 KiB"),
        (host("block = 0"), "multiple of the page size"),
        (host("blocks_per_pool = 0"), "blocks_per_pool is 0"),
        (host("initial_pools = 9"), "initial_pools need 1.12 GiB"),
        (host("initial_pools = 4294967295\nblock = \"1TiB\""), "initial_pools"),
        ("[[disk]]\nindex = 0\ndirectory = \"\"\ncapacity = \"1GiB\"".to_owned(), "directory"),
        ("[[gpu]".to_owned(), "line 1"),
    ] {
        let error = TiersConfig::from_toml(&text).unwrap_err().to_string();
        assert!(error.contains(words), "'{words}' is not in: {error}");
    }
}

#[test]
fn two_disks_in_one_directory_and_more_bytes_than_count_are_refused() {
    let disk = |index, capacity| {
        DiskSpaceConfig::new(index, "/tmp".into(), capacity, SpaceLevels::default())
    };
    let config = TiersConfig {
        disks: vec![disk(0, Bytes::gib(1)), disk(1, Bytes::gib(1))],
        ..Default::default()
    };
    let error = config.check().unwrap_err();
    assert!(error.to_string().contains("both disk0 and disk1"), "{error}");
    let gpu = |index| GpuSpaceConfig::new(index, Bytes::new(u64::MAX), SpaceLevels::default());
    let config = TiersConfig { gpus: vec![gpu(0), gpu(1)], ..Default::default() };
    assert_eq!(config.check(), Err(ConfigError::CapacityOverflow));
}

#[test]
fn a_configuration_for_a_machine_uses_all_cards_and_half_of_the_nodes_near_them() {
    let config = TiersBuilder::new(&machine(), &cards()).build().unwrap();
    let gpus: Vec<(u32, Bytes)> = config.gpus.iter().map(|gpu| (gpu.index, gpu.capacity)).collect();
    assert_eq!(gpus, [0, 1, 2, 3].map(|index| (index, Bytes::gib(80))));
    let half = Bytes::gib(256);
    assert_eq!(hosts(&config), [(0, Some(0), half), (1, Some(1), half)]);
    ReservationManager::new(config.spaces()).unwrap();
    // Cards at one node need no other.
    let config =
        TiersBuilder::new(&machine(), &cards()).gpus(GpuSelection::First(2)).build().unwrap();
    assert_eq!(hosts(&config), [(0, Some(0), half)]);
}

#[test]
fn host_memory_is_shared_by_cards_or_nodes_and_never_more_than_a_node_has() {
    let (machine, cards) = (machine(), cards());
    let builder = TiersBuilder::new(&machine, &cards);
    let each = |level| HostCapacity::PerSpace(level);
    let per_gpu = builder.clone().host_layout(HostLayout::PerGpu).build().unwrap();
    let quarter = Bytes::gib(128);
    assert_eq!(hosts(&per_gpu), [0, 1, 2, 3].map(|card| (card, Some(card / 2), quarter)));
    let total = builder
        .clone()
        .host_layout(HostLayout::PerGpu)
        .host_capacity(HostCapacity::Total(Level::Bytes(Bytes::new((4 << 30) + 12_345))))
        .build()
        .unwrap();
    assert!(total.hosts.iter().all(|host| host.capacity == Bytes::gib(1)), "whole blocks");
    let total = builder.clone().host_capacity(HostCapacity::Total(Level::Fraction(0.25)));
    assert!(total.build().unwrap().hosts.iter().all(|host| host.capacity == Bytes::gib(128)));
    let all = builder.clone().host_capacity(each(Level::Fraction(1.0))).build().unwrap();
    assert_eq!(all.hosts[1].capacity, Bytes::gib(512));
    let error = builder
        .clone()
        .host_layout(HostLayout::PerGpu)
        .host_capacity(each(Level::Bytes(Bytes::gib(300))))
        .build()
        .unwrap_err();
    let asked = Bytes::gib(600);
    assert_eq!(
        error,
        ConfigError::NodeTooSmall { node: NumaNode(0), asked, memory: Bytes::gib(512) }
    );
    let error = builder.host_capacity(each(Level::Fraction(1.5))).build().unwrap_err();
    assert!(
        error.to_string().contains("1.5 is no fraction of the memory of NUMA node 0"),
        "{error}"
    );
}

#[test]
fn a_machine_whose_nodes_nobody_knows_has_one_space_of_so_many_bytes() {
    let unknown = Topology::default();
    let builder = TiersBuilder::new(&unknown, &[]);
    assert_eq!(builder.build(), Err(ConfigError::UnknownNodeMemory { node: None }));
    let config =
        builder.host_capacity(HostCapacity::PerSpace(Level::Bytes(Bytes::gib(1)))).build().unwrap();
    assert_eq!(hosts(&config), [(0, None, Bytes::gib(1))]);
    // With one node there is no question where a card is.
    let small =
        Topology { nodes: vec![node(0, Some(Bytes::gib(8)), "0-3")], ..Topology::default() };
    let lost = [GpuInfo { index: 0, memory: Bytes::gib(1), node: None }];
    let config = TiersBuilder::new(&small, &lost).host_layout(HostLayout::PerGpu).build().unwrap();
    assert_eq!(hosts(&config), [(0, Some(0), Bytes::gib(4))]);
}

#[test]
fn asking_for_more_cards_than_there_are_is_an_error_with_both_numbers() {
    let machine = machine();
    let error = TiersBuilder::new(&machine, &cards()).gpus(GpuSelection::First(5)).build();
    assert_eq!(error, Err(ConfigError::TooManyGpus { asked: 5, there: 4 }));
}

#[test]
fn asking_for_a_card_that_is_not_there_or_for_one_twice_is_an_error() {
    let (machine, cards) = (machine(), cards());
    let these = |indices: &[u32]| {
        TiersBuilder::new(&machine, &cards).gpus(GpuSelection::Listed(indices.to_vec())).build()
    };
    let error = these(&[1, 9]).unwrap_err();
    assert_eq!(error, ConfigError::UnknownGpu { index: 9, there: vec![0, 1, 2, 3] });
    assert_eq!(these(&[2, 2]), Err(ConfigError::DuplicateGpu { index: 2 }));
    let chosen: Vec<u32> = these(&[3, 1]).unwrap().gpus.iter().map(|gpu| gpu.index).collect();
    assert_eq!(chosen, [3, 1]);
}

#[test]
fn more_memory_than_a_card_has_is_an_error_in_bytes_and_in_parts() {
    let machine = machine();
    let usage = |level| TiersBuilder::new(&machine, &cards()).gpu_usage(level).build();
    let asked = Bytes::gib(81);
    assert_eq!(
        usage(Level::Bytes(asked)),
        Err(ConfigError::GpuTooSmall { index: 0, asked, memory: Bytes::gib(80) })
    );
    for part in [0.0, -0.5, 1.01, f64::NAN, f64::INFINITY] {
        assert!(
            matches!(usage(Level::Fraction(part)), Err(ConfigError::InvalidFraction { .. })),
            "{part}"
        );
    }
    assert_eq!(usage(Level::Fraction(0.25)).unwrap().gpus[0].capacity, Bytes::gib(20));
}

/// cuCascade compares what is free below the capacity with levels of the limit, so that a trigger
/// as high as the limit is never reached by reservations.
#[test]
fn a_trigger_as_high_as_the_limit_is_reached_by_reservations_alone() {
    let levels = SpaceLevels {
        limit: Some(Level::Fraction(0.85)),
        trigger: Some(Level::Fraction(0.85)),
        stop: Some(Level::Fraction(0.65)),
    };
    let machine = machine();
    let config = TiersBuilder::new(&machine, &cards()).gpu_levels(levels).build().unwrap();
    let manager = ReservationManager::new(config.spaces()).unwrap();
    let gpu = manager.space(SpaceId::gpu(0)).unwrap();
    let most = gpu.request(gpu.limit() - Bytes::new(256)).now().unwrap();
    assert!(!gpu.should_downgrade());
    let rest = gpu.request(Bytes::new(256)).now().unwrap();
    assert!(gpu.should_downgrade());
    assert_eq!(gpu.amount_to_downgrade(), gpu.limit() - gpu.levels().stop);
    drop((most, rest));
    assert!(gpu.should_stop_downgrading());
}

/// cuCascade makes a limit in bytes a part of the card's memory and takes that part of the
/// capacity: 30 GiB of a card of 80 GiB, half of which is used, become 15 GiB.
#[test]
fn a_limit_in_bytes_stays_that_many_bytes_whatever_part_of_the_card_is_used() {
    let levels = SpaceLevels {
        limit: Some(Level::Bytes(Bytes::gib(30))),
        trigger: Some(Level::Bytes(Bytes::gib(25))),
        stop: Some(Level::Bytes(Bytes::gib(20))),
    };
    let machine = machine();
    let config = TiersBuilder::new(&machine, &cards())
        .gpu_usage(Level::Fraction(0.5))
        .gpu_levels(levels)
        .build()
        .unwrap();
    let manager = ReservationManager::new(config.spaces()).unwrap();
    let gpu = manager.space(SpaceId::gpu(0)).unwrap();
    assert_eq!((gpu.capacity(), gpu.limit()), (Bytes::gib(40), Bytes::gib(30)));
    assert!(gpu.request(Bytes::gib(30)).now().is_ok());
    // And a fraction is one of the half that is used, not of the whole card.
    let levels = SpaceLevels { limit: Some(Level::Fraction(0.8)), ..SpaceLevels::default() };
    let config = TiersBuilder::new(&machine, &cards())
        .gpu_usage(Level::Bytes(Bytes::gib(40)))
        .gpu_levels(levels)
        .build()
        .unwrap();
    assert_eq!(config.gpus[0].space().levels().unwrap().limit, Bytes::gib(32));
}

#[test]
fn pools_that_exceed_what_the_host_may_hold_are_an_error() {
    let machine = machine();
    let error = TiersBuilder::new(&machine, &cards())
        .host_blocks(HostBlocks { initial_pools: 4096, ..HostBlocks::default() })
        .build()
        .unwrap_err();
    let (pools, capacity) = (Bytes::gib(512), Bytes::gib(256));
    assert_eq!(
        error,
        ConfigError::InitialPoolsTooLarge { space: SpaceId::host(0), pools, capacity }
    );
}

fn any_level() -> impl Strategy<Value = Option<Level>> {
    prop_oneof![
        Just(None),
        (0.0..=1.0f64).prop_map(|part| Some(Level::Fraction(part))),
        any::<u64>().prop_map(|count| Some(Level::Bytes(Bytes::new(count)))),
    ]
}

fn any_levels() -> impl Strategy<Value = SpaceLevels> {
    (any_level(), any_level(), any_level()).prop_map(|(limit, trigger, stop)| SpaceLevels {
        limit,
        trigger,
        stop,
    })
}

prop_compose! {
    fn any_config()(
        device in prop::option::of("(auto|cuda|sim:h200x2)"),
        gpus in prop::collection::vec((any::<u32>(), any::<u64>(), any_levels()), 0..3),
        hosts in prop::collection::vec(
            (any::<u32>(), any::<Option<u32>>(), 0u64..1 << 50, any_levels(), 0u64..1 << 40),
            0..3,
        ),
        disks in prop::collection::vec((any::<u32>(), "\\PC{0,12}", 0u64..1 << 60, any_levels()), 0..3),
    ) -> TiersConfig {
        let gpu = |(index, capacity, levels)| {
            GpuSpaceConfig::new(index, Bytes::new(capacity), levels)
        };
        let host = |(index, node, capacity, levels, block)| {
            let blocks = HostBlocks { block: Bytes::new(block), ..HostBlocks::default() };
            HostSpaceConfig::new(index, node, Bytes::new(capacity), levels).with_blocks(blocks)
        };
        let disk = |(index, directory, capacity, levels): (u32, String, u64, _)| {
            DiskSpaceConfig::new(index, directory.into(), Bytes::new(capacity), levels)
        };
        TiersConfig {
            device,
            gpus: gpus.into_iter().map(gpu).collect(),
            hosts: hosts.into_iter().map(host).collect(),
            disks: disks.into_iter().map(disk).collect(),
            ..TiersConfig::default()
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_back_to_the_byte_or_refused_by_the_same_check(config in any_config()) {
        let text = config.to_toml().unwrap();
        match (config.check(), TiersConfig::from_toml(&text)) {
            (Ok(()), read) => {
                prop_assert_eq!(read.as_ref(), Ok(&config));
                prop_assert!(ReservationManager::new(config.spaces()).is_ok());
            }
            (Err(expected), read) => prop_assert_eq!(read.unwrap_err(), expected),
        }
    }

    #[test]
    fn no_text_breaks_the_reader(text in "(\\[\\[(gpu|host|disk)\\]\\]\n)?(index|capacity|limit|block) = \\PC{0,20}") {
        let _ = TiersConfig::from_toml(&text);
    }
}
