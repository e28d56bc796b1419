//! What the commands that analyse recordings share.

use std::num::NonZeroUsize;
use std::path::Path;
use std::thread;

use anyhow::{Result, bail};
use vramp::Bytes;
use vramp::device::{DeviceOptions, read_costs};
use vramp_analysis::job::Job;
use vramp_trace::Trace;

use crate::device::Device;

/// Returns the simulated card that the analysis replays on. Its size does not matter, because every
/// replay has a limit or is expected to fit.
pub(crate) fn device(costs: Option<&Path>) -> Result<Device> {
    let costs = costs.map(read_costs).transpose()?;
    Ok(Device::with(DeviceOptions { name: "sim".to_owned(), costs, usable: Some(LARGE) })?)
}

/// Memory of the simulated card: more than any job needs, so that only limits count.
const LARGE: Bytes = Bytes::tib(1);

/// Returns the number of replays that run at once.
pub(crate) fn threads() -> NonZeroUsize {
    thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// How many devices of a recording are analysed: texts name the device where there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Devices {
    One,
    Several,
}

impl Devices {
    pub(crate) fn of(count: usize) -> Devices {
        if count > 1 { Devices::Several } else { Devices::One }
    }

    /// Returns what follows the name of the trace in a headline. A device 0 that is the only one is not
    /// named.
    pub(crate) fn suffix(self, device: u32) -> String {
        match (self, device) {
            (Devices::One, 0) => String::new(),
            (_, device) => format!(", device {device}"),
        }
    }
}

/// Why a sum of peaks is no peak.
pub(crate) const SUM_OF_PEAKS: &str = "Devices may reach their peaks at different times: a sum of \
    peaks may be more than all of them had at once.";

/// Returns the job of each recorded device.
pub(crate) fn jobs<'a>(trace: &'a Trace, path: &Path) -> Result<Vec<Job<'a>>> {
    let jobs = Job::all(trace);
    if jobs.is_empty() {
        bail!(
            "the trace '{}' allocates nothing: record with \
             torch.cuda.memory._record_memory_history() before the job begins",
            path.display()
        );
    }
    Ok(jobs)
}
