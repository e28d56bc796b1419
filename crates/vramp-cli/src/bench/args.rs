//! Arguments of `vramp bench`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use vramp::Bytes;

use crate::allocators::{Allocators, parse_allocators};
use crate::device::DeviceArgs;

/// Measures allocators on a device.
#[derive(Clone, Debug, ClapArgs)]
pub struct Bench {
    /// What to measure.
    #[command(subcommand)]
    pub measure: Measure,
}

/// The measurements.
#[derive(Clone, Debug, Subcommand)]
pub enum Measure {
    /// Malloc/free pairs of one block on one thread
    ///
    /// Batches of a few milliseconds alternate: the system's malloc and free of 64 bytes, the
    /// driver's own pool, and each allocator, for each size. A row shows the median over batches
    /// and the median ratio to the preceding batch of the system's malloc, so that a disturbance of
    /// the machine affects both. The first pairs are not timed, so the memory is warm.
    ///
    /// On the simulator the pairs of the driver's pool are not timed but modelled.
    Hit(Hit),
    /// Malloc/free pairs on several threads at once, each with its own stream
    ///
    /// Each thread holds 32 blocks of random sizes. It frees one of them at random and allocates
    /// another, until the time is over. Sizes and their order are the same for every allocator, for
    /// the system's malloc and, on a card, for the driver's own pool. They alternate three times; a
    /// row shows the median. The ratio is to the same allocator on one thread.
    Threads(Threads),
    /// Memory created for the first time
    ///
    /// A new allocator allocates a total in blocks of one size. Driver calls and their time are
    /// those of one run; times are medians over all runs.
    Grow(Grow),
    /// Fragmented memory remapped into one block
    ///
    /// A new allocator, limited to a total, fills it with blocks of one size and frees every other
    /// one. The timed request is one block of half the total. Old mappings that stay as aliases are
    /// unmapped later and not timed. The driver's pool cannot move memory: it has no limit here and
    /// may grow.
    Remap(Remap),
    /// Arenas for caches: pages of many tensors committed, parked and released
    ///
    /// Tensors in one arena, separate and then interleaved. Start: addresses for all. Commits: of a page
    /// that never had memory (every other page, so that no two share a handle), of 16 neighbours, of a
    /// page made ready ahead by the arena's thread, and of a parked page. A step is one page of all
    /// tensors; medians over the rounds. At last 64 fills of 4 GiB are timed alone and beside a thread
    /// that commits and releases pages without a pause, in turn.
    Kv(Kv),
    /// Hostile patterns of requests, such as many streams, fragments or a full card
    ///
    /// Each pattern is a fixed program with a seed: streams in turn, sizes that grow, blocks handed
    /// from stream to stream, a full card. Every allocator gets the same requests on a device of
    /// its own. A row shows peak reserved memory, failed requests, driver calls and their time, and
    /// stream waits. Host time is that in the allocator for each malloc and free, without driver
    /// calls. Some patterns count from the end of a warm-up.
    ///
    /// On the simulator all figures but the host time are the same in every run.
    Adversary(Adversary),
    /// Captured graphs that share an arena
    ///
    /// Four measurements. Sharing: many graphs of different sizes are captured over one arena; its
    /// memory over that of the largest graph. Replays: each graph is executed call by call and
    /// replayed, in random order, and the results are compared byte by byte. Lending: an idle arena
    /// lends its memory, ordinary blocks use 90 % of it under a limit, and a launch takes it back;
    /// `freed` if the blocks are freed before, `held` if new memory has to be created. Requests: a
    /// malloc/free pair within a capture and outside, and a launch with and without a lease.
    /// Medians of several rounds; each round finds memory at the addresses of the round before.
    ///
    /// On the simulator the compared blocks are at most 1 MiB, and lending and requests have
    /// modelled costs.
    Graphs(Graphs),
    /// Bytes written to a directory and read back
    ///
    /// In turn: plain direct transfers of one block size to one preallocated file, by io_uring and
    /// by threads; and the store of the disk tier, in steps of 16 MiB of which four are in flight,
    /// with extents, budget and checksums. Each turn writes new files; the store's turn includes
    /// the allocation of disk blocks. Afterwards, and not timed, every byte is read again and
    /// compared. A row shows the median over rounds and the median ratio to the fastest plain
    /// transfers of the same round.
    ///
    /// With `--compress` the store runs with and without compression, and also writes data of which
    /// every other half KiB is zero. Then a row also shows the bytes on disk over the bytes
    /// written, and the ratio to the store without compression in the same round.
    ///
    /// The files are unnamed and disappear when closed.
    Disk(Disk),
    /// Bytes copied between the card and pinned blocks of the host
    ///
    /// For each size and direction, in turn: one plain copy from or to one pinned buffer on one
    /// stream (two streams for both directions at once); and a mover, which copies in steps on two
    /// streams a direction from or to blocks of a pool. Time is measured from the first call until
    /// the host sees the completion. A row shows the median over moves and the median ratio to the
    /// preceding plain copy. The first round is for warming up.
    ///
    /// On the simulator time is modelled; copies in one direction share the link.
    Copy(CopyArgs),
    /// Spillable buffers evicted to the host and restored
    ///
    /// Seven measurements. Rate: a dirty buffer is spilled and restored, each right after one plain
    /// copy of the same length; then it is spilled again, clean. The eviction is on request, by a
    /// malloc at a new address, and by a malloc whose address is still mapped. Overlap: a series of
    /// copies, and of fills, on the card: alone, beside a buffer that is spilled and restored
    /// continually, and beside plain copies. Workload: buffers of twice the card's limit, of which
    /// a fifth gets four fifths of the accesses; the time over that of plain copies of the moved
    /// bytes. Calls: driver calls of a spill and of a restore. Overshoot: bytes evicted beyond the
    /// requested ones. Peer: a dirty buffer is spilled to and restored from the free memory of each
    /// card that this one has a link to, each right after one plain copy over it; with memory taken
    /// by the spill, and ahead of it. Buffers: the time of a lease that spills one buffer of 2 MiB,
    /// with 100 to 100,000 buffers. Waiting: the time of a lease of a resident buffer by a thread that
    /// holds another one, with 0 to 10,000 requests that wait for another buffer. Medians of several
    /// rounds.
    ///
    /// On the simulator time is modelled; copies share the link and compete for nothing else.
    Spill(Spill),
    /// Reservations, waits, and budgeted mallocs
    ///
    /// The time of a reservation and its release, alone and beside waiters; from a release until
    /// the blocked waiter on another thread has its reservation; and of malloc and free on an
    /// allocator with and without a budget. Batches alternate; a row shows the median.
    Reserve(Reserve),
}

