//! The defects that a survey found in OpenVM's VPMM, V1 to V22, each shown to be absent here.
//! Where a defect lies in VPMM's policy itself, the default preset is the one shown.

use std::sync::Arc;

use crate::common::{PAGE, Rig, overlap, pages, range};
use vramp_alloc::{AllocError, Allocator, Bytes, Config, CreateError, Driver, FreeError};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, FaultPlan, Kernel, Simulator};
use vramp_driver::{Call, Capabilities};
use vramp_peers::Preset;

/// A pool of eight pages in four pieces, ready for a request that has to move them.
fn comb() -> (Rig, Vec<vramp_alloc::Allocation>) {
    let rig = Rig::vpmm(16);
    let mut blocks: Vec<_> = (0..8).map(|_| rig.malloc(2)).collect();
    let mut kept = Vec::new();
    for (index, block) in blocks.drain(..).enumerate() {
        if index % 2 == 0 { rig.free(block) } else { kept.push(block) }
    }
    (rig, kept)
}

#[test]
fn v1_a_failure_amid_a_remap_changes_nothing() {
    for (call, n) in [(Call::Map, 1), (Call::Map, 3), (Call::Map, 8), (Call::SetAccess, 1)] {
        let (rig, kept) = comb();
        let before = (rig.layout(None), rig.sim.live());
        rig.sim.set_faults(FaultPlan::nth_of(call, n).with_code(1));
        rig.allocator.malloc(pages(8), rig.stream).expect_err("the call fails");
        rig.allocator.audit().expect("every invariant holds");
        let after = (rig.layout(None), rig.sim.live());
        assert_eq!(after.0, before.0, "{call} {n}");
        assert_eq!(after.1.mappings, before.1.mappings, "{call} {n}");
        rig.free(rig.malloc(8));
        kept.into_iter().for_each(|block| rig.free(block));
        rig.close();
    }
}

#[test]
fn v2_a_failed_growth_leaks_nothing() {
    for call in [Call::Create, Call::Map, Call::SetAccess] {
        for preset in [Preset::Vpmm, Preset::Vramp] {
            let rig = Rig::new(preset);
            rig.free(rig.malloc(4));
            let before = rig.sim.live();
            rig.sim.set_faults(FaultPlan::nth_of(call, 1).with_code(1));
            rig.allocator.malloc(pages(64), rig.stream).expect_err("the call fails");
            let after = rig.sim.live();
            assert_eq!(after.handles, before.handles, "{call}");
            assert_eq!(after.mappings, before.mappings, "{call}");
            rig.assert_accounts_agree();
            rig.close();
        }
    }
}

#[test]
fn v3_growing_by_a_page_at_a_time_loses_no_addresses() {
    for (preset, most_maps) in [(Preset::Vpmm, 200), (Preset::Vramp, 200)] {
        let rig = Rig::new(preset);
        let reserves = rig.sim.calls_of(Call::Reserve);
        let (maps, ()) = rig.calls(Call::Map, || {
            for count in 1..=200 {
                rig.free(rig.malloc(count));
            }
        });
        assert!(maps <= most_maps, "{}: {maps} maps", preset.name());
        assert_eq!(rig.sim.calls_of(Call::Reserve) - reserves, 1);
        assert_eq!(rig.sim.live().reserved_addresses, rig.census().addresses);
        rig.close();
    }
}

#[test]
fn v4_addresses_that_cannot_be_unmapped_are_never_used_again() {
    let rig = Rig::vpmm(4);
    let [two, guard] = [2, 1].map(|count| rig.malloc(count));
    let stuck = range(&two);
    rig.free(two);
    rig.free(rig.malloc(3));
    rig.sim.set_faults(FaultPlan::nth_of(Call::Unmap, 1).with_code(1));
    let mut held = vec![rig.malloc(1)];
    assert_eq!(rig.census().quarantined_addresses, stuck.len);
    // The addresses would be the best fit for each of these.
    held.extend((0..4).map(|_| rig.malloc(2)));
    assert!(held.iter().all(|block| !overlap(range(block), stuck)));
    assert_eq!(rig.census().quarantined_addresses, stuck.len);
    held.into_iter().chain([guard]).for_each(|block| rig.free(block));
    rig.close();
}

