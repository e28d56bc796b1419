//! What the simulator does beside the rules of virtual memory that a card has too, which the suite of conformance
//! checks on it: what it counts, what it says of a lost device, and how its addresses run out.
//!
//! The part of a card's memory that the driver, the context and libraries of a process take.
//!
//! The model of the driver's own stream-ordered pool.
//!
//! Memory of other code of the process: refused to fills and copies unless it is adopted.

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{CardModel, Contents, CostSpec, CostTable, FaultPlan, Kernel, Simulator};
use vramp_driver::{
    Call, DeviceCopy, Driver, DriverError, ErrorKind, Handle, HostSlice, MemoryInfo,
    MemoryLocation, MemoryProperties, PoolUsage, Stream,
};

const PAGE: Bytes = Bytes::mib(2);

fn small() -> Simulator {
    Simulator::builder()
        .memory(Bytes::mib(16))
        .address_space(Bytes::mib(64))
        .contents(Contents::Stored)
        .build()
}

fn range(start: DeviceAddr, len: Bytes) -> AddrRange {
    AddrRange::new(start, len)
}

/// Reserved, created, mapped and accessible.
fn memory(device: &Simulator, len: Bytes) -> (AddrRange, Handle) {
    let range = range(device.reserve(len, PAGE).unwrap(), len);
    let handle = device.create(len, MemoryProperties::DEVICE).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    (range, handle)
}

fn kind<T: std::fmt::Debug>(result: vramp_driver::DriverResult<T>) -> (i32, ErrorKind) {
    let error = result.unwrap_err();
    (error.code, error.kind)
}

const INVALID: (i32, ErrorKind) = (1, ErrorKind::InvalidUse);
const UNKNOWN: (i32, ErrorKind) = (400, ErrorKind::InvalidUse);
const FULL: (i32, ErrorKind) = (2, ErrorKind::OutOfMemory);
const LOST: (i32, ErrorKind) = (700, ErrorKind::DeviceLost);

#[test]
fn addresses_run_out_and_are_freed() {
    let device = small();
    let all: Vec<_> = (0..8).map(|_| device.reserve(Bytes::mib(8), PAGE).unwrap()).collect();
    assert_eq!(kind(device.reserve(PAGE, PAGE)), FULL);
    for at in all.iter().step_by(2).chain(all.iter().skip(1).step_by(2)) {
        device.free_addresses(range(*at, Bytes::mib(8))).unwrap();
    }
    assert_eq!(device.reserve(Bytes::mib(64), PAGE).unwrap(), all[0]);
}

#[test]
fn an_h200_gives_fifteen_reservations_of_8_tib() {
    let device = Simulator::card("sim:h200").unwrap();
    for _ in 0..15 {
        device.reserve(Bytes::tib(8), PAGE).unwrap();
    }
    assert_eq!(kind(device.reserve(Bytes::tib(8), PAGE)), FULL);
}

#[test]
fn the_card_is_full_when_its_memory_is_given_out() {
    let device = small();
    let first = device.create(Bytes::mib(10), MemoryProperties::DEVICE).unwrap();
    let before = device.memory_info().unwrap();
    assert_eq!((before.free, before.total), (Bytes::mib(6), Bytes::mib(16)));
    assert_eq!(kind(device.create(Bytes::mib(8), MemoryProperties::DEVICE)), FULL);
    assert_eq!(device.memory_info().unwrap(), before);
    device.create(Bytes::mib(8), MemoryProperties::at(MemoryLocation::HostNuma(0))).unwrap();
    assert_eq!(device.memory_info().unwrap(), before);
    device.release(first).unwrap();
    device.create(Bytes::mib(16), MemoryProperties::DEVICE).unwrap();
}

fn lost_by(touch: impl FnOnce(&Simulator, Stream, AddrRange)) -> String {
    let device = small();
    let (range, _) = memory(&device, PAGE);
    let stream = device.create_stream().unwrap();
    touch(&device, stream, range);
    assert_eq!(kind(device.synchronize_stream(stream)), LOST);
    assert_eq!(kind(device.memory_info()), LOST, "a lost device stays lost");
    assert_eq!(kind(device.create_event()), LOST);
    let fault = device.device_loss().expect("a lost device says why");
    assert_eq!(fault.code, 700);
    fault.explanation
}

