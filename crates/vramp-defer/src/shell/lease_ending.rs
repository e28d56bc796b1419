//! The end of a lease, as it waits where a stream captures.

use smallvec::SmallVec;

use super::events::LeaseStream;
use crate::planner::{BufferId, BufferLeaseId, WrittenRange};

/// Arguments to end a lease.
pub(super) struct LeaseEnding {
    pub lease: BufferLeaseId,
    pub buffers: Vec<BufferId>,
    pub streams: SmallVec<[LeaseStream; 2]>,
    pub written: Option<Vec<WrittenRange>>,
}
