//! Counterparts of RMM's tests of its pools, its generic matrix and its adaptors, by the promise
//! that each of them makes. `docs/background/peer-tests.md` says which is whose.

use std::sync::{Arc, Mutex};

use crate::common::random::Random;
use crate::common::{PAGE, Rig, pages, range};
use vramp_alloc::history::HistorySize;
use vramp_alloc::observe::Event;
use vramp_alloc::{
    AllocError, Allocation, Allocator, Bytes, Config, CreateError, Driver, StreamId,
};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Kernel, LiveObjects, Simulator};
use vramp_peers::Preset;
use vramp_trace::{BlockState, EventKind};

const MIB: u64 = 1 << 20;

/// The presets that hold memory themselves.
const POOLS: [Preset; 4] = [Preset::Vramp, Preset::Vpmm, Preset::Torch, Preset::TorchExpandable];

fn on_card(mib: u64, config: Config) -> Rig {
    Rig::on(Simulator::builder().memory(Bytes::mib(mib)), config)
}

fn made(config: Config) -> Result<Allocator, CreateError> {
    Allocator::new(Arc::new(Simulator::builder().memory(Bytes::mib(512)).build()), config)
}

fn malloc(rig: &Rig, size: u64) -> Allocation {
    rig.allocator.malloc(Bytes::new(size), rig.stream).expect("there is memory")
}

fn reserved(rig: &Rig) -> Bytes {
    rig.allocator.stats().expect("no call fails").reserved
}

// --- the pool ---

#[test]
fn more_memory_at_once_than_the_limit_allows_is_refused() {
    for preset in POOLS {
        let (prefill, limit) = (Bytes::mib(100), Some(Bytes::mib(50)));
        let error = made(Config { prefill, limit, ..preset.config() });
        let error = error.expect_err("the limit is lower");
        assert!(matches!(error, CreateError::Prefill { .. }), "{}: {error}", preset.name());
        assert!(error.to_string().contains("use a smaller prefill"), "{error}");
    }
}

#[test]
fn memory_taken_at_once_may_be_all_that_the_limit_allows() {
    for preset in POOLS {
        let (prefill, limit) = (Bytes::mib(100), Some(Bytes::mib(100)));
        let rig = on_card(512, Config { prefill, limit, ..preset.config() });
        assert_eq!(reserved(&rig), prefill, "{}", preset.name());
        // Given to the first stream that asks, though another one took it.
        let block = malloc(&rig, 100 * MIB);
        assert_eq!(reserved(&rig), prefill, "{}", preset.name());
        rig.free(block);
    }
}

#[test]
fn sizes_that_are_no_whole_pages_are_rounded_up() {
    for preset in POOLS {
        let config = Config { prefill: Bytes::new(1_000_031), ..preset.config() };
        let rig = on_card(512, config);
        assert!(reserved(&rig) >= Bytes::new(1_000_031));
        assert!(reserved(&rig).is_multiple_of(PAGE), "{}", preset.name());
        rig.allocator.set_limit(Some(Bytes::new(20 * MIB + 1))).expect("a limit can change");
        let block = malloc(&rig, 3 * MIB + 7);
        assert!(reserved(&rig) <= Bytes::new(20 * MIB + 1), "{}", preset.name());
        rig.free(block);
    }
}

#[test]
fn nine_tenths_of_the_card_can_be_one_block() {
    for preset in Preset::ALL {
        let rig = on_card(1000, preset.config());
        let block = malloc(&rig, 900 * MIB);
        rig.free(block);
        let again = malloc(&rig, 900 * MIB);
        rig.free(again);
        rig.close();
    }
}

#[test]
fn two_blocks_of_nearly_half_the_limit_fit_beside_each_other() {
    for preset in Preset::ALL {
        let rig = on_card(1000, Config { limit: Some(Bytes::mib(800)), ..preset.config() });
        let blocks = [(); 2].map(|()| malloc(&rig, 398 * MIB));
        assert!(reserved(&rig) <= Bytes::mib(800), "{}", preset.name());
        for block in blocks {
            rig.free(block);
        }
    }
}

#[test]
fn a_pool_grows_beyond_its_beginning_and_not_beyond_its_limit() {
    for preset in POOLS {
        let (prefill, limit) = (Bytes::mib(20), Some(Bytes::mib(100)));
        let rig = on_card(512, Config { prefill, limit, ..preset.config() });
        let grown = malloc(&rig, 60 * MIB);
        assert!(reserved(&rig) >= Bytes::mib(60));
        let error = rig.allocator.malloc(Bytes::mib(60), rig.stream).expect_err("beyond it");
        let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
        assert_eq!(report.shortage.limit, limit, "{}", preset.name());
        assert!(reserved(&rig) <= Bytes::mib(100));
        rig.free(grown);
    }
}

