//! The happens-before checker finds each missing order, and nothing where order exists.
use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Hazard, Kernel, Simulator};
use vramp_driver::{Driver, Handle, HostSlice, MemoryLocation, Stream};

const PAGE: Bytes = Bytes::mib(2);

struct Scene {
    device: Simulator,
    range: AddrRange,
    handle: Handle,
    a: Stream,
    b: Stream,
}

fn scene() -> Scene {
    let device = Simulator::builder().checked().build();
    let range = AddrRange::new(device.reserve(PAGE, PAGE).unwrap(), PAGE);
    let handle = device.create(PAGE, MemoryLocation::Device).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range).unwrap();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    Scene { device, range, handle, a, b }
}

impl Scene {
    fn part(&self, offset: u64, len: u64) -> AddrRange {
        AddrRange::new(self.range.start + Bytes::new(offset), Bytes::new(len))
    }

    fn write(&self, name: &'static str, stream: Stream) {
        self.device.launch(stream, Kernel::new(name).writing(self.range).lasting(1000)).unwrap();
    }

    fn read(&self, name: &'static str, stream: Stream) {
        self.device.launch(stream, Kernel::new(name).reading(self.range).lasting(1000)).unwrap();
    }

    fn event_after(&self, stream: Stream) -> vramp_driver::Event {
        let event = self.device.create_event().unwrap();
        self.device.record(event, stream).unwrap();
        event
    }

    fn the_hazard(&self) -> Hazard {
        let hazards = self.device.hazards();
        assert_eq!(hazards.len(), 1, "{hazards:#?}");
        assert_eq!(self.device.hazards_found(), 1);
        hazards[0].clone()
    }

    fn assert_ordered(&self) {
        assert_eq!(self.device.hazards(), []);
    }
}

#[test]
fn work_on_one_stream_is_ordered() {
    let scene = scene();
    scene.write("w", scene.a);
    scene.read("r", scene.a);
    scene.write("w2", scene.a);
    scene.assert_ordered();
}

#[test]
fn reads_need_no_order_among_themselves() {
    let scene = scene();
    scene.read("r1", scene.a);
    scene.read("r2", scene.b);
    scene.assert_ordered();
}

#[test]
fn a_missing_event_between_two_writes_is_found_and_named() {
    let scene = scene();
    scene.write("old owner", scene.a);
    scene.write("new owner", scene.b);
    let hazard = scene.the_hazard();
    assert_eq!(hazard.earlier.label, "old owner");
    assert_eq!((hazard.earlier.stream, hazard.later.stream), (Some(scene.a), Some(scene.b)));
    assert_eq!(
        hazard.to_string(),
        format!(
            "`new owner` on stream 2 writes {0} unordered after `old owner` on stream 1, which \
             writes {0}: stream 2 waits for no event of stream 1, and the host had not seen `old \
             owner` complete",
            scene.range
        )
    );
}

#[test]
fn a_read_beside_a_write_is_found_both_ways() {
    let first = scene();
    first.write("w", first.a);
    first.read("r", first.b);
    assert!(!first.the_hazard().later.writes);
    let second = scene();
    second.read("r", second.a);
    second.write("w", second.b);
    assert!(!second.the_hazard().earlier.writes);
}

#[test]
fn a_wait_for_an_event_behind_the_work_orders_it() {
    let scene = scene();
    scene.write("w1", scene.a);
    let event = scene.event_after(scene.a);
    scene.device.wait(scene.b, event).unwrap();
    scene.write("w2", scene.b);
    scene.assert_ordered();
}

#[test]
fn order_passes_through_a_third_stream() {
    let scene = scene();
    let c = scene.device.create_stream().unwrap();
    scene.write("w1", scene.a);
    scene.device.wait(c, scene.event_after(scene.a)).unwrap();
    scene.device.wait(scene.b, scene.event_after(c)).unwrap();
    scene.write("w2", scene.b);
    scene.assert_ordered();
}

