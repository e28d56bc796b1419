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
