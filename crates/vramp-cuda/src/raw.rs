//! Raw objects of the driver, as the tables of a device hold them.

use std::sync::{Arc, Mutex};

use vramp_core::Bytes;
use vramp_driver::{HandleType, StreamThread, ThreadNumber};

use crate::pinned::Pinned;
use crate::sys::{CUgraph_st, CUgraphExec_st, CUmemGenericAllocationHandle, CUstream, CUstream_st};
use crate::table::Opaque;

/// Raw handle of physical memory with its size, because it is mapped only whole, and how it can be
/// exported.
pub(crate) struct Physical {
    pub(crate) raw: CUmemGenericAllocationHandle,
    pub(crate) len: Bytes,
    pub(crate) handle_type: HandleType,
}

/// A raw stream.
pub(crate) struct RawStream {
    raw: Opaque<CUstream_st>,
    /// False for an adopted stream, which its creator destroys.
    pub(crate) owned: bool,
    /// The thread whose default stream it is, if it is one.
    thread: Option<ThreadNumber>,
}

impl RawStream {
    pub(crate) fn created(raw: Opaque<CUstream_st>) -> RawStream {
        RawStream { raw, owned: true, thread: None }
    }

    pub(crate) fn adopted(raw: Opaque<CUstream_st>, thread: Option<ThreadNumber>) -> RawStream {
        RawStream { raw, owned: false, thread }
    }

    /// The thread whose default stream it is, as this thread sees it.
    pub(crate) fn thread(&self) -> StreamThread {
        StreamThread::of(self.thread)
    }

    /// Returns the handle as it was created or adopted. Calls of the driver take [`raw`](Self::raw).
    pub(crate) fn handle(&self) -> CUstream {
        self.raw.0
    }

    /// Returns the handle for a call of this thread. `CU_STREAM_PER_THREAD` would mean the calling thread's
    /// own stream, so that of another thread is reached through the legacy default stream, which the driver
    /// orders behind all work queued on it so far and before all that is queued there later.
    pub(crate) fn raw(&self) -> CUstream {
        match self.thread() {
            StreamThread::Other => LEGACY as CUstream,
            StreamThread::Any | StreamThread::This => self.raw.0,
        }
    }
}

/// `CU_STREAM_LEGACY`.
const LEGACY: usize = 1;

/// A raw graph with the number of its capture, and the pinned memory that it copies from or to.
pub(crate) struct RawGraph {
    pub(crate) raw: Opaque<CUgraph_st>,
    pub(crate) capture: Option<u64>,
    pub(crate) buffers: Arc<[Arc<Pinned>]>,
}

/// A raw instantiated graph, with the buffers of its graph.
pub(crate) struct RawExec {
    pub(crate) raw: Opaque<CUgraphExec_st>,
    pub(crate) buffers: Arc<[Arc<Pinned>]>,
    /// Held by the thread that launches it: NVIDIA's manual promises nothing for concurrent launches.
    pub(crate) launching: Mutex<()>,
}
