// Memory of PyTorch's own allocator, for graphs, memory pools and streams of other libraries.

#pragma once

#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include "out_of_memory.h"
#include "segments.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

class Native {
 public:
  Native(Shared& shared, OutOfMemory& out_of_memory)
      : shared_(shared), out_of_memory_(out_of_memory) {}

  // Allocates, or throws torch.OutOfMemoryError with vramp's report. Throws RuntimeError if the memory, or the
  // region that it would come from, sleeps.
  void* malloc(Device& device, size_t size, cudaStream_t stream) {
    void* address = malloc_anywhere(device, size, stream);
    if (C10_LIKELY(shared_.vramp.segment_awake(device.index, address) != VRAMP_ERROR_REGION)) {
      return address;
    }
    // A cached block of a segment that was allocated in a region.
    std::string why = shared_.vramp.last_error();
    free(address);
    TORCH_CHECK_WITH(OutOfMemoryError, !searched_pool, why);
    TORCH_CHECK(false, "vramp cannot allocate: ", why);
  }
  // Frees an address that vramp does not know.
  void free(void* address) {
    shared_.native->raw_delete(address);
    follow_all();
  }

  // Makes PyTorch's allocator reuse freed blocks of pools whose work on other streams is over. It looks at
  // them in each request outside of pools, and vramp serves those. Takes 2 MiB of the device, until the
  // cache is emptied.
  void process_events(Device& device, cudaStream_t stream) {
    if (device.is_any_pool_open()) {
      return;
    }
    try {
      c10::cuda::CUDAGuard guard(device.index);
      shared_.native->raw_delete(shared_.native->raw_alloc_with_stream(1, stream));
    } catch (const c10::OutOfMemoryError&) {
      // The events are processed before memory is looked for.
    }
    follow(device);
  }

  // Takes over the statistics of PyTorch's own allocator, which are O(1) to read.
  void follow(Device& device) {
    DeviceStats native = shared_.native->getDeviceStats(device.index);
    int64_t foreign;
    bool is_changed;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.update_native(native);
      foreign = device.statistics.native_reserved() - device.segments.current;
      is_changed = foreign != std::exchange(device.foreign, foreign);
    }
    constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
    device.native_waits.store(native.active[kAll].current > native.allocation[kAll].current,
                              std::memory_order_relaxed);
    double fraction = device.fraction.load();
    if (is_changed && fraction < 1.0) {
      shared_.limit(device, fraction, foreign);
    }
  }

  // Does the same for all devices that it serves.
  void follow_all() {
    shared_.devices.each([&](Device& device) {
      if (device.has_pools.load(std::memory_order_relaxed)) {
        follow(device);
      }
    });
  }

 private:
  void* malloc_anywhere(Device& device, size_t size, cudaStream_t stream) {
    segment_failure.clear();
    region_sleeps = false;
    void* address = nullptr;
    c10::cuda::CUDAGuard guard(device.index);
    try {
      address = shared_.native->raw_alloc_with_stream(size, stream);
    } catch (const c10::OutOfMemoryError& error) {
      follow(device);
      if (searched_pool) {
        throw;
      }
      TORCH_CHECK(!region_sleeps, "vramp cannot allocate: ", segment_failure);
      if (segment_failure.empty() && shared_.vramp.trim() == VRAMP_OK) {
        // PyTorch's allocator asked the device, and not vramp. Now vramp's idle memory is the device's.
        return malloc_after_trim(device, size, stream);
      }
      std::string report = segment_failure.empty() ? error.what_without_backtrace() : segment_failure;
      out_of_memory_.raise(device, size, stream, report);
    }
    follow(device);
    return address;
  }

  void* malloc_after_trim(Device& device, size_t size, cudaStream_t stream) {
    void* address = nullptr;
    try {
      address = shared_.native->raw_alloc_with_stream(size, stream);
    } catch (const c10::OutOfMemoryError& error) {
      follow(device);
      out_of_memory_.raise(device, size, stream, error.what_without_backtrace());
    }
    follow(device);
    return address;
  }

  Shared& shared_;
  OutOfMemory& out_of_memory_;
};

} // namespace vramp
