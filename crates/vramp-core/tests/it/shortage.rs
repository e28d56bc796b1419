//! What a request that finds no memory looks at, by the number of arenas that have some.

use std::collections::BTreeMap;

use crate::paper::Paper;
use crate::paper::rig::{PAGE, Rig};
use vramp_core::{Bytes, Mixed, Policy};

/// What is looked at for an arena that is not served, for events of freed memory, and for the same arena
/// once another one lends its memory: with so many arenas backed and the pool at its limit.
fn looked_at(count: usize) -> [u64; 3] {
    let chunks =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE * 8, ..Mixed::default() };
    let policy = Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..chunks });
    let mut rig = Rig::with(policy, 1, Some(count as u64));
    rig.shell.paper = Paper::new(Bytes::tib(1), false, BTreeMap::new());
    let stream = rig.streams[0];
    for which in 0..=count {
        rig.shell.add_arena(PAGE);
        rig.shell.arenas[which].live = PAGE;
        assert_eq!(rig.shell.back(which, PAGE, stream), which < count, "{which} of {count}");
    }
    let mut last = rig.shell.pool.counters().looked_at;
    let mut since = |rig: &Rig| {
        let now = rig.shell.pool.counters().looked_at;
        now - std::mem::replace(&mut last, now)
    };
    assert!(!rig.shell.back(count, PAGE, stream));
    let short = since(&rig);
    assert!(rig.shell.record_freed());
    let events = since(&rig);
    rig.shell.arenas[count / 2].live = Bytes::ZERO;
    assert!(rig.shell.back(count, PAGE, stream));
    let served = since(&rig);
    rig.shell.pool.audit().unwrap();
    [short, events, served]
}

#[test]
fn a_request_that_finds_no_memory_looks_at_as_much_with_10_000_arenas_as_with_100() {
    let few = looked_at(100);
    for count in [1_000, 10_000] {
        assert_eq!(looked_at(count), few, "{count} arenas");
    }
}
