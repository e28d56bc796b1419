use super::*;

use Access::{Exclusive, Shared};

#[test]
fn pins_are_counted_and_outlive_the_lease() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    let reader = lease(&mut core, a, Shared, 1);
    core.pin(reader, a).unwrap();
    core.pin(reader, a).unwrap();
    end(&mut core, reader, 1);
    assert_eq!(core.unpin(a), Ok(1));
    assert_eq!(core.choose(&short(16), 2).victims, []);
    assert_eq!(core.holds(a).unwrap().to_string(), "1 pins to remove");
    assert_eq!(core.unpin(a), Ok(0));
    assert_eq!(core.unpin(a), Err(PinError::NotPinned { buffer: a }));
    assert_eq!(core.holds(a).unwrap().to_string(), "nothing holds it");
    assert_eq!(spill(&mut core, 16, 3), [piece(a, 0)]);
    let refused = core.pin(reader, a);
    assert_eq!(refused, Err(PinError::Lease(UnknownBufferLease { lease: reader })));
}

#[test]
fn what_is_pinned_leaves_less_for_leases() {
    let mut core = core();
    let (a, c) = (written(&mut core, 100, 0), add(&mut core, 100));
    let reader = lease(&mut core, a, Shared, 1);
    core.pin(reader, a).unwrap();
    end(&mut core, reader, 1);
    let refused = try_lease(&mut core, &[(c, Shared)], S1, 2).unwrap_err();
    assert!(matches!(&refused, LeaseRefused::Full { held_by, .. } if held_by.is_empty()));
    assert!(refused.to_string().contains("a pin has ended"), "{refused}");
    core.unpin(a).unwrap();
    let _granted = try_lease(&mut core, &[(c, Shared)], S1, 2).unwrap();
}

#[test]
fn a_buffer_is_pinned_under_a_lease_only() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 16, 0));
    let reader = lease(&mut core, a, Shared, 0);
    let refused = core.pin(reader, c);
    assert_eq!(refused, Err(PinError::NotLeased { buffer: c }));
    end(&mut core, reader, 0);
    let refused = core.pin(reader, a);
    assert_eq!(refused, Err(PinError::Lease(UnknownBufferLease { lease: reader })));
}

#[test]
fn what_is_written_through_a_pin_is_never_clean() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    spill(&mut core, 32, 1);
    let writer = lease(&mut core, a, Exclusive, 2);
    core.pin(writer, a).unwrap();
    let nothing = LeaseEnd { uses: &[], writes: Writes::Only(&[]) };
    assert_eq!(core.end_lease(writer, &nothing, 3).unwrap().len(), 2, "who knows what it writes");
    let room = SpillRoom { host: b(100), disk: b(0), ..SpillRoom::default() };
    assert_eq!(core.clean(b(100), &with(room), 1000), [], "and it goes on writing");
    core.unpin(a).unwrap();
    let choice = core.choose(&short(32), 1000);
    assert!(choice.victims.iter().all(|victim| victim.moves[0].to == Some(SpillTier::Host)));
}
