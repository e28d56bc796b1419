//! Costs of reservations, of waits for them, and of budgeted mallocs.
//!
//! Batches alternate; a row holds the median.

use std::hint::black_box;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use vramp::peers::{Config, Preset};
use vramp::tiers::ledger::{Ledger, Request, WaitQueue};
use vramp::tiers::reserve::{DeadlockCheck, Tag};
use vramp::tiers::tracked::{Policies, Scope};
use vramp::tiers::{
    ManagerConfig, MemorySpace, Owner, Priority, ReservationManager, SpaceConfig, SpaceId,
    Strategy, Tier, TrackedAllocator,
};
use vramp::{Allocator, Bytes, StreamId};

use crate::Bench;
use crate::statistics::{median, nanos};

const GPU: SpaceId = SpaceId::gpu(0);
/// Size of the allocated blocks.
const BLOCK: Bytes = Bytes::kib(64);
/// Length of a batch: short against disturbances of the machine, long against the clock's
/// resolution.
const BATCH: Duration = Duration::from_millis(2);
/// Calls before the first timed batch.
const WARM_CALLS: u64 = 1000;
/// Fewer batches give no stable median.
const BATCHES_MIN: usize = 5;
/// Fewer hand-overs give no stable median.
const HAND_OVERS_MIN: usize = 50;
/// Time in which a thread that has queued blocks in the kernel.
const BLOCKS_WITHIN: Duration = Duration::from_micros(100);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Allocators whose budgeted mallocs are measured, in order.
    pub presets: Vec<Preset>,
    /// Numbers of waiters beside which a charge and a queue operation are measured.
    pub waiters: Vec<u16>,
}

/// The result for one operation.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The operation.
    pub what: &'static str,
    /// The allocator's name, for mallocs.
    pub allocator: Option<&'static str>,
    /// Waiters in the queue meanwhile.
    pub waiters: u64,
    /// Number of timed calls.
    pub calls: u64,
    /// Time of one call.
    pub call_ns: f64,
    /// Time above that of the same call without a budget.
    pub extra_ns: Option<f64>,
}

/// An operation that is timed in batches.
struct Case<'a> {
    what: &'static str,
    allocator: Option<&'static str>,
    waiters: u64,
    calls: u64,
    run: Box<dyn FnMut(u64) -> Result<()> + 'a>,
    call_ns: Vec<f64>,
    extra_ns: Vec<f64>,
}

impl<'a> Case<'a> {
    fn new(what: &'static str, run: impl FnMut(u64) -> Result<()> + 'a) -> Case<'a> {
        let (call_ns, extra_ns) = (Vec::new(), Vec::new());
        let run = Box::new(run);
        Case { what, allocator: None, waiters: 0, calls: 0, run, call_ns, extra_ns }
    }

    fn beside(mut self, waiters: u64) -> Case<'a> {
        self.waiters = waiters;
        self
    }

    fn on(mut self, allocator: &'static str) -> Case<'a> {
        self.allocator = Some(allocator);
        self
    }

    fn row(self) -> Row {
        Row {
            what: self.what,
            allocator: self.allocator,
            waiters: self.waiters,
            calls: self.calls * self.call_ns.len() as u64,
            call_ns: median(self.call_ns),
            extra_ns: (!self.extra_ns.is_empty()).then(|| median(self.extra_ns)),
        }
    }
}

/// Measures reservations, hand-overs, charges beside waiters, and budgeted mallocs.
///
/// # Errors
/// An allocator fails, or the waiters' threads cannot be started.
pub fn run(bench: &Bench, options: &Options) -> Result<Vec<Row>> {
    let groups = 3 + options.presets.len() + 2 * options.waiters.len();
    let share = bench.duration / groups as u32;
    let mut rows = reservations(share)?;
    rows.extend(hand_over(share)?);
    for &waiters in &options.waiters {
        rows.extend(beside(waiters.into(), share)?);
        rows.extend(serving(waiters.into(), share)?);
    }
    for &preset in &options.presets {
        let allocator = Config::preset(preset)
            .open(bench.driver()?)
            .with_context(|| format!("cannot set up {}", preset.name()))?;
        rows.extend(mallocs(preset.name(), &Arc::new(allocator), share)?);
    }
    Ok(rows)
}

