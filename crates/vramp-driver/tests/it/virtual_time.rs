//! Virtual time, injected failures, counts of calls, and how a machine grows.

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{Contents, CostTable, FaultPlan, Kernel, Simulator};
use vramp_driver::{
    Call, CaptureMode, DeviceCopy, Driver, DriverResult, ErrorKind, HandleType, MemoryLocation,
    MemoryProperties,
};

// --- Streams, events and gates in virtual time ---

fn device() -> Simulator {
    Simulator::builder().contents(Contents::Stored).build()
}

#[test]
fn host_time_is_the_sum_of_what_calls_cost() {
    let device = device();
    let page = Bytes::mib(2);
    let at = device.reserve(page * 4, page).unwrap();
    assert_eq!(device.now_ns(), 4_000);
    let costs = CostTable::h200();
    let before = device.now_ns();
    let handles: Vec<_> =
        (0..4).map(|_| device.create(page, MemoryProperties::DEVICE).unwrap()).collect();
    let run =
        costs.handle_ns(Call::Create, page, false) + 3 * costs.handle_ns(Call::Create, page, true);
    assert_eq!(device.now_ns() - before, run);
    for (n, handle) in (0..).zip(handles) {
        device.map(at + page * n, handle).unwrap();
    }
    let before = device.now_ns();
    device.unmap(AddrRange::new(at, page * 4)).unwrap();
    assert_eq!(device.now_ns() - before, costs.range_ns(Call::Unmap, &[page; 4]));
}

#[test]
fn a_refused_call_takes_no_time() {
    let device = device();
    device.create(Bytes::new(1), MemoryProperties::DEVICE).unwrap_err();
    assert_eq!(device.now_ns(), 0);
}

#[test]
fn kernels_run_beside_the_host_and_synchronising_waits_for_them() {
    let device = device();
    let stream = device.create_stream().unwrap();
    let event = device.create_event().unwrap();
    device.launch(stream, Kernel::new("k").lasting(1_000_000)).unwrap();
    let launched_ns = device.now_ns();
    device.record(event, stream).unwrap();
    assert!(!device.query(event).unwrap());
    assert!(device.now_ns() < launched_ns + 1_000);
    device.synchronize_event(event).unwrap();
    assert_eq!(device.now_ns(), launched_ns + 1_000_000 + 210);
    assert!(device.query(event).unwrap());
}

#[test]
fn work_on_one_stream_adds_up_and_streams_run_beside_each_other() {
    let device = device();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    for stream in [a, a, b] {
        device.launch(stream, Kernel::new("k").lasting(1_000_000)).unwrap();
    }
    device.synchronize_stream(b).unwrap();
    let b_done_ns = device.now_ns();
    device.synchronize_stream(a).unwrap();
    assert!((1_000_000..1_020_000).contains(&b_done_ns), "{b_done_ns}");
    assert!((2_000_000..2_020_000).contains(&device.now_ns()), "{}", device.now_ns());
}

#[test]
fn a_waiting_stream_starts_when_the_event_is_reached() {
    let device = device();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let event = device.create_event().unwrap();
    device.launch(a, Kernel::new("first").lasting(1_000_000)).unwrap();
    device.record(event, a).unwrap();
    device.launch(a, Kernel::new("not waited for").lasting(1 << 40)).unwrap();
    device.wait(b, event).unwrap();
    device.launch(b, Kernel::new("second").lasting(500_000)).unwrap();
    device.synchronize_stream(b).unwrap();
    assert!((1_500_000..1_510_000).contains(&device.now_ns()), "{}", device.now_ns());
}

#[test]
fn a_gate_holds_its_kernel_until_it_is_opened() {
    let device = device();
    let stream = device.create_stream().unwrap();
    let event = device.create_event().unwrap();
    let gate = device.gate();
    device.launch(stream, Kernel::new("held").until(gate)).unwrap();
    device.record(event, stream).unwrap();
    device.advance(1_000_000_000);
    assert!(!device.query(event).unwrap());
    device.open(gate);
    assert!(device.query(event).unwrap());
    device.launch(stream, Kernel::new("passes").until(gate)).unwrap();
    device.synchronize_stream(stream).unwrap();
}

