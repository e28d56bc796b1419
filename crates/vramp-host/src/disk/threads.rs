//! The engine for any kernel: threads that call and wait.

use super::{BlockIo, IoRequest, IoUnavailable, OsCode, ThreadPool};

/// One call of the kernel at a time in each of some threads.
#[derive(Debug)]
pub struct ThreadIo {
    workers: ThreadPool,
}

impl ThreadIo {
    /// `depth` threads.
    ///
    /// # Errors
    /// The kernel gives no thread.
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
