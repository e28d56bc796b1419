//! Transfers that move all their bytes, in as many calls as that takes.

use std::sync::Arc;

use vramp_core::Bytes;

use super::file::part_left;
use super::progress::{Next, Progress};
use super::{BlockIo, DirectFile, Direction, DiskError, IoRequest, OsCode};
use crate::HostSpan;

/// Bytes of one file to move to or from one piece of memory.
pub struct FileTransfer {
    /// Which file.
    pub file: Arc<DirectFile>,
    /// Where in it. Offset, length and memory are whole [`DISK_BLOCK`](super::DISK_BLOCK)s.
    pub offset: Bytes,
    /// The memory, kept alive until the answer.
    pub span: HostSpan,
    /// Which way.
    pub direction: Direction,
    /// Told once, in a thread of the engine, that all has moved, or why not.
    pub done: Box<dyn FnOnce(Result<(), DiskError>) + Send>,
}

/// Starts transfers. One costs an allocation and a call of the kernel, and one of each again for
/// a short answer.
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
        span: part_left(&transfer.span, &progress),
        direction: transfer.direction,
        done: {
            let io = Arc::clone(io);
            Box::new(move |answer| go_on(&io, transfer, progress, answer))
        },
    }
}

fn go_on(
    io: &Arc<dyn BlockIo>,
    transfer: FileTransfer,
    mut progress: Progress,
    answer: Result<Bytes, OsCode>,
) {
    let FileTransfer { direction, offset, .. } = transfer;
    match progress.note(direction, answer) {
        Next::Again => io.submit(vec![next_call(io, transfer, progress)]),
        Next::Done => (transfer.done)(Ok(())),
        Next::Failed(code) => {
            let len = transfer.span.len();
            let error = transfer.file.failed(direction, offset, len, code);
            (transfer.done)(Err(error));
        }
    }
}
