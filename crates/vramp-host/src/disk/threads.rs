//! The engine for any kernel: a thread pool that makes blocking calls.

use super::{BlockIo, IoRequest, IoUnavailable, OsCode, ThreadPool};

/// An engine of threads, each with one blocking call at a time.
#[derive(Debug)]
pub struct ThreadIo {
    workers: ThreadPool,
}

impl ThreadIo {
    /// Starts `depth` threads.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(depth: usize) -> Result<ThreadIo, IoUnavailable> {
        let workers = ThreadPool::new("vramp-disk", depth);
        let failed = |error| IoUnavailable { engine: "threads", code: OsCode::of(&error) };
        Ok(ThreadIo { workers: workers.map_err(failed)? })
    }
}

impl BlockIo for ThreadIo {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn depth(&self) -> usize {
        self.workers.count()
    }

    fn submit(&self, batch: Vec<IoRequest>) {
        self.workers.run(batch.into_iter().map(|request| {
            move || {
                let IoRequest { file, offset, span, direction, done } = request;
                done(file.call(direction, offset, &span));
            }
        }));
    }
}
