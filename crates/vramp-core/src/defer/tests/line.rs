//! Who is served before whom.

use super::*;

use Access::{Exclusive, Shared};

/// Who asks in these tests.
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
) -> Result<LeaseId, LeaseRefused> {
    let request = LeaseRequest { buffers, streams: &[S1], holder, ticket };
    let granted = core.lease(&request, 0);
    core.audit().unwrap();
    granted.map(|granted| granted.lease)
}

/// Is refused, and lines up.
fn wait(core: &mut Deferrables, holder: HolderKey, buffers: Buffers<'_>) -> Ticket {
    assert!(ask(core, holder, buffers, None).is_err(), "it need not wait");
    let request = LeaseRequest { buffers, holder, ..LeaseRequest::default() };
    let ticket = core.line_up(&request).unwrap();
    core.audit().unwrap();
    ticket
}

fn behind(tickets: &[Ticket]) -> LeaseRefused {
    LeaseRefused::Behind { waiting: tickets.to_vec() }
}

#[test]
fn readers_do_not_pass_a_writer_who_waits() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let first = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    let writer = wait(&mut core, B, &[(a, Exclusive)]);
    let reader = ask(&mut core, C, &[(a, Shared)], None).unwrap_err();
    assert_eq!(reader, behind(&[writer]));
    let reader = wait(&mut core, C, &[(a, Shared)]);
    assert_eq!(core.census().waiting, 2);
    end(&mut core, first, 1);
    assert_eq!(ask(&mut core, C, &[(a, Shared)], Some(reader)), Err(behind(&[writer])));
    let wrote = ask(&mut core, B, &[(a, Exclusive)], Some(writer)).unwrap();
    assert!(core.leave_line(writer));
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
    assert_eq!(late, behind(&[ticket]), "there would be room, and then less");
    let late = ask(&mut core, D, &[(small[0], Shared)], None).unwrap_err();
    assert_eq!(late, behind(&[ticket]), "it would keep what is to be freed");
    end(&mut core, first, 1);
    assert!(ask(&mut core, C, &[(large, Exclusive)], Some(ticket)).is_ok());
    core.leave_line(ticket);
    assert!(ask(&mut core, D, &[(small[1], Shared)], None).is_ok(), "nobody waits any more");
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
    assert!(ask(&mut core, C, &[(small, Shared)], None).is_ok(), "a pin has no end in sight");
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
        assert_eq!(ask(&mut core, C, &[other], None), Err(behind(&[ticket])));
        let inner = ask(&mut core, A, &[other], None).unwrap();
        end(&mut core, inner, 1);
    }
    end(&mut core, outer, 1);
    assert_eq!(ask(&mut core, A, &[(a, Shared)], None), Err(behind(&[ticket])), "not any more");
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
    assert_eq!(ask(&mut core, D, &[(y, Shared)], None), Err(behind(&[oldest])));
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
    assert!(core.leave_line(writer) && !core.leave_line(writer));
    assert!(ask(&mut core, C, &[(a, Shared)], None).is_ok());
    assert_eq!(core.census().waiting, 0);
}

#[test]
fn a_buffer_that_is_removed_keeps_nobody_waiting() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 150, 0));
    let first = ask(&mut core, A, &[(a, Shared)], None).unwrap();
    wait(&mut core, B, &[(a, Exclusive), (c, Exclusive)]);
    core.remove(c).unwrap();
    end(&mut core, first, 1);
    core.remove(a).unwrap();
    let other = written(&mut core, 16, 0);
    assert!(ask(&mut core, C, &[(other, Shared)], None).is_ok());
}

#[test]
fn who_reads_in_place_does_not_pass_who_waits_for_the_buffer() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    core.set_readable(a).unwrap();
    spill(&mut core, 16, 1);
    let reads = core.lease_in_place(a, &[S1], A, 2).unwrap().unwrap();
    let user = wait(&mut core, B, &[(a, Shared)]);
    assert_eq!(core.lease_in_place(a, &[S1], C, 2).unwrap(), None);
    assert!(core.lease_in_place(a, &[S1], A, 2).unwrap().is_some(), "it holds it already");
    end(&mut core, reads.lease, 3);
    assert!(matches!(
        ask(&mut core, B, &[(a, Shared)], Some(user)),
        Err(LeaseRefused::Busy { .. })
    ));
}
