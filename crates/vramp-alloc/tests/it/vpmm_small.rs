//! VPMM's small requests, which the driver's pool serves: one limit with the pages, idle memory of
//! either for the other, old mappings unmapped at each of them, and the pool of pages disabled.

use crate::common::{PAGE, Rig, pages};
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, CreateError};
use vramp_core::AddrRange;
use vramp_driver::sim::{FaultPlan, Kernel, Simulator, SimulatorBuilder};
use vramp_driver::{Call, Capabilities, Driver};
use vramp_peers::Preset;

/// The driver's pool grows by so much.
const STEP: u64 = 16;

fn rig(builder: SimulatorBuilder, limit: Option<u64>) -> Rig {
    let config = Config { limit: limit.map(pages), ..Preset::Vpmm.config() };
    Rig::on(builder, config)
}

/// A card with room for that many pages, and a limit of that many: full either way.
fn full_at(count: u64) -> [Rig; 2] {
    [rig(Simulator::builder().memory(pages(count)), None), rig(Simulator::builder(), Some(count))]
}

fn small(rig: &Rig) -> Result<Allocation, AllocError> {
    let block = rig.allocator.malloc(Bytes::mib(1), rig.stream);
    rig.allocator.audit().expect("malloc keeps every invariant");
    block
}

fn reserved(rig: &Rig) -> Bytes {
    assert_eq!(rig.sim.live().device_bytes, rig.allocator.stats().expect("a query").reserved);
    rig.sim.live().device_bytes
}

#[test]
fn pages_and_small_requests_share_one_limit() {
    for rig in full_at(2 * STEP) {
        let large = rig.malloc(STEP + 1);
        let error = small(&rig).expect_err("the driver's pool grows by more than is left");
        assert!(error.is_out_of_memory(), "{error}");
        rig.free(large);
        rig.allocator.trim(Bytes::ZERO).expect("everything is idle");
        let tiny = small(&rig).expect("half is enough");
        let held: Vec<_> =
            std::iter::from_fn(|| rig.allocator.malloc(PAGE, rig.stream).ok()).collect();
        assert_eq!(held.len() as u64, STEP);
        assert_eq!(reserved(&rig), pages(2 * STEP));
        held.into_iter().chain([tiny]).for_each(|block| rig.free(block));
        rig.close();
    }
}

#[test]
fn a_shortage_counts_the_memory_of_both_pools() {
    let rig = rig(Simulator::builder(), Some(2 * STEP));
    let (tiny, large) = (small(&rig).expect("there is room"), rig.malloc(STEP));
    let report = |error: AllocError| match error {
        AllocError::OutOfMemory(report) => report.shortage,
        error => panic!("{error}"),
    };
    let page = report(rig.allocator.malloc(PAGE, rig.stream).expect_err("the limit is reached"));
    assert_eq!((page.reserved, page.used), (pages(2 * STEP), pages(STEP) + Bytes::mib(1)));
    assert_eq!(page.limit, Some(pages(2 * STEP)));
    let more = rig.allocator.malloc(PAGE - Bytes::new(1), rig.stream).expect("the pool has room");
    let full: Vec<_> = std::iter::from_fn(|| small(&rig).ok()).collect();
    let tiniest = report(small(&rig).expect_err("the limit is reached"));
    assert_eq!((tiniest.reserved, tiniest.limit), (pages(2 * STEP), Some(pages(2 * STEP))));
    assert!(tiniest.used > pages(2 * STEP) - PAGE, "{tiniest:?}");
    full.into_iter().chain([tiny, large, more]).for_each(|block| rig.free(block));
    rig.close();
}

#[test]
fn idle_memory_of_the_drivers_pool_serves_a_large_request() {
    for rig in full_at(3 * STEP) {
        rig.free(small(&rig).expect("there is room"));
        assert_eq!(reserved(&rig), pages(STEP));
        rig.free(rig.malloc(3 * STEP));
        assert_eq!(reserved(&rig), pages(3 * STEP));
        rig.close();
    }
}

#[test]
fn idle_pages_serve_a_small_request_and_no_more_than_needed() {
    for rig in full_at(4 * STEP) {
        rig.free(rig.malloc(4 * STEP));
        let tiny = small(&rig).expect("the pages are idle");
        assert_eq!(rig.held(), 3 * STEP);
        assert_eq!(reserved(&rig), pages(4 * STEP));
        rig.free(tiny);
        rig.close();
    }
}

