//! Checks by replays what `vramp explain` and `vramp advise` propose for recordings, and for twenty made
//! ones: `cargo run --release -p vramp-analysis --example check_remedies -- [RECORDING]...`.
//!
//! Every remedy has to fit into the memory that it names, and none may be worse than no change.

use std::error::Error;
use std::thread;

use vramp_trace::{ReadLimits, read_trace};

#[path = "../tests/it/common/made_job.rs"]
mod made_job;
#[path = "../tests/it/common/remedies.rs"]
mod remedies;

/// Made recordings.
const MADE: u64 = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let threads = thread::available_parallelism()?;
    let (mut remedies, mut replayed, mut faults) = (0, 0, 0);
    let mut add = |name: &str, found: &remedies::Checked| {
        println!("{name}: {} remedies, {} replayed", found.remedies, found.replayed);
        found.faults.iter().for_each(|fault| println!("  {fault}"));
        remedies += found.remedies;
        replayed += found.replayed;
        faults += found.faults.len();
    };
    for path in std::env::args().skip(1) {
        let trace = read_trace(&path, &ReadLimits::default())?;
        add(&path, &remedies::check(&trace, threads)?);
    }
    for seed in 0..MADE {
        let trace = made_job::made_oom(seed);
        add(&trace.name, &remedies::check(&trace, threads)?);
    }
    println!("{remedies} remedies, {replayed} replayed, {faults} faults");
    match faults {
        0 => Ok(()),
        _ => Err("a remedy is not confirmed".into()),
    }
}