#[test]
fn an_event_recorded_too_early_is_found() {
    let scene = scene();
    scene.write("w1", scene.a);
    let event = scene.event_after(scene.a);
    scene.write("w2", scene.a);
    scene.device.wait(scene.b, event).unwrap();
    scene.write("w3", scene.b);
    let hazard = scene.the_hazard();
    assert_eq!(hazard.earlier.label, "w2");
    assert!(hazard.missing.contains("recorded too early"), "{hazard}");
    assert!(hazard.missing.contains("1 step before"), "{hazard}");
}

#[test]
fn a_wait_for_another_streams_event_is_found() {
    let scene = scene();
    let c = scene.device.create_stream().unwrap();
    scene.write("w1", scene.a);
    scene.device.wait(scene.b, scene.event_after(c)).unwrap();
    scene.write("w2", scene.b);
    assert!(scene.the_hazard().missing.contains("no event of stream 1"));
}

#[test]
fn a_wait_on_the_wrong_stream_is_found() {
    let scene = scene();
    let c = scene.device.create_stream().unwrap();
    scene.write("w1", scene.a);
    scene.device.wait(c, scene.event_after(scene.a)).unwrap();
    scene.write("w2", scene.b);
    scene.the_hazard();
}

#[test]
fn a_wait_before_the_record_orders_nothing() {
    let scene = scene();
    let event = scene.device.create_event().unwrap();
    scene.write("w1", scene.a);
    scene.device.wait(scene.b, event).unwrap();
    scene.device.record(event, scene.a).unwrap();
    scene.write("w2", scene.b);
    scene.the_hazard();
}

#[test]
fn a_wait_keeps_the_record_it_saw() {
    let scene = scene();
    scene.write("w1", scene.a);
    let event = scene.event_after(scene.a);
    scene.device.wait(scene.b, event).unwrap();
    scene.device.destroy_event(event).unwrap();
    scene.write("w2", scene.b);
    scene.assert_ordered();
}

#[test]
fn a_query_that_was_true_orders_later_work_on_every_stream() {
    let scene = scene();
    scene.write("w1", scene.a);
    let event = scene.event_after(scene.a);
    scene.device.advance(1_000_000);
    assert!(scene.device.query(event).unwrap());
    scene.write("w2", scene.b);
    scene.assert_ordered();
}

#[test]
fn a_query_that_was_false_orders_nothing() {
    let scene = scene();
    let gate = scene.device.gate();
    let held = Kernel::new("held").writing(scene.range).until(gate);
    scene.device.launch(scene.a, held).unwrap();
    let event = scene.event_after(scene.a);
    assert!(!scene.device.query(event).unwrap());
    scene.write("w2", scene.b);
    scene.the_hazard();
}

#[test]
fn having_finished_unseen_orders_nothing() {
    let scene = scene();
    scene.write("w1", scene.a);
    scene.event_after(scene.a);
    scene.device.advance(1_000_000_000);
    scene.write("w2", scene.b);
    scene.the_hazard();
}

#[test]
fn opening_a_gate_is_not_seeing_the_kernel_end() {
    let scene = scene();
    let gate = scene.device.gate();
    let held = Kernel::new("held").writing(scene.range).until(gate);
    scene.device.launch(scene.a, held).unwrap();
    let event = scene.event_after(scene.a);
    scene.device.open(gate);
    scene.write("w2", scene.b);
    assert_eq!(scene.the_hazard().earlier.label, "held");
    assert!(scene.device.query(event).unwrap());
    scene.device.synchronize_stream(scene.b).unwrap();
    scene.write("w3", scene.a);
    scene.the_hazard();
}

#[test]
fn synchronising_a_stream_or_an_event_orders_later_work() {
    let scene = scene();
    scene.write("w1", scene.a);
    scene.device.synchronize_stream(scene.a).unwrap();
    scene.write("w2", scene.b);
    let event = scene.event_after(scene.b);
    scene.device.synchronize_event(event).unwrap();
    scene.write("w3", scene.a);
    scene.assert_ordered();
}

