//! Every driver call fails once: afterwards the audit holds, the card holds what the pool says it
//! holds, and the program goes on to its end.

mod common;

use common::Rig;
use vramp::{Allocation, Bytes, Config, Preset, StreamId};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};

/// A splitmix64 generator: the same program every time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

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
        if result.is_err() {
            failed += 1;
            rig.allocator.audit().expect("a failure keeps every invariant");
            rig.assert_accounts_agree();
        } else if audit {
            rig.allocator.audit().expect("every step keeps every invariant");
        }
    }
    for (block, stream) in held {
        // A failed record leaves the block free all the same.
        let _ = rig.allocator.free(block, stream);
    }
    rig.allocator.audit().expect("the end keeps every invariant");
    rig.assert_accounts_agree();
    failed
}

fn card() -> vramp_driver::sim::Builder {
    Simulator::builder().memory(Bytes::gib(1))
}

fn fail_each_call(preset: Preset, stride: u64) {
    let whole = Rig::on(card(), Config::preset(preset));
    let before = whole.sim.calls();
    program(&whole, true);
    let calls = whole.sim.calls() - before;
    whole.close();
    for n in (1..=calls).step_by(stride as usize) {
        let code = if n % 2 == 0 { 2 } else { 801 };
        let rig = Rig::on(card(), Config::preset(preset));
        rig.sim.set_faults(FaultPlan::nth(n).with_code(code));
        program(&rig, false);
        rig.sim.set_faults(FaultPlan::none());
        rig.close();
    }
}

/// In a debug build every seventh call, so that the suite stays short; in release every one.
const STRIDE: u64 = if cfg!(debug_assertions) { 7 } else { 1 };

#[test]
fn the_default_preset_survives_a_failure_of_each_call() {
    fail_each_call(Preset::Vramp, STRIDE);
}

#[test]
fn vpmm_survives_a_failure_of_each_call() {
    fail_each_call(Preset::Vpmm, STRIDE * 17);
}

#[test]
fn the_drivers_pool_survives_a_failure_of_each_call() {
    fail_each_call(Preset::StreamOrdered, STRIDE);
}

#[test]
fn pytorchs_allocator_survives_a_failure_of_each_call() {
    fail_each_call(Preset::Torch, STRIDE);
    fail_each_call(Preset::TorchExpandable, STRIDE * 3);
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
                let rig = Rig::on(card(), Config::preset(preset));
                rig.sim.set_faults(FaultPlan::from_nth_of(call, 5).with_code(code));
                program(&rig, false);
                rig.sim.set_faults(FaultPlan::none());
            }
        }
    }
}
