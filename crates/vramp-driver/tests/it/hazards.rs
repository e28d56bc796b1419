//! The race detector finds each missing order, and nothing where order exists.
use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Hazard, Kernel, Simulator};
use vramp_driver::{Driver, ErrorKind, Handle, HostSlice, MemoryProperties, Stream};

const PAGE: Bytes = Bytes::mib(2);

struct Rig {
    device: Simulator,
    range: AddrRange,
    handle: Handle,
    a: Stream,
    b: Stream,
}

fn rig() -> Rig {
    let device = Simulator::builder().checked().build();
    let range = AddrRange::new(device.reserve(PAGE, PAGE).unwrap(), PAGE);
    let handle = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    Rig { device, range, handle, a, b }
}

impl Rig {
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
    let rig = rig();
    rig.write("w", rig.a);
    rig.read("r", rig.a);
    rig.write("w2", rig.a);
    rig.assert_ordered();
}

#[test]
fn reads_need_no_order_among_themselves() {
    let rig = rig();
    rig.read("r1", rig.a);
    rig.read("r2", rig.b);
    rig.assert_ordered();
}

#[test]
fn a_missing_event_between_two_writes_is_found_and_named() {
    let rig = rig();
    rig.write("old owner", rig.a);
    rig.write("new owner", rig.b);
    let hazard = rig.the_hazard();
    assert_eq!(hazard.earlier.label, "old owner");
    assert_eq!((hazard.earlier.stream, hazard.later.stream), (Some(rig.a), Some(rig.b)));
    assert_eq!(
        hazard.to_string(),
        format!(
            "`new owner` on stream 2 writes {0} unordered after `old owner` on stream 1, which \
             writes {0}: stream 2 waits for no event of stream 1, and the host had not observed the \
             completion of `old owner`",
            rig.range
        )
    );
}

#[test]
fn a_read_beside_a_write_is_found_both_ways() {
    let first = rig();
    first.write("w", first.a);
    first.read("r", first.b);
    assert!(!first.the_hazard().later.writes);
    let second = rig();
    second.read("r", second.a);
    second.write("w", second.b);
    assert!(!second.the_hazard().earlier.writes);
}

#[test]
fn a_wait_for_an_event_behind_the_work_orders_it() {
    let rig = rig();
    rig.write("w1", rig.a);
    let event = rig.event_after(rig.a);
    rig.device.wait(rig.b, event).unwrap();
    rig.write("w2", rig.b);
    rig.assert_ordered();
}

#[test]
fn order_passes_through_a_third_stream() {
    let rig = rig();
    let c = rig.device.create_stream().unwrap();
    rig.write("w1", rig.a);
    rig.device.wait(c, rig.event_after(rig.a)).unwrap();
    rig.device.wait(rig.b, rig.event_after(c)).unwrap();
    rig.write("w2", rig.b);
    rig.assert_ordered();
}

#[test]
fn an_event_recorded_too_early_is_found() {
    let rig = rig();
    rig.write("w1", rig.a);
    let event = rig.event_after(rig.a);
    rig.write("w2", rig.a);
    rig.device.wait(rig.b, event).unwrap();
    rig.write("w3", rig.b);
    let hazard = rig.the_hazard();
    assert_eq!(hazard.earlier.label, "w2");
    assert!(hazard.missing.contains("recorded too early"), "{hazard}");
    assert!(hazard.missing.contains("1 step before"), "{hazard}");
}

#[test]
fn a_wait_for_another_streams_event_is_found() {
    let rig = rig();
    let c = rig.device.create_stream().unwrap();
    rig.write("w1", rig.a);
    rig.device.wait(rig.b, rig.event_after(c)).unwrap();
    rig.write("w2", rig.b);
    assert!(rig.the_hazard().missing.contains("no event of stream 1"));
}

#[test]
fn a_wait_on_the_wrong_stream_is_found() {
    let rig = rig();
    let c = rig.device.create_stream().unwrap();
    rig.write("w1", rig.a);
    rig.device.wait(c, rig.event_after(rig.a)).unwrap();
    rig.write("w2", rig.b);
    rig.the_hazard();
}

