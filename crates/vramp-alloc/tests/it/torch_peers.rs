//! Counterparts of PyTorch's tests of its allocator and statistics, its memory pools, and its snapshots and
//! histories, by the promise that each of them makes. `docs/background/peer-tests.md` says which is whose.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vramp_alloc::history::HistorySize;
use vramp_alloc::observe::Event;
use vramp_alloc::stats::MemoryStats;
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, Driver, FreeError};
use vramp_core::AddrRange;
use vramp_driver::meter::Metered;
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{Call, HostSlice};
use vramp_peers::Preset;
use vramp_peers::torch::TorchConfig;
use vramp_trace::{BlockState, EventKind, Trace};

use crate::common::{Random, Rig, pages};

const MIB: u64 = 1 << 20;

/// An allocator on a card of this many MiB that keeps bytes.
fn on_card(mib: u64, config: Config) -> Rig {
    let card = Simulator::builder().memory(Bytes::mib(mib)).contents(Contents::Stored).checked();
    Rig::on(card, config)
}

fn settings(text: &str) -> Config {
    let torch: TorchConfig = text.parse().expect("the settings are possible");
    vramp_peers::Config { torch, ..vramp_peers::Config::preset(Preset::Torch) }.build()
}

fn stats(rig: &Rig) -> MemoryStats {
    rig.allocator.memory_stats().expect("no call fails")
}

fn malloc(rig: &Rig, size: Bytes) -> Allocation {
    rig.allocator.malloc(size, rig.stream).expect("there is memory")
}

fn fill(rig: &Rig, block: &Allocation, byte: u8) {
    let stream = rig.allocator.stream(block.stream()).expect("the stream is known");
    let range = AddrRange::new(block.addr(), block.requested());
    rig.sim.fill(stream, range, byte).expect("a fill can be queued");
}

/// The first and the last bytes of a block hold what was written.
fn assert_holds(rig: &Rig, block: &Allocation, byte: u8) {
    let stream = rig.allocator.stream(block.stream()).expect("the stream is known");
    let len = block.requested().count();
    let piece = len.min(4096);
    let buffer = rig.sim.alloc_host(Bytes::new(piece)).expect("host memory is there");
    for offset in [0, len - piece] {
        let to = HostSlice { buffer, offset: Bytes::ZERO, len: Bytes::new(piece) };
        let from = block.addr() + Bytes::new(offset);
        rig.sim.copy_to_host(stream, from, to).expect("a copy can be queued");
        rig.sim.synchronize_stream(stream).expect("nothing holds the stream up");
        let mut found = vec![!byte; piece as usize];
        rig.sim.read_host(buffer, Bytes::ZERO, &mut found).expect("the copy is over");
        assert!(vramp_testing::is_filled(&found, byte), "{block:?} holds something else");
    }
    rig.sim.free_host(buffer).expect("it is ours");
}

#[test]
fn what_is_allocated_rises_and_falls_with_each_block() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let sizes = [1, 700, 512 << 10, 3 * MIB, 40 * MIB, 5 * MIB, 17].map(Bytes::new);
        let mut held = Vec::new();
        let mut peak = 0;
        for size in sizes {
            let before = stats(&rig);
            let block = malloc(&rig, size);
            let after = stats(&rig);
            let grown = after.allocated_bytes.all.current - before.allocated_bytes.all.current;
            assert_eq!(grown, block.len().count(), "{}", preset.name());
            peak += block.len().count();
            assert_eq!(after.allocated_bytes.all.peak, peak);
            assert_eq!(rig.allocator.live().count(), after.requested_bytes.all.current);
            held.push(block);
        }
        rig.allocator.reset_peak_stats();
        for block in held {
            let (len, before) = (block.len().count(), stats(&rig).allocated_bytes.all.current);
            rig.free(block);
            assert_eq!(stats(&rig).allocated_bytes.all.current, before - len);
        }
        let end = stats(&rig);
        assert_eq!((end.allocated_bytes.all.current, end.allocated_bytes.all.peak), (0, peak));
        rig.allocator.reset_peak_stats();
        assert_eq!(stats(&rig).allocated_bytes.all.peak, 0);
        rig.close();
    }
}

