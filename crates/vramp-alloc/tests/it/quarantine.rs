//! What failed calls leave unusable: counted and named while they fail, and returned by a trim, or by a
//! request that is short, as soon as they do not.

use crate::common::random::Random;
use crate::common::{Rig, pages};
use vramp_alloc::error::OutOfMemoryReport;
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, Driver};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;

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
