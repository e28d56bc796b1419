//! Measured transfer rates.

use vramp_tiers::DiskStore;
use vramp_tiers::disk::DiskConfig;
use vramp_tiers::links::{LinkKey, Links};
use vramp_tiers::movers::{MeasuredLink, Profile, Profiler, ProfilerConfig, UnmeasuredLink};

use super::*;

const GPUS: [SpaceId; 2] = [SpaceId::gpu(0), SpaceId::gpu(1)];
const HOST: SpaceId = SpaceId::host(0);
const DISK: SpaceId = SpaceId::disk(0);

/// Measures two devices, a host and a disk. The simulator keeps no bytes.
fn measured(sizes: &[Bytes], memory_len: Bytes, disk: Bytes) -> Profile {
    let devices = [(); 2].map(|()| Arc::new(Simulator::card("h200").unwrap()));
    let manager = ReservationManager::new([(DISK, SpaceConfig::disk(disk))]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = DiskConfig { file_size: Bytes::mib(16), ..DiskConfig::default() };
    let store = DiskStore::open(dir.path(), config, &manager.space(DISK).unwrap()).unwrap();
    let pool = pool(&[&devices[0], &devices[1]]);
    let config = ProfilerConfig { sizes: sizes.to_vec(), warm_up: 1, rounds: 3 };
    let mut profiler = Profiler::new(config).disk(&Arc::new(store));
    for (space, device) in GPUS.into_iter().zip(&devices) {
        let mover = Mover::new(driver(device), &pool, SMALL).unwrap();
        profiler = profiler.gpu(space, &mover, memory(device, memory_len));
    }
    let profile = profiler.measure().unwrap();
    drop(profiler);
    assert_eq!(pool.space().total(), Bytes::ZERO, "nothing is kept");
    assert_eq!(manager.space(DISK).unwrap().total(), Bytes::ZERO);
    profile
}

#[test]
fn every_pair_is_measured_each_way_at_every_size_with_positive_numbers() {
    let sizes = [Bytes::kib(4), Bytes::mib(1), Bytes::mib(8)];
    let profile = measured(&sizes, Bytes::mib(16), Bytes::mib(64));
    assert_eq!(profile.unmeasured, []);
    let [one, two] = GPUS;
    let pairs = [(one, HOST), (two, HOST), (one, two), (one, DISK), (two, DISK), (HOST, DISK)];
    let expected = pairs.into_iter().flat_map(|(from, to)| [(from, to), (to, from)]);
    let expected: Vec<_> = expected.flat_map(|way| sizes.map(|size| (way, size))).collect();
    for ((from, to), size) in &expected {
        let is_it = |link: &&MeasuredLink| {
            (link.from, link.to, link.size_bytes) == (*from, *to, size.count())
        };
        let found: Vec<_> = profile.links.iter().filter(is_it).collect();
        let [link] = found[..] else { panic!("{from} to {to}, {size}: {found:?}") };
        assert!(link.took_ns > 0 && link.bytes_per_s > 0, "{link:?}");
    }
    // No link from a disk to itself or to another disk.
    assert_eq!(profile.links.len(), expected.len());
    assert_eq!((profile.step_bytes, profile.rounds), (4 << 20, 3));
    assert_eq!(profile.both_ways.len(), 2 * sizes.len());
}

#[test]
fn the_defaults_are_four_sizes_and_a_tiny_one_in_ten_rounds_after_three() {
    let ProfilerConfig { sizes, warm_up, rounds } = ProfilerConfig::default();
    assert_eq!(sizes[1..], [1, 16, 64, 256].map(Bytes::mib));
    assert_eq!((sizes[0], warm_up, rounds), (Bytes::kib(4), 3, 10));
}

#[test]
fn a_large_move_is_as_fast_as_the_link_and_a_tiny_one_tells_the_latency() {
    let sizes = [Bytes::kib(4), Bytes::mib(64)];
    let profile = measured(&sizes, Bytes::mib(128), Bytes::mib(64));
    let links: Links = profile.rates().collect();
    let rate = |from, to| links.rate(LinkKey { from, to }).unwrap().bytes_per_s as f64 / 1e9;
    // The simulated link has the rate of two streams, because streams do not compete there.
    for (from, to, alone) in [(GPUS[0], HOST, 55.4), (HOST, GPUS[1], 55.6)] {
        let rate = rate(from, to);
        assert!((0.95 * alone..=2.0 * alone).contains(&rate), "{rate} GB/s");
    }
    let both = profile.both_ways.iter().find(|pair| pair.size_bytes == 64 << 20).unwrap();
    assert!(both.bytes_per_s as f64 > 1.7 * 55.4e9, "{both:?}");
    assert_eq!(links.iter().count(), 12, "each way once");
}

#[test]
fn links_that_cannot_be_measured_are_listed_with_the_reason() {
    let profile = measured(&[Bytes::mib(1), Bytes::mib(8)], Bytes::mib(8), Bytes::mib(4));
    let why = |from, to, size: u64| {
        let is_it =
            |way: &&UnmeasuredLink| (way.from, way.to, way.size_bytes) == (from, to, size << 20);
        profile.unmeasured.iter().find(is_it).map(|way| way.reason.as_str())
    };
    assert_eq!(why(GPUS[0], DISK, 1), None);
    assert!(why(GPUS[0], DISK, 8).unwrap().contains("disk"), "{:?}", profile.unmeasured);
    // Both directions at once need twice the memory.
    assert!(why(GPUS[1], HOST, 8).unwrap().contains("fit"));
    assert!(profile.links.iter().any(|link| link.size_bytes == 8 << 20 && link.to == GPUS[1]));
}

#[test]
fn a_profile_is_kept_as_toml_or_json_and_comes_back_the_same() {
    let profile = measured(&[Bytes::mib(1), Bytes::mib(8)], Bytes::mib(8), Bytes::mib(4));
    let toml = toml::to_string(&profile).unwrap();
    assert!(toml.contains("from = \"gpu0\"\nto = \"host0\""), "{toml}");
    assert_eq!(toml::from_str::<Profile>(&toml).unwrap(), profile);
    let json = serde_json::to_string(&profile).unwrap();
    assert_eq!(serde_json::from_str::<Profile>(&json).unwrap(), profile);
    let wrong = toml.replace("gpu0", "gpu").replace("gpu1", "card");
    let error = toml::from_str::<Profile>(&wrong).unwrap_err().to_string();
    assert!(error.contains("is no space"), "{error}");
}
