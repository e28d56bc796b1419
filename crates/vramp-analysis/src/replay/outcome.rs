//! The result of one run, as it is printed and stored.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Fidelity;

/// The result of one run, as `--json` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The trace's name.
    pub trace: String,
    /// Number of the recorded device.
    pub trace_device: u32,
    /// The allocator's name.
    pub allocator: &'static str,
    /// The variables of the allocator's own project that its settings come from, such as
    /// `VPMM_PAGES`; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variables: Vec<&'static str>,
    /// The device of the replay: `sim:h200`, `cuda:0`.
    pub device: String,
    /// Events of that recorded device in the trace.
    pub events: u64,
    /// Requests of the workload.
    pub requests: u64,
    /// Streams with allocations.
    pub streams: u64,
    /// Peak of the live bytes of the whole workload, even if the run stopped before.
    pub peak_live_bytes: u64,
    /// Peak of the reserved bytes of all pools together.
    pub peak_reserved_bytes: u64,
    /// `peak_reserved_bytes` over `peak_live_bytes`; `None` for a workload without allocations.
    pub reserved_over_live: Option<f64>,
    /// Host time in driver calls during the replay, without setup and teardown.
    pub driver_ms: f64,
    /// `modelled` on the simulator, `measured` on a card.
    pub driver_ms_is: &'static str,
    /// The longest malloc, in host time.
    pub worst_malloc_us: f64,
    /// Requests served without new or moved memory. Zero for the driver's pool, which has no such
    /// count.
    pub hits: u64,
    /// Requests that needed new or moved memory. Zero for the driver's pool too.
    pub misses: u64,
    /// Driver calls during the replay.
    pub driver_calls: u64,
    /// Physical handles created, the prefill's included.
    pub handles_created: u64,
    /// Physical handles moved to another address.
    pub handles_moved: u64,
    /// Bytes in the moved handles.
    pub moved_bytes: u64,
    /// Trace event of the first request that failed for lack of memory. The run stops there.
    pub oom_at_event: Option<u64>,
    /// The allocator's error at that event.
    pub oom: Option<String>,
    /// Host time of the whole replay loop, in seconds.
    pub replay_s: f64,
    /// Host time of reading the trace, in seconds.
    pub read_s: f64,
    /// SHA-256 over the place of every block, in hexadecimal.
    pub decisions_sha256: String,
    /// Driver calls by kind.
    pub calls: BTreeMap<&'static str, CallCount>,
    /// Repairs of the recording, by kind.
    pub repairs: BTreeMap<&'static str, u32>,
    /// Unordered accesses found; `None` without an audit on a simulator.
    pub hazards: Option<u64>,
    /// Comparison with the recorded segments; left out without `--fidelity`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Fidelity>,
}

/// Driver calls of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CallCount {
    /// Number of calls.
    pub count: u64,
    /// Host time of all calls, in milliseconds.
    pub ms: f64,
}