#[test]
fn waiting_for_a_closed_gate_is_an_error_that_names_the_blocked_streams() {
    let device = device();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let event = device.create_event().unwrap();
    let gate = device.gate();
    device.launch(a, Kernel::new("held").until(gate)).unwrap();
    device.record(event, a).unwrap();
    device.wait(b, event).unwrap();
    let error = device.synchronize_stream(b).unwrap_err();
    assert_eq!((error.code, error.kind), (600, ErrorKind::Other));
    assert!(error.detail.contains("stream 1 runs `held`, whose gate is closed"), "{error}");
    assert!(error.detail.contains("stream 2 waits for stream 1"), "{error}");
    device.open(gate);
    device.synchronize_stream(b).unwrap();
}

#[test]
fn bytes_change_when_the_work_is_over_not_when_it_is_queued() {
    let device = device();
    let stream = device.create_stream().unwrap();
    let at = device.malloc_async(stream, Bytes::mib(2)).unwrap();
    let range = AddrRange::new(at, Bytes::mib(2));
    device.fill(stream, range, 1).unwrap();
    device.synchronize_stream(stream).unwrap();
    let gate = device.gate();
    device.launch(stream, Kernel::new("held").until(gate)).unwrap();
    device.fill(stream, range, 2).unwrap();
    assert_eq!(device.peek(range).unwrap()[0], 1);
    device.open(gate);
    device.synchronize_stream(stream).unwrap();
    assert_eq!(device.peek(range).unwrap()[0], 2);
}

#[test]
fn copies_take_as_long_as_measured() {
    let device = device();
    let stream = device.create_stream().unwrap();
    let len = Bytes::mib(64);
    let at = device.malloc_async(stream, len).unwrap();
    let buffer = device.alloc_host(len).unwrap();
    let before_ns = device.now_ns();
    let slice = vramp_driver::HostSlice { buffer, offset: Bytes::ZERO, len };
    device.copy_to_device(stream, slice, at).unwrap();
    device.synchronize_stream(stream).unwrap();
    let gb_per_s = len.count() as f64 / (device.now_ns() - before_ns) as f64;
    assert!((55.0..55.6).contains(&gb_per_s), "{gb_per_s}");
}

#[test]
fn copies_in_one_direction_share_the_bus_and_those_in_the_other_do_not() {
    let device = device();
    let len = Bytes::mib(64);
    let buffer = device.alloc_host(len * 2).unwrap();
    let halves = [0, 1].map(|half| {
        let stream = device.create_stream().unwrap();
        let at = device.malloc_async(stream, len).unwrap();
        let slice = vramp_driver::HostSlice { buffer, offset: len * half, len };
        (stream, at, slice)
    });
    let took_ns = |queue: &dyn Fn()| {
        let before_ns = device.now_ns();
        queue();
        halves.iter().for_each(|(stream, ..)| device.synchronize_stream(*stream).unwrap());
        device.now_ns() - before_ns
    };
    let [(a, first, low), (b, second, high)] = halves;
    let one = took_ns(&|| device.copy_to_host(a, first, low).unwrap());
    let both = took_ns(&|| {
        device.copy_to_host(a, first, low).unwrap();
        device.copy_to_host(b, second, high).unwrap();
    });
    assert!((1.98..2.02).contains(&(both as f64 / one as f64)), "{both} for two, {one} for one");
    let crossing = took_ns(&|| {
        device.copy_to_host(a, first, low).unwrap();
        device.copy_to_device(b, high, second).unwrap();
    });
    assert!((0.98..1.02).contains(&(crossing as f64 / one as f64)), "{crossing} across, {one}");
}

/// Addresses with a handle behind them.
fn mapped(device: &Simulator, len: Bytes, place: MemoryLocation) -> AddrRange {
    let range = AddrRange::new(device.reserve(len, Bytes::mib(2)).unwrap(), len);
    device.map(range.start, device.create(len, MemoryProperties::at(place)).unwrap()).unwrap();
    device.set_access(range, &[]).unwrap();
    range
}

