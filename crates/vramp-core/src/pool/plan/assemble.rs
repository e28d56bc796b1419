//! Free memory moved together ahead of the block that it is for.
//!
//! While somebody frees memory for a request piece by piece, what is free by now is moved to where
//! the block will lie. Once the last piece is free, only that one is left to move. Nothing is taken
//! for the request: what was moved is free like all the rest, and if the block never comes, nothing
//! is lost but the driver calls.
//!
//! Deliberately absent: growing, and waiting for anybody.

use crate::pool::config::Policy;
use crate::pool::plan::Plan;
use crate::pool::plan::build::Build;
use crate::pool::plan::place::Request;
use crate::pool::state::{BLOCK_ALIGN, Pool};

impl Pool {
    /// A plan towards a free region in which `request` fits, of the free memory that its stream may
    /// have by now, where there are addresses for all of it. To perform and settle, and to ask again
    /// unless it [fills](Plan::fills): that moved all there is. `None` if nothing is left to move, or
    /// the block fits. O(free chunks).
    ///
    /// # Panics
    /// If the stream is unknown.
    pub fn assemble(&mut self, request: Request) -> Option<Plan> {
        let Request { size, stream } = request;
        assert!(self.streams.contains(stream), "{stream} is unknown to the pool");
        let Policy::Mixed(mixed) = self.config.policy else { return None };
        let len = size.count().checked_next_multiple_of(BLOCK_ALIGN)?;
        if self.streams.get(stream).free.find(len).is_some() {
            return None;
        }
        match self.build_of_free(len, stream, &mixed)? {
            Build::Clear(plan) | Build::Fill { plan, .. } => Some(plan),
            Build::Short { .. } => None,
        }
    }
}
