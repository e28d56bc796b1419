//! Code of the user that the allocator calls: what it may do inside, what a panic of it leaves, and
//! when it is called no more.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::common::graph_rig::GraphRig;
use crate::common::{Rig, pages};
use vramp_alloc::history::HistorySize;
use vramp_alloc::observe::{Event, Registration, Reliever, Shortage};
use vramp_alloc::{Allocation, Allocator, Bytes, Config, Driver, StreamId};
use vramp_driver::sim::{LiveObjects, Simulator};
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{DriverResult, GraphExec, Stream};
use vramp_trace::EventKind;

const ENOUGH: Duration = Duration::from_secs(60);

fn limited(count: u64) -> (Arc<Allocator>, StreamId) {
    patient(count, Duration::ZERO)
}

fn patient(count: u64, patience: Duration) -> (Arc<Allocator>, StreamId) {
    let driver: Arc<dyn Driver> = Arc::new(Simulator::builder().build());
    let config = Config { limit: Some(pages(count)), patience, ..Config::default() };
    let allocator = Arc::new(Allocator::new(driver, config).unwrap());
    let stream = allocator.create_stream().unwrap();
    (allocator, stream)
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Runs `work` on another thread and fails the test if it does not end.
fn finishes<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, over) = channel();
    let thread = std::thread::spawn(move || done.send(work()).unwrap());
    let result = over.recv_timeout(ENOUGH).expect("it ends");
    thread.join().unwrap();
    result
}

fn panics(allocator: &Allocator) -> u64 {
    allocator.stats().unwrap().callback_panics
}

// --- calls from inside ---

#[test]
fn a_request_inside_a_handler_runs_no_handlers_and_does_not_wait() {
    let (allocator, stream) = patient(16, 2 * ENOUGH);
    let held = Mutex::new(Some(allocator.malloc(pages(12), stream).unwrap()));
    let (runs, weak) = (Arc::new(AtomicU64::new(0)), Arc::downgrade(&allocator));
    let counted = Arc::clone(&runs);
    allocator.on_shortage(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        let allocator = weak.upgrade().unwrap();
        // Memory that is there serves the handler too.
        let small = allocator.malloc(pages(1), stream).expect("there are 4 pages");
        allocator.free(small, stream).unwrap();
        // Outside of a handler it would wait longer than the test.
        assert!(allocator.malloc(pages(12), stream).is_err());
        let Some(block) = held.lock().unwrap().take() else { return false };
        allocator.free(block, stream).unwrap();
        true
    });
    let block = finishes({
        let allocator = Arc::clone(&allocator);
        move || allocator.malloc(pages(10), stream)
    });
    assert_eq!((count(&runs), panics(&allocator)), (1, 0));
    assert_eq!(allocator.memory_stats().unwrap().num_ooms, 1, "the one inside the handler");
    allocator.free(block.unwrap(), stream).unwrap();
    allocator.audit().unwrap();
}

#[test]
fn handlers_of_two_allocators_that_allocate_from_each_other_end() {
    let ((left, stream), (right, other)) = (limited(4), limited(4));
    let runs = Arc::new(AtomicU64::new(0));
    for (from, to, on) in [(&left, &right, other), (&right, &left, stream)] {
        let (to, runs) = (Arc::downgrade(to), Arc::clone(&runs));
        from.on_shortage(move |_| {
            runs.fetch_add(1, Ordering::Relaxed);
            assert!(to.upgrade().unwrap().malloc(pages(5), on).is_err());
            false
        });
    }
    assert!(left.malloc(pages(5), stream).is_err());
    assert_eq!(count(&runs), 2, "one handler of each");
    assert_eq!((panics(&left), panics(&right)), (0, 0));
}

