//! A limit is a limit: no preset ever has more of the card, also between two driver calls.

use crate::common::Rig;
use vramp_alloc::{Allocation, Allocator, Bytes, Config};
use vramp_driver::sim::Simulator;
use vramp_peers::Preset;
use vramp_peers::torch::TorchConfig;
use vramp_trace::{ReadLimits, Request, Workload, read_trace};

const TRACES: [&str; 3] = ["gnn", "llama_varlen_oom", "resnet_multires_stacks"];

fn workload(name: &str) -> Workload {
    let path = format!("{}/../../examples/traces/{name}.pickle.gz", env!("CARGO_MANIFEST_DIR"));
    let trace = read_trace(path, &ReadLimits::default()).expect("the example is read");
    Workload::from_trace(&trace, 0)
}

/// Runs a workload and leaves out the blocks that find no memory. Returns how many did not.
fn run(pools: &[&Allocator], workload: &Workload) -> u64 {
    let main = pools[0];
    let streams: Vec<_> =
        workload.streams.iter().map(|_| main.create_stream().expect("a stream")).collect();
    let mut refused = 0;
    let mut held: Vec<Option<(usize, Allocation)>> = Vec::new();
    held.resize_with(workload.blocks as usize, || None);
    for request in &workload.requests {
        match *request {
            Request::Alloc { block, size, stream } => {
                let pool = block as usize % pools.len();
                match pools[pool].malloc(size, streams[stream as usize]) {
                    Ok(made) => held[block as usize] = Some((pool, made)),
                    Err(error) => {
                        assert!(error.is_out_of_memory(), "{error}");
                        refused += 1;
                    }
                }
            }
            Request::Free { block } => {
                if let Some((pool, made)) = held[block as usize].take() {
                    let stream = made.stream();
                    pools[pool].free(made, stream).expect("the block is the pool's");
                }
            }
            Request::FreeCompleted { .. } | Request::Oom { .. } => {}
        }
    }
    refused
}

/// Limits that are no multiple of anything that a device creates.
fn limits(peak: Bytes) -> [Bytes; 4] {
    [(450, 12_345), (930, 1), (1003, 17_000_001), (1060, 777_777)]
        .map(|(per_mille, more)| Bytes::new(peak.count() / 1000 * per_mille + more))
}

fn check(sim: &Simulator, allocator: &Allocator, limit: Bytes, what: &str) {
    let peak = allocator.stats().expect("a query").reserved_peak;
    assert!(peak <= limit, "{what}: {peak} counted, limit {limit}");
    let peak = sim.device_bytes_peak();
    assert!(peak <= limit, "{what}: {peak} on the card, limit {limit}");
}

#[test]
fn no_preset_ever_exceeds_its_limit() {
    for name in TRACES {
        let workload = workload(name);
        for preset in Preset::ALL {
            let mut refused = [0; 4];
            for (limit, refused) in limits(workload.peak_live).into_iter().zip(&mut refused) {
                let config = Config { limit: Some(limit), ..preset.config() };
                let rig = Rig::on(Simulator::builder(), config);
                *refused = run(&[&rig.allocator], &workload);
                let what = format!("{name} on {} with {limit}", preset.name());
                check(&rig.sim, &rig.allocator, limit, &what);
                // Memory that is left is used: a limit far above what the pool needs refuses nothing.
                assert!(rig.sim.device_bytes_peak() * 2 > limit, "{what}");
            }
            assert!(refused[0] > 0, "{name} on {}: the lowest limit refuses", preset.name());
            if !preset.is_torch() {
                assert_eq!(refused[3], 0, "{name} on {}: 6 % are enough", preset.name());
            }
        }
    }
}

#[test]
fn pools_of_one_group_never_exceed_their_limit_together() {
    let workload = workload("gnn");
    for preset in Preset::ALL {
        for limit in limits(workload.peak_live) {
            let config = Config { limit: Some(limit), ..preset.config() };
            let rig = Rig::on(Simulator::builder(), config);
            let pool = rig.allocator.create_pool("second").expect("a pool");
            run(&[&rig.allocator, &pool], &workload);
            let what = format!("{} with {limit} in two pools", preset.name());
            check(&rig.sim, &rig.allocator, limit, &what);
        }
    }
}

