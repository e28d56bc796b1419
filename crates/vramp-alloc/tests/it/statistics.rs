//! Statistics by PyTorch's names, histories and snapshots.

use std::collections::{BTreeSet, VecDeque};
use std::sync::mpsc::channel;

use vramp_alloc::history::HistorySize;
use vramp_alloc::stats::StatByPool;
use vramp_alloc::{Allocation, Bytes};
use vramp_driver::sim::Simulator;
use vramp_peers::Preset;
use vramp_trace::{BlockState, EventKind, ReadLimits, read_trace};

use crate::common::{PAGE, Random, Rig, pages};

#[test]
fn statistics_have_pytorchs_names_and_meanings() {
    let rig = Rig::new(Preset::Vramp);
    let small = rig.allocator.malloc(Bytes::new(1000), rig.stream).expect("there is memory");
    let large = rig.allocator.malloc(Bytes::new(5_000_001), rig.stream).expect("there is memory");
    let stats = rig.allocator.memory_stats().expect("no call fails").by_name();
    let expected = [
        ("allocation.all.current", 2),
        ("allocation.small_pool.current", 1),
        ("allocation.large_pool.current", 1),
        ("allocated_bytes.small_pool.current", 1024),
        ("requested_bytes.small_pool.current", 1000),
        ("requested_bytes.large_pool.current", 5_000_001),
        ("allocated_bytes.large_pool.current", 5_000_192),
        ("requested_bytes.all.peak", 5_001_001),
        ("num_ooms", 0),
    ];
    for (name, value) in expected {
        assert_eq!(stats.get(name), Some(&value), "{name}");
    }
    // One chunk and nothing in it is whole.
    assert_eq!(
        stats["reserved_bytes.all.current"],
        stats["active_bytes.all.current"] + stats["inactive_split_bytes.all.current"]
    );
    rig.free(large);
    rig.free(small);
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.allocated_bytes.all.current, 0);
    assert_eq!(stats.allocated_bytes.all.freed, 1024 + 5_000_192);
    assert_eq!(stats.requested_bytes.all.peak, 5_001_001);
    rig.allocator.reset_peak_stats();
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.requested_bytes.all.peak, 0);
    let block = rig.malloc(3);
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.allocated_bytes.all.peak, pages(3).count());
    let reserved = stats.reserved_bytes.all;
    assert!(reserved.peak >= reserved.current);
    rig.free(block);
}

/// Every name of `torch.cuda.memory_stats`.
fn names_of_pytorch() -> BTreeSet<String> {
    let quantities = [
        "allocation",
        "allocated_bytes",
        "requested_bytes",
        "active",
        "active_bytes",
        "reserved_bytes",
        "segment",
        "inactive_split",
        "inactive_split_bytes",
    ];
    let pools = ["all", "small_pool", "large_pool"];
    let by_pool = quantities.iter().flat_map(|name| pools.map(|pool| format!("{name}.{pool}")));
    let whole = ["oversize_allocations", "oversize_segments"].map(str::to_owned);
    let parts = ["current", "peak", "allocated", "freed"];
    let stats = by_pool.chain(whole).flat_map(|stat| parts.map(|part| format!("{stat}.{part}")));
    let counts = [
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "max_split_size",
    ];
    stats.chain(counts.map(str::to_owned)).collect()
}

#[test]
fn every_preset_has_every_name_of_pytorch_and_no_other() {
    for preset in Preset::ALL {
        let stats = Rig::new(preset).allocator.memory_stats().expect("no call fails").by_name();
        let names: BTreeSet<String> = stats.into_keys().collect();
        assert_eq!(names, names_of_pytorch(), "{}", preset.name());
    }
}

