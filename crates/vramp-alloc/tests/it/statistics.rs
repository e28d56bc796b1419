//! Statistics by PyTorch's names, histories and snapshots.

use crate::common::{Rig, pages};
use vramp_alloc::history::HistorySize;
use vramp_alloc::{Bytes, Preset};
use vramp_trace::{BlockState, EventKind, ReadLimits, read_trace};

#[test]
fn statistics_have_pytorchs_names_and_meanings() {
    let rig = Rig::new(Preset::Vramp);
    let small = rig.allocator.malloc(Bytes::new(1000), rig.stream).expect("there is memory");
    let large = rig.allocator.malloc(Bytes::new(5_000_001), rig.stream).expect("there is memory");
    let stats = rig.allocator.memory_stats().expect("no call fails").by_name();
    let expected = [
        ("allocation.all.current", 2),
        ("allocation.small_pool.current", 1),
        ("allocation.large_pool.current", 1),
        ("allocated_bytes.small_pool.current", 1024),
        ("requested_bytes.small_pool.current", 1000),
        ("requested_bytes.large_pool.current", 5_000_001),
        ("allocated_bytes.large_pool.current", 5_000_192),
        ("requested_bytes.all.peak", 5_001_001),
        ("num_ooms", 0),
    ];
    for (name, value) in expected {
        assert_eq!(stats.get(name), Some(&value), "{name}");
    }
    assert_eq!(
        stats["reserved_bytes.all.current"],
        stats["active_bytes.all.current"] + stats["inactive_split_bytes.all.current"]
    );
    rig.free(large);
    rig.free(small);
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.allocated_bytes.all.current, 0);
    assert_eq!(stats.allocated_bytes.all.freed, 1024 + 5_000_192);
    assert_eq!(stats.requested_bytes.all.peak, 5_001_001);
    rig.allocator.reset_peak_stats();
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.requested_bytes.all.peak, 0);
    let block = rig.malloc(3);
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.allocated_bytes.all.peak, pages(3).count());
    assert!(stats.reserved_bytes.peak >= stats.reserved_bytes.current);
    rig.free(block);
}

#[test]
fn counts_of_several_threads_add_up() {
    let rig = Rig::new(Preset::Vramp);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = rig.allocator.create_stream().expect("a stream can be made");
                for n in 1..=500 {
                    let size = Bytes::new(n * 97);
                    let block = rig.allocator.malloc(size, stream).expect("there is memory");
                    rig.allocator.free(block, stream).expect("it is ours");
                }
            });
        }
    });
    let stats = rig.allocator.memory_stats().expect("no call fails");
    assert_eq!(stats.allocation.all.allocated, 2000);
    assert_eq!(stats.allocation.all.freed, 2000);
    assert_eq!(stats.requested_bytes.all.allocated, 4 * 97 * (500 * 501 / 2));
    assert_eq!(stats.requested_bytes.all.current, 0);
}

#[test]
fn a_snapshot_shows_every_block_and_reads_back() {
    let rig = Rig::new(Preset::Vramp);
    let frames: vramp_alloc::history::StackSource =
        std::sync::Arc::new(|| vec![("forward".to_owned(), "model.py".to_owned(), 20)]);
    let recording = rig.allocator.record_history(HistorySize::default(), Some(frames));
    let small = rig.allocator.malloc(Bytes::new(700), rig.stream).expect("there is memory");
    let blocks = [5, 3, 9].map(|count| rig.malloc(count));
    let [first, second, third] = blocks;
    rig.free(second);
    let trace = rig.allocator.snapshot(Some(&recording));
    let mut file = Vec::new();
    trace.write_snapshot(&mut file).expect("memory takes it");
    let path = std::env::temp_dir().join(format!("vramp-{}-snapshot.pickle", std::process::id()));
    std::fs::write(&path, &file).expect("a file can be written");
    let read = read_trace(&path, &ReadLimits::default()).expect("it reads back");
    std::fs::remove_file(&path).expect("the file is ours");

    let active: Vec<_> = read
        .segments
        .iter()
        .flat_map(|segment| &segment.blocks)
        .filter(|block| block.state == BlockState::Active)
        .collect();
    for block in [&small, &first, &third] {
        let found = active.iter().find(|known| known.address == block.addr());
        let found = found.unwrap_or_else(|| panic!("{block:?} is not in the snapshot"));
        assert_eq!(found.size, block.len());
        assert_eq!(found.requested_size, Some(block.requested()));
    }
    let reserved = rig.allocator.stats().expect("no call fails").reserved;
    let total: Bytes = read.segments.iter().map(|segment| segment.total_size).sum();
    assert_eq!(total, reserved);
    let kinds: Vec<EventKind> = read.events.iter().map(|event| event.kind).collect();
    let count = |kind| kinds.iter().filter(|&&known| known == kind).count();
    assert_eq!(count(EventKind::Alloc), 4);
    assert_eq!((count(EventKind::FreeRequested), count(EventKind::FreeCompleted)), (1, 1));
    assert!(read.events.iter().all(|event| event.stack.is_some()));
    assert!(rig.allocator.stop_history(&recording));
    let mut timeline = Vec::new();
    trace.write_perfetto(&mut timeline).expect("memory takes it");
    assert!(timeline.starts_with(b"{") || timeline.starts_with(b"["));
    for block in [small, first, third] {
        rig.free(block);
    }
}

#[test]
fn a_peak_counts_what_another_thread_gave_back() {
    // One thread makes what another frees, as a program and its autograd do: the peak stays what
    // was held at once.
    let rig = Rig::new(Preset::Vramp);
    let (to_freer, from_maker) = std::sync::mpsc::sync_channel::<vramp_alloc::Allocation>(0);
    let (done, freed) = std::sync::mpsc::sync_channel::<()>(0);
    std::thread::scope(|scope| {
        let allocator = &rig.allocator;
        let stream = rig.stream;
        scope.spawn(move || {
            for block in from_maker {
                allocator.free(block, stream).expect("it is ours");
                done.send(()).expect("the maker listens");
            }
        });
        for size in [pages(3), Bytes::kib(500), Bytes::kib(20), pages(1)].repeat(50) {
            let block = allocator.malloc(size, stream).expect("there is memory");
            to_freer.send(block).expect("the freer listens");
            freed.recv().expect("the freer answers");
        }
        drop(to_freer);
    });
    let stats = rig.allocator.stats().expect("no call fails");
    assert_eq!((stats.live, stats.live_peak), (Bytes::ZERO, pages(3)));
    assert!(stats.live_peak <= stats.reserved_peak);
}