/// Runs a batch of each case in turn until the time is over. With `compared` the first case is the
/// yardstick of the others.
fn alternate(mut cases: Vec<Case<'_>>, share: Duration, compared: bool) -> Result<Vec<Row>> {
    for case in &mut cases {
        let begun = Instant::now();
        (case.run)(WARM_CALLS)?;
        case.calls = (nanos(BATCH) * WARM_CALLS / nanos(begun.elapsed()).max(1)).max(1);
    }
    let begun = Instant::now();
    let mut round = 0;
    while round < BATCHES_MIN || begun.elapsed() < share {
        let mut first_ns = None;
        for case in &mut cases {
            let begun = Instant::now();
            (case.run)(case.calls)?;
            let call_ns = nanos(begun.elapsed()) as f64 / case.calls as f64;
            case.call_ns.push(call_ns);
            if let Some(first_ns) = first_ns.filter(|_| compared) {
                case.extra_ns.push(call_ns - first_ns);
            }
            first_ns.get_or_insert(call_ns);
        }
        round += 1;
    }
    Ok(cases.into_iter().map(Case::row).collect())
}

fn manager() -> Result<(ReservationManager, MemorySpace)> {
    let config = ManagerConfig { deadlock: DeadlockCheck::OnDemand, ..ManagerConfig::default() };
    let spaces = [
        (GPU, SpaceConfig::gpu(Bytes::gib(8))),
        (SpaceId::gpu(1), SpaceConfig::gpu(Bytes::gib(8))),
        (SpaceId::host(0), SpaceConfig::host(Bytes::gib(64))),
    ];
    let manager = ReservationManager::with_config(spaces, config)?;
    let space = manager.space(GPU).context("it was configured")?;
    Ok((manager, space))
}

fn reservations(share: Duration) -> Result<Vec<Row>> {
    let (manager, _) = manager()?;
    let reserve = |strategy: Strategy| {
        let manager = &manager;
        move |calls| {
            for _ in 0..calls {
                drop(black_box(manager.request(strategy.clone(), Bytes::mib(1)).now()?));
            }
            Ok(())
        }
    };
    let cases = vec![
        Case::new("reserve and release, one space", reserve(Strategy::Specific(GPU))),
        Case::new("reserve and release, a tier", reserve(Strategy::AnyInTier(Tier::Gpu))),
    ];
    alternate(cases, share, false)
}

/// Measures from the release by one thread until a blocked waiter has the reservation.
fn hand_over(share: Duration) -> Result<Vec<Row>> {
    let (manager, space) = manager()?;
    let all = space.limit();
    let (done, served) = mpsc::channel();
    let (again, next) = mpsc::channel();
    let mut call_ns = Vec::new();
    std::thread::scope(|scope| {
        let space_too = &space;
        let waits = move || {
            while next.recv().is_ok() {
                let Ok(held) = space_too.request(all).wait() else { break };
                let at = Instant::now();
                drop(held);
                if done.send(at).is_err() {
                    break;
                }
            }
        };
        let begun = Instant::now();
        let mut held = space.request(all).now()?;
        scope.spawn(waits);
        while call_ns.len() < HAND_OVERS_MIN || begun.elapsed() < share {
            again.send(())?;
            while manager.waiting() == 0 {
                std::thread::yield_now();
            }
            // A thread that has just queued does not block yet.
            std::thread::sleep(BLOCKS_WITHIN);
            let released = Instant::now();
            drop(held);
            call_ns.push(nanos(served.recv()? - released) as f64);
            held = space.request(all).wait()?;
        }
        drop(again);
        anyhow::Ok(())
    })?;
    let calls = call_ns.len() as u64;
    let case = Case { call_ns, ..Case::new("hand over to one who sleeps", |_| Ok(())) };
    Ok(vec![Row { calls, ..case.beside(1).row() }])
}