#[test]
fn every_statistic_is_what_came_less_what_went_and_at_most_its_peak() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let mut random = Random(7);
        let mut held = Vec::new();
        for step in 0..400 {
            if random.below(5) < 3 {
                held.push(malloc(&rig, Bytes::new(1 + random.below(30 * MIB))));
            } else if !held.is_empty() {
                let index = random.below(held.len() as u64) as usize;
                rig.free(held.swap_remove(index));
            }
            if step % 100 == 99 {
                rig.allocator.empty_cache().expect("nothing fails");
            }
            let stats = stats(&rig);
            let blocks = [stats.allocation, stats.allocated_bytes, stats.requested_bytes];
            let blocks =
                blocks.map(|by_pool| [by_pool.all, by_pool.small_pool, by_pool.large_pool]);
            let mut counted = blocks.concat();
            if preset != Preset::StreamOrdered {
                counted.extend([stats.segment, stats.active, stats.active_bytes].map(|by| by.all));
            }
            if preset.is_torch() {
                let free = [stats.reserved_bytes, stats.inactive_split, stats.inactive_split_bytes];
                counted.extend(free.map(|by| by.all));
            }
            for stat in counted {
                assert_eq!(stat.current, stat.allocated - stat.freed, "{}", preset.name());
                assert!(stat.current <= stat.peak, "{}: {stat:?}", preset.name());
            }
            let reserved = stats.reserved_bytes.all;
            assert!(reserved.peak >= reserved.current);
            assert!(reserved.current >= stats.allocated_bytes.all.current);
        }
    }
}

#[test]
fn a_kibibyte_counts_as_a_kibibyte() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let block = malloc(&rig, Bytes::kib(1));
        let now = stats(&rig);
        for stat in [now.allocated_bytes.all, now.allocated_bytes.small_pool] {
            assert_eq!((stat.current, stat.peak), (1024, 1024), "{}", preset.name());
        }
        assert_eq!(now.requested_bytes.all.current, 1024);
        assert_eq!(now.allocated_bytes.large_pool.current, 0);
        rig.free(block);
        let end = stats(&rig).allocated_bytes.all;
        assert_eq!((end.current, end.allocated, end.freed), (0, 1024, 1024));
    }
}

#[test]
fn blocks_that_another_stream_still_uses_are_active_and_not_allocated() {
    for preset in [Preset::Vramp, Preset::Torch, Preset::TorchExpandable] {
        let rig = Rig::new(preset);
        let other = rig.allocator.create_stream().expect("a stream can be made");
        let block = rig.malloc(16);
        rig.allocator.record_use(&block, other).expect("both are known");
        rig.free(block);
        let stats = stats(&rig);
        assert_eq!(stats.allocated_bytes.all.current, 0, "{}", preset.name());
        assert_eq!(stats.active_bytes.all.current, pages(16).count(), "{}", preset.name());
    }
}

#[test]
fn peaks_of_reserved_memory_begin_anew_when_reset() {
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::Torch, Preset::TorchExpandable] {
        let rig = Rig::new(preset);
        let block = rig.malloc(200);
        rig.free(block);
        rig.sim.advance(1);
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!(stats(&rig).reserved_bytes.all.peak, pages(200).count(), "{}", preset.name());
        rig.allocator.reset_peak_stats();
        let now = stats(&rig);
        let (reserved, segment) = (now.reserved_bytes.all, now.segment.all);
        assert_eq!((reserved.current, reserved.peak), (0, 0));
        assert_eq!((segment.peak, now.active_bytes.all.peak), (0, 0), "{}", preset.name());
    }
}