#[test]
fn a_wait_before_the_record_orders_nothing() {
    let rig = rig();
    let event = rig.device.create_event().unwrap();
    rig.write("w1", rig.a);
    rig.device.wait(rig.b, event).unwrap();
    rig.device.record(event, rig.a).unwrap();
    rig.write("w2", rig.b);
    rig.the_hazard();
}

#[test]
fn a_wait_keeps_the_record_it_saw() {
    let rig = rig();
    rig.write("w1", rig.a);
    let event = rig.event_after(rig.a);
    rig.device.wait(rig.b, event).unwrap();
    rig.device.destroy_event(event).unwrap();
    rig.write("w2", rig.b);
    rig.assert_ordered();
}

#[test]
fn a_query_that_was_true_orders_later_work_on_every_stream() {
    let rig = rig();
    rig.write("w1", rig.a);
    let event = rig.event_after(rig.a);
    rig.device.advance(1_000_000);
    assert!(rig.device.query(event).unwrap());
    rig.write("w2", rig.b);
    rig.assert_ordered();
}

#[test]
fn a_query_that_was_false_orders_nothing() {
    let rig = rig();
    let gate = rig.device.gate();
    let held = Kernel::new("held").writing(rig.range).until(gate);
    rig.device.launch(rig.a, held).unwrap();
    let event = rig.event_after(rig.a);
    assert!(!rig.device.query(event).unwrap());
    rig.write("w2", rig.b);
    rig.the_hazard();
}

#[test]
fn having_finished_unseen_orders_nothing() {
    let rig = rig();
    rig.write("w1", rig.a);
    rig.event_after(rig.a);
    rig.device.advance(1_000_000_000);
    rig.write("w2", rig.b);
    rig.the_hazard();
}

#[test]
fn opening_a_gate_is_not_seeing_the_kernel_end() {
    let rig = rig();
    let gate = rig.device.gate();
    let held = Kernel::new("held").writing(rig.range).until(gate);
    rig.device.launch(rig.a, held).unwrap();
    let event = rig.event_after(rig.a);
    rig.device.open(gate);
    rig.write("w2", rig.b);
    assert_eq!(rig.the_hazard().earlier.label, "held");
    assert!(rig.device.query(event).unwrap());
    rig.device.synchronize_stream(rig.b).unwrap();
    rig.write("w3", rig.a);
    rig.the_hazard();
}

#[test]
fn synchronising_a_stream_or_an_event_orders_later_work() {
    let rig = rig();
    rig.write("w1", rig.a);
    rig.device.synchronize_stream(rig.a).unwrap();
    rig.write("w2", rig.b);
    let event = rig.event_after(rig.b);
    rig.device.synchronize_event(event).unwrap();
    rig.write("w3", rig.a);
    rig.assert_ordered();
}

#[test]
fn synchronising_the_wrong_stream_is_found() {
    let rig = rig();
    rig.write("w1", rig.a);
    rig.device.synchronize_stream(rig.b).unwrap();
    rig.write("w2", rig.b);
    rig.the_hazard();
}

#[test]
fn neighbours_do_not_conflict_and_one_shared_byte_does() {
    let rig = rig();
    let launch = |name: &'static str, stream, offset, len| {
        let kernel = Kernel::new(name).writing(rig.part(offset, len));
        rig.device.launch(stream, kernel).unwrap();
    };
    launch("left", rig.a, 0, 512);
    launch("right", rig.b, 512, 512);
    rig.assert_ordered();
    launch("over", rig.b, 511, 1);
    assert_eq!(rig.the_hazard().earlier.label, "left");
}

#[test]
fn two_addresses_of_one_handle_are_one_memory() {
    let rig = rig();
    let twin = AddrRange::new(rig.device.reserve(PAGE, PAGE).unwrap(), PAGE);
    rig.device.map(twin.start, rig.handle).unwrap();
    rig.device.set_access(twin, &[]).unwrap();
    rig.write("old address", rig.a);
    rig.device.launch(rig.b, Kernel::new("new address").writing(twin)).unwrap();
    let hazard = rig.the_hazard();
    assert_eq!((hazard.earlier.range, hazard.later.range), (rig.range, twin));
}

