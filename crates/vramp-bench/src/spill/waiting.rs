//! What a lease of a resident buffer costs the host, by the number of requests that wait for another one.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use vramp::Bytes;
use vramp::defer::{Access, DeferrableBuffer, LeaseFuture, LeaseOwner, LeaseSet};

use super::ROUNDS_MIN;
use super::rig::{Rig, RigConfig};
use crate::Bench;
use crate::statistics::{median, nanos};

/// Length of each buffer.
const LEN: Bytes = Bytes::mib(2);
/// Leases of a batch.
const BATCH: u64 = 1_000;
/// Waiting requests, and whether each of them holds a lease as well.
const QUEUES: [(u64, bool); 4] = [(0, false), (64, false), (64, true), (10_000, false)];

/// The time of a lease of a resident buffer, by a thread that holds another lease.
#[derive(Clone, Debug, Serialize)]
pub struct WaitingRow {
    /// `waiting`.
    pub measure: &'static str,
    /// Number of requests that wait for another buffer.
    pub waiters: u64,
    /// Each of them holds a lease of its own.
    pub waiters_hold: bool,
    /// True for leases of a stream, with their driver calls.
    pub on_stream: bool,
    /// Time of a lease and its end, on the host's clock.
    pub lease_ns: f64,
    /// That time divided by the time without waiters, batch by batch.
    pub ratio: f64,
    /// Waiters looked at for a lease, in the mean.
    pub queue_steps: f64,
    /// Number of timed leases.
    pub leases: u64,
}

/// A manager with its queue. The parts are dropped in this order.
struct Queue {
    waiting: Vec<Pin<Box<LeaseFuture>>>,
    held: Vec<LeaseSet>,
    resident: DeferrableBuffer,
    wanted: DeferrableBuffer,
    own: Vec<DeferrableBuffer>,
    rig: Rig,
}

pub(super) fn measure(bench: &Bench, duration: Duration) -> Result<Vec<WaitingRow>> {
    let queues = QUEUES.iter().map(|&(waiters, hold)| Queue::new(bench, waiters, hold));
    let queues = queues.collect::<Result<Vec<Queue>>>()?;
    let mut rows = Vec::new();
    for on_stream in [false, true] {
        rows.extend(alternate(&queues, on_stream, duration / 2)?);
    }
    queues.into_iter().try_for_each(Queue::close)?;
    Ok(rows)
}

/// Runs a batch beside each queue in turn until the time is over.
fn alternate(queues: &[Queue], on_stream: bool, share: Duration) -> Result<Vec<WaitingRow>> {
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); queues.len()];
    let before: Vec<u64> = queues.iter().map(Queue::steps).collect();
    for queue in queues {
        queue.batch(on_stream)?; // warms the caches up
    }
    let begun = Instant::now();
    while times[0].len() < ROUNDS_MIN || begun.elapsed() < share {
        for (queue, times) in queues.iter().zip(&mut times) {
            times.push(queue.batch(on_stream)?);
        }
    }
    let rows = queues.iter().enumerate().map(|(index, queue)| {
        let (waiters, waiters_hold) = QUEUES[index];
        let leases = times[index].len() as u64 * BATCH;
        let ratios = times[index].iter().zip(&times[0]).map(|(beside, alone)| beside / alone);
        WaitingRow {
            measure: "waiting",
            waiters,
            waiters_hold,
            on_stream,
            lease_ns: median(times[index].clone()),
            ratio: median(ratios.collect()),
            queue_steps: (queue.steps() - before[index]) as f64 / (leases + BATCH) as f64,
            leases,
        }
    });
    Ok(rows.collect())
}

impl Queue {
    fn new(bench: &Bench, waiters: u64, waiters_hold: bool) -> Result<Queue> {
        // Nothing leaves the card: the mover needs its staging blocks alone.
        let pinned = Bytes::mib(64);
        let rig = Rig::new(bench, &RigConfig { piece: Bytes::mib(4), limit: None, pinned })?;
        let resident = || -> Result<DeferrableBuffer> {
            let buffer = rig.manager.buffer(LEN)?;
            drop(buffer.lease(Access::Exclusive, rig.stream)?);
            Ok(buffer)
        };
        let (buffer, wanted, outer) = (resident()?, resident()?, resident()?);
        let number = if waiters_hold { waiters } else { 0 };
        let own = (0..number).map(|_| resident()).collect::<Result<Vec<_>>>()?;
        rig.synchronize()?;
        let exclusive = [(&wanted, Access::Exclusive)];
        let mut held = vec![rig.manager.request(&exclusive).now()?];
        held.push(outer.lease(Access::Shared, rig.stream)?);
        let mut waiting = Vec::new();
        for index in 0..waiters {
            let owner = LeaseOwner::new();
            if let Some(own) = own.get(index as usize) {
                let exclusive = [(own, Access::Exclusive)];
                held.push(rig.manager.request(&exclusive).owner(owner).now()?);
            }
            let request = rig.manager.request(&exclusive).owner(owner);
            let mut request = Box::pin(request.into_future());
            let polled = request.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            ensure!(matches!(polled, Poll::Pending), "a held buffer has to be waited for");
            waiting.push(request);
        }
        Ok(Queue { waiting, held, resident: buffer, wanted, own, rig })
    }

    /// Leases the resident buffer many times. Returns the time of one lease.
    fn batch(&self, on_stream: bool) -> Result<f64> {
        let Queue { resident, rig, .. } = self;
        let wanted = [(resident, Access::Shared)];
        // The thread owns the lease on another buffer, taken in `new`.
        let owner = LeaseOwner::of_this_thread();
        rig.synchronize()?;
        let begun = Instant::now();
        for _ in 0..BATCH {
            let request = rig.manager.request(&wanted).owner(owner);
            let request = if on_stream { request.stream(rig.stream) } else { request };
            drop(request.now()?);
        }
        Ok(nanos(begun.elapsed()) as f64 / BATCH as f64)
    }

    fn steps(&self) -> u64 {
        self.rig.manager.counters().queue_steps
    }

    fn close(self) -> Result<()> {
        let Queue { waiting, held, resident, wanted, own, rig } = self;
        let waiters = rig.manager.census().waiting;
        ensure!(waiters == waiting.len(), "{waiters} of {} wait", waiting.len());
        drop((waiting, held, resident, wanted, own));
        rig.close().context("a manager whose waiters left")
    }
}