#[test]
fn after_a_request_that_was_too_large_memory_and_work_go_on() {
    for preset in Preset::ALL {
        let rig = on_card(256, preset.config());
        let kept = malloc(&rig, Bytes::mib(40));
        fill(&rig, &kept, 0x5a);
        for absurd in [Bytes::mib(240), Bytes::gib(800), Bytes::new(u64::MAX)] {
            let error = rig.allocator.malloc(absurd, rig.stream).expect_err("it is too much");
            let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
            assert_eq!(report.shortage.requested, absurd, "{}", preset.name());
            assert!(report.to_string().contains("out of memory"));
        }
        assert_eq!(stats(&rig).num_ooms, 3);
        let next = malloc(&rig, Bytes::mib(60));
        fill(&rig, &next, 0xa5);
        assert_holds(&rig, &kept, 0x5a);
        assert_holds(&rig, &next, 0xa5);
        rig.free(kept);
        rig.free(next);
        rig.allocator.audit().expect("the pool is whole");
        rig.close();
    }
}

#[test]
fn cached_memory_makes_room_before_a_request_fails() {
    for preset in Preset::ALL {
        let rig = on_card(256, preset.config());
        let first = [60, 60, 60].map(|mib| malloc(&rig, Bytes::mib(mib)));
        for block in first {
            rig.free(block);
        }
        let most = malloc(&rig, Bytes::mib(230));
        let stats = stats(&rig);
        assert_eq!(stats.num_ooms, 0, "{}", preset.name());
        assert!(preset != Preset::Torch || stats.num_alloc_retries == 1);
        rig.free(most);
    }
}

#[test]
fn a_share_of_the_card_is_kept_and_told_and_given_back() {
    for preset in Preset::ALL {
        let rig = on_card(400, preset.config());
        for bad in [-0.1, 2.0, f64::INFINITY, f64::NAN] {
            let error = rig.allocator.set_memory_fraction(bad).expect_err("that is no share");
            assert!(error.to_string().contains("from 0 to 1"), "{error}");
        }
        assert_eq!(rig.allocator.limit(), None);
        rig.allocator.set_memory_fraction(0.0).expect("no memory is a share");
        let error = rig.allocator.malloc(Bytes::mib(1), rig.stream).expect_err("no memory");
        assert!(error.is_out_of_memory(), "{}: {error}", preset.name());
        rig.allocator.set_memory_fraction(0.5).expect("half is a share");
        assert_eq!(rig.allocator.limit(), Some(Bytes::mib(200)));
        let below = malloc(&rig, Bytes::mib(190));
        rig.free(below);
        let error = rig.allocator.malloc(Bytes::mib(210), rig.stream).expect_err("beyond half");
        assert!(error.is_out_of_memory(), "{}: {error}", preset.name());
        rig.allocator.set_memory_fraction(1.0).expect("all is a share");
        let above = malloc(&rig, Bytes::mib(300));
        rig.free(above);
        rig.close();
    }
}

#[test]
fn the_fraction_setting_stays_in_force_beside_a_limit() {
    for expandable in ["", ",expandable_segments:True"] {
        let mut config = settings(&format!("per_process_memory_fraction:0.5{expandable}"));
        config.limit = Some(Bytes::mib(380));
        let rig = on_card(400, config);
        let below = malloc(&rig, Bytes::mib(190));
        rig.free(below);
        let error = rig.allocator.malloc(Bytes::mib(210), rig.stream).expect_err("beyond half");
        assert!(error.is_out_of_memory(), "{error}");
        rig.allocator.set_limit(Some(Bytes::mib(390))).expect("a limit can change");
        assert!(rig.allocator.malloc(Bytes::mib(210), rig.stream).is_err(), "still beyond half");
    }
}

#[test]
fn running_out_is_an_error_with_and_without_a_split_size() {
    for text in ["", "max_split_size_mb:40", "max_split_size_mb:40,expandable_segments:True"] {
        let rig = on_card(270, settings(text));
        let mut held = Vec::new();
        let error = loop {
            match rig.allocator.malloc(Bytes::mib(50), rig.stream) {
                Ok(block) => held.push(block),
                Err(error) => break error,
            }
        };
        assert!(error.is_out_of_memory(), "'{text}': {error}");
        assert_eq!(held.len(), 5, "'{text}'");
        for block in held {
            rig.free(block);
        }
        rig.close();
    }
}

