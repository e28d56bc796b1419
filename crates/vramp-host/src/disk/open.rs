//! Opens an engine.

use std::sync::Arc;

use super::{BlockIo, IoUnavailable, ThreadIo, UringIo};

/// Choice of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoChoice {
    /// io_uring where the kernel allows it, threads elsewhere.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads.
    Threads,
}

/// An open engine.
pub struct OpenedIo {
    /// The engine.
    pub io: Arc<dyn BlockIo>,
    /// Why io_uring is not available, if [`IoChoice::Auto`] fell back to threads.
    pub fell_back: Option<IoUnavailable>,
}

/// Opens an engine with up to `depth` requests in flight, from 1 to 64.
///
/// # Errors
/// The chosen engine is not available.
pub fn open_io(choice: IoChoice, depth: usize) -> Result<OpenedIo, IoUnavailable> {
    let depth = depth.clamp(1, 64);
    let threads = |fell_back| Ok(OpenedIo { io: Arc::new(ThreadIo::new(depth)?), fell_back });
    if choice == IoChoice::Threads {
        return threads(None);
    }
    match UringIo::new(depth) {
        Ok(io) => Ok(OpenedIo { io: Arc::new(io), fell_back: None }),
        Err(why) if choice == IoChoice::Auto => threads(Some(why)),
        Err(why) => Err(why),
    }
}
