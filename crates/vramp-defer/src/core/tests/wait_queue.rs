//! Which requests are granted before which.

use super::*;

use Access::{Exclusive, Shared};

/// Holders in these tests.
const A: HolderKey = HolderKey(1);
const B: HolderKey = HolderKey(2);
const C: HolderKey = HolderKey(3);
const D: HolderKey = HolderKey(4);

type Buffers<'a> = &'a [(BufferId, Access)];

fn ask(
    core: &mut Deferrables,
    holder: HolderKey,
    buffers: Buffers<'_>,
    ticket: Option<Ticket>,
) -> Result<BufferLeaseId, LeaseRefused> {
    let Some(ticket) = ticket else {
        let request = LeaseRequest { buffers, streams: &[S1], holder, ..LeaseRequest::default() };
        let granted = core.lease(&request, 0);
        core.audit().unwrap();
        return granted.map(|granted| granted.lease);
    };
    recheck(core, ticket, &[])
}

/// Checks a waiter.
fn recheck(
    core: &mut Deferrables,
    ticket: Ticket,
    in_place_allowed: &[BufferId],
) -> Result<BufferLeaseId, LeaseRefused> {
    let granted = core.recheck(ticket, in_place_allowed, 2)?;
    core.audit().unwrap();
    granted.map(|granted| granted.lease).ok_or_else(|| core.refusal_of(ticket).unwrap())
}

/// Checks the marked waiters, of which none is served.
fn none_is_served(core: &mut Deferrables) {
    while let Some(ticket) = core.next_to_check() {
        let allowed = core.wait_queue.waiters[&ticket].in_place_allowed.clone();
        assert_eq!(core.recheck(ticket, &allowed, 0), Ok(None));
    }
    core.audit().unwrap();
}

/// Is refused, and enters the queue.
fn wait(core: &mut Deferrables, holder: HolderKey, buffers: Buffers<'_>) -> Ticket {
    assert!(ask(core, holder, buffers, None).is_err(), "it need not wait");
    enqueue(core, holder, buffers, &[])
}

fn enqueue(
    core: &mut Deferrables,
    holder: HolderKey,
    buffers: Buffers<'_>,
    in_place_allowed: &[BufferId],
) -> Ticket {
    let request = LeaseRequest { buffers, holder, ..LeaseRequest::default() };
    let ticket = core.enqueue(&request, in_place_allowed, None).unwrap();
    none_is_served(core);
    ticket
}

fn behind(ticket: Ticket) -> LeaseRefused {
    LeaseRefused::OlderWaiters { behind: ticket }
}

#[test]
fn readers_do_not_pass_a_writer_who_waits() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let first = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    let writer = wait(&mut core, B, &[(a, Exclusive)]);
    let reader = ask(&mut core, C, &[(a, Shared)], None).unwrap_err();
    assert_eq!(reader, behind(writer));
    let reader = wait(&mut core, C, &[(a, Shared)]);
    assert_eq!(core.census().waiting, 2);
    end(&mut core, first, 1);
    assert_eq!(ask(&mut core, C, &[(a, Shared)], Some(reader)), Err(behind(writer)));
    let wrote = ask(&mut core, B, &[(a, Exclusive)], Some(writer)).unwrap();
    assert!(!core.dequeue(writer), "it has left");
    end(&mut core, wrote, 2);
    assert!(ask(&mut core, C, &[(a, Shared)], Some(reader)).is_ok());
}

#[test]
fn those_who_want_nothing_of_each_other_pass_each_other() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 16, 0));
    let _held = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    wait(&mut core, B, &[(a, Exclusive)]);
    assert!(ask(&mut core, C, &[(c, Exclusive)], None).is_ok(), "another buffer");
    let _written = ask(&mut core, D, &[(c, Shared)], None).unwrap_err();
}

#[test]
fn small_sets_do_not_take_the_room_that_a_large_one_waits_for() {
    let mut core = core();
    let small: Vec<_> = (0..4).map(|_| written(&mut core, 40, 0)).collect();
    let large = add(&mut core, 120);
    let first = ask(&mut core, A, &[(small[0], Shared)], None).unwrap();
    let second = ask(&mut core, B, &[(small[1], Shared)], None).unwrap();
    let ticket = wait(&mut core, C, &[(large, Exclusive)]);
    let late = ask(&mut core, D, &[(small[2], Shared)], None).unwrap_err();
    assert_eq!(late, behind(ticket), "there would be room, and then less");
    let late = ask(&mut core, D, &[(small[0], Shared)], None).unwrap_err();
    assert_eq!(late, behind(ticket), "it would keep what is to be freed");
    end(&mut core, first, 1);
    assert!(ask(&mut core, C, &[(large, Exclusive)], Some(ticket)).is_ok());
    assert!(ask(&mut core, D, &[(small[1], Shared)], None).is_ok(), "the queue is empty");
    end(&mut core, second, 2);
}

