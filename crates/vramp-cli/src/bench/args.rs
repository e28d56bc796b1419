//! What `vramp bench` can be asked for.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand, ValueEnum};
use vramp_alloc::Bytes;

use crate::args::{Allocators, parse_allocators};

/// Measures allocators on a device.
#[derive(Clone, Debug, ClapArgs)]
pub struct Bench {
    /// What to measure.
    #[command(subcommand)]
    pub measure: Measure,
}

/// What can be measured.
#[derive(Clone, Debug, Subcommand)]
pub enum Measure {
    /// One block taken and freed, over and over, on one thread
    ///
    /// Batches of a few milliseconds take turns: the system's malloc and free of 64 bytes, the
    /// driver's own pool, and each allocator, for each size. A row tells the median over batches,
    /// and the median of the ratios to the malloc batch just before it, so that what disturbs the
    /// machine disturbs both. Memory is warm: the first pairs are not timed.
    ///
    /// On the simulator the pairs of the driver's pool are not timed but modelled.
    Hit(Hit),
    /// Pairs on several threads at once, each with a stream of its own
    ///
    /// Each thread holds 32 blocks of random sizes, frees one of them at random and takes another,
    /// until the time is over. The same sizes in the same order for every allocator, for the
    /// system's malloc and, on a card, for the driver's own pool; they take turns, three times,
    /// and a row tells the median. The ratio is to the same allocator on one thread.
    Threads(Threads),
    /// Memory taken for the first time
    ///
    /// A new allocator takes so many bytes in blocks of one size. The calls to the driver and their
    /// time are those of one run; times are medians over all runs.
    Grow(Grow),
    /// Fragmented memory turned into one block
    ///
    /// A new allocator, limited to so many bytes, takes them in blocks of one size and frees every
    /// other one; then half of all is asked for as one block, which is what is timed. Old mappings
    /// that stay behind as aliases are unmapped later and not timed. The driver's pool cannot move
    /// memory: it has no limit here, and may grow.
    Remap(Remap),
    /// Captured graphs that share an arena
    ///
    /// Four measurements. Shared: so many graphs of different sizes are captured over one arena; what
    /// it holds then, over what the largest of them takes. Same: each of them is executed call by call
    /// and replayed, in random order, and the results compared byte by byte. Lent: an idle arena lends,
    /// ordinary blocks take 90 % of it under a limit, and a launch brings it back; `freed` where the
    /// blocks are gone by then, `held` where other memory has to come. Calls: what a malloc and free
    /// costs within a capture and outside, and a launch with and without a lease. Medians of several
    /// rounds, in which memory goes back to where it lay in the round before.
    ///
    /// On the simulator the compared blocks are at most 1 MiB, and lending and calls cost what the
    /// model says.
    Graphs(Graphs),
    /// Bytes written to a directory and read back
    ///
    /// So many bytes, by turns: in plain direct transfers of one block size to one preallocated
    /// file, by io_uring and by threads; and by the store of the disk tier, in steps of 16 MiB of
    /// which four are under way, with extents, budget and checksums. Each turn writes new files;
    /// the store's turn includes getting their blocks. Afterwards, and not timed, every byte is read
    /// again and compared. A row tells the median over rounds, and the median of the ratios to the
    /// faster of the plain ones in the same round.
    ///
    /// With `--compress` the store moves them with and without compression as well, and so it does
    /// bytes of which every other half KiB is zero; what was written is then told as a part of the
    /// bytes, and the rate as one of the store's without compression, in the same round.
    ///
    /// Files have no name and are gone afterwards.
    Disk(Disk),
    /// Bytes moved between the card and pinned blocks of the host
    ///
    /// For each size and direction, by turns: one plain copy of all of it from or to one buffer that
    /// the driver pinned, on one stream (two for both directions at once); and a mover, which copies
    /// in steps on two streams a direction from or to blocks of a pool. Time goes from the first call
    /// until the host knows that all has arrived. A row tells the median over moves, and the median of
    /// the ratios to the plain copy just before. One round is for warming up.
    ///
    /// On the simulator time is modelled; copies in one direction share the link.
    Copy(Copy),
    /// Buffers that leave the card and come back
    ///
    /// Five measurements. Rate: a buffer is written, spilled, and leased again until its contents are
    /// there, each just behind one plain copy of as much between the card and one pinned buffer; then
    /// it leaves once more, clean: asked to, pressed by a malloc whose place is new, and by one whose
    /// place is known. Overlap: a series of copies, and of fills, of blocks on the card, alone, beside
    /// a buffer that leaves and comes back all the time, and beside plain copies. Workload: buffers of twice
    /// the card's limit, of which a fifth gets four fifths of the accesses; the time over what the
    /// bytes that moved take in plain copies. Calls: what a spill and a retrieve call the driver for.
    /// Overshoot: what leaves beyond what was asked for. Medians of several rounds.
    ///
    /// On the simulator time is modelled; copies share the link, and nothing else is competed for.
    Spill(Spill),
    /// Reservations, waits, and memory that they pay for
    ///
    /// What a reservation and its release take, alone and while others wait; what it takes until one
    /// who waits has what another thread released; and what malloc and free take on an allocator with
    /// and without a budget. Batches take turns; a row tells the median.
    Reserve(Reserve),
}

