use vramp_alloc::Driver;
use vramp_defer::report::PieceState;
use vramp_driver::Call;
use vramp_driver::sim::Kernel;

use super::*;

#[test]
fn a_buffer_leaves_for_a_malloc_and_comes_back_with_its_bytes_to_its_address() {
    let rig = rig();
    let buffer = rig.filled(MIB(40), 0x5A);
    let at = buffer.addresses();
    assert!(buffer.is_resident());
    let block = rig.allocator.malloc(MIB(60), rig.stream).unwrap();
    rig.sim.fill(rig.queue, AddrRange::new(block.addr(), MIB(60)), 0xFF).unwrap();
    assert!(!buffer.is_resident());
    rig.check();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&buffer, 0x5A);
    assert_eq!(buffer.addresses(), at);
    rig.check();
}

#[test]
fn contents_on_the_host_are_read_there_while_the_card_has_no_room() {
    let rig = rig();
    let buffer = rig.filled(MIB(40), 0x5A);
    buffer.write(MIB(31), &[7; 3 << 20]).unwrap();
    let block = rig.allocator.malloc(MIB(60), rig.stream).unwrap();
    assert!(!buffer.is_resident());
    let mut bytes = vec![0; 4 << 20];
    buffer.read(MIB(30), &mut bytes).unwrap();
    let (before, after) = bytes.split_at(1 << 20);
    assert!(vramp_testing::is_filled(before, 0x5A) && vramp_testing::is_filled(after, 7));
    let outside = buffer.read(MIB(39), &mut bytes);
    assert!(matches!(outside, Err(vramp_defer::SpillError::Outside { .. })), "{outside:?}");
    assert!(!buffer.is_resident());
    assert_eq!(rig.manager.stats().from_host_bytes, 0);
    rig.check();
    rig.allocator.free(block, rig.stream).unwrap();
    // A later write is read, and not the older copy.
    buffer.write(MIB(30), &[9; 4 << 20]).unwrap();
    buffer.read(MIB(30), &mut bytes).unwrap();
    assert!(vramp_testing::is_filled(&bytes, 9));
}

#[test]
fn more_than_the_card_holds_is_used_in_turn() {
    let rig = rig();
    let buffers: Vec<_> = (1..=8).map(|byte| rig.filled(MIB(24), byte)).collect();
    for round in 0..3 {
        for (buffer, byte) in buffers.iter().zip(1..) {
            rig.expect(buffer, byte + 10 * round);
            rig.fill(buffer, byte + 10 * (round + 1));
        }
        rig.check();
    }
    let census = rig.manager.census();
    assert_eq!(census.total, MIB(192));
    assert!(census.occupied <= MIB(64), "{census:?}");
}

#[test]
fn only_what_is_missing_leaves_and_at_most_one_piece_more() {
    let rig = rig();
    let buffers: Vec<_> = (0..8).map(|byte| rig.filled(PIECE, byte)).collect();
    let before = rig.manager.census().occupied;
    assert_eq!(before, MIB(64));
    let block = rig.allocator.malloc(MIB(10), rig.stream).unwrap();
    let census = rig.manager.census();
    assert_eq!(census.occupied, MIB(48), "two pieces for 10 MiB: {census:?}");
    assert_eq!(rig.manager.stats().to_host_bytes, PIECE.count() * 2);
    rig.allocator.free(block, rig.stream).unwrap();
    drop(buffers);
    rig.check();
}

#[test]
fn what_left_is_where_the_block_will_lie_before_the_rest_is_copied() {
    let rig = Plan::default().build_on(simulator().logged(1 << 14));
    let buffer = rig.filled(MIB(64), 3);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.sim.take_log();
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    let log = rig.sim.take_log();
    let at = |wanted: Call| {
        let calls = log.iter().enumerate().filter(move |(_, logged)| logged.call == wanted);
        calls.map(|(place, _)| place).collect::<Vec<_>>()
    };
    let (maps, waits) = (at(Call::Map), at(Call::SynchronizeEvent));
    assert_eq!(maps.len(), 8, "a piece is moved once");
    let last_wait = *waits.last().unwrap();
    let late = maps.iter().filter(|&&place| place > last_wait).count();
    assert_eq!(late, 1, "only the last piece is moved once all is copied: {maps:?} {waits:?}");
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn a_buffer_that_was_only_read_leaves_again_without_a_copy() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 7);
    assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    let copied = rig.manager.stats().to_host_bytes;
    for _ in 0..3 {
        rig.expect(&buffer, 7);
        assert_eq!(rig.manager.spill(MIB(32)).freed, MIB(32));
    }
    assert_eq!(rig.manager.stats().to_host_bytes, copied, "nothing is copied twice");
    // Only the written bytes are copied again.
    let mut lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let part = AddrRange::new(lease.address(0).start + MIB(9), MIB(1));
    rig.sim.fill(rig.queue, part, 8).unwrap();
    lease.wrote_only(0, MIB(9), MIB(1)).unwrap();
    drop(lease);
    rig.manager.spill(MIB(32));
    assert_eq!(rig.manager.stats().to_host_bytes, copied + PIECE.count());
    let mut bytes = [0; 2];
    buffer.read(MIB(10) - Bytes::new(1), &mut bytes).unwrap();
    assert_eq!(bytes, [8, 7]);
    rig.check();
}