#[test]
fn touching_unmapped_memory_loses_the_device_and_names_work_and_address() {
    let explanation = lost_by(|device, stream, page| {
        let beyond = range(page.start, Bytes::mib(4));
        device.launch(stream, Kernel::new("gemm").reading(beyond)).unwrap();
    });
    assert!(explanation.contains("`gemm` on stream 1"), "{explanation}");
    assert!(explanation.contains("not mapped"), "{explanation}");
}

#[test]
fn touching_a_mapping_without_access_loses_the_device() {
    let explanation = lost_by(|device, stream, page| {
        let handle = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
        let at = device.reserve(PAGE, PAGE).unwrap();
        assert_eq!(at, page.start + PAGE);
        device.map(at, handle).unwrap();
        device.fill(stream, range(at, PAGE), 1).unwrap();
    });
    assert!(explanation.contains("without access"), "{explanation}");
}

#[test]
fn unmapping_under_running_work_loses_the_device() {
    let explanation = lost_by(|device, stream, page| {
        device.launch(stream, Kernel::new("slow").writing(page).lasting(1_000_000)).unwrap();
        assert_eq!(kind(device.unmap(page)), LOST);
    });
    assert!(explanation.contains("unmapped while `slow` on stream 1"), "{explanation}");
}

#[test]
fn unmapping_under_queued_work_loses_the_device() {
    lost_by(|device, stream, page| {
        let gate = device.gate();
        device.launch(stream, Kernel::new("gate").until(gate)).unwrap();
        device.launch(stream, Kernel::new("later").writing(page)).unwrap();
        assert_eq!(kind(device.unmap(page)), LOST);
        device.open(gate);
    });
}

#[test]
fn memory_may_be_mapped_between_queueing_and_start() {
    let device = small();
    let range = range(device.reserve(PAGE, PAGE).unwrap(), PAGE);
    let stream = device.create_stream().unwrap();
    let gate = device.gate();
    device.launch(stream, Kernel::new("gate").until(gate)).unwrap();
    device.fill(stream, range, 9).unwrap();
    let handle = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    device.open(gate);
    device.synchronize_stream(stream).unwrap();
    assert_eq!(device.peek(range).unwrap()[0], 9);
}

#[test]
fn copies_go_through_pinned_memory_and_across_handles() {
    let device = small();
    let at = device.reserve(Bytes::mib(8), PAGE).unwrap();
    for page in 0..4 {
        let handle = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
        device.map(at + PAGE * page, handle).unwrap();
    }
    device.set_access(range(at, Bytes::mib(8)), &[]).unwrap();
    let stream = device.create_stream().unwrap();
    let host = device.alloc_host(Bytes::mib(3)).unwrap();
    let pattern: Vec<u8> = (0..3u32 << 20).map(|i| (i % 253) as u8).collect();
    device.write_host(host, Bytes::ZERO, &pattern).unwrap();
    let all = HostSlice { buffer: host, offset: Bytes::ZERO, len: Bytes::mib(3) };
    device.copy_to_device(stream, all, at + Bytes::mib(1)).unwrap();
    let copy = DeviceCopy { from: at + Bytes::mib(1), to: at + Bytes::mib(5), len: Bytes::mib(3) };
    device.copy(stream, copy).unwrap();
    device.synchronize_stream(stream).unwrap();
    device.write_host(host, Bytes::ZERO, &vec![0; 3 << 20]).unwrap();
    device.copy_to_host(stream, at + Bytes::mib(5), all).unwrap();
    device.synchronize_stream(stream).unwrap();
    let mut back = vec![0; 3 << 20];
    device.read_host(host, Bytes::ZERO, &mut back).unwrap();
    assert!(back == pattern);
    device.free_host(host).unwrap();
    assert_eq!(kind(device.free_host(host)), UNKNOWN);
}

#[test]
fn overlapping_copies_and_foreign_host_ranges_are_refused() {
    let device = small();
    let (range, _) = memory(&device, Bytes::mib(4));
    let stream = device.create_stream().unwrap();
    let copy = DeviceCopy { from: range.start, to: range.start + Bytes::mib(1), len: PAGE };
    assert_eq!(kind(device.copy(stream, copy)), INVALID);
    let host = device.alloc_host(Bytes::kib(4)).unwrap();
    let beyond = HostSlice { buffer: host, offset: Bytes::kib(2), len: Bytes::kib(4) };
    assert_eq!(kind(device.copy_to_device(stream, beyond, range.start)), INVALID);
    assert_eq!(kind(device.copy_to_host(stream, range.start, beyond)), INVALID);
    assert_eq!(kind(device.read_host(host, Bytes::new(u64::MAX), &mut [0])), INVALID);
    assert_eq!(kind(device.alloc_host(Bytes::ZERO)), INVALID);
}