#[test]
fn the_reserved_peak_is_that_of_the_sum() {
    for rig in full_at(3 * STEP) {
        // Each pool has all memory once, and half of it at the end.
        rig.free(rig.malloc(3 * STEP));
        let held: Vec<_> = std::iter::from_fn(|| small(&rig).ok()).collect();
        held.into_iter().for_each(|block| rig.free(block));
        rig.allocator.trim(Bytes::ZERO).expect("everything is idle");
        let large = rig.malloc(STEP);
        let stats = rig.allocator.stats().expect("a query");
        assert_eq!(stats.reserved_peak, rig.sim.device_bytes_peak());
        assert_eq!(stats.reserved_peak, pages(3 * STEP));
        rig.allocator.reset_peak_stats();
        assert_eq!(rig.allocator.stats().expect("a query").reserved_peak, pages(STEP));
        rig.free(large);
        rig.close();
    }
}

#[test]
fn without_a_limit_the_reserved_peak_is_below_the_sum_of_both_peaks() {
    let rig = rig(Simulator::builder().memory(pages(8 * STEP)), None);
    rig.free(rig.malloc(3 * STEP));
    rig.allocator.trim(Bytes::ZERO).expect("everything is idle");
    rig.free(small(&rig).expect("there is room"));
    assert_eq!(rig.allocator.stats().expect("a query").reserved_peak, pages(3 * STEP));
    rig.close();
}

#[test]
fn pages_in_use_are_not_taken_from_a_request_for_a_small_one() {
    for rig in full_at(2 * STEP) {
        let held = rig.malloc(STEP + 2);
        rig.free(rig.malloc(STEP - 2));
        let error = small(&rig).expect_err("what is idle does not suffice");
        assert!(error.is_out_of_memory(), "{error}");
        rig.free(held);
        rig.free(small(&rig).expect("now it does"));
        rig.close();
    }
}

#[test]
fn work_in_flight_keeps_its_pages() {
    let rig = rig(Simulator::builder().memory(pages(2 * STEP)).checked(), None);
    let block = rig.malloc(2 * STEP);
    let range = AddrRange::new(block.addr(), block.len());
    let gate = rig.sim.gate();
    let busy = Kernel::new("busy").writing(range).lasting(1 << 40).until(gate);
    rig.sim.launch(rig.raw(rig.stream), busy).expect("it can be queued");
    rig.free(block);
    small(&rig).expect_err("the pages are in use");
    rig.sim.open(gate);
    rig.free(small(&rig).expect("the request waits for the pages"));
    assert_eq!(rig.sim.hazards(), []);
    rig.close();
}

#[test]
fn trimming_counts_both_pools() {
    for to in [0, STEP, 2 * STEP, 3 * STEP] {
        let rig = rig(Simulator::builder(), None);
        rig.free(rig.malloc(2 * STEP));
        let tiny = small(&rig).expect("there is memory");
        assert_eq!(reserved(&rig), pages(3 * STEP));
        rig.allocator.trim(pages(to)).expect("pages are idle");
        assert_eq!(reserved(&rig), pages(to.max(STEP)), "the small block stays");
        rig.free(tiny);
        rig.allocator.trim(Bytes::ZERO).expect("everything is idle");
        assert_eq!(reserved(&rig), Bytes::ZERO);
        rig.close();
    }
}

#[test]
fn memory_ahead_of_demand_leaves_small_requests_their_part_of_the_limit() {
    let rig = rig(Simulator::builder(), Some(2 * STEP));
    let tiny = small(&rig).expect("there is room");
    rig.allocator.prefill(pages(STEP + 1), rig.stream).expect_err("that is above the limit");
    rig.allocator.prefill(pages(STEP), rig.stream).expect("that is the rest");
    rig.free(tiny);
    rig.close();
}

/// Two pages of a free region were moved: their old mapping is left.
fn with_an_old_mapping() -> Rig {
    let rig = Rig::vpmm(0);
    let [two, one] = [2, 1].map(|count| rig.malloc(count));
    rig.free(two);
    rig.free(rig.malloc(3));
    rig.free(one);
    assert_eq!(rig.census().retired, pages(2));
    rig
}

#[test]
fn a_small_malloc_unmaps_old_mappings_whose_work_is_over() {
    let rig = with_an_old_mapping();
    let raw = rig.raw(rig.stream);
    rig.sim.synchronize_stream(raw).expect("it ends");
    let (unmaps, tiny) = rig.calls(Call::Unmap, || small(&rig).expect("there is memory"));
    assert_eq!((unmaps, rig.census().retired), (1, Bytes::ZERO));
    let (queries, _) = rig.calls(Call::Query, || rig.free(tiny));
    assert_eq!(queries, 0, "a free sweeps nothing");
    let (queries, tiny) = rig.calls(Call::Query, || small(&rig).expect("there is memory"));
    assert_eq!(queries, 0, "nothing is left to unmap");
    rig.free(tiny);
    rig.close();
}