#[test]
fn nothing_waits_for_the_whole_device_or_a_stream() {
    let rig = rig();
    let buffers: Vec<_> = (1..5).map(|byte| rig.filled(MIB(32), byte)).collect();
    for buffer in &buffers {
        let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
        rig.sim.fill(rig.queue, lease.address(0), 9).unwrap();
    }
    assert!(rig.manager.stats().to_host_bytes > 0);
    for call in [Call::SynchronizeStream, Call::FreeMemory] {
        assert_eq!(rig.sim.calls_of(call), 0, "{call}");
    }
    rig.check();
}

#[test]
fn a_spilled_buffer_that_is_freed_gives_back_its_blocks_and_its_files() {
    let rig = Plan { host: MIB(32), disk: Some(MIB(256)), ..Plan::default() }.build();
    let buffer = rig.filled(MIB(56), 3);
    let again = rig.filled(MIB(56), 4);
    let space = |id: SpaceId| rig.spaces.space(id).unwrap().total();
    assert!(space(SpaceId::disk(0)) > Bytes::ZERO, "the host is too small for it");
    drop(buffer);
    drop(again);
    rig.manager.relieve_host(MIB(512));
    rig.manager.census();
    assert_eq!((space(SpaceId::host(0)), space(SpaceId::disk(0))), (Bytes::ZERO, Bytes::ZERO));
    let block = rig.allocator.malloc(MIB(64), rig.stream).unwrap();
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn what_the_host_cannot_hold_goes_to_the_disk_and_comes_back_whole() {
    let rig = Plan { host: MIB(24), disk: Some(MIB(512)), ..Plan::default() }.build();
    let buffers: Vec<_> = (1..=6).map(|byte| rig.filled(MIB(24), byte)).collect();
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    assert!(rig.manager.stats().from_disk_bytes > 0);
    rig.check();
}

#[test]
fn what_was_copied_ahead_leaves_at_once() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 6);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.sim.advance(1_000_000_000);
    assert_eq!(rig.manager.clean(MIB(16)), MIB(16));
    assert!(buffer.is_resident());
    let copied = rig.manager.stats().to_host_bytes;
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    assert_eq!(rig.manager.stats().to_host_bytes, copied, "what is clean leaves first");
    rig.expect(&buffer, 6);
    rig.check();
}

#[test]
fn what_is_fetched_ahead_needs_no_wait_later() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 6);
    rig.manager.spill(MIB(32));
    buffer.prefetch().unwrap();
    assert!(buffer.is_resident());
    let copied = rig.manager.stats().from_host_bytes;
    rig.expect(&buffer, 6);
    assert_eq!(rig.manager.stats().from_host_bytes, copied);
    rig.check();
}

#[test]
fn hints_and_priorities_decide_who_leaves() {
    let rig = rig();
    let (a, b, c) = (rig.filled(PIECE, 1), rig.filled(PIECE, 2), rig.filled(PIECE, 3));
    a.will_need();
    b.set_priority(-1);
    c.wont_need();
    rig.manager.spill(PIECE);
    assert!(a.is_resident() && !b.is_resident() && c.is_resident(), "the lower priority first");
    rig.manager.spill(PIECE);
    assert!(a.is_resident() && !c.is_resident());
    let reasons: Vec<_> = rig.manager.history().iter().map(ToString::to_string).collect();
    assert!(reasons.iter().all(|reason| reason.contains("spilled to host")), "{reasons:?}");
}