#[test]
fn calls_inside_an_observer_reach_no_observer_but_the_history_has_them_without_a_stack() {
    let (allocator, stream) = limited(64);
    let (runs, stacks) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (weak, counted) = (Arc::downgrade(&allocator), Arc::clone(&runs));
    allocator.observe(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        let allocator = weak.upgrade().unwrap();
        let block = allocator.malloc(pages(2), stream).unwrap();
        allocator.free(block, stream).unwrap();
    });
    let (weak, taken) = (Arc::downgrade(&allocator), Arc::clone(&stacks));
    let source = move || {
        taken.fetch_add(1, Ordering::Relaxed);
        // The source is user code too, and its own events take no stack.
        let allocator = weak.upgrade().unwrap();
        let block = allocator.malloc(pages(3), stream).unwrap();
        allocator.free(block, stream).unwrap();
        vec![("train".to_owned(), "model.py".to_owned(), 1)]
    };
    // The first request grows the pool, which is an event too.
    let block = allocator.malloc(pages(8), stream).unwrap();
    allocator.free(block, stream).unwrap();
    let before = count(&runs);
    let recording = allocator.record_history(HistorySize::default(), Some(Arc::new(source)));
    let block = allocator.malloc(pages(1), stream).unwrap();
    allocator.free(block, stream).unwrap();
    assert_eq!(count(&runs) - before, 2, "one for each call outside");
    assert_eq!(count(&stacks), 2);
    let trace = allocator.snapshot(Some(&recording));
    let allocs = trace.events.iter().filter(|event| event.kind == EventKind::Alloc);
    let sizes: Vec<_> = allocs.map(|event| (event.size, event.stack.is_some())).collect();
    let [inside, source] = [pages(2), pages(3)].map(|size| (size, false));
    assert_eq!(sizes, [source, (pages(1), true), inside, source, inside]);
    assert!(allocator.stop_history(&recording));
    assert!(!allocator.stop_history(&recording));
}

#[test]
fn events_inside_a_handler_reach_observers() {
    let (allocator, stream) = limited(16);
    let held = Mutex::new(Some(allocator.malloc(pages(12), stream).unwrap()));
    let freed = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&freed);
    allocator.observe(move |event| {
        if let Event::Freed { len, .. } = event {
            seen.fetch_add(len.count(), Ordering::Relaxed);
        }
    });
    let weak = Arc::downgrade(&allocator);
    allocator.on_shortage(move |_| {
        let block = held.lock().unwrap().take();
        block.is_some_and(|block| weak.upgrade().unwrap().free(block, stream).is_ok())
    });
    let block = allocator.malloc(pages(10), stream).unwrap();
    assert_eq!(count(&freed), pages(12).count());
    allocator.free(block, stream).unwrap();
}

#[test]
fn a_callback_knows_that_it_is_one() {
    let (allocator, stream) = limited(4);
    let (other, _) = limited(4);
    let seen = Arc::new(Mutex::new(None));
    let (note, weak) = (Arc::clone(&seen), [Arc::downgrade(&allocator), Arc::downgrade(&other)]);
    allocator.observe(move |_| {
        let inside = weak.each_ref().map(|weak| weak.upgrade().unwrap().is_in_callback());
        *note.lock().unwrap() = Some((vramp_alloc::observe::is_in_callback(), inside));
    });
    assert!(!vramp_alloc::observe::is_in_callback());
    let block = allocator.malloc(Bytes::new(1), stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), Some((true, [true, false])));
    assert!(!vramp_alloc::observe::is_in_callback() && !allocator.is_in_callback());
    allocator.free(block, stream).unwrap();
}

