use super::*;

use Access::{Exclusive, Shared};

/// A buffer that was exposed under a lease that has ended.
fn exposed(core: &mut Deferrables, grade: PointerScope) -> BufferId {
    let a = written(core, 16, 0);
    let reader = lease(core, a, Shared, 0);
    core.expose(reader, a, grade).unwrap();
    end_used(core, reader, a, 5);
    a
}

#[test]
fn a_leased_pointer_is_over_with_its_lease() {
    let mut core = core();
    let a = exposed(&mut core, PointerScope::Leased);
    core.complete_use(token(S1, 5));
    assert_eq!(spill(&mut core, 16, 9), [piece(a, 0)]);
}

#[test]
fn a_pointer_for_known_streams_holds_until_their_uses_are_over() {
    let mut core = core();
    let a = exposed(&mut core, PointerScope::StreamScoped);
    assert_eq!(core.note_use(a, token(S2, 3), Shared).unwrap(), []);
    core.complete_use(token(S1, 5));
    assert_eq!(core.choose(&short(16), 9).short.unwrap().exposed, b(16));
    assert_eq!(core.complete_use(token(S2, 3)), [a]);
    assert_eq!(spill(&mut core, 16, 9), [piece(a, 0)]);
    let late = core.note_use(a, token(S2, 4), Shared);
    assert_eq!(late, Err(ExposeError::NotExposed { buffer: a }), "it may have left");
}

#[test]
fn a_quiesced_pointer_holds_until_the_epoch_ends() {
    let mut core = core();
    let a = exposed(&mut core, PointerScope::Quiesced);
    core.complete_use(token(S1, 5));
    assert!(core.holds(a).unwrap().epoch);
    assert_eq!(core.choose(&short(16), 9).victims, []);
    assert_eq!(core.end_epoch(), [a]);
    assert_eq!(core.end_epoch(), []);
    assert_eq!(spill(&mut core, 16, 9), [piece(a, 0)]);
}

#[test]
fn an_unknown_holder_that_outlives_the_lease_holds_until_it_releases() {
    let mut core = core();
    let a = exposed(&mut core, PointerScope::Opaque);
    let reader = lease(&mut core, a, Shared, 6);
    core.expose(reader, a, PointerScope::Opaque).unwrap();
    end(&mut core, reader, 6);
    core.complete_use(token(S1, 5));
    assert_eq!(core.release(a), Ok(1));
    assert_eq!(core.choose(&short(16), 9).victims, []);
    assert_eq!(core.release(a), Ok(0));
    assert_eq!(core.release(a), Err(ExposeError::NotOpaque { buffer: a }));
    assert_eq!(spill(&mut core, 16, 9), [piece(a, 0)]);
}

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
    assert_eq!(core.unpin(a), Err(ExposeError::NotPinned { buffer: a }));
    assert_eq!(core.holds(a).unwrap().to_string(), "nothing holds it");
    assert_eq!(spill(&mut core, 16, 3), [piece(a, 0)]);
    let refused = core.pin(reader, a);
    assert_eq!(refused, Err(ExposeError::Lease(UnknownBufferLease { lease: reader })));
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
    assert!(refused.to_string().contains("a pin or an exposure has ended"), "{refused}");
    core.unpin(a).unwrap();
    let _granted = try_lease(&mut core, &[(c, Shared)], S1, 2).unwrap();
}

#[test]
fn a_pointer_is_handed_out_under_a_lease_only() {
    let mut core = core();
    let (a, c) = (written(&mut core, 16, 0), written(&mut core, 16, 0));
    let reader = lease(&mut core, a, Shared, 0);
    let refused = core.expose(reader, c, PointerScope::Opaque);
    assert_eq!(refused, Err(ExposeError::NotLeased { buffer: c }));
    end(&mut core, reader, 0);
    let refused = core.expose(reader, a, PointerScope::Opaque);
    assert_eq!(refused, Err(ExposeError::Lease(UnknownBufferLease { lease: reader })));
}

#[test]
fn what_is_written_through_an_exposed_pointer_is_never_clean() {
    let mut core = core();
    let a = written(&mut core, 32, 0);
    spill(&mut core, 32, 1);
    let writer = lease(&mut core, a, Exclusive, 2);
    core.expose(writer, a, PointerScope::Opaque).unwrap();
    let nothing = LeaseEnd { uses: &[], writes: Writes::Only(&[]) };
    assert_eq!(core.end_lease(writer, &nothing, 3).unwrap().len(), 2, "who knows what it writes");
    let room = SpillRoom { host: b(100), disk: b(0), ..SpillRoom::default() };
    assert_eq!(core.clean(b(100), &with(room), 1000), [], "and it goes on writing");
    core.release(a).unwrap();
    let choice = core.choose(&short(32), 1000);
    assert!(choice.victims.iter().all(|victim| victim.moves[0].to == Some(SpillTier::Host)));
}

#[test]
fn a_noted_write_makes_copies_stale_and_an_exclusive_lease_excludes_it() {
    let mut core = core();
    let a = written(&mut core, 16, 0);
    spill(&mut core, 16, 1);
    let reader = lease(&mut core, a, Shared, 2);
    core.expose(reader, a, PointerScope::StreamScoped).unwrap();
    let stale = core.note_use(a, token(S2, 1), Exclusive).unwrap();
    assert_eq!((stale[0].from, &stale[0].after[..]), (SpillTier::Host, &[token(S2, 1)][..]));
    end(&mut core, reader, 2);
    let writer = try_lease(&mut core, &[(a, Exclusive)], S1, 3).unwrap();
    assert_eq!(writer.after, [token(S2, 1)]);
    let refused = core.note_use(a, token(S2, 2), Shared);
    assert_eq!(refused, Err(ExposeError::NotExposed { buffer: a }));
}
