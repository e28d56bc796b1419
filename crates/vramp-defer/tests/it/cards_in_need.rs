//! Cards that need the memory which others hold there, close in any order, and spill to each other.

use vramp_defer::SpillStats;
use vramp_tiers::peer::PeerStoreConfig;

use super::machine::{Card, HOST, Machine, Machines, lies, on_card};
use super::*;

/// Cards of 1 GiB without limits: each may need all of its memory.
fn crowded() -> Machines {
    let store = PeerStoreConfig { limit: MIB(1024), ..Machines::default().store };
    Machines { memory: MIB(1024), limit: None, store, ..Machines::default() }
}

#[test]
fn copies_move_on_when_the_card_needs_its_memory_for_itself() {
    let machine = crowded().build();
    let [card, other] = [&machine.cards[0], &machine.cards[1]];
    let buffers: Vec<_> = (1..=6).map(|byte| card.spilled(MIB(32), byte)).collect();
    assert!(buffers.iter().all(|buffer| lies(buffer, on_card(1))));
    let free = other.sim.memory_info().unwrap().free;
    let len = (free + MIB(48)).round_down(MIB(2));
    let block = other.allocator.malloc(len, other.stream).unwrap();
    assert!(lies(&buffers[0], HOST) && lies(&buffers[5], on_card(1)), "the oldest first");
    let stats = card.stats();
    assert_eq!(stats.to_host_bytes, 0);
    assert!((MIB(48)..=MIB(80)).contains(&Bytes::new(stats.moved_on_bytes)), "{stats:?}");
    // New contents go to the host at once, until the backoff is over.
    let late = card.spilled(MIB(16), 7);
    assert!(lies(&late, HOST));
    other.allocator.free(block, other.stream).unwrap();
    other.wait();
    other.allocator.empty_cache().unwrap();
    card.sim.advance(2_000_000_000);
    let later = card.spilled(MIB(16), 8);
    assert!(lies(&later, on_card(1)));
    for (buffer, byte) in buffers.iter().chain([&late, &later]).zip(1..) {
        card.expect(buffer, byte);
    }
    machine.check();
    drop((buffers, late, later));
    machine.expect_nothing();
}

#[test]
fn a_card_without_room_on_the_host_keeps_the_copies_and_the_request_fails() {
    let machine = Machines { host: MIB(16), ..crowded() }.build();
    let [card, other] = [&machine.cards[0], &machine.cards[1]];
    let buffers: Vec<_> = (1..=4).map(|byte| card.spilled(MIB(32), byte)).collect();
    let free = other.sim.memory_info().unwrap().free;
    let len = (free + MIB(64)).round_down(MIB(2));
    assert!(other.allocator.malloc(len, other.stream).is_err());
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    machine.check();
}

#[test]
fn a_reservation_of_the_other_cards_space_makes_copies_move_on() {
    let machine = Machines { budget: true, ..Machines::default() }.build();
    let card = &machine.cards[0];
    let buffers: Vec<_> = (1..=4).map(|byte| card.spilled(MIB(32), byte)).collect();
    let space = machine.spaces.space(SpaceId::gpu(1)).unwrap();
    assert_eq!(space.total(), MIB(128));
    let wanted = space.limit() - MIB(64);
    let reservation = space.request(wanted).deadline(LONG).wait().unwrap();
    assert!(space.total() <= space.limit());
    assert!(lies(&buffers[0], HOST) && lies(&buffers[1], HOST) && lies(&buffers[3], on_card(1)));
    drop(reservation);
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    drop(buffers);
    machine.expect_nothing();
}

#[test]
fn a_lowered_limit_moves_what_exceeds_it() {
    let machine = Machines::default().build();
    let card = &machine.cards[0];
    let buffers: Vec<_> = (1..=3).map(|byte| card.spilled(MIB(32), byte)).collect();
    assert_eq!(card.manager.set_peer_limit(1, MIB(32)), Bytes::ZERO);
    assert_eq!(card.stores[&1].taken(), MIB(32));
    assert!(lies(&buffers[0], HOST) && lies(&buffers[2], on_card(1)));
    assert_eq!(card.manager.relieve_peer(1, MIB(8)), MIB(8));
    assert_eq!(card.manager.relieve_peer(5, MIB(8)), Bytes::ZERO, "there is no such card");
    for (buffer, byte) in buffers.iter().zip(1..) {
        card.expect(buffer, byte);
    }
    machine.check();
}

