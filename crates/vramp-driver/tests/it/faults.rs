//! Fault injection, and the log and counts of calls.
use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_driver::{
    Call, CaptureMode, Driver, DriverResult, ErrorKind, HandleType, MemoryProperties,
};

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

fn device(plan: FaultPlan) -> Simulator {
    Simulator::builder().seed(42).logged(1000).faults(plan).build()
}

#[test]
fn every_call_can_be_made_to_fail_and_then_changes_nothing() {
    let clean = device(FaultPlan::none());
    program(&clean).unwrap();
    assert_eq!(clean.calls(), 28);
    assert_eq!(clean.live(), Default::default());
    for n in 1..=clean.calls() {
        let failing = device(FaultPlan::nth(n).with_code(304));
        let error = program(&failing).unwrap_err();
        assert_eq!((error.code, error.kind), (304, ErrorKind::Other));
        assert_eq!(error.detail, format!("injected at call {n}"));
        assert_eq!(failing.calls(), n);
        let last = failing.take_log().pop().unwrap();
        assert_eq!((last.call, last.error), (error.call, Some(304)));
        // A device lost at that call did what came before and nothing else.
        let stopped = device(FaultPlan::nth(n).with_code(700));
        program(&stopped).unwrap_err();
        assert_eq!(failing.live(), stopped.live());
        assert_eq!(failing.now_ns(), stopped.now_ns());
    }
}

#[test]
fn a_call_fails_by_kind_and_number_or_from_there_on() {
    let once = device(FaultPlan::nth_of(Call::CreateEvent, 2));
    let fails = |device: &Simulator| device.create_event().is_err();
    assert_eq!([(); 4].map(|()| fails(&once)), [false, true, false, false]);
    let onward = device(FaultPlan::from_nth_of(Call::CreateEvent, 3));
    assert_eq!([(); 4].map(|()| fails(&onward)), [false, false, true, true]);
    onward.set_faults(FaultPlan::none());
    assert!(!fails(&onward));
    let both = device(FaultPlan::nth(1).with_code(900).and(FaultPlan::nth_of(Call::Reserve, 1)));
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
    let device = device(FaultPlan::randomly_of(Call::Map, 1.0));
    device.create_event().unwrap();
    device
        .map(DeviceAddr::new(0), device.create(PAGE, MemoryProperties::DEVICE).unwrap())
        .unwrap_err();
}

#[test]
fn an_injected_loss_is_sticky() {
    let device = device(FaultPlan::nth(1).with_code(719));
    assert!(device.create_event().unwrap_err().is_device_lost());
    let error = device.memory_info().unwrap_err();
    assert_eq!((error.code, error.call), (719, Call::MemoryInfo));
    assert!(device.device_loss().is_some_and(|fault| fault.explanation.contains("injected")));
}

#[test]
fn calls_are_counted_and_logged_failed_ones_too() {
    let device = device(FaultPlan::none());
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