/// Two streams on a checked card; the second one's kernel still runs on the block that is freed.
fn used_on_two_streams(note_the_use: bool) -> u64 {
    let rig = Rig::on(Simulator::builder().checked(), Config::default());
    let other = rig.allocator.create_stream().expect("a stream");
    let raw = |id| rig.allocator.stream(id).expect("the stream is known");
    let block = rig.malloc(4);
    let range = AddrRange::new(block.addr(), block.len());
    let long = Kernel::new("reader on the other stream").reading(range).lasting(1_000_000);
    rig.sim.launch(raw(other), long).expect("it can be queued");
    if note_the_use {
        rig.allocator.record_use(&block, other).expect("the block is ours");
    }
    rig.free(block);
    let next = rig.malloc(4);
    let range = AddrRange::new(next.addr(), next.len());
    rig.sim
        .launch(raw(rig.stream), Kernel::new("writer").writing(range))
        .expect("it can be queued");
    rig.sim.synchronize_stream(raw(other)).expect("it ends");
    let found = rig.sim.hazards_found();
    rig.free(next);
    found
}

#[test]
fn v5_uses_on_other_streams_are_honoured() {
    assert_eq!(used_on_two_streams(true), 0);
    assert!(used_on_two_streams(false) > 0, "the checker sees what the note prevents");
}

#[test]
fn v6_each_device_has_a_pool_of_its_own() {
    for preset in [Preset::Vpmm, Preset::Vramp] {
        let (here, there) = (Rig::new(preset), Rig::new(preset));
        // One thread uses both in turn; each takes memory of its own device.
        let blocks: Vec<_> = (1..=3).map(|count| (here.malloc(count), there.malloc(2))).collect();
        here.assert_accounts_agree();
        there.assert_accounts_agree();
        assert_eq!((here.held() >= 6, there.held() >= 6), (true, true));
        let calls = (here.sim.calls(), there.sim.calls());
        let block = here.malloc(1);
        assert_eq!(there.sim.calls(), calls.1, "no call reaches the other device");
        let error = there.allocator.free(block, there.stream).expect_err("it is not that one's");
        let FreeError::Foreign(block) = error else { panic!("{error}") };
        here.free(block);
        let unknown = vramp_alloc::StreamId::new(77);
        let error = here.allocator.malloc(PAGE, unknown).expect_err("no such stream");
        assert!(matches!(error, AllocError::UnknownStream(_)), "{error}");
        for (ours, theirs) in blocks {
            here.free(ours);
            there.free(theirs);
        }
        here.close();
        there.close();
    }
}

#[test]
fn v7_a_destroyed_context_is_an_error_and_not_a_dangling_pool() {
    for preset in [Preset::Vpmm, Preset::Vramp] {
        let rig = Rig::new(preset);
        let held = rig.malloc(2);
        rig.free(rig.malloc(4));
        let before = rig.sim.live();
        // Other code destroys the context: every call fails from the next one on.
        rig.sim.set_faults(FaultPlan::nth(1).with_code(709));
        for count in [8, 16] {
            let error = rig.allocator.malloc(pages(count), rig.stream).expect_err("it is gone");
            let AllocError::Driver(error) = error else { panic!("{}: {error}", preset.name()) };
            assert!(error.is_device_lost() && error.code == 709, "{}: {error}", preset.name());
        }
        assert_eq!(rig.sim.live(), before, "nothing of the old context is touched");
        rig.allocator.audit().expect("every invariant holds");
        let _ = rig.allocator.free(held, rig.stream);
        rig.allocator.close().expect_err("nothing can be returned");
    }
}

#[test]
fn v8_a_lost_device_never_looks_like_work_in_flight() {
    let (rig, kept) = comb();
    rig.free(rig.malloc(8));
    rig.sim.set_faults(FaultPlan::nth_of(Call::Query, 1).with_code(700));
    let error = rig.allocator.malloc(PAGE, rig.stream).expect_err("the device is lost");
    assert!(matches!(&error, AllocError::Driver(error) if error.is_device_lost()), "{error}");
    drop(kept);
}

