//! Replays and explanations of recordings, as JSON: `vramp._analysis` makes dataclasses of them.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use pyo3::prelude::*;
use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_alloc::device::sim::CardModel;
use vramp_alloc::device::{Device, DeviceOptions};
use vramp_analysis::candidates::Candidate;
use vramp_analysis::job::Job;
use vramp_analysis::limit::Limit;
use vramp_analysis::replay::{Options, Outcome, ReplayError};
use vramp_peers::torch::TorchConfig;
use vramp_peers::{Config, Preset};
use vramp_trace::{ReadError, ReadLimits, Trace};

use crate::error::refuse;

/// Memory of the card that analyses are replayed on: more than any job needs, so that only limits
/// count.
const LARGE: Bytes = Bytes::tib(1);

/// A failure: the class of the exception, and the text.
struct Failure {
    class: &'static str,
    text: String,
}

impl Failure {
    fn new(class: &'static str, text: impl ToString) -> Failure {
        Failure { class, text: text.to_string() }
    }
}

impl From<ReplayError> for Failure {
    fn from(error: ReplayError) -> Failure {
        match error {
            ReplayError::Open(error) => Failure::new("DeviceError", error),
            ReplayError::Create(error) => Failure::new("OptionError", error),
            error => Failure::new("VrampError", error),
        }
    }
}

type Outcomes = Result<String, Failure>;

/// Reads a recording. Keeps the devices in `only`, or all of them if it is `None`.
fn read(path: &Path, only: Option<&[u32]>) -> Result<Trace, Failure> {
    let mut trace = read_all(path)?;
    if let Some(devices) = only {
        trace.retain_devices(devices).map_err(|error| {
            let text = format!("trace_device of '{}': {error}", path.display());
            Failure::new("RangeError", text)
        })?;
    }
    Ok(trace)
}

fn read_all(path: &Path) -> Result<Trace, Failure> {
    vramp_trace::read_trace(path, &ReadLimits::default()).map_err(|error| {
        let class = match &error {
            ReadError::Open { .. } | ReadError::Io { .. } => "FileError",
            _ => "TraceError",
        };
        Failure::new(class, format!("cannot read the recording '{}': {error}", path.display()))
    })
}

/// Returns the job of each recorded device.
fn jobs<'a>(trace: &'a Trace, path: &Path) -> Result<Vec<Job<'a>>, Failure> {
    let jobs = Job::all(trace);
    match jobs.is_empty() {
        false => Ok(jobs),
        true => Err(Failure::new(
            "TraceError",
            format!(
                "the recording '{}' allocates nothing: record with \
                 torch.cuda.memory._record_memory_history() before the job begins",
                path.display()
            ),
        )),
    }
}

fn json(results: &impl Serialize) -> Outcomes {
    serde_json::to_string(results).map_err(|error| Failure::new("InternalError", error))
}

fn large_card() -> Result<Device, Failure> {
    let options =
        DeviceOptions { name: "sim".to_owned(), usable: Some(LARGE), ..DeviceOptions::default() };
    Device::with(options).map_err(|error| Failure::new("DeviceError", error))
}

fn threads() -> NonZeroUsize {
    thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// Returns a limit from its text: an amount, a part of `memory` where a card is known, or what a process can use of
/// a card.
fn limit(text: &str, memory: Option<Bytes>) -> Result<Limit, Failure> {
    if text.starts_with(|first: char| first.is_ascii_alphabetic())
        && let Ok(card) = CardModel::find(text)
    {
        return Ok(Limit::from(card));
    }
    let percent = text.strip_suffix('%').and_then(|percent| percent.trim().parse::<f64>().ok());
    let limit = match percent {
        Some(percent) if percent > 0.0 && percent <= 100.0 => {
            memory.map(|memory| Bytes::new((memory.count() as f64 * percent / 100.0) as u64))
        }
        Some(_) => None,
        // As in the program: a number alone could be meant in any unit.
        None if text.bytes().all(|byte| byte.is_ascii_digit()) => None,
        None => text.parse().ok().filter(|limit: &Bytes| !limit.is_zero()),
    };
    let refusal = || {
        let part = if memory.is_some() { ", a part such as 90%" } else { "" };
        format!(
            "limit={text:?} is invalid: write an int of bytes, a size such as 80GiB{part}, or a card such as l4"
        )
    };
    limit.map(Limit::from).ok_or_else(|| Failure::new("OptionError", refusal()))
}

/// Runs `work` detached from the interpreter.
fn run(py: Python<'_>, work: impl FnOnce() -> Outcomes + Send) -> PyResult<String> {
    py.detach(work).map_err(|failure| refuse(py, failure.class, &failure.text))
}

/// Runs the program `vramp` with arguments, the first of which is its name. Returns the exit code.
#[pyfunction]
pub fn program(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| vramp_cli::main(arguments))
}

