//! The command: reads traces, prints a table or lines of JSON.

use std::env;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use vramp::peers::torch::TorchConfig;
use vramp::peers::{Config, Preset};
use vramp_trace::Workload;

use vramp::device::sim::CardModel;
use vramp_analysis::limit::Limit;
use vramp_analysis::replay::{Options, Outcome, Recorded, RecordedOom, replay};

use super::{table, total};
use crate::allocators::presets;
use crate::analysis::Devices;
use crate::args::Replay;
use crate::device::{self, Device, Replaying};
use crate::exit::OutOfMemory;
use crate::json;
use crate::progress;
use crate::reading::Reading;
use crate::text::Text;

pub(crate) fn run(args: &Replay, out: &mut dyn Write) -> Result<()> {
    Reading::check(&args.traces)?;
    let replaying = args.device.open_for_recordings()?;
    let device = &replaying.device;
    let runs = runs(args, device)?;
    let (mut unfaithful, mut failed) = (Vec::new(), false);
    let text = Text::of_stdout();
    for Run { config, variables } in runs.iter().filter(|_| !args.json) {
        for &name in variables {
            let value = variable(name).unwrap_or_default();
            writeln!(out, "The allocator {} uses {name}={value}.", config.preset.name())?;
        }
    }
    let mut without_effect: Vec<&String> =
        runs.iter().flat_map(|run| &run.config.torch.without_effect).collect();
    without_effect.sort();
    without_effect.dedup();
    for key in without_effect.iter().filter(|_| !args.json) {
        writeln!(out, "The setting {key} has no effect on the model.")?;
    }
    for path in &args.traces {
        let ended = replay_recording(args, &replaying, &runs, path, (&text, out))?;
        unfaithful.extend(ended.unfaithful);
        failed |= ended.failed;
    }
    if !args.json {
        let fresh = device.fresh(false)?;
        let assumptions = table::assumptions(fresh.driver.info(), args.audit);
        writeln!(out, "{}", text.wrap(&assumptions, 0))?;
    }
    if !unfaithful.is_empty() {
        out.flush()?;
        bail!(
            "the model does not match the recorded segments of {} (more than 1 % differ, or the \
             peaks by more than 0.5 %): give the recorded job's settings with --torch-config",
            unfaithful.join(", ")
        );
    }
    if failed && args.fail_on_oom {
        out.flush()?;
        return Err(OutOfMemory.into());
    }
    Ok(())
}

/// What the replays of a recording found.
#[derive(Default)]
struct Ended {
    /// Runs that do not match the recorded segments.
    unfaithful: Vec<String>,
    /// True if a run ran out of memory.
    failed: bool,
}

/// Replays each device of a recording and prints the results.
fn replay_recording(
    args: &Replay,
    replaying: &Replaying,
    runs: &[Run],
    path: &Path,
    (text, out): (&Text, &mut dyn Write),
) -> Result<Ended> {
    let mut ended = Ended::default();
    let begun = Instant::now();
    let jobs = jobs(path, &args.reading)?;
    let read_s = begun.elapsed().as_secs_f64();
    let devices = Devices::of(jobs.len());
    let cards = recorded_cards(replaying, &jobs)?;
    let (mut of_all, mut left_out) = (Vec::new(), 0);
    for ((workload, recorded), device) in jobs.iter().zip(&cards) {
        let is_missing = recorded.past.is_missing();
        let runs = if is_missing && !args.json { &[][..] } else { runs };
        let mut outcomes = Vec::new();
        for Run { config, variables } in runs {
            let applied = with_recorded_settings(args, config, recorded);
            let (config, settings) = match devices {
                Devices::One => applied?,
                Devices::Several => {
                    applied.with_context(|| format!("recorded device {}", workload.device))?
                }
            };
            let outcome = one(args, device, config, workload, recorded)?;
            let variables = variables.clone();
            let outcome = Outcome { read_s, variables, settings, ..outcome };
            if outcome.fidelity.as_ref().is_some_and(|fidelity| !fidelity.faithful) {
                let suffix = devices.suffix(workload.device);
                let (trace, allocator) = (&outcome.trace, outcome.allocator);
                ended.unfaithful.push(format!("'{trace}'{suffix} on {allocator}"));
            }
            if args.json {
                json::line(out, &outcome)?;
                out.flush()?;
            }
            ended.failed |= outcome.oom_at_event.is_some();
            outcomes.push(outcome);
        }
        if !args.json {
            let write = match devices {
                Devices::One => table::write,
                Devices::Several => table::write_one_of_several,
            };
            write(out, text, workload, recorded, &outcomes)?;
            out.flush()?;
            left_out += usize::from(is_missing);
            of_all.extend(outcomes);
        }
    }
    if devices == Devices::Several && !args.json {
        total::write(out, text, &of_all, left_out)?;
    }
    Ok(ended)
}