/// Options of every measurement on a device.
#[derive(Clone, Debug, ClapArgs)]
pub struct Common {
    /// Allocators: vramp, vpmm, stream-ordered, torch, torch-expandable or all
    #[arg(long, default_value = "vramp", value_parser = parse_allocators, value_name = "NAME")]
    pub allocator: Vec<Allocators>,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Time to measure, in seconds
    #[arg(long, default_value = "3", value_parser = parse_seconds, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Print one JSON object per row and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Options of `hit`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Hit {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Block sizes
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZE",
        default_value = "512,64KiB,1MiB,4MiB,256MiB"
    )]
    pub sizes: Vec<Bytes>,
    /// Live blocks beside the pairs: with some, a pair frees one of them at random
    #[arg(long, value_delimiter = ',', value_name = "COUNT", default_value = "0")]
    pub outstanding: Vec<usize>,
}

/// Options of `threads`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Threads {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Numbers of threads; 1,2,4,8,16 up to the machine's cores by default
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "COUNT",
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    pub threads: Vec<u16>,
    /// Distribution of block sizes from 512 B to 4 MiB
    #[arg(long, value_enum, default_value_t = Sizes::Uniform, value_name = "DISTRIBUTION")]
    pub sizes: Sizes,
}

/// Distribution of block sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sizes {
    /// Every size is equally likely
    Uniform,
    /// Every size class is equally likely: as many from 512 B to 1 KiB as from 2 to 4 MiB
    LogUniform,
}

