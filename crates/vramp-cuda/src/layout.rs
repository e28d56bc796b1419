//! Compares the generated structs with the declarations of cudarc.

use std::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys as theirs;

use crate::sys as ours;

macro_rules! same_layout {
    ($name:ident: $($field:ident),*) => {
        assert_eq!(size_of::<ours::$name>(), size_of::<theirs::$name>(), stringify!($name));
        assert_eq!(align_of::<ours::$name>(), align_of::<theirs::$name>(), stringify!($name));
        $(assert_eq!(
            offset_of!(ours::$name, $field),
            offset_of!(theirs::$name, $field),
            concat!(stringify!($name), ".", stringify!($field))
        );)*
    };
}

#[test]
fn every_struct_handed_to_the_driver_has_the_layout_that_cudarc_gives_it() {
    same_layout!(CUmemAllocationProp_st: type_, requestedHandleTypes, location, win32HandleMetaData, allocFlags);
    same_layout!(CUmemAccessDesc_st: location, flags);
    same_layout!(CUmemPoolProps_st: allocType, handleTypes, location, win32SecurityAttributes, maxSize, usage);
    same_layout!(CUmemLocation_st: type_);
    same_layout!(CUuuid_st: bytes);
    assert_eq!(offset_of!(ours::CUmemLocation_st, __bindgen_anon_1), size_of::<u32>());
}

macro_rules! same_value {
    ($ours:ident, $theirs:ident: $($variant:ident),*) => {
        $(assert_eq!(
            ours::$ours::$variant.0,
            theirs::$theirs::$variant as u32,
            stringify!($variant)
        );)*
    };
}

#[test]
fn every_number_handed_to_the_driver_is_the_one_that_cudarc_gives_it() {
    same_value!(CUmemLocationType_enum, CUmemLocationType_enum:
        CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST_NUMA);
    same_value!(CUmemAccess_flags_enum, CUmemAccess_flags_enum: CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    same_value!(CUmemPool_attribute_enum, CUmemPool_attribute_enum:
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    same_value!(CUdevice_attribute_enum, CUdevice_attribute_enum:
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
        CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    same_value!(CUstream_flags_enum, CUstream_flags_enum: CU_STREAM_NON_BLOCKING);
    same_value!(CUevent_flags_enum, CUevent_flags_enum: CU_EVENT_DISABLE_TIMING);
    same_value!(cudaError_enum, cudaError_enum:
        CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_READY, CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}
