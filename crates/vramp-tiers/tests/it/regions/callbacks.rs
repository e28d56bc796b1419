//! Callbacks around a sleep: what others know of memory ends before it leaves, and is made again.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};

use vramp_alloc::observe::{Registration, is_in_callback};
use vramp_alloc::sharing::{PinnedRange, range_of};
use vramp_alloc::sleep::SleepError;
use vramp_alloc::{Allocation, Driver};
use vramp_driver::CaptureMode;
use vramp_driver::sim::FaultPlan;
use vramp_testing::fail_each_call;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::regions::{
    PauseOptions, Phase, Region, RegionError, RegionOptions, Regions, SleepCallbacks,
};
use vramp_tiers::{Bytes, Mover};

use super::{Rig, pause, rig};
use crate::common::blocks::MIB;

type Log = Arc<Mutex<Vec<String>>>;

/// Registers a pair that notes its calls.
fn note(rig: &Rig, log: &Log, name: &str, tags: &[&str]) -> Registration {
    let [before, after] = ["-", "+"].map(|sign| {
        let (log, text) = (Arc::clone(log), format!("{sign}{name}"));
        move || {
            log.lock().unwrap().push(text.clone());
            Ok(())
        }
    });
    rig.regions.callbacks().add(SleepCallbacks {
        tags: (!tags.is_empty()).then(|| tags.iter().map(|&tag| tag.to_owned()).collect()),
        before: Box::new(before),
        after: Box::new(after),
        ..SleepCallbacks::named(name)
    })
}

fn taken(log: &Log) -> String {
    std::mem::take(&mut *log.lock().unwrap()).join(" ")
}

/// Registers a pair of which `before` or `after` fails while the switch is on.
fn failing(rig: &Rig, log: &Log, name: &str, before: bool) -> Arc<AtomicBool> {
    let fails = Arc::new(AtomicBool::new(true));
    let [first, second] = [("-", before), ("+", !before)].map(|(sign, is_it)| {
        let (log, fails, text) = (Arc::clone(log), Arc::clone(&fails), format!("{sign}{name}"));
        move || {
            log.lock().unwrap().push(text.clone());
            match is_it && fails.load(Ordering::Relaxed) {
                true => Err("the peer is gone".into()),
                false => Ok(()),
            }
        }
    });
    rig.regions.callbacks().add(SleepCallbacks {
        before: Box::new(first),
        after: Box::new(second),
        ..SleepCallbacks::named(name)
    });
    fails
}

/// Pins memory as a library that registered it, and lets the region sleep by a pair that ends the pin.
fn register(rig: &Rig, region: &Arc<Region>, block: &Allocation) -> Registration {
    let (region, range) = (Arc::clone(region), range_of(block));
    let pin: Arc<Mutex<Option<PinnedRange>>> =
        Arc::new(Mutex::new(Some(region.allocator().pin_range(range).unwrap())));
    let held = Arc::clone(&pin);
    rig.regions.callbacks().add(SleepCallbacks {
        tags: Some(vec![region.tag().to_owned()]),
        before: Box::new(move || {
            drop(held.lock().unwrap().take().ok_or("it was not registered")?);
            Ok(())
        }),
        after: Box::new(move || {
            *pin.lock().unwrap() = Some(region.allocator().pin_range(range)?);
            Ok(())
        }),
        ..SleepCallbacks::named("window")
    })
}

#[test]
fn a_region_with_pins_sleeps_once_callbacks_ended_them() {
    let rig = rig(Bytes::mib(128));
    let region = rig.region("weights", RegionOptions::default());
    let block = rig.block(&region, MIB * 20, 3);
    let registration = register(&rig, &region, &block);
    for _ in 0..3 {
        pause(&rig, "weights", Bytes::ZERO).unwrap();
        assert_eq!((region.status().on_card, region.allocator().pinned().0), (Bytes::ZERO, 0));
        rig.regions.resume(&["weights"]).unwrap();
        assert!(region.allocator().pinned().0 > 0);
        rig.holds(&block, 3);
    }
    assert!(rig.regions.callbacks().remove(registration));
    assert!(!rig.regions.callbacks().remove(registration), "once");
    // The closures are gone, and the pin with them.
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!(rig.card.hazards(), []);
}

