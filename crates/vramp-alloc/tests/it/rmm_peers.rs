//! Counterparts of RMM's tests of its pools, its generic matrix and its adaptors, by the promise
//! that each of them makes. `docs/background/peer-tests.md` says which is whose.

use std::sync::{Arc, Mutex};

use vramp_alloc::history::HistorySize;
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, CreateError, Driver};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Kernel, Simulator};
use vramp_peers::Preset;
use vramp_trace::{BlockState, EventKind};

use crate::common::{Random, Rig, pages, range};

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

// --- the arenas ---

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

// --- the adaptors ---

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