#[test]
fn host_memory_in_use_by_a_copy_is_not_freed() {
    let device = small();
    let (range, _) = memory(&device, PAGE);
    let stream = device.create_stream().unwrap();
    let host = device.alloc_host(PAGE).unwrap();
    let all = HostSlice { buffer: host, offset: Bytes::ZERO, len: PAGE };
    device.copy_to_device(stream, all, range.start).unwrap();
    assert_eq!(kind(device.free_host(host)), INVALID);
    device.synchronize_stream(stream).unwrap();
    device.free_host(host).unwrap();
}

#[test]
fn stale_and_foreign_ids_are_refused() {
    let device = small();
    let stream = device.create_stream().unwrap();
    let event = device.create_event().unwrap();
    device.destroy_stream(stream).unwrap();
    device.destroy_event(event).unwrap();
    assert_eq!(kind(device.destroy_stream(stream)), UNKNOWN);
    assert_eq!(kind(device.synchronize_stream(stream)), UNKNOWN);
    assert_eq!(kind(device.destroy_event(event)), UNKNOWN);
    assert_eq!(kind(device.query(event)), UNKNOWN);
    assert_eq!(kind(device.release(Handle::from_number(77))), UNKNOWN);
    assert_eq!(kind(device.malloc_async(Stream::from_number(0), PAGE)), UNKNOWN);
    assert_eq!(kind(device.launch(Stream::from_number(u64::MAX), Kernel::new("k"))), UNKNOWN);
}

fn info(device: &Simulator) -> MemoryInfo {
    device.memory_info().expect("a query")
}

#[test]
fn an_h200_has_what_a_recorded_process_could_use() {
    let device = Simulator::card("h200").expect("the card is known");
    // A PyTorch process ran out of memory with this much free and reserved.
    let recorded = Bytes::new(133_063_376_896 + 16_317_939_712);
    let MemoryInfo { free, total } = info(&device);
    assert_eq!(total, Bytes::mib(143_771));
    assert!(free.count().abs_diff(recorded.count()) < 1 << 20, "{free} of {recorded}");
}

#[test]
fn creation_fails_beyond_what_is_usable() {
    for card in CardModel::all() {
        let device = Simulator::builder().card(card).build();
        assert_eq!(device.info().limits.memory, card.memory);
        assert_eq!(info(&device), MemoryInfo { free: card.usable(), total: card.memory });
        let usable = card.usable().round_down(card.page);
        let handle = device.create(usable, MemoryProperties::DEVICE).expect("it is usable");
        assert_eq!(info(&device).free, card.usable() - usable);
        let more = device.create(card.page, MemoryProperties::DEVICE).expect_err("it is full");
        assert!(more.is_out_of_memory());
        assert!(device.alloc_memory(card.page).expect_err("it is full").is_out_of_memory());
        let stream = device.create_stream().expect("a stream");
        let more = device.malloc_async(stream, card.page).expect_err("it is full");
        assert!(more.is_out_of_memory());
        device.release(handle).expect("it is the only use");
        assert_eq!(info(&device).free, card.usable());
    }
}

#[test]
fn usable_memory_and_context_are_set_by_the_caller() {
    let card = CardModel::find("rtx4090").expect("the card is known");
    let builder = || Simulator::builder().card(card);
    let half = Bytes::gib(12);
    let device = builder().usable(half).build();
    assert_eq!(info(&device), MemoryInfo { free: half, total: card.memory });
    let device = builder().usable(Bytes::gib(30)).build();
    assert_eq!(info(&device), MemoryInfo { free: Bytes::gib(30), total: Bytes::gib(30) });
    let device = builder().context(Bytes::gib(2)).build();
    assert_eq!(info(&device).free, card.memory - Bytes::gib(2));
    let device = builder().context(Bytes::gib(99)).build();
    assert_eq!(info(&device).free, Bytes::ZERO);
    let device = builder().memory(half).build();
    assert_eq!(info(&device), MemoryInfo { free: half, total: half });
}

#[test]
fn a_cost_file_may_describe_a_whole_card() {
    let h200 = CostTable::h200();
    let spec = CostSpec {
        name: "mine".to_owned(),
        memory_mib: Some(12_288),
        context_mib: Some(700),
        ..h200.spec().clone()
    };
    let table = CostTable::new(spec).expect("the numbers are those of the H200");
    let device = Simulator::builder().described_by(table).build();
    assert_eq!(device.info().id, "sim:mine");
    assert_eq!(device.info().name, "mine (simulated)");
    let (free, total) = (Bytes::mib(12_288 - 700), Bytes::mib(12_288));
    assert_eq!(info(&device), MemoryInfo { free, total });
    // Without memory it is a table of costs for another card.
    let device = Simulator::builder().described_by(h200).build();
    assert_eq!(device.info().id, "sim:h200");
}

