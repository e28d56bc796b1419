//! `vramp bench reserve`: what budgets cost.

use std::hint::black_box;
use std::io::Write;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use vramp_alloc::{Allocator, Bytes, Config, StreamId};
use vramp_tiers::ledger::core::{Ledger, Queue, Request};
use vramp_tiers::{
    DeadlockCheck, ManagerConfig, MemorySpace, Owner, Policies, Priority, ReservationManager,
    Scope, SpaceConfig, SpaceId, Strategy, Tag, Tier, Tracked,
};

use super::args::Reserve;
use super::{Bench, Cell, Column, median, nanos};
use crate::count::Count;

const GPU: SpaceId = SpaceId::gpu(0);
/// How much is allocated at a time.
const BLOCK: Bytes = Bytes::kib(64);
/// How long a batch should take: short against what disturbs a machine, long against the clock.
const BATCH: Duration = Duration::from_millis(2);
/// Calls before anything is timed.
const WARM_CALLS: u64 = 1000;
/// Fewer batches say nothing.
const BATCHES_LEAST: usize = 5;
/// Each wakes a thread.
const HAND_OVERS_LEAST: usize = 50;
const FALLS_ASLEEP: Duration = Duration::from_micros(100);

/// One row.
#[derive(Debug, Serialize)]
struct Row {
    what: String,
    allocator: Option<&'static str>,
    waiters: u64,
    calls: u64,
    call_ns: f64,
    /// Over the same without a budget.
    extra_ns: Option<f64>,
}

/// Something that is timed in batches.
struct Case<'a> {
    what: String,
    allocator: Option<&'static str>,
    waiters: u64,
    calls: u64,
    run: Box<dyn FnMut(u64) -> Result<()> + 'a>,
    call_ns: Vec<f64>,
    extra_ns: Vec<f64>,
}

