//! Sets of the devices of a machine.

/// Largest number of devices of a simulated machine.
pub const DEVICES_MAX: usize = 64;

/// A set of devices, by ordinal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeviceSet(u64);

impl DeviceSet {
    /// Every device.
    pub const ALL: DeviceSet = DeviceSet(u64::MAX);

    /// Returns the set of one device.
    pub const fn of(device: usize) -> DeviceSet {
        DeviceSet(1 << device)
    }

    pub const fn contains(self, device: usize) -> bool {
        self.0 & 1 << device != 0
    }

    pub const fn with(self, device: usize) -> DeviceSet {
        DeviceSet(self.0 | 1 << device)
    }

    pub const fn and(self, others: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 | others.0)
    }

    pub const fn without(self, others: DeviceSet) -> DeviceSet {
        DeviceSet(self.0 & !others.0)
    }

    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }
}