#[test]
fn v9_odd_pages_are_refused_and_small_address_spaces_are_enough() {
    let sim: Arc<dyn Driver> = Arc::new(Simulator::builder().build());
    for page in [Bytes::mib(3), Bytes::mib(6), Bytes::ZERO] {
        let config = Config { page: Some(page), ..Preset::Vpmm.config() };
        Allocator::new(Arc::clone(&sim), config).expect_err("not a page of this device");
    }
    for preset in [Preset::Vpmm, Preset::Vramp] {
        let rig = Rig::on(Simulator::builder().address_space(Bytes::gib(1)), preset.config());
        rig.free(rig.malloc(100));
        rig.close();
    }
}

#[test]
fn v10_no_block_straddles_two_reservations() {
    let config = Config { span: pages(4), ..Preset::Vpmm.config() };
    let rig = Rig::on(Simulator::builder(), config);
    let mut blocks: Vec<_> = (0..4).map(|_| rig.malloc(4)).collect();
    blocks.sort_by_key(vramp_alloc::Allocation::addr);
    let ranges: Vec<AddrRange> = blocks.iter().map(range).collect();
    assert_eq!(rig.sim.live().reservations, 4);
    let adjacent = ranges.windows(2).any(|pair| pair[0].start + pair[0].len == pair[1].start);
    assert!(adjacent, "two reservations lie side by side: {ranges:?}");
    blocks.into_iter().for_each(|block| rig.free(block));
    let (maps, eight) = rig.calls(Call::Map, || rig.malloc(8));
    assert_eq!((maps, rig.sim.live().reservations), (8, 5), "a reservation of its own");
    assert!(ranges.iter().all(|&old| !overlap(old, range(&eight))));
    rig.free(eight);
    rig.close();
}

#[test]
fn v11_events_are_used_again() {
    let rig = Rig::vpmm(64);
    for _ in 0..100 {
        rig.free(rig.malloc(4));
    }
    let other = rig.allocator.create_stream().expect("a stream");
    rig.free_on(rig.malloc_on(4, other), other);
    let created = rig.sim.calls_of(Call::CreateEvent);
    for _ in 0..100 {
        rig.free_on(rig.malloc_on(60, other), other);
        rig.free(rig.malloc(60));
    }
    let more = rig.sim.calls_of(Call::CreateEvent) - created;
    assert!(more <= 10, "{more} events for 200 frees");
    let default = Rig::new(Preset::Vramp);
    let (records, ()) = default.calls(Call::Record, || {
        (0..100).for_each(|_| default.free(default.malloc(4)));
    });
    assert_eq!(records, 0, "a free calls nothing");
}

#[test]
fn v12_a_thousand_pending_regions_cost_a_handful_of_queries() {
    for preset in [Preset::Vpmm, Preset::Vramp] {
        let config = Config { limit: Some(pages(2000)), ..preset.config() };
        let rig = Rig::on(Simulator::builder().checked(), config);
        let blocks: Vec<_> = (0..2000)
            .map(|_| rig.allocator.malloc(PAGE, rig.stream).expect("there is memory"))
            .collect();
        let mut kept = Vec::new();
        rig.occupy(&blocks[0], rig.stream);
        for (index, block) in blocks.into_iter().enumerate() {
            if index % 2 == 0 {
                rig.allocator.free(block, rig.stream).expect("it is ours");
            } else {
                kept.push(block);
            }
        }
        let other = rig.allocator.create_stream().expect("a stream");
        let (queries, (cost, page)) =
            rig.calls(Call::Query, || rig.cost(|| rig.malloc_on(1, other)));
        assert!(queries <= 4, "{}: {queries} queries", preset.name());
        assert_eq!((cost.creates, cost.waits), (0, 1), "{}: all are pending", preset.name());
        rig.occupy(&page, other);
        assert_eq!(rig.sim.hazards(), []);
    }
}

#[test]
fn v13_a_new_free_does_not_poison_its_idle_neighbour() {
    let rig = Rig::on(Simulator::builder(), Config::default());
    let other = rig.allocator.create_stream().expect("a stream");
    let raw = rig.allocator.stream(rig.stream).expect("the stream is known");
    let [hundred, one] = [100, 1].map(|count| rig.malloc(count));
    rig.free(hundred);
    // The hundred pages are seen to be idle.
    rig.allocator.trim(rig.census().reserved).expect("there is nothing to return");
    let long = Kernel::new("long").writing(AddrRange::new(one.addr(), one.len())).lasting(1 << 40);
    rig.sim.launch(raw, long).expect("it can be queued");
    rig.free(one);
    let (maps, _block) = rig.calls(Call::Map, || rig.malloc_on(100, other));
    assert_eq!(maps, 0);
    assert_eq!(rig.sim.calls_of(Call::Wait), 0);
}

