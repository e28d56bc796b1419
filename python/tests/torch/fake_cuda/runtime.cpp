// The functions of libcudart that PyTorch calls. No kernel runs; memory, copies, streams, events and
// captures behave as on a card.

#include "runtime.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "memory.hpp"

using namespace fake;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int thread_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::atomic<size_t> peer_copies{0}, direct_copies{0};

struct Graph {
  size_t nodes;
};

struct Streams {
  std::map<Stream*, std::shared_ptr<Stream>> created;
  std::map<int, std::shared_ptr<Stream>> defaults;
  std::set<std::shared_ptr<Capture>> captures;
  uint64_t next_capture = 1;
  size_t events = 0;
};

Streams& streams() {
  static Streams* all = new Streams;
  return *all;
}

uint64_t thread_number() {
  return std::hash<std::thread::id>{}(std::this_thread::get_id());
}

std::shared_ptr<Stream> default_stream(int device) {
  auto& stream = streams().defaults[device];
  if (!stream) {
    stream = std::make_shared<Stream>();
    stream->device = device;
  }
  return stream;
}

// Null for a handle of no stream.
std::shared_ptr<Stream> find(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return default_stream(thread_device);
  auto found = streams().created.find(reinterpret_cast<Stream*>(handle));
  return found == streams().created.end() ? nullptr : found->second;
}

// Whether a call that a capture forbids is made while one is in progress; the capture is spoiled then.
bool forbidden_by_capture() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return false;
  for (auto& capture : streams().captures) {
    bool own = capture->thread == thread_number();
    bool counts = capture->mode == cudaStreamCaptureModeGlobal
                      ? own || capture_mode == cudaStreamCaptureModeGlobal
                      : capture->mode == cudaStreamCaptureModeThreadLocal && own;
    if (counts) {
      capture->valid = false;
      return true;
    }
  }
  return false;
}

int device_of_stream(cudaStream_t handle) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  return stream ? stream->device : thread_device;
}

// Counts one piece of work of a stream.
cudaError_t submit(cudaStream_t handle) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) {
    stream->capture->nodes++;
  } else {
    stream->submitted++;
  }
  return cudaSuccess;
}

void copy_bytes(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  // An address of a device that is not this runtime's has no bytes here: the copy is dropped.
  auto& memory = Memory::instance();
  bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) {
    from_device = !memory.is_host(from);
    to_device = !memory.is_host(to);
  }
  if (from_device && !memory.is_device_range(from, size)) return;
  if (to_device && !memory.is_device_range(to, size)) return;
  std::memmove(to, from, size);
}

}  // namespace

int& fake::current_device() { return thread_device; }

std::vector<std::shared_ptr<Stream>> fake::all_streams() {
  std::vector<std::shared_ptr<Stream>> all;
  for (auto& [_, stream] : streams().created) all.push_back(stream);
  for (auto& [_, stream] : streams().defaults) all.push_back(stream);
  return all;
}

cudaError_t fake::fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

extern "C" {

// For tests, by ctypes: what a program on a card cannot ask or arrange.

// Work submitted to the stream from now on stays unfinished until released or waited for.
int fake_cuda_hold(void* handle) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(static_cast<cudaStream_t>(handle));
  if (!stream) return 1;
  stream->held_after = stream->submitted;
  return 0;
}

int fake_cuda_release(void* handle) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(static_cast<cudaStream_t>(handle));
  if (!stream) return 1;
  stream->held_after = UINT64_MAX;
  return 0;
}

size_t fake_cuda_used(int device) { return Memory::instance().used(device); }
size_t fake_cuda_mallocs(int device) { return Memory::instance().mallocs(device); }
size_t fake_cuda_frees(int device) { return Memory::instance().frees(device); }

