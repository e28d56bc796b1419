//! Captured graphs that share an arena.
//!
//! 1. [`Graphs::sharing`]: many graphs of different sizes are captured over one arena; its memory
//!    over that of the largest graph.
//! 2. [`Graphs::replays`]: each graph is executed call by call and replayed, in random order, and
//!    the results are compared byte by byte.
//! 3. [`Graphs::lending`]: an idle arena lends its memory, ordinary blocks use 90 % of it under a
//!    limit, and a launch takes it back.
//! 4. [`Graphs::requests`]: a malloc/free pair within a capture and outside, and a launch with and
//!    without a lease.
//!
//! On a simulator the compared blocks are at most 1 MiB, and driver times are modelled.

mod lending;
mod program;
mod replays;
mod requests;
mod sharing;

use std::sync::Arc;

use anyhow::{Context, Result};
use vramp::peers::Preset;
use vramp::{Allocator, Bytes, Driver, StreamId};
use vramp_driver::Stream;

use crate::Bench;
use crate::subject::{MeteredAllocator, Subject};

pub use lending::LendingRow;
pub use replays::ReplayRow;
pub use requests::RequestRow;
pub use sharing::SharingRow;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of graphs that share the arena.
    pub graphs: u32,
    /// Largest block of a graph; the smallest is 64 KiB.
    pub block: Bytes,
    /// Size of the arena that lends; by default 8 GiB, and 1 GiB on a simulator.
    pub arena: Option<Bytes>,
}

/// The four measurements of captured graphs, with checked options.
pub struct Graphs<'a> {
    bench: &'a Bench,
    options: Options,
    arena: Bytes,
}

impl<'a> Graphs<'a> {
    /// Checks the options.
    ///
    /// # Errors
    /// The block or the arena is too small or too large.
    pub fn new(bench: &'a Bench, options: Options) -> Result<Graphs<'a>> {
        program::check(options.block)?;
        let arena = lending::arena(options.arena, bench.info())?;
        Ok(Graphs { bench, options, arena })
    }

    /// Measures how much memory graphs share.
    ///
    /// # Errors
    /// A capture or an allocation fails.
    pub fn sharing(&self) -> Result<SharingRow> {
        sharing::measure(self.bench, self.options.graphs, self.options.block)
    }

    /// Compares replays with the same calls without a graph.
    ///
    /// # Errors
    /// A capture or an allocation fails. Different bytes are counted in the row.
    pub fn replays(&self) -> Result<ReplayRow> {
        replays::measure(self.bench, self.options.graphs, self.options.block)
    }

    /// Measures what lending an arena's memory and taking it back cost.
    ///
    /// # Errors
    /// A capture or an allocation fails, or memory is not lent within five seconds.
    pub fn lending(&self) -> Result<Vec<LendingRow>> {
        lending::measure(self.bench, self.arena)
    }

    /// Measures single requests.
    ///
    /// # Errors
    /// A capture or an allocation fails.
    pub fn requests(&self) -> Result<Vec<RequestRow>> {
        requests::measure(self.bench)
    }
}

/// An allocator with one stream to capture and launch on.
struct Rig {
    allocator: MeteredAllocator,
    stream: StreamId,
    /// The driver's handle of `stream`.
    queue: Stream,
}

impl Rig {
    fn new(driver: Arc<dyn Driver>) -> Result<Rig> {
        let allocator = MeteredAllocator::new(driver, Preset::Vramp, None)?;
        let stream = allocator.create_stream()?;
        let queue = allocator.allocator.stream(stream).context("the stream was just created")?;
        Ok(Rig { allocator, stream, queue })
    }

    fn allocator(&self) -> &Allocator {
        &self.allocator.allocator
    }

    /// Returns the metered device.
    fn driver(&self) -> &dyn Driver {
        &**self.allocator().driver()
    }

    /// Waits until all queued work is done.
    fn synchronize(&self) -> Result<()> {
        Ok(self.driver().synchronize_stream(self.queue)?)
    }

    fn close(self) -> Result<()> {
        Ok(self.allocator.close()?)
    }
}