#[test]
fn reading_reserved_memory_looks_at_blocks_that_wait_and_at_no_others() {
    let rig = Rig::new(Preset::Vramp);
    let other = rig.allocator.create_stream().expect("a stream can be made");
    let read = || rig.allocator.reserved_memory().expect("no call fails");
    let mut kept = Vec::new();
    let many = (vramp_testing::cases(500) as usize).min(4_000);
    for (blocks, waiting) in [(10, 2), (many, 2), (many, 64)] {
        let mut freed = Vec::new();
        for nth in 0..2 * blocks {
            let block = rig.allocator.malloc(Bytes::mib(2), rig.stream).expect("there is memory");
            if nth % 2 == 0 { freed.push(block) } else { kept.push(block) }
        }
        let before = read();
        for (nth, block) in freed.into_iter().enumerate() {
            if nth < waiting {
                rig.allocator.record_use(&block, other).expect("it is ours");
            }
            rig.free(block);
        }
        let (now, streams) = (read(), 2);
        assert!(now.waiting[1] > 0, "{now:?}");
        assert!(now.looked_at - now.waiting[1] <= streams, "{now:?}");
        assert!(now.waiting[1] <= before.waiting[1] + waiting as u64, "{now:?}");
        assert!(now.looked_at < 80, "{now:?}");
    }
    kept.into_iter().for_each(|block| rig.free(block));
}

#[test]
fn both_pools_add_up_and_reserved_memory_is_active_or_free() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let other = rig.allocator.create_stream().expect("a stream can be made");
        let mut random = Random(11);
        let mut held = Vec::new();
        for step in 0..300 {
            if random.below(5) < 3 {
                let limit = [2000, 1 << 20, 9 << 20][random.below(3) as usize];
                let size = Bytes::new(1 + random.below(limit));
                held.push(rig.allocator.malloc(size, rig.stream).expect("there is memory"));
            } else if !held.is_empty() {
                let block = held.swap_remove(random.below(held.len() as u64) as usize);
                if step % 7 == 0 {
                    rig.allocator.record_use(&block, other).expect("it is ours");
                }
                rig.free(block);
            }
            let stats = rig.allocator.memory_stats().expect("no call fails");
            for (name, by_pool) in [
                ("allocation", stats.allocation),
                ("active", stats.active),
                ("active_bytes", stats.active_bytes),
                ("reserved_bytes", stats.reserved_bytes),
                ("segment", stats.segment),
                ("inactive_split", stats.inactive_split),
                ("inactive_split_bytes", stats.inactive_split_bytes),
            ] {
                let (all, small, large) = (by_pool.all, by_pool.small_pool, by_pool.large_pool);
                let name = format!("{name} of {}", preset.name());
                assert_eq!(all.current, small.current + large.current, "{name}");
                assert!(all.peak >= all.current, "{name}");
                assert!(small.peak >= small.current && large.peak >= large.current, "{name}");
            }
            assert!(stats.active.all.current >= stats.allocation.all.current);
            for pool in [
                |by: StatByPool| by.all,
                |by: StatByPool| by.small_pool,
                |by: StatByPool| by.large_pool,
            ] {
                let free = pool(stats.inactive_split_bytes).current;
                let active = pool(stats.active_bytes).current;
                let reserved = pool(stats.reserved_bytes).current;
                assert!(active + free <= reserved, "{}: {stats:?}", preset.name());
                let parts = pool(stats.inactive_split).current;
                assert_eq!(parts == 0, free == 0, "{}: {stats:?}", preset.name());
            }
        }
    }
}

#[test]
fn inactive_split_is_free_memory_that_a_trim_cannot_release() {
    let rig = Rig::new(Preset::Vramp);
    let split = |rig: &Rig| {
        let stats = rig.allocator.memory_stats().expect("no call fails");
        let counted = [stats.inactive_split, stats.inactive_split_bytes];
        counted.map(|by| (by.small_pool.current, by.large_pool.current))
    };
    // Two chunks of 16 pages.
    for _ in 0..2 {
        rig.allocator.prefill(pages(16), rig.stream).expect("there is memory");
    }
    assert_eq!(split(&rig), [(0, 0), (0, 0)]);
    let [first, second, third] = [6, 2, 24].map(|count| rig.malloc(count));
    rig.free(first);
    rig.free(third);
    // Of the 24 pages the last 16 are a chunk.
    assert_eq!(split(&rig), [(0, 2), (0, pages(14).count())]);
    rig.sim.advance(1 << 30);
    rig.allocator.empty_cache().expect("everything is idle");
    assert_eq!(rig.held(), 16);
    assert_eq!(split(&rig), [(0, 2), (0, pages(14).count())]);
    rig.free(second);
    assert_eq!(split(&rig), [(0, 0), (0, 0)]);
}

