use super::*;

use Access::{Exclusive, Shared};

/// A buffer of two pieces of which `spilled` are on the host, readable there.
fn readable(core: &mut Deferrables, spilled: u64) -> BufferId {
    let a = written(core, 32, 0);
    core.set_readable(a).unwrap();
    assert_eq!(spill(core, 16 * spilled, 1).len() as u64, spilled);
    a
}

fn read(core: &mut Deferrables, a: BufferId) -> Option<Granted> {
    let granted = core.lease_in_place(a, &[S1], HolderKey(0), 2).unwrap();
    core.audit().unwrap();
    granted
}

#[test]
fn a_read_in_place_fills_nothing_and_takes_nothing_of_the_capacity() {
    let mut core = core();
    core.set_capacity(b(32));
    let a = readable(&mut core, 2);
    let granted = read(&mut core, a).unwrap();
    assert_eq!((granted.fill, core.occupied()), (vec![], b(0)));
    let other = add(&mut core, 32);
    let card = lease(&mut core, other, Exclusive, 3);
    end(&mut core, card, 3);
    end(&mut core, granted.lease, 3);
    let back = lease(&mut core, a, Shared, 4);
    assert_eq!(core.occupied(), b(64), "what is idle leaves for it");
    end(&mut core, back, 4);
}

#[test]
fn what_is_read_in_place_moves_in_no_direction() {
    let mut core = core();
    let a = readable(&mut core, 1);
    let granted = read(&mut core, a).unwrap();
    for access in [Shared, Exclusive] {
        let refused = try_lease(&mut core, &[(a, access)], S2, 3).unwrap_err();
        assert_eq!(refused, LeaseRefused::Busy { held_by: vec![granted.lease] });
    }
    let again = read(&mut core, a).expect("readers share");
    assert_eq!(core.choose(&short(16), 3).victims, []);
    let lower = core.choose_lower(&LowerShort { deficit: b(32), disk_room: b(100) });
    assert_eq!((lower.drops, lower.pushes), (vec![], vec![]));
    assert!(core.discard(a).is_err() && core.remove(a).is_err());
    for result in [core.pin(again.lease, a), core.expose(again.lease, a, Grade::Opaque)] {
        assert_eq!(result, Err(ExposeError::InPlace { buffer: a }));
    }
    core.cancel_lease(again.lease).unwrap();
    end(&mut core, granted.lease, 3);
    assert_eq!(spill(&mut core, 16, 4).len(), 1);
}

#[test]
fn what_was_chosen_to_leave_stays_for_a_read_in_place() {
    let mut core = core();
    let a = readable(&mut core, 1);
    let choice = core.choose(&short(16), 2);
    let out = choice.victims[0].moves[0].id;
    let granted = read(&mut core, a).unwrap();
    assert!(matches!(core.settle(out), Ok(Settled::Cleaned { .. })));
    end(&mut core, granted.lease, 3);
}

#[test]
fn a_usual_lease_is_taken_where_nothing_is_below_or_something_is_nowhere_or_moving() {
    let mut core = core();
    let card = readable(&mut core, 0);
    assert_eq!(read(&mut core, card), None, "all is on the card");
    let empty = add(&mut core, 16);
    core.set_readable(empty).unwrap();
    assert_eq!(read(&mut core, empty), None, "nothing was written");
    let plain = written(&mut core, 16, 0);
    let card = lease(&mut core, card, Shared, 1);
    assert_eq!(spill(&mut core, 16, 1), [piece(plain, 0)]);
    assert_eq!(read(&mut core, plain), None, "nobody said that it is readable");
    core.set_readable(plain).unwrap();
    let granted = try_lease(&mut core, &[(plain, Shared)], S2, 3).unwrap();
    assert_eq!(read(&mut core, plain), None, "it is on its way back");
    core.settle(granted.fill[0].id).unwrap();
    end(&mut core, granted.lease, 3);
    end(&mut core, card, 3);
}
