//! Recordings that begin in the middle: the replay begins with the segments of that time.
use std::path::PathBuf;

use vramp::device::Device;
use vramp::peers::{Config, Preset};
use vramp_analysis::replay::{Fidelity, Options, Recorded, replay};
use vramp_trace::{ReadLimits, Trace, Workload, read_trace};

/// An example without its first events.
fn cut(name: &str, part: f64) -> Trace {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces");
    let mut trace = read_trace(folder.join(name), &ReadLimits::default()).unwrap();
    let first = (trace.events.len() as f64 * part) as usize;
    trace.events.drain(..first);
    trace
}

fn fidelity(trace: &Trace, audit: bool) -> Fidelity {
    let workload = Workload::from_trace(trace, 0);
    let recorded = Recorded::of(trace, &workload);
    let device = Device::open("sim").unwrap();
    let config = Config::preset(Preset::Torch);
    let options = Options { audit, compare_with: Some(&recorded), ..Options::default() };
    let outcome = replay(&workload, &device, config, options, |_| {}).unwrap();
    outcome.fidelity.unwrap()
}

#[test]
fn the_model_matches_a_recording_that_begins_in_the_middle() {
    for name in ["llama_varlen_oom.pickle.gz", "resnet_multires_stacks.pickle.gz"] {
        for part in [0.02, 0.1, 0.3, 0.6] {
            let found = fidelity(&cut(name, part), false);
            assert!(found.faithful, "{name} from {part} on: {found:?}");
            assert_eq!((found.missing, found.extra), (0, 0), "{name} from {part} on: {found:?}");
        }
    }
}

#[test]
fn restored_segments_are_audited() {
    assert!(fidelity(&cut("llama_varlen_oom.pickle.gz", 0.3), true).faithful);
}

#[test]
fn without_the_initial_segments_the_difference_is_reported() {
    let mut trace = cut("llama_varlen_oom.pickle.gz", 0.3);
    trace.segments.clear();
    let found = fidelity(&trace, false);
    assert!(!found.faithful);
    assert!(found.first_difference.is_some_and(|text| text.contains("replayed")));
}