#[test]
fn callbacks_of_many_allocators_nest_up_to_a_bound() {
    let chain: Vec<_> = (0..40).map(|_| limited(8)).collect();
    let depth = Arc::new(AtomicU64::new(0));
    for pair in chain.windows(2) {
        let ((from, _), (to, on)) = (&pair[0], &pair[1]);
        let (to, on, depth) = (Arc::downgrade(to), *on, Arc::clone(&depth));
        from.observe(move |event| {
            if let Event::Allocated { .. } = event {
                depth.fetch_add(1, Ordering::Relaxed);
                let to = to.upgrade().unwrap();
                let block = to.malloc(Bytes::new(1), on).unwrap();
                to.free(block, on).unwrap();
            }
        });
    }
    let (first, on) = &chain[0];
    let block = first.malloc(Bytes::new(1), *on).unwrap();
    assert_eq!(count(&depth), 16);
    first.free(block, *on).unwrap();
}

// --- panics ---

/// A value that panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

#[test]
fn a_panicking_observer_loses_no_block_and_is_counted() {
    let (allocator, stream) = limited(64);
    let registration = allocator.observe(|event| {
        if let Event::Freed { .. } = event {
            std::panic::panic_any(Bomb);
        }
        panic!("an observer that gives up");
    });
    let sizes = [Bytes::new(100), Bytes::new(100), pages(4)];
    let blocks: Vec<_> = sizes.map(|size| allocator.malloc(size, stream).unwrap()).into();
    let tagged = allocator.malloc_tagged(pages(1), stream, allocator.tag("tagged")).unwrap();
    assert_eq!(allocator.stats().unwrap().placed, 4);
    for block in blocks.into_iter().chain([tagged]) {
        allocator.free(block, stream).unwrap();
    }
    let stats = allocator.stats().unwrap();
    assert_eq!((stats.live, stats.freed), (Bytes::ZERO, 4));
    assert!(stats.callback_panics >= 8, "{}", stats.callback_panics);
    assert!(allocator.unregister(registration));
    let before = panics(&allocator);
    let block = allocator.malloc(pages(1), stream).unwrap();
    allocator.free(block, stream).unwrap();
    assert_eq!(panics(&allocator), before);
    allocator.audit().unwrap();
}

#[test]
fn a_panicking_handler_frees_nothing_and_the_next_one_is_asked() {
    let config = Config { limit: Some(pages(16)), ..Config::default() };
    let rig = Rig::on(Simulator::builder(), config);
    let asked = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&asked);
    rig.allocator.on_shortage(|_| panic!("a handler that gives up"));
    rig.allocator.on_shortage(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        false
    });
    let error = rig.allocator.malloc(pages(17), rig.stream).unwrap_err();
    assert!(error.is_out_of_memory());
    assert_eq!((count(&asked), panics(&rig.allocator)), (1, 1));
    rig.close();
}

#[test]
fn a_panicking_stack_source_and_a_panicking_drop_are_counted() {
    let (allocator, stream) = limited(64);
    let source = || panic!("no stack today");
    let recording = allocator.record_history(HistorySize::default(), Some(Arc::new(source)));
    let block = allocator.malloc(Bytes::new(100), stream).unwrap();
    allocator.free(block, stream).unwrap();
    let events = allocator.snapshot(Some(&recording)).events;
    assert!(events.iter().all(|event| event.stack.is_none()));
    let so_far = panics(&allocator);
    assert!(so_far >= 2 && events.iter().any(|event| event.kind == EventKind::Alloc));
    assert!(allocator.stop_history(&recording));
    let bomb = Bomb;
    let registration = allocator.observe(move |_| {
        let _ = &bomb;
    });
    assert!(allocator.unregister(registration));
    assert_eq!(panics(&allocator), so_far + 1);
}

// --- what an event says ---