/// What all of them have in common.
#[derive(Clone, Debug, ClapArgs)]
pub struct Common {
    /// vramp, vpmm, stream-ordered or all
    #[arg(long, default_value = "vramp", value_parser = parse_allocators, value_name = "NAME")]
    pub allocator: Allocators,
    /// auto, sim, sim:CARD, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// How long to measure, in seconds
    #[arg(long, default_value = "3", value_parser = parse_seconds, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Print one JSON object per row and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Options of `hit`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Hit {
    /// What all of them have in common.
    #[command(flatten)]
    pub common: Common,
    /// Sizes to measure
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZE",
        default_value = "512,64KiB,1MiB,4MiB,256MiB"
    )]
    pub sizes: Vec<Bytes>,
}

/// Options of `threads`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Threads {
    /// What all of them have in common.
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
    /// How sizes from 512 B to 4 MiB are drawn
    #[arg(long, value_enum, default_value_t = Sizes::Uniform, value_name = "HOW")]
    pub sizes: Sizes,
}

/// How random sizes are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sizes {
    /// Every number of bytes is as likely
    Uniform,
    /// The logarithm is: as many between 512 B and 1 KiB as between 2 and 4 MiB
    LogUniform,
}

impl Sizes {
    /// The name used in options and results.
    pub const fn name(self) -> &'static str {
        match self {
            Sizes::Uniform => "uniform",
            Sizes::LogUniform => "log-uniform",
        }
    }
}

/// Options of `grow`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Grow {
    /// What all of them have in common.
    #[command(flatten)]
    pub common: Common,
    /// How much memory to take
    #[arg(long, default_value = "8GiB", value_name = "SIZE")]
    pub total: Bytes,
    /// In blocks of this size
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    pub block: Bytes,
}

/// Options of `remap`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Remap {
    /// What all of them have in common.
    #[command(flatten)]
    pub common: Common,
    /// How much memory to fragment
    #[arg(long, default_value = "4GiB", value_name = "SIZE")]
    pub total: Bytes,
    /// In blocks of this size
    #[arg(long, default_value = "16MiB", value_name = "SIZE")]
    pub block: Bytes,
}

/// Options of `graphs`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Graphs {
    /// What all of them have in common.
    #[command(flatten)]
    pub common: Common,
    /// How many graphs share the arena
    #[arg(
        long,
        default_value = "200",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=100_000)
    )]
    pub graphs: u32,
    /// The largest block of a graph; the least is 64 KiB
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    pub block: Bytes,
    /// How large the arena is that lends; 8GiB by default, 1GiB on the simulator
    #[arg(long, value_name = "SIZE")]
    pub arena: Option<Bytes>,
}

