//! When memory runs short: limits, pools, handlers, waiting, trimming, and the report at the end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{PAGE, Rig, pages, range};
use vramp_alloc::observe::Event;
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, Driver};
use vramp_driver::sim::{Kernel, Simulator};
use vramp_peers::Preset;

fn limited(count: u64) -> Rig {
    let config = Config { limit: Some(pages(count)), ..Config::default() };
    Rig::on(Simulator::builder(), config)
}

fn report_of(error: AllocError) -> vramp_alloc::error::OutOfMemoryReport {
    match error {
        AllocError::OutOfMemory(report) => *report,
        other => panic!("{other}"),
    }
}

#[test]
fn the_report_tells_who_holds_what_and_what_to_do() {
    let rig = limited(64);
    let other = rig.allocator.create_stream().expect("a stream can be made");
    let weights = rig.allocator.tag("weights");
    let tagged = rig.allocator.malloc_tagged(pages(20), rig.stream, weights);
    let tagged = tagged.expect("there is memory");
    let held = rig.malloc_on(30, other);
    let side = rig.allocator.create_pool("side").expect("a pool can be made");
    let aside = side.malloc(pages(8), rig.stream).expect("the limit leaves room");
    let error = rig.allocator.malloc(pages(40), rig.stream).expect_err("the limit is 64 pages");
    let text = error.to_string();
    let report = report_of(error);
    assert_eq!(report.shortage.requested, pages(40));
    assert_eq!(report.shortage.limit, Some(pages(64)));
    assert_eq!(report.pool, "main");
    assert_eq!(report.streams[0].stream, other);
    assert_eq!((report.tags[0].name.as_str(), report.tags[0].live), ("weights", pages(20)));
    assert_eq!((report.siblings[0].name.as_str(), report.siblings[0].reserved), ("side", pages(8)));
    for part in
        ["limit of 128.00 MiB", "raise the limit", "tag 'weights'", "pool 'side'", "stream1"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    side.free(aside, rig.stream).expect("it is the side pool's");
    rig.free(tagged);
    rig.free_on(held, other);
}

#[test]
fn a_limit_may_change_and_gives_back_what_is_idle() {
    let rig = limited(32);
    let block = rig.malloc(30);
    assert!(rig.allocator.malloc(pages(8), rig.stream).is_err());
    rig.allocator.set_limit(Some(pages(64))).expect("a limit can change");
    let more = rig.malloc(8);
    rig.free(more);
    rig.free(block);
    rig.sim.advance(1);
    rig.allocator.set_limit(Some(pages(16))).expect("a limit can change");
    assert!(rig.held() <= 16, "{}", rig.census());
    rig.allocator.set_memory_fraction(0.5).expect("half is a share");
    let half = rig.sim.info().limits.memory.count() / 2;
    assert_eq!(rig.allocator.limit(), Some(Bytes::new(half)));
    for bad in [-f64::MIN_POSITIVE, -1.0, 1.5, f64::NAN] {
        let error = rig.allocator.set_memory_fraction(bad).expect_err("that is no share");
        assert!(matches!(error, AllocError::Fraction(_)), "{error}");
    }
    assert_eq!(rig.allocator.limit(), Some(Bytes::new(half)), "a refused share changes nothing");
}

#[test]
fn a_fraction_of_zero_is_no_memory_until_it_is_raised() {
    let rig = limited(64);
    let (kept, idle) = (rig.malloc(8), rig.malloc(8));
    rig.free(idle);
    rig.sim.advance(1);
    rig.allocator.set_memory_fraction(0.0).expect("no memory is a share, as in PyTorch");
    assert_eq!(rig.allocator.limit(), Some(Bytes::ZERO));
    let held = rig.held();
    assert!(held >= 16, "nothing is released: {held}");
    let served = rig.malloc(8);
    let refused = rig.allocator.malloc(pages(held + 1), rig.stream);
    assert!(refused.expect_err("there is no more memory").is_out_of_memory());
    assert_eq!(rig.held(), held);
    rig.free(served);
    rig.free(kept);
    rig.allocator.set_memory_fraction(1.0).expect("all is a share");
    let block = rig.malloc(8);
    rig.free(block);
    rig.close();
}

#[test]
fn pools_of_their_own_share_streams_and_the_limit_and_go_as_one() {
    let rig = limited(64);
    let side = rig.allocator.create_pool("side").expect("a pool can be made");
    let kept: Vec<Allocation> =
        (0..4).map(|_| side.malloc(pages(10), rig.stream).expect("there is room")).collect();
    assert_eq!(rig.held(), 0, "isolated");
    let refused = rig.allocator.malloc(pages(30), rig.stream).expect_err("40 + 30 > 64");
    assert!(refused.is_out_of_memory());
    let foreign = kept.into_iter().next().expect("there are four");
    let refused = rig.allocator.free(foreign, rig.stream).expect_err("it is the side pool's");
    assert!(refused.to_string().contains("another allocator"));
    side.close().expect("nothing is in the way");
    let block = rig.malloc(60);
    rig.free(block);
    let late = rig.allocator.create_stream().expect("streams outlive a pool");
    let block = rig.malloc_on(3, late);
    rig.free_on(block, late);
    rig.close();
}

#[test]
fn idle_memory_of_another_pool_is_given_back_first() {
    let rig = limited(64);
    let side = rig.allocator.create_pool("side").expect("a pool can be made");
    let block = side.malloc(pages(50), rig.stream).expect("there is room");
    assert!(rig.allocator.malloc(pages(40), rig.stream).is_err(), "it is in use there");
    side.free(block, rig.stream).expect("it is the side pool's");
    rig.sim.advance(1);
    let block = rig.malloc(40);
    assert_eq!(side.stats().expect("no call fails").reserved, Bytes::ZERO);
    rig.free(block);
}

#[test]
fn a_handler_is_asked_before_a_request_fails_and_may_use_the_allocator() {
    let sim = Arc::new(Simulator::builder().build());
    let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
    let config = Config { limit: Some(pages(16)), ..Config::default() };
    let allocator = Arc::new(Allocator::new(driver, config).expect("it can be made"));
    let stream = allocator.create_stream().expect("a stream can be made");
    let cache = Arc::new(Mutex::new(vec![
        allocator.malloc(pages(8), stream).expect("there is room"),
        allocator.malloc(pages(8), stream).expect("there is room"),
    ]));
    let asked = Arc::new(AtomicU64::new(0));
    let registration = allocator.on_shortage({
        let (allocator, cache, asked) =
            (Arc::downgrade(&allocator), Arc::clone(&cache), Arc::clone(&asked));
        move |shortage| {
            assert_eq!(shortage.requested, pages(12));
            asked.fetch_add(1, Ordering::Relaxed);
            let Some(block) = cache.lock().expect("no thread panicked").pop() else { return false };
            let allocator = allocator.upgrade().expect("the allocator asks");
            allocator.free(block, stream).expect("it is the allocator's");
            true
        }
    });
    let block = allocator.malloc(pages(12), stream).expect("two rounds free enough");
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    assert_eq!(allocator.memory_stats().expect("no call fails").num_alloc_retries, 2);
    assert!(allocator.malloc(pages(12), stream).is_err(), "the cache is empty");
    assert!(allocator.unregister(registration));
    assert!(!allocator.unregister(registration));
    allocator.free(block, stream).expect("it is the allocator's");
    assert_eq!(allocator.memory_stats().expect("no call fails").num_ooms, 1);
}

#[test]
fn one_handler_call_is_enough_where_the_block_that_it_frees_is_of_another_pool() {
    for preset in Preset::ALL {
        for wanted in [pages(32), pages(60)] {
            let config = Config { limit: Some(pages(500)), ..preset.config() };
            let rig = Rig::on(Simulator::builder(), config);
            let side = Arc::new(rig.allocator.create_pool("side").expect("a pool can be made"));
            let own: Vec<_> = (0..4).map(|_| rig.malloc(60)).collect();
            let of_side = |_| side.malloc(pages(60), rig.stream).expect("the limit leaves room");
            let cache = Arc::new(Mutex::new((0..4).map(of_side).collect::<Vec<_>>()));
            let calls = Arc::new(AtomicU64::new(0));
            rig.allocator.on_shortage({
                let (cache, calls, stream) = (Arc::clone(&cache), Arc::clone(&calls), rig.stream);
                let side = Arc::clone(&side);
                move |_| {
                    calls.fetch_add(1, Ordering::Relaxed);
                    let block = cache.lock().expect("no thread panicked").pop();
                    block.is_some_and(|block| side.free(block, stream).is_ok())
                }
            });
            let block = rig.allocator.malloc(wanted, rig.stream);
            let block = block.unwrap_or_else(|error| panic!("{}: {error}", preset.name()));
            assert_eq!(calls.load(Ordering::Relaxed), 1, "{} {wanted}", preset.name());
            own.into_iter().chain([block]).for_each(|block| rig.free(block));
        }
    }
}

#[test]
fn a_patient_request_gets_what_is_freed_in_another_pool_meanwhile() {
    let patience = Duration::from_millis(300);
    let rig = Rig::on(Simulator::builder(), Config { patience, ..limited_config() });
    let side = rig.allocator.create_pool("side").expect("a pool can be made");
    let block = side.malloc(pages(12), rig.stream).expect("the limit leaves room");
    let (held, shortages) = (Mutex::new(Some(block)), Arc::new(AtomicU64::new(0)));
    rig.allocator.observe({
        let (shortages, stream) = (Arc::clone(&shortages), rig.stream);
        move |event| {
            if matches!(event, Event::Short(_)) && shortages.fetch_add(1, Ordering::Relaxed) == 1 {
                let block = held.lock().expect("no thread panicked").take();
                side.free(block.expect("it is freed once"), stream).expect("it is its pool's");
            }
        }
    });
    let block = rig.malloc(12);
    assert_eq!(shortages.load(Ordering::Relaxed), 2, "the next attempt finds it");
    rig.free(block);
}

#[test]
fn a_patient_request_waits_for_another_thread_and_not_for_ever() {
    let config =
        Config { limit: Some(pages(16)), patience: Duration::from_secs(20), ..Config::default() };
    let rig = Rig::on(Simulator::builder(), config);
    let block = rig.malloc(12);
    let (sender, shortages) = std::sync::mpsc::channel();
    rig.allocator.observe(move |event| {
        if matches!(event, Event::Short(_)) {
            sender.send(()).expect("the test keeps the receiver");
        }
    });
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.allocator.malloc(pages(12), rig.stream));
        // The request waits between its attempts, so the second shortage shows that it waited.
        (0..2).for_each(|_| shortages.recv().expect("the request finds no memory"));
        rig.allocator.free(block, rig.stream).expect("it is the allocator's");
        let late = waiter.join().expect("no panic").expect("the memory came back");
        rig.allocator.free(late, rig.stream).expect("it is the allocator's");
    });
    assert!(begun.elapsed() < Duration::from_secs(10), "it was woken");
    assert_free_takes_no_lock(&rig);
    let hasty = Config { patience: Duration::from_millis(30), ..limited_config() };
    let rig = Rig::on(Simulator::builder(), hasty);
    let begun = Instant::now();
    assert!(rig.allocator.malloc(pages(17), rig.stream).is_err());
    assert!(begun.elapsed() >= Duration::from_millis(30));
    assert_free_takes_no_lock(&rig);
}

