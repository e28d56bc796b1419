//! `vramp tiers`: the memory of this machine as spaces, and the links between them.
//!
//! 1. [`cards`] finds the cards: the driver's, or a simulated one.
//! 2. The spaces come from a file, or follow from the machine.
//! 3. [`outcome`] combines them with the machine's NUMA nodes, disks and network cards, and lists
//!    the links between spaces.
//! 4. With `--measure`, [`measure`] measures the rates of the links.
//! 5. [`print`](mod@print) writes the tables.

mod cards;
mod measure;
mod outcome;
mod print;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use vramp::Bytes;
use vramp::tiers::config::{GpuInfo, TiersBuilder, TiersConfig};
use vramp_host::topology::{Topology, VisibleDevices};

use crate::args::Tiers;
use cards::Cards;
use outcome::Outcome;

/// Share of a directory's free space that its tier uses, in percent.
const PERCENT_OF_FREE: u64 = 80;

pub(crate) fn run(args: &Tiers, out: &mut dyn Write) -> Result<()> {
    let topology = Topology::read(&args.sysroot)?;
    let cards = Cards::find(&args.device, &topology)?;
    let config = match &args.config {
        Some(path) => read(path)?,
        None => default_spaces(&topology, &cards.cards, &args.directory)?,
    };
    if args.write_config {
        return Ok(write!(out, "{}", config.to_toml()?)?);
    }
    let variable = std::env::var_os("CUDA_VISIBLE_DEVICES");
    let variable = variable.map(|text| text.to_string_lossy().into_owned());
    let visible: VisibleDevices = topology.visible(variable.as_deref());
    let mut outcome = Outcome::new(&topology, &cards, &config, &visible)?;
    if args.measure {
        outcome.add_rates(&measure::measure(&cards, &config, &args.device)?);
    }
    if args.json {
        return crate::json::versioned_line(out, &outcome);
    }
    Ok(print::write(out, &outcome)?)
}

fn read(path: &Path) -> Result<TiersConfig> {
    let name = || format!("'{}'", path.display());
    let text = fs::read_to_string(path).with_context(name)?;
    TiersConfig::from_toml(&text).with_context(name)
}

/// Returns the spaces of the machine, with a disk for each directory.
fn default_spaces(
    topology: &Topology,
    cards: &[GpuInfo],
    directories: &[PathBuf],
) -> Result<TiersConfig> {
    let mut builder = TiersBuilder::new(topology, cards);
    for path in directories {
        let directory = topology.directory(path)?;
        let part = directory.free.count() / 100 * PERCENT_OF_FREE;
        builder = builder.disk(directory.path, Bytes::new(part).round_down(Bytes::mib(1)));
    }
    Ok(builder.build()?)
}
