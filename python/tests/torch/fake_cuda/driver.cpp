// The functions of libcuda that PyTorch and vramp call: virtual memory, contexts, streams and graphs. Where
// libcudart has the same function, it is called: the numbers of errors are the same, and so are the handles.
// unused.c has what its library for compiled kernels imports. An empty libcuda.so.1 depends on this library.

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "memory.hpp"
#include "runtime.hpp"

using namespace fake;

namespace {

void* address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }
Physical* physical(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Physical*>(handle); }

CUresult same(cudaError_t error) { return static_cast<CUresult>(error); }

// Number of times that each device's context was retained.
std::array<std::atomic<size_t>, 64> retained{};

std::atomic<size_t> calls_of_set_access{0};

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device + 1)); }

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return Memory::instance().device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
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
  ++retained[static_cast<size_t>(device)];
  return *context = context_of(device), CUDA_SUCCESS;
}
size_t fake_cuda_retained(int device) { return retained[static_cast<size_t>(device)]; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = context_of(current_device()), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) current_device() = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}
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
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc* wanted, size_t count) {
  for (size_t index = 0; index < count; ++index) {
    bool allowed = wanted[index].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    if (!Memory::instance().set_access(address(pointer), size, wanted[index].location.id, allowed)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  ++calls_of_set_access;
  return CUDA_SUCCESS;
}
size_t fake_cuda_set_access() { return calls_of_set_access; }
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return *can = Memory::instance().are_peers(device, peer), CUDA_SUCCESS;
}
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
CUresult cuMemExportToShareableHandle(void* file, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  int made = Memory::instance().export_file(physical(handle));
  if (made < 0) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(file) = made;
  return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* file,
                                        CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  auto number = static_cast<int>(reinterpret_cast<intptr_t>(file));
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(Memory::instance().import_file(number, current_device()));
  return *handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  std::snprintf(text, static_cast<size_t>(size), "Fake CUDA device");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = static_cast<char>(device + 1);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
  return same(cudaDeviceGetPCIBusId(text, size, device));
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  return *bytes = Memory::instance().capacity(), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) { return same(cudaMemGetInfo(free, total)); }
CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
  return same(cudaMalloc(reinterpret_cast<void**>(pointer), size));
}
CUresult cuMemFree_v2(CUdeviceptr pointer) { return same(cudaFree(address(pointer))); }
CUresult cuMemHostAlloc(void** pointer, size_t size, unsigned flags) {
  return same(cudaHostAlloc(pointer, size, flags));
}
CUresult cuMemFreeHost(void* pointer) { return same(cudaFreeHost(pointer)); }
CUresult cuMemHostRegister_v2(void* pointer, size_t size, unsigned flags) {
  return same(cudaHostRegister(pointer, size, flags));
}
CUresult cuMemHostUnregister(void* pointer) { return same(cudaHostUnregister(pointer)); }
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  return same(cudaMemcpyAsync(address(to), from, size, cudaMemcpyHostToDevice, stream));
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, CUstream stream) {
  return same(cudaMemcpyAsync(to, address(from), size, cudaMemcpyDeviceToHost, stream));
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  return same(cudaMemcpyAsync(address(to), address(from), size, cudaMemcpyDeviceToDevice, stream));
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream stream) {
  return same(cudaMemsetAsync(address(to), value, size, stream));
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* properties) {
  return same(cudaDeviceGetDefaultMemPool(pool, properties->location.id));
}
CUresult cuMemPoolDestroy(CUmemoryPool) { return CUDA_SUCCESS; }
CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) { return CUDA_SUCCESS; }
CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute, void*) { return CUDA_SUCCESS; }
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  return same(cudaMemPoolGetAttribute(pool, static_cast<cudaMemPoolAttr>(attribute), value));
}
CUresult cuMemAllocFromPoolAsync(CUdeviceptr* pointer, size_t size, CUmemoryPool, CUstream stream) {
  return same(cudaMallocAsync(reinterpret_cast<void**>(pointer), size, stream));
}
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) { return same(cudaFreeAsync(address(pointer), stream)); }

CUresult cuCtxSynchronize() { return same(cudaDeviceSynchronize()); }

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return same(cudaStreamCreateWithPriority(stream, flags, 0));
}
CUresult cuStreamDestroy_v2(CUstream stream) { return same(cudaStreamDestroy(stream)); }
CUresult cuStreamQuery(CUstream stream) { return same(cudaStreamQuery(stream)); }
CUresult cuStreamSynchronize(CUstream stream) { return same(cudaStreamSynchronize(stream)); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return same(cudaStreamWaitEvent(stream, event, flags));
}
CUresult cuEventCreate(CUevent* event, unsigned flags) { return same(cudaEventCreateWithFlags(event, flags)); }
CUresult cuEventDestroy_v2(CUevent event) { return same(cudaEventDestroy(event)); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return same(cudaEventRecord(event, stream)); }
CUresult cuEventQuery(CUevent event) { return same(cudaEventQuery(event)); }
CUresult cuEventSynchronize(CUevent event) { return same(cudaEventSynchronize(event)); }

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(*mode);
  cudaThreadExchangeStreamCaptureMode(&exchanged);
  *mode = static_cast<CUstreamCaptureMode>(exchanged);
  return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return same(cudaStreamBeginCapture(stream, static_cast<cudaStreamCaptureMode>(mode)));
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) { return same(cudaStreamEndCapture(stream, graph)); }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return same(cudaStreamIsCapturing(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}
CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  unsigned long long number = 0;
  auto error = cudaStreamGetCaptureInfo(stream, reinterpret_cast<cudaStreamCaptureStatus*>(status), &number, graph,
                                        dependencies, nullptr, count);
  if (id) *id = number;
  if (edges) *edges = nullptr;
  return same(error);
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return same(cudaGraphGetNodes(graph, nodes, count));
}
CUresult cuGraphNodeGetDependencies_v2(CUgraphNode, CUgraphNode*, CUgraphEdgeData*, size_t* count) {
  return *count = 0, CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* program, CUgraph graph, unsigned long long flags) {
  return same(cudaGraphInstantiateWithFlags(program, graph, flags));
}
CUresult cuGraphLaunch(CUgraphExec program, CUstream stream) { return same(cudaGraphLaunch(program, stream)); }
CUresult cuGraphDestroy(CUgraph graph) { return same(cudaGraphDestroy(graph)); }
CUresult cuGraphExecDestroy(CUgraphExec program) { return same(cudaGraphExecDestroy(program)); }

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
      ENTRY(cuCtxSynchronize),
  };
#undef ENTRY
  return all;
}

}  // namespace

void* fake::driver_function(const char* name) {
  auto found = functions().find(name);
  return found == functions().end() ? nullptr : found->second;
}