/// A free with the allocator's lock puts nothing into the thread's cache.
fn assert_free_takes_no_lock(rig: &Rig) {
    rig.allocator.trim(Bytes::ZERO).expect("no call fails");
    for _ in 0..2 {
        let small = rig.allocator.malloc(Bytes::new(512), rig.stream).expect("there is memory");
        rig.allocator.free(small, rig.stream).expect("it is the allocator's");
    }
    // A large block may be there too.
    assert!(rig.census().at_hand >= Bytes::new(512), "no request waits any more");
}

#[test]
fn while_a_request_waits_frees_take_the_lock() {
    let config =
        Config { limit: Some(pages(16)), patience: Duration::from_secs(20), ..Config::default() };
    let rig = Rig::on(Simulator::builder(), config);
    let block = rig.malloc(12);
    let small = rig.allocator.malloc(Bytes::new(512), rig.stream).expect("there is memory");
    let (sender, shortages) = std::sync::mpsc::channel();
    let registration = rig.allocator.observe(move |event| {
        if matches!(event, Event::Short(_)) {
            sender.send(()).expect("the test keeps the receiver");
        }
    });
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.allocator.malloc(pages(12), rig.stream));
        (0..2).for_each(|_| shortages.recv().expect("the request finds no memory"));
        assert!(rig.allocator.unregister(registration));
        rig.allocator.free(small, rig.stream).expect("it is the allocator's");
        assert_eq!(rig.census().at_hand, Bytes::ZERO, "the free of 512 B took the lock");
        rig.allocator.free(block, rig.stream).expect("it is the allocator's");
        let late = waiter.join().expect("no panic").expect("the memory came back");
        rig.allocator.free(late, rig.stream).expect("it is the allocator's");
    });
    assert_free_takes_no_lock(&rig);
}

