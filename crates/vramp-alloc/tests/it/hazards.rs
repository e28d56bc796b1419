//! Every ordering rule of the pool, once kept and once broken: kept, the happens-before checker
//! finds nothing; broken, by the program or by a device that leaves calls out, it names the two
//! accesses that meet.

use std::sync::Arc;

use crate::common::skipping_driver::SkippingDriver;
use vramp_alloc::config::{Policy, Progress};
use vramp_alloc::{Allocation, Allocator, Bytes, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Hazard, Kernel, Simulator};
use vramp_driver::wrapper::Wrapped;
use vramp_driver::{Call, Stream};
use vramp_peers::Preset;

const PAGE: Bytes = Bytes::mib(2);

/// How long a kernel runs that is still running when the test looks.
const LONG_NS: u64 = 1 << 40;

/// An allocator on a checked card that can skip calls, and three streams.
struct HazardRig {
    sim: Arc<Simulator>,
    skipping: Arc<Wrapped<SkippingDriver>>,
    allocator: Allocator,
    a: StreamId,
    b: StreamId,
    c: StreamId,
}

impl HazardRig {
    fn new(preset: Preset) -> HazardRig {
        HazardRig::with(preset.config())
    }

    /// A pool that may not grow beyond `count` pages.
    fn limited(preset: Preset, count: u64) -> HazardRig {
        HazardRig::with(Config { limit: Some(PAGE * count), ..preset.config() })
    }

    fn with(config: Config) -> HazardRig {
        let sim = Arc::new(Simulator::builder().checked().build());
        let skipping = Arc::new(SkippingDriver::on(Arc::clone(&sim)));
        let driver: Arc<dyn Driver> = Arc::clone(&skipping) as Arc<dyn Driver>;
        let allocator = Allocator::new(driver, config).unwrap();
        let [a, b, c] = [(); 3].map(|()| allocator.create_stream().unwrap());
        HazardRig { sim, skipping, allocator, a, b, c }
    }

    fn raw(&self, stream: StreamId) -> Stream {
        self.allocator.stream(stream).unwrap()
    }

    fn malloc(&self, count: u64, stream: StreamId) -> Allocation {
        let block = self.allocator.malloc(PAGE * count, stream).unwrap();
        self.allocator.audit().unwrap();
        block
    }

    fn free(&self, block: Allocation, stream: StreamId) {
        self.allocator.free(block, stream).unwrap();
        self.allocator.audit().unwrap();
    }

    fn write(&self, name: &'static str, stream: StreamId, block: &Allocation, ns: u64) {
        let range = AddrRange::new(block.addr(), block.len());
        let kernel = Kernel::new(name).writing(range).lasting(ns);
        self.sim.launch(self.raw(stream), kernel).unwrap();
    }

    fn read(&self, name: &'static str, stream: StreamId, block: &Allocation, ns: u64) {
        let range = AddrRange::new(block.addr(), block.len());
        let kernel = Kernel::new(name).reading(range).lasting(ns);
        self.sim.launch(self.raw(stream), kernel).unwrap();
    }

    /// Lets `later` run after what is queued on `earlier`: the program's own order.
    fn order(&self, earlier: StreamId, later: StreamId) {
        let event = self.sim.create_event().unwrap();
        self.sim.record(event, self.raw(earlier)).unwrap();
        self.sim.wait(self.raw(later), event).unwrap();
        self.sim.destroy_event(event).unwrap();
    }

    /// Records events behind all that was freed, and asks about them once.
    fn look_for_idle_memory(&self) {
        self.allocator.trim(Bytes::gib(100)).unwrap();
    }

    fn assert_ordered(&self) {
        assert_eq!(self.sim.hazards(), []);
        assert_eq!(self.sim.device_loss(), None);
    }

    /// The first hazard is between these two.
    fn assert_meets(&self, earlier: &str, later: &str) -> Hazard {
        let hazards = self.sim.hazards();
        let first = hazards.first().unwrap_or_else(|| panic!("{later} is ordered after {earlier}"));
        assert_eq!((&*first.earlier.label, &*first.later.label), (earlier, later), "{first}");
        first.clone()
    }
}

const VIRTUAL: [Preset; 2] = [Preset::Vramp, Preset::Vpmm];

// --- rule: memory freed on a stream is that stream's at once ---

/// The block goes from A to C by the program's own order, is used there, and is freed on B.
fn freed_on_a_stream_without_order(noted: bool) -> HazardRig {
    let rig = HazardRig::limited(Preset::Vramp, 4);
    let block = rig.malloc(4, rig.a);
    rig.order(rig.a, rig.c);
    rig.write("old owner", rig.c, &block, LONG_NS);
    if noted {
        rig.allocator.record_use(&block, rig.c).unwrap();
    }
    rig.free(block, rig.b);
    let block = rig.malloc(4, rig.b);
    rig.write("new owner", rig.b, &block, 1);
    rig
}

