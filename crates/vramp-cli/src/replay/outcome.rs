//! What came out of one run, as it is printed and stored.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Fidelity;

/// What came out of one run. Serialised, this is the line that `--json` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The trace's name.
    pub trace: String,
    /// Which of the recorded devices was replayed.
    pub trace_device: u32,
    /// The allocator's name.
    pub allocator: &'static str,
    /// The device that was replayed on: `sim:h200`, `cuda:0`.
    pub device: String,
    /// Events of that recorded device in the trace.
    pub events: u64,
    /// Requests that the events came to.
    pub requests: u64,
    /// Streams that memory was asked for on.
    pub streams: u64,
    /// The most the workload holds at any time, in bytes. The whole workload's, even if the run
    /// stopped before.
    pub peak_live_bytes: u64,
    /// The most the allocator held, in bytes; of all its pools together.
    pub peak_reserved_bytes: u64,
    /// Their ratio; none for a workload that holds nothing.
    pub reserved_over_live: Option<f64>,
    /// Host time in driver calls during the replay, without setup and teardown.
    pub driver_ms: f64,
    /// `modelled` on the simulator, `measured` on a card.
    pub driver_ms_is: &'static str,
    /// The longest malloc, in host time.
    pub worst_malloc_us: f64,
    /// Requests that were served without new or moved memory. Zero for the driver's pool, which
    /// does not tell.
    pub hits: u64,
    /// Requests that were not. Zero for the driver's pool too.
    pub misses: u64,
    /// Driver calls during the replay.
    pub driver_calls: u64,
    /// Physical handles created, the prefill's included.
    pub handles_created: u64,
    /// Physical handles moved to another address.
    pub handles_moved: u64,
    /// Bytes in them.
    pub moved_bytes: u64,
    /// The trace event at which memory ran out, if it did: the run stops there.
    pub oom_at_event: Option<u64>,
    /// What the allocator said when it did.
    pub oom: Option<String>,
    /// Host time of the whole replay loop, in seconds.
    pub replay_s: f64,
    /// Host time of reading the trace, in seconds.
    pub read_s: f64,
    /// SHA-256 over where every block was placed, in hexadecimal.
    pub decisions_sha256: String,
    /// Driver calls by kind.
    pub calls: BTreeMap<&'static str, CallCount>,
    /// What the recording left out, by kind.
    pub repairs: BTreeMap<&'static str, u32>,
    /// Accesses without order that were found; none where nobody looked for them.
    pub hazards: Option<u64>,
    /// How well the recorded allocator was foretold; left out where nobody asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fidelity: Option<Fidelity>,
}

/// What driver calls of one kind came to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CallCount {
    /// How many were made.
    pub count: u64,
    /// Host time they took together.
    pub ms: f64,
}