fn limited_config() -> Config {
    Config { limit: Some(pages(16)), ..Config::default() }
}

#[test]
fn garbage_is_given_back_above_the_threshold() {
    let config = Config {
        limit: Some(pages(100)),
        garbage_collection_threshold: Some(0.3),
        ..Config::default()
    };
    // A remap serves the request from half of what is idle; the other half is garbage.
    let held_after_a_remap = |config: Config| {
        let rig = Rig::on(Simulator::builder(), config);
        let blocks = [20, 1, 20, 1, 20, 1].map(|count| rig.malloc(count));
        let [first, _one, second, _two, third, _three] = blocks;
        for block in [first, second, third] {
            rig.free(block);
        }
        let _large = rig.malloc(30);
        rig.held()
    };
    let kept = held_after_a_remap(Config { garbage_collection_threshold: None, ..config.clone() });
    let collected = held_after_a_remap(config.clone());
    assert!(kept >= 63, "{kept}");
    assert!(collected < kept && collected >= 33, "{collected} of {kept}");
    for bad in [0.0, 1.0, -0.5, f64::NAN] {
        let config = Config { garbage_collection_threshold: Some(bad), ..config.clone() };
        let driver: Arc<dyn Driver> = Arc::new(Simulator::builder().build());
        let error = Allocator::new(driver, config).expect_err("that is no share");
        assert!(error.to_string().contains("between 0 and 1"), "{error}");
    }
}

