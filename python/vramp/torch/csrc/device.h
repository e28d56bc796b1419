// What is kept for each device.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "history.h"
#include "statistics.h"
#include "torch_api.h"

namespace vramp {

constexpr size_t kDevices = 64;

// A begin of allocations to a pool without its end.
struct OpenPool {
  PoolId id;
  std::function<bool(cudaStream_t)> filter;
  // The stream of a capture that another library made. Null for others.
  cudaStream_t external;
};

// True on a thread that makes a pool for memory that libraries register.
inline thread_local bool makes_comm_pool = false;

// A stream, and whether another library made it. PyTorch's own streams last as long as the process; others
// may be destroyed once the tensors on them are freed. PyTorch's ids of streams have a lowest bit of 1,
// that of the default stream is 0, and that of an external stream is its address.
struct Queue {
  explicit Queue(c10::cuda::CUDAStream of)
      : stream(of.stream()), is_external(of.id() != 0 && (of.id() & 1) == 0) {}

  Queue(cudaStream_t of, bool external) : stream(of), is_external(external) {}

  cudaStream_t stream;
  bool is_external;
};

struct Device {
  // Protects statistics and history. Recursive, as PyTorch's own: a tracker may allocate.
  std::recursive_mutex mutex;
  Statistics statistics;
  History history;
  // What PyTorch's allocator has of vramp.
  SegmentTotals segments;
  // What it has besides, in pools with an allocator of their own, in bytes.
  int64_t foreign = 0;

  // Protects the lists of pools.
  std::mutex pools_mutex;
  std::vector<OpenPool> open_pools;
  // Pools that exist in PyTorch's allocator.
  std::set<PoolId> known_pools;
  std::set<PoolId> pools_used_on_oom;
  // Pools for which memory of vramp is pinned.
  std::set<PoolId> pinning_pools;
  // Number of threads that search a pool for free memory, if any does.
  std::map<PoolId, int> searches;
  // Number of pools that are open or searched.
  std::atomic<int> open_count{0};
  // True while PyTorch's allocator has freed blocks that wait for other streams.
  std::atomic<bool> native_waits{false};
  // Number of requests since it was last made to look at them.
  std::atomic<uint32_t> requests_since{0};
  // True once the segments of graphs and memory pools are plain allocations.
  std::atomic<bool> has_plain_segments{false};
  // True once PyTorch's allocator has served anything on this device.
  std::atomic<bool> has_pools{false};
  // Memory of vramp when a request last looked at it, once tensors were sent to other processes.
  std::atomic<uint64_t> reserved_before{0};
  // Part of the device's memory that PyTorch allows the process.
  std::atomic<double> fraction{1.0};
  DeviceIndex index = 0;

  c10::Device cuda() const {
    return c10::Device(c10::DeviceType::CUDA, index);
  }

  bool is_any_pool_open() const {
    return open_count.load(std::memory_order_acquire) > 0;
  }

  // Returns the bytes of vramp's segments that PyTorch's allocator has.
  int64_t segment_bytes() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return segments.current;
  }
};

// The devices that the process sees.
class Devices {
 public:
  Devices() {
    for (size_t index = 0; index < kDevices; ++index) {
      devices_[index].index = static_cast<DeviceIndex>(index);
    }
  }

  // Sets the number of devices. Called once, before any of them is used.
  void init(int count) {
    count_ = std::min<int>(count, kDevices);
  }

  int count() const {
    return count_;
  }

  Device& at(DeviceIndex device) {
    return devices_[static_cast<size_t>(device)];
  }

  // Returns a device, or throws if PyTorch has none of this index.
  Device& checked(DeviceIndex device) {
    TORCH_CHECK(0 <= device && device < count_, "Invalid device argument ",
                static_cast<int>(device), ": did you call init?");
    return at(device);
  }

  template <typename F>
  void each(F f) {
    for (int device = 0; device < count_; ++device) {
      f(devices_[static_cast<size_t>(device)]);
    }
  }

  bool is_any_pool_open() const {
    return std::any_of(devices_.begin(), devices_.end(),
                       [](const Device& device) { return device.is_any_pool_open(); });
  }

 private:
  std::array<Device, kDevices> devices_;
  int count_ = 0;
};

} // namespace vramp