#[test]
fn observers_are_told_what_the_allocator_takes_and_gives_back() {
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::Torch, Preset::TorchExpandable] {
        let rig = on_card(256, preset.config());
        let (grown, shrunk) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (grew, shrank) = (Arc::clone(&grown), Arc::clone(&shrunk));
        rig.allocator.observe(move |event| match event {
            Event::Grown { bytes } => drop(grew.fetch_add(bytes.count(), Ordering::Relaxed)),
            Event::Shrunk { bytes } => drop(shrank.fetch_add(bytes.count(), Ordering::Relaxed)),
            _ => {}
        });
        let block = rig.malloc(20);
        let held = stats(&rig).reserved_bytes.all.current;
        assert_eq!(grown.load(Ordering::Relaxed), held, "{}", preset.name());
        rig.free(block);
        rig.sim.advance(1);
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!(shrunk.load(Ordering::Relaxed), held, "{}", preset.name());
    }
}

#[test]
fn settings_of_rounding_change_what_a_request_takes() {
    let taken = |text: &str, size: u64| {
        let rig = Rig::on(Simulator::builder(), settings(text));
        let block = malloc(&rig, Bytes::new(size));
        let now = stats(&rig);
        assert_eq!(now.requested_bytes.all.current, size);
        rig.free(block);
        now.allocated_bytes.all.current
    };
    let size = 41 * MIB;
    assert_eq!(taken("", size), 42 * MIB, "a segment of its own, in steps of 2 MiB");
    assert_eq!(taken("roundup_power2_divisions:4", size), 48 * MIB);
    assert_eq!(taken("roundup_power2_divisions:8", size), 44 * MIB);
    let steps = "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]";
    assert_eq!(taken(steps, 33 * MIB), 36 * MIB);
    assert_eq!(taken(steps, 65 * MIB), 72 * MIB);
    assert_eq!(taken(steps, 130 * MIB), 192 * MIB);
    assert_eq!(taken(steps, 300 * MIB), 320 * MIB);
}

#[test]
fn the_debug_output_lists_every_block() {
    for (preset, behind) in [
        (Preset::Torch, "16.00 MiB free, stream0, segment0, large"),
        (Preset::TorchExpandable, "16.00 MiB free, stream0, segment0, large"),
    ] {
        let rig = Rig::new(preset);
        let large = malloc(&rig, Bytes::mib(4));
        let small = malloc(&rig, Bytes::kib(4));
        let text = format!("{:?}", rig.allocator);
        for line in [
            "4.00 MiB used, stream0, segment0, large",
            behind,
            "4.00 KiB used, stream0, segment1, small",
            "reserved          22.00 MiB",
        ] {
            assert!(text.contains(line), "{line} is not in:\n{text}");
        }
        rig.free(large);
        rig.free(small);
        rig.close();
    }
    let rig = Rig::new(Preset::StreamOrdered);
    let block = malloc(&rig, Bytes::mib(4));
    let text = format!("{:?}", rig.allocator);
    assert_eq!(text, format!("blocks of the driver's pool: 1\n{} used, [stream0]\n", block.addr()));
    rig.free(block);
}

/// What an allocator holds of the card.
fn reserved(allocator: &Allocator) -> Bytes {
    allocator.stats().expect("no call fails").reserved
}

const POOLED: [Preset; 4] = [Preset::Vramp, Preset::Vpmm, Preset::Torch, Preset::TorchExpandable];

#[test]
fn emptying_one_pools_cache_leaves_the_others() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        for allocator in [&rig.allocator, &side] {
            let block = allocator.malloc(pages(20), rig.stream).expect("there is memory");
            allocator.free(block, rig.stream).expect("it is its own");
        }
        rig.sim.advance(1);
        let held = reserved(&side);
        assert!(held >= pages(20), "{}", preset.name());
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!((reserved(&rig.allocator), reserved(&side)), (Bytes::ZERO, held));
        side.empty_cache().expect("nothing fails");
        assert_eq!(reserved(&side), Bytes::ZERO, "{}", preset.name());
    }
}

