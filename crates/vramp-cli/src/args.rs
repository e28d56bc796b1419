//! The command line.

use std::path::{Path, PathBuf};

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use vramp::Bytes;
use vramp::peers::torch::{TorchConfig, TorchConfigError};
use vramp_analysis::limit::Limit;

use crate::allocators::{Allocators, parse_allocators};
use crate::amount::{limit, memory};
#[cfg(feature = "bench")]
pub use crate::bench::args::Bench;
#[cfg(feature = "bench")]
use crate::bench::args::parse_seconds;
pub use crate::budgets::args::{Ctl, Top};
use crate::device::DeviceArgs;
pub use crate::exec::args::Exec;
use crate::exit::InvalidArguments;
use crate::graph::Window;
pub use crate::keep::args::Keep;
use crate::reading::{Reading, STANDARD};

/// Replays recorded GPU workloads on any allocator and compares their memory and cost.
#[derive(Debug, Parser)]
#[command(name = "vramp", version, about, after_help = EXIT_CODES)]
pub struct Args {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Colours: where the terminal shows them, always, or never
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto)]
    pub color: Color,
}

/// When to colour the output.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Color {
    /// Where the terminal shows them, and NO_COLOR is not set
    Auto,
    /// In files and pipes too
    Always,
    /// Not at all
    Never,
}

impl Color {
    /// Makes it so for this process.
    pub(crate) fn apply(self) {
        match self {
            Color::Auto => {}
            Color::Always => console::set_colors_enabled(true),
            Color::Never => console::set_colors_enabled(false),
        }
    }
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 failed, such as a file that cannot be read; 2 invalid arguments; 3 a job ran \
out of memory, with --fail-on-oom.

Results go to standard output, notices and errors to standard error. NO_COLOR turns colours off.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Replay traces and compare the memory and driver time of each allocator
    Replay(Box<Replay>),
    /// Explain why a job ran out of memory: what held it, what fragmented it, what fits
    Explain(Explain),
    /// Find the settings with which a job fits into a limit, as lines to paste
    Advise(Advise),
    /// Compare two runs of a job: what grew, by line and category
    Diff(DiffRuns),
    /// Show which device would be used, and its capabilities
    Info(Info),
    /// Show the memory of this machine as tiers: spaces, NUMA nodes, disks, links
    Tiers(Tiers),
    /// Show the processes that share a card by budgets: who has what, who waits
    Top(Top),
    /// Control processes that share a card by budgets: limit, give back, pause, resume
    Ctl(Ctl),
    /// Keep memory of cards for processes that end, so that others open it without loading it again
    Keep(Keep),
    /// Run any CUDA program and record, pool or limit its GPU memory
    Exec(Exec),
    /// Convert a trace: to .vtrace, to a PyTorch snapshot, or to a timeline for Perfetto
    Convert(Convert),
    /// Write a page that shows why a recorded job used its memory as it did
    Report(Report),
    /// Compute the memory of a captured graph of recorded work
    Graph(Graph),
    /// Print the completions of a shell
    Completions(Completions),
    /// Write a manual page for each command
    Man(Man),
    /// Measure the costs of this card's driver calls, for simulations of it
    #[cfg(feature = "bench")]
    Calibrate(Calibrate),
    /// Measure allocators: cache hits, threads, growth, remapping, graphs, copies, spills
    #[cfg(feature = "bench")]
    Bench(Bench),
}

impl Command {
    /// Checks what depends on several arguments: standard input can be read once.
    pub(crate) fn check(&self) -> Result<(), InvalidArguments> {
        let inputs: Vec<&PathBuf> = match self {
            Command::Replay(args) => args.traces.iter().collect(),
            Command::Explain(args) => args.traces.iter().collect(),
            Command::Advise(args) => args.traces.iter().collect(),
            Command::Graph(args) => args.traces.iter().collect(),
            Command::Report(args) => args.traces.iter().collect(),
            Command::Diff(args) => vec![&args.before, &args.after],
            _ => return Ok(()),
        };
        let is_standard =
            |path: &&&PathBuf| [STANDARD, "/dev/stdin"].map(Path::new).contains(&path.as_path());
        match inputs.iter().filter(is_standard).count() {
            0 | 1 => Ok(()),
            _ => Err(InvalidArguments(
                "standard input (-) is given twice, and can be read once: save one of the traces as \
                 a file"
                    .to_owned(),
            )),
        }
    }
}