#[test]
fn a_block_is_stored_before_observers_hear_of_it() {
    let (allocator, stream) = limited(64);
    let table: Arc<Mutex<Vec<Allocation>>> = Arc::default();
    let (found, known) = (Arc::clone(&table), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&known);
    allocator.observe(move |event| {
        if let Event::Allocated { addr, len, requested, stream } = *event {
            let table = found.lock().unwrap();
            let block = table.iter().find(|block| block.addr() == addr).expect("it is stored");
            let block = (block.len(), block.requested(), block.stream());
            assert_eq!(block, (len, requested, stream));
            counted.fetch_add(1, Ordering::Relaxed);
        }
    });
    for size in [Bytes::new(100), pages(3), Bytes::new(100)] {
        let stored = allocator.malloc_with(size, stream, |block| {
            let addr = block.addr();
            table.lock().unwrap().push(block);
            addr
        });
        let block = table.lock().unwrap().pop().unwrap();
        assert_eq!(block.addr(), stored.unwrap());
        allocator.free(block, stream).unwrap();
    }
    assert_eq!((count(&known), panics(&allocator)), (3, 0));
    let refused = allocator.malloc_with(pages(65), stream, |_| panic!("there is no block"));
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
}

/// While an observer hears of a free, another thread allocates as much as there is: it must not get
/// the memory.
#[test]
fn a_free_is_told_before_the_memory_can_be_allocated_again() {
    for (size, foreign) in [(pages(8), false), (pages(8), true), (Bytes::kib(4), true)] {
        let config = Config { limit: Some(pages(8)), ..Config::default() };
        let driver: Arc<dyn Driver> = Arc::new(Simulator::builder().build());
        let allocator = Arc::new(Allocator::new(driver, config).unwrap());
        let (stream, other) =
            (allocator.create_stream().unwrap(), allocator.create_stream().unwrap());
        let block = allocator.malloc(size, stream).unwrap();
        let freed = block.addr();
        let weak: Weak<Allocator> = Arc::downgrade(&allocator);
        let told = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&told);
        allocator.observe(move |event| {
            let Event::Freed { addr, .. } = *event else { return };
            if addr != freed || seen.swap(true, Ordering::Relaxed) {
                return;
            }
            let allocator = weak.upgrade().unwrap();
            std::thread::spawn(move || {
                if let Ok(block) = allocator.malloc(size, stream) {
                    assert_ne!(block.addr(), freed, "it is still the other one's");
                    allocator.free(block, stream).unwrap();
                }
            })
            .join()
            .expect("the memory is not handed out");
        });
        allocator.free(block, if foreign { other } else { stream }).unwrap();
        assert!(told.load(Ordering::Relaxed));
        assert_eq!(panics(&allocator), 0);
        allocator.audit().unwrap();
    }
}

#[test]
fn a_refused_free_is_not_told() {
    let (allocator, stream) = limited(8);
    let (other, foreign) = limited(8);
    let told = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&told);
    allocator.observe(move |event| {
        counted.fetch_add(u64::from(matches!(event, Event::Freed { .. })), Ordering::Relaxed);
    });
    let theirs = other.malloc(pages(1), foreign).unwrap();
    assert!(allocator.free(theirs, stream).is_err());
    let block = allocator.malloc(pages(1), stream).unwrap();
    let unknown = StreamId::new(77);
    let refused = allocator.free(block, unknown).unwrap_err();
    let vramp_alloc::FreeError::UnknownStream { allocation, .. } = refused else {
        panic!("{refused}")
    };
    assert_eq!(count(&told), 0);
    allocator.free(allocation, stream).unwrap();
    assert_eq!(count(&told), 1);
}

#[test]
fn every_allocated_block_is_told_to_be_freed_once_also_one_kept_for_a_graph() {
    let rig = GraphRig::new();
    let live = Arc::new(Mutex::new(Vec::new()));
    let table = Arc::clone(&live);
    rig.base.allocator.observe(move |event| match *event {
        Event::Allocated { addr, .. } => table.lock().unwrap().push(addr),
        Event::Freed { addr, .. } => {
            let mut live = table.lock().unwrap();
            let index = live.iter().position(|known| *known == addr).expect("it is live");
            live.remove(index);
        }
        _ => {}
    });
    let arena = rig.arena();
    let before = rig.base.malloc(4);
    let captured = rig.base.allocator.capture(rig.a, &arena, || {
        let inside = rig.base.allocator.malloc(pages(1), rig.a).unwrap();
        rig.base.allocator.free(before, rig.a).unwrap();
        rig.base.allocator.free(inside, rig.a).unwrap();
    });
    assert!(live.lock().unwrap().is_empty());
    drop(captured.unwrap());
    assert!(live.lock().unwrap().is_empty());
    assert_eq!(panics(&rig.base.allocator), 0);
}