#[test]
fn a_device_that_cannot_tell_its_free_memory_serves_all_the_same() {
    for preset in Preset::ALL {
        let rig = on_card(64, Config { limit: Some(Bytes::mib(40)), ..preset.config() });
        rig.sim.set_faults(FaultPlan::from_nth_of(Call::MemoryInfo, 1));
        let block = malloc(&rig, 20 * MIB);
        let error = rig.allocator.malloc(Bytes::mib(50), rig.stream).expect_err("beyond it");
        let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
        assert_eq!(report.card, None, "{}", preset.name());
        rig.free(block);
        rig.sim.set_faults(FaultPlan::none());
        rig.close();
    }
}

#[test]
fn an_allocator_knows_its_own_blocks_and_refuses_others() {
    for preset in Preset::ALL {
        let [one, two] = [(); 2].map(|()| Rig::new(preset));
        for size in [100, 30 * MIB] {
            let [mine, theirs] = [&one, &two].map(|rig| malloc(rig, size));
            let refused = one.allocator.free(theirs, one.stream).expect_err("it is the other's");
            let vramp_alloc::FreeError::Foreign(theirs) = refused else { panic!("{refused}") };
            assert!(one.allocator.record_use(&theirs, one.stream).is_err());
            one.free(mine);
            two.free(theirs);
        }
        one.close();
        two.close();
    }
}

// --- the arenas ---

#[test]
fn small_middle_and_large_requests_live_beside_each_other() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let blocks = [1 << 10, 256 << 10, MIB, 2 * MIB, 64 * MIB, 1 << 30];
        let mut ranges = Vec::new();
        let blocks = blocks.map(|size| {
            let block = malloc(&rig, size);
            ranges.push((block.addr().number(), block.len().count()));
            block
        });
        ranges.sort_unstable();
        let apart = |pair: &[(u64, u64)]| pair[0].0 + pair[0].1 <= pair[1].0;
        assert!(ranges.windows(2).all(apart), "{}", preset.name());
        for block in blocks {
            rig.free(block);
        }
        rig.close();
    }
}

#[test]
fn memory_of_many_streams_becomes_one_block_once_their_work_is_over() {
    // PyTorch's allocator gives it back to the card in between.
    for preset in POOLS {
        let card = Simulator::builder().memory(Bytes::mib(256)).checked();
        let config = Config { limit: Some(Bytes::mib(240)), ..preset.config() };
        let rig = Rig::on(card, config);
        let more = (0..6).map(|_| rig.allocator.create_stream().expect("a stream can be made"));
        let blocks: Vec<_> = more.map(|stream| (rig.malloc_on(20, stream), stream)).collect();
        for (block, stream) in blocks {
            let work = Kernel::new("work").writing(range(&block)).lasting(1_000);
            rig.sim.launch(rig.raw(stream), work).expect("the stream takes work");
            rig.free_on(block, stream);
        }
        rig.sim.advance(10_000);
        let (cost, all) = rig.cost(|| malloc(&rig, 240 * MIB));
        assert_eq!(cost.waits, 0, "{}: nothing is left to wait for", preset.name());
        assert_eq!(reserved(&rig), Bytes::mib(240), "{}", preset.name());
        rig.occupy(&all, rig.stream);
        assert_eq!(rig.sim.hazards(), [], "{}", preset.name());
        rig.free(all);
    }
}

#[test]
fn a_block_of_a_finished_threads_stream_is_freed_on_another_stream() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let blocks: Vec<Allocation> = std::thread::scope(|scope| {
            let threads: Vec<_> = (1..5)
                .map(|n| {
                    let allocator = &rig.allocator;
                    scope.spawn(move || {
                        let stream = allocator.create_stream().expect("a stream can be made");
                        let sizes = [n << 10, n << 18, n << 22].map(Bytes::new);
                        sizes.map(|size| allocator.malloc(size, stream).expect("there is memory"))
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        });
        for block in blocks {
            rig.free(block);
        }
        assert_eq!(rig.allocator.live(), Bytes::ZERO, "{}", preset.name());
        rig.close();
    }
}

// --- the matrix for every resource ---

/// Sizes from one byte to tens of MiB, none of them round.
fn random_size(random: &mut Random) -> Bytes {
    let power = 1 << random.below(25);
    Bytes::new(power + random.below(power))
}

#[test]
fn requests_from_one_byte_to_a_gibibyte_are_served_on_every_stream() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let made = rig.allocator.create_stream().expect("a stream can be made");
        let raw = rig.sim.create_stream().expect("a stream can be made");
        let adopted = rig.allocator.adopt_stream(raw);
        for stream in [rig.stream, made, adopted] {
            for size in [1, 8, 1000, MIB, 10 * MIB, 100 * MIB, 1 << 30] {
                let block = rig.allocator.malloc(Bytes::new(size), stream).expect("room");
                assert!(block.len().count() >= size);
                assert!(block.addr().number().is_multiple_of(512), "{}", preset.name());
                assert_eq!(block.stream(), stream);
                rig.free_on(block, stream);
            }
        }
        rig.allocator.destroy_stream(adopted).expect("it can end");
        rig.allocator.close().expect("nothing is in the way");
        rig.sim.destroy_stream(raw).expect("its owner is us");
    }
}

