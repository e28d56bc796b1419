//! Counterparts of PyTorch's tests of its allocator and statistics, by the promise that each of
//! them makes. `docs/background/peer-tests.md` says which is whose.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::random::Random;
use crate::common::{Rig, pages};
use vramp_alloc::observe::Event;
use vramp_alloc::stats::MemoryStats;
use vramp_alloc::{AllocError, Allocation, Bytes, Config, Driver};
use vramp_core::AddrRange;
use vramp_driver::HostSlice;
use vramp_driver::sim::{Contents, Simulator};
use vramp_peers::Preset;
use vramp_peers::torch::TorchConfig;

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
fn observers_are_told_of_each_request_that_failed() {
    for preset in Preset::ALL {
        let rig = on_card(64, preset.config());
        let requested = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&requested);
        rig.allocator.observe(move |event| {
            if let Event::OutOfMemory(report) = event {
                sink.lock().expect("whole").push(report.shortage.requested);
            }
        });
        for mib in [100, 200] {
            assert!(rig.allocator.malloc(Bytes::mib(mib), rig.stream).is_err());
        }
        let requested = requested.lock().expect("whole");
        assert_eq!(*requested, [Bytes::mib(100), Bytes::mib(200)], "{}", preset.name());
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
fn plain_bytes_come_and_go_and_leave_nothing() {
    for preset in Preset::ALL {
        let rig = on_card(256, preset.config());
        for size in [0, 1, 513, MIB + 1, 33 * MIB] {
            let block = malloc(&rig, Bytes::new(size));
            assert_eq!(block.requested(), Bytes::new(size));
            assert!(!block.is_empty() && block.len().count() >= size);
            rig.free(block);
            assert_eq!(rig.allocator.live(), Bytes::ZERO);
        }
        rig.close();
    }
}

#[test]
fn ten_thousand_random_requests_keep_their_contents() {
    for (seed, preset) in Preset::ALL.into_iter().enumerate() {
        let rig = on_card(192, preset.config());
        let mut random = Random(seed as u64);
        let mut held: Vec<(Allocation, u8)> = Vec::new();
        let mut refused = 0;
        for _ in 0..10_000 {
            match random.below(1000) {
                0..520 => {
                    let power = 1 << random.below(22);
                    let size = Bytes::new(power + random.below(power));
                    match rig.allocator.malloc(size, rig.stream) {
                        Ok(block) => {
                            let byte = random.below(256) as u8;
                            fill(&rig, &block, byte);
                            held.push((block, byte));
                        }
                        Err(error) => {
                            assert!(error.is_out_of_memory(), "{error}");
                            refused += 1;
                            held.drain(..held.len() / 2).for_each(|(block, byte)| {
                                assert_holds(&rig, &block, byte);
                                rig.free(block);
                            });
                        }
                    }
                }
                520..990 if !held.is_empty() => {
                    let index = random.below(held.len() as u64) as usize;
                    let (block, byte) = held.swap_remove(index);
                    assert_holds(&rig, &block, byte);
                    rig.allocator.free(block, rig.stream).expect("it is ours");
                }
                _ => rig.allocator.empty_cache().expect("nothing fails"),
            }
        }
        println!("{}: {refused} refused", preset.name());
        for (block, byte) in held {
            assert_holds(&rig, &block, byte);
            rig.free(block);
        }
        assert_eq!((rig.sim.hazards(), rig.sim.device_loss()), (vec![], None));
        rig.close();
    }
}

#[test]
fn the_card_itself_tells_what_an_allocator_took() {
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::Torch, Preset::TorchExpandable] {
        let rig = on_card(256, preset.config());
        let free = |rig: &Rig| rig.sim.memory_info().expect("the card answers").free;
        let before = free(&rig);
        let block = rig.malloc(30);
        let reserved = rig.allocator.stats().expect("no call fails").reserved;
        assert_eq!(before - free(&rig), reserved, "{}", preset.name());
        rig.free(block);
        rig.sim.advance(1);
        rig.allocator.empty_cache().expect("nothing fails");
        assert_eq!(free(&rig), before);
    }
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
