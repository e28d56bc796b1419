//! Allocations of other code of the process: no calls of the trait.

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::memory::Allocator;
use super::refusal::Outcome;
use super::state::State;
use crate::{Call, DriverError, DriverResult};

impl State {
    pub fn alloc_elsewhere(&mut self, device: usize, len: Bytes) -> DriverResult<DeviceAddr> {
        self.elsewhere(device, Call::AllocMemory, |state| {
            state.memory.alloc(device, len, Allocator::Other)
        })
    }

    pub fn free_elsewhere(&mut self, device: usize, at: DeviceAddr) -> DriverResult<()> {
        self.elsewhere(device, Call::FreeMemory, |state| {
            state.memory.allocation(device, at, Allocator::Other)?;
            state.wait_for_everything()?;
            state.report_unmapped(AddrRange::new(at, Bytes::new(1)));
            state.memory.free_allocation(device, at, Allocator::Other)?;
            state.forget_destroyed();
            Ok(())
        })
    }

    /// Runs a call of other code. Its errors name the call of the trait that is most similar.
    fn elsewhere<T>(
        &mut self,
        device: usize,
        call: Call,
        body: impl FnOnce(&mut State) -> Outcome<T>,
    ) -> DriverResult<T> {
        self.current = device;
        if let Some(error) = self.lost_error(call) {
            return Err(error);
        }
        body(self).map_err(|refusal| DriverError::from_code(call, refusal.code, refusal.detail))
    }
}
