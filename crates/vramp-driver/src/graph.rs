//! What captures are told by, and what they tell.

use crate::GraphNode;

/// To whom a capture forbids the calls that may not be made while it is under way, such as
/// [`crate::Driver::query`] and [`crate::Driver::alloc_memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// To every thread.
    Global,
    /// To the thread that began the capture.
    ThreadLocal,
    /// To nobody.
    Relaxed,
}

impl CaptureMode {
    /// Every mode, the strictest first.
    pub const ALL: [CaptureMode; 3] =
        [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
}

/// A capture as one of its streams sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureInfo {
    /// Tells captures of one device apart; never used again.
    pub capture: u64,
    /// The nodes that the stream's next work will come behind, in no order.
    pub dependencies: Vec<GraphNode>,
}
