//! Plans that unmap retired mappings.

use crate::pool::ops::{Plan, Range};
use crate::pool::regions::Kind;
use crate::pool::view::View;

impl View<'_> {
    /// A plan that unmaps at most `limit` retired mappings whose work is over, neighbours in one
    /// call. `None` if there are none.
    pub(in crate::pool) fn unmap_retired(self, limit: Option<usize>) -> Option<Plan> {
        let mut ranges: Vec<Range> = Vec::new();
        let mut found = 0;
        for &key in self.retired.values() {
            if Some(found) == limit {
                break;
            }
            let region = self.regions.get(key);
            let Kind::Retired { mark, .. } = region.kind else {
                panic!("region {key} is indexed as retired");
            };
            if !self.streams.is_over(mark) {
                continue;
            }
            found += 1;
            Range::new(region.at, region.len).append(&mut ranges);
        }
        (!ranges.is_empty()).then(|| Plan::unmap(ranges))
    }
}
