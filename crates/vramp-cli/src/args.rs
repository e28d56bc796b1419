//! The command line.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use vramp::config::{TorchConfig, TorchConfigError, UnknownPreset};
use vramp::{Bytes, Preset};

pub use crate::bench::args::Bench;
use crate::bench::args::parse_seconds;
use crate::device::DeviceArgs;
use crate::graph::Window;

/// Replays recorded GPU workloads on any allocator and compares their memory and cost.
#[derive(Debug, Parser)]
#[command(name = "vramp", version, about)]
pub struct Args {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Replay traces and compare the memory and driver time of each allocator
    Replay(Box<Replay>),
    /// Show which device would be used, and its capabilities
    Info(Info),
    /// Show the memory of this machine as tiers: spaces, NUMA nodes, disks, links
    Tiers(Tiers),
    /// Convert a trace: to .vtrace, to a PyTorch snapshot, or to a timeline for Perfetto
    Convert(Convert),
    /// Compute the memory of a captured graph of recorded work
    Graph(Graph),
    /// Measure the costs of this card's driver calls, for simulations of it
    Calibrate(Calibrate),
    /// Measure allocators: cache hits, threads, growth, remapping, graphs, copies, spills
    Bench(Bench),
}

/// Replays traces.
#[derive(Clone, Debug, ClapArgs)]
pub struct Replay {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip or zstd
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Allocators: vramp, vpmm, stream-ordered, torch, torch-expandable or all
    #[arg(long, default_value = "all", value_parser = parse_allocators, value_name = "NAME")]
    pub allocator: Allocators,
    /// Device: auto, sim, sim:CARD, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Memory limit of each allocator, such as 80GiB; the device's memory by default
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Bytes>,
    /// Memory that each allocator reserves before the replay begins
    #[arg(long, value_name = "SIZE")]
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
    /// Audit the allocator after every request; on the simulator, detect unordered accesses too
    #[arg(long)]
    pub audit: bool,
}

/// Allocators to run on, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocators(pub Vec<Preset>);

fn parse_torch_config(settings: &str) -> Result<TorchConfig, TorchConfigError> {
    settings.parse()
}

pub(crate) fn parse_allocators(names: &str) -> Result<Allocators, UnknownAllocator> {
    match names {
        "all" => Ok(Allocators(Preset::ALL.to_vec())),
        names => Ok(Allocators(names.split(',').map(str::parse).collect::<Result<_, _>>()?)),
    }
}

#[derive(Debug)]
pub(crate) struct UnknownAllocator(UnknownPreset);

impl From<UnknownPreset> for UnknownAllocator {
    fn from(error: UnknownPreset) -> UnknownAllocator {
        UnknownAllocator(error)
    }
}

impl std::error::Error for UnknownAllocator {}

impl std::fmt::Display for UnknownAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, or all", self.0)
    }
}

/// Computes the memory of captured graphs.
#[derive(Clone, Debug, ClapArgs)]
pub struct Graph {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip or zstd
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Use only the events from A to before B, as one capture: a step of a longer recording
    #[arg(long, value_name = "A..B")]
    pub window: Option<Window>,
    /// Print one JSON object per recording and device and nothing else
    #[arg(long)]
    pub json: bool,
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
#[derive(Clone, Debug, ClapArgs)]
pub struct Calibrate {
    /// File to write; standard output by default
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Device: auto, sim, sim:CARD, FILE.toml, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Time to measure, in seconds
    #[arg(long, default_value = "120", value_parser = parse_seconds, allow_negative_numbers = true)]
    pub seconds: f64,
}

/// Describes the machine's memory.
#[derive(Clone, Debug, ClapArgs)]
pub struct Tiers {
    /// Device: auto, sim, sim:CARD, cuda or cuda:N; auto and cuda use every visible card
    #[arg(long, default_value = "auto")]
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
}

/// Converts a trace.
#[derive(Clone, Debug, ClapArgs)]
pub struct Convert {
    /// A PyTorch memory snapshot, an RMM log or a .vtrace file; plain, gzip or zstd
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// The file to write: .vtrace (compact), .pickle (PyTorch snapshot, for
    /// pytorch.org/memory_viz) or .perfetto.json (timeline, for ui.perfetto.dev)
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    /// vtrace, pickle or perfetto; overrides the ending of OUT
    #[arg(long, value_name = "KIND")]
    pub to: Option<Kind>,
}
