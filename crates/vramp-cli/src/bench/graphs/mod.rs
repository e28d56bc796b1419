//! `vramp bench graphs`: captured graphs that share an arena.
//!
//! `program` is what is captured; `shared`, `same`, `lent` and `calls` are the measurements.

mod calls;
mod lent;
mod program;
mod same;
mod shared;

use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use vramp_alloc::{Allocator, Driver, Preset, StreamId};
use vramp_driver::Stream;

use super::Bench;
use super::args::Graphs;
use super::subject::{Managed, Subject};

/// What `bench` is in every row.
const NAME: &str = "graphs";

pub(super) fn run(args: &Graphs, out: &mut dyn Write) -> Result<()> {
    if args.common.allocator.0 != [Preset::Vramp] {
        bail!("only vramp captures graphs into arenas: leave --allocator away");
    }
    program::check(args.block)?;
    let bench = Bench::open(&args.common, out)?;
    let largest = lent::arena(args.arena, &bench.info)?;
    let shared = shared::measure(&bench, args.graphs, args.block)?;
    bench.write_rows(out, NAME, &[shared], &shared::COLUMNS)?;
    let same = same::measure(&bench, args.graphs, args.block)?;
    let differing = same.differing_bytes;
    bench.write_rows(out, NAME, &[same], &same::COLUMNS)?;
    bench.write_rows(out, NAME, &lent::measure(&bench, largest)?, &lent::COLUMNS)?;
    bench.write_rows(out, NAME, &calls::measure(&bench)?, &calls::COLUMNS)?;
    bench.write_device(out)?;
    if differing > 0 {
        out.flush()?;
        bail!("{differing} bytes of replays differ from what the same calls wrote without a graph");
    }
    Ok(())
}

/// An allocator with one stream to capture and launch on.
struct Site {
    managed: Managed,
    stream: StreamId,
    /// The same as the driver knows it.
    queue: Stream,
}

impl Site {
    fn new(driver: Arc<dyn Driver>) -> Result<Site> {
        let managed = Managed::new(driver, Preset::Vramp, None)?;
        let stream = managed.new_lane()?;
        let queue = managed.allocator.stream(stream).context("the stream was made a moment ago")?;
        Ok(Site { managed, stream, queue })
    }

    fn allocator(&self) -> &Allocator {
        &self.managed.allocator
    }

    /// The device behind the meter.
    fn driver(&self) -> &dyn Driver {
        &**self.allocator().driver()
    }

    /// Waits until all that is queued is done.
    fn finish(&self) -> Result<()> {
        Ok(self.driver().synchronize_stream(self.queue)?)
    }

    fn close(self) -> Result<()> {
        Ok(self.managed.close()?)
    }
}