#[test]
fn synchronising_the_wrong_stream_is_found() {
    let scene = scene();
    scene.write("w1", scene.a);
    scene.device.synchronize_stream(scene.b).unwrap();
    scene.write("w2", scene.b);
    scene.the_hazard();
}

#[test]
fn neighbours_do_not_conflict_and_one_shared_byte_does() {
    let scene = scene();
    let launch = |name: &'static str, stream, offset, len| {
        let kernel = Kernel::new(name).writing(scene.part(offset, len));
        scene.device.launch(stream, kernel).unwrap();
    };
    launch("left", scene.a, 0, 512);
    launch("right", scene.b, 512, 512);
    scene.assert_ordered();
    launch("over", scene.b, 511, 1);
    assert_eq!(scene.the_hazard().earlier.label, "left");
}

#[test]
fn two_addresses_of_one_handle_are_one_memory() {
    let scene = scene();
    let twin = AddrRange::new(scene.device.reserve(PAGE, PAGE).unwrap(), PAGE);
    scene.device.map(twin.start, scene.handle).unwrap();
    scene.device.set_access(twin).unwrap();
    scene.write("old address", scene.a);
    scene.device.launch(scene.b, Kernel::new("new address").writing(twin)).unwrap();
    let hazard = scene.the_hazard();
    assert_eq!((hazard.earlier.range, hazard.later.range), (scene.range, twin));
}

#[test]
fn a_large_kernel_meets_every_earlier_one_once() {
    let scene = scene();
    for i in 0..10 {
        let kernel = Kernel::new(format!("small {i}")).writing(scene.part(i * 4096, 512));
        scene.device.launch(scene.a, kernel).unwrap();
    }
    scene.write("large", scene.b);
    let hazards = scene.device.hazards();
    assert_eq!(hazards.len(), 10);
    let mut names: Vec<_> = hazards.iter().map(|hazard| &hazard.earlier.label).collect();
    names.dedup();
    assert_eq!(names.len(), 10);
}

#[test]
fn unmapping_before_completion_was_seen_is_found_even_if_it_is_over() {
    let scene = scene();
    scene.write("w", scene.a);
    scene.device.advance(1_000_000_000);
    scene.device.unmap(scene.range).unwrap();
    let hazard = scene.the_hazard();
    assert_eq!((hazard.later.label.as_str(), hazard.later.stream), ("unmap", None));
    assert!(hazard.missing.contains("seen nothing on stream 1"), "{hazard}");
}

#[test]
fn unmapping_what_was_seen_complete_is_fine_and_so_is_its_next_life() {
    let scene = scene();
    scene.write("w", scene.a);
    scene.device.synchronize_stream(scene.a).unwrap();
    scene.device.unmap(scene.range).unwrap();
    scene.device.release(scene.handle).unwrap();
    let handle = scene.device.create(PAGE, MemoryLocation::Device).unwrap();
    scene.device.map(scene.range.start, handle).unwrap();
    scene.device.set_access(scene.range).unwrap();
    scene.write("next life", scene.b);
    scene.assert_ordered();
}

#[test]
fn an_old_address_goes_while_the_memory_works_on_at_its_new_one() {
    let scene = scene();
    scene.write("w", scene.a);
    scene.device.synchronize_stream(scene.a).unwrap();
    let twin = AddrRange::new(scene.device.reserve(PAGE, PAGE).unwrap(), PAGE);
    scene.device.map(twin.start, scene.handle).unwrap();
    scene.device.set_access(twin).unwrap();
    scene.device.launch(scene.b, Kernel::new("moved").writing(twin).lasting(1 << 40)).unwrap();
    scene.device.unmap(scene.range).unwrap();
    scene.assert_ordered();
    assert_eq!(scene.device.device_loss(), None);
}

