//! Opens an engine, and transfers of any length through it, in as many calls as needed.

use std::sync::Arc;

use vramp_core::Bytes;

use super::file::next_part;
use super::progress::{Next, Progress};
use super::{
    BlockIo, DirectFile, Direction, DiskError, IoRequest, IoUnavailable, OsCode, ThreadIo, UringIo,
};
use crate::HostSpan;

/// A transfer between a file and host memory.
pub struct FileTransfer {
    /// The file.
    pub file: Arc<DirectFile>,
    /// Offset in the file. Offset, length and memory are aligned to
    /// [`DISK_BLOCK`](super::DISK_BLOCK).
    pub offset: Bytes,
    /// Memory to read into or write from, kept alive until completion.
    pub span: HostSpan,
    /// Direction of the transfer.
    pub direction: Direction,
    /// Called once, in a thread of the engine, when all bytes are transferred or the transfer
    /// failed.
    pub done: Box<dyn FnOnce(Result<(), DiskError>) + Send>,
}

/// Starts transfers. Each costs one allocation and one system call, and one of each again after a
/// short call.
pub fn submit_transfers(io: &Arc<dyn BlockIo>, transfers: impl IntoIterator<Item = FileTransfer>) {
    let first = |transfer: FileTransfer| {
        let progress = Progress::new(transfer.span.len());
        next_call(io, transfer, progress)
    };
    io.submit(transfers.into_iter().map(first).collect());
}

fn next_call(io: &Arc<dyn BlockIo>, transfer: FileTransfer, progress: Progress) -> IoRequest {
    IoRequest {
        file: Arc::clone(&transfer.file),
        offset: transfer.offset + progress.moved,
        span: next_part(&transfer.span, &progress),
        direction: transfer.direction,
        done: {
            let io = Arc::clone(io);
            Box::new(move |result| continue_transfer(&io, transfer, progress, result))
        },
    }
}

fn continue_transfer(
    io: &Arc<dyn BlockIo>,
    transfer: FileTransfer,
    mut progress: Progress,
    result: Result<Bytes, OsCode>,
) {
    let FileTransfer { direction, offset, .. } = transfer;
    match progress.record(direction, result) {
        Next::Continue => io.submit(vec![next_call(io, transfer, progress)]),
        Next::Done => (transfer.done)(Ok(())),
        Next::Failed(code) => {
            let len = transfer.span.len();
            let error = transfer.file.failed(direction, offset, len, code);
            (transfer.done)(Err(error));
        }
    }
}

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
