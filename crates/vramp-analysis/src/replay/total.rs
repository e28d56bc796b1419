//! One allocator on all devices of a recording.

use serde::Serialize;

use super::Outcome;

/// The runs of one allocator on the devices of a recording, added up.
///
/// Devices may reach their peaks at different times, so a sum of peaks is at least what was in use at
/// once, and may be more.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Total {
    /// The allocator's name.
    pub allocator: &'static str,
    /// Numbers of the recorded devices, in the order of the runs.
    pub trace_devices: Vec<u32>,
    /// Events of these devices.
    pub events: u64,
    /// Sum of the peaks of live bytes.
    pub sum_of_peak_live_bytes: u64,
    /// Sum of the most bytes that each device needed at once, with requests that failed.
    pub sum_of_peak_demand_bytes: u64,
    /// Sum of the recorded allocator's peaks; `None` if that of a device is not known.
    pub sum_of_recorded_peak_bytes: Option<u64>,
    /// Sum of the peaks of reserved bytes.
    pub sum_of_peak_reserved_bytes: u64,
    /// Host time in driver calls.
    pub driver_ms: f64,
    /// The longest malloc on any device, in host time.
    pub worst_malloc_us: f64,
    /// Requests served without new or moved memory.
    pub hits: u64,
    /// Requests that needed new or moved memory.
    pub misses: u64,
    /// Driver calls.
    pub driver_calls: u64,
    /// Bytes in moved handles.
    pub moved_bytes: u64,
    /// Numbers of the recorded devices on which a request failed for lack of memory. Their run stopped
    /// there, so the sums have only what came before.
    pub oom_on_trace_devices: Vec<u32>,
}

impl Total {
    /// Adds up the runs of each allocator, in the order of their first runs. O(outcomes).
    pub fn by_allocator<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> Vec<Total> {
        let mut totals: Vec<Total> = Vec::new();
        for outcome in outcomes {
            match totals.iter_mut().find(|total| total.allocator == outcome.allocator) {
                Some(total) => total.add(outcome),
                None => totals.push(Total::of(outcome)),
            }
        }
        totals
    }

    fn of(outcome: &Outcome) -> Total {
        let mut total = Total {
            allocator: outcome.allocator,
            trace_devices: Vec::new(),
            events: 0,
            sum_of_peak_live_bytes: 0,
            sum_of_peak_demand_bytes: 0,
            sum_of_recorded_peak_bytes: Some(0),
            sum_of_peak_reserved_bytes: 0,
            driver_ms: 0.0,
            worst_malloc_us: 0.0,
            hits: 0,
            misses: 0,
            driver_calls: 0,
            moved_bytes: 0,
            oom_on_trace_devices: Vec::new(),
        };
        total.add(outcome);
        total
    }

    fn add(&mut self, outcome: &Outcome) {
        // Sizes in a broken recording may exceed the address space.
        let add = |sum: &mut u64, bytes: u64| *sum = sum.saturating_add(bytes);
        self.trace_devices.push(outcome.trace_device);
        self.events += outcome.events;
        add(&mut self.sum_of_peak_live_bytes, outcome.peak_live_bytes);
        add(&mut self.sum_of_peak_demand_bytes, outcome.peak_demand_bytes);
        add(&mut self.sum_of_peak_reserved_bytes, outcome.peak_reserved_bytes);
        add(&mut self.moved_bytes, outcome.moved_bytes);
        let recorded = self.sum_of_recorded_peak_bytes.zip(outcome.recorded_peak_bytes);
        self.sum_of_recorded_peak_bytes = recorded.map(|(sum, peak)| sum.saturating_add(peak));
        self.driver_ms += outcome.driver_ms;
        self.worst_malloc_us = self.worst_malloc_us.max(outcome.worst_malloc_us);
        self.hits += outcome.hits;
        self.misses += outcome.misses;
        self.driver_calls += outcome.driver_calls;
        if outcome.oom_at_event.is_some() {
            self.oom_on_trace_devices.push(outcome.trace_device);
        }
    }
}
