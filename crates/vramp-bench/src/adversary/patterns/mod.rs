//! The patterns, by what they attack.

mod churn;
mod cost;
mod doubling;
mod full;
mod handoff;
mod jobs;
mod lifetimes;
mod ping_pong;
mod pools;
mod streams;
mod threads;

use super::Pattern;

/// Returns every pattern, in the order in which they are printed.
pub fn patterns() -> Vec<Pattern> {
    let mut all = Vec::new();
    all.extend(ping_pong::patterns());
    all.extend(churn::patterns());
    all.extend(full::patterns());
    all.extend(doubling::patterns());
    all.extend(lifetimes::patterns());
    all.extend(jobs::patterns());
    all.extend(handoff::patterns());
    all.extend(streams::patterns());
    all.extend(pools::patterns());
    all.extend(threads::patterns());
    all.extend(cost::patterns());
    all
}
