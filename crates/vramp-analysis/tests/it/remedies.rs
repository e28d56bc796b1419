//! What is proposed for a job that failed fits by replay, and is better than no change.
use std::num::NonZeroUsize;
use std::path::PathBuf;

use vramp_analysis::remedy::RemedyKind;
use vramp_analysis::verdict::Cause;
use vramp_testing::seeds;
use vramp_trace::{ReadLimits, read_trace};

use crate::common::made_job::made_oom;
use crate::common::remedies::check;

const ONE: NonZeroUsize = NonZeroUsize::MIN;

#[test]
fn made_jobs_that_failed_have_remedies_that_replays_confirm() {
    let mut first = Vec::new();
    for seed in seeds(5) {
        let found = check(&made_oom(seed), ONE).unwrap();
        assert_eq!(found.faults, Vec::<String>::new(), "seed {seed}");
        assert!(found.remedies > 3 && found.replayed > 0, "seed {seed}: {found:?}");
        first.extend(found.first);
    }
    let expected = [
        (Cause::Fragmentation, Some(RemedyKind::Setting)),
        (Cause::Demand, Some(RemedyKind::Setting)),
        (Cause::Growth, Some(RemedyKind::Program)),
        (Cause::Fragmentation, Some(RemedyKind::Limit)),
        (Cause::Fragmentation, Some(RemedyKind::Setting)),
    ];
    assert_eq!(first[..5], expected);
}

#[test]
fn the_example_that_failed_has_remedies_that_replays_confirm() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/traces");
    let path = folder.join("llama_varlen_oom.pickle.gz");
    let trace = read_trace(path, &ReadLimits::default()).unwrap();
    let found = check(&trace, ONE).unwrap();
    assert_eq!(found.faults, Vec::<String>::new());
    assert!(found.replayed > 5, "{found:?}");
}