#[test]
fn the_stream_that_uses_a_block_may_free_and_take_it_at_once() {
    for preset in Preset::ALL {
        let rig = HazardRig::new(preset);
        for name in ["first", "second", "third"] {
            let block = rig.malloc(4, rig.a);
            rig.write(name, rig.a, &block, LONG_NS);
            rig.free(block, rig.a);
        }
        rig.assert_ordered();
    }
}

#[test]
fn a_free_on_the_wrong_stream_is_found() {
    freed_on_a_stream_without_order(true).assert_ordered();
    let hazard = freed_on_a_stream_without_order(false).assert_meets("old owner", "new owner");
    assert!(hazard.missing.contains("waits for no event of stream 3"), "{hazard}");
}

// --- rule: uses on other streams are part of what a free block waits for ---

fn read_on_another_stream(preset: Preset, noted: bool, left_out: Option<Call>) -> HazardRig {
    // The default pool must come back to this memory; the others take it first anyhow.
    let rig = match preset {
        Preset::Vramp => HazardRig::limited(preset, 4),
        _ => HazardRig::new(preset),
    };
    let block = rig.malloc(4, rig.a);
    rig.write("producer", rig.a, &block, 1);
    rig.order(rig.a, rig.b);
    rig.read("reader", rig.b, &block, LONG_NS);
    if noted {
        rig.allocator.record_use(&block, rig.b).unwrap();
    }
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    rig.free(block, rig.a);
    let block = rig.malloc(4, rig.a);
    rig.write("overwriter", rig.a, &block, 1);
    rig
}

#[test]
fn a_use_that_was_not_noted_is_found() {
    for preset in VIRTUAL {
        read_on_another_stream(preset, true, None).assert_ordered();
        let rig = read_on_another_stream(preset, false, None);
        let hazard = rig.assert_meets("reader", "overwriter");
        assert_eq!(hazard.earlier.stream, Some(rig.raw(rig.b)));
        assert!(!hazard.earlier.writes);
    }
}

#[test]
fn a_noted_use_without_its_wait_is_found() {
    for left_out in [Call::Wait, Call::Record] {
        let rig = read_on_another_stream(Preset::Vramp, true, Some(left_out));
        rig.assert_meets("reader", "overwriter");
    }
}

#[test]
fn the_drivers_pool_waits_for_noted_uses_before_it_takes_memory_back() {
    read_on_another_stream(Preset::StreamOrdered, true, None).assert_ordered();
    for left_out in [Call::Wait, Call::Record] {
        let rig = read_on_another_stream(Preset::StreamOrdered, true, Some(left_out));
        let hazards = rig.sim.hazards();
        assert_eq!(hazards.first().map(|hazard| &*hazard.earlier.label), Some("reader"));
    }
}

// --- rule: idle memory serves every stream once its event was seen complete ---

fn taken_over_when_idle(preset: Preset, kernel_ns: u64, left_out: Option<Call>) -> HazardRig {
    let rig = HazardRig::new(preset);
    let block = rig.malloc(4, rig.a);
    rig.write("old owner", rig.a, &block, kernel_ns);
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    rig.free(block, rig.a);
    rig.sim.advance(1000);
    rig.look_for_idle_memory();
    let block = rig.malloc(4, rig.b);
    rig.write("new owner", rig.b, &block, 1);
    rig
}

#[test]
fn memory_whose_event_was_not_seen_complete_is_found() {
    for preset in VIRTUAL {
        for kernel_ns in [1, LONG_NS] {
            taken_over_when_idle(preset, kernel_ns, None).assert_ordered();
            let rig = taken_over_when_idle(preset, kernel_ns, Some(Call::Query));
            rig.assert_meets("old owner", "new owner");
        }
    }
}

#[test]
fn an_event_that_records_nothing_is_found() {
    for preset in VIRTUAL {
        let rig = taken_over_when_idle(preset, LONG_NS, Some(Call::Record));
        rig.assert_meets("old owner", "new owner");
    }
}

/// The external source of completion reports more than the streams have reached.
fn told_too_early(left_out: Option<Call>) -> HazardRig {
    // An empty table: all recorded work is over.
    let progress = Progress::External(Arc::default());
    let rig = HazardRig::with(Config { progress, ..Config::default() });
    let block = rig.malloc(4, rig.a);
    rig.write("old owner", rig.a, &block, 1_000_000);
    rig.free(block, rig.a);
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    rig.look_for_idle_memory();
    let block = rig.malloc(4, rig.b);
    rig.write("new owner", rig.b, &block, 1);
    rig
}

