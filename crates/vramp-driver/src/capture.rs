//! Modes and state of stream captures.

use crate::GraphNode;

/// Threads that a capture forbids the calls that are unsafe during a capture, such as
/// [`Driver::query`](crate::Driver::query) and
/// [`Driver::alloc_memory`](crate::Driver::alloc_memory).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Every thread.
    Global,
    /// The thread that began the capture.
    ThreadLocal,
    /// No thread.
    Relaxed,
}

impl CaptureMode {
    /// Every mode, the strictest first.
    pub const ALL: [CaptureMode; 3] =
        [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
}

/// State of a capture on one of its streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureInfo {
    /// Number of the capture, unique for the device and never reused.
    pub capture: u64,
    /// Nodes that the next work of the stream will depend on, in no order.
    pub dependencies: Vec<GraphNode>,
}