#[test]
fn emptying_the_cache_keeps_what_a_live_block_of_the_pool_needs() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        let [kept, gone] = [(); 2].map(|()| side.malloc(pages(30), rig.stream).expect("room"));
        side.free(gone, rig.stream).expect("it is its own");
        rig.sim.advance(1);
        side.empty_cache().expect("nothing fails");
        assert_eq!(reserved(&side), pages(30), "{}", preset.name());
        side.free(kept, rig.stream).expect("it is its own");
    }
}

#[test]
fn a_pool_may_stand_on_a_device_of_the_users_own() {
    let sim = Arc::new(Simulator::builder().build());
    let own = Arc::new(Metered::new(Arc::clone(&sim) as Arc<dyn Driver>));
    let driver: Arc<dyn Driver> = Arc::clone(&own) as Arc<dyn Driver>;
    let allocator = Allocator::new(driver, Preset::Torch.config()).expect("it can be made");
    let side = allocator.create_pool("side").expect("a pool can be made");
    let stream = side.create_stream().expect("a stream can be made");
    let block = side.malloc(pages(20), stream).expect("there is memory");
    assert_eq!(own.snapshot().of(Call::AllocMemory).calls, 1);
    side.free(block, stream).expect("it is its own");
    side.close().expect("nothing is in the way");
    assert_eq!(own.snapshot().of(Call::FreeMemory).calls, 1);
}

#[test]
fn a_block_that_outlives_its_pool_is_refused_and_breaks_nothing() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        let orphan = side.malloc(pages(4), rig.stream).expect("there is memory");
        side.close().expect("nothing is in the way");
        assert!(rig.allocator.record_use(&orphan, rig.stream).is_err());
        let error = rig.allocator.free(orphan, rig.stream).expect_err("its pool is gone");
        assert!(matches!(error, FreeError::Foreign(_)), "{}: {error}", preset.name());
        let block = rig.malloc(4);
        rig.free(block);
        rig.close();
    }
}

/// A main allocator that takes what a side pool has idle before a request fails.
fn with_side_pool(preset: Preset) -> (Arc<Simulator>, Allocator, Arc<Allocator>) {
    let sim = Arc::new(Simulator::builder().memory(Bytes::mib(128)).build());
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
    let main = Allocator::new(driver, preset.config()).expect("it can be made");
    let side = Arc::new(main.create_pool("side").expect("a pool can be made"));
    let lender = Arc::downgrade(&side);
    main.on_shortage(move |_| {
        let Some(side) = lender.upgrade() else { return false };
        let before = reserved(&side);
        side.empty_cache().is_ok() && reserved(&side) < before
    });
    (sim, main, side)
}

#[test]
fn a_pool_lends_its_idle_memory_before_the_main_one_runs_out() {
    for preset in POOLED {
        let (sim, main, side) = with_side_pool(preset);
        let stream = main.create_stream().expect("a stream can be made");
        let kept = side.malloc(Bytes::mib(40), stream).expect("there is memory");
        let block = side.malloc(Bytes::mib(60), stream).expect("there is memory");
        assert!(main.malloc(Bytes::mib(80), stream).is_err(), "the side pool uses it");
        side.free(block, stream).expect("it is its own");
        sim.advance(1);
        let block = main.malloc(Bytes::mib(80), stream).expect("the side pool gives it");
        assert_eq!(reserved(&side), Bytes::mib(40), "{}", preset.name());
        main.free(block, stream).expect("it is its own");
        side.free(kept, stream).expect("it is its own");
    }
}

