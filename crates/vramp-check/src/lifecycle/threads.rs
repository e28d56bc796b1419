//! Programs on several threads at once, on pools that share their streams and one limit.
//!
//! Each thread performs a program of its own with objects of its own. All of them use the pool
//! [`SHARED`], and each opens and ends further pools of its group, so that every call meets every
//! other one, closing included. What one program does to the others (memory runs out, a capture
//! refuses a close) is allowed; a broken promise is not.
//!
//! A finding depends on how the threads ran, so its program is not made short. Absent: gates, which
//! would hold a close of another thread for ever; injected failures, which would meet any thread;
//! captures in the global mode, which forbid calls to other threads; callbacks on the shared pool,
//! whose work would meet captures of other threads.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use vramp::Bytes;

use super::draw::{Drawer, Mix};
use super::subject::{PoolEnd, Way};
use super::world::{Counts, Finding, SHARED, World};
use super::{MakeSubject, Op, Options, random};

/// The program of one thread, as far as it ran.
pub(super) type Program = Arc<Mutex<Vec<Op>>>;

/// What a thread found.
#[derive(Debug)]
pub(super) struct Found {
    /// Its place among the programs.
    pub thread: usize,
    pub finding: Finding,
}

impl From<Finding> for Found {
    fn from(finding: Finding) -> Found {
        Found { thread: 0, finding }
    }
}

/// Performs a program on each thread. The seeds are those from `seed` on.
///
/// # Errors
/// The finding of one thread.
pub(super) fn perform(
    options: &Options,
    make: &MakeSubject,
    seed: u64,
    programs: &[Program],
) -> Result<Vec<Counts>, Found> {
    let first = Found::from;
    let ground = options.ground(seed);
    let before = ground.sim.as_ref().map(|sim| sim.live());
    let mut base = make(ground.tapped(), options.preset);
    base.open(SHARED).map_err(|refused| first(refused.text))?;
    let mut worlds = Vec::new();
    for at in 0..programs.len() {
        let subject = base.share().map_err(|refused| first(refused.text))?;
        let world = World::sharing(subject, ground.clone(), options.preset);
        worlds.push(world.map_err(|finding| Found { thread: at, finding })?);
    }
    let ran: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = worlds
            .into_iter()
            .zip((seed..).zip(programs))
            .map(|(world, (seed, program))| scope.spawn(move || one(world, options, seed, program)))
            .collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    let mut leaks = false;
    let mut counts = Vec::new();
    for (at, ran) in ran.into_iter().enumerate() {
        match ran {
            Ok(Ok((done, leaked))) => {
                leaks |= leaked;
                counts.push(done);
            }
            Ok(Err(finding)) => return Err(Found { thread: at, finding }),
            Err(_) => {
                let finding = "a panic outside of an operation".to_owned();
                return Err(Found { thread: at, finding });
            }
        }
    }
    if !leaks {
        base.trim(SHARED, Bytes::ZERO).map_err(|refused| first(refused.text))?;
        let usage = base.usage(SHARED).map_err(|refused| first(refused.text))?;
        if !usage.0.is_zero() {
            return Err(first(format!("all threads ended, and {} are live", usage.0)));
        }
    }
    match base.end_pool(SHARED, Way::Here as u64) {
        PoolEnd::Done => {}
        PoolEnd::Refused(refused) | PoolEnd::Failed(refused) => return Err(first(refused.text)),
    }
    drop(base);
    if let (Some(sim), Some(before), false) = (&ground.sim, before, leaks) {
        let live = sim.live();
        if live != before {
            return Err(first(format!("left on the device: {live:?}")));
        }
    }
    Ok(counts)
}

fn one(
    mut world: World,
    options: &Options,
    seed: u64,
    program: &Program,
) -> Result<(Counts, bool), Finding> {
    let mut random = random(options, seed);
    let mix = Mix::draw(&mut random, world.has_graphs());
    let mut drawer = Drawer::new(random, Mix { faults: false, ..mix });
    for _ in 0..options.program {
        let op = drawer.draw(&world);
        program.lock().unwrap_or_else(PoisonError::into_inner).push(op);
        world.step(&op)?;
    }
    world.finish()?;
    Ok((world.counts.clone(), world.leaks()))
}