impl<'a> Case<'a> {
    fn new(what: impl Into<String>, run: impl FnMut(u64) -> Result<()> + 'a) -> Case<'a> {
        let (call_ns, extra_ns) = (Vec::new(), Vec::new());
        let (what, run) = (what.into(), Box::new(run));
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

pub(super) fn run(args: &Reserve, out: &mut dyn Write) -> Result<()> {
    let bench = Bench::open(&args.common, out)?;
    let groups = 3 + args.common.allocator.0.len() + 2 * args.waiters.len();
    let share = bench.duration / groups as u32;
    let mut rows = reservations(share)?;
    rows.extend(hand_over(share)?);
    for &waiters in &args.waiters {
        rows.extend(beside(waiters.into(), share)?);
        rows.extend(serving(waiters.into(), share)?);
    }
    for &preset in &args.common.allocator.0 {
        let allocator = Allocator::new(bench.driver()?, Config::preset(preset))
            .with_context(|| format!("cannot set up {}", preset.name()))?;
        rows.extend(mallocs(preset.name(), &Arc::new(allocator), share)?);
    }
    bench.write(out, "reserve", &rows, &COLUMNS)
}

/// Lets the cases take turns until the time is over. With `compared` the first is what the others
/// are compared with.
fn turns(mut cases: Vec<Case<'_>>, share: Duration, compared: bool) -> Result<Vec<Row>> {
    for case in &mut cases {
        let begun = Instant::now();
        (case.run)(WARM_CALLS)?;
        case.calls = (nanos(BATCH) * WARM_CALLS / nanos(begun.elapsed()).max(1)).max(1);
    }
    let begun = Instant::now();
    let mut round = 0;
    while round < BATCHES_LEAST || begun.elapsed() < share {
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
    turns(cases, share, false)
}

/// From the moment one thread releases until another one, which slept, has the reservation.
fn hand_over(share: Duration) -> Result<Vec<Row>> {
    let (manager, space) = manager()?;
    let all = space.limit();
    let (done, served) = mpsc::channel();
    let (again, next) = mpsc::channel();
    let mut call_ns = Vec::new();
    std::thread::scope(|scope| {
        let waiting = &space;
        let waits = move || {
            while next.recv().is_ok() {
                let Ok(held) = waiting.request(all).wait() else { break };
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
        while call_ns.len() < HAND_OVERS_LEAST || begun.elapsed() < share {
            again.send(())?;
            while manager.waiting() == 0 {
                std::thread::yield_now();
            }
            // Who has just queued is not asleep yet.
            std::thread::sleep(FALLS_ASLEEP);
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

/// What a charge and a release cost that can serve nobody, while so many wait.
fn beside(waiters: usize, share: Duration) -> Result<Vec<Row>> {
    let (manager, space) = manager()?;
    let _rest = space.request(space.limit() - Bytes::mib(1)).now()?;
    let wait = || drop(space.request(Bytes::gib(6)).wait());
    std::thread::scope(|scope| {
        for _ in 0..waiters {
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            if let Err(error) = thread.spawn_scoped(scope, wait) {
                manager.shutdown();
                return Err(error).context("so many threads cannot be made: name fewer --waiters");
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
        let rows = turns(vec![case], share, false);
        manager.shutdown();
        rows
    })
}

/// What the queue alone takes to release one, serve the next and let another one wait.
fn serving(waiters: u64, share: Duration) -> Result<Vec<Row>> {
    let mut ledger = Ledger::new([(GPU, SpaceConfig::gpu(Bytes::gib(8)))])?;
    let mut queue = Queue::default();
    let tag = Tag::NONE;
    let ask = |owner| Request {
        candidates: [GPU].into_iter().collect(),
        bytes: Bytes::mib(1),
        priority: Priority::default(),
        owner: Owner(owner),
        tag,
        deadline: None,
    };
    ledger.reserve(GPU, ledger.levels(GPU)?.limit - Bytes::mib(1), Owner(0), tag)?;
    let mut held = ledger.reserve(GPU, Bytes::mib(1), Owner(0), tag)?;
    for owner in 0..waiters {
        let _waits = queue.submit(&mut ledger, ask(owner), 0)?;
    }
    let serve = move |calls| {
        for _ in 0..calls {
            let _bytes = ledger.release(held)?;
            let grants = queue.on_change(&mut ledger, GPU);
            held = grants.first().context("the first one fits now")?.reservation;
            let _waits = queue.submit(&mut ledger, ask(1), 0)?;
        }
        Ok(())
    };
    let case = Case::new("serve the first, in the core alone", serve).beside(waiters);
    turns(vec![case], share, false)
}

/// Pairs on one allocator: without a budget, and in the ways in which one can pay. A stream each.
fn mallocs(name: &'static str, allocator: &Arc<Allocator>, share: Duration) -> Result<Vec<Row>> {
    let (_, space) = manager()?;
    let streams = || allocator.create_stream();
    let [plain, space_pays, reservation_pays, counted] =
        [streams()?, streams()?, streams()?, streams()?];
    let tracked = Tracked::new(Arc::clone(allocator), &space, Policies::default());
    tracked.attach(Scope::Stream(reservation_pays), space.request(Bytes::gib(1)).now()?)?;
    let counting = Tracked::new(Arc::clone(allocator), &space, Policies::default());
    counting.attach(Scope::Stream(counted), space.request(Bytes::gib(1)).now()?)?;
    let counter = counting.count();
    let untracked = |calls| {
        for _ in 0..calls {
            let block = allocator.malloc(BLOCK, plain)?;
            allocator.free(black_box(block), plain)?;
        }
        Ok(())
    };
    let paid = |tracked: &Tracked, stream: StreamId, calls| {
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
    let rows = turns(cases, share, true);
    drop(counter);
    rows
}

const COLUMNS: [Column<Row>; 6] = [
    ("what", |row| Cell::Words(row.what.clone())),
    ("allocator", |row| Cell::Words(row.allocator.unwrap_or("-").to_owned())),
    ("waiters", |row| Cell::Number(Count(row.waiters).to_string())),
    ("ns", |row| Cell::Number(format!("{:.1}", row.call_ns))),
    ("extra ns", |row| {
        Cell::Number(match row.extra_ns {
            Some(extra_ns) => format!("{extra_ns:+.1}"),
            None => "-".to_owned(),
        })
    }),
    ("calls", |row| Cell::Number(Count(row.calls).to_string())),
];