#[test]
fn room_that_no_lease_has_is_waited_for_by_oneself() {
    let mut core = core();
    let (pinned, large, small) =
        (written(&mut core, 40, 0), add(&mut core, 140), written(&mut core, 16, 0));
    let lease = ask(&mut core, A, &[(pinned, Shared)], None).unwrap();
    core.pin(lease, pinned).unwrap();
    end(&mut core, lease, 1);
    wait(&mut core, B, &[(large, Shared)]);
    assert!(ask(&mut core, C, &[(small, Shared)], None).is_ok(), "a pin ends at no known time");
}

#[test]
fn what_is_pinned_or_wanted_anyway_takes_nothing_from_who_waits_for_room() {
    let mut core = core();
    let (pinned, large, small) =
        (written(&mut core, 16, 0), add(&mut core, 120), written(&mut core, 40, 0));
    let lease = ask(&mut core, A, &[(pinned, Shared)], None).unwrap();
    core.pin(lease, pinned).unwrap();
    end(&mut core, lease, 1);
    let _small = ask(&mut core, A, &[(small, Shared)], None).unwrap();
    wait(&mut core, B, &[(large, Shared)]);
    assert!(ask(&mut core, C, &[(pinned, Exclusive)], None).is_ok());
}

#[test]
fn whoever_holds_what_an_older_one_waits_for_passes_it() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 16, 0));
    let outer = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    let ticket = wait(&mut core, B, &[(a, Exclusive), (c, Exclusive)]);
    for other in [(a, Shared), (c, Shared)] {
        assert_eq!(ask(&mut core, C, &[other], None), Err(behind(ticket)));
        let inner = ask(&mut core, A, &[other], None).unwrap();
        end(&mut core, inner, 1);
    }
    end(&mut core, outer, 1);
    assert_eq!(ask(&mut core, A, &[(a, Shared)], None), Err(behind(ticket)), "not any more");
}

#[test]
fn whoever_holds_up_a_holder_who_waits_passes_as_well() {
    let mut core = core();
    let all: Vec<_> = (0..3).map(|_| written(&mut core, 16, 0)).collect();
    let (x, y, z) = (all[0], all[1], all[2]);
    let _first = ask(&mut core, A, &[(x, Shared)], None).unwrap();
    let second = ask(&mut core, B, &[(z, Exclusive)], None).unwrap();
    let oldest = wait(&mut core, C, &[(x, Exclusive), (y, Exclusive)]);
    // The oldest waits for A, and A for B: B must not wait for the oldest.
    wait(&mut core, A, &[(z, Shared)]);
    assert_eq!(ask(&mut core, D, &[(y, Shared)], None), Err(behind(oldest)));
    let passes = ask(&mut core, B, &[(y, Shared)], None).unwrap();
    end(&mut core, passes, 1);
    end(&mut core, second, 1);
}

#[test]
fn whoever_leaves_the_line_keeps_nobody_waiting() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let _first = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    let writer = wait(&mut core, B, &[(a, Exclusive)]);
    assert!(core.dequeue(writer) && !core.dequeue(writer));
    assert!(ask(&mut core, C, &[(a, Shared)], None).is_ok());
    assert_eq!(core.census().waiting, 0);
}

#[test]
fn a_buffer_that_is_removed_keeps_nobody_waiting() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 140, 0));
    let first = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    wait(&mut core, B, &[(a, Exclusive), (c, Exclusive)]);
    core.remove(c).unwrap();
    end(&mut core, first, 1);
    core.remove(a).unwrap();
    let other = written(&mut core, 16, 0);
    assert!(ask(&mut core, C, &[(other, Shared)], None).is_ok());
}

/// A readable buffer on the host.
fn below(core: &mut Deferrables, len: u64) -> BufferId {
    let a = written(core, len, 0);
    core.set_readable(a).unwrap();
    spill(core, len, 1);
    a
}