/// Replays traces.
#[derive(Clone, Debug, ClapArgs)]
pub struct Replay {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip, zstd, xz or zip; - is
    /// standard input
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Allocators, separated by commas or given several times: vramp, vpmm, stream-ordered, torch,
    /// torch-expandable or all. By default all, but on a simulated card without stream-ordered, whose
    /// model never fragments
    #[arg(long, value_parser = parse_allocators, value_name = "NAME")]
    pub allocator: Vec<Allocators>,
    /// The device
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Limits of reading
    #[command(flatten)]
    pub reading: Reading,
    /// Memory limit of each allocator, such as 80GiB or l4; the device's memory by default
    #[arg(long, value_name = "SIZE", value_parser = limit, allow_hyphen_values = true)]
    pub limit: Option<Limit>,
    /// Memory that each allocator reserves before the replay begins
    #[arg(long, value_name = "SIZE", value_parser = memory, allow_hyphen_values = true)]
    pub prefill: Option<Bytes>,
    /// Print one JSON object per run and nothing else
    #[arg(long)]
    pub json: bool,
    /// Settings of PyTorch's allocator, in the syntax of PYTORCH_CUDA_ALLOC_CONF, whose value is the
    /// default
    #[arg(long, value_name = "SETTINGS", value_parser = parse_torch_config)]
    pub torch_config: Option<TorchConfig>,
    /// Does the model match PyTorch's recorded segments? Fails below 99 %
    #[arg(long)]
    pub fidelity: bool,
    /// End with exit code 3 if a replay runs out of memory
    #[arg(long)]
    pub fail_on_oom: bool,
    /// Audit the allocator after every request; on the simulator, detect unordered accesses too
    #[arg(long)]
    pub audit: bool,
}

fn parse_torch_config(settings: &str) -> Result<TorchConfig, TorchConfigError> {
    settings.parse()
}