#[test]
fn inactive_split_counts_slabs_with_a_block_and_what_threads_cache() {
    let rig = Rig::new(Preset::Vramp);
    let small = |rig: &Rig| {
        let stats = rig.allocator.memory_stats().expect("no call fails");
        let counted = [stats.inactive_split, stats.inactive_split_bytes, stats.reserved_bytes];
        counted.map(|by| by.small_pool.current)
    };
    let slab = PAGE.count();
    let [tiny, other] = [1024, 2048]
        .map(|size| rig.allocator.malloc(Bytes::new(size), rig.stream).expect("there is memory"));
    assert_eq!(small(&rig), [1, slab - 3072, slab]);
    rig.free(tiny);
    // It stays in the thread's cache.
    assert_eq!(small(&rig), [2, slab - 2048, slab]);
    rig.free(other);
    assert_eq!(small(&rig), [3, slab, slab], "cached blocks keep their slab");
    rig.sim.advance(1 << 30);
    rig.allocator.empty_cache().expect("everything is idle");
    assert_eq!(small(&rig), [0, 0, 0]);
}

#[test]
fn what_only_pytorchs_allocator_counts_is_its_own_count() {
    let torch = "max_split_size_mb:64".parse().expect("the settings are good");
    let config = vramp_peers::Config { torch, ..vramp_peers::Config::preset(Preset::Torch) };
    let config = config.build();
    let rig = Rig::on(Simulator::builder().memory(pages(100)), config);
    let block = rig.malloc(40);
    let stats = rig.allocator.memory_stats().expect("no call fails").by_name();
    assert_eq!(stats["max_split_size"], 64 << 20);
    assert_eq!(stats["oversize_allocations.current"], 1);
    assert_eq!(stats["oversize_segments.current"], 1);
    rig.free(block);
    let rig = Rig::on(Simulator::builder().memory(pages(100)), Preset::Torch.config());
    rig.free(rig.malloc(40));
    rig.free(rig.malloc(90));
    let stats = rig.allocator.memory_stats().expect("no call fails").by_name();
    assert_eq!(stats["num_sync_all_streams"], 1, "before all unused segments are released");
    let stats = Rig::new(Preset::Vramp).allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.by_name()["max_split_size"], u64::MAX);
}

#[test]
fn counts_of_several_threads_add_up() {
    let rig = Rig::new(Preset::Vramp);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = rig.allocator.create_stream().expect("a stream can be made");
                for n in 1..=500 {
                    let size = Bytes::new(n * 97);
                    let block = rig.allocator.malloc(size, stream).expect("there is memory");
                    rig.allocator.free(block, stream).expect("it is ours");
                }
            });
        }
    });
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.allocation.all.allocated, 2000);
    assert_eq!(stats.allocation.all.freed, 2000);
    assert_eq!(stats.requested_bytes.all.allocated, 4 * 97 * (500 * 501 / 2));
    assert_eq!(stats.requested_bytes.all.current, 0);
}

