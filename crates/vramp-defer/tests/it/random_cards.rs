//! Random programs on machines of several cards: leases, spills, mallocs, lowered limits and failing
//! calls on each card. Every byte stays, no card touches freed memory, and nothing stays held.

use vramp_driver::Call;
use vramp_driver::sim::Kernel;
use vramp_tiers::peer::PeerStoreConfig;

use super::machine::{Machine, Machines};
use super::*;

const CALLS: [Call; 10] = [
    Call::Create,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::Copy,
    Call::CopyToHost,
    Call::Wait,
    Call::Record,
    Call::Query,
    Call::SynchronizeEvent,
];

struct Program {
    machine: Machine,
    buffers: Vec<(usize, DeferrableBuffer, Option<u8>)>,
    random: fastrand::Rng,
}

impl Program {
    fn new(seed: u64, cards: usize) -> Program {
        let random = fastrand::Rng::with_seed(seed);
        let config = SpillConfig { patience: Duration::ZERO, ..Plan::default().config };
        let usual = Machines::default().store;
        let chunk = if seed.is_multiple_of(2) { PIECE } else { MIB(32) };
        let store =
            PeerStoreConfig { limit: MIB(96), chunk, backoff: Duration::from_millis(1), ..usual };
        let (holds, budget) = (|_| true, seed.is_multiple_of(3));
        let machine =
            Machines { cards, holds, store, config, budget, ..Machines::default() }.build();
        Program { machine, buffers: Vec::new(), random }
    }

    fn step(&mut self, step: u8) {
        let Program { machine, buffers, random } = self;
        let index = random.usize(..machine.cards.len());
        let card = &machine.cards[index];
        if random.u32(..6) == 0 {
            let call = CALLS[random.usize(..CALLS.len())];
            let from = random.u64(1..4);
            card.sim.set_faults(match random.bool() {
                true => FaultPlan::from_nth_of(call, from).with_code(304),
                false => FaultPlan::nth_of(call, from).with_code(304),
            });
        }
        match random.u32(..12) {
            0 | 1 if buffers.len() < 12 => {
                let len = Bytes::new(random.u64(1..(28 << 20)));
                if let Ok(buffer) = card.manager.buffer(len) {
                    buffers.push((index, buffer, None));
                }
            }
            2 if buffers.len() > 4 => drop(buffers.swap_remove(random.usize(..buffers.len()))),
            3 => drop(card.manager.spill(MIB(random.u64(1..64)))),
            4 => drop(card.manager.clean(MIB(16))),
            5 => {
                if let Ok(block) = card.allocator.malloc(MIB(random.u64(1..40)), card.stream) {
                    let range = AddrRange::new(block.addr(), block.len());
                    // It may fail by plan.
                    let _ = card.sim.fill(card.queue, range, 0xEE);
                    card.allocator.free(block, card.stream).unwrap();
                }
            }
            6 => {
                let other = random.u32(..machine.cards.len() as u32);
                if random.bool() {
                    card.manager.relieve_peer(other, MIB(random.u64(1..32)));
                } else {
                    card.manager.set_peer_limit(other, MIB(random.u64(0..96)));
                }
            }
            7 => card.sim.advance(random.u64(..2_000_000)),
            8 => {
                let space = machine.spaces.space(SpaceId::gpu(index as u32)).unwrap();
                let wanted = space.limit().saturating_sub(MIB(random.u64(0..64)));
                drop(space.request(wanted).now());
            }
            _ if !buffers.is_empty() => {
                let at = random.usize(..buffers.len());
                let (home, buffer, byte) = &mut buffers[at];
                let card = &machine.cards[*home];
                let stream = card.stream;
                let Ok(lease) = buffer.lease(Access::Exclusive, stream) else { return };
                let busy = Kernel::new("busy").writing(lease.address(0));
                let launched = card.sim.launch(card.queue, busy.lasting(random.u64(..100_000)));
                launched.unwrap();
                card.sim.fill(card.queue, lease.address(0), step).unwrap();
                *byte = Some(step);
            }
            _ => {}
        }
    }
}

fn run(cards: usize, seeds: std::ops::Range<u64>) {
    let mut to_peers = 0;
    for seed in seeds {
        println!("seed {seed}, {cards} cards");
        let mut program = Program::new(seed, cards);
        for step in 1..=120 {
            program.step(step);
            for card in &program.machine.cards {
                card.sim.set_faults(FaultPlan::none());
            }
            program.machine.check();
        }
        let Program { machine, buffers, .. } = program;
        for (home, buffer, byte) in &buffers {
            let Some(byte) = *byte else { continue };
            machine.cards[*home].expect(buffer, byte);
        }
        to_peers += machine.cards.iter().map(|card| card.stats().to_peer_bytes).sum::<u64>();
        drop(buffers);
        for card in &machine.cards {
            card.wait();
            let census = card.manager.census();
            assert_eq!((census.buffers, census.moves), (0, 0));
            for store in card.stores.values() {
                assert_eq!(store.stats().used, Bytes::ZERO);
            }
        }
        machine.check();
    }
    assert!(to_peers > MIB(100).count(), "only {to_peers} B went to other cards");
}

#[test]
fn two_cards_at_random_lose_nothing() {
    run(2, 0..20);
}

#[test]
fn four_cards_at_random_lose_nothing() {
    run(4, 20..30);
}