#[test]
fn a_large_kernel_meets_every_earlier_one_once() {
    let rig = rig();
    for i in 0..10 {
        let kernel = Kernel::new(format!("small {i}")).writing(rig.part(i * 4096, 512));
        rig.device.launch(rig.a, kernel).unwrap();
    }
    rig.write("large", rig.b);
    let hazards = rig.device.hazards();
    assert_eq!(hazards.len(), 10);
    let mut names: Vec<_> = hazards.iter().map(|hazard| &hazard.earlier.label).collect();
    names.dedup();
    assert_eq!(names.len(), 10);
}

#[test]
fn unmapping_before_completion_was_seen_is_found_even_if_it_is_over() {
    let rig = rig();
    rig.write("w", rig.a);
    rig.device.advance(1_000_000_000);
    rig.device.unmap(rig.range).unwrap();
    let hazard = rig.the_hazard();
    assert_eq!((hazard.later.label.as_str(), hazard.later.stream), ("unmap", None));
    assert!(hazard.missing.contains("observed no completion on stream 1"), "{hazard}");
}

#[test]
fn unmapping_what_was_seen_complete_is_fine_and_so_is_its_next_life() {
    let rig = rig();
    rig.write("w", rig.a);
    rig.device.synchronize_stream(rig.a).unwrap();
    rig.device.unmap(rig.range).unwrap();
    rig.device.release(rig.handle).unwrap();
    let handle = rig.device.create(PAGE, MemoryProperties::DEVICE).unwrap();
    rig.device.map(rig.range.start, handle).unwrap();
    rig.device.set_access(rig.range, &[]).unwrap();
    rig.write("next life", rig.b);
    rig.assert_ordered();
}

#[test]
fn an_old_address_goes_while_the_memory_works_on_at_its_new_one() {
    let rig = rig();
    rig.write("w", rig.a);
    rig.device.synchronize_stream(rig.a).unwrap();
    let twin = AddrRange::new(rig.device.reserve(PAGE, PAGE).unwrap(), PAGE);
    rig.device.map(twin.start, rig.handle).unwrap();
    rig.device.set_access(twin, &[]).unwrap();
    rig.device.launch(rig.b, Kernel::new("moved").writing(twin).lasting(1 << 40)).unwrap();
    rig.device.unmap(rig.range).unwrap();
    rig.assert_ordered();
    assert_eq!(rig.device.device_loss(), None);
}

#[test]
fn memory_freed_into_the_pool_under_another_streams_work_is_found() {
    let rig = rig();
    let at = rig.device.malloc_async(rig.a, PAGE).unwrap();
    let block = AddrRange::new(at, PAGE);
    rig.device.launch(rig.a, Kernel::new("fine").writing(block)).unwrap();
    rig.assert_ordered();
    rig.device.wait(rig.b, rig.event_after(rig.a)).unwrap();
    rig.device.launch(rig.b, Kernel::new("late reader").reading(block)).unwrap();
    rig.assert_ordered();
    rig.device.free_async(rig.a, at).unwrap();
    let hazard = rig.the_hazard();
    assert_eq!(hazard.earlier.label, "late reader");
    assert_eq!(hazard.later.label, "free-async");
}

#[test]
fn the_pools_own_reuse_across_streams_is_ordered_by_the_pool() {
    let rig = rig();
    for stream in [rig.a, rig.b, rig.a, rig.b] {
        let at = rig.device.malloc_async(stream, PAGE).unwrap();
        let kernel = Kernel::new("user").writing(AddrRange::new(at, PAGE)).lasting(10_000);
        rig.device.launch(stream, kernel).unwrap();
        rig.device.free_async(stream, at).unwrap();
    }
    rig.assert_ordered();
}

#[test]
fn the_host_must_see_a_copy_complete_before_it_touches_its_bytes() {
    let rig = rig();
    let buffer = rig.device.alloc_host(PAGE).unwrap();
    let slice = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    rig.device.write_host(buffer, Bytes::ZERO, &[1]).unwrap();
    rig.device.copy_to_host(rig.a, rig.range.start, slice).unwrap();
    rig.assert_ordered();
    rig.device.advance(1_000_000_000);
    rig.device.read_host(buffer, Bytes::ZERO, &mut [0]).unwrap();
    let hazard = rig.the_hazard();
    assert_eq!(hazard.later.to_string(), "`read-host` on the host");
    rig.device.synchronize_stream(rig.a).unwrap();
    rig.device.read_host(buffer, Bytes::ZERO, &mut [0]).unwrap();
    rig.device.free_host(buffer).unwrap();
    rig.the_hazard();
}