#[test]
fn a_hundred_random_requests_are_held_at_once() {
    for preset in Preset::ALL {
        for explicit in [false, true] {
            let rig = Rig::new(preset);
            let another = rig.allocator.create_stream().expect("a stream can be made");
            let stream = if explicit { another } else { rig.stream };
            let mut random = Random(1);
            let sizes: Vec<_> = (0..100).map(|_| random_size(&mut random)).collect();
            let blocks: Vec<_> = sizes
                .iter()
                .map(|&size| rig.allocator.malloc(size, stream).expect("there is memory"))
                .collect();
            assert_eq!(rig.allocator.live(), sizes.into_iter().sum());
            for block in blocks {
                rig.free_on(block, stream);
            }
            rig.close();
        }
    }
}

/// Random requests and frees with at most `held` blocks, on one stream.
fn mix(allocator: &Allocator, stream: StreamId, seed: u64) {
    let mut random = Random(seed);
    let mut held: Vec<Allocation> = Vec::new();
    for _ in 0..400 {
        if held.len() < 40 && random.below(100) < 60 {
            let size = random_size(&mut random);
            held.push(allocator.malloc(size, stream).expect("there is memory"));
        } else if !held.is_empty() {
            let index = random.below(held.len() as u64) as usize;
            allocator.free(held.swap_remove(index), stream).expect("it is the allocator's");
        }
    }
    for block in held {
        allocator.free(block, stream).expect("it is the allocator's");
    }
}

#[test]
fn requests_and_frees_mix_on_one_thread() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let another = rig.allocator.create_stream().expect("a stream can be made");
        mix(&rig.allocator, rig.stream, 1);
        mix(&rig.allocator, another, 2);
        rig.allocator.audit().expect("the pool is whole");
        rig.close();
    }
}

#[test]
fn requests_and_frees_mix_on_many_threads_with_one_stream_and_with_many() {
    for preset in Preset::ALL {
        for shared in [true, false] {
            let rig = Rig::new(preset);
            std::thread::scope(|scope| {
                for seed in 0..4 {
                    let rig = &rig;
                    scope.spawn(move || {
                        let own = || rig.allocator.create_stream().expect("a stream can be made");
                        let stream = if shared { rig.stream } else { own() };
                        mix(&rig.allocator, stream, seed);
                    });
                }
            });
            rig.allocator.audit().expect("the pool is whole");
            let stats = rig.allocator.memory_stats().expect("no call fails");
            assert_eq!(stats.allocation.all.current, 0, "{}", preset.name());
            rig.close();
        }
    }
}

#[test]
fn one_thread_frees_what_another_allocates_on_the_same_and_on_another_stream() {
    for preset in Preset::ALL {
        for same in [true, false] {
            let rig = Rig::new(preset);
            let another = rig.allocator.create_stream().expect("a stream can be made");
            let free_on = if same { rig.stream } else { another };
            let (send, receive) = std::sync::mpsc::sync_channel::<Allocation>(16);
            std::thread::scope(|scope| {
                let rig = &rig;
                scope.spawn(move || {
                    let mut random = Random(3);
                    for _ in 0..500 {
                        let size = random_size(&mut random);
                        let block = rig.allocator.malloc(size, rig.stream).expect("room");
                        send.send(block).expect("the receiver is alive");
                    }
                });
                scope.spawn(move || {
                    for block in receive {
                        rig.allocator.free(block, free_on).expect("it is the allocator's");
                    }
                });
            });
            rig.allocator.audit().expect("the pool is whole");
            assert_eq!(rig.allocator.live(), Bytes::ZERO, "{}", preset.name());
            rig.close();
        }
    }
}

// --- the adaptors ---