size_t fake_cuda_maps() { return Memory::instance().calls_of_map(); }
size_t fake_cuda_unmaps() { return Memory::instance().calls_of_unmap(); }
size_t fake_cuda_watch(void* pointer, size_t size) { return Memory::instance().watch(pointer, size); }
size_t fake_cuda_mapped() { return Memory::instance().mapped(); }
int fake_cuda_may_access(int device, void* pointer, size_t size) {
  return Memory::instance().may_access(device, pointer, size);
}
// Number of copies between devices, by the call that made them.
size_t fake_cuda_peer_copies() { return peer_copies; }
size_t fake_cuda_direct_copies() { return direct_copies; }

size_t fake_cuda_events() {
  std::lock_guard lock(stream_mutex());
  return streams().events;
}

// Devices and errors.

cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaError";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return "error of the fake CUDA runtime";
  }
}

cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = static_cast<int>(Memory::instance().device_count());
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) { return *device = thread_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || size_t(device) >= Memory::instance().device_count()) return fail(cudaErrorInvalidDevice);
  thread_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || size_t(device) >= Memory::instance().device_count()) return fail(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "Fake CUDA device");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = Memory::instance().capacity();
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = INT32_MAX;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->major = 9;
  properties->minor = 0;
  properties->textureAlignment = 512;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->l2CacheSize = 50 << 20;
  properties->canMapHostMemory = 1;
  properties->unifiedAddressing = 1;
  properties->managedMemory = 1;
  properties->concurrentKernels = 1;
  properties->cooperativeLaunch = 1;
  properties->memoryPoolsSupported = 1;
  properties->streamPrioritiesSupported = 1;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (auto error = cudaGetDeviceProperties(&properties, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(properties.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(properties.sharedMemPerBlockOptin); break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrCooperativeLaunch: *value = properties.cooperativeLaunch; break;
    case cudaDevAttrMemoryPoolsSupported: *value = properties.memoryPoolsSupported; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return *can = Memory::instance().are_peers(device, peer), cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  if (!Memory::instance().are_peers(thread_device, peer)) return fail(cudaErrorPeerAccessUnsupported);
  bool is_new = Memory::instance().enable_peer(thread_device, peer);
  return is_new ? cudaSuccess : fail(cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaDeviceSynchronize() {
  std::lock_guard lock(stream_mutex());
  // As on a card: refused in every mode and from every thread, and the captures are spoiled.
  bool captured = false;
  for (auto& stream : all_streams()) {
    if (stream->device != thread_device || !stream->capture) continue;
    stream->capture->valid = false;
    captured = true;
  }
  if (captured) return fail(cudaErrorStreamCaptureUnsupported);
  finish_device(thread_device);
  return cudaSuccess;
}

// Memory.

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  auto& memory = Memory::instance();
  *total = memory.capacity();
  *free = memory.capacity() - memory.used(thread_device);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  {
    std::lock_guard lock(stream_mutex());
    if (forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  }
  *pointer = size ? Memory::instance().allocate(thread_device, size) : nullptr;
  return *pointer || !size ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  int device = Memory::instance().device_of(pointer);
  if (!Memory::instance().free(pointer)) return fail(cudaErrorInvalidValue);
  std::lock_guard lock(stream_mutex());
  finish_device(device);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  *pointer = Memory::instance().allocate_host(size);
  return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* pointer) {
  return !pointer || Memory::instance().free_host(pointer) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  Memory::instance().register_host(pointer, size);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  return Memory::instance().unregister_host(pointer) ? cudaSuccess
                                                     : fail(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->device = Memory::instance().device_of(pointer);
  attributes->type = cudaMemoryTypeUnregistered;
  if (attributes->device >= 0) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (Memory::instance().is_host(pointer)) {
    attributes->device = thread_device;
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  int to_device = Memory::instance().device_of(to), from_device = Memory::instance().device_of(from);
  if (to_device >= 0 && from_device >= 0 && to_device != from_device) {
    // The stream's device makes the copy.
    int device = device_of_stream(stream);
    if (!Memory::instance().may_copy(device, to, size) || !Memory::instance().may_copy(device, from, size)) {
      return fail(cudaErrorInvalidValue);
    }
    direct_copies++;
  }
  copy_bytes(to, from, size, kind);
  return submit(stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  copy_bytes(to, from, size, kind);
  return submit(nullptr);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t size,
                                cudaStream_t stream) {
  if (!Memory::instance().may_access(to_device, to, size) || !Memory::instance().may_access(from_device, from, size)) {
    return fail(cudaErrorInvalidValue);
  }
  peer_copies++;
  copy_bytes(to, from, size, cudaMemcpyDeviceToDevice);
  return submit(stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    copy_bytes(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width,
               kind);
  }
  return submit(stream);
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size, cudaStream_t stream) {
  if (Memory::instance().is_device_range(pointer, size)) std::memset(pointer, value, size);
  return submit(stream);
}
cudaError_t cudaMemset(void* pointer, int value, size_t size) {
  return cudaMemsetAsync(pointer, value, size, nullptr);
}

// Stream-ordered memory: one pool for each device, whose memory is free as soon as it is freed.

cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t stream) {
  *pointer = Memory::instance().allocate(thread_device, size);
  if (!*pointer) return fail(cudaErrorMemoryAllocation);
  return submit(stream);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  if (!Memory::instance().free(pointer)) return fail(cudaErrorInvalidValue);
  return submit(stream);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<uintptr_t>(device + 1));
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  auto used = Memory::instance().used(static_cast<int>(reinterpret_cast<uintptr_t>(pool)) - 1);
  switch (attribute) {
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemCurrent:
    case cudaMemPoolAttrUsedMemHigh: *static_cast<uint64_t*>(value) = used; break;
    case cudaMemPoolAttrReleaseThreshold: *static_cast<uint64_t*>(value) = 0; break;
    default: *static_cast<int*>(value) = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// Streams.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  std::lock_guard lock(stream_mutex());
  auto stream = std::make_shared<Stream>();
  stream->device = thread_device;
  stream->flags = flags;
  stream->priority = priority;
  streams().created[stream.get()] = stream;
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  std::lock_guard lock(stream_mutex());
  return streams().created.erase(reinterpret_cast<Stream*>(handle)) ? cudaSuccess
                                                                    : fail(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) return stream->capture->valid = false, fail(cudaErrorStreamCaptureUnsupported);
  return is_complete({stream, stream->submitted}) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) return stream->capture->valid = false, fail(cudaErrorStreamCaptureUnsupported);
  finish({stream, stream->submitted});
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  auto event = reinterpret_cast<Event*>(event_handle);
  if (!stream || !event) return fail(cudaErrorInvalidResourceHandle);
  if (event->capture) {
    // A stream that waits for captured work joins the capture.
    if (stream->capture && stream->capture != event->capture) return fail(cudaErrorStreamCaptureMerge);
    stream->capture = event->capture;
    stream->capture->streams.insert(stream.get());
    return cudaSuccess;
  }
  if (stream->capture) return stream->capture->valid = false, fail(cudaErrorStreamCaptureIsolation);
  stream->submitted++;
  if (!is_complete(event->point)) stream->waits.push_back({stream->submitted, event->point});
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  auto error = submit(stream);
  if (!error) callback(stream, cudaSuccess, data);
  return error;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  auto error = submit(stream);
  if (!error) function(data);
  return error;
}

// Events.

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  std::lock_guard lock(stream_mutex());
  auto event = new Event;
  event->device = thread_device;
  event->flags = flags;
  streams().events++;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  std::lock_guard lock(stream_mutex());
  delete reinterpret_cast<Event*>(handle);
  streams().events--;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  std::lock_guard lock(stream_mutex());
  auto event = reinterpret_cast<Event*>(handle);
  auto stream = find(stream_handle);
  // An event is recorded on streams of its own device alone.
  if (!stream || !event || event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
  event->capture = stream->capture;
  if (event->capture) return cudaSuccess;
  event->point = {stream, ++stream->submitted};
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  std::lock_guard lock(stream_mutex());
  auto event = reinterpret_cast<Event*>(handle);
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  return is_complete(event->point) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  std::lock_guard lock(stream_mutex());
  auto event = reinterpret_cast<Event*>(handle);
  if (event->capture) return fail(cudaErrorCapturedEvent);
  finish(event->point);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0, cudaSuccess;
}

// Captures and graphs.

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (stream->capture) return fail(cudaErrorIllegalState);
  if (reinterpret_cast<uintptr_t>(handle) <= 1) return fail(cudaErrorStreamCaptureUnsupported);
  auto capture = std::make_shared<Capture>();
  capture->id = streams().next_capture++;
  capture->mode = mode;
  capture->thread = thread_number();
  capture->streams.insert(stream.get());
  stream->capture = capture;
  streams().captures.insert(capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  *graph = nullptr;
  if (!stream || !stream->capture) return fail(cudaErrorIllegalState);
  auto capture = stream->capture;
  for (auto& other : all_streams()) {
    if (other->capture == capture) other->capture = nullptr;
  }
  streams().captures.erase(capture);
  if (!capture->valid) return fail(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{capture->nodes});
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *status = !stream->capture          ? cudaStreamCaptureStatusNone
            : stream->capture->valid  ? cudaStreamCaptureStatusActive
                                      : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  if (auto error = cudaStreamIsCapturing(handle, status)) return error;
  std::lock_guard lock(stream_mutex());
  auto stream = find(handle);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  // A graph has no nodes that could be asked about before the capture ends.
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes;
  return cudaSuccess;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  return *count = 0, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* program, cudaGraph_t graph, unsigned long long) {
  *program = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) { return submit(stream); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t program) {
  delete reinterpret_cast<Graph*>(program);
  return cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return fail(cudaErrorNotSupported); }

// Kernels: registered by the loader, counted when launched.

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Launch> launches;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  launches.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (launches.empty()) return fail(cudaErrorUnknown);
  auto launch = launches.back();
  launches.pop_back();
  *grid = launch.grid;
  *block = launch.block;
  *shared = launch.shared;
  *static_cast<cudaStream_t*>(stream) = launch.stream;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return submit(stream);
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) { return submit(stream); }
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return submit(stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return submit(config->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void**, const void*) { return fail(cudaErrorNotSupported); }
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return submit(nullptr); }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Memory and events of other processes. Memory is a file, which the process of the user opens under /proc. Work
// of another process is complete as soon as it is asked about: an event that is opened is a complete one.

struct SharedMemory {
  pid_t process;
  int file, device;
  size_t size;
};
constexpr char kEventMark[] = "fake-cuda event";

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  SharedMemory shared{};
  void* start;
  // Mapped memory has no such handle, on a card neither.
  if (!Memory::instance().file_of(pointer, &shared.file, &start, &shared.size)) return fail(cudaErrorInvalidValue);
  shared.process = getpid();
  shared.device = Memory::instance().device_of(pointer);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &shared, sizeof shared);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned) {
  SharedMemory shared;
  std::memcpy(&shared, &handle, sizeof shared);
  if (shared.process == getpid()) return fail(cudaErrorDeviceUninitialized);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", int(shared.process), shared.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return fail(cudaErrorInvalidValue);
  *pointer = Memory::instance().open(file, shared.size, thread_device);
  return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  return Memory::instance().free(pointer) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  if (!(reinterpret_cast<Event*>(event)->flags & cudaEventInterprocess)) return fail(cudaErrorInvalidValue);
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, kEventMark, sizeof kEventMark);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  if (std::memcmp(&handle, kEventMark, sizeof kEventMark)) return fail(cudaErrorInvalidValue);
  return cudaEventCreateWithFlags(event, cudaEventInterprocess | cudaEventDisableTiming);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