#[test]
fn observers_hear_of_everything_and_may_allocate() {
    let rig = limited(40);
    let log = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&log);
    let registration = rig.allocator.observe(move |event| {
        let word = match event {
            Event::Allocated { .. } => "allocated",
            Event::Freed { .. } => "freed",
            Event::Grown { .. } => "grown",
            Event::Shrunk { .. } => "shrunk",
            Event::Remapped { .. } => "remapped",
            Event::Short(_) => "short",
            Event::OutOfMemory(_) => "out of memory",
            _ => "new",
        };
        sink.lock().expect("no thread panicked").push(word);
    });
    let words = |log: &Mutex<Vec<&'static str>>| std::mem::take(&mut *log.lock().expect("whole"));
    let blocks = [8, 8, 8, 8].map(|count| rig.malloc(count));
    let heard = words(&log);
    assert_eq!(heard.iter().filter(|word| **word == "allocated").count(), 4);
    assert!(heard.contains(&"grown"), "{heard:?}");
    let [first, second, third, fourth] = blocks;
    rig.free(first);
    rig.free(third);
    assert_eq!(words(&log), ["freed", "freed"]);
    let moved = rig.malloc(16);
    assert!(words(&log).contains(&"remapped"));
    let _ = rig.allocator.malloc(pages(64), rig.stream).expect_err("beyond the limit");
    assert_eq!(words(&log), ["short", "out of memory"]);
    for block in [second, fourth, moved] {
        rig.free(block);
    }
    rig.sim.advance(1);
    rig.allocator.empty_cache().expect("nothing fails");
    assert!(words(&log).contains(&"shrunk"));
    let small = rig.allocator.malloc(Bytes::new(100), rig.stream).expect("there is memory");
    rig.allocator.free(small, rig.stream).expect("it is ours");
    let small = rig.allocator.malloc(Bytes::new(100), rig.stream).expect("it is cached");
    let heard = words(&log);
    assert_eq!(heard.iter().filter(|word| **word == "allocated").count(), 2, "{heard:?}");
    assert!(rig.allocator.unregister(registration));
    rig.allocator.free(small, rig.stream).expect("it is ours");
    assert!(words(&log).is_empty());
}

