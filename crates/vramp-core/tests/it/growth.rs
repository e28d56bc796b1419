//! How much a pool grows at a time, on paper.

use crate::paper::rig::{PAGE, Rig};
use vramp_core::{Bytes, Mixed, Policy};

/// Requests of a page each.
const REQUESTS: u64 = 1024;

fn grown(growth_min: Bytes, slack_per_mille: u64, limit: Option<u64>) -> (u64, Bytes) {
    let mixed = Mixed { growth_min, slack_per_mille, ..Mixed::default() };
    let mut rig = Rig::with(Policy::Mixed(mixed), 1, limit);
    for request in 0..REQUESTS {
        rig.malloc(1, 0);
        let reserved = rig.shell.pool.census().reserved;
        let most = PAGE * (request + 1) * (1000 + slack_per_mille);
        assert!(reserved * 1000 <= most, "{reserved} for {} pages", request + 1);
    }
    rig.shell.pool.audit().expect("growth keeps every invariant");
    (rig.shell.pool.counters().chunks_created, rig.shell.pool.census().reserved)
}

#[test]
fn requests_of_a_page_share_chunks_where_growth_has_a_least_amount() {
    assert_eq!(grown(Bytes::ZERO, 40, None).0, REQUESTS);
    // One for each slack until that is as long as the least growth.
    let (chunks, _) = grown(PAGE * 16, 40, None);
    assert!(chunks < 256, "{chunks} chunks");
    // Without slack it grows by what is needed.
    assert_eq!(grown(PAGE * 16, 0, None).0, REQUESTS);
}

#[test]
fn growth_ahead_of_need_stays_below_the_limit() {
    let (_, reserved) = grown(PAGE * 16, 300, Some(REQUESTS));
    assert_eq!(reserved, PAGE * REQUESTS);
}
