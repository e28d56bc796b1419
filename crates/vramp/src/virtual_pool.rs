//! The virtual pool on a device: asks the core, performs what it says.

use std::sync::Arc;

use vramp_core::{Attempt, Bytes, Pool, PoolConfig, Request, Shortage, Step, StreamId};
use vramp_driver::{Driver, DriverError, ErrorKind};

use crate::allocation::{Allocation, Owner};
use crate::config::Progress;
use crate::exec::{Executor, is_full};

/// A pool and the device it lives on.
pub(crate) struct VirtualPool {
    pub pool: Pool,
    pub exec: Executor,
    progress: Progress,
    /// VPMM closes a stream's epoch at every free.
    records_each_free: bool,
}

/// Why no block came out.
pub(crate) enum Refusal {
    Short(Shortage, Option<DriverError>),
    Driver(DriverError),
}

impl VirtualPool {
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        config: PoolConfig,
        progress: Progress,
    ) -> Result<VirtualPool, vramp_core::ConfigError> {
        let records_each_free = config.policy == vramp_core::Policy::Vpmm;
        let exec = Executor::new(driver, config.page);
        Ok(VirtualPool { pool: Pool::new(config)?, exec, progress, records_each_free })
    }

    /// A block of at least `size` bytes. No driver call on a hit.
    pub(crate) fn malloc(&mut self, size: Bytes, stream: StreamId) -> Result<Allocation, Refusal> {
        let mut attempt = Attempt::new(Request { size, stream });
        let mut full: Option<DriverError> = None;
        loop {
            match self.pool.place(&mut attempt) {
                Step::Placed(block) => {
                    return Ok(Allocation {
                        addr: self.exec.addr(block.at),
                        len: block.len,
                        owner: Owner::Pool { id: block.id, at: block.at },
                    });
                }
                Step::Poll => self.poll().map_err(Refusal::Driver)?,
                Step::Perform(plan) => {
                    let optional = plan.is_optional();
                    if let Err(error) = self.exec.perform(&mut self.pool, plan) {
                        if is_full(&error) && attempt.out_of_memory() {
                            full = Some(error);
                        } else if is_full(&error) {
                            return Err(Refusal::Short(attempt.shortage(&self.pool), Some(error)));
                        } else if !(optional && error.kind != ErrorKind::DeviceLost) {
                            return Err(Refusal::Driver(error));
                        }
                    }
                }
                Step::Short(shortage) => return Err(Refusal::Short(shortage, full)),
            }
        }
    }

    /// Takes a block back. No driver call, but for VPMM's event. The block is free even if
    /// recording that event fails: the next one covers it.
    pub(crate) fn free(
        &mut self,
        id: vramp_core::BlockId,
        stream: StreamId,
    ) -> Result<(), DriverError> {
        let freed = self.pool.free(id, stream);
        freed.expect("the allocator looked the block up");
        if self.records_each_free {
            let mark = self.pool.now(stream);
            self.exec.record(mark)?;
            self.pool.recorded(mark);
        }
        Ok(())
    }

    pub(crate) fn poll(&mut self) -> Result<(), DriverError> {
        let driver = Arc::clone(&self.exec.driver);
        self.exec.events.poll(&*driver, &mut self.pool, &self.progress)
    }

    /// Adds memory ahead of demand. `Ok(false)` if the limit forbids it.
    pub(crate) fn prefill(&mut self, len: Bytes, stream: StreamId) -> Result<bool, DriverError> {
        // Reserving addresses may have to come first.
        for _ in 0..2 {
            let Some(plan) = self.pool.prefill(len, stream) else { return Ok(false) };
            let before = self.pool.counters().reserved;
            self.exec.perform(&mut self.pool, plan)?;
            if self.pool.counters().reserved > before {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Gives free memory back to the card until the pool holds no more than `to`, or nothing more
    /// is idle. Three driver calls and more for each chunk.
    pub(crate) fn trim(&mut self, to: Bytes) -> Result<(), DriverError> {
        // Once more where a poll set free what others waited for: it has a younger epoch.
        loop {
            let marks = self.pool.unrecorded();
            for &mark in &marks {
                self.exec.record(mark)?;
                self.pool.recorded(mark);
            }
            self.poll()?;
            if marks.is_empty() {
                break;
            }
        }
        while let Some(plan) = self.pool.trim(to) {
            self.exec.perform(&mut self.pool, plan)?;
        }
        Ok(())
    }
}
