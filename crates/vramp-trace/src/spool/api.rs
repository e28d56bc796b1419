//! The driver's functions that change what a program holds.

/// A function of the CUDA driver that an event comes from. The versions of a function are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs, reason = "each is named as the function is")]
pub enum Api {
    MemAlloc,
    MemAllocPitch,
    MemAllocAsync,
    MemAllocFromPoolAsync,
    MemFree,
    MemFreeAsync,
    MemMap,
    MemUnmap,
    MemAllocManaged,
    MemCreate,
    ArrayCreate,
    MipmappedArrayCreate,
    ArrayDestroy,
    CtxDestroy,
    DevicePrimaryCtxRelease,
    DevicePrimaryCtxReset,
}

impl Api {
    /// All of them, in the order of their numbers in a file.
    pub const ALL: [Api; 16] = [
        Api::MemAlloc,
        Api::MemAllocPitch,
        Api::MemAllocAsync,
        Api::MemAllocFromPoolAsync,
        Api::MemFree,
        Api::MemFreeAsync,
        Api::MemMap,
        Api::MemUnmap,
        Api::MemAllocManaged,
        Api::MemCreate,
        Api::ArrayCreate,
        Api::MipmappedArrayCreate,
        Api::ArrayDestroy,
        Api::CtxDestroy,
        Api::DevicePrimaryCtxRelease,
        Api::DevicePrimaryCtxReset,
    ];

    /// Returns the name of the function, without a version.
    pub const fn name(self) -> &'static str {
        match self {
            Api::MemAlloc => "cuMemAlloc",
            Api::MemAllocPitch => "cuMemAllocPitch",
            Api::MemAllocAsync => "cuMemAllocAsync",
            Api::MemAllocFromPoolAsync => "cuMemAllocFromPoolAsync",
            Api::MemFree => "cuMemFree",
            Api::MemFreeAsync => "cuMemFreeAsync",
            Api::MemMap => "cuMemMap",
            Api::MemUnmap => "cuMemUnmap",
            Api::MemAllocManaged => "cuMemAllocManaged",
            Api::MemCreate => "cuMemCreate",
            Api::ArrayCreate => "cuArrayCreate",
            Api::MipmappedArrayCreate => "cuMipmappedArrayCreate",
            Api::ArrayDestroy => "cuArrayDestroy",
            Api::CtxDestroy => "cuCtxDestroy",
            Api::DevicePrimaryCtxRelease => "cuDevicePrimaryCtxRelease",
            Api::DevicePrimaryCtxReset => "cuDevicePrimaryCtxReset",
        }
    }

    pub(super) const fn number(self) -> u8 {
        self as u8
    }

    pub(super) fn from_number(number: u8) -> Option<Api> {
        Api::ALL.get(usize::from(number)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_in_the_order_of_the_numbers() {
        for (number, api) in (0..).zip(Api::ALL) {
            assert_eq!(api.number(), number);
        }
        assert_eq!(Api::from_number(16), None);
    }
}