#[test]
fn they_are_called_in_order_before_and_in_reverse_after() {
    let rig = rig(Bytes::mib(64));
    let _regions = ["a", "b"].map(|tag| {
        let region = rig.region(tag, RegionOptions::default());
        (rig.block(&region, MIB * 4, 1), region)
    });
    let log = Log::default();
    note(&rig, &log, "all", &[]);
    note(&rig, &log, "a", &["a"]);
    note(&rig, &log, "b", &["b"]);
    note(&rig, &log, "both", &["a", "b", "none"]);
    rig.regions.resume(&["a", "b"]).unwrap();
    assert_eq!(taken(&log), "");
    pause(&rig, "b", MIB * 2).unwrap();
    assert_eq!(taken(&log), "-all -b -both");
    // Further, and again: they were called.
    pause(&rig, "b", Bytes::ZERO).unwrap();
    rig.regions.pause(&["a", "b"], PauseOptions::default()).unwrap();
    assert_eq!(taken(&log), "-a");
    note(&rig, &log, "late", &[]);
    rig.regions.pause(&["a", "b"], PauseOptions::default()).unwrap();
    rig.regions.resume(&["b"]).unwrap();
    assert_eq!(taken(&log), "+b");
    rig.regions.resume(&["b", "a"]).unwrap();
    assert_eq!(taken(&log), "+both +a +all");
    pause(&rig, "a", Bytes::ZERO).unwrap();
    rig.regions.resume(&["a"]).unwrap();
    assert_eq!(taken(&log), "-all -a -both -late +late +both +a +all");
}

#[test]
fn one_that_fails_before_leaves_everything_as_it_was() {
    let rig = rig(Bytes::mib(64));
    let region = rig.region("weights", RegionOptions::default());
    let block = rig.block(&region, MIB * 8, 1);
    let log = Log::default();
    note(&rig, &log, "first", &[]);
    note(&rig, &log, "second", &[]);
    let fails = failing(&rig, &log, "third", true);
    note(&rig, &log, "fourth", &[]);
    let on_card = rig.on_card();
    for _ in 0..2 {
        let refused = pause(&rig, "weights", Bytes::ZERO).unwrap_err();
        let text = "no memory left, because the callback \"third\": the peer is gone";
        assert_eq!(refused.to_string(), text);
        assert!(matches!(refused, RegionError::Before(failed) if failed.name == "third"));
        assert_eq!(taken(&log), "-first -second -third +second +first");
        assert_eq!((region.status().phase, rig.on_card()), (Phase::Awake, on_card));
    }
    fails.store(false, Ordering::Relaxed);
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    assert_eq!(taken(&log), "-first -second -third -fourth +fourth +third +second +first");
    rig.holds(&block, 1);
}

#[test]
fn one_that_fails_after_is_called_again_by_the_next_resume() {
    let rig = rig(Bytes::mib(64));
    let region = rig.region("weights", RegionOptions::default());
    let block = rig.block(&region, MIB * 8, 1);
    let log = Log::default();
    note(&rig, &log, "first", &[]);
    let fails = failing(&rig, &log, "second", false);
    note(&rig, &log, "third", &[]);
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!(taken(&log), "-first -second -third");
    for calls in ["+third +second +first", "+second"] {
        let failed = rig.regions.resume(&["weights"]).unwrap_err();
        let text = "the memory is back, and then failed the callback \"second\": the peer is gone: \
                    resume again, which calls it again";
        assert_eq!(failed.to_string(), text);
        assert!(matches!(failed, RegionError::After { .. }));
        assert_eq!((taken(&log).as_str(), region.status().phase), (calls, Phase::Awake));
    }
    rig.holds(&block, 1);
    // It is out, so its `before` is not called a second time.
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!(taken(&log), "-first -third");
    fails.store(false, Ordering::Relaxed);
    rig.regions.resume(&["weights"]).unwrap();
    rig.regions.resume(&["weights"]).unwrap();
    assert_eq!(taken(&log), "+third +second +first");
}

