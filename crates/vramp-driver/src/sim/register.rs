//! Registrations of ranges, and the calls that break them.
//!
//! Allocations of other code of the process: no calls of the trait.

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::host::{Holder, Registration};
use super::memory::{Allocator, By};
use super::refusal::Outcome;
use super::state::State;
use crate::{Call, DriverError, DriverResult, Handle};

impl State {
    pub fn register(
        &mut self,
        device: usize,
        range: AddrRange,
        holder: &str,
    ) -> DriverResult<Registration> {
        self.current = device;
        // Not a call of the trait; its errors name the call that is most similar.
        let call = Call::ExportDmaBuf;
        if let Some(error) = self.lost_error(call) {
            return Err(error);
        }
        let mut mappings = Vec::new();
        let mapped = self.memory.pieces(range, By::Mapped, |piece| {
            mappings.push((piece.mapping, piece.physical));
        });
        if mapped.is_err() || self.memory.owner(range) != Some(device) {
            let detail = format!("{range} is not mapped without gaps by this device");
            return Err(DriverError::from_code(call, 1, detail));
        }
        Ok(self.registered.add(Holder { name: holder.to_owned(), range }, mappings))
    }

    /// Reports that mappings in `range` are unmapped, if they are registered.
    pub fn report_unmapped(&mut self, range: AddrRange) {
        if self.registered.is_empty() {
            return;
        }
        let mappings: Vec<u64> = self.memory.mappings_in(range).map(|(at, _)| at).collect();
        let broken: Vec<Holder> =
            mappings.into_iter().flat_map(|at| self.registered.unmapped(at)).collect();
        self.report_held("unmap", range, broken);
    }

    /// Reports that the memory of a handle is mapped at `range`, if it is registered elsewhere.
    pub fn report_mapped(&mut self, handle: Handle, range: AddrRange) {
        if self.registered.is_empty() {
            return;
        }
        let physical = self.memory.physical_of(handle);
        let broken = self.registered.mapped(physical, range.start.number());
        self.report_held("map", range, broken);
    }

    /// Reports that physical memory is released, if it was registered and unmapped there.
    pub fn report_released(&mut self, physical: u64) {
        for holder in self.registered.released(physical) {
            self.report_held("release", holder.range, vec![holder]);
        }
    }

    fn report_held(&mut self, label: &str, range: AddrRange, broken: Vec<Holder>) {
        if let Some(checker) = &mut self.checker {
            broken.into_iter().for_each(|holder| checker.report_held(label, range, holder));
        }
    }
}

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