/// Options of `disk`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Disk {
    /// Where to write
    #[arg(long, default_value = ".", value_name = "DIR")]
    pub dir: PathBuf,
    /// How many bytes, in whole 16 MiB
    #[arg(long, default_value = "2GiB", value_name = "SIZE")]
    pub total: Bytes,
    /// The most that one call moves
    #[arg(long, default_value = "1MiB", value_name = "SIZE")]
    pub block: Bytes,
    /// How many calls are under way at the same time
    #[arg(
        long,
        default_value = "32",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u16).range(1..=64)
    )]
    pub depth: u16,
    /// The store's engine
    #[arg(long, value_enum, default_value_t = Engine::Auto, value_name = "NAME")]
    pub engine: Engine,
    /// Measure the store with compression, too
    #[arg(long, value_enum, value_name = "WHEN")]
    pub compress: Option<Compress>,
    /// How long to measure, in seconds; one round at least
    #[arg(long, default_value = "10", value_parser = parse_seconds, allow_negative_numbers = true)]
    pub seconds: f64,
    /// Print one JSON object per row and nothing else
    #[arg(long)]
    pub json: bool,
}

/// Options of `copy`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Copy {
    /// What all of them have in common.
    #[command(flatten)]
    pub common: Common,
    /// Sizes to move; 1MiB to 4GiB by default, to 256MiB on the simulator
    #[arg(long, value_delimiter = ',', value_name = "SIZE")]
    pub sizes: Vec<Bytes>,
    /// How much the mover queues at a time, from 4MiB to 32MiB
    #[arg(long, default_value = "16MiB", value_name = "SIZE")]
    pub step: Bytes,
    /// Take blocks of which no two are neighbours: a copy for each
    #[arg(long)]
    pub scattered: bool,
}

/// Options of `spill`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Spill {
    /// What all of them have in common.
    #[command(flatten)]
    pub common: Common,
    /// What to measure; all by default
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    pub measure: Vec<SpillMeasure>,
    /// Lengths of buffers; 64MiB, 256MiB and 1GiB by default, the first two on the simulator
    #[arg(long, value_delimiter = ',', value_name = "SIZE")]
    pub sizes: Vec<Bytes>,
    /// How much leaves or comes at once, from 4MiB to 32MiB
    #[arg(long, default_value = "32MiB", value_name = "SIZE")]
    pub piece: Bytes,
    /// What the workload may have of the card; 4GiB by default, 512MiB on the simulator
    #[arg(long, value_name = "SIZE")]
    pub card: Option<Bytes>,
    /// How long each of the workload's buffers is; a 64th of what it may have by default
    #[arg(long, value_name = "SIZE")]
    pub buffer: Option<Bytes>,
    /// How often the workload uses buffers, one to three at a time
    #[arg(
        long,
        default_value = "2000",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    pub accesses: u32,
    /// How many of a hundred accesses write
    #[arg(
        long,
        default_value = "30",
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(0..=100)
    )]
    pub writes: u8,
    /// Where chance begins
    #[arg(long, default_value = "1")]
    pub seed: u64,
}

/// What is measured of buffers that leave and come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpillMeasure {
    /// How fast they leave and come back
    Rate,
    /// What that costs work beside it
    Overlap,
    /// More buffers than the card holds
    Workload,
    /// Driver calls
    Calls,
    /// What leaves needlessly
    Overshoot,
}

impl SpillMeasure {
    /// All of them, in the order in which they are printed.
    pub const ALL: [SpillMeasure; 5] = [
        SpillMeasure::Rate,
        SpillMeasure::Overlap,
        SpillMeasure::Workload,
        SpillMeasure::Calls,
        SpillMeasure::Overshoot,
    ];
}

/// Options of `reserve`.
#[derive(Clone, Debug, ClapArgs)]
pub struct Reserve {
    /// What all of them have in common.
    #[command(flatten)]
    pub common: Common,
    /// Beside how many who wait
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "COUNT",
        default_value = "1,64,1000",
        value_parser = clap::value_parser!(u16).range(1..=4096)
    )]
    pub waiters: Vec<u16>,
}

/// Which engine moves the store's bytes.
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
    /// What its samples and its measured rates say
    Paying,
    /// Whatever a sample makes an eighth shorter
    Always,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) && seconds > 0.0 => Ok(seconds),
        _ => Err("give a number of seconds above 0, up to 3600".to_owned()),
    }
}
