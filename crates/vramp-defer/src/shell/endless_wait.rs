//! Requests without a deadline in the queue of the card's space, see `at_rest.rs`.

use smallvec::SmallVec;
use vramp_core::Bytes;
use vramp_tiers::reserve::CancelToken;

use crate::planner::HolderKey;

/// A request without a deadline in the queue of the card's space.
pub(super) struct EndlessWait {
    pub token: CancelToken,
    pub holders: SmallVec<[HolderKey; 2]>,
}

/// The free bytes of host and disk when they were looked at last.
#[derive(Clone, Copy, Default)]
pub(super) struct SeenRoom {
    pub host: Bytes,
    pub disk: Bytes,
}
