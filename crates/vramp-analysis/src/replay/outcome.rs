//! The result of one run, as it is printed and stored.

use std::collections::BTreeMap;

use serde::Serialize;
use vramp::peers::Preset;

use super::{Fidelity, Recorded};

/// Version of the format of [`Outcome`]. It changes when a field is removed or changes its meaning.
pub const SCHEMA_VERSION: u32 = 2;

/// The result of one run, as `--json` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
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
    /// The recorded settings of PyTorch's allocator that the replay used; left out if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
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
    /// Most bytes that the job needed at once: as `peak_live_bytes`, with requests that failed.
    pub peak_demand_bytes: u64,
    /// Peak of the recorded allocator's reserved bytes; `None` if it is not known.
    pub recorded_peak_bytes: Option<u64>,
    /// How much of the job the recording shows: `whole`, `from_the_middle` or `missing`.
    pub recording: &'static str,
    /// Peak of the reserved bytes of all pools together.
    pub peak_reserved_bytes: u64,
    /// `peak_reserved_bytes` over `peak_demand_bytes`; `None` for a workload without allocations and
    /// for a run that ran out of memory.
    pub overhead: Option<f64>,
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
    /// Number, among the events of the recorded device, of the first request that failed for lack of
    /// memory. The run stops there.
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
    /// Reserved bytes at each change, with [`super::Options::curve`]; not printed.
    #[serde(skip)]
    pub curve: Vec<CurvePoint>,
}

impl Outcome {
    /// Returns true for the driver's own pool on the simulator, which is modelled without fragmentation: it
    /// is no rival of the others.
    pub fn is_ideal(&self) -> bool {
        self.allocator == Preset::StreamOrdered.name() && self.driver_ms_is == "modelled"
    }

    /// Returns the outcome with what `recorded` says about the recording.
    pub fn with_recorded(self, recorded: &Recorded) -> Outcome {
        Outcome {
            events: recorded.events,
            recorded_peak_bytes: recorded.reserved.peak().map(vramp::Bytes::count),
            recording: recorded.past.name(),
            ..self
        }
    }
}

/// The reserved bytes from a request on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CurvePoint {
    /// Index of the request in [`vramp_trace::Workload::requests`].
    pub request: u32,
    /// Reserved bytes after it.
    pub reserved_bytes: u64,
}

/// Driver calls of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CallCount {
    /// Number of calls.
    pub count: u64,
    /// Host time of all calls, in milliseconds.
    pub ms: f64,
}