/// Requests a set of which what is only read may stay in place.
fn read(
    core: &mut Deferrables,
    holder: HolderKey,
    buffers: Buffers<'_>,
    ticket: Option<Ticket>,
) -> Result<BufferLeaseId, LeaseRefused> {
    let in_place_allowed: Vec<BufferId> = buffers.iter().map(|&(id, _)| id).collect();
    if let Some(ticket) = ticket {
        return recheck(core, ticket, &in_place_allowed);
    }
    let request = LeaseRequest { buffers, streams: &[S1], holder, ..LeaseRequest::default() };
    let granted = core.lease_in_place(&request, &in_place_allowed, 2);
    core.audit().unwrap();
    granted.map(|granted| granted.lease)
}

/// Is refused, and enters the queue.
fn wait_to_read(core: &mut Deferrables, holder: HolderKey, buffers: Buffers<'_>) -> Ticket {
    assert!(read(core, holder, buffers, None).is_err(), "it need not wait");
    let in_place_allowed: Vec<BufferId> = buffers.iter().map(|&(id, _)| id).collect();
    enqueue(core, holder, buffers, &in_place_allowed)
}

#[test]
fn who_reads_in_place_does_not_pass_who_waits_for_the_buffer() {
    let mut core = core();
    let a = below(&mut core, 16);
    let reads = read(&mut core, A, &[(a, Shared)], None).unwrap();
    let user = wait(&mut core, B, &[(a, Shared)]);
    assert_eq!(read(&mut core, C, &[(a, Shared)], None), Err(behind(user)));
    assert!(read(&mut core, A, &[(a, Shared)], None).is_ok(), "it holds it already");
    end(&mut core, reads, 3);
    assert!(matches!(
        ask(&mut core, B, &[(a, Shared)], Some(user)),
        Err(LeaseRefused::Busy { .. })
    ));
}

#[test]
fn a_set_read_in_place_lines_up_for_what_comes() {
    let mut core = core();
    let (a, table) = (below(&mut core, 160), add(&mut core, 16));
    let first = ask(&mut core, A, &[(table, Shared)], None).unwrap();
    let set = [(a, Shared), (table, Exclusive)];
    let builds = wait_to_read(&mut core, B, &set);
    assert_eq!(ask(&mut core, C, &[(table, Shared)], None), Err(behind(builds)));
    let late = ask(&mut core, C, &[(a, Shared)], None);
    assert!(matches!(late, Err(LeaseRefused::Full { .. })), "{late:?}");
    assert!(read(&mut core, C, &[(a, Shared)], None).is_ok(), "readers in place share");
    end(&mut core, first, 3);
    let late = ask(&mut core, C, &[(a, Shared)], None).unwrap_err();
    assert!(matches!(late, LeaseRefused::Busy { .. }), "{late}");
    assert!(read(&mut core, B, &set, Some(builds)).is_ok());
}

#[test]
fn nobody_brings_to_the_card_what_an_older_one_waits_to_read_where_it_is() {
    let mut core = core();
    let (a, table) = (below(&mut core, 32), add(&mut core, 16));
    let _first = ask(&mut core, A, &[(table, Shared)], None).unwrap();
    let builds = wait_to_read(&mut core, B, &[(a, Shared), (table, Exclusive)]);
    assert_eq!(ask(&mut core, C, &[(a, Shared)], None), Err(behind(builds)));
}

#[test]
fn what_stays_takes_no_room_from_who_waits_and_waits_for_none() {
    let mut core = core();
    let [a, c] = [below(&mut core, 100), below(&mut core, 100)];
    let [small, large] = [40, 150].map(|len| add(&mut core, len));
    let _first = ask(&mut core, A, &[(small, Shared)], None).unwrap();
    let oldest = wait_to_read(&mut core, B, &[(a, Shared), (large, Exclusive)]);
    assert!(read(&mut core, C, &[(c, Shared)], None).is_ok(), "it takes none");
    let other = add(&mut core, 8);
    let late = read(&mut core, C, &[(a, Shared), (other, Shared)], None).unwrap_err();
    assert_eq!(late, behind(oldest), "of the set, what comes takes some");
}

