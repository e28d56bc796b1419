//! What each operation costs in driver calls, as exact lists, so that no operation gets dearer unnoticed.

use crate::common::{Rig, pages};
use vramp_alloc::{AllocError, Allocation, Bytes, Config, StreamId};
use vramp_driver::Call;
use vramp_driver::sim::{Gate, Kernel, Simulator};
use vramp_peers::Preset;

fn rig(preset: Preset) -> Rig {
    limited(preset, None)
}

fn limited(preset: Preset, limit: Option<Bytes>) -> Rig {
    let config = Config { span: Bytes::gib(16), limit, ..preset.config() };
    let rig = Rig::on(Simulator::builder().logged(1 << 12), config);
    rig.sim.take_log();
    rig
}

/// The calls since the log was last taken: name, and amount of memory where one is given. Left out
/// is the question whether a stream captures, which has a test of its own.
fn calls(rig: &Rig) -> Vec<String> {
    let logged = rig.sim.take_log().into_iter().filter(|call| call.call != Call::IsCapturing);
    let line = |call: vramp_driver::sim::LoggedCall| match call.len {
        Some(len) => format!("{} {len}", call.call),
        None => call.call.to_string(),
    };
    logged.map(line).collect()
}

fn repeated(calls: &[&'static str], times: usize) -> Vec<&'static str> {
    calls.repeat(times)
}

/// A block of so many pages, and the calls it took.
fn malloc(rig: &Rig, pages: u64) -> (Allocation, Vec<String>) {
    malloc_on(rig, pages, rig.stream)
}

fn malloc_on(rig: &Rig, pages: u64, stream: StreamId) -> (Allocation, Vec<String>) {
    rig.sim.take_log();
    let block = rig.malloc_on(pages, stream);
    (block, calls(rig))
}

fn free(rig: &Rig, block: Allocation) -> Vec<String> {
    rig.sim.take_log();
    rig.free(block);
    calls(rig)
}

/// Keeps the rig's stream at work until the gate is opened.
fn keep_busy(rig: &Rig) -> Gate {
    let gate = rig.sim.gate();
    let stream = rig.allocator.stream(rig.stream).unwrap();
    rig.sim.launch(stream, Kernel::new("busy").until(gate)).unwrap();
    gate
}

#[test]
fn the_first_malloc_reserves_addresses_and_creates_chunks() {
    let chunks = repeated(&["create 8.00 MiB", "map"], 4);
    let expected = [vec!["reserve 16.00 GiB"], chunks, vec!["set-access 32.00 MiB"]].concat();
    assert_eq!(malloc(&rig(Preset::Vramp), 16).1, expected);

    let chunks = repeated(&["create 2.00 MiB", "map"], 16);
    let expected = [vec!["reserve 16.00 GiB"], chunks, vec!["set-access 32.00 MiB"]].concat();
    assert_eq!(malloc(&rig(Preset::Vpmm), 16).1, expected);
}

#[test]
fn a_free_calls_nothing_but_vpmms_event_and_a_hit_calls_nothing() {
    // VPMM's first event stays open, because it was not queried: the second free needs another.
    for (preset, freeing) in
        [(Preset::Vramp, vec![]), (Preset::Vpmm, vec!["create-event", "record"])]
    {
        let rig = rig(preset);
        let (block, _) = malloc(&rig, 16);
        assert_eq!(free(&rig, block), freeing, "{preset:?}");
        let (block, hit) = malloc(&rig, 16);
        assert!(hit.is_empty(), "{preset:?}: {hit:?}");
        assert_eq!(free(&rig, block), freeing, "{preset:?}");
    }
}

#[test]
fn a_small_hit_calls_nothing() {
    let rig = rig(Preset::Vramp);
    let first = rig.allocator.malloc(Bytes::new(512), rig.stream).unwrap();
    let slab = ["reserve 16.00 GiB", "create 2.00 MiB", "map", "set-access 2.00 MiB"];
    assert_eq!(calls(&rig), slab);
    let second = rig.allocator.malloc(Bytes::kib(64), rig.stream).unwrap();
    rig.allocator.record_use(&second, rig.stream).unwrap();
    rig.free(first);
    rig.free(second);
    let _page = rig.malloc(1);
    assert_eq!(calls(&rig), [] as [&str; 0], "an empty slab serves the next page");
}

#[test]
fn growth_in_place_creates_and_maps_the_shortfall_alone() {
    let shortfall = [
        (Preset::Vramp, vec!["create 8.00 MiB", "map", "set-access 8.00 MiB"]),
        (
            Preset::Vpmm,
            [repeated(&["create 2.00 MiB", "map"], 4), vec!["set-access 8.00 MiB"]].concat(),
        ),
    ];
    for (preset, expected) in shortfall {
        let rig = rig(preset);
        let (block, _) = malloc(&rig, 16);
        free(&rig, block);
        assert_eq!(malloc(&rig, 20).1, expected, "{preset:?}");
    }
}

#[test]
fn memory_of_a_busy_stream_costs_an_event_and_a_wait_at_the_limit() {
    let rig = limited(Preset::Vramp, Some(pages(16)));
    let other = rig.allocator.create_stream().unwrap();
    let (block, _) = malloc(&rig, 16);
    let gate = keep_busy(&rig);
    free(&rig, block);
    let (_, taken) = malloc_on(&rig, 16, other);
    assert_eq!(taken, ["create-event", "record", "query", "wait"]);
    rig.sim.open(gate);
    rig.close();
}

/// VPMM has its event from the free, but takes busy memory only by moving it.
#[test]
fn vpmm_moves_the_pages_of_a_busy_stream_behind_a_wait() {
    let rig = rig(Preset::Vpmm);
    let other = rig.allocator.create_stream().unwrap();
    let (block, _) = malloc(&rig, 16);
    let gate = keep_busy(&rig);
    free(&rig, block);
    let (_, taken) = malloc_on(&rig, 16, other);
    let moved = repeated(&["map"], 16);
    let expected = [vec!["query"], moved, vec!["set-access 32.00 MiB", "wait"]].concat();
    assert_eq!(taken, expected);
    rig.sim.open(gate);
    rig.close();
}

#[test]
fn memory_of_a_stream_that_is_done_costs_vpmm_one_query() {
    let rig = rig(Preset::Vpmm);
    let other = rig.allocator.create_stream().unwrap();
    let (block, _) = malloc(&rig, 16);
    free(&rig, block);
    assert_eq!(malloc_on(&rig, 16, other).1, ["query"]);
}

#[test]
fn a_remap_maps_each_moved_chunk_once_and_records_one_event() {
    for moved in [1, 4] {
        let rig = rig(Preset::Vramp);
        // Every other one stays, so that no two free chunks are neighbours.
        let blocks: Vec<Allocation> = (0..2 * (moved + 1)).map(|_| rig.malloc(4)).collect();
        let mut kept = Vec::new();
        for (n, block) in blocks.into_iter().enumerate() {
            if n % 2 == 0 {
                assert!(free(&rig, block).is_empty());
            } else {
                kept.push(block);
            }
        }
        // The first free chunk has a hole before it, so the others come to it.
        let (_, made) = malloc(&rig, 4 * (moved + 1));
        let access = format!("set-access {}", Bytes::mib(8 * moved));
        let mut expected = repeated(&["map"], moved as usize);
        expected.extend([access.as_str(), "create-event", "record"]);
        assert_eq!(made, expected);
    }
}

#[test]
fn a_vpmm_remap_maps_each_page_once() {
    let rig = rig(Preset::Vpmm);
    let (first, _) = malloc(&rig, 4);
    let _kept = rig.malloc(1);
    let (third, _) = malloc(&rig, 4);
    let _also_kept = rig.malloc(1);
    free(&rig, first);
    free(&rig, third);
    let expected = [repeated(&["map"], 8), vec!["set-access 16.00 MiB"]].concat();
    assert_eq!(malloc(&rig, 8).1, expected);
}

#[test]
fn a_trim_unmaps_and_releases_each_chunk() {
    let chunks = [
        (Preset::Vramp, vec!["create-event", "record", "query"], ["unmap 8.00 MiB", "release"], 4),
        // The driver's pool first: pages may stay as far as it leaves room. What both had reserved until
        // now counts in the peak.
        (
            Preset::Vpmm,
            vec!["pool-usage", "trim-pool 0 B", "pool-usage", "query"],
            ["unmap 2.00 MiB", "release"],
            16,
        ),
    ];
    for (preset, learning, chunk, count) in chunks {
        let rig = rig(preset);
        let (block, _) = malloc(&rig, 16);
        free(&rig, block);
        rig.allocator.trim(Bytes::ZERO).unwrap();
        let expected = [learning, repeated(&chunk, count)].concat();
        assert_eq!(calls(&rig), expected, "{preset:?}");
        assert_eq!(rig.held(), 0);
    }
}

#[test]
fn a_close_unmaps_each_stretch_once() {
    let wait = ["create-event", "record", "synchronize-event", "destroy-event"];
    // First without the lock, and then with it.
    let waits = || [&wait[..], &["is-capturing"], &wait].concat();
    let of_the_drivers_pool = vec!["trim-pool"];
    for (preset, first, chunks, events) in [
        (Preset::Vramp, vec![], 4, vec![]),
        (Preset::Vpmm, of_the_drivers_pool, 16, vec!["destroy-event"]),
    ] {
        let rig = rig(preset);
        let (block, _) = malloc(&rig, 16);
        free(&rig, block);
        let Rig { sim, allocator, .. } = rig;
        allocator.close().unwrap();
        let made: Vec<String> = sim.take_log().iter().map(|call| call.call.to_string()).collect();
        let expected = [
            waits(),
            first,
            vec!["unmap"],
            repeated(&["release"], chunks),
            vec!["free-addresses"],
            events,
            vec!["destroy-stream"],
        ];
        assert_eq!(made, expected.concat(), "{preset:?}");
    }
}

#[test]
fn only_a_plan_with_events_asks_whether_a_stream_captures_and_only_its_own() {
    let rig = limited(Preset::Vramp, Some(pages(8)));
    for _ in 0..1_000 {
        rig.allocator.create_stream().unwrap();
    }
    let (asked, first) = rig.calls(Call::IsCapturing, || rig.malloc(8));
    assert_eq!(asked, 0, "growth records nothing");
    let other = rig.allocator.create_stream().unwrap();
    let gate = keep_busy(&rig);
    rig.free(first);
    // The memory is busy, and the pool cannot grow: the stream waits for it.
    let waits = rig.sim.calls_of(Call::Wait);
    let (asked, taken) =
        rig.calls(Call::IsCapturing, || rig.allocator.malloc(Bytes::mib(12), other));
    assert_eq!(rig.sim.calls_of(Call::Wait), waits + 1);
    assert_eq!(asked, 1, "of 1,002 streams only the one that is to wait");
    rig.sim.open(gate);
    rig.allocator.free(taken.unwrap(), other).unwrap();
}

#[test]
fn what_is_assembled_ahead_leaves_the_last_piece_alone_to_move() {
    let config = Config { span: Bytes::gib(16), limit: Some(Bytes::mib(64)), ..Config::default() };
    let rig = Rig::on(Simulator::builder().logged(1 << 12), config);
    // The whole limit, in chunks of 8 MiB, each of an arena that keeps it at other addresses.
    let piece = Bytes::mib(8);
    let ranges: Vec<_> =
        (0..8).map(|_| rig.allocator.stable_range(piece, piece).unwrap()).collect();
    ranges.iter().for_each(|range| range.back(rig.stream).unwrap());
    let whole = Bytes::mib(64);
    let shortage = match rig.allocator.malloc(whole, rig.stream) {
        Err(AllocError::OutOfMemory(report)) => report.shortage,
        other => panic!("{other:?}"),
    };
    assert_eq!(shortage.block_for, Some(rig.stream));
    for range in &ranges[..7] {
        range.lend(&[]);
        rig.sim.take_log();
        rig.allocator.assemble(&shortage).unwrap();
        rig.allocator.audit().unwrap();
        assert_eq!(calls(&rig), ["map", "set-access 8.00 MiB"]);
        rig.allocator.assemble(&shortage).unwrap();
        assert_eq!(calls(&rig), [] as [&str; 0], "there is nothing left to move");
    }
    // It is still free, for any request.
    let other = rig.allocator.malloc(Bytes::mib(32), rig.stream).unwrap();
    rig.free(other);
    ranges[7].lend(&[]);
    rig.sim.take_log();
    let block = rig.allocator.malloc(whole, rig.stream).unwrap();
    assert_eq!(calls(&rig), ["map", "set-access 8.00 MiB"]);
    rig.free(block);
}

#[test]
fn what_is_assembled_among_many_larger_regions_is_moved_once() {
    let config = Config { span: Bytes::gib(16), ..Config::default() };
    let rig = Rig::on(Simulator::builder().logged(1 << 12), config);
    // More regions than are looked at, each larger than what can be moved, and none can grow.
    let chunk = Bytes::mib(32);
    rig.allocator.prefill(chunk * 66, rig.stream).unwrap();
    let between: Vec<_> = (0..66).map(|_| (rig.malloc(10), rig.malloc(6))).collect();
    let movable = rig.malloc(8);
    let held = rig.allocator.stats().unwrap().reserved;
    rig.allocator.set_limit(Some(held)).unwrap();
    rig.free(movable);
    for (free, _) in between {
        rig.free(free);
    }
    let shortage = match rig.allocator.malloc(Bytes::mib(256), rig.stream) {
        Err(AllocError::OutOfMemory(report)) => report.shortage,
        other => panic!("{other:?}"),
    };
    rig.sim.take_log();
    rig.allocator.assemble(&shortage).unwrap();
    let moved = calls(&rig);
    assert!(moved.iter().filter(|call| *call == "map").count() <= 8, "{moved:?}");
    rig.allocator.assemble(&shortage).unwrap();
    assert_eq!(calls(&rig), [] as [&str; 0], "it lies where it can grow by now");
    rig.allocator.audit().unwrap();
}

#[test]
fn memory_that_others_freed_comes_back_to_its_addresses_without_a_call_that_moves_it() {
    let rig = rig(Preset::Vramp);
    let range = rig.allocator.stable_range(Bytes::mib(32), Bytes::mib(32)).unwrap();
    range.back(rig.stream).unwrap();
    range.lend(&[]);
    let other = rig.allocator.create_stream().unwrap();
    let limit = rig.allocator.stats().unwrap().reserved;
    rig.allocator.set_limit(Some(limit)).unwrap();
    let (block, _) = malloc_on(&rig, 16, other);
    rig.allocator.set_limit(None).unwrap();
    rig.free_on(block, other);
    rig.sim.take_log();
    range.back(rig.stream).unwrap();
    let moved = calls(&rig);
    // The other stream's work is over, and that was not queried yet.
    assert_eq!(moved, ["create-event", "record", "query"]);
    assert_eq!(range.memory().backed, Bytes::mib(32));
}

#[test]
fn a_block_comes_back_to_where_its_chunks_lay_before_and_nothing_is_mapped() {
    let rig = rig(Preset::Vramp);
    let range = rig.allocator.stable_range(Bytes::mib(32), Bytes::mib(8)).unwrap();
    range.back(rig.stream).unwrap();
    let held = rig.allocator.stats().unwrap().reserved;
    rig.allocator.set_limit(Some(held)).unwrap();
    range.lend(&[]);
    let (block, moved) = malloc(&rig, 16);
    assert_eq!(moved, [repeated(&["map"], 4), vec!["set-access 32.00 MiB"]].concat());
    let at = block.addr();
    rig.free(block);
    for _ in 0..3 {
        range.back(rig.stream).unwrap();
        range.lend(&[]);
        let (block, calls) = malloc(&rig, 16);
        assert_eq!(block.addr(), at);
        assert!(calls.iter().all(|call| call == "query"), "all is mapped there still: {calls:?}");
        rig.free(block);
    }
}
