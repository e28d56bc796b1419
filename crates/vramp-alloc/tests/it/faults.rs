//! Every driver call fails once: afterwards the audit holds, the card holds what the pool says it
//! holds, and the program goes on to its end. The programs are a made one and the beginning of a
//! recorded one.

use std::collections::BTreeMap;

use vramp_alloc::{Allocation, Bytes, StreamId};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator, SimulatorBuilder};
use vramp_peers::Preset;
use vramp_trace::{ReadLimits, Request, Workload, read_trace};

use crate::common::{Random, Rig};

const STEPS: u64 = 2000;

/// Two thousand requests of all sizes on three streams: mallocs, frees on the own and on another
/// stream, uses on other streams, trims. Failures are counted and survived.
fn program(rig: &Rig, audit: bool) -> u64 {
    let mut random = Random(7);
    let streams: Vec<StreamId> = std::iter::once(rig.stream)
        .chain((0..2).filter_map(|_| rig.allocator.create_stream().ok()))
        .collect();
    let mut held: Vec<(Allocation, StreamId)> = Vec::new();
    let mut failed = 0;
    for _ in 0..STEPS {
        let stream = streams[random.below(streams.len() as u64) as usize];
        let result = match random.below(20) {
            0 => rig.allocator.trim(Bytes::mib(random.below(200))).map_err(drop),
            1..=9 if !held.is_empty() => {
                let (block, own) = held.swap_remove(random.below(held.len() as u64) as usize);
                let on = if random.below(4) == 0 { stream } else { own };
                rig.allocator.free(block, on).map(drop).map_err(drop)
            }
            10 if !held.is_empty() => {
                let (block, _) = &held[random.below(held.len() as u64) as usize];
                rig.allocator.record_use(block, stream).map_err(drop)
            }
            _ => {
                let size = 1 << random.below(28);
                let size = Bytes::new(size + random.below(size));
                match rig.allocator.malloc(size, stream) {
                    Ok(block) => {
                        held.push((block, stream));
                        Ok(())
                    }
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        Err(())
                    }
                }
            }
        };
        failed += look_at(rig, audit, result);
    }
    finish(rig, held);
    failed
}

/// Checks everything after a failure, or after each step if asked to. Counts failures.
fn look_at(rig: &Rig, audit: bool, result: Result<(), ()>) -> u64 {
    if result.is_err() {
        rig.allocator.audit().expect("a failure keeps every invariant");
        rig.assert_accounts_agree();
    } else if audit {
        rig.allocator.audit().expect("every step keeps every invariant");
    }
    u64::from(result.is_err())
}

fn finish(rig: &Rig, held: impl IntoIterator<Item = (Allocation, StreamId)>) {
    for (block, stream) in held {
        // A failed record leaves the block free all the same.
        let _ = rig.allocator.free(block, stream);
    }
    rig.allocator.audit().expect("the end keeps every invariant");
    rig.assert_accounts_agree();
}

/// The first requests of a recorded job on two streams.
fn recorded() -> Workload {
    // Seen from the crate, and from the folder that travels to a machine with a card.
    let folders = ["tests/data", "traces"].map(std::path::Path::new);
    let folder = folders.into_iter().find(|folder| folder.exists()).expect("there are traces");
    let path = folder.join("resnet_multires_stacks.pickle.gz");
    let trace = read_trace(path, &ReadLimits::default()).expect("the example is there");
    let mut workload = Workload::from_trace(&trace, 0);
    workload.requests.truncate(2000);
    workload
}