// --- the end of a callback ---

/// A callback that says that it began, and ends when it may.
fn gated() -> (impl Fn() + Send + Sync, Receiver<()>, Sender<()>) {
    let (begun, began) = channel();
    let (go, may_end) = channel();
    let gate = Mutex::new((begun, may_end));
    let wait = move || {
        let gate = gate.lock().unwrap();
        gate.0.send(()).unwrap();
        gate.1.recv_timeout(ENOUGH).unwrap();
    };
    (wait, began, go)
}

/// Says when it is dropped.
struct Told(Arc<AtomicBool>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_removed_callback_does_not_run_and_its_closure_is_dropped_when_unregister_returns() {
    for handles in [false, true] {
        let (allocator, stream) = patient(4, ENOUGH);
        let (wait, began, go) = gated();
        let (ended, dropped) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (note, told) = (Arc::clone(&ended), Told(Arc::clone(&dropped)));
        let run = move || {
            let _ = &told;
            wait();
            note.store(true, Ordering::SeqCst);
        };
        let registration = match handles {
            true => allocator.on_shortage(move |_| {
                run();
                false
            }),
            false => allocator.observe(move |event| {
                if let Event::Short(_) = event {
                    run();
                }
            }),
        };
        std::thread::scope(|scope| {
            // It waits for memory afterwards, until there is some.
            let held = allocator.malloc(pages(4), stream).unwrap();
            let request = scope.spawn(|| allocator.malloc(pages(4), stream).unwrap());
            began.recv_timeout(ENOUGH).unwrap();
            let removal = scope.spawn(|| {
                assert!(allocator.unregister(registration));
                (ended.load(Ordering::SeqCst), dropped.load(Ordering::SeqCst))
            });
            assert!(!ended.load(Ordering::SeqCst));
            allocator.free(held, stream).unwrap();
            go.send(()).unwrap();
            assert_eq!(removal.join().unwrap(), (true, true), "handles: {handles}");
            let block = request.join().unwrap();
            allocator.free(block, stream).unwrap();
        });
    }
}

#[test]
fn a_callback_that_removes_itself_is_dropped_by_its_last_call() {
    let (allocator, stream) = limited(4);
    let dropped = Arc::new(AtomicBool::new(false));
    let (weak, told) = (Arc::downgrade(&allocator), Told(Arc::clone(&dropped)));
    let own: Arc<Mutex<Option<Registration>>> = Arc::default();
    let (known, alive) = (Arc::clone(&own), Arc::clone(&dropped));
    let registration = allocator.observe(move |_| {
        let _ = &told;
        let own = known.lock().unwrap().take().expect("it is called once");
        assert!(weak.upgrade().unwrap().unregister(own));
        assert!(!alive.load(Ordering::SeqCst), "it runs");
    });
    *own.lock().unwrap() = Some(registration);
    let block = allocator.malloc(Bytes::new(1), stream).unwrap();
    assert!(dropped.load(Ordering::SeqCst));
    assert!(!allocator.unregister(registration));
    allocator.free(block, stream).unwrap();
    assert_eq!(panics(&allocator), 0);
}

#[test]
fn two_observers_that_remove_each_other_at_the_same_time_do_not_wait() {
    let (allocator, _) = limited(64);
    let registrations: Arc<Mutex<Vec<Registration>>> = Arc::default();
    let both = Arc::new(std::sync::Barrier::new(2));
    for index in 0..2usize {
        let (known, both) = (Arc::clone(&registrations), Arc::clone(&both));
        let weak = Arc::downgrade(&allocator);
        let registration = allocator.observe(move |event| {
            let Event::Allocated { requested, .. } = event else { return };
            // Thread `index` calls observer `index` only.
            if requested.count() != 100 + index as u64 {
                return;
            }
            both.wait();
            let other = known.lock().unwrap()[1 - index];
            assert!(weak.upgrade().unwrap().unregister(other));
        });
        registrations.lock().unwrap().push(registration);
    }
    finishes({
        let allocator = Arc::clone(&allocator);
        move || {
            std::thread::scope(|scope| {
                for index in 0..2 {
                    let allocator = &allocator;
                    scope.spawn(move || {
                        let stream = allocator.create_stream().unwrap();
                        let block = allocator.malloc(Bytes::new(100 + index), stream).unwrap();
                        allocator.free(block, stream).unwrap();
                    });
                }
            });
        }
    });
    assert_eq!(panics(&allocator), 0);
}

#[test]
fn no_call_begins_after_unregister_returned() {
    let (allocator, _) = limited(64);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let stream = allocator.create_stream().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let block = allocator.malloc(Bytes::new(64), stream).unwrap();
                    allocator.free(block, stream).unwrap();
                }
            });
        }
        for _ in 0..2000 {
            let alive = Arc::new(AtomicBool::new(true));
            let seen = Arc::clone(&alive);
            let registration = allocator.observe(move |_| assert!(seen.load(Ordering::SeqCst)));
            assert!(allocator.unregister(registration));
            alive.store(false, Ordering::SeqCst);
            assert_eq!(Arc::strong_count(&alive), 1, "the closure is gone");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(panics(&allocator), 0);
}

