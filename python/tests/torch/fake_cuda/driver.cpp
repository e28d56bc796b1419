// The functions of libcuda that PyTorch calls: virtual memory for expandable segments, and contexts.
// unused.c has what its library for compiled kernels imports. An empty libcuda.so.1 depends on this library.

#include <cuda.h>

#include <cstring>
#include <map>
#include <string>

#include "memory.hpp"
#include "runtime.hpp"

using namespace fake;

namespace {

void* address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }
Physical* physical(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Physical*>(handle); }

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1)); }

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) {
  return *count = static_cast<int>(Memory::instance().device_count()), CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
    default: cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return *context = context_of(device), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = context_of(current_device()), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_SUCCESS ? "no error" : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  int device = Memory::instance().device_of(address(pointer));
  if (device < 0) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT) {
    *static_cast<CUcontext*>(value) = context_of(device);
  } else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    *static_cast<int*>(value) = device;
  } else {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  return *granularity = kDeviceAlign, CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t align, CUdeviceptr, unsigned long long) {
  *pointer = reinterpret_cast<CUdeviceptr>(Memory::instance().reserve(size, align));
  return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  return Memory::instance().unreserve(address(pointer), size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                     unsigned long long) {
  if (size % kDeviceAlign) return CUDA_ERROR_INVALID_VALUE;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(
      Memory::instance().create(properties->location.id, size));
  return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return Memory::instance().release(physical(handle)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  return Memory::instance().map(address(pointer), size, offset, physical(handle)) ? CUDA_SUCCESS
                                                                                  : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  return Memory::instance().unmap(address(pointer), size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* pointer) {
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(Memory::instance().retain(pointer));
  return *handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  if (!Memory::instance().is_handle(physical(handle))) return CUDA_ERROR_INVALID_VALUE;
  std::memset(properties, 0, sizeof *properties);
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location = {};
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = physical(handle)->device;
  return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                      unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_ERROR_NOT_SUPPORTED; }

}  // extern "C"

namespace {

const std::map<std::string, void*>& functions() {
#define ENTRY(name) {#name, reinterpret_cast<void*>(&name)}
  static const std::map<std::string, void*> all = {
      ENTRY(cuDeviceGet),
      ENTRY(cuDeviceGetAttribute),
      ENTRY(cuMemAddressReserve),
      ENTRY(cuMemRelease),
      ENTRY(cuMemMap),
      ENTRY(cuMemAddressFree),
      ENTRY(cuMemSetAccess),
      ENTRY(cuMemUnmap),
      ENTRY(cuMemCreate),
      ENTRY(cuMemGetAllocationGranularity),
      ENTRY(cuMemExportToShareableHandle),
      ENTRY(cuMemImportFromShareableHandle),
      ENTRY(cuMemRetainAllocationHandle),
      ENTRY(cuMemGetAllocationPropertiesFromHandle),
      ENTRY(cuMemsetD32Async),
      ENTRY(cuStreamWriteValue32),
      ENTRY(cuGetErrorString),
      ENTRY(cuCtxGetCurrent),
      ENTRY(cuCtxSetCurrent),
  };
#undef ENTRY
  return all;
}

}  // namespace

void* fake::driver_function(const char* name) {
  auto found = functions().find(name);
  return found == functions().end() ? nullptr : found->second;
}