/// The recorded requests; a block whose uses outlive its free is used by every stream. Failures
/// are counted and survived: a block that could not be had is not freed either.
fn replay(workload: &Workload, rig: &Rig, audit: bool) -> u64 {
    let more = (1..workload.streams.len()).filter_map(|_| rig.allocator.create_stream().ok());
    let streams: Vec<StreamId> = std::iter::once(rig.stream).chain(more).collect();
    let mut held: BTreeMap<u32, (Allocation, StreamId)> = BTreeMap::new();
    let mut failed = 0;
    for (index, &request) in workload.requests.iter().enumerate() {
        let result = match request {
            Request::Alloc { block, size, stream } => {
                // A stream that could not be made is the first one.
                let stream = *streams.get(stream as usize).unwrap_or(&rig.stream);
                let allocation = rig.allocator.malloc(size, stream);
                let kept = |allocation| assert!(held.insert(block, (allocation, stream)).is_none());
                allocation.map(kept).map_err(drop)
            }
            Request::Free { block } => {
                held.remove(&block).map_or(Ok(()), |(allocation, stream)| {
                    if workload.requests.get(index + 1) != Some(&Request::FreeCompleted { block }) {
                        for &user in &streams {
                            rig.allocator.record_use(&allocation, user).expect("the block is held");
                        }
                    }
                    rig.allocator.free(allocation, stream).map(drop).map_err(drop)
                })
            }
            Request::FreeCompleted { .. } | Request::Oom { .. } => Ok(()),
        };
        failed += look_at(rig, audit, result);
    }
    finish(rig, held.into_values());
    failed
}

/// A program on a rig, with an audit after every step if asked to: how many steps failed.
type Program<'a> = &'a dyn Fn(&Rig, bool) -> u64;

fn card() -> SimulatorBuilder {
    Simulator::builder().memory(Bytes::gib(1))
}

/// One run without failures, then one for each of a sample of its calls, which fails: out of memory, not
/// supported, an invalid value in turn.
fn fail_each_call(card: fn() -> SimulatorBuilder, preset: Preset, program: Program) {
    let whole = Rig::on(card(), preset.config());
    let before = whole.sim.calls();
    program(&whole, true);
    let calls = whole.sim.calls() - before;
    whole.close();
    for (turn, n) in vramp_testing::failing_calls(calls).enumerate() {
        let rig = Rig::on(card(), preset.config());
        rig.sim.set_faults(FaultPlan::nth(n).with_code([2, 801, 1][turn % 3]));
        program(&rig, false);
        rig.sim.set_faults(FaultPlan::none());
        rig.close();
    }
}

#[test]
fn the_default_preset_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::Vramp, &program);
}

#[test]
fn vpmm_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::Vpmm, &program);
}

#[test]
fn the_drivers_pool_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::StreamOrdered, &program);
}

#[test]
fn a_recorded_job_survives_a_failure_of_each_call_on_every_preset() {
    let workload = recorded();
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::StreamOrdered] {
        fail_each_call(Simulator::builder, preset, &|rig, audit| {
            let failed = replay(&workload, rig, audit);
            let chunks = |pool: &vramp_core::Pool| {
                pool.counters().chunks_created - pool.counters().chunks_released
            };
            let chunks = rig.allocator.pool_state().as_ref().map(chunks).unwrap_or_default();
            assert_eq!(rig.sim.live().handles as u64, chunks, "a handle for each chunk");
            failed
        });
    }
}

#[test]
fn pytorchs_allocator_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::Torch, &program);
    fail_each_call(card, Preset::TorchExpandable, &program);
}

#[test]
fn each_kind_of_call_may_fail_for_good() {
    let used = [
        Call::Reserve,
        Call::Create,
        Call::Release,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::CreateEvent,
        Call::Record,
        Call::Query,
        Call::Wait,
        Call::MallocAsync,
        Call::FreeAsync,
        Call::AllocMemory,
        Call::FreeMemory,
        Call::SynchronizeStream,
    ];
    for preset in Preset::ALL {
        for call in used {
            for code in [2, 1] {
                let rig = Rig::on(card(), preset.config());
                rig.sim.set_faults(FaultPlan::from_nth_of(call, 5).with_code(code));
                program(&rig, false);
                rig.sim.set_faults(FaultPlan::none());
            }
        }
    }
}