#[test]
fn memory_freed_into_the_pool_under_another_streams_work_is_found() {
    let scene = scene();
    let at = scene.device.malloc_async(scene.a, PAGE).unwrap();
    let block = AddrRange::new(at, PAGE);
    scene.device.launch(scene.a, Kernel::new("fine").writing(block)).unwrap();
    scene.assert_ordered();
    scene.device.wait(scene.b, scene.event_after(scene.a)).unwrap();
    scene.device.launch(scene.b, Kernel::new("late reader").reading(block)).unwrap();
    scene.assert_ordered();
    scene.device.free_async(scene.a, at).unwrap();
    let hazard = scene.the_hazard();
    assert_eq!(hazard.earlier.label, "late reader");
    assert_eq!(hazard.later.label, "free-async");
}

#[test]
fn the_pools_own_reuse_across_streams_is_ordered_by_the_pool() {
    let scene = scene();
    for stream in [scene.a, scene.b, scene.a, scene.b] {
        let at = scene.device.malloc_async(stream, PAGE).unwrap();
        let kernel = Kernel::new("user").writing(AddrRange::new(at, PAGE)).lasting(10_000);
        scene.device.launch(stream, kernel).unwrap();
        scene.device.free_async(stream, at).unwrap();
    }
    scene.assert_ordered();
}

#[test]
fn the_host_must_see_a_copy_complete_before_it_touches_its_bytes() {
    let scene = scene();
    let buffer = scene.device.alloc_host(PAGE).unwrap();
    let slice = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    scene.device.write_host(buffer, Bytes::ZERO, &[1]).unwrap();
    scene.device.copy_to_host(scene.a, scene.range.start, slice).unwrap();
    scene.assert_ordered();
    scene.device.advance(1_000_000_000);
    scene.device.read_host(buffer, Bytes::ZERO, &mut [0]).unwrap();
    let hazard = scene.the_hazard();
    assert_eq!(hazard.later.to_string(), "`read-host` on the host");
    scene.device.synchronize_stream(scene.a).unwrap();
    scene.device.read_host(buffer, Bytes::ZERO, &mut [0]).unwrap();
    scene.device.free_host(buffer).unwrap();
    scene.the_hazard();
}

#[test]
fn two_streams_filling_one_host_buffer_are_found() {
    let scene = scene();
    let buffer = scene.device.alloc_host(PAGE).unwrap();
    let slice = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    scene.device.copy_to_host(scene.a, scene.range.start, slice).unwrap();
    scene.device.copy_to_host(scene.b, scene.range.start, slice).unwrap();
    scene.the_hazard();
}

#[test]
fn work_queued_before_its_memory_is_mapped_is_checked_when_it_starts() {
    let scene = scene();
    let late = AddrRange::new(scene.device.reserve(PAGE, PAGE).unwrap(), PAGE);
    let gate = scene.device.gate();
    scene.device.launch(scene.b, Kernel::new("gate").until(gate)).unwrap();
    scene.device.launch(scene.b, Kernel::new("early bird").writing(late)).unwrap();
    scene.device.map(late.start, scene.handle).unwrap();
    scene.device.set_access(late).unwrap();
    scene.write("w", scene.a);
    scene.device.open(gate);
    scene.device.advance(1_000_000);
    assert_eq!(scene.the_hazard().later.label, "early bird");
}

#[test]
fn hazards_are_counted_beyond_those_kept() {
    let scene = scene();
    for _ in 0..1500 {
        scene.write("a", scene.a);
        scene.write("b", scene.b);
    }
    assert_eq!(scene.device.hazards().len(), 1000);
    assert_eq!(scene.device.hazards_found(), 2999);
}

#[test]
fn a_checker_that_is_off_reports_nothing() {
    let device = Simulator::builder().build();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let at = device.malloc_async(a, PAGE).unwrap();
    for stream in [a, b] {
        device.fill(stream, AddrRange::new(at, PAGE), 1).unwrap();
    }
    assert_eq!(device.hazards(), []);
}