#[test]
fn v14_idle_neighbours_of_different_streams_merge() {
    let rig = Rig::new(Preset::Vramp);
    let streams: Vec<_> =
        (0..16).map(|_| rig.allocator.create_stream().expect("a stream")).collect();
    rig.allocator.prefill(pages(64), rig.stream).expect("there is memory");
    let blocks: Vec<_> = (0..16).map(|_| rig.malloc(4)).collect();
    for (block, &stream) in blocks.into_iter().zip(&streams) {
        rig.free_on(block, stream);
    }
    rig.allocator.trim(rig.census().reserved).expect("there is nothing to return");
    let (maps, all) = rig.calls(Call::Map, || rig.malloc(64));
    assert_eq!(maps, 0);
    assert_eq!(rig.held(), 64);
    rig.free(all);
}

#[test]
fn v15_one_page_short_moves_one_page_and_not_the_request() {
    let rig = Rig::new(Preset::Vramp);
    rig.free(rig.malloc(5000));
    let (maps, block) = rig.calls(Call::Map, || rig.malloc(5001));
    assert!(maps <= 2, "{maps} maps");
    rig.free(block);
}

#[test]
fn v16_a_cold_ten_gib_takes_a_hundred_handles() {
    let rig = Rig::new(Preset::Vramp);
    let (creates, block) = rig.calls(Call::Create, || rig.malloc(5120));
    assert!(creates <= 100, "{creates} handles");
    rig.free(block);
}

#[test]
fn v17_old_mappings_go_without_a_large_malloc() {
    let (rig, kept) = comb();
    let moved = rig.malloc(8);
    assert_eq!(rig.census().retired, pages(8));
    rig.sim.synchronize_stream(rig.raw(rig.stream)).expect("it ends");
    // The pool of pages serves no request below a page, and yet one is enough.
    let (unmaps, tiny) = rig.calls(Call::Unmap, || {
        rig.allocator.malloc(Bytes::new(1), rig.stream).expect("there is memory")
    });
    assert_eq!((unmaps, rig.census().retired), (4, Bytes::ZERO), "\n{}", rig.census());
    rig.free(tiny);
    rig.free(moved);
    kept.into_iter().for_each(|block| rig.free(block));
    rig.close();
    // Nor does a trim need one.
    let (rig, kept) = comb();
    rig.free(rig.malloc(8));
    assert!(rig.census().retired > Bytes::ZERO);
    kept.into_iter().for_each(|block| rig.free(block));
    rig.allocator.trim(Bytes::ZERO).expect("everything is idle");
    let census = rig.census();
    assert_eq!((census.reserved, census.retired), (Bytes::ZERO, Bytes::ZERO), "\n{census}");
}

#[test]
fn v18_sizes_are_not_rounded_to_pages_and_small_ones_share_the_pool() {
    let rig = Rig::new(Preset::Vramp);
    let size = PAGE + Bytes::new(1);
    let block = rig.allocator.malloc(size, rig.stream).expect("there is memory");
    assert_eq!(block.len(), PAGE + Bytes::new(512));
    let small = rig.allocator.malloc(Bytes::new(100), rig.stream).expect("there is memory");
    assert_eq!(small.len(), Bytes::new(512));
    assert_eq!(rig.sim.calls_of(Call::MallocAsync), 0);
    rig.free(block);
    rig.free(small);
}

#[test]
fn v19_memory_can_be_trimmed_and_capped_and_a_shortage_tells_its_numbers() {
    let config = Config { limit: Some(pages(32)), ..Config::default() };
    let rig = Rig::on(Simulator::builder(), config);
    let held = rig.malloc(20);
    let error = rig.allocator.malloc(pages(20), rig.stream).expect_err("above the limit");
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    assert_eq!(report.shortage.requested, pages(20));
    assert_eq!(report.shortage.limit, Some(pages(32)));
    assert_eq!(report.shortage.used, pages(20));
    rig.free(held);
    rig.allocator.trim(Bytes::ZERO).expect("everything is idle");
    assert_eq!(rig.sim.live().device_bytes, Bytes::ZERO);
}