#[test]
fn told_progress_is_believed_only_behind_the_event() {
    told_too_early(None).assert_ordered();
    told_too_early(Some(Call::SynchronizeEvent)).assert_meets("old owner", "new owner");
}

// --- rule: memory in use is another stream's only behind a wait ---

fn taken_over_behind_a_wait(preset: Preset, left_out: Option<Call>) -> HazardRig {
    let rig = HazardRig::limited(preset, 4);
    let block = rig.malloc(4, rig.a);
    rig.write("old owner", rig.a, &block, LONG_NS);
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    rig.free(block, rig.a);
    let block = rig.malloc(4, rig.b);
    rig.write("new owner", rig.b, &block, 1);
    rig
}

#[test]
fn a_wait_that_was_not_made_is_found() {
    for preset in VIRTUAL {
        taken_over_behind_a_wait(preset, None).assert_ordered();
        for left_out in [Call::Wait, Call::Record] {
            let rig = taken_over_behind_a_wait(preset, Some(left_out));
            let hazard = rig.assert_meets("old owner", "new owner");
            assert_eq!(hazard.earlier.stream, Some(rig.raw(rig.a)));
            assert_eq!(hazard.later.stream, Some(rig.raw(rig.b)));
        }
    }
}

/// A's memory goes to B behind a wait, and from B, which does not touch it, to C.
fn handed_on(preset: Preset, first_wait: bool) -> HazardRig {
    let rig = HazardRig::limited(preset, 4);
    let block = rig.malloc(4, rig.a);
    rig.write("first owner", rig.a, &block, LONG_NS);
    rig.free(block, rig.a);
    if !first_wait {
        rig.skipping.skip(Call::Wait);
    }
    let block = rig.malloc(4, rig.b);
    rig.skipping.skip_nothing();
    rig.free(block, rig.b);
    let block = rig.malloc(4, rig.c);
    rig.write("third owner", rig.c, &block, 1);
    rig
}

#[test]
fn order_is_handed_on_by_an_owner_that_does_no_work() {
    for preset in VIRTUAL {
        handed_on(preset, true).assert_ordered();
        handed_on(preset, false).assert_meets("first owner", "third owner");
    }
}

// --- rule: moved memory is the same memory ---

/// Four of eight pages, every second pair, move to a new address for another stream.
fn moved_for_another_stream(preset: Preset, left_out: Option<Call>) -> HazardRig {
    let mut config = Config { limit: Some(PAGE * 8), ..preset.config() };
    if let Policy::Mixed(mixed) = &mut config.policy {
        (mixed.chunk_min, mixed.chunk_usual) = (PAGE, PAGE);
    }
    let rig = HazardRig::with(config);
    let blocks = [(); 4].map(|()| rig.malloc(2, rig.a));
    for block in &blocks {
        rig.write("old owner", rig.a, block, LONG_NS);
    }
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    let [first, _second, third, _fourth] = blocks;
    rig.free(first, rig.a);
    rig.free(third, rig.a);
    let block = rig.malloc(4, rig.b);
    rig.write("new owner", rig.b, &block, 1);
    rig
}

#[test]
fn moved_memory_without_its_wait_is_found_at_its_new_address() {
    for preset in VIRTUAL {
        moved_for_another_stream(preset, None).assert_ordered();
        let rig = moved_for_another_stream(preset, Some(Call::Wait));
        let hazard = rig.assert_meets("old owner", "new owner");
        let [old, new] = [hazard.earlier.range, hazard.later.range];
        assert!(old.checked_end().unwrap() <= new.start || new.checked_end().unwrap() <= old.start);
    }
}

// --- rule: an old mapping goes only after the work through it was seen complete ---

/// VPMM unmaps old mappings at the next malloc; the default when it wants their addresses.
fn unmapped_early(kernel_ns: u64, left_out: Option<Call>) -> HazardRig {
    let rig = HazardRig::new(Preset::Vpmm);
    let blocks = [(); 4].map(|()| rig.malloc(2, rig.a));
    let [first, _second, third, _fourth] = blocks;
    rig.write("through the old address", rig.a, &first, kernel_ns);
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    rig.free(first, rig.a);
    rig.free(third, rig.a);
    let _moved = rig.malloc(4, rig.a);
    rig.sim.advance(1000);
    // The unmap is optional: where it fails, the request is served another way.
    let _ = rig.allocator.malloc(PAGE, rig.a);
    rig
}

#[test]
fn an_old_mapping_that_goes_too_early_is_found() {
    for kernel_ns in [1, LONG_NS] {
        unmapped_early(kernel_ns, None).assert_ordered();
        let rig = unmapped_early(kernel_ns, Some(Call::Query));
        let hazard = rig.assert_meets("through the old address", "unmap");
        assert_eq!(hazard.later.stream, None, "the host unmaps");
        assert_eq!(rig.sim.device_loss().is_some(), kernel_ns == LONG_NS);
    }
}