#[test]
fn host_memory_at_the_cards_addresses_is_as_fast_as_the_bus() {
    let device = Simulator::builder().build();
    let stream = device.create_stream().unwrap();
    let len = Bytes::mib(512);
    let [host, other] = [0, 0].map(|node| mapped(&device, len, MemoryLocation::HostNuma(node)));
    let [card, second] = [MemoryLocation::Device; 2].map(|place| mapped(&device, len, place));
    let rate = |queue: &dyn Fn()| {
        let before_ns = device.now_ns();
        queue();
        device.synchronize_stream(stream).unwrap();
        len.count() as f64 / (device.now_ns() - before_ns) as f64
    };
    let copy = |from: AddrRange, to: AddrRange| {
        device.copy(stream, DeviceCopy { from: from.start, to: to.start, len }).unwrap();
    };
    for (from, to) in [(host, card), (card, host), (host, other)] {
        let gb_per_s = rate(&|| copy(from, to));
        assert!((54.9..55.3).contains(&gb_per_s), "{gb_per_s}");
    }
    assert!(rate(&|| copy(card, second)) > 1000.0, "the card's own memory is not slowed down");
    let read = rate(&|| device.launch(stream, Kernel::new("sum").reading(host)).unwrap());
    assert!((50.5..51.5).contains(&read), "{read}");
    let both = Kernel::new("map").reading(host).writing(other);
    let both = rate(&|| device.launch(stream, both.clone()).unwrap());
    assert!((50.5..51.5).contains(&both), "both directions at once: {both}");
    let half = AddrRange::new(host.start, Bytes::mib(256));
    let half = rate(&|| device.launch(stream, Kernel::new("sum").reading(half)).unwrap());
    assert!((101.0..103.0).contains(&half), "what is touched counts: {half}");
    let slow = Kernel::new("sum").reading(host).lasting(100_000_000);
    let slow = rate(&|| device.launch(stream, slow.clone()).unwrap());
    assert!((5.3..5.4).contains(&slow), "a kernel that computes longer lasts longer: {slow}");
}

#[test]
fn work_is_as_fast_as_the_memory_that_it_finds_when_it_starts() {
    let device = Simulator::builder().build();
    let (stream, len) = (device.create_stream().unwrap(), Bytes::mib(256));
    let range = mapped(&device, len, MemoryLocation::Device);
    let host = device.create(len, MemoryProperties::at(MemoryLocation::HostNuma(0))).unwrap();
    device.unmap(range).unwrap();
    device.map(range.start, host).unwrap();
    let gate = device.gate();
    device.launch(stream, Kernel::new("first").until(gate)).unwrap();
    device.launch(stream, Kernel::new("sum").reading(range)).unwrap();
    device.set_access(range, &[]).unwrap();
    device.open(gate);
    let before_ns = device.now_ns();
    device.synchronize_stream(stream).unwrap();
    let gb_per_s = len.count() as f64 / (device.now_ns() - before_ns) as f64;
    assert!((50.5..51.5).contains(&gb_per_s), "{gb_per_s}");
}

#[test]
fn destroyed_streams_finish_their_work() {
    let device = device();
    let stream = device.create_stream().unwrap();
    let event = device.create_event().unwrap();
    device.launch(stream, Kernel::new("last").lasting(1_000)).unwrap();
    device.record(event, stream).unwrap();
    device.destroy_stream(stream).unwrap();
    device.synchronize_event(event).unwrap();
    assert!(device.query(event).unwrap());
    assert_eq!(device.live().streams, 0);
}

#[test]
fn identical_programs_take_identical_time() {
    let run = || {
        let device = device();
        let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        let event = device.create_event().unwrap();
        for i in 0..100 {
            device.launch(a, Kernel::new("k").lasting(i * 37)).unwrap();
            device.record(event, a).unwrap();
            device.wait(b, event).unwrap();
            device.launch(b, Kernel::new("k").lasting(i * 11)).unwrap();
        }
        device.synchronize_stream(b).unwrap();
        device.now_ns()
    };
    assert_eq!(run(), run());
}

// --- Fault injection, and the log and counts of calls ---

const PAGE: Bytes = Bytes::mib(2);