fn elsewhere(device: &Simulator, len: Bytes) -> AddrRange {
    AddrRange::new(device.alloc_elsewhere(len).unwrap(), len)
}

fn refused<T: std::fmt::Debug>(result: Result<T, DriverError>) {
    assert_eq!(result.unwrap_err().kind, ErrorKind::InvalidUse);
}

#[test]
fn fills_and_copies_refuse_memory_of_other_code_until_it_is_adopted() {
    let device = Simulator::builder().contents(Contents::Stored).build();
    let stream = device.create_stream().unwrap();
    let theirs = elsewhere(&device, PAGE);
    let own = device.alloc_memory(PAGE).unwrap();
    let buffer = device.alloc_host(PAGE).unwrap();
    let host = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    let work = || {
        [
            device.fill(stream, theirs, 7),
            device.copy(stream, DeviceCopy { from: theirs.start, to: own, len: PAGE }),
            device.copy(stream, DeviceCopy { from: own, to: theirs.start, len: PAGE }),
            device.copy_to_host(stream, theirs.start, host),
            device.copy_to_device(stream, host, theirs.start),
        ]
    };
    work().into_iter().for_each(refused);
    assert!(!device.owns(theirs));
    device.adopt_memory(theirs).unwrap();
    assert!(device.owns(theirs));
    for accepted in work() {
        accepted.unwrap();
    }
    device.synchronize_stream(stream).unwrap();
    assert_eq!(device.peek(theirs).unwrap()[..3], [7; 3]);
    refused(device.free_memory(theirs.start));
    assert!(device.forget_memory(theirs) && !device.forget_memory(theirs));
    work().into_iter().for_each(refused);
    device.free_elsewhere(theirs.start).unwrap();
    assert_eq!(device.device_loss(), None);
}

#[test]
fn memory_is_adopted_once_and_by_the_device_that_it_is_on() {
    let machine = Simulator::builder().build_machine(2);
    let (device, other) = (&machine[0], &machine[1]);
    let theirs = elsewhere(device, PAGE * 2);
    refused(other.adopt_memory(theirs));
    refused(device.adopt_memory(AddrRange::new(theirs.start, Bytes::ZERO)));
    refused(device.adopt_memory(AddrRange::new(theirs.start + PAGE, PAGE * 2)));
    refused(device.adopt_memory(AddrRange::new(DeviceAddr::new(64), PAGE)));
    let first = AddrRange::new(theirs.start, PAGE);
    device.adopt_memory(first).unwrap();
    refused(device.adopt_memory(theirs));
    device.adopt_memory(AddrRange::new(theirs.start + PAGE, PAGE)).unwrap();
    assert_eq!((device.live().adoptions, other.live().adoptions), (2, 0));
    assert!(!other.forget_memory(first) && !device.forget_memory(theirs));
    assert!(!device.owns(theirs), "work is checked in each adopted range alone");
}

#[test]
fn own_memory_is_adopted_as_a_whole_and_stays_own() {
    let device = Simulator::builder().build();
    let own = AddrRange::new(device.reserve(PAGE * 2, PAGE).unwrap(), PAGE * 2);
    refused(device.adopt_memory(AddrRange::new(own.start + PAGE, PAGE * 2)));
    device.adopt_memory(own).unwrap();
    refused(device.adopt_memory(AddrRange::new(own.start + PAGE, PAGE)));
    assert!(device.forget_memory(own) && device.owns(own));
}

#[test]
fn a_failed_adoption_leaves_nothing_and_an_ended_one_leaves_nothing() {
    let device = Simulator::builder().build();
    let theirs = elsewhere(&device, PAGE);
    device.set_faults(FaultPlan::nth_of(Call::AdoptMemory, 1).with_code(1));
    refused(device.adopt_memory(theirs));
    assert!(!device.owns(theirs));
    for step in 0..100_000 {
        let part = AddrRange::new(theirs.start + Bytes::new(step % 512 * 4096), Bytes::kib(4));
        device.adopt_memory(part).unwrap();
        assert!(device.forget_memory(part));
    }
    assert_eq!(device.live().adoptions, 0);
}

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