// --- rule: memory is given back only after its work was seen complete ---

fn given_back(preset: Preset, kernel_ns: u64, left_out: Option<Call>) -> HazardRig {
    let rig = HazardRig::new(preset);
    let block = rig.malloc(4, rig.a);
    rig.write("last user", rig.a, &block, kernel_ns);
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    rig.free(block, rig.a);
    rig.sim.advance(1000);
    let _ = rig.allocator.trim(Bytes::ZERO);
    rig
}

#[test]
fn memory_given_back_too_early_is_found() {
    for preset in VIRTUAL {
        for kernel_ns in [1, LONG_NS] {
            given_back(preset, kernel_ns, None).assert_ordered();
            for left_out in [Call::Query, Call::Record] {
                let rig = given_back(preset, kernel_ns, Some(left_out));
                rig.assert_meets("last user", "unmap");
            }
        }
    }
}

fn closed(preset: Preset, left_out: Option<Call>) -> Arc<Simulator> {
    let rig = HazardRig::new(preset);
    let block = rig.malloc(4, rig.a);
    rig.write("last user", rig.a, &block, 1_000_000);
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    let HazardRig { sim, allocator, .. } = rig;
    let _ = allocator.close();
    sim
}

#[test]
fn closing_without_waiting_for_the_streams_is_found() {
    for preset in VIRTUAL {
        let sim = closed(preset, None);
        assert_eq!((sim.hazards(), sim.device_loss()), (Vec::new(), None));
        let sim = closed(preset, Some(Call::SynchronizeEvent));
        let hazards = sim.hazards();
        assert_eq!((&*hazards[0].earlier.label, &*hazards[0].later.label), ("last user", "unmap"));
    }
}

// --- rule: small blocks keep the same rules inside their slab ---

/// A slab's eighths; one is freed on another stream while that stream works on it.
fn small_block_freed_on_another_stream(noted: bool, left_out: Option<Call>) -> HazardRig {
    let rig = HazardRig::limited(Preset::Vramp, 1);
    let part = Bytes::kib(256);
    let [first, _others @ ..] = [(); 8].map(|()| rig.allocator.malloc(part, rig.a).unwrap());
    assert!(first.is_in_slab());
    rig.order(rig.a, rig.b);
    rig.write("small reader", rig.b, &first, LONG_NS);
    if let Some(call) = left_out {
        rig.skipping.skip(call);
    }
    rig.free(first, if noted { rig.b } else { rig.a });
    let again = rig.allocator.malloc(part, rig.a).unwrap();
    rig.write("small overwriter", rig.a, &again, 1);
    rig
}

#[test]
fn a_small_block_goes_back_to_its_slab_behind_the_stream_that_freed_it() {
    small_block_freed_on_another_stream(true, None).assert_ordered();
    for rig in [
        small_block_freed_on_another_stream(false, None),
        small_block_freed_on_another_stream(true, Some(Call::Wait)),
        small_block_freed_on_another_stream(true, Some(Call::Record)),
    ] {
        rig.assert_meets("small reader", "small overwriter");
    }
}

/// A block waits on A for a reader on B; A's event of that time is over long before A waits for B.
#[test]
fn a_block_that_waited_is_idle_only_behind_its_wait() {
    let rig = HazardRig::limited(Preset::Vramp, 8);
    let [first, second] = [(); 2].map(|()| rig.malloc(2, rig.a));
    let [_rest, one] = [3, 1].map(|count| rig.malloc(count, rig.a));
    for block in [&first, &second] {
        rig.order(rig.a, rig.b);
        rig.read("reader", rig.b, block, LONG_NS);
        rig.allocator.record_use(block, rig.b).unwrap();
    }
    for block in [first, second, one] {
        rig.free(block, rig.a);
    }
    rig.look_for_idle_memory();
    let _one = rig.malloc(1, rig.a);
    let _first = rig.malloc(2, rig.a);
    let second = rig.malloc(2, rig.c);
    rig.write("third stream", rig.c, &second, 1);
    rig.assert_ordered();
}

/// What a block inherits from its stream's earlier work is not lost when another stream frees it.
#[test]
fn a_block_that_nobody_touched_still_carries_earlier_work() {
    for preset in VIRTUAL {
        let rig = HazardRig::new(preset);
        let block = rig.malloc(4, rig.a);
        rig.write("old owner", rig.a, &block, LONG_NS);
        rig.free(block, rig.a);
        let untouched = rig.malloc(4, rig.a);
        rig.free(untouched, rig.b);
        let block = rig.malloc(4, rig.b);
        rig.write("new owner", rig.b, &block, 1);
        rig.assert_ordered();
    }
}
