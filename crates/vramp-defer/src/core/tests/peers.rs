use super::*;

use Access::Shared;

const PEER: fn(u32) -> SpillTier = |ordinal| SpillTier::Peer(peer(ordinal));

/// Room on two cards, the host and the disk.
fn room(peers: [u64; 2], host: u64, disk: u64) -> SpillRoom {
    let mut room = SpillRoom { host: b(host), disk: b(disk), ..SpillRoom::default() };
    (1..).zip(peers).for_each(|(ordinal, free)| room.peers[peer(ordinal)] = b(free));
    room
}

/// A piece on a card, last used at `now_ns`.
fn on_card(core: &mut Deferrables, ordinal: u32, now_ns: u64) -> BufferId {
    let buffer = written(core, 16, now_ns);
    core.hint(buffer, Hint::WontNeed).unwrap();
    let peers = if ordinal == 1 { [100, 0] } else { [0, 100] };
    let demand = SpillDemand { room: room(peers, 0, 0), ..short(16) };
    let choice = core.choose(&demand, now_ns);
    assert_eq!(settle_all(core, &choice), [piece(buffer, 0)]);
    buffer
}

fn demand(deficit: u64, host: u64, disk: u64) -> PeerDemand {
    PeerDemand { peer: peer(1), deficit: b(deficit), room: room([0; 2], host, disk) }
}

#[test]
fn contents_go_to_the_card_with_the_fastest_link_then_to_the_next_tier() {
    let mut core = core();
    let buffer = written(&mut core, 80, 0);
    let mut demand = SpillDemand { room: room([16, 16], 16, 16), ..short(80) };
    demand.rates.to_peer[peer(1)] = Some(2_000_000_000);
    demand.rates.to_peer[peer(2)] = Some(3_000_000_000);
    let choice = core.choose(&demand, 10);
    let to: Vec<_> = choice.victims.iter().map(|one| one.moves[0].to.unwrap()).collect();
    assert_eq!(to, [PEER(2), PEER(1), SpillTier::Host, SpillTier::Disk]);
    assert_eq!(choice.short.unwrap().no_room, b(16));
    settle_all(&mut core, &choice);
    let census = core.census();
    assert_eq!(
        (census.spilled_peer, census.spilled_host, census.spilled_disk),
        (b(32), b(16), b(16))
    );
    let back = try_lease(&mut core, &[(buffer, Shared)], S1, 20).unwrap();
    let from: Vec<_> = back.restores.iter().map(|restore| restore.from).collect();
    assert_eq!(from.len(), 4);
    assert!(from.contains(&PEER(1)) && from.contains(&PEER(2)));
}

#[test]
fn a_card_behind_a_slow_link_comes_after_the_host() {
    let mut core = core();
    written(&mut core, 32, 0);
    let mut demand = SpillDemand { room: room([16, 0], 16, 16), ..short(32) };
    demand.rates.to_peer[peer(1)] = Some(900_000_000);
    let choice = core.choose(&demand, 10);
    let to: Vec<_> = choice.victims.iter().map(|one| one.moves[0].to.unwrap()).collect();
    assert_eq!(to, [SpillTier::Host, PEER(1)]);
}

#[test]
fn what_moves_on_from_a_card_is_first_what_is_not_needed_then_the_least_recently_used() {
    let mut core = core();
    let [old, young, used] = [10, 20, 0].map(|now| on_card(&mut core, 1, now));
    let reader = lease(&mut core, used, Shared, 30);
    end(&mut core, reader, 30);
    let other = on_card(&mut core, 2, 5);
    let choice = core.reclaim_peer(&demand(17, 100, 0));
    core.audit().unwrap();
    assert_eq!(choice.stale.len(), 1, "contents on their card need no copy");
    assert_eq!((choice.stale[0].piece, choice.stale[0].from), (piece(used, 0), PEER(1)));
    let pushes: Vec<_> = choice.pushes.iter().map(|push| (push.piece, push.to)).collect();
    assert_eq!(pushes, [(piece(old, 0), SpillTier::Host)]);
    assert!(matches!(core.states(old).unwrap()[0], PieceState::Pushing { .. }));
    core.settle(choice.pushes[0].id).unwrap();
    core.audit().unwrap();
    assert_eq!(core.states(old).unwrap(), [PieceState::Spilled { copies: HOST }]);
    let choice = core.reclaim_peer(&demand(100, 8, 16));
    let pushes: Vec<_> = choice.pushes.iter().map(|push| (push.piece, push.to)).collect();
    assert_eq!(pushes, [(piece(young, 0), SpillTier::Disk)], "the host is full");
    assert_eq!(choice.missing, b(84));
    core.abandon(choice.pushes[0].id).unwrap();
    core.audit().unwrap();
    assert_eq!((core.copies_on(peer(1)), core.copies_on(peer(2))), (1, 1));
    assert_eq!(try_lease(&mut core, &[(other, Shared)], S1, 40).unwrap().restores[0].from, PEER(2));
}