/// Returns the card that each job ran on, if it follows from the memory that was usable when a request
/// failed, and the device stands in for a card that is not there. The devices of a recording are taken
/// for cards of one kind: where a device shows none, the first card that another one shows counts.
fn recorded_cards(replaying: &Replaying, jobs: &[(Workload, Recorded)]) -> Result<Vec<Device>> {
    let device = &replaying.device;
    let card = |recorded: &Recorded| {
        let usable = recorded.oom.as_ref().and_then(RecordedOom::usable);
        usable.and_then(CardModel::infer)
    };
    let first = jobs.iter().find_map(|(_, recorded)| card(recorded));
    let mut announced = Vec::new();
    let cards = jobs.iter().map(|(_, recorded)| {
        let Some(card) = card(recorded).or(first) else { return Ok(device.clone()) };
        let name = format!("sim:{}", card.id);
        if !replaying.stands_in || name == device.info().id {
            return Ok(device.clone());
        }
        let simulated = Device::open(&name)?;
        if !announced.contains(&card.id) {
            device::announce_recorded(card.name);
            announced.push(card.id);
        }
        Ok(simulated)
    });
    cards.collect()
}

/// Returns the workload of each recorded device. The trace, which is much larger, is dropped.
fn jobs(path: &Path, reading: &Reading) -> Result<Vec<(Workload, Recorded)>> {
    let trace = reading.read(path)?;
    let jobs: Vec<_> = Workload::all(&trace)
        .into_iter()
        .filter(|workload| !workload.requests.is_empty())
        .map(|workload| {
            let recorded = Recorded::of(&trace, &workload);
            (workload, recorded)
        })
        .collect();
    if jobs.is_empty() {
        bail!(
            "the trace '{}' allocates nothing: record with \
             torch.cuda.memory._record_memory_history() before the job begins",
            path.display()
        );
    }
    Ok(jobs)
}

/// Applies the recorded allocator's settings to PyTorch's allocator unless others are given. Returns
/// the settings that were applied too. Settings of a newer PyTorch that the model does not know are
/// an error with `--fidelity`, and left out otherwise.
fn with_recorded_settings(
    args: &Replay,
    config: &Config,
    recorded: &Recorded,
) -> Result<(Config, Option<String>)> {
    if args.fidelity && recorded.segments.is_empty() && recorded.initial.is_empty() {
        bail!(
            "the recording has no events of segments to compare with: record with \
             torch.cuda.memory._record_memory_history() before the job begins"
        );
    }
    let is_default = config.torch == TorchConfig::default();
    let settings = recorded.settings.as_deref();
    let (true, true, Some(settings)) = (config.preset.is_torch(), is_default, settings) else {
        return Ok((config.clone(), None));
    };
    match TorchConfig::parse(settings) {
        Ok(torch) => Ok((Config { torch, ..config.clone() }, Some(settings.to_owned()))),
        Err(error) if args.fidelity => Err(error).context("the recorded job's settings"),
        Err(_) => Ok((config.clone(), None)),
    }
}

/// The configuration of one allocator.
struct Run {
    config: Config,
    /// The variables of the allocator's own project that it comes from.
    variables: Vec<&'static str>,
}

/// Returns one configuration for each allocator. The only place that reads the variables of VPMM and
/// of PyTorch. Arguments take precedence, and so do recorded settings.
fn runs(args: &Replay, device: &Device) -> Result<Vec<Run>> {
    let mut chosen = presets(&args.allocator);
    if chosen.is_empty() {
        chosen = Preset::ALL.to_vec();
        // The modelled driver's pool never fragments, so its memory says nothing.
        chosen.retain(|&preset| preset != Preset::StreamOrdered || !device.info().simulated);
    }
    let chosen = chosen.into_iter();
    if args.fidelity && !chosen.clone().all(|preset| preset.is_torch()) {
        bail!("--fidelity checks the models of PyTorch's allocator: add --allocator torch");
    }
    let is_set = |name: &str| match name {
        "VPMM_PAGES" => args.prefill.is_some(),
        _ if name.starts_with("VPMM_") => false,
        _ => args.torch_config.is_some() || args.fidelity,
    };
    let lookup = |name: &str| if is_set(name) { None } else { variable(name) };
    chosen
        .map(|preset| {
            let mut config = Config::preset(preset);
            config.base.limit = args.limit.map(Limit::bytes);
            config.torch = args.torch_config.clone().unwrap_or_default();
            config.base.prefill = args.prefill.unwrap_or_default();
            let (config, variables) = config.with_variables(lookup)?;
            Ok(Run { config, variables })
        })
        .collect()
}

fn variable(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn one(
    args: &Replay,
    device: &Device,
    config: Config,
    workload: &Workload,
    recorded: &Recorded,
) -> Result<Outcome> {
    let allocator = config.preset.name();
    let bar = progress::of_replay(allocator, workload);
    let compare_with = args.fidelity.then_some(recorded);
    let releases_of = Some(recorded);
    let options = Options { audit: args.audit, compare_with, releases_of, ..Options::default() };
    let outcome = replay(workload, device, config, options, |done| bar.set_position(done as u64));
    bar.finish_and_clear();
    outcome
        .map(|outcome| outcome.with_recorded(recorded))
        .with_context(|| format!("'{}' on {allocator}", workload.name))
}