#[test]
fn callbacks_go_with_their_allocator_and_may_own_another_pool_of_its_group() {
    finishes(|| {
        let sim = Arc::new(Simulator::builder().build());
        let allocator = Allocator::new(Arc::clone(&sim) as _, Config::default()).unwrap();
        let arena = allocator.graph_arena(Default::default()).unwrap();
        let alive = Arc::new(());
        let pool = allocator.create_pool("of a closure").unwrap();
        let held = Arc::clone(&alive);
        allocator.observe(move |_| {
            assert!(pool.live().is_zero() && Arc::strong_count(&held) > 0);
        });
        let held = Arc::clone(&alive);
        allocator.on_shortage(move |_| Arc::strong_count(&held) == 0);
        allocator.close().unwrap();
        assert_eq!(Arc::strong_count(&alive), 1, "the arena lives, the closures do not");
        drop(arena);
        assert_eq!(sim.live(), LiveObjects::default());
    });
}

// --- drivers that panic ---

/// A device whose launches panic once.
struct PanickingLaunch {
    sim: Arc<Simulator>,
    panics: AtomicBool,
}

impl Wrapper for PanickingLaunch {
    type Device = Simulator;

    fn device(&self) -> &Simulator {
        &self.sim
    }

    fn launch_graph(&self, graph: GraphExec, stream: Stream) -> DriverResult<()> {
        assert!(!self.panics.swap(false, Ordering::Relaxed), "a bug of the driver");
        self.sim.launch_graph(graph, stream)
    }
}

#[test]
fn a_driver_that_panics_in_a_launch_ends_the_lease_and_hangs_nothing() {
    finishes(|| {
        let sim = Arc::new(Simulator::builder().build());
        let driver = Wrapped(PanickingLaunch { sim, panics: AtomicBool::new(true) });
        let allocator = Allocator::new(Arc::new(driver), Config::default()).unwrap();
        let (a, b) = (allocator.create_stream().unwrap(), allocator.create_stream().unwrap());
        let arena = allocator.graph_arena(Default::default()).unwrap();
        let captured = allocator.capture(a, &arena, || {
            let block = allocator.malloc(pages(1), a).unwrap();
            allocator.free(block, a).unwrap();
        });
        let (graph, ()) = captured.unwrap();
        let launch = || drop(graph.launch(a));
        let launched = std::panic::catch_unwind(std::panic::AssertUnwindSafe(launch));
        assert!(launched.is_err());
        drop(graph.launch(b).expect("no lease is left"));
        allocator.audit().unwrap();
    });
}

