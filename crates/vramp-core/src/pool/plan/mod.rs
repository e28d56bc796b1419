//! Planners: functions of a read-only [`View`](super::view::View) that return plans and decisions.
//!
//! Nothing here changes the pool. A [`Plan`](super::ops::Plan) is performed by the shell and settled
//! by `state/settle.rs`; a [`Decision`](decision::Decision) is applied by `state/place.rs`.

pub(in crate::pool) mod arena;
pub(in crate::pool) mod build;
pub(in crate::pool) mod decision;
pub(in crate::pool) mod fill;
pub(in crate::pool) mod growth;
pub(in crate::pool) mod hosted;
pub(in crate::pool) mod idle;
pub(in crate::pool) mod lengthen;
pub(in crate::pool) mod order;
pub(in crate::pool) mod place;
pub(in crate::pool) mod recut;
pub(in crate::pool) mod relief;
pub(in crate::pool) mod sites;
pub(in crate::pool) mod sources;
pub(in crate::pool) mod vpmm;