#[test]
fn tags_tell_the_parts_of_a_program_apart_and_peaks_begin_anew_for_each() {
    let rig = on_card(512, Config { limit: Some(Bytes::mib(400)), ..Config::default() });
    let [outer, inner] = ["outer", "inner"].map(|name| rig.allocator.tag(name));
    let take = |size: u64, tag| {
        rig.allocator.malloc_tagged(Bytes::mib(size), rig.stream, tag).expect("there is memory")
    };
    let first = take(50, outer);
    rig.allocator.reset_peak_stats();
    let second = take(20, inner);
    rig.free(second);
    let third = take(10, inner);
    let stats = rig.allocator.memory_stats().expect("no call fails").requested_bytes.all;
    assert_eq!((stats.current, stats.peak), (60 * MIB, 70 * MIB));
    let error = rig.allocator.malloc(Bytes::mib(390), rig.stream).expect_err("beyond the limit");
    let AllocError::OutOfMemory(report) = error else { panic!("{error}") };
    let of = |name: &str| {
        let tag = report.tags.iter().find(|tag| tag.name == name).expect("it holds memory");
        (tag.live.count() / MIB, tag.peak.count() / MIB, tag.blocks)
    };
    assert_eq!((of("outer"), of("inner")), ((50, 50, 1), (10, 20, 1)));
    rig.free(first);
    rig.free(third);
}

#[test]
fn what_was_never_freed_is_found_with_the_stack_that_asked_for_it() {
    for preset in POOLS {
        let rig = Rig::new(preset);
        let place = Arc::new(Mutex::new("tidy"));
        let source = Arc::clone(&place);
        let stacks: vramp_alloc::history::StackSource = Arc::new(move || {
            let name = *source.lock().expect("whole");
            vec![(name.to_owned(), "job.py".to_owned(), 3)]
        });
        let recording = rig.allocator.record_history(HistorySize::default(), Some(stacks));
        for count in [3, 7] {
            let block = rig.malloc(count);
            rig.free(block);
        }
        *place.lock().expect("whole") = "forgetful";
        let leaked = rig.malloc(5);
        let trace = rig.allocator.snapshot(Some(&recording));
        let blocks = trace.segments.iter().flat_map(|segment| &segment.blocks);
        let live: Vec<_> = blocks.filter(|block| block.state == BlockState::Active).collect();
        assert_eq!(live.len(), 1, "{}", preset.name());
        assert_eq!((live[0].address, live[0].requested_size), (leaked.addr(), Some(pages(5))));
        let asked = trace
            .events
            .iter()
            .rev()
            .find(|event| event.kind == EventKind::Alloc && event.address == live[0].address);
        let stack = asked.and_then(|event| event.stack).expect("it was recorded with its stack");
        let frame = trace.stacks.frames(stack).next().expect("a stack has frames");
        assert_eq!((frame.name, frame.filename), ("forgetful", "job.py"));
        rig.free(leaked);
    }
}

#[test]
fn a_limit_is_met_to_the_page_and_freed_memory_counts_again() {
    // Whole pages, whole granules of the driver's pool, and whole handles of expandable segments.
    for preset in Preset::ALL {
        let rig = on_card(512, Config { limit: Some(pages(80)), ..preset.config() });
        let whole = rig.malloc(80);
        let refused = rig.allocator.malloc(pages(1), rig.stream);
        let short = refused.is_err_and(|error| error.is_out_of_memory());
        assert!(short, "{}", preset.name());
        rig.free(whole);
        let halves = [(); 2].map(|()| rig.malloc(40));
        assert!(rig.allocator.malloc(pages(1), rig.stream).is_err(), "{}", preset.name());
        for half in halves {
            rig.free(half);
        }
        assert!(rig.allocator.malloc(pages(81), rig.stream).is_err());
    }
}

#[test]
fn a_handler_that_gives_up_lets_the_request_fail_and_one_that_gives_saves_it() {
    for preset in Preset::ALL {
        let sim = Arc::new(Simulator::builder().memory(Bytes::mib(128)).build());
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
        let allocator = Arc::new(Allocator::new(driver, preset.config()).expect("made"));
        let stream = allocator.create_stream().expect("a stream can be made");
        let held = allocator.malloc(Bytes::mib(100), stream).expect("there is memory");
        let cache = Arc::new(Mutex::new(Some(held)));
        let (weak, source) = (Arc::downgrade(&allocator), Arc::clone(&cache));
        allocator.on_shortage(move |_| {
            let block = source.lock().expect("whole").take();
            let Some((allocator, block)) = weak.upgrade().zip(block) else { return false };
            allocator.free(block, stream).is_ok()
        });
        let block = allocator.malloc(Bytes::mib(90), stream).expect("the handler gives");
        let error = allocator.malloc(Bytes::mib(90), stream).expect_err("it has no more");
        assert!(error.is_out_of_memory(), "{}: {error}", preset.name());
        let stats = allocator.memory_stats().expect("no call fails");
        assert!(stats.num_alloc_retries >= 1 && stats.num_ooms == 1, "{}", preset.name());
        allocator.free(block, stream).expect("it is ours");
    }
}