#[test]
fn small_buffers_of_a_group_share_memory_and_leave_together() {
    let rig = rig();
    let group = rig.manager.group();
    let buffers: Vec<_> = (0..8).map(|_| group.buffer(MIB(1)).unwrap()).collect();
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.fill(buffer, byte);
    }
    assert_eq!(rig.manager.census().occupied, PIECE);
    assert_eq!(rig.manager.spill(MIB(2)).freed, PIECE);
    assert!(buffers.iter().all(|buffer| !buffer.is_resident()));
    for (buffer, byte) in buffers.iter().zip(1..) {
        rig.expect(buffer, byte);
    }
    rig.check();
    drop(buffers);
    drop(group);
    assert_eq!(rig.manager.census().occupied, Bytes::ZERO);
    rig.check();
}

#[test]
fn what_nobody_needs_is_not_copied() {
    let rig = rig();
    let buffer = rig.filled(MIB(32), 6);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    buffer.discard().unwrap();
    rig.manager.spill(MIB(32));
    assert_eq!(rig.manager.stats().to_host_bytes, 0);
    assert!(buffer.states().iter().all(|found| *found == PieceState::Empty));
    rig.fill(&buffer, 2);
    rig.expect(&buffer, 2);
    rig.check();
}

#[test]
fn the_host_reads_and_writes_wherever_the_bytes_are() {
    let rig = rig();
    let buffer = rig.manager.buffer(MIB(20)).unwrap();
    let pattern: Vec<u8> = (0..3 << 20).map(|i: u32| (i % 251) as u8).collect();
    buffer.write(MIB(7), &pattern).unwrap();
    rig.manager.spill(MIB(64));
    let mut back = vec![0; pattern.len()];
    buffer.read(MIB(7), &mut back).unwrap();
    assert!(back == pattern);
    assert!(buffer.write(MIB(20), &[1]).is_err());
    assert!(buffer.read(Bytes::new(u64::MAX), &mut [1]).is_err());
    rig.check();
}

#[test]
fn a_reservation_makes_buffers_leave_and_what_is_on_the_card_is_charged() {
    let rig = Plan { budget: true, ..Plan::default() }.build();
    let buffer = rig.filled(MIB(40), 1);
    let gpu = rig.spaces.space(SpaceId::gpu(0)).unwrap();
    assert_eq!(gpu.total(), MIB(40));
    let reservation =
        gpu.request(MIB(50)).deadline(std::time::Duration::from_secs(5)).wait().unwrap();
    assert!(!buffer.is_resident());
    assert!(gpu.total() <= MIB(64));
    drop(reservation);
    rig.expect(&buffer, 1);
    assert_eq!(gpu.total(), MIB(40));
    drop(buffer);
    rig.manager.census();
    assert_eq!(gpu.total(), Bytes::ZERO);
    rig.check();
}

#[test]
fn a_thread_of_the_manager_copies_ahead_between_the_levels() {
    let cleaner = vramp_defer::config::CleanerConfig {
        above: 0.3,
        every: std::time::Duration::from_millis(1),
        budget: MIB(64),
    };
    let mut plan = Plan::default();
    plan.config.cleaner = Some(cleaner);
    plan.config.clean_after = std::time::Duration::ZERO;
    let rig = plan.build();
    let buffer = rig.filled(MIB(40), 1);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let begin = std::time::Instant::now();
    while rig.manager.census().clean < MIB(40) {
        assert!(begin.elapsed() < std::time::Duration::from_secs(30), "nothing was copied ahead");
        vramp_testing::moment();
    }
    assert!(buffer.is_resident());
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn new_victims_go_to_a_full_host_and_the_oldest_copies_to_the_disk() {
    // Beside the staging blocks the host has room for two pieces.
    let staging = MoverConfig { step: MIB(4), ..MoverConfig::default() };
    let staging = staging.step * u64::from(staging.staging_pieces);
    let rig = Plan { host: staging + MIB(16), disk: Some(MIB(512)), ..Plan::default() }.build();
    let old = rig.filled(MIB(16), 1);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    // Long after, other contents leave soon after their use.
    let pause = Kernel::new("pause").lasting(60_000_000_000);
    rig.sim.launch(rig.queue, pause).unwrap();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let young = rig.filled(MIB(16), 2);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    let on_disk = |buffer: &DeferrableBuffer| {
        let copies = buffer.states().into_iter().map(|state| match state {
            PieceState::Spilled { copies } => copies.disk && !copies.host,
            other => panic!("{other:?}"),
        });
        copies.collect::<Vec<_>>()
    };
    assert_eq!((on_disk(&old), on_disk(&young)), (vec![true; 2], vec![false; 2]));
    rig.expect(&old, 1);
    rig.expect(&young, 2);
    rig.check();
}