/// Explains recordings.
#[derive(Clone, Debug, ClapArgs)]
pub struct Explain {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip, zstd, xz or zip; - is
    /// standard input
    #[arg(required = true, value_name = "RUN")]
    pub traces: Vec<PathBuf>,
    /// Memory that the job may use, such as 16GiB or l4; by default what it had when a request failed
    #[arg(long, value_name = "SIZE", value_parser = limit, allow_hyphen_values = true)]
    pub limit: Option<Limit>,
    /// Also show what is allocated at this event of the device, counted from 0
    #[arg(long, value_name = "EVENT", allow_negative_numbers = true)]
    pub at: Option<usize>,
    /// Rows in each list
    #[arg(long, value_name = "N", default_value_t = 10, allow_negative_numbers = true)]
    pub top: usize,
    /// Print one JSON object per recorded device and nothing else
    #[arg(long)]
    pub json: bool,
    /// Limits of reading
    #[command(flatten)]
    pub reading: Reading,
    /// Simulate a card with the costs in this file, as `vramp calibrate` writes it
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

/// Tries settings on recordings.
#[derive(Clone, Debug, ClapArgs)]
pub struct Advise {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip, zstd, xz or zip; - is
    /// standard input
    #[arg(required = true, value_name = "RUN")]
    pub traces: Vec<PathBuf>,
    /// Limits to fit into, separated by commas or given several times, such as 16GiB,l4
    #[arg(long, required = true, value_name = "SIZE", value_delimiter = ',', value_parser = limit, allow_hyphen_values = true)]
    pub limit: Vec<Limit>,
    /// Also try these settings of PyTorch, in the syntax of PYTORCH_CUDA_ALLOC_CONF; may be given
    /// several times
    #[arg(long, value_name = "SETTINGS", value_parser = parse_settings)]
    pub settings: Vec<String>,
    /// End with exit code 3 if nothing fits into one of the limits
    #[arg(long)]
    pub fail_on_oom: bool,
    /// Print one JSON object per recorded device and nothing else
    #[arg(long)]
    pub json: bool,
    /// Limits of reading
    #[command(flatten)]
    pub reading: Reading,
    /// Simulate a card with the costs in this file, as `vramp calibrate` writes it
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

/// Compares two recordings.
#[derive(Clone, Debug, ClapArgs)]
pub struct DiffRuns {
    /// The first run: a PyTorch memory snapshot, an RMM log or a .vtrace file
    #[arg(value_name = "BEFORE")]
    pub before: PathBuf,
    /// The second run
    #[arg(value_name = "AFTER")]
    pub after: PathBuf,
    /// Rows in each list
    #[arg(long, value_name = "N", default_value_t = 10, allow_negative_numbers = true)]
    pub top: usize,
    /// Print one JSON object per recorded device and nothing else
    #[arg(long)]
    pub json: bool,
    /// Limits of reading
    #[command(flatten)]
    pub reading: Reading,
}

fn parse_settings(settings: &str) -> Result<String, SettingsError> {
    if settings.trim().is_empty() {
        return Err(SettingsError::Empty);
    }
    TorchConfig::parse(settings)?;
    Ok(settings.trim().to_owned())
}

/// Error for a value of `--settings`.
#[derive(Debug, thiserror::Error)]
enum SettingsError {
    #[error("it is empty: give settings such as max_split_size_mb:128")]
    Empty,
    #[error(transparent)]
    Torch(#[from] TorchConfigError),
}

/// Writes a page about recorded jobs.
#[derive(Clone, Debug, ClapArgs)]
pub struct Report {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip or zstd. Several are
    /// compared, as the ranks of one job
    #[arg(required = true, value_name = "RUN")]
    pub traces: Vec<PathBuf>,
    /// The page to write; - is standard output
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub output: PathBuf,
    /// Write the timeline alone too, as SVG that needs no font; for one recording
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the timeline alone too, as PNG; for one recording
    #[arg(long, value_name = "FILE")]
    pub png: Option<PathBuf>,
    /// Limits to try settings with, separated by commas or given several times, such as 16GiB,l4
    #[arg(long, value_name = "SIZE", value_delimiter = ',', value_parser = limit)]
    pub limit: Vec<Limit>,
    /// Find the smallest limit of each allocator also for jobs of more than 200,000 events
    #[arg(long)]
    pub limits: bool,
    /// Largest size of the page. If the recordings are larger, the page says what it leaves out
    #[arg(long, value_name = "SIZE", default_value = "15MB", value_parser = memory)]
    pub budget: Bytes,
    /// Limits on reading
    #[command(flatten)]
    pub reading: Reading,
    /// Simulate a card with the costs in this file, as `vramp calibrate` writes it
    #[arg(long, value_name = "FILE")]
    pub costs: Option<PathBuf>,
}

/// Computes the memory of captured graphs.
#[derive(Clone, Debug, ClapArgs)]
pub struct Graph {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip, zstd, xz or zip; - is
    /// standard input
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Use only the events from A to before B, as one capture: a step of a longer recording
    #[arg(long, value_name = "A..B")]
    pub window: Option<Window>,
    /// Print one JSON object per recording and device and nothing else
    #[arg(long)]
    pub json: bool,
    /// Limits of reading
    #[command(flatten)]
    pub reading: Reading,
}

/// Prints completions.
#[derive(Clone, Debug, ClapArgs)]
pub struct Completions {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// Writes manual pages.
#[derive(Clone, Debug, ClapArgs)]
pub struct Man {
    /// Existing folder to write them to, such as ~/.local/share/man/man1
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// Describes a device.
#[derive(Clone, Debug, ClapArgs)]
pub struct Info {
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Measures the costs of driver calls.
///
/// The file has the costs of each driver call, the rates of copies and fills, and the memory of the
/// card. Any command then simulates that card, on any machine: --device FILE. At most half of the
/// free memory is used, and all of it is released. Costs follow the host too: measure while the machine
/// is idle.
#[cfg(feature = "bench")]
#[derive(Clone, Debug, ClapArgs)]
pub struct Calibrate {
    /// File to write; standard output by default
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Device: auto (the first card), sim, sim:CARD, FILE.toml, cuda or cuda:N
    #[arg(long, default_value = "auto", env = "VRAMP_DEVICE")]
    pub device: String,
    /// Time to measure, in seconds
    #[arg(long, default_value = "120", value_parser = parse_seconds, allow_negative_numbers = true)]
    pub seconds: f64,
}

/// Describes the machine's memory.
#[derive(Clone, Debug, ClapArgs)]
pub struct Tiers {
    /// Device: auto, sim, sim:CARD, cuda or cuda:N; auto and cuda use every visible card
    #[arg(long, default_value = "auto", env = "VRAMP_DEVICE")]
    pub device: String,
    /// File with the spaces, as --write-config prints them; by default they follow from the machine
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory for the disk tier, which uses 80 % of the free space; may be given several times
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    pub directory: Vec<PathBuf>,
    /// Describe the machine whose sys and proc are in this directory
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub sysroot: PathBuf,
    /// Measure the rate of each link; needs seconds, pinned memory and free disk space
    #[arg(long, conflicts_with = "write_config")]
    pub measure: bool,
    /// Print the spaces as TOML for --config and nothing else
    #[arg(long, conflicts_with = "json")]
    pub write_config: bool,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Formats that a trace can be written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// The compact format of this project
    Vtrace,
    /// A PyTorch memory snapshot, for pytorch.org/memory_viz
    Pickle,
    /// A timeline in Chrome's JSON, for ui.perfetto.dev
    Perfetto,
}

impl Kind {
    /// The ending of a file's name that selects each kind.
    pub const ENDINGS: [(&str, Kind); 3] =
        [(".vtrace", Kind::Vtrace), (".pickle", Kind::Pickle), (".perfetto.json", Kind::Perfetto)];

    /// What a file of this kind does not keep of its input.
    pub(crate) fn loses(self) -> &'static str {
        match self {
            Kind::Vtrace => "keys that vramp does not read",
            Kind::Pickle => "keys that vramp does not read, and the name of the trace",
            Kind::Perfetto => {
                "all frames but the innermost, settings and segments; a timeline cannot be read back"
            }
        }
    }
}

/// Converts a trace.
#[derive(Clone, Debug, ClapArgs)]
pub struct Convert {
    /// A PyTorch memory snapshot, an RMM log or a .vtrace file; plain, gzip, zstd, xz or zip; - is
    /// standard input
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// The file to write: .vtrace (compact), .pickle (PyTorch snapshot, for
    /// pytorch.org/memory_viz) or .perfetto.json (timeline, for ui.perfetto.dev); - is standard
    /// output
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    /// vtrace, pickle or perfetto; overrides the ending of OUT
    #[arg(long, value_name = "KIND")]
    pub to: Option<Kind>,
    /// Convert although OUT is the same file as IN
    #[arg(long)]
    pub force: bool,
    /// Limits
    #[command(flatten)]
    pub reading: Reading,
}
