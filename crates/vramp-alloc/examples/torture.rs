//! A random program on nearly full memory that checks the bytes of its blocks.
//!
//! `cargo run --release -p vramp-alloc --example torture -- [DEVICE] [--seconds N] [--preset NAME]
//! [--fill PERCENT]`. On a card it touches all of the memory; a simulated card stores
//! real bytes and is therefore small.

#[path = "../tests/it/common/random.rs"]
mod random;
#[path = "../tests/it/common/torture.rs"]
mod torture;

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use torture::Torture;
use vramp_alloc::device::sim::{Contents, Simulator};
use vramp_alloc::{Allocator, Bytes, Config, Driver, Preset};

/// Checks the memory manager with data.
#[derive(Parser)]
struct Args {
    /// `auto`, `cuda:N`, or `sim` for a simulated card of 1 GiB.
    #[arg(default_value = "auto")]
    device: String,
    /// Duration in seconds.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Preset of the allocator.
    #[arg(long, default_value = "vramp")]
    preset: String,
    /// Number of threads.
    #[arg(long, default_value_t = 8)]
    threads: u64,
    /// Number of streams of all threads together.
    #[arg(long, default_value_t = 16)]
    streams: u64,
    /// Part of the card's free memory that the blocks take, in per cent.
    #[arg(long, default_value_t = 93)]
    fill: u64,
    /// Seed of the random program.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let args = Args::parse();
    let preset = Preset::ALL.into_iter().find(|preset| preset.name() == args.preset);
    let preset = preset.ok_or_else(|| format!("there is no preset '{}'", args.preset))?;
    let driver: Arc<dyn Driver> = match args.device.as_str() {
        "sim" => {
            let card = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored);
            Arc::new(card.checked().build())
        }
        name => vramp_alloc::open(name)?.driver,
    };
    let free = driver.memory_info()?.free;
    let budget = Bytes::new(free.count() / 100 * args.fill);
    let allocator = Allocator::new(Arc::clone(&driver), Config::preset(preset))?;
    let threads = args.threads.max(1);
    let torture = Torture {
        threads,
        streams_per_thread: (args.streams / threads).max(1),
        budget,
        largest: Bytes::gib(2).min(Bytes::new(budget.count() / threads / 2)),
        steps: u64::MAX,
        time: Duration::from_secs(args.seconds),
        seed: args.seed,
    };
    println!("{}: {torture:?}", driver.info().name);
    let start = Instant::now();
    let summary = torture::run(&allocator, &torture)?;
    allocator.audit()?;
    let stats = allocator.stats()?;
    println!("{summary:?} in {:.1} s", start.elapsed().as_secs_f64());
    println!("{stats:?}");
    if stats.live != Bytes::ZERO {
        return Err(format!("{} are still allocated", stats.live).into());
    }
    allocator.trim(Bytes::ZERO)?;
    let held = allocator.stats()?.reserved;
    allocator.close()?;
    let lost = free.saturating_sub(driver.memory_info()?.free);
    println!("every byte was right; {held} reserved after a trim, {lost} lost at the end");
    if held != Bytes::ZERO && preset == Preset::Vramp {
        return Err(format!("{held} stayed reserved after a trim").into());
    }
    Ok(())
}