#[test]
fn memory_reserved_ahead_of_demand_counts_against_the_limit() {
    let workload = workload("gnn");
    for preset in Preset::ALL {
        for limit in limits(workload.peak_live) {
            let prefill = Bytes::new(limit.count() / 3);
            let config = Config { limit: Some(limit), prefill, ..preset.config() };
            let rig = Rig::on(Simulator::builder(), config);
            let ahead = rig.sim.live().device_bytes;
            assert!(preset == Preset::StreamOrdered || ahead >= prefill, "{ahead}");
            run(&[&rig.allocator], &workload);
            let what = format!("{} with {limit} and a prefill", preset.name());
            check(&rig.sim, &rig.allocator, limit, &what);
            // More than the limit is refused, and reserves nothing.
            let stream = rig.allocator.create_stream().expect("a stream");
            let before = rig.sim.live().device_bytes;
            if rig.allocator.prefill(limit, stream).is_err() {
                assert!(rig.sim.live().device_bytes <= before, "{what}");
            }
            check(&rig.sim, &rig.allocator, limit, &what);
        }
    }
}

#[test]
fn a_memory_fraction_is_a_limit_for_both_of_pytorchs_allocators() {
    let workload = workload("gnn");
    for preset in [Preset::Torch, Preset::TorchExpandable] {
        for fraction in [0.0513, 0.1007, 0.1111] {
            let settings = format!("per_process_memory_fraction:{fraction}");
            let torch = TorchConfig::parse(&settings).expect("a setting of PyTorch");
            let config = vramp_peers::Config { torch, ..vramp_peers::Config::preset(preset) };
            let rig = Rig::on(Simulator::builder(), config.build());
            let refused = run(&[&rig.allocator], &workload);
            let memory = rig.allocator.driver().info().limits.memory.count();
            let limit = Bytes::new((memory as f64 * fraction) as u64);
            assert!(refused > 0 || fraction > 0.11);
            check(&rig.sim, &rig.allocator, limit, &format!("{} {settings}", preset.name()));
        }
    }
}

#[test]
fn a_lower_limit_holds_from_then_on() {
    for preset in Preset::ALL {
        let config = Config { limit: Some(Bytes::gib(1)), ..preset.config() };
        let rig = Rig::on(Simulator::builder(), config);
        let block = rig.allocator.malloc(Bytes::mib(700), rig.stream).expect("it fits");
        rig.allocator.free(block, rig.stream).expect("the block is the pool's");
        rig.sim.advance(1);
        let lower = Bytes::mib(333);
        rig.allocator.set_limit(Some(lower)).expect("a limit can change");
        let mut kept = Vec::new();
        for _ in 0..40 {
            kept.extend(rig.allocator.malloc(Bytes::mib(10), rig.stream).ok());
            let reserved = rig.sim.live().device_bytes;
            assert!(reserved <= lower, "{}: {reserved}", preset.name());
        }
    }
}

#[test]
fn out_of_memory_texts_are_short_and_claim_remapping_only_where_it_happens() {
    for preset in Preset::ALL {
        let config = Config { limit: Some(Bytes::mib(101)), ..preset.config() };
        let rig = Rig::on(Simulator::builder(), config);
        let _kept = rig.allocator.malloc(Bytes::mib(60), rig.stream).expect("it fits");
        let error = rig.allocator.malloc(Bytes::mib(80), rig.stream).expect_err("it does not fit");
        let text = error.to_string();
        let first = text.lines().next().expect("the text has a line");
        assert_eq!(
            first,
            "out of memory: tried to allocate 80.00 MiB on stream0; the limit of 101 MiB allows no more"
                .replace("101 MiB", &Bytes::mib(101).to_string())
        );
        assert!(text.lines().all(|line| line.len() <= 100), "{text}");
        let remaps = matches!(preset, Preset::Vramp | Preset::Vpmm);
        assert_eq!(text.contains("by remapping"), remaps, "{}: {text}", preset.name());
        assert_eq!(text.contains("its largest free block"), preset.is_torch(), "{text}");
    }
}