// --- relievers ---

/// Frees one block with each call, and logs.
struct OneByOne {
    allocator: Weak<Allocator>,
    stream: StreamId,
    blocks: Arc<Mutex<Vec<Allocation>>>,
    log: Arc<Mutex<Vec<&'static str>>>,
}

impl Reliever for OneByOne {
    fn free(&mut self, _: &Shortage) -> bool {
        self.log.lock().unwrap().push("free");
        let Some(block) = self.blocks.lock().unwrap().pop() else { return false };
        self.allocator.upgrade().unwrap().free(block, self.stream).unwrap();
        true
    }
}

impl Drop for OneByOne {
    fn drop(&mut self) {
        self.log.lock().unwrap().push("end");
    }
}

#[test]
fn a_reliever_goes_on_alone_until_its_request_has_ended() {
    let (allocator, stream) = limited(16);
    let blocks: Vec<_> = (0..3).map(|_| allocator.malloc(pages(4), stream).unwrap()).collect();
    let (blocks, log) = (Arc::new(Mutex::new(blocks)), Arc::new(Mutex::new(Vec::new())));
    let (weak, free, logged) = (Arc::downgrade(&allocator), Arc::clone(&blocks), Arc::clone(&log));
    let reliever = allocator.relieve_shortages(move |request| {
        logged.lock().unwrap().push("begin");
        assert!(!request.backs_range);
        let (allocator, blocks) = (Weak::clone(&weak), Arc::clone(&free));
        Box::new(OneByOne { allocator, stream, blocks, log: Arc::clone(&logged) })
    });
    let logged = Arc::clone(&log);
    // Handlers come first, also if they were registered later.
    allocator.on_shortage(move |_| {
        logged.lock().unwrap().push("handler");
        false
    });
    let taken = || std::mem::take(&mut *log.lock().unwrap());

    let block = allocator.malloc(pages(12), stream).unwrap();
    assert_eq!(taken(), ["handler", "begin", "free", "free", "end"]);
    let tried = allocator.malloc(pages(12), stream);
    assert!(tried.is_err());
    // Once it frees nothing handlers may, and once more after the wait for work.
    let again = ["handler", "begin", "free", "end"];
    let first = ["handler", "begin", "free", "free", "end"];
    assert_eq!(taken(), [&first[..], &again, &again].concat());
    assert!(allocator.unregister(reliever) && !allocator.unregister(reliever));
    assert!(allocator.malloc(pages(12), stream).is_err());
    assert_eq!((taken(), panics(&allocator)), (vec!["handler"], 0));
    allocator.free(block, stream).unwrap();
    allocator.audit().unwrap();
}

#[test]
fn a_reliever_that_panics_frees_nothing_and_ends() {
    struct Panics(Arc<AtomicU64>);
    impl Reliever for Panics {
        fn free(&mut self, _: &Shortage) -> bool {
            panic!("a bug of the reliever");
        }
    }
    impl Drop for Panics {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let (allocator, stream) = limited(4);
    let ends = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&ends);
    allocator.relieve_shortages(move |_| Box::new(Panics(Arc::clone(&counted))));
    let counted = Arc::clone(&ends);
    allocator.relieve_shortages_in_group(move |_| Some(Box::new(Panics(Arc::clone(&counted)))));
    assert!(allocator.malloc(pages(8), stream).is_err());
    assert_eq!((count(&ends), panics(&allocator)), (2, 2));
    allocator.audit().unwrap();
}
