//! Which engine.

use std::sync::Arc;

use super::{BlockIo, IoUnavailable, ThreadIo, UringIo};

/// Which engine moves the bytes.
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

/// An engine.
pub struct OpenedIo {
    /// It.
    pub io: Arc<dyn BlockIo>,
    /// Why it is not io_uring, where that would have been chosen.
    pub fell_back: Option<IoUnavailable>,
}

/// Opens an engine that works on `depth` requests at the same time, from 1 to 64.
///
/// # Errors
/// The kernel does not offer what was chosen.
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