#[test]
fn v20_free_memory_keeps_no_stream_or_event_alive() {
    let rig = Rig::new(Preset::Vramp);
    let before = rig.sim.live();
    let mut events = Vec::new();
    for _ in 0..10 {
        for _ in 0..50 {
            let stream = rig.allocator.create_stream().expect("a stream");
            let block = rig.malloc_on(2, stream);
            let work = Kernel::new("work").writing(range(&block)).lasting(1_000);
            rig.sim.launch(rig.raw(stream), work).expect("the stream takes work");
            rig.free_on(block, stream);
            rig.allocator.destroy_stream(stream).expect("it is open");
            assert_eq!(rig.sim.live().streams, before.streams, "free memory keeps no stream");
        }
        events.push(rig.sim.live().events);
        assert!(rig.census().free >= pages(2));
    }
    assert!(events[0] <= 51 && events[9] <= events[0], "events are used again: {events:?}");
    rig.close();
}

#[test]
fn v21_odd_requests_are_answers_and_never_panics() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let [a, b] = [0, 0].map(|size| {
            rig.allocator.malloc(Bytes::new(size), rig.stream).expect("nothing is something")
        });
        assert_ne!(a.addr(), b.addr());
        for size in [u64::MAX, u64::MAX - 511, 1 << 60, 1 << 44] {
            let error = rig.allocator.malloc(Bytes::new(size), rig.stream);
            let error = error.expect_err("no card has that");
            assert!(error.is_out_of_memory(), "{}: {error}", preset.name());
        }
        rig.free(a);
        rig.free(b);
    }
    let nothing = Capabilities {
        virtual_memory: false,
        stream_ordered_pool: true,
        host_numa: false,
        pinned_host: false,
        remap_beside_kernels: false,
        graphs: false,
        posix_fd: false,
        fabric: false,
        rdma: false,
        dma_buf: false,
    };
    let sim: Arc<dyn Driver> = Arc::new(Simulator::builder().capabilities(nothing).build());
    let error = Allocator::new(sim, Config::default()).expect_err("there is no virtual memory");
    assert!(
        matches!(error, CreateError::NotSupported { instead: "stream-ordered", .. }),
        "{error}"
    );
}

#[test]
fn v22_bytes_survive_remaps_beside_work_on_two_streams() {
    let builder = Simulator::builder().memory(pages(64)).contents(Contents::Stored).checked();
    for preset in [Preset::Vpmm, Preset::Vramp] {
        let rig = Rig::on(builder.clone(), preset.config());
        let other = rig.allocator.create_stream().expect("a stream");
        let mut kept = Vec::new();
        for round in 0..12u8 {
            let stream = if round % 2 == 0 { rig.stream } else { other };
            let raw = rig.allocator.stream(stream).expect("the stream is known");
            let [block, gap] = [2, 3].map(|count| rig.malloc_on(count, stream));
            for (block, byte) in [(&block, round), (&gap, 0xEE)] {
                let range = AddrRange::new(block.addr(), block.len());
                rig.sim.fill(raw, range, byte).expect("it can be queued");
            }
            rig.free_on(gap, stream);
            kept.push((block, stream, round));
            if round % 4 == 3 {
                let large = rig.malloc_on(6, stream);
                let range = AddrRange::new(large.addr(), large.len());
                rig.sim.fill(raw, range, 0xDD).expect("it can be queued");
                rig.free_on(large, stream);
            }
        }
        for (block, stream, byte) in kept {
            let raw = rig.allocator.stream(stream).expect("the stream is known");
            rig.sim.synchronize_stream(raw).expect("it ends");
            let bytes = rig.sim.peek(AddrRange::new(block.addr(), block.len()));
            assert!(vramp_testing::is_filled(&bytes.expect("bytes are stored"), byte));
            rig.free_on(block, stream);
        }
        let moved = rig.allocator.pool_state().expect("there is a pool").counters().chunks_moved;
        assert!(moved > 0, "{}: nothing was remapped", preset.name());
        assert_eq!(rig.sim.hazards(), []);
        rig.close();
    }
}