#[test]
fn a_pause_that_fails_later_is_undone() {
    let rig = rig(Bytes::mib(8));
    let [small, large] = ["small", "large"].map(|tag| rig.region(tag, RegionOptions::default()));
    let blocks = [rig.block(&small, MIB * 2, 1), rig.block(&large, MIB * 40, 2)];
    let log = Log::default();
    note(&rig, &log, "all", &[]);
    note(&rig, &log, "large", &["large"]);
    let refused = rig.regions.pause(&["small", "large"], PauseOptions::default()).unwrap_err();
    assert!(matches!(refused, RegionError::HostFull { .. }), "{refused}");
    assert_eq!(taken(&log), "-all -large +large +all");
    let fails = failing(&rig, &log, "odd", false);
    let refused = rig.regions.pause(&["small", "large"], PauseOptions::default()).unwrap_err();
    assert!(refused.to_string().ends_with(
        "; and then failed the callback \"odd\": the peer is gone: a resume calls it again"
    ));
    let RegionError::AndAfter { error, failed } = refused else { panic!("{refused}") };
    assert!(matches!(*error, RegionError::HostFull { .. }), "{error}");
    assert_eq!((failed.len(), failed[0].name.as_str()), (1, "odd"));
    assert_eq!(taken(&log), "-all -large -odd +odd +large +all");
    fails.store(false, Ordering::Relaxed);
    rig.regions.resume(&["small"]).unwrap();
    assert_eq!(taken(&log), "+odd");
    assert!([&small, &large].iter().all(|region| region.status().phase == Phase::Awake));
    rig.holds(&blocks[0], 1);
    rig.holds(&blocks[1], 2);
    // A pin that no callback ends.
    let _pin = small.allocator().pin_range(range_of(&blocks[0])).unwrap();
    let refused = pause(&rig, "small", Bytes::ZERO).unwrap_err();
    let pinned = matches!(refused, RegionError::NotNow { error: SleepError::Pinned { .. }, .. });
    assert!(pinned, "{refused}");
    assert_eq!(taken(&log), "-all -odd +odd +all");
}

#[test]
fn a_resume_that_fails_calls_none_whose_memory_is_away() {
    let rig = rig(Bytes::mib(256));
    let [back, away] = ["back", "away"].map(|tag| rig.region(tag, RegionOptions::default()));
    let _blocks = [rig.block(&back, MIB * 8, 1), rig.block(&away, MIB * 100, 2)];
    let log = Log::default();
    let _ = ["back", "away"].map(|tag| note(&rig, &log, tag, &[tag]));
    note(&rig, &log, "all", &[]);
    rig.regions.pause(&["back", "away"], PauseOptions::default()).unwrap();
    let other = rig.allocator.malloc(MIB * 200, rig.stream).unwrap();
    taken(&log);
    let refused = rig.regions.resume(&["back", "away"]).unwrap_err();
    assert!(matches!(refused, RegionError::Memory { .. }), "{refused}");
    assert_eq!(taken(&log), "+back");
    rig.allocator.free(other, rig.stream).unwrap();
    rig.regions.resume(&["away"]).unwrap();
    assert_eq!(taken(&log), "+all +away");
}