/// Measures a charge and its release that can serve no waiter, beside a number of waiters.
fn beside(waiters: usize, share: Duration) -> Result<Vec<Row>> {
    let (manager, space) = manager()?;
    let _rest = space.request(space.limit() - Bytes::mib(1)).now()?;
    let wait = || drop(space.request(Bytes::gib(6)).wait());
    std::thread::scope(|scope| {
        for _ in 0..waiters {
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            if let Err(error) = thread.spawn_scoped(scope, wait) {
                manager.shutdown();
                return Err(error).context("cannot start that many threads: give fewer waiters");
            }
        }
        while manager.waiting() < waiters {
            std::thread::yield_now();
        }
        let charge = |calls| {
            for _ in 0..calls {
                drop(black_box(space.charge(Bytes::kib(512))?));
            }
            Ok(())
        };
        let case = Case::new("charge and release", charge).beside(waiters as u64);
        let rows = alternate(vec![case], share, false);
        manager.shutdown();
        rows
    })
}

/// Measures the wait queue alone: release, serve the next waiter, queue another one.
fn serving(waiters: u64, share: Duration) -> Result<Vec<Row>> {
    let mut ledger = Ledger::new([(GPU, SpaceConfig::gpu(Bytes::gib(8)))])?;
    let mut queue = WaitQueue::default();
    let tag = Tag::NONE;
    let request = |owner| Request {
        candidates: [GPU].into_iter().collect(),
        bytes: Bytes::mib(1),
        kept: Bytes::ZERO,
        held: Bytes::ZERO,
        place: None,
        priority: Priority::default(),
        owner: Owner(owner),
        tag,
    };
    ledger.reserve(GPU, ledger.levels(GPU)?.limit - Bytes::mib(1), Owner(0), tag)?;
    let mut held = ledger.reserve(GPU, Bytes::mib(1), Owner(0), tag)?;
    for owner in 0..waiters {
        let _waits = queue.submit(&mut ledger, &request(owner))?;
    }
    let serve = move |calls| {
        for _ in 0..calls {
            let _bytes = ledger.release(held)?;
            let grants = queue.serve_waiters(&mut ledger, GPU);
            held = grants.first().context("the first one fits now")?.reservation;
            let _waits = queue.submit(&mut ledger, &request(1))?;
        }
        Ok(())
    };
    let case = Case::new("serve the first, in the core alone", serve).beside(waiters);
    alternate(vec![case], share, false)
}

/// Measures pairs on one allocator: without a budget, and with each kind of budget. Each case has
/// a stream of its own.
fn mallocs(name: &'static str, allocator: &Arc<Allocator>, share: Duration) -> Result<Vec<Row>> {
    let (_, space) = manager()?;
    let streams = || allocator.create_stream();
    let [plain, space_pays, reservation_pays, counted] =
        [streams()?, streams()?, streams()?, streams()?];
    let tracked = TrackedAllocator::new(Arc::clone(allocator), &space, Policies::default());
    tracked.attach(Scope::Stream(reservation_pays), space.request(Bytes::gib(1)).now()?)?;
    let counting = TrackedAllocator::new(Arc::clone(allocator), &space, Policies::default());
    counting.attach(Scope::Stream(counted), space.request(Bytes::gib(1)).now()?)?;
    let counter = counting.count();
    let untracked = |calls| {
        for _ in 0..calls {
            let block = allocator.malloc(BLOCK, plain)?;
            allocator.free(black_box(block), plain)?;
        }
        Ok(())
    };
    let paid = |tracked: &TrackedAllocator, stream: StreamId, calls| {
        for _ in 0..calls {
            let block = tracked.malloc(BLOCK, stream)?;
            tracked.free(black_box(block), stream).map_err(|error| anyhow!("{error}"))?;
        }
        Ok(())
    };
    let (tracked, counting) = (&tracked, &counting);
    let cases = vec![
        Case::new("malloc and free, no budget", untracked),
        Case::new("malloc and free, paid by the space", move |calls| {
            paid(tracked, space_pays, calls)
        }),
        Case::new("malloc and free, paid by a reservation", move |calls| {
            paid(tracked, reservation_pays, calls)
        }),
        Case::new("malloc and free, counted as well", move |calls| paid(counting, counted, calls)),
    ];
    let cases = cases.into_iter().map(|case| case.on(name)).collect();
    let rows = alternate(cases, share, true);
    drop(counter);
    rows
}