#[test]
fn memory_of_a_finished_thread_returns_to_all() {
    let rig = Rig::new(Preset::Vramp);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let stream = rig.allocator.create_stream().expect("a stream can be made");
            let blocks: Vec<Allocation> = (1..200)
                .map(|n| rig.allocator.malloc(Bytes::kib(n * 7), stream).expect("there is memory"))
                .collect();
            for block in blocks {
                rig.allocator.free(block, stream).expect("it is ours");
            }
        });
        // Joined and not only awaited: what a thread leaves behind comes at its very end.
        thread.join().expect("no panic");
    });
    assert_eq!(rig.allocator.live(), Bytes::ZERO);
    assert_eq!(rig.census().at_hand, Bytes::ZERO);
    rig.sim.advance(1);
    let block = rig.malloc(rig.held());
    let created = rig.allocator.stats().expect("no call fails").chunks_created;
    rig.free(block);
    assert_eq!(rig.allocator.stats().expect("no call fails").chunks_created, created);
    rig.allocator.empty_cache().expect("nothing fails");
    assert_eq!(rig.held(), 0);
}

#[test]
fn the_last_page_is_found_wherever_it_hides() {
    // Free memory in a heap, at another thread's hand, of another stream, and in pieces: one block
    // takes it all, under a limit that leaves nothing else.
    let rig = limited(32);
    let other = rig.allocator.create_stream().expect("a stream can be made");
    let mut blocks = Vec::new();
    for n in 0..16 {
        let stream = if n % 2 == 0 { rig.stream } else { other };
        blocks.push((rig.malloc_on(1, stream), stream));
        let small = rig.allocator.malloc(Bytes::kib(300), stream).expect("there is memory");
        blocks.push((small, stream));
    }
    std::thread::scope(|scope| {
        let allocator = &rig.allocator;
        scope.spawn(move || {
            for (block, stream) in blocks {
                allocator.free(block, stream).expect("it is ours");
            }
        });
    });
    rig.sim.advance(1);
    let all = rig.malloc(32);
    assert_eq!(all.len(), PAGE * 32);
    rig.free(all);
}

#[test]
fn work_on_freed_memory_of_another_pool_is_waited_for_before_a_request_fails() {
    let rig = limited(32);
    let other = rig.allocator.create_pool("other").expect("it is possible");
    let kernel = |name: &'static str| Kernel::new(name).lasting(10_000_000);
    let turn = |allocator: &Allocator, kernel: Kernel| {
        let block = allocator.malloc(pages(30), rig.stream);
        if let Ok(block) = block {
            let work = kernel.writing(range(&block));
            rig.sim.launch(rig.raw(rig.stream), work).expect("the block is mapped");
            allocator.free(block, rig.stream).expect("it is the pool's");
            return true;
        }
        false
    };
    for _ in 0..4 {
        assert!(turn(&rig.allocator, kernel("one")), "the work of the other pool ends");
        assert!(turn(&other, kernel("two")), "the work of the other pool ends");
    }
    // Work that waits for the caller never ends: the request fails, and nothing is lost.
    let gate = rig.sim.gate();
    assert!(turn(&rig.allocator, kernel("gated").until(gate)));
    assert!(!turn(&other, kernel("none")));
    rig.sim.open(gate);
    assert!(turn(&other, kernel("last")));
    other.audit().expect("every invariant holds");
    rig.allocator.audit().expect("every invariant holds");
}

#[test]
fn handlers_that_come_first_are_called_alone_if_they_free_something() {
    let sim: Arc<dyn Driver> = Arc::new(Simulator::builder().build());
    let config = Config { limit: Some(pages(16)), ..Config::default() };
    let allocator = Arc::new(Allocator::new(sim, config).expect("the configuration is possible"));
    let stream = allocator.create_stream().expect("a stream can be made");
    let held = Mutex::new(Some(allocator.malloc(pages(10), stream).expect("there is room")));
    let called = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&called);
    allocator.on_shortage(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        false
    });
    let weak = Arc::downgrade(&allocator);
    let first = allocator.on_shortage_first(move |_| {
        let block = held.lock().expect("no thread panicked").take();
        let allocator = weak.upgrade().expect("a request runs");
        block.is_some_and(|block| allocator.free(block, stream).is_ok())
    });
    let block = allocator.malloc(pages(12), stream).expect("the first handler frees 10 pages");
    assert_eq!(called.load(Ordering::Relaxed), 0);
    assert!(allocator.malloc(pages(12), stream).is_err());
    assert!(called.load(Ordering::Relaxed) > 0, "the first one had nothing to free");
    assert!(allocator.unregister(first) && !allocator.unregister(first));
    allocator.free(block, stream).expect("it is the allocator's");
}