#[test]
fn under_pressure_they_are_called_and_collective_ones_keep_their_region() {
    let rig = rig(Bytes::mib(256));
    let tags = ["shared", "refused", "third"];
    let regions = tags.map(|tag| rig.region(tag, RegionOptions::default()));
    let blocks = [1, 2, 3].map(|n| rig.block(&regions[usize::from(n) - 1], MIB * 60, n));
    let log = Log::default();
    let collective = rig.regions.callbacks().add(SleepCallbacks {
        tags: Some(vec!["shared".to_owned()]),
        is_collective: true,
        before: Box::new(|| panic!("the other processes do not pause")),
        ..SleepCallbacks::named("communicator")
    });
    rig.regions.callbacks().add(SleepCallbacks {
        tags: Some(vec!["refused".to_owned()]),
        before: Box::new(|| Err("it is in use".into())),
        ..SleepCallbacks::named("in use")
    });
    note(&rig, &log, "third", &["third"]);
    let handler = rig.regions.on_pressure(&rig.allocator, &tags).unwrap();
    let more = rig.allocator.malloc(MIB * 100, rig.stream).unwrap();
    let phases = regions.each_ref().map(|region| region.status().phase);
    assert_eq!(phases, [Phase::Awake, Phase::Awake, Phase::Asleep]);
    assert_eq!(taken(&log), "-third");
    // Another process has no memory for it either.
    assert!(rig.allocator.malloc(MIB * 100, rig.stream).is_err());
    assert!(rig.regions.callbacks().remove(collective));
    rig.allocator.free(more, rig.stream).unwrap();
    rig.regions.resume(&["third"]).unwrap();
    assert_eq!(taken(&log), "+third");
    rig.regions.pause(&["third"], PauseOptions::default()).unwrap();
    let more = rig.allocator.malloc(MIB * 100, rig.stream).unwrap();
    // A resume that is short makes another region sleep, by the callbacks of that one.
    taken(&log);
    note(&rig, &log, "shared", &["shared"]);
    rig.regions.resume(&["third"]).unwrap();
    assert_eq!(taken(&log), "-shared +third");
    assert_eq!(regions[0].status().phase, Phase::Asleep);
    rig.allocator.free(more, rig.stream).unwrap();
    rig.regions.resume(&tags).unwrap();
    assert_eq!(taken(&log), "+shared");
    (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
    rig.allocator.unregister(handler);
    assert_eq!(rig.allocator.stats().unwrap().callback_panics, 0);
}

#[test]
fn a_callback_allocates_and_registers_but_moves_and_reads_no_region() {
    let rig = Arc::new(rig(Bytes::mib(64)));
    let region = rig.region("weights", RegionOptions::default());
    let block = rig.block(&region, MIB * 8, 1);
    let added = Arc::new(AtomicUsize::new(0));
    let made: Arc<OnceLock<Allocation>> = Arc::default();
    let (inside, count) = (Arc::downgrade(&rig), Arc::clone(&added));
    let (place, range) = (Arc::clone(&made), range_of(&block));
    let own: Arc<OnceLock<Registration>> = Arc::default();
    let own_number = Arc::clone(&own);
    let registration = rig.regions.callbacks().add(SleepCallbacks {
        before: Box::new(move || {
            let rig = inside.upgrade().unwrap();
            assert!(is_in_callback() && rig.allocator.is_in_callback());
            let refused = [
                pause(&rig, "weights", Bytes::ZERO),
                rig.regions.resume(&["weights"]),
                rig.regions.clean("weights"),
                rig.regions.prefetch("weights"),
                rig.regions.read_backup(range.start, &mut [0]),
                rig.regions.check_backup(range.start, Bytes::new(1)),
            ];
            for result in refused {
                assert!(matches!(result, Err(RegionError::InCallback)), "{result:?}");
            }
            let region = rig.regions.get("weights")?;
            assert_eq!(region.status().phase, Phase::Awake);
            place.set(rig.block(&region, MIB * 2, 7)).unwrap();
            let region = rig.region("made inside", RegionOptions::default());
            region.allocator().free(rig.block(&region, MIB, 1), rig.stream)?;
            let count = Arc::clone(&count);
            rig.regions.callbacks().add(SleepCallbacks {
                before: Box::new(move || {
                    count.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                }),
                ..SleepCallbacks::named("added inside")
            });
            // It may go while it runs, and is not called any more.
            assert!(rig.regions.callbacks().remove(*own_number.get().unwrap()));
            Ok(())
        }),
        after: Box::new(|| panic!("it was removed")),
        ..SleepCallbacks::named("busy")
    });
    own.set(registration).unwrap();
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!(added.load(Ordering::Relaxed), 0, "from the next pause on");
    rig.regions.resume(&["weights"]).unwrap();
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!(added.load(Ordering::Relaxed), 1);
    rig.regions.resume(&["weights"]).unwrap();
    rig.holds(&block, 1);
    rig.holds(made.get().unwrap(), 7);
    assert!(!is_in_callback());
}

#[test]
fn a_panic_is_an_error_and_no_call_is_made_during_a_capture() {
    let rig = rig(Bytes::mib(64));
    let region = rig.region("weights", RegionOptions::default());
    let _block = rig.block(&region, MIB * 8, 1);
    let log = Log::default();
    note(&rig, &log, "first", &[]);
    let registration = rig.regions.callbacks().add(SleepCallbacks {
        before: Box::new(|| panic!("no peer")),
        ..SleepCallbacks::named("second")
    });
    let refused = pause(&rig, "weights", Bytes::ZERO).unwrap_err();
    assert!(
        matches!(&refused, RegionError::Before(failed) if failed.name == "second"),
        "{refused}"
    );
    assert_eq!(region.allocator().stats().unwrap().callback_panics, 1);
    assert_eq!(taken(&log), "-first +first");
    assert!(!is_in_callback());
    rig.regions.callbacks().remove(registration);
    let queue = rig.allocator.stream(rig.stream).unwrap();
    rig.card.begin_capture(queue, CaptureMode::Relaxed).unwrap();
    let refused = pause(&rig, "weights", Bytes::ZERO).unwrap_err();
    let captures =
        matches!(refused, RegionError::NotNow { error: SleepError::Captures { .. }, .. });
    assert!(captures, "{refused}");
    assert_eq!(taken(&log), "");
    rig.card.end_capture(queue).unwrap();
    pause(&rig, "weights", Bytes::ZERO).unwrap();
    assert_eq!(taken(&log), "-first");
}

#[test]
fn a_slow_callback_keeps_only_moves_of_what_it_covers_waiting() {
    let rig = rig(Bytes::mib(64));
    let [slow, other] = ["slow", "other"].map(|tag| rig.region(tag, RegionOptions::default()));
    let blocks = [rig.block(&slow, MIB * 4, 1), rig.block(&other, MIB * 4, 2)];
    let (begun, has_begun) = channel();
    let (go, may_go) = channel::<()>();
    let may_go = Mutex::new(may_go);
    let registration = rig.regions.callbacks().add(SleepCallbacks {
        tags: Some(vec!["slow".to_owned(), "second".to_owned()]),
        before: Box::new(move || {
            begun.send(()).unwrap();
            may_go.lock().unwrap().recv().unwrap();
            Ok(())
        }),
        ..SleepCallbacks::named("slow")
    });
    let second = rig.region("second", RegionOptions::default());
    let _second = rig.block(&second, MIB * 4, 3);
    let log = Log::default();
    note(&rig, &log, "fast", &["slow", "second"]);
    std::thread::scope(|scope| {
        let paused = scope.spawn(|| pause(&rig, "slow", Bytes::ZERO));
        has_begun.recv().unwrap();
        // Requests, frees, states, and moves of other regions go on.
        assert_eq!(slow.status().phase, Phase::Awake);
        let more = rig.block(&slow, MIB, 9);
        rig.holds(&more, 9);
        slow.allocator().free(more, rig.stream).unwrap();
        pause(&rig, "other", Bytes::ZERO).unwrap();
        rig.regions.resume(&["other", "slow"]).unwrap();
        // One of a region that it covers waits, and so does a removal.
        let waits = scope.spawn(|| pause(&rig, "second", Bytes::ZERO));
        let removed = scope.spawn(|| rig.regions.callbacks().remove(registration));
        assert_eq!((second.status().phase, taken(&log).as_str()), (Phase::Awake, ""));
        go.send(()).unwrap();
        paused.join().unwrap().unwrap();
        waits.join().unwrap().unwrap();
        assert!(removed.join().unwrap());
    });
    assert_eq!(taken(&log), "-fast", "once for both");
    rig.regions.resume(&["slow", "second"]).unwrap();
    assert_eq!(taken(&log), "+fast");
    rig.holds(&blocks[0], 1);
    rig.holds(&blocks[1], 2);
}

#[test]
fn whichever_driver_call_fails_callbacks_are_called_in_pairs() {
    let mut failed = 0;
    fail_each_call(|nth| {
        let rig = rig(Bytes::mib(64));
        let region = rig.region("weights", RegionOptions::default());
        let blocks: Vec<Allocation> = (1..=4).map(|n| rig.block(&region, MIB * 3, n)).collect();
        register(&rig, &region, &blocks[1]);
        register(&rig, &region, &blocks[3]);
        let before = rig.card.calls();
        rig.card.set_faults(FaultPlan::nth(nth));
        for keep in [MIB * 6, Bytes::ZERO] {
            if pause(&rig, "weights", keep).is_err() {
                failed += 1;
                let is_registered = region.allocator().pinned().0 > 0;
                assert_eq!(is_registered, region.status().phase == Phase::Awake);
            }
        }
        let resumed = rig.regions.resume(&["weights"]);
        rig.card.set_faults(FaultPlan::none());
        let calls = rig.card.calls() - before;
        failed += usize::from(resumed.is_err());
        rig.regions.resume(&["weights"]).unwrap();
        assert!(region.allocator().pinned().0 > 0);
        (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
        region.allocator().audit().unwrap();
        assert_eq!(rig.card.hazards(), [], "call {nth}");
        calls
    });
    assert!(failed > 5, "{failed} calls failed");
}

#[test]
fn a_region_that_is_removed_while_it_sleeps_keeps_no_callback_out() {
    let rig = rig(Bytes::mib(64));
    let region = rig.region("kept", RegionOptions::default());
    let _block = rig.block(&region, MIB, 1);
    let log = Log::default();
    note(&rig, &log, "all", &[]);
    // Without memory, and with some.
    drop(rig.region("empty", RegionOptions::default()));
    let full = rig.region("full", RegionOptions::default());
    let lost = rig.block(&full, MIB, 1);
    rig.regions.pause(&["empty", "full", "kept"], PauseOptions::default()).unwrap();
    rig.regions.remove_unused("empty", 0).unwrap();
    drop(rig.regions.remove("full").unwrap());
    rig.regions.resume(&["kept"]).unwrap();
    assert_eq!(taken(&log), "-all +all");
    // One with its name is another region.
    let again = rig.region("full", RegionOptions::default());
    let _more = rig.block(&again, MIB, 2);
    pause(&rig, "full", Bytes::ZERO).unwrap();
    rig.regions.resume(&["full"]).unwrap();
    assert_eq!(taken(&log), "-all +all");
    full.allocator().free(lost, rig.stream).unwrap();
}

#[test]
fn callbacks_outlive_the_regions_of_a_set() {
    let rig = rig(Bytes::mib(64));
    let log = Log::default();
    note(&rig, &log, "all", &[]);
    let callbacks = rig.regions.callbacks().clone();
    let config = MoverConfig { step: MIB * 4, steps_in_flight: 4, staging_pieces: 4 };
    for _ in 0..2 {
        let mover = Mover::new(rig.card.clone(), &rig.host, config.clone()).unwrap();
        let regions = Regions::with_callbacks(mover, callbacks.clone());
        let one = regions.region(&rig.allocator, "one", RegionOptions::default()).unwrap();
        let two = regions.region(&rig.allocator, "two", RegionOptions::default()).unwrap();
        regions.pause(&["one", "two"], PauseOptions::default()).unwrap();
        regions.resume(&["two"]).unwrap();
        drop((one, two));
    }
    // What the first set left asleep keeps nothing out: its `before` was called once, and no `after`.
    assert_eq!(taken(&log), "-all");
    let region = rig.region("one", RegionOptions::default());
    let _block = rig.block(&region, MIB, 1);
    pause(&rig, "one", Bytes::ZERO).unwrap();
    rig.regions.resume(&["one"]).unwrap();
    assert_eq!(taken(&log), "+all");
}

#[test]
fn callbacks_of_other_regions_cost_a_pause_nothing() {
    for others in [10_usize, 1_000, 100_000] {
        let rig = rig(Bytes::mib(64));
        let region = rig.region("own", RegionOptions::default());
        let block = rig.block(&region, MIB * 2, 1);
        let [elsewhere, own, all] = [(); 3].map(|()| Arc::new(AtomicUsize::new(0)));
        let count = |tags: Option<Vec<String>>, calls: &Arc<AtomicUsize>| {
            let calls = [Arc::clone(calls), Arc::clone(calls)];
            let [before, after] = calls.map(|calls| {
                move || {
                    calls.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                }
            });
            rig.regions.callbacks().add(SleepCallbacks {
                tags,
                before: Box::new(before),
                after: Box::new(after),
                ..SleepCallbacks::named("counted")
            })
        };
        for number in 0..others {
            count(Some(vec![format!("tag {number}")]), &elsewhere);
        }
        for _ in 0..others / 10 {
            count(Some(vec!["own".to_owned()]), &own);
            count(None, &all);
        }
        for _ in 0..3 {
            pause(&rig, "own", Bytes::ZERO).unwrap();
            rig.regions.resume(&["own"]).unwrap();
        }
        let calls = [&elsewhere, &own, &all].map(|calls| calls.load(Ordering::Relaxed));
        assert_eq!(calls, [0, others / 10 * 6, others / 10 * 6]);
        rig.holds(&block, 1);
    }
}

#[test]
fn callbacks_of_many_regions_are_called_once_for_each() {
    for count in [10, 1_000, 10_000] {
        let rig = rig(Bytes::mib(64));
        let tags: Vec<String> = (0..count).map(|number| format!("tag {number}")).collect();
        let tags: Vec<&str> = tags.iter().map(String::as_str).collect();
        let (own, all) = (Log::default(), Log::default());
        note(&rig, &all, "all", &[]);
        for tag in &tags {
            rig.region(tag, RegionOptions::default());
            note(&rig, &own, "own", &[tag]);
        }
        rig.regions.pause(&tags, PauseOptions::default()).unwrap();
        tags.iter().for_each(|&tag| rig.regions.resume(&[tag]).unwrap());
        assert_eq!(taken(&all), "-all +all");
        assert_eq!(own.lock().unwrap().len(), 2 * count);
    }
}

/// Memory that a library has registered, with what a wrong order of calls would do.
#[derive(Default)]
struct Library {
    is_registered: AtomicBool,
    calls: AtomicUsize,
}

#[test]
fn threads_pause_and_resume_at_random_and_callbacks_are_called_in_pairs() {
    let rig = rig(Bytes::gib(1));
    let tags = ["a", "b", "c"];
    let regions = tags.map(|tag| rig.region(tag, RegionOptions::default()));
    let blocks = [1, 2, 3].map(|n| rig.block(&regions[usize::from(n) - 1], MIB * 4, n));
    let random_failures = Arc::new(Mutex::new(fastrand::Rng::with_seed(7)));
    let covers: [&[&str]; 5] = [&["a"], &["a", "b"], &["b", "c"], &["c"], &[]];
    let libraries: Vec<Arc<Library>> = covers
        .iter()
        .map(|covered| {
            let library = Arc::new(Library::default());
            library.is_registered.store(true, Ordering::Relaxed);
            let [before, after] = [true, false].map(|was| {
                let (library, random) = (Arc::clone(&library), Arc::clone(&random_failures));
                move || {
                    library.calls.fetch_add(1, Ordering::Relaxed);
                    if random.lock().unwrap().u32(..6) == 0 {
                        return Err("at random".into());
                    }
                    match library.is_registered.swap(!was, Ordering::Relaxed) == was {
                        true => Ok(()),
                        false => panic!("it was called twice"),
                    }
                }
            });
            rig.regions.callbacks().add(SleepCallbacks {
                tags: (!covered.is_empty())
                    .then(|| covered.iter().map(|&tag| tag.to_owned()).collect()),
                before: Box::new(before),
                after: Box::new(after),
                ..SleepCallbacks::named("library")
            });
            library
        })
        .collect();
    let refused = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (rig, refused) = (&rig, &refused);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                for _ in 0..vramp_testing::cases(300) {
                    let mut chosen = tags.to_vec();
                    chosen.retain(|_| random.bool());
                    let result = match random.bool() {
                        true => {
                            let keep = MIB * random.u64(..3);
                            let options = PauseOptions { keep, ..PauseOptions::default() };
                            rig.regions.pause(&chosen, options)
                        }
                        false => rig.regions.resume(&chosen),
                    };
                    match result {
                        Ok(()) => {}
                        Err(
                            RegionError::Before(_)
                            | RegionError::After { .. }
                            | RegionError::AndAfter { .. },
                        ) => drop(refused.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    assert!(refused.load(Ordering::Relaxed) > 10, "{refused:?}");
    // With nothing in progress: registered is what covers no memory that sleeps, but for calls that failed.
    let sleeps = |tag: &&str| rig.regions.get(tag).unwrap().status().phase == Phase::Asleep;
    for (covered, library) in covers.iter().zip(&libraries) {
        let covered = if covered.is_empty() { &tags[..] } else { covered };
        if covered.iter().any(sleeps) {
            assert!(!library.is_registered.load(Ordering::Relaxed), "{covered:?}");
        }
        assert!(library.calls.load(Ordering::Relaxed) > 10);
    }
    while rig.regions.resume(&tags).is_err() {}
    assert!(libraries.iter().all(|library| library.is_registered.load(Ordering::Relaxed)));
    (1..).zip(&blocks).for_each(|(byte, block)| rig.holds(block, byte));
    for region in &regions {
        assert_eq!(region.allocator().stats().unwrap().callback_panics, 0);
    }
    assert_eq!(rig.card.hazards(), []);
}