#[test]
fn a_pool_that_is_gone_is_not_asked_when_memory_runs_out() {
    for preset in POOLED {
        let (_, main, side) = with_side_pool(preset);
        let stream = main.create_stream().expect("a stream can be made");
        drop(side);
        let error = main.malloc(Bytes::mib(200), stream).expect_err("the card is smaller");
        let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
        assert_eq!(report.siblings, [], "{}", preset.name());
        let block = main.malloc(Bytes::mib(100), stream).expect("there is memory");
        main.free(block, stream).expect("it is its own");
    }
}

#[test]
fn pools_made_by_many_threads_are_told_apart() {
    let rig = Rig::new(Preset::Vramp);
    let pools: Vec<Allocator> = std::thread::scope(|scope| {
        let make = |n| {
            let allocator = &rig.allocator;
            scope.spawn(move || allocator.create_pool(&format!("pool {n}")))
        };
        let threads: Vec<_> = (0..8).map(make).collect();
        let made = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        made.map(|pool| pool.expect("a pool can be made")).collect()
    });
    let blocks = pools.iter().map(|pool| pool.malloc(pages(1), rig.stream).expect("room"));
    let blocks: Vec<_> = blocks.collect();
    for (n, block) in blocks.into_iter().enumerate() {
        assert_eq!(pools[n].name(), format!("pool {n}"));
        let error = pools[(n + 1) % 8].free(block, rig.stream).expect_err("it is another's");
        let FreeError::Foreign(block) = error else { panic!("{error}") };
        pools[n].free(block, rig.stream).expect("it is its own");
    }
}

#[test]
fn a_pool_of_a_pool_is_isolated_from_both() {
    for preset in POOLED {
        let rig = Rig::new(preset);
        let outer = rig.allocator.create_pool("outer").expect("a pool can be made");
        let inner = outer.create_pool("inner").expect("a pool can be made");
        let block = inner.malloc(pages(20), rig.stream).expect("there is memory");
        let addr = block.addr();
        assert_eq!((reserved(&rig.allocator), reserved(&outer)), (Bytes::ZERO, Bytes::ZERO));
        outer.close().expect("nothing is in the way");
        inner.free(block, rig.stream).expect("it is its own");
        let again = inner.malloc(pages(20), rig.stream).expect("it is cached");
        assert_eq!(again.addr(), addr, "{}", preset.name());
        inner.free(again, rig.stream).expect("it is its own");
        inner.close().expect("nothing is in the way");
        rig.close();
    }
}

/// A stack that says where in a made program it was taken.
fn stacks(place: &Arc<Mutex<&'static str>>) -> vramp_alloc::history::StackSource {
    let place = Arc::clone(place);
    Arc::new(move || {
        let name = *place.lock().expect("whole");
        vec![(name.to_owned(), "model.py".to_owned(), 7)]
    })
}

fn innermost(trace: &Trace, event: &vramp_trace::Event) -> Option<String> {
    let frames: Vec<_> = trace.stacks.frames(event.stack?).collect();
    frames.first().map(|frame| frame.name.to_owned())
}

#[test]
fn a_snapshot_shows_each_segment_and_block_of_pytorchs_allocator() {
    for preset in [Preset::Torch, Preset::TorchExpandable] {
        let rig = Rig::new(preset);
        let other = rig.allocator.create_stream().expect("a stream can be made");
        let small = malloc(&rig, Bytes::new(700));
        let [large, used_elsewhere, gone] = [3, 5, 4].map(|count| rig.malloc(count));
        rig.allocator.record_use(&used_elsewhere, other).expect("both are known");
        let pending = used_elsewhere.addr();
        rig.free(used_elsewhere);
        rig.free(gone);
        let trace = rig.allocator.snapshot(None);
        let total: Bytes = trace.segments.iter().map(|segment| segment.total_size).sum();
        assert_eq!(total, rig.allocator.stats().expect("no call fails").reserved);
        for segment in &trace.segments {
            let sum: Bytes = segment.blocks.iter().map(|block| block.size).sum();
            assert_eq!(sum, segment.total_size);
            assert_eq!(segment.blocks[0].address, segment.address);
            assert_eq!(segment.is_expandable, preset == Preset::TorchExpandable);
        }
        let find = |addr| {
            let segments = trace.segments.iter();
            let blocks =
                segments.flat_map(|s| s.blocks.iter().map(|b| (s.segment_type.clone(), b)));
            blocks.into_iter().find(|(_, block)| block.address == addr).expect("it is shown")
        };
        let (pool, shown) = find(small.addr());
        assert_eq!((pool.as_str(), shown.state), ("small", BlockState::Active));
        assert_eq!(shown.requested_size, Some(Bytes::new(700)));
        let (pool, shown) = find(large.addr());
        assert_eq!(
            (pool.as_str(), shown.state, shown.size),
            ("large", BlockState::Active, pages(3))
        );
        assert_eq!(find(pending).1.state, BlockState::PendingFree);
        let mut file = Vec::new();
        trace.write_snapshot(&mut file).expect("memory takes it");
        rig.free(small);
        rig.free(large);
    }
}