/// The order in which the two cards' parts end.
#[test]
fn cards_are_closed_in_any_order() {
    for order in [
        [0, 1, 2, 3],
        [1, 0, 2, 3],
        [2, 3, 1, 0],
        [3, 2, 0, 1],
        [1, 3, 0, 2],
        [0, 2, 1, 3],
        [3, 0, 2, 1],
        [2, 1, 3, 0],
    ] {
        let holds = |_| true;
        let Machine { cards, spaces, pool } = Machines { holds, ..Machines::default() }.build();
        let sims: Vec<_> = cards.iter().map(|card| Arc::clone(&card.sim)).collect();
        let buffers: Vec<_> = cards.iter().map(|card| card.spilled(MIB(24), 1)).collect();
        let mut parts: Vec<Option<Box<dyn FnOnce()>>> = Vec::new();
        let (mut managers, mut allocators) = (Vec::new(), Vec::new());
        for (card, buffer) in cards.into_iter().zip(buffers) {
            let Card { allocator, manager, stores, .. } = card;
            managers
                .push(Some(Box::new(move || drop((buffer, manager, stores))) as Box<dyn FnOnce()>));
            allocators.push(Some(Box::new(move || {
                // The other parts hold it too. Closing it ends it for them.
                match Arc::try_unwrap(allocator) {
                    Ok(allocator) => allocator.close().unwrap(),
                    Err(shared) => drop(shared),
                }
            }) as Box<dyn FnOnce()>));
        }
        parts.append(&mut managers);
        parts.append(&mut allocators);
        for index in order {
            parts[index].take().expect("each once")();
        }
        drop(parts);
        drop((pool, spaces));
        for sim in sims {
            let live = sim.live();
            assert_eq!((live.handles, live.streams, live.events), (0, 0, 0), "{order:?}");
            assert!(sim.device_loss().is_none() && sim.hazards().is_empty());
        }
    }
}

/// Each card has more than it holds, and spills to all others, whose memory is scarce too.
fn spill_to_each_other(cards: usize) {
    let store =
        PeerStoreConfig { limit: MIB(64), backoff: Duration::ZERO, ..Machines::default().store };
    let config = SpillConfig { patience: LONG, ..Plan::default().config };
    let (holds, host) = (|_| true, MIB(1024));
    let machine = Machines {
        cards,
        memory: MIB(640),
        limit: None,
        host,
        holds,
        store,
        budget: false,
        config: SpillConfig { capacity: Some(MIB(64)), ..config },
    }
    .build();
    std::thread::scope(|scope| {
        for (index, card) in machine.cards.iter().enumerate() {
            for thread in 0..2 {
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed((index * 2 + thread) as u64);
                    let stream = card.allocator.create_stream().unwrap();
                    let queue = card.allocator.stream(stream).unwrap();
                    let buffers: Vec<_> =
                        (0..4).map(|_| card.manager.buffer(MIB(16)).unwrap()).collect();
                    let mut bytes = [None; 4];
                    for round in 0..24_u8 {
                        let at = random.usize(..4);
                        match random.u32(..6) {
                            0 | 1 => {
                                let lease = buffers[at].lease(Access::Exclusive, stream).unwrap();
                                card.sim.fill(queue, lease.address(0), round).unwrap();
                                bytes[at] = Some(round);
                            }
                            2 | 3 => {
                                let lease = buffers[at].lease(Access::Shared, stream).unwrap();
                                card.sim.synchronize_stream(queue).unwrap();
                                let one = AddrRange::new(lease.address(0).start, Bytes::new(1));
                                if let Some(byte) = bytes[at] {
                                    assert_eq!(card.sim.peek(one).unwrap(), [byte]);
                                }
                            }
                            4 => drop(card.manager.spill(MIB(32))),
                            // Takes what the others hold there.
                            _ => {
                                let free = card.sim.memory_info().unwrap().free;
                                let len = (free + MIB(16)).round_down(MIB(2));
                                if let Ok(block) = card.allocator.malloc(len, stream) {
                                    card.allocator.free(block, stream).unwrap();
                                    card.allocator.empty_cache().unwrap();
                                }
                            }
                        }
                    }
                    for (buffer, byte) in buffers.iter().zip(bytes) {
                        let Some(byte) = byte else { continue };
                        let lease = buffer.lease(Access::Shared, stream).unwrap();
                        card.sim.synchronize_stream(queue).unwrap();
                        let one = AddrRange::new(lease.address(0).start, Bytes::new(1));
                        assert_eq!(card.sim.peek(one).unwrap(), [byte]);
                    }
                });
            }
        }
    });
    let stats: Vec<SpillStats> = machine.cards.iter().map(Card::stats).collect();
    assert!(stats.iter().any(|stats| stats.to_peer_bytes > 0), "{stats:?}");
    assert!(stats.iter().any(|stats| stats.moved_on_bytes > 0), "{stats:?}");
    machine.expect_nothing();
}

#[test]
fn two_cards_that_spill_to_each_other_under_pressure_make_progress() {
    spill_to_each_other(2);
}

#[test]
fn four_cards_that_spill_to_each_other_under_pressure_make_progress() {
    spill_to_each_other(4);
}