#[test]
fn a_small_malloc_is_served_although_an_old_mapping_cannot_be_unmapped() {
    let rig = with_an_old_mapping();
    rig.sim.synchronize_stream(rig.raw(rig.stream)).expect("it ends");
    rig.sim.set_faults(FaultPlan::nth_of(Call::Unmap, 1).with_code(1));
    let tiny = small(&rig).expect("there is memory");
    assert_eq!(rig.census().quarantined_addresses, pages(2));
    rig.free(tiny);
    let rig = with_an_old_mapping();
    rig.sim.set_faults(FaultPlan::nth_of(Call::Query, 1).with_code(700));
    let error = small(&rig).expect_err("the device is lost");
    assert!(matches!(&error, AllocError::Driver(error) if error.is_device_lost()), "{error}");
}

#[test]
fn a_request_of_exactly_a_page_is_a_page_and_one_byte_less_is_the_drivers() {
    let rig = Rig::vpmm(0);
    let (small, page) = (PAGE - Bytes::new(1), PAGE);
    let (async_mallocs, below) =
        rig.calls(Call::MallocAsync, || rig.allocator.malloc(small, rig.stream).expect("memory"));
    assert_eq!((async_mallocs, rig.held()), (1, 0));
    let (async_mallocs, exact) =
        rig.calls(Call::MallocAsync, || rig.allocator.malloc(page, rig.stream).expect("memory"));
    assert_eq!((async_mallocs, rig.held()), (0, 1));
    assert_eq!(exact.len(), PAGE);
    rig.free(below);
    rig.free(exact);
    rig.close();
}

/// The preset with its document's variables set.
fn with_variables(set: &[(&str, &str)]) -> Config {
    let lookup = |name: &str| {
        let found = set.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let config = vramp_peers::Config::preset(Preset::Vpmm).with_vpmm_variables(lookup);
    config.expect("the values are possible").build()
}

#[test]
fn a_page_above_all_requests_leaves_them_to_the_driver() {
    // The document's recipe: pages of 32 GiB, none of them at the start.
    let recipe = with_variables(&[("VPMM_PAGE_SIZE", "34359738368"), ("VPMM_PAGES", "0")]);
    assert_eq!(recipe.page, Some(Bytes::gib(32)));
    let rig = Rig::on(Simulator::builder(), recipe);
    let (async_mallocs, block) = rig.calls(Call::MallocAsync, || {
        rig.allocator.malloc(Bytes::gib(31), rig.stream).expect("the card has it")
    });
    assert_eq!((async_mallocs, rig.sim.live().handles), (1, 0));
    rig.free(block);
    let whole = rig.allocator.malloc(Bytes::gib(32), rig.stream).expect("the card has it");
    assert_eq!((whole.len(), rig.sim.live().handles), (Bytes::gib(32), 1));
    rig.free(whole);
    rig.close();
}

#[test]
fn the_largest_page_disables_the_pool_of_pages() {
    for page in ["18446744073709551615", "1099511627775"] {
        let config = with_variables(&[("VPMM_PAGE_SIZE", page)]);
        let rig = Rig::on(Simulator::builder(), config);
        let block = rig.allocator.malloc(Bytes::gib(100), rig.stream).expect("the card has it");
        assert_eq!((rig.sim.live().handles, rig.sim.live().reservations), (0, 0), "{page}");
        let error = rig.allocator.malloc(Bytes::tib(1), rig.stream).expect_err("no card has it");
        assert!(error.is_out_of_memory(), "{error}");
        rig.free(block);
        rig.close();
    }
    let pages_only = Capabilities {
        stream_ordered_pool: false,
        ..Simulator::builder().build().info().capabilities
    };
    let sim = Simulator::builder().capabilities(pages_only).build();
    let config = Config { page: Some(Bytes::new(u64::MAX)), ..Preset::Vpmm.config() };
    let error = Allocator::new(std::sync::Arc::new(sim), config).expect_err("no pool is left");
    assert!(matches!(error, CreateError::NotSupported { instead: "vramp", .. }), "{error}");
}

#[test]
fn pages_and_addresses_are_what_the_variables_say() {
    let config = with_variables(&[
        ("VPMM_PAGE_SIZE", "4194304"),
        ("VPMM_PAGES", "5"),
        ("VPMM_VA_SIZE", "1073741824"),
    ]);
    let rig = Rig::on(Simulator::builder(), config);
    let live = rig.sim.live();
    assert_eq!(live.handles, 5);
    assert_eq!(live.device_bytes, Bytes::mib(20));
    assert_eq!((live.reservations, live.reserved_addresses), (1, Bytes::gib(1)));
    let block = rig.allocator.malloc(Bytes::mib(5), rig.stream).expect("there is memory");
    assert_eq!(block.len(), Bytes::mib(8), "a request is rounded to whole pages");
    rig.free(block);
    rig.close();
}