#[test]
fn the_log_has_every_request_and_free_and_every_failure_in_order() {
    for preset in Preset::ALL {
        let rig = on_card(64, preset.config());
        let recording = rig.allocator.record_history(HistorySize::default(), None);
        let [a, b] = [100, 7 * MIB].map(|size| malloc(&rig, size));
        let addrs = [a.addr(), b.addr()];
        rig.free(a);
        assert!(rig.allocator.malloc(Bytes::mib(300), rig.stream).is_err());
        rig.free(b);
        let trace = rig.allocator.snapshot(Some(&recording));
        let logged = trace.events.iter().filter(|event| {
            use EventKind::{Alloc, FreeRequested, Oom};
            matches!(event.kind, Alloc | FreeRequested | Oom)
        });
        let logged: Vec<_> = logged.map(|event| (event.kind, event.address)).collect();
        let kinds: Vec<_> = logged.iter().map(|&(kind, _)| kind).collect();
        use EventKind::{Alloc, FreeRequested, Oom};
        assert_eq!(kinds, [Alloc, Alloc, FreeRequested, Oom, FreeRequested], "{}", preset.name());
        let ours = [logged[0].1, logged[1].1, logged[2].1, logged[4].1];
        assert_eq!(ours, [addrs[0], addrs[1], addrs[0], addrs[1]]);
    }
}

#[test]
fn every_block_begins_at_a_multiple_of_its_grain_and_large_ones_too() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let mut random = Random(11);
        let blocks: Vec<_> =
            (0..300).map(|_| malloc(&rig, random_size(&mut random).count())).collect();
        for block in blocks {
            assert!(block.addr().number().is_multiple_of(512), "{}: {block:?}", preset.name());
            rig.free(block);
        }
    }
}

#[test]
fn an_observer_sees_the_size_and_the_stream_of_each_request() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let other = rig.allocator.create_stream().expect("a stream can be made");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        rig.allocator.observe(move |event| {
            let seen = match event {
                Event::Allocated { requested, stream, .. } => ("malloc", *requested, *stream),
                Event::Freed { requested, stream, .. } => ("free", *requested, *stream),
                _ => return,
            };
            sink.lock().expect("whole").push(seen);
        });
        let block = rig.malloc_on(5, other);
        rig.free_on(block, other);
        let seen = seen.lock().expect("whole");
        assert_eq!(*seen, [("malloc", pages(5), other), ("free", pages(5), other)]);
    }
}

#[test]
fn memory_above_a_threshold_is_given_back_and_below_it_is_kept() {
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::StreamOrdered, Preset::TorchExpandable] {
        let rig = Rig::new(preset);
        let blocks = [20, 20, 20].map(|count| rig.malloc(count));
        for block in blocks {
            rig.free(block);
        }
        rig.sim.advance(1);
        let held = reserved(&rig);
        rig.allocator.trim(pages(200)).expect("nothing fails");
        assert_eq!(reserved(&rig), held, "{}", preset.name());
        rig.allocator.trim(pages(30)).expect("nothing fails");
        assert!(reserved(&rig) <= pages(30), "{}: {}", preset.name(), reserved(&rig));
        rig.allocator.trim(Bytes::ZERO).expect("nothing fails");
        assert_eq!(reserved(&rig), Bytes::ZERO, "{}", preset.name());
    }
}

#[test]
fn an_allocator_that_goes_with_blocks_in_use_gives_everything_back() {
    for preset in Preset::ALL {
        let rig = Rig::new(preset);
        let side = rig.allocator.create_pool("side").expect("a pool can be made");
        let kept = [100, 3 * MIB, 50 * MIB].map(|size| malloc(&rig, size));
        let aside = side.malloc(pages(9), rig.stream).expect("there is memory");
        let Rig { sim, allocator, .. } = rig;
        // In the order in which a process may end: threads, pools, the main one, the blocks last.
        std::thread::spawn(move || drop((side, allocator))).join().expect("no panic");
        drop((kept, aside));
        assert_eq!(sim.live(), LiveObjects::default(), "{}", preset.name());
    }
}