#[test]
fn two_streams_filling_one_host_buffer_are_found() {
    let rig = rig();
    let buffer = rig.device.alloc_host(PAGE).unwrap();
    let slice = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    rig.device.copy_to_host(rig.a, rig.range.start, slice).unwrap();
    rig.device.copy_to_host(rig.b, rig.range.start, slice).unwrap();
    rig.the_hazard();
}

#[test]
fn work_queued_before_its_memory_is_mapped_is_checked_when_it_starts() {
    let rig = rig();
    let late = AddrRange::new(rig.device.reserve(PAGE, PAGE).unwrap(), PAGE);
    let gate = rig.device.gate();
    rig.device.launch(rig.b, Kernel::new("gate").until(gate)).unwrap();
    rig.device.launch(rig.b, Kernel::new("early bird").writing(late)).unwrap();
    rig.device.map(late.start, rig.handle).unwrap();
    rig.device.set_access(late, &[]).unwrap();
    rig.write("w", rig.a);
    rig.device.open(gate);
    rig.device.advance(1_000_000);
    assert_eq!(rig.the_hazard().later.label, "early bird");
}

#[test]
fn hazards_are_counted_beyond_those_kept() {
    let rig = rig();
    for _ in 0..1500 {
        rig.write("a", rig.a);
        rig.write("b", rig.b);
    }
    assert_eq!(rig.device.hazards().len(), 1000);
    assert_eq!(rig.device.hazards_found(), 2999);
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

#[test]
fn memory_that_moves_while_it_is_registered_is_found() {
    let device = Simulator::builder().checked().build();
    let page = device.info().limits.page;
    let range = AddrRange::new(device.reserve(page * 4, page).unwrap(), page * 4);
    let part = |at: u64, pages: u64| AddrRange::new(range.start + page * at, page * pages);
    let handles = [0, 1].map(|at| {
        let handle = device.create(page, MemoryProperties::DEVICE).unwrap();
        device.map(part(at, 1).start, handle).unwrap();
        handle
    });
    device.set_access(part(0, 2), &[]).unwrap();
    assert!(device.register(part(1, 2), "nic").is_err_and(|e| e.kind == ErrorKind::InvalidUse));
    let inside = AddrRange::new(range.start + Bytes::kib(64), Bytes::kib(1));
    let first = device.register(inside, "nic").unwrap();
    let both = device.register(part(0, 2), "library").unwrap();
    let found = |wanted: &[(&str, &str)]| {
        let hazards = device.hazards();
        let found: Vec<_> = hazards
            .iter()
            .map(|hazard| (hazard.later.label.as_str(), hazard.earlier.label.as_str()))
            .collect();
        assert_eq!(found, wanted);
    };
    // The second page is the library's only.
    device.unmap(part(1, 1)).unwrap();
    found(&[("unmap", "library")]);
    device.map(part(3, 1).start, handles[1]).unwrap();
    found(&[("unmap", "library"), ("map", "library")]);
    let text = device.hazards()[1].to_string();
    assert!(text.contains("`library` still holds the memory: unregister it first"), "{text}");
    device.unmap(part(3, 1)).unwrap();
    device.release(handles[1]).unwrap();
    found(&[("unmap", "library"), ("map", "library"), ("release", "library")]);
    device.unregister(both);
    // A mapped handle may be released: the mapping keeps the memory where it is.
    device.release(handles[0]).unwrap();
    assert_eq!(device.hazards_found(), 3);
    device.unregister(first);
    device.unmap(part(0, 1)).unwrap();
    assert_eq!(device.hazards_found(), 3);
    // An allocation is freed under a registration.
    let at = device.alloc_memory(page).unwrap();
    device.register(AddrRange::new(at, page), "nic").unwrap();
    device.free_memory(at).unwrap();
    assert_eq!(device.hazards()[3].later.label, "unmap");
}