#[test]
fn a_snapshot_shows_every_block_and_reads_back() {
    let rig = Rig::new(Preset::Vramp);
    let frames: vramp_alloc::history::StackSource =
        std::sync::Arc::new(|| vec![("forward".to_owned(), "model.py".to_owned(), 20)]);
    let recording = rig.allocator.record_history(HistorySize::default(), Some(frames));
    let small = rig.allocator.malloc(Bytes::new(700), rig.stream).expect("there is memory");
    let blocks = [5, 3, 9].map(|count| rig.malloc(count));
    let [first, second, third] = blocks;
    rig.free(second);
    let trace = rig.allocator.snapshot(Some(&recording));
    let mut file = Vec::new();
    trace.write_snapshot(&mut file).expect("memory takes it");
    let path = std::env::temp_dir().join(format!("vramp-{}-snapshot.pickle", std::process::id()));
    std::fs::write(&path, &file).expect("a file can be written");
    let read = read_trace(&path, &ReadLimits::default()).expect("it reads back");
    std::fs::remove_file(&path).expect("the file is ours");

    let active: Vec<_> = read
        .segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state == BlockState::Active)
        .collect();
    for block in [&small, &first, &third] {
        let found = active.iter().find(|known| known.address == block.addr());
        let found = found.unwrap_or_else(|| panic!("{block:?} is not in the snapshot"));
        assert_eq!(found.size, block.len());
        assert_eq!(found.requested_size, Some(block.requested()));
    }
    let reserved = rig.allocator.stats().expect("no call fails").reserved;
    let total: Bytes = read.segments.iter().map(|segment| segment.total_size).sum();
    assert_eq!(total, reserved);
    let kinds: Vec<EventKind> = read.events.iter().map(|event| event.kind).collect();
    let count = |kind| kinds.iter().filter(|&&known| known == kind).count();
    assert_eq!(count(EventKind::Alloc), 4);
    assert_eq!((count(EventKind::FreeRequested), count(EventKind::FreeCompleted)), (1, 1));
    assert!(read.events.iter().all(|event| event.stack.is_some()));
    assert!(rig.allocator.stop_history(&recording));
    let mut timeline = Vec::new();
    trace.write_perfetto(&mut timeline).expect("memory takes it");
    assert!(timeline.starts_with(b"{") || timeline.starts_with(b"["));
    for block in [small, first, third] {
        rig.free(block);
    }
}

#[test]
fn a_peak_counts_what_another_thread_gave_back() {
    // One thread makes what another frees, as a program and its autograd do: the peak stays what
    // was held at once.
    let rig = Rig::new(Preset::Vramp);
    let (to_freer, from_maker) = std::sync::mpsc::sync_channel::<vramp_alloc::Allocation>(0);
    let (done, freed) = std::sync::mpsc::sync_channel::<()>(0);
    std::thread::scope(|scope| {
        let allocator = &rig.allocator;
        let stream = rig.stream;
        scope.spawn(move || {
            for block in from_maker {
                allocator.free(block, stream).expect("it is ours");
                done.send(()).expect("the maker listens");
            }
        });
        for size in [pages(3), Bytes::kib(500), Bytes::kib(20), pages(1)].repeat(50) {
            let block = allocator.malloc(size, stream).expect("there is memory");
            to_freer.send(block).expect("the freer listens");
            freed.recv().expect("the freer answers");
        }
        drop(to_freer);
    });
    let stats = rig.allocator.stats().expect("no call fails");
    assert_eq!((stats.live, stats.live_peak), (Bytes::ZERO, pages(3)));
    assert!(stats.live_peak <= stats.reserved_peak);
}

#[test]
fn a_peak_of_threads_that_swap_the_parts_of_maker_and_freer_is_within_a_hundredth() {
    const SIZE: Bytes = Bytes::kib(300);
    let rig = Rig::new(Preset::Vramp);
    let (allocator, stream) = (&rig.allocator, rig.stream);
    let serve = |block: Option<Allocation>| {
        let Some(block) = block else {
            return Some(allocator.malloc(SIZE, stream).expect("there is memory"));
        };
        allocator.free(block, stream).expect("it is ours");
        None
    };
    std::thread::scope(|scope| {
        // Each thread frees a block that it gets, or makes one.
        let [mut first, mut second] = [(); 2].map(|()| {
            let (order, orders) = channel();
            let (answer, answers) = channel();
            scope.spawn(move || {
                orders.into_iter().for_each(|block| answer.send(serve(block)).expect("it waits"));
            });
            move |block| {
                order.send(block).expect("the thread listens");
                answers.recv().expect("the thread answers")
            }
        });
        let mut live = VecDeque::new();
        for _ in 0..6 {
            for _ in 0..300 {
                live.extend(first(None));
                if live.len() == 100 {
                    second(live.pop_front());
                }
            }
            std::mem::swap(&mut first, &mut second);
        }
        live.into_iter().for_each(|block| assert!(second(Some(block)).is_none()));
    });
    let stats = rig.allocator.stats().expect("no call fails");
    let error = stats.live_peak.count().abs_diff(100 * SIZE.count());
    assert!(error <= SIZE.count(), "{} instead of 100 blocks", stats.live_peak);
    assert_eq!(stats.live, Bytes::ZERO);
}