/// Makes one of each call that memory and graphs need. Stops at the first error.
fn program(device: &dyn Driver) -> DriverResult<()> {
    let at = device.alloc_memory(PAGE)?;
    device.free_memory(at)?;
    let range = AddrRange::new(device.reserve(PAGE, PAGE)?, PAGE);
    let shared = MemoryProperties { handle_type: HandleType::PosixFd, ..MemoryProperties::DEVICE };
    let handle = device.create(PAGE, shared)?;
    let imported = device.import(&device.export(handle)?, PAGE)?;
    device.release(imported)?;
    device.map(range.start, handle)?;
    device.set_access(range, &[])?;
    device.revoke_access(range, &[])?;
    device.export_dma_buf(range)?;
    let stream = device.create_stream()?;
    device.fill(stream, range, 1)?;
    device.begin_capture(stream, CaptureMode::Global)?;
    device.fill(stream, range, 2)?;
    let info = device.capture_info(stream)?.unwrap();
    device.node_dependencies(info.dependencies[0])?;
    let graph = device.end_capture(stream)?;
    device.graph_nodes(graph)?;
    let exec = device.instantiate(graph)?;
    device.destroy_graph(graph)?;
    device.launch_graph(exec, stream)?;
    device.destroy_graph_exec(exec)?;
    device.synchronize_stream(stream)?;
    device.destroy_stream(stream)?;
    device.unmap(range)?;
    device.release(handle)?;
    device.free_addresses(range)
}

fn faulty(plan: FaultPlan) -> Simulator {
    Simulator::builder().seed(42).logged(1000).faults(plan).build()
}

#[test]
fn every_call_can_be_made_to_fail_and_then_changes_nothing() {
    let clean = faulty(FaultPlan::none());
    program(&clean).unwrap();
    assert_eq!(clean.calls(), 28);
    assert_eq!(clean.live(), Default::default());
    for n in 1..=clean.calls() {
        let failing = faulty(FaultPlan::nth(n).with_code(304));
        let error = program(&failing).unwrap_err();
        assert_eq!((error.code, error.kind), (304, ErrorKind::Other));
        assert_eq!(error.detail, format!("injected at call {n}"));
        assert_eq!(failing.calls(), n);
        let last = failing.take_log().pop().unwrap();
        assert_eq!((last.call, last.error), (error.call, Some(304)));
        // A device lost at that call did what came before and nothing else.
        let stopped = faulty(FaultPlan::nth(n).with_code(700));
        program(&stopped).unwrap_err();
        assert_eq!(failing.live(), stopped.live());
        assert_eq!(failing.now_ns(), stopped.now_ns());
    }
}

#[test]
fn a_call_fails_by_kind_and_number_or_from_there_on() {
    let once = faulty(FaultPlan::nth_of(Call::CreateEvent, 2));
    let fails = |device: &Simulator| device.create_event().is_err();
    assert_eq!([(); 4].map(|()| fails(&once)), [false, true, false, false]);
    let onward = faulty(FaultPlan::from_nth_of(Call::CreateEvent, 3));
    assert_eq!([(); 4].map(|()| fails(&onward)), [false, false, true, true]);
    onward.set_faults(FaultPlan::none());
    assert!(!fails(&onward));
    let both = faulty(FaultPlan::nth(1).with_code(900).and(FaultPlan::nth_of(Call::Reserve, 1)));
    assert_eq!(both.create_event().unwrap_err().kind, ErrorKind::Capturing);
    assert!(both.reserve(PAGE, PAGE).unwrap_err().is_out_of_memory());
}

#[test]
fn random_failures_come_from_the_seed() {
    let failures = |seed| {
        let device = Simulator::builder().seed(seed).faults(FaultPlan::randomly(0.25)).build();
        (0..1000).map(|_| device.create_event().is_err()).collect::<Vec<_>>()
    };
    assert_eq!(failures(1), failures(1));
    assert_ne!(failures(1), failures(2));
    let count = failures(1).iter().filter(|failed| **failed).count();
    assert!((200..300).contains(&count), "{count}");
    let device = faulty(FaultPlan::randomly_of(Call::Map, 1.0));
    device.create_event().unwrap();
    device
        .map(DeviceAddr::new(0), device.create(PAGE, MemoryProperties::DEVICE).unwrap())
        .unwrap_err();
}

#[test]
fn an_injected_loss_is_sticky() {
    let device = faulty(FaultPlan::nth(1).with_code(719));
    assert!(device.create_event().unwrap_err().is_device_lost());
    let error = device.memory_info().unwrap_err();
    assert_eq!((error.code, error.call), (719, Call::MemoryInfo));
    assert!(device.device_loss().is_some_and(|fault| fault.explanation.contains("injected")));
}

