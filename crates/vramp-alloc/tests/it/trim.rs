//! One trim returns all idle memory, however it became idle.

use vramp_alloc::error::OutOfMemoryReport;
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, Driver};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;

use crate::common::{Random, Rig, pages};

/// All work is over by now: one trim leaves nothing.
fn trim_leaves_nothing(rig: Rig) {
    rig.sim.advance(1 << 30);
    rig.allocator.trim(Bytes::ZERO).unwrap();
    rig.allocator.audit().unwrap();
    assert_eq!(rig.held(), 0, "\n{}", rig.census());
    rig.assert_accounts_agree();
    rig.close();
}

#[test]
fn the_slab_that_a_stream_keeps_is_given_back() {
    let rig = Rig::new(Preset::Vramp);
    let block = rig.allocator.malloc(Bytes::new(512), rig.stream).unwrap();
    rig.free(block);
    trim_leaves_nothing(rig);
}

#[test]
fn a_slab_emptied_by_a_free_on_another_stream_is_given_back() {
    let rig = Rig::new(Preset::Vramp);
    let other = rig.allocator.create_stream().unwrap();
    let block = rig.allocator.malloc(Bytes::new(512), rig.stream).unwrap();
    rig.free_on(block, other);
    trim_leaves_nothing(rig);
}

#[test]
fn memory_that_waits_for_a_stream_which_freed_nothing_is_given_back() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let rig = Rig::new(preset);
        let other = rig.allocator.create_stream().unwrap();
        let block = rig.malloc(16);
        rig.allocator.record_use(&block, other).unwrap();
        rig.free(block);
        assert_eq!(rig.census().waiting, pages(16));
        trim_leaves_nothing(rig);
    }
}

#[test]
fn a_chunk_in_which_idle_memory_of_two_streams_meets_is_given_back() {
    let rig = Rig::new(Preset::Vramp);
    let other = rig.allocator.create_stream().unwrap();
    let half = Bytes::mib(4);
    rig.allocator.prefill(half * 2, rig.stream).unwrap();
    let front = rig.allocator.malloc(half, rig.stream).unwrap();
    // New memory waits for nothing, so the other stream takes the back half of the chunk.
    let back = rig.allocator.malloc(half, other).unwrap();
    assert_eq!(rig.sim.live().handles, 1);
    rig.free(front);
    rig.free_on(back, other);
    trim_leaves_nothing(rig);
}

#[test]
fn a_chunk_that_is_stuck_where_it_was_to_move_is_kept_and_counted_until_it_is_unmapped() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let config = Config { span: Bytes::gib(1), ..preset.config() };
        let rig = Rig::on(Simulator::builder(), config);
        let blocks: Vec<_> = (0..4).map(|_| rig.malloc(4)).collect();
        let mut kept = Vec::new();
        for (n, block) in blocks.into_iter().enumerate() {
            if n % 2 == 0 {
                rig.free(block);
            } else {
                kept.push(block);
            }
        }
        let stuck = FaultPlan::nth_of(Call::SetAccess, 1).and(FaultPlan::nth_of(Call::Unmap, 1));
        rig.sim.set_faults(stuck.with_code(1));
        assert!(rig.allocator.malloc(pages(8), rig.stream).is_err());
        rig.sim.set_faults(FaultPlan::none());
        assert!(!rig.census().quarantined_addresses.is_zero());
        for block in kept {
            rig.free(block);
        }
        // The first unmap of a trim is of the mapping that could not be undone.
        rig.sim.set_faults(FaultPlan::nth_of(Call::Unmap, 1).with_code(1));
        rig.allocator.trim(Bytes::ZERO).unwrap();
        rig.allocator.audit().unwrap();
        rig.assert_accounts_agree();
        assert!(rig.held() > 0, "the stuck chunk cannot be released");
        rig.allocator.trim(Bytes::ZERO).unwrap();
        rig.allocator.audit().unwrap();
        assert_eq!((rig.held(), rig.census().quarantined_addresses), (0, Bytes::ZERO));
        rig.close();
    }
}

const INVALID: i32 = 1;

fn report_of(error: AllocError) -> OutOfMemoryReport {
    match error {
        AllocError::OutOfMemory(report) => *report,
        other => panic!("{other}"),
    }
}