/// Options of `grow`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Grow {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Memory to allocate
    #[arg(long, default_value = "8GiB", value_name = "SIZE")]
    pub total: Bytes,
    /// Size of each block
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    pub block: Bytes,
}

/// Options of `remap`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Remap {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Memory to fragment
    #[arg(long, default_value = "4GiB", value_name = "SIZE")]
    pub total: Bytes,
    /// Size of each block
    #[arg(long, default_value = "16MiB", value_name = "SIZE")]
    pub block: Bytes,
}

/// Options of `kv`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Kv {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Tensors of the arena
    #[arg(long, default_value = "64", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tensors: u32,
    /// Length of each tensor
    #[arg(long, default_value = "2GiB", value_name = "SIZE")]
    pub each: Bytes,
    /// Times that each step is repeated
    #[arg(long, default_value = "20", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,
}

/// Options of `adversary`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Adversary {
    /// Patterns, by name or the first parts of it; all quick ones by default
    #[arg(value_name = "PATTERN")]
    pub patterns: Vec<String>,
    /// Allocators, separated by commas: vramp, vpmm, stream-ordered, torch, torch-expandable or all
    #[arg(long, default_value = "all", value_parser = parse_allocators, value_name = "NAMES")]
    pub allocator: Vec<Allocators>,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Run the patterns that take minutes, too
    #[arg(long)]
    pub large: bool,
    /// Seed of the random choices
    #[arg(long, default_value = "1")]
    pub seed: u64,
    /// Print the names of the patterns and what they do
    #[arg(long)]
    pub list: bool,
    /// Fail if vramp's counts on sim:h200 are above the bounds in this file
    #[arg(long, value_name = "FILE")]
    pub bounds: Option<PathBuf>,
    /// Write the counts into the file of bounds instead
    #[arg(long, requires = "bounds")]
    pub write: bool,
    /// Print one table in Markdown, with vramp's misses in bold
    #[arg(long, conflicts_with = "json")]
    pub markdown: bool,
    /// Print one JSON object per row and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Options of `graphs`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Graphs {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Number of graphs that share the arena
    #[arg(
        long,
        default_value = "200",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=100_000)
    )]
    pub graphs: u32,
    /// Largest block of a graph; the smallest is 64 KiB
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    pub block: Bytes,
    /// Size of the arena that lends; 8GiB by default, 1GiB on the simulator
    #[arg(long, value_name = "SIZE")]
    pub arena: Option<Bytes>,
}

/// Options of `disk`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Disk {
    /// Directory to write to
    #[arg(long, default_value = ".", value_name = "DIR")]
    pub dir: PathBuf,
    /// Bytes to write, in whole steps of 16 MiB
    #[arg(long, default_value = "2GiB", value_name = "SIZE")]
    pub total: Bytes,
    /// Most bytes of one I/O request
    #[arg(long, default_value = "1MiB", value_name = "SIZE")]
    pub block: Bytes,
    /// I/O requests in flight
    #[arg(
        long,
        default_value = "32",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u16).range(1..=64)
    )]
    pub depth: u16,
    /// I/O engine of the store
    #[arg(long, value_enum, default_value_t = Engine::Auto, value_name = "NAME")]
    pub engine: Engine,
    /// Measure the store with compression, too
    #[arg(long, value_enum, value_name = "WHEN")]
    pub compress: Option<Compress>,
    /// Time to measure, in seconds; at least one round
    #[arg(long, default_value = "10", value_parser = parse_seconds, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Print one JSON object per row and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Options of `copy`.