#[test]
fn calls_are_counted_and_logged_failed_ones_too() {
    let device = faulty(FaultPlan::none());
    program(&device).unwrap();
    device.create(Bytes::new(1), MemoryProperties::DEVICE).unwrap_err();
    assert_eq!((device.calls(), device.calls_of(Call::Create)), (29, 2));
    let log: Vec<_> = device.take_log().iter().map(|entry| entry.to_string()).collect();
    assert_eq!(log.len(), 29);
    assert_eq!(log[2], "reserve 2.00 MiB");
    assert_eq!(log[7], "map 0x10000000000");
    assert_eq!(log[12], "fill 0x10000000000 2.00 MiB on stream 1");
    assert_eq!(log[28], "create 1 B failed (1)");
    assert_eq!(device.take_log(), []);
}

#[test]
fn a_short_log_keeps_the_newest_calls() {
    let device = Simulator::builder().logged(2).build();
    program(&device).unwrap();
    let calls: Vec<_> = device.take_log().iter().map(|entry| entry.call).collect();
    assert_eq!(calls, [Call::Release, Call::FreeAddresses]);
}

// --- How a machine grows: counts of objects, and what is left when they are gone ---

#[test]
fn eight_devices_run_ten_thousand_streams_each() {
    const DEVICES: usize = 8;
    const STREAMS: usize = 10_000;
    let devices = Simulator::builder().build_machine(DEVICES);
    let streams: Vec<Vec<_>> = devices
        .iter()
        .map(|device| (0..STREAMS).map(|_| device.create_stream().unwrap()).collect())
        .collect();
    // All streams of all devices have work at the same time, and every second one waits for its
    // neighbour.
    let gate = devices[0].gate();
    for (device, streams) in devices.iter().zip(&streams) {
        for pair in streams.chunks(2) {
            let event = device.create_event().unwrap();
            device.launch(pair[0], Kernel::new("first").until(gate)).unwrap();
            device.record(event, pair[0]).unwrap();
            device.wait(pair[1], event).unwrap();
            device.launch(pair[1], Kernel::new("second").lasting(10)).unwrap();
            device.destroy_event(event).unwrap();
        }
        assert_eq!(device.live().streams, STREAMS);
    }
    devices[0].open(gate);
    devices[0].advance(100);
    for (device, streams) in devices.iter().zip(&streams) {
        let before = device.now_ns();
        for stream in streams {
            device.synchronize_stream(*stream).unwrap();
            device.destroy_stream(*stream).unwrap();
        }
        // The work was done when the host's clock had passed it: synchronising only costs the call.
        let costs = vramp_driver::sim::CostTable::h200();
        let calls = [vramp_driver::Call::SynchronizeStream, vramp_driver::Call::DestroyStream];
        let each: u64 = calls.into_iter().map(|call| costs.fixed_ns(call)).sum();
        assert_eq!(device.now_ns() - before, each * STREAMS as u64);
        assert_eq!(device.live(), Default::default());
    }
}

#[test]
fn ten_thousand_mappings_with_access_of_all_peers_leave_nothing() {
    const PAGES: u64 = 10_000;
    let devices = Simulator::builder().build_machine(8);
    let [first, rest @ ..] = devices.as_slice() else { panic!("there are eight") };
    let before: Vec<_> = devices.iter().map(Simulator::live).collect();
    let range = AddrRange::new(first.reserve(PAGE * PAGES, PAGE).unwrap(), PAGE * PAGES);
    let handles: Vec<_> = (0..PAGES)
        .map(|at| {
            let handle = first.create(PAGE, MemoryProperties::DEVICE).unwrap();
            first.map(range.start + PAGE * at, handle).unwrap();
            handle
        })
        .collect();
    first.set_access(range, &first.info().peers).unwrap();
    for peer in rest {
        let stream = peer.create_stream().unwrap();
        peer.fill(stream, range, 1).unwrap();
        peer.synchronize_stream(stream).unwrap();
        peer.destroy_stream(stream).unwrap();
    }
    first.revoke_access(range, &[3]).unwrap();
    first.unmap(range).unwrap();
    handles.into_iter().for_each(|handle| first.release(handle).unwrap());
    first.free_addresses(range).unwrap();
    assert_eq!(devices.iter().map(Simulator::live).collect::<Vec<_>>(), before);
}
