//! Free memory moved together ahead of the block that it is for.
//!
//! While memory for a request is freed piece by piece, what is free by now is moved to where the
//! block will lie. Once the last piece is free, only that one is left to move. Nothing is reserved
//! for the request: what was moved is free like all the rest, and if the block is never requested,
//! only the driver calls are lost.
//!
//! Deliberately absent: growth, and waits.

use crate::pool::config::{BLOCK_ALIGN, Policy};
use crate::pool::ops::Plan;
use crate::pool::plan::build::Build;
use crate::pool::request::Request;
use crate::pool::view::View;

impl View<'_> {
    /// The next plan towards a free region in which `request` fits. See
    /// [`Pool::assemble`](crate::Pool::assemble).
    pub(in crate::pool) fn assemble(self, request: Request) -> Option<Plan> {
        let Request { size, stream } = request;
        let Policy::Mixed(mixed) = self.config.policy else { return None };
        let len = size.checked_round_up(BLOCK_ALIGN)?;
        if self.fit(stream, len).is_some() {
            return None;
        }
        match self.build_of_free(len, stream, &mixed)? {
            Build::ClearFirst(plan) | Build::Fill { plan, .. } => Some(plan),
            Build::Short { .. } => None,
        }
    }
}
