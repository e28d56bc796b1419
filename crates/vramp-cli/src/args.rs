//! What can be asked for on the command line.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use vramp_alloc::config::{TorchConfig, TorchConfigError, UnknownPreset};
use vramp_alloc::{Bytes, Preset};

pub use crate::bench::args::Bench;
use crate::graph::Window;

/// Replays recorded GPU workloads on any allocator, and tells what each would take and cost.
#[derive(Debug, Parser)]
#[command(name = "vramp", version, about)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Replay traces and compare what each allocator takes and costs
    Replay(Box<Replay>),
    /// Tell which device would be used, and what it can do
    Info(Info),
    /// Show the memory of this machine as tiers: spaces, nodes, disks, and what lies between them
    Tiers(Tiers),
    /// Convert a trace: to .vtrace, to a PyTorch snapshot, or to a timeline for Perfetto
    Convert(Convert),
    /// Tell how much memory a captured graph of recorded work would need
    Graph(Graph),
    /// Measure what allocators cost: hits, threads, growth, remapping, graphs
    Bench(Bench),
}

/// Replays traces.
#[derive(Clone, Debug, ClapArgs)]
pub struct Replay {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip or zstd
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// vramp, vpmm, stream-ordered, torch, torch-expandable or all
    #[arg(long, default_value = "all", value_parser = parse_allocators, value_name = "NAME")]
    pub allocator: Allocators,
    /// auto, sim, sim:CARD, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// The most memory an allocator may hold, such as 80GiB; the device is the limit by default
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<Bytes>,
    /// Memory an allocator takes from the device before the replay begins
    #[arg(long, value_name = "SIZE")]
    pub prefill: Option<Bytes>,
    /// Print one JSON object per run and nothing else
    #[arg(long)]
    pub json: bool,
    /// Settings of PyTorch's allocator, as PYTORCH_CUDA_ALLOC_CONF holds them
    #[arg(long, value_name = "SETTINGS", value_parser = parse_torch_config)]
    pub torch_config: Option<TorchConfig>,
    /// Compare the segments that torch makes with those of the recording; fails below 99 %
    #[arg(long)]
    pub fidelity: bool,
    /// Check the allocator after every request; on the simulator, check the order of accesses too
    #[arg(long)]
    pub audit: bool,
}

/// Which allocators to replay on, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocators(pub Vec<Preset>);

fn parse_torch_config(settings: &str) -> Result<TorchConfig, TorchConfigError> {
    settings.parse()
}

pub(crate) fn parse_allocators(name: &str) -> Result<Allocators, UnknownAllocator> {
    match name {
        "all" => Ok(Allocators(Preset::ALL.to_vec())),
        name => Ok(Allocators(vec![name.parse()?])),
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

/// Captures recorded work into arenas.
#[derive(Clone, Debug, ClapArgs)]
pub struct Graph {
    /// PyTorch memory snapshots, RMM logs or .vtrace files; plain, gzip or zstd
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Only these events, from A to before B, as if they were one capture: a step of a longer
    /// recording
    #[arg(long, value_name = "A..B")]
    pub window: Option<Window>,
    /// Print one JSON object per recording and device and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Describes a device.
#[derive(Clone, Debug, ClapArgs)]
pub struct Info {
    /// auto, sim, sim:CARD, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Describes the machine's memory.
#[derive(Clone, Debug, ClapArgs)]
pub struct Tiers {
    /// auto, sim, sim:CARD, cuda or cuda:N; auto and cuda take every card that is visible
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// The spaces, as --write-config prints them; by default those that fit the machine
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A directory for the disk tier, with 80 % of the room in it; may be given several times
    #[arg(long, value_name = "DIR", conflicts_with = "config")]
    pub directory: Vec<PathBuf>,
    /// Describe the machine whose sys and proc lie below this directory
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub sysroot: PathBuf,
    /// Measure how fast data moves over each link; takes seconds, pinned memory and room on the disks
    #[arg(long, conflicts_with = "write_config")]
    pub measure: bool,
    /// Print the spaces as TOML for --config and nothing else
    #[arg(long, conflicts_with = "json")]
    pub write_config: bool,
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub json: bool,
}

/// What a trace can be written as.
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
    /// Every kind with the ending of a file's name that asks for it.
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
    /// vtrace, pickle or perfetto, whatever the name of OUT ends in
    #[arg(long, value_name = "KIND")]
    pub to: Option<Kind>,
}