#[test]
fn whoever_waits_on_keeps_its_place_and_says_anew_what_may_stay() {
    let mut core = core();
    let (a, table) = (below(&mut core, 16), add(&mut core, 16));
    let _first = ask(&mut core, A, &[(table, Shared)], None).unwrap();
    let set = [(a, Shared), (table, Exclusive)];
    let builds = wait_to_read(&mut core, B, &set);
    let late = wait(&mut core, C, &[(a, Shared)]);
    assert!(recheck(&mut core, builds, &[]).is_err(), "it cannot be read there any more");
    assert_eq!(core.census().waiting, 2);
    assert!(ask(&mut core, C, &[(a, Shared)], Some(late)).is_ok(), "both use it on the card");
}

#[test]
fn a_request_for_what_is_gone_does_not_confuse_those_who_ask_behind_it() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 16, 0));
    let large = add(&mut core, 150);
    let _first = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    wait(&mut core, B, &[(large, Shared)]);
    let both = wait(&mut core, C, &[(a, Exclusive), (c, Exclusive)]);
    core.remove(c).unwrap();
    assert_eq!(ask(&mut core, D, &[(a, Shared)], None), Err(behind(both)));
}

#[test]
fn a_lease_that_takes_memory_waits_for_older_requests_of_the_pool() {
    let mut core = core();
    let [spilled, leaves, stays, old] = [0, 1, 2, 3].map(|at| written(&mut core, 16, at));
    assert_eq!(spill(&mut core, 16, 10), [piece(spilled, 0)]);
    let held = ask(&mut core, D, &[(old, Exclusive)], None).unwrap();
    let older = wait(&mut core, B, &[(old, Shared)]);
    let [first, second] = [A, A].map(|holder| core.enqueue_pool_request(holder));
    let choice = core.choose(&short(16), 20);
    assert_eq!(choice.victims[0].moves[0].piece, piece(leaves, 0));

    // What takes nothing from it does not wait, nor what came before it, nor its own thread.
    let lease = ask(&mut core, B, &[(stays, Exclusive)], None).unwrap();
    end(&mut core, lease, 20);
    end(&mut core, held, 20);
    let lease = ask(&mut core, B, &[(old, Shared)], Some(older)).unwrap();
    end(&mut core, lease, 20);
    let refused = ask(&mut core, B, &[(leaves, Shared)], None);
    assert_eq!(refused, Err(behind(second)));
    let lease = ask(&mut core, A, &[(spilled, Shared)], None).unwrap();
    let less = core.cancel_lease(lease).unwrap();
    assert!(less.is_empty(), "its restore goes on");
    let restore = core.moves.iter().find(|(_, moving)| **moving == piece(spilled, 0));
    let restore = *restore.unwrap().0;
    core.abandon(restore).unwrap();

    // Those that wait are served once no older request is left, in order.
    let waiters = [leaves, spilled].map(|buffer| wait(&mut core, B, &[(buffer, Shared)]));
    assert_eq!(core.census().waiting, 2);
    assert_eq!(settle_all(&mut core, &choice), [piece(leaves, 0)]);
    none_is_served(&mut core);
    let third = core.enqueue_pool_request(A);
    assert!(core.dequeue(second) && !core.dequeue(second));
    none_is_served(&mut core);
    core.dequeue(first);
    for ticket in waiters {
        assert_eq!(core.next_to_check(), Some(ticket));
        let lease = recheck(&mut core, ticket, &[]).unwrap();
        core.cancel_lease(lease).unwrap();
    }
    assert_eq!(
        ask(&mut core, C, &[(leaves, Exclusive)], None),
        Err(LeaseRefused::Settling {
            moves: core
                .moves
                .iter()
                .filter(|it| it.1.buffer == leaves)
                .map(|it| (*it.0, *it.1))
                .collect(),
        })
    );
    core.dequeue(third);
    none_is_served(&mut core);
    assert!(core.wait_queue.is_empty() && core.wait_queue.entries() == 0);
}

#[test]
fn the_holder_of_a_lease_passes_requests_of_the_pool() {
    let mut core = core();
    let [spilled, held] = [0, 1].map(|at| written(&mut core, 16, at));
    spill(&mut core, 16, 10);
    let request = core.enqueue_pool_request(A);
    assert_eq!(ask(&mut core, B, &[(spilled, Shared)], None), Err(behind(request)));
    let lease = ask(&mut core, B, &[(held, Shared)], None).unwrap();
    let second = ask(&mut core, B, &[(spilled, Shared)], None).unwrap();
    core.cancel_lease(second).unwrap();
    end(&mut core, lease, 20);
    core.dequeue(request);
}
