//! Properties of the readers for any input.

use vramp_core::Bytes;
use vramp_trace::spool::{FrameText, Recording};
use vramp_trace::{ReadLimits, Request, Trace, Workload, read};

/// Reads `bytes` under tight limits and checks the trace.
///
/// # Panics
/// If a workload is invalid, the trace does not read back equal from a `.vtrace`, or the inferred
/// segments are inconsistent.
pub fn check(bytes: &[u8]) {
    let limits = ReadLimits {
        contents: Bytes::mib(4),
        memory: Bytes::mib(16),
        events: 100_000,
        ..ReadLimits::default()
    };
    // What a process records while it runs is of another kind than files that are exchanged.
    let trace = match Recording::read(bytes) {
        Ok(recording) => recording.to_trace(|pc, module| vec![FrameText::unknown(pc, module)]),
        Err(_) => match read(bytes, &limits) {
            Ok(trace) => trace,
            Err(_) => return,
        },
    };
    for device in 0..trace.device_count.min(4) {
        check_workload(&Workload::from_trace(&trace, device));
    }
    check_round_trip(&trace);
    check_views(trace);
}

fn check_workload(workload: &Workload) {
    #[derive(Clone, Copy, PartialEq)]
    enum State {
        Live,
        Pending,
        Done,
    }
    let mut blocks = Vec::new();
    for (index, request) in workload.requests.iter().enumerate() {
        match *request {
            Request::Alloc { block, stream, .. } => {
                assert_eq!(block as usize, blocks.len(), "request {index}");
                assert!((stream as usize) < workload.streams.len(), "request {index}");
                blocks.push(State::Live);
            }
            Request::Free { block } => {
                let before = std::mem::replace(&mut blocks[block as usize], State::Pending);
                assert!(before == State::Live, "request {index}");
            }
            Request::FreeCompleted { block } => {
                let before = std::mem::replace(&mut blocks[block as usize], State::Done);
                assert!(before == State::Pending, "request {index}");
            }
            Request::Oom { stream, .. } => {
                assert!((stream as usize) < workload.streams.len(), "request {index}");
            }
        }
    }
    assert_eq!(blocks.len(), workload.blocks as usize);
}

fn check_round_trip(trace: &Trace) {
    let mut file = Vec::new();
    trace.write_vtrace(&mut file).expect("what was read can be written");
    let again = read(&file[..], &ReadLimits::default()).expect("what was written can be read");
    assert!(*trace == again, "a .vtrace changed the trace");
}

/// Recorded segments may overlap, and are refused then. Inferred segments must not overlap.
fn check_views(mut trace: Trace) {
    if trace.device_count <= 4 {
        trace.write_perfetto(std::io::sink()).expect("what was read can be shown");
    }
    trace.segments.clear();
    trace.infer_segments();
    let mut file = Vec::new();
    trace.write_snapshot(&mut file).expect("inferred segments fit together");
    let limits = ReadLimits::default();
    let again = read(&file[..], &limits).expect("what was written can be read");
    assert_eq!(again.events.len(), trace.events.len());
}