/// Runs a command of the program `vramp`, and returns what it writes to standard output.
#[pyfunction]
pub fn command(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<String> {
    run(py, || {
        let mut printed = Vec::new();
        vramp_cli::command(arguments, &mut printed).map_err(|error| {
            let class = match error.downcast_ref::<ReadError>() {
                Some(ReadError::Open { .. } | ReadError::Io { .. }) => "FileError",
                Some(_) => "TraceError",
                None if error.is::<vramp_cli::InvalidArguments>() => "OptionError",
                None if error.is::<std::io::Error>() => "FileError",
                None => "VrampError",
            };
            Failure::new(class, format!("{error:#}"))
        })?;
        String::from_utf8(printed).map_err(|error| Failure::new("InternalError", error))
    })
}

/// Replays a recording on allocators.
#[pyfunction]
pub fn replay(
    py: Python<'_>,
    path: PathBuf,
    allocators: Vec<String>,
    limit: Option<String>,
    device: Option<String>,
    trace_device: Option<Vec<u32>>,
) -> PyResult<String> {
    run(py, move || {
        let open =
            |name: &str| Device::open(name).map_err(|error| Failure::new("DeviceError", error));
        let chosen = device.as_deref().map(open).transpose()?;
        let mut presets = Vec::new();
        for name in &allocators {
            let preset = name.parse::<Preset>();
            presets.push(preset.map_err(|error| Failure::new("OptionError", error))?);
        }
        let begun = Instant::now();
        let trace = read(&path, trace_device.as_deref())?;
        let read_s = begun.elapsed().as_secs_f64();
        let mut outcomes = Vec::new();
        let jobs = jobs(&trace, &path)?;
        let first = jobs.iter().find_map(recorded_card);
        for job in jobs {
            // The devices of a recording are taken for cards of one kind.
            let device = match (&chosen, recorded_card(&job).or(first)) {
                (Some(device), _) => device.clone(),
                (None, Some(card)) => open(&format!("sim:{}", card.id))?,
                (None, None) => open("sim")?,
            };
            let memory = device.info().limits.memory;
            let limit = limit.as_deref().map(|text| self::limit(text, Some(memory))).transpose()?;
            let limit = limit.map(Limit::bytes);
            for &preset in &presets {
                let (config, settings) = config(preset, limit, &job);
                let options = Options { releases_of: Some(&job.recorded), ..Options::default() };
                let outcome = vramp_analysis::replay::replay(
                    &job.workload,
                    &device,
                    config,
                    options,
                    |_| (),
                )?;
                let outcome = outcome.with_recorded(&job.recorded);
                outcomes.push(Outcome { read_s, settings, ..outcome });
            }
        }
        json(&outcomes)
    })
}

/// Returns the card that the job ran on, as far as it follows from the recording.
fn recorded_card(job: &Job<'_>) -> Option<&'static CardModel> {
    let usable = job.recorded.oom.as_ref().and_then(|oom| oom.usable());
    usable.and_then(CardModel::infer)
}

/// Returns the configuration of an allocator. Those of PyTorch have the settings of the recorded one.
fn config(preset: Preset, limit: Option<Bytes>, job: &Job<'_>) -> (Config, Option<String>) {
    let config = Config::preset(preset).with_limit(limit);
    let recorded = job.recorded.settings.as_deref().filter(|_| preset.is_torch());
    match recorded.and_then(|settings| Some((settings, TorchConfig::parse(settings).ok()?))) {
        Some((settings, torch)) => (Config { torch, ..config }, Some(settings.to_owned())),
        None => (config, None),
    }
}

/// Explains why a recorded job ran out of memory.
#[pyfunction]
pub fn explain(
    py: Python<'_>,
    path: PathBuf,
    limit: Option<String>,
    at: Option<usize>,
    top: usize,
    fits: bool,
    trace_device: Option<Vec<u32>>,
) -> PyResult<String> {
    use vramp_analysis::explain::{Options, explain};
    run(py, move || {
        let limit = limit.as_deref().map(|text| self::limit(text, None)).transpose()?;
        let trace = read(&path, trace_device.as_deref())?;
        let device = large_card()?;
        let mut found = Vec::new();
        let jobs = jobs(&trace, &path)?;
        let most = jobs.iter().map(|job| job.recorded.events).max().unwrap_or(0);
        if let Some(event) = at.filter(|&at| at as u64 >= most) {
            let text =
                format!("at={event} is beyond the end of the recording, which has {most} events");
            return Err(Failure::new("RangeError", text));
        }
        for job in jobs {
            // Of several devices, some may have fewer events.
            let at = at.filter(|&at| (at as u64) < job.recorded.events);
            let options = Options { limit, at, top, threads: threads(), fits };
            found.push(explain(&job, &device, &options)?);
        }
        json(&found)
    })
}

/// Tries settings and allocators on a recorded job.
#[pyfunction]
pub fn advise(
    py: Python<'_>,
    path: PathBuf,
    limits: Vec<String>,
    trace_device: Option<Vec<u32>>,
) -> PyResult<String> {
    use vramp_analysis::advise::advise;
    run(py, move || {
        let limits = limits.iter().map(|text| limit(text, None)).collect::<Result<Vec<_>, _>>()?;
        let trace = read(&path, trace_device.as_deref())?;
        let device = large_card()?;
        let mut found = Vec::new();
        for job in jobs(&trace, &path)? {
            let candidates = Candidate::all(&job.recorded);
            found.push(advise(&job, &device, &candidates, &limits, threads())?);
        }
        json(&found)
    })
}
