//! The model of the driver's own stream-ordered pool.
use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::{Driver, ErrorKind, PoolUsage};

const MIB: fn(u64) -> Bytes = Bytes::mib;

fn usage(device: &Simulator) -> (u64, u64) {
    let PoolUsage { reserved, used, .. } = device.pool_usage().unwrap();
    (reserved.count() >> 20, used.count() >> 20)
}

#[test]
fn it_grows_by_whole_granules_and_charges_the_card() {
    let device = Simulator::builder().memory(MIB(256)).build();
    let stream = device.create_stream().unwrap();
    device.malloc_async(stream, MIB(1)).unwrap();
    assert_eq!(usage(&device), (32, 1));
    device.malloc_async(stream, MIB(40)).unwrap();
    assert_eq!(usage(&device), (64, 41));
    assert_eq!(device.memory_info().unwrap().free, MIB(192));
}

#[test]
fn a_hit_costs_what_was_measured_and_growth_more() {
    let device = Simulator::builder().build();
    let stream = device.create_stream().unwrap();
    let timed = |len| {
        let before_ns = device.now_ns();
        let at = device.malloc_async(stream, len).unwrap();
        (at, device.now_ns() - before_ns)
    };
    let (at, growth_ns) = timed(MIB(64));
    assert_eq!(growth_ns, 450 + 2 * 46_000);
    device.free_async(stream, at).unwrap();
    assert_eq!(timed(MIB(64)), (at, 450));
}

#[test]
fn fragments_do_not_make_it_grow() {
    let device = Simulator::builder().memory(MIB(128)).build();
    let stream = device.create_stream().unwrap();
    let blocks: Vec<_> = (0..64).map(|_| device.malloc_async(stream, MIB(2)).unwrap()).collect();
    for at in blocks.iter().step_by(2) {
        device.free_async(stream, *at).unwrap();
    }
    device.malloc_async(stream, MIB(64)).unwrap();
    assert_eq!(usage(&device), (128, 128));
    let full = device.malloc_async(stream, MIB(2)).unwrap_err();
    assert_eq!(full.kind, ErrorKind::OutOfMemory);
    assert_eq!(usage(&device), (128, 128));
}

#[test]
fn synchronising_gives_back_what_is_above_the_threshold() {
    let device = Simulator::builder().build();
    let stream = device.create_stream().unwrap();
    let round = || {
        let at = device.malloc_async(stream, MIB(320)).unwrap();
        device.free_async(stream, at).unwrap();
        device.synchronize_stream(stream).unwrap();
        usage(&device)
    };
    assert_eq!(round(), (0, 0));
    device.set_pool_threshold(MIB(64)).unwrap();
    assert_eq!(round(), (64, 0));
    device.set_pool_threshold(Bytes::new(u64::MAX)).unwrap();
    assert_eq!(round(), (320, 0));
    device.trim_pool(MIB(100)).unwrap();
    assert_eq!(usage(&device), (96, 0));
    assert_eq!(device.pool_usage().unwrap().reserved_peak, MIB(320));
}

#[test]
fn neighbours_coalesce_so_that_everything_can_be_allocated_again() {
    let device = Simulator::builder().memory(MIB(64)).build();
    let stream = device.create_stream().unwrap();
    device.set_pool_threshold(Bytes::new(u64::MAX)).unwrap();
    let blocks: Vec<_> = (0..64).map(|_| device.malloc_async(stream, MIB(1)).unwrap()).collect();
    for at in blocks.iter().skip(1).step_by(2).chain(blocks.iter().step_by(2)) {
        device.free_async(stream, *at).unwrap();
    }
    assert_eq!(device.malloc_async(stream, MIB(64)).unwrap(), blocks[0]);
    assert_eq!(device.live().pool_bytes, MIB(64));
}

#[test]
fn memory_of_another_stream_is_reused_behind_its_work() {
    let device = Simulator::builder().memory(MIB(64)).checked().build();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let at = device.malloc_async(a, MIB(64)).unwrap();
    let block = AddrRange::new(at, MIB(64));
    device.launch(a, Kernel::new("slow").writing(block).lasting(1_000_000)).unwrap();
    device.free_async(a, at).unwrap();
    assert_eq!(device.malloc_async(b, MIB(64)).unwrap(), at);
    device.launch(b, Kernel::new("next").writing(block).lasting(1)).unwrap();
    device.synchronize_stream(b).unwrap();
    assert!(device.now_ns() > 1_000_000);
    assert_eq!(device.hazards(), []);
}

#[test]
fn freed_pool_memory_is_refused_to_fills_and_lost_to_kernels() {
    let device = Simulator::builder().build();
    let stream = device.create_stream().unwrap();
    let at = device.malloc_async(stream, MIB(2)).unwrap();
    device.fill(stream, AddrRange::new(at, MIB(2)), 1).unwrap();
    device.free_async(stream, at).unwrap();
    device.synchronize_stream(stream).unwrap();
    let freed = AddrRange::new(at, MIB(2));
    assert_eq!(device.fill(stream, freed, 1).unwrap_err().kind, ErrorKind::InvalidUse);
    device.launch(stream, Kernel::new("late").writing(freed)).unwrap();
    assert!(device.synchronize_stream(stream).unwrap_err().is_device_lost());
    assert!(device.device_loss().unwrap().explanation.contains("stream-ordered pool"));
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    let device = Simulator::builder().build();
    let stream = device.create_stream().unwrap();
    for len in [Bytes::ZERO, Bytes::new(u64::MAX)] {
        let error = device.malloc_async(stream, len).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidUse, "{len}");
    }
}
