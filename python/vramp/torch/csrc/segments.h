// The segments of PyTorch's own allocator, which are vramp's memory.

#pragma once

#include <optional>
#include <string>

#include <cuda_runtime_api.h>

#include "forwarding.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

// The pool that the thread searches for free memory: no segment is added then.
inline thread_local std::optional<PoolId> searched_pool;
// Why the thread's last segment could not be allocated.
inline thread_local std::string segment_failure;
// True if that was because the thread's region sleeps.
inline thread_local bool region_sleeps = false;

inline DeviceIndex current_device() {
  DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

// Waits for all work of a device. Returns false, and does nothing, while a pool is open: a graph may be captured
// into it, and the wait is refused then and invalidates the capture, in every mode and from every thread. Throws
// nothing.
inline bool wait_for_device(const Device& device) {
  DeviceIndex before = 0;
  if (device.is_any_pool_open() || c10::cuda::GetDevice(&before) != cudaSuccess ||
      c10::cuda::SetDevice(device.index) != cudaSuccess) {
    return false;
  }
  bool waited = cudaDeviceSynchronize() == cudaSuccess;
  if (!waited) {
    (void)cudaGetLastError();
  }
  (void)c10::cuda::SetDevice(before);
  return waited;
}

// Where PyTorch's own allocator allocates the segments of pools. It makes the two raw calls alone.
class SegmentSource : public Forwarding {
 public:
  // With `is_comm`, segments are one handle each and never move: for memory that libraries register. They are
  // counted as memory that is not vramp's, beside its limit.
  explicit SegmentSource(Shared& shared, bool is_comm = false)
      : Forwarding(shared.native), shared_(shared), is_comm_(is_comm) {}

  // Returns null if no segment is to be had.
  void* raw_alloc(size_t size) override {
    if (searched_pool) {
      segment_failure = "";
      return nullptr;
    }
    Device& device = shared_.devices.at(current_device());
    void* address = nullptr;
    vramp_status_t status = allocate(device, size, &address);
    if (status != VRAMP_OK) {
      segment_failure = shared_.vramp.last_error();
      region_sleeps = status == VRAMP_ERROR_REGION;
      return nullptr;
    }
    if (is_comm_) {
      return address;
    }
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    device.segments.add(size);
    return address;
  }

  void raw_delete(void* address) override {
    int index = 0;
    if (shared_.vramp.segment_device(address, &index) != VRAMP_OK) {
      return;
    }
    Device& device = shared_.devices.at(static_cast<DeviceIndex>(index));
    // PyTorch frees segments with cudaFree, which waits for the device. Where the wait is refused, vramp keeps
    // the memory until the work queued now is over.
    bool may_be_in_use = !wait_for_device(device);
    uint64_t size = 0;
    vramp_status_t status = shared_.vramp.segment_free(address, may_be_in_use ? 1 : 0, &size);
    if (status == VRAMP_OK && !is_comm_) {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.segments.remove(size);
    } else if (status != VRAMP_OK && status != VRAMP_ERROR_FORKED) {
      shared_.fail("cannot free a segment");
    }
  }

 private:
  vramp_status_t allocate(Device& device, size_t size, void** address) {
    if (is_comm_) {
      return shared_.vramp.comm_malloc(device.index, size, address);
    }
    if (!device.has_plain_segments.load(std::memory_order_relaxed)) {
      return shared_.vramp.segment_malloc(device.index, size, address);
    }
    // A capture refuses cudaMalloc to other threads, as PyTorch's own allocator knows.
    c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
    return shared_.vramp.plain_malloc(device.index, size, address);
  }

  Shared& shared_;
  const bool is_comm_;
};

} // namespace vramp