#[test]
fn a_copy_that_a_card_refuses_goes_to_the_host_with_its_promise() {
    let mut core = core();
    written(&mut core, 32, 0);
    let wide = SpillDemand { room: room([32, 0], 0, 0), ..short(32) };
    let choice = core.choose(&wide, 10);
    let ids: Vec<_> = choice.victims.iter().map(|one| one.moves[0].id).collect();
    assert_eq!(core.redirect(ids[0], room([0; 2], 16, 0)), Some(SpillTier::Host));
    core.audit().unwrap();
    assert_eq!(core.redirect(ids[1], room([0; 2], 16, 0)), None, "the host's room is promised");
    assert_eq!(core.redirect(ids[0], room([0; 2], 64, 0)), None, "it goes to no card any more");
    core.copy_queued(ids[1], token(S2, 1)).unwrap();
    assert_eq!(core.redirect(ids[1], room([0; 2], 64, 0)), None, "the copy is queued");
    core.audit().unwrap();
}

#[test]
fn a_buffer_with_pinned_memory_stays_and_its_eviction_is_cancelled() {
    let mut core = core();
    let [pinned, other] = [0, 1].map(|now| written(&mut core, 16, now));
    let range = core.slice(pinned).unwrap().range;
    let choice = core.choose(&short(32), 10);
    core.set_pinned_memory(range, true);
    core.audit().unwrap();
    for out in choice.victims.iter().flat_map(|victim| &victim.moves) {
        let settled = core.settle(out.id).unwrap();
        let stays = matches!(settled, Settled::Cleaned { .. });
        assert_eq!(stays, out.piece.buffer == pinned, "{settled:?}");
    }
    let short = core.choose(&short(16), 20).short.unwrap();
    assert_eq!((short.pinned, short.missing), (b(16), b(16)));
    assert_eq!(core.census().held, b(16));
    core.set_pinned_memory(range, false);
    assert_eq!(spill(&mut core, 16, 30), [piece(pinned, 0)]);
    assert!(matches!(core.states(other).unwrap()[0], PieceState::Spilled { .. }));
}

#[test]
fn a_removed_buffer_with_pinned_memory_commits_nothing() {
    let mut core = core();
    let buffer = written(&mut core, 16, 0);
    core.set_pinned_memory(core.slice(buffer).unwrap().range, true);
    assert_eq!(core.census().committed, b(16));
    core.remove(buffer).unwrap();
    core.audit().unwrap();
    assert_eq!(core.census().committed, b(0));
}

/// The copies looked at to move one on do not grow with those on the card.
#[test]
fn moving_one_copy_on_looks_at_few_of_many() {
    for count in [10, 1000, u64::from(vramp_testing::cases(20_000))] {
        let mut core =
            Deferrables::new(DeferConfig { capacity: b(u64::MAX >> 1), ..config() }).unwrap();
        let buffers: Vec<BufferId> =
            (0..count).map(|_| core.add_buffer(b(16)).unwrap().buffer).collect();
        for (&buffer, now) in buffers.iter().zip(0..) {
            let write = [(buffer, Access::Exclusive)];
            let request = LeaseRequest { buffers: &write, ..LeaseRequest::default() };
            let granted = core.lease(&request, now).unwrap();
            core.end_lease(granted.lease, &LeaseEnd::default(), now).unwrap();
        }
        let all = SpillDemand { room: room([16 * count, 0], 0, 0), ..short(16 * count) };
        let choice = core.choose(&all, count);
        for out in choice.victims.iter().flat_map(|victim| &victim.moves) {
            core.settle(out.id).unwrap();
        }
        assert_eq!(core.copies_on(peer(1)) as u64, count);
        let choice = core.reclaim_peer(&demand(16 * 4, 1 << 40, 0));
        let moved: Vec<BufferId> = choice.pushes.iter().map(|push| push.piece.buffer).collect();
        assert_eq!(moved, buffers[..4], "the least recently used");
        assert_eq!(core.counters().peer_copies_looked_at, 4);
        core.audit().unwrap();
    }
}