#[test]
fn scopes_have_the_peaks_of_their_part_and_leave_the_allocators_alone() {
    let rig = Rig::new(Preset::Vramp);
    let allocator = &rig.allocator;
    let peaks = |scope| {
        let found = allocator.scope_peaks(scope).expect("it was not forked");
        found.map(|peaks| (peaks.live, peaks.reserved))
    };
    let held = rig.malloc(2);
    rig.free(rig.malloc(50));
    let outer = allocator.begin_scope().expect("it was not forked");
    let reserved = allocator.stats().expect("no call fails").reserved;
    rig.free(rig.malloc(20));
    let inner = allocator.begin_scope().expect("it was not forked");
    assert_eq!(peaks(inner), Some((pages(2), reserved)));
    // Small blocks of the thread's cache count too.
    let small: Vec<_> = (0..10)
        .map(|_| allocator.malloc(Bytes::kib(64), rig.stream).expect("there is memory"))
        .collect();
    small.into_iter().for_each(|block| rig.free(block));
    assert_eq!(peaks(inner), Some((pages(2) + Bytes::kib(640), reserved)));
    let ended = allocator.end_scope(outer).expect("it was not forked").expect("it is open");
    assert_eq!((ended.live, ended.reserved), (pages(22), reserved));
    rig.free(rig.malloc(90));
    let (live, grown) = peaks(inner).expect("it is open");
    assert_eq!(live, pages(92));
    assert!(grown >= pages(92));
    allocator.end_scope(inner).expect("it was not forked").expect("it is open");
    assert_eq!((peaks(outer), peaks(inner)), (None, None));
    assert_eq!(allocator.end_scope(inner), Ok(None));
    assert_eq!(allocator.stats().expect("no call fails").live_peak, pages(92));
    rig.free(held);
}

#[test]
fn a_request_at_hand_makes_no_call_and_one_that_is_not_changes_nothing() {
    let rig = Rig::new(Preset::Vramp);
    let allocator = &rig.allocator;
    let size = Bytes::kib(4);
    assert!(allocator.malloc_at_hand(size, rig.stream).is_none(), "nothing was reserved yet");
    rig.free(allocator.malloc(size, rig.stream).expect("there is memory"));
    let block = allocator.malloc_at_hand(size, rig.stream).expect("the thread has one");
    let other = allocator.create_stream().expect("no call fails");
    let block = allocator.free_at_hand(block, other).expect_err("another stream needs the lock");
    allocator.record_use(&block, other).expect("the block is live");
    let block = allocator.free_at_hand(block, rig.stream).expect_err("a use was recorded");
    rig.free(block);
    let block = allocator.malloc(size, rig.stream).expect("there is memory");
    let observer = allocator.observe(|_| ());
    assert!(allocator.malloc_at_hand(size, rig.stream).is_none(), "observers may wait");
    let block = allocator.free_at_hand(block, rig.stream).expect_err("observers may wait");
    allocator.unregister(observer);
    assert!(allocator.free_at_hand(block, rig.stream).is_ok());
    let stats = allocator.stats().expect("no call fails");
    assert_eq!((stats.live, stats.placed, stats.freed), (Bytes::ZERO, 3, 3));
    allocator.audit().expect("nothing was lost");
}