/// An allocator with 16 pages that a trim could not release, of a limit of 32.
fn with_quarantined(preset: Preset) -> Rig {
    let config = Config { limit: Some(pages(32)), ..preset.config() };
    let rig = Rig::on(Simulator::builder(), config);
    let block = rig.malloc(16);
    rig.free(block);
    rig.sim.advance(1);
    rig.sim.set_faults(FaultPlan::from_nth_of(Call::Release, 1).with_code(INVALID));
    // A trim goes on after the failure of one chunk where it can.
    while rig.allocator.trim(Bytes::ZERO).is_err() {}
    rig
}

#[test]
fn a_failed_release_is_counted_and_named_and_tried_again_once_for_each_request_that_is_short() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let rig = with_quarantined(preset);
        let stats = rig.allocator.stats().expect("no call fails");
        assert_eq!(stats.quarantined, pages(16), "{}", preset.name());
        assert_eq!(stats.reserved, pages(16), "it is still on the card");
        let block = rig.malloc(8);
        let chunks = stats.chunks_created - stats.chunks_released;
        let (calls, error) = rig.calls(Call::Release, || {
            rig.allocator.malloc(pages(24), rig.stream).expect_err("the limit is 32 pages")
        });
        let text = error.to_string();
        let report = report_of(error);
        if preset == Preset::Vramp {
            assert!(calls <= chunks, "{calls} calls for {chunks} chunks");
        }
        assert_eq!(report.quarantined.memory, pages(16));
        let failed = report.quarantined.failed_call.expect("it is known");
        assert_eq!((failed.call, failed.code), (Call::Release, INVALID));
        let named = "quarantined: 32.00 MiB of memory";
        assert!(text.contains(named) && text.contains("because release failed"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        let settings = rig.allocator.snapshot(None).allocator_settings;
        let named = |name: &str| settings.iter().find(|(known, _)| known == name);
        assert!(named("quarantined").is_some(), "{settings:?}");
        let (_, by) = named("quarantined_by").expect("the call is named");
        assert!(by.contains("driver call release failed"), "{by}");
        // The call works again: the same request finds the memory by itself.
        rig.sim.set_faults(FaultPlan::none());
        let large = rig.malloc(24);
        assert_eq!(rig.allocator.stats().expect("no call fails").quarantined, Bytes::ZERO);
        rig.free(block);
        rig.free(large);
        rig.assert_accounts_agree();
        rig.close();
    }
}

#[test]
fn a_trim_returns_what_failed_calls_left() {
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::Torch, Preset::TorchExpandable] {
        for call in [Call::Unmap, Call::Release, Call::Map, Call::SetAccess, Call::FreeMemory] {
            let config = Config { limit: Some(Bytes::mib(400)), ..preset.config() };
            let rig = Rig::on(Simulator::builder().memory(Bytes::gib(1)), config);
            rig.sim.set_faults(FaultPlan::randomly_of(call, 0.2).with_code(INVALID));
            let held = program(&rig);
            rig.sim.set_faults(FaultPlan::none());
            for block in held {
                rig.allocator.free(block, rig.stream).expect("the block is the allocator's");
            }
            rig.sim.synchronize_device().expect("no call fails");
            rig.allocator.trim(Bytes::ZERO).expect("no call fails");
            let what = format!("{} {call}", preset.name());
            rig.allocator.audit().unwrap_or_else(|error| panic!("{what}: {error}"));
            let stats = rig.allocator.stats().expect("no call fails");
            assert_eq!(rig.sim.live().device_bytes, Bytes::ZERO, "{what}");
            assert_eq!((stats.quarantined, stats.quarantined_addresses), Default::default());
            rig.assert_accounts_agree();
            rig.close();
        }
    }
}

/// Requests, frees and trims of many sizes. Failures are survived. Returns what is live.
fn program(rig: &Rig) -> Vec<Allocation> {
    let mut random = Random(3);
    let mut held = Vec::new();
    let free = |allocator: &Allocator, block| {
        allocator.free(block, rig.stream).expect("the block is the allocator's");
    };
    for _ in 0..600 {
        match random.below(8) {
            0 => drop(rig.allocator.trim(Bytes::mib(random.below(200)))),
            1..=3 if !held.is_empty() => {
                let which = random.below(held.len() as u64) as usize;
                free(&rig.allocator, held.swap_remove(which));
            }
            _ => match rig.allocator.malloc(Bytes::new(1 + random.below(40 << 20)), rig.stream) {
                Ok(block) => held.push(block),
                Err(_) => held.drain(..held.len().min(4)).for_each(|it| free(&rig.allocator, it)),
            },
        }
    }
    held
}