#[test]
fn a_free_has_a_stack_of_its_own_and_so_has_what_the_card_gave() {
    for preset in [Preset::Vramp, Preset::Torch, Preset::TorchExpandable] {
        let rig = Rig::new(preset);
        let place = Arc::new(Mutex::new("forward"));
        let recording = rig.allocator.record_history(HistorySize::default(), Some(stacks(&place)));
        let block = rig.malloc(20);
        *place.lock().expect("whole") = "backward";
        rig.free(block);
        rig.sim.advance(1);
        *place.lock().expect("whole") = "empty_cache";
        rig.allocator.empty_cache().expect("nothing fails");
        let trace = rig.allocator.snapshot(Some(&recording));
        let by = |kind| {
            let found = trace.events.iter().find(|event| event.kind == kind);
            found.and_then(|event| innermost(&trace, event))
        };
        assert_eq!(by(EventKind::Alloc).as_deref(), Some("forward"), "{}", preset.name());
        assert_eq!(by(EventKind::FreeRequested).as_deref(), Some("backward"));
        assert_eq!(by(EventKind::SegmentMap).as_deref(), Some("forward"), "{}", preset.name());
        assert_eq!(by(EventKind::SegmentUnmap).as_deref(), Some("empty_cache"));
    }
}

#[test]
fn a_recording_without_stacks_takes_none_and_ends_when_told() {
    let rig = Rig::new(Preset::Vramp);
    let recording = rig
        .allocator
        .record_history(HistorySize { events: 4, stacks: 4, ..HistorySize::default() }, None);
    for count in [1, 2, 3] {
        let block = rig.malloc(count);
        rig.free(block);
    }
    assert!(rig.allocator.stop_history(&recording));
    let late = rig.malloc(9);
    let trace = rig.allocator.snapshot(Some(&recording));
    assert_eq!(trace.events.len(), 4, "the last ones alone");
    assert!(trace.events.iter().all(|event| event.stack.is_none() && event.size < late.len()));
    rig.free(late);
}

#[test]
fn an_observer_records_the_actions_that_it_wants() {
    let rig = Rig::new(Preset::Torch);
    let kept = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&kept);
    rig.allocator.observe(move |event| {
        if let Event::Freed { requested, .. } = event {
            sink.lock().expect("whole").push(*requested);
        }
    });
    for count in [3, 4] {
        let block = rig.malloc(count);
        rig.free(block);
    }
    assert_eq!(*kept.lock().expect("whole"), [pages(3), pages(4)]);
}

#[test]
fn running_out_is_in_the_history_with_what_was_asked() {
    for preset in Preset::ALL {
        let rig = on_card(64, preset.config());
        let recording = rig.allocator.record_history(HistorySize::default(), None);
        assert!(rig.allocator.malloc(Bytes::mib(100), rig.stream).is_err());
        let trace = rig.allocator.snapshot(Some(&recording));
        let oom = trace.events.iter().find(|event| event.kind == EventKind::Oom);
        assert_eq!(oom.map(|event| event.size), Some(Bytes::mib(100)), "{}", preset.name());
    }
}