#[derive(Clone, Debug, ClapArgs)]
pub struct CopyArgs {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Sizes to copy; 1MiB to 4GiB by default, to 256MiB on the simulator
    #[arg(long, value_delimiter = ',', value_name = "SIZE")]
    pub sizes: Vec<Bytes>,
    /// Bytes that the mover queues at a time, from 4MiB to 32MiB
    #[arg(long, default_value = "16MiB", value_name = "SIZE")]
    pub step: Bytes,
    /// Use host blocks of which no two are adjacent, so that each needs its own copy
    #[arg(long)]
    pub scattered: bool,
}

/// Options of `spill`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Spill {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Measurements; all by default
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    pub measure: Vec<SpillMeasure>,
    /// Lengths of buffers; 64MiB, 256MiB and 1GiB by default, the first two on the simulator
    #[arg(long, value_delimiter = ',', value_name = "SIZE")]
    pub sizes: Vec<Bytes>,
    /// Bytes evicted or restored at once, from 4MiB to 32MiB
    #[arg(long, default_value = "32MiB", value_name = "SIZE")]
    pub piece: Bytes,
    /// Memory limit of the workload; 4GiB by default, 512MiB on the simulator
    #[arg(long, value_name = "SIZE")]
    pub card: Option<Bytes>,
    /// Length of each of the workload's buffers; a 64th of its limit by default
    #[arg(long, value_name = "SIZE")]
    pub buffer: Option<Bytes>,
    /// Accesses of the workload, each to one to three buffers
    #[arg(
        long,
        default_value = "2000",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub accesses: u32,
    /// Percentage of accesses that write
    #[arg(
        long,
        default_value = "30",
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(0..=100)
    )]
    pub writes: u8,
    /// Numbers of buffers beside which a lease evicts one
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "COUNT",
        default_value = "100,1000,10000,100000",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub counts: Vec<u32>,
    /// Seed of the random choices
    #[arg(long, default_value = "1")]
    pub seed: u64,
}

/// The measurements of spillable buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpillMeasure {
    /// Rates of eviction and restore
    Rate,
    /// Slowdown of other work on the card
    Overlap,
    /// More buffers than fit on the card
    Workload,
    /// Driver calls
    Calls,
    /// Bytes evicted beyond the requested ones
    Overshoot,
    /// Rates of eviction to other cards; nothing for a card without links to others
    Peer,
    /// Leases that evict one buffer, by the number of buffers; takes up to half of the card
    Buffers,
    /// Leases of a resident buffer, by the number of waiting requests
    Waiting,
}

impl SpillMeasure {
    /// All of them, in the order in which they are printed.
    pub const ALL: [SpillMeasure; 8] = [
        SpillMeasure::Rate,
        SpillMeasure::Overlap,
        SpillMeasure::Workload,
        SpillMeasure::Calls,
        SpillMeasure::Overshoot,
        SpillMeasure::Peer,
        SpillMeasure::Buffers,
        SpillMeasure::Waiting,
    ];
}

/// Options of `reserve`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Reserve {
    /// The common options.
    #[command(flatten)]
    pub common: Common,
    /// Numbers of waiters to measure beside
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "COUNT",
        default_value = "1,64,1000",
        value_parser = clap::value_parser!(u16).range(1..=4096)
    )]
    pub waiters: Vec<u16>,
}

/// I/O engine of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// io_uring where the kernel allows it, threads elsewhere
    Auto,
    /// io_uring
    Uring,
    /// Threads
    Threads,
}

/// When the store compresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compress {
    /// If samples and measured rates predict a gain
    Paying,
    /// Whenever a sample shrinks by an eighth
    Always,
}

pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) && seconds > 0.0 => Ok(seconds),
        _ => Err("give a number of seconds above 0, up to 3600".to_owned()),
    }
}
