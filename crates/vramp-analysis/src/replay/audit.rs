//! `--audit`: stand-ins for the program's kernels, and a second count of the live bytes.

use std::collections::HashMap;
use std::sync::Arc;

use vramp::{Allocation, Allocator, Bytes, DriverError, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Gate, Kernel, Simulator};
use vramp_driver::{Driver, Event, Stream};

use super::engine::ReplayError;

/// Checks an allocator while it is replayed.
pub(super) struct Auditor {
    kernels: Option<Kernels>,
    /// Live bytes by the replay's own count.
    live: Bytes,
}

impl Auditor {
    /// Returns an auditor, which queues kernels if there is a simulator.
    pub(super) fn new(simulator: Option<Arc<Simulator>>) -> Result<Auditor, DriverError> {
        let kernels = simulator.map(Kernels::new).transpose()?;
        Ok(Auditor { kernels, live: Bytes::ZERO })
    }

    pub(super) fn allocated(
        &mut self,
        allocation: &Allocation,
        size: Bytes,
        stream: Stream,
    ) -> Result<(), DriverError> {
        self.live += size;
        match &self.kernels {
            Some(kernels) => kernels.first_write(allocation, stream),
            None => Ok(()),
        }
    }

    /// Queues the last use on the block's own stream, and uses on `others` that stay pending.
    pub(super) fn freeing(
        &mut self,
        block: u32,
        allocation: &Allocation,
        size: Bytes,
        stream: Stream,
        others: &[Stream],
    ) -> Result<(), DriverError> {
        self.live -= size;
        match &mut self.kernels {
            Some(kernels) => kernels.last_uses(block, allocation, stream, others),
            None => Ok(()),
        }
    }

    pub(super) fn uses_done(&mut self, block: u32) {
        if let Some(kernels) = &mut self.kernels {
            kernels.uses_done(block);
        }
    }

    /// Checks every invariant of the allocator, and its live bytes against the own count. O(n log
    /// n).
    pub(super) fn check(&self, allocator: &Allocator) -> Result<(), ReplayError> {
        allocator.audit().map_err(ReplayError::Inconsistent)?;
        let (counted, expected) = (allocator.live(), self.live);
        if counted == expected { Ok(()) } else { Err(ReplayError::Miscount { counted, expected }) }
    }

    /// Ends all pending uses.
    pub(super) fn finish(&mut self) {
        if let Some(kernels) = &mut self.kernels {
            kernels.finish();
        }
    }
}

/// Stand-ins for the program's kernels on a simulator.
struct Kernels {
    simulator: Arc<Simulator>,
    /// Orders other streams after a block's own stream, as a program has to.
    fence: Event,
    /// Keeps the uses of each freed block pending.
    gates: HashMap<u32, Gate>,
}

impl Kernels {
    fn new(simulator: Arc<Simulator>) -> Result<Kernels, DriverError> {
        let fence = simulator.create_event()?;
        Ok(Kernels { simulator, fence, gates: HashMap::new() })
    }

    fn first_write(&self, allocation: &Allocation, stream: Stream) -> Result<(), DriverError> {
        self.simulator.launch(stream, Kernel::new("first write").writing(range(allocation)))
    }

    fn last_uses(
        &mut self,
        block: u32,
        allocation: &Allocation,
        stream: Stream,
        others: &[Stream],
    ) -> Result<(), DriverError> {
        let range = range(allocation);
        let last = Kernel::new("last use").reading(range).writing(range);
        self.simulator.launch(stream, last)?;
        if others.is_empty() {
            return Ok(());
        }
        let gate = self.simulator.gate();
        self.gates.insert(block, gate);
        self.simulator.record(self.fence, stream)?;
        for &other in others {
            self.simulator.wait(other, self.fence)?;
            let pending = Kernel::new("use on another stream").reading(range).until(gate);
            self.simulator.launch(other, pending)?;
        }
        Ok(())
    }

    fn uses_done(&mut self, block: u32) {
        if let Some(gate) = self.gates.remove(&block) {
            self.simulator.open(gate);
        }
    }

    fn finish(&mut self) {
        for (_, gate) in self.gates.drain() {
            self.simulator.open(gate);
        }
    }
}

fn range(allocation: &Allocation) -> AddrRange {
    AddrRange::new(allocation.addr(), allocation.len())
}

/// Returns the driver's handle of a stream.
pub(super) fn raw(allocator: &Allocator, id: StreamId) -> Stream {
    allocator.stream(id).expect("the replay created the stream")
}
