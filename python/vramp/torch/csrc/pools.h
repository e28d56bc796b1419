// Memory pools and captures of graphs: which exist and which are open. PyTorch's own allocator has them, with
// segments of vramp.
//
// Locks: the one of begins is taken before those of devices' pools.

#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <c10/util/ScopeExit.h>

#include "native.h"
#include "segments.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

class Pools {
 public:
  Pools(Shared& shared, Native& native) : shared_(shared), native_(native) {
#if VRAMP_TORCH >= 211
    source_ = std::make_shared<SegmentSource>(shared);
    comm_source_ = std::make_shared<SegmentSource>(shared, true);
#else
    source_ = &source_of_pools_;
    comm_source_ = &source_of_comm_pools_;
#endif
  }

  void create(Device& device, PoolId pool, PoolAllocator allocator) {
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    device.has_pools.store(true, std::memory_order_relaxed);
    if (!allocator && device.known_pools.count(pool) == 0) {
      allocator = makes_comm_pool ? comm_source_ : source_;
    }
    shared_.native->createOrIncrefPool(device.index, pool, std::move(allocator));
    device.known_pools.insert(pool);
  }

  // Allocations go to the pool from now on, on the streams that `filter` selects. Throws if it is open.
  // With `pins`, a capture keeps the memory that is live now where it is until the pool has no use.
  void begin(Device& device, PoolId pool, std::function<bool(cudaStream_t)> filter, bool pins) {
    std::lock_guard<std::mutex> begin_lock(begin_mutex_);
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    device.has_pools.store(true, std::memory_order_relaxed);
    bool captures = is_for_capture(device, filter);
    if (pins && captures) {
      pin(device, pool);
    }
    cudaStream_t external = captures ? note_capture(device) : nullptr;
    bool is_new = device.known_pools.insert(pool).second;
    if (is_new) {
      shared_.native->createOrIncrefPool(device.index, pool, source_);
    }
    begin_native(device, pool, filter);
    if (is_new) {
      // The begin has added a use of its own.
      shared_.native->releasePool(device.index, pool);
    }
    device.open_pools.push_back({pool, std::move(filter), external});
    device.open_count.fetch_add(1, std::memory_order_release);
  }

  void end(Device& device, PoolId pool) {
    {
      std::lock_guard<std::mutex> lock(device.pools_mutex);
      shared_.native->endAllocateToPool(device.index, pool);
      auto& open = device.open_pools;
      auto found = std::find_if(open.begin(), open.end(), [&](auto& one) { return one.id == pool; });
      if (found != open.end()) {
        if (found->external != nullptr) {
          // It may be destroyed from now on.
          (void)shared_.vramp.stream_forget(device.index, found->external);
        }
        open.erase(found);
        device.open_count.fetch_sub(1, std::memory_order_release);
      }
    }
    empty_deleted();
  }

  void release(Device& device, PoolId pool) {
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    release_native(device, pool);
    unpin_unused(device, pool);
  }

  // Frees the idle memory of a deleted pool.
  void empty(PoolId pool) {
    {
      // The destructor of a pool calls this. PyTorch's allocator ends the process if any pool is open then.
      std::lock_guard<std::mutex> lock(begin_mutex_);
      if (shared_.devices.is_any_pool_open()) {
        deleted_.push_back(pool);
        return;
      }
      shared_.native->emptyCache(pool);
    }
    forget_deleted_on_all();
  }

  // Frees the idle memory of all pools.
  void empty_all() {
    shared_.native->emptyCache({0, 0});
    forget_deleted_on_all();
  }

  void mark_used_on_oom(Device& device, PoolId pool, bool used) {
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    if (used) {
      device.pools_used_on_oom.insert(pool);
    } else {
      device.pools_used_on_oom.erase(pool);
    }
  }

  // Returns true if a pool is open for a stream.
  bool is_open_for(Device& device, cudaStream_t stream) {
    if (C10_LIKELY(!device.is_any_pool_open())) {
      return false;
    }
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    return std::any_of(device.open_pools.begin(), device.open_pools.end(),
                       [&](const OpenPool& open) { return open.filter(stream); });
  }

  // Looks for free memory in the pools that may serve any request when memory is short. Adds none. Returns
  // null if there is none.
  void* malloc_in_any(Device& device, size_t size, cudaStream_t stream) {
    std::vector<PoolId> pools;
    {
      std::lock_guard<std::mutex> lock(device.pools_mutex);
      pools.assign(device.pools_used_on_oom.begin(), device.pools_used_on_oom.end());
    }
    for (const PoolId& pool : pools) {
      if (!join_search(device, pool)) {
        continue;
      }
      // PyTorch's allocator may run callbacks that allocate.
      auto before = std::exchange(searched_pool, pool);
      auto done = c10::make_scope_exit([&] {
        searched_pool = before;
        leave_search(device, pool);
      });
      try {
        return native_.malloc(device, size, stream);
      } catch (const c10::OutOfMemoryError&) {
        continue;
      }
    }
    return nullptr;
  }

  // Frees the idle memory of a device's pools. Returns true if vramp got any of it.
  bool reclaim(Device& device) {
    if (!device.has_pools.load(std::memory_order_relaxed)) {
      return false;
    }
    int64_t before = device.segment_bytes();
    shared_.native->emptyCache({0, 0});
    forget_deleted(device);
    native_.follow(device);
    return device.segment_bytes() < before;
  }

 private:
  // Returns true for the filter of a capture, which is about to begin: it selects no stream yet. That of
  // use_mem_pool selects all streams of its thread.
  static bool is_for_capture(const Device& device, const std::function<bool(cudaStream_t)>& filter) {
    return !filter(c10::cuda::getCurrentCUDAStream(device.index).stream());
  }

  // Makes the stream of a capture known to vramp before the capture begins on it, so that regions do not sleep
  // meanwhile. PyTorch captures on the current stream. Returns it if another library made it.
  cudaStream_t note_capture(const Device& device) {
    Queue queue(c10::cuda::getCurrentCUDAStream(device.index));
    // A failure is that of the device, which the first request of the capture reports. PyTorch's random numbers
    // would be unusable after an exception here.
    (void)shared_.vramp.capture_begins(device.index, queue.stream);
    return queue.is_external ? queue.stream : nullptr;
  }

  // The lock of the device's pools is held.
  void pin(Device& device, PoolId pool) {
    if (shared_.vramp.pin_live(device.index, pool.first, pool.second) != VRAMP_OK) {
      shared_.fail("cannot keep memory in its place for a graph");
    }
    device.pinning_pools.insert(pool);
  }

  // Ends the pins of pools that have no use. The lock of the device's pools is held.
  void unpin_unused(Device& device, PoolId pool) {
    if (C10_LIKELY(device.pinning_pools.count(pool) == 0) || uses_of(device, pool).value_or(0) > 0) {
      return;
    }
    (void)shared_.vramp.unpin(device.index, pool.first, pool.second);
    device.pinning_pools.erase(pool);
  }

  void forget_deleted_on_all() {
    shared_.devices.each([&](Device& device) {
      if (device.has_pools.load(std::memory_order_relaxed)) {
        forget_deleted(device);
        native_.follow(device);
      }
    });
  }

  // Drops the ids of pools that PyTorch's allocator has deleted. They are not used again. O(n) in the pools.
  void forget_deleted(Device& device) {
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    for (auto pool = device.known_pools.begin(); pool != device.known_pools.end();) {
      pool = uses_of(device, *pool) ? std::next(pool) : device.known_pools.erase(pool);
    }
  }

  // Frees the memory of pools that were deleted while a pool was open, if none is.
  void empty_deleted() {
    if (shared_.devices.is_any_pool_open()) {
      return;
    }
    std::vector<PoolId> deleted;
    {
      std::lock_guard<std::mutex> lock(begin_mutex_);
      deleted.swap(deleted_);
    }
    for (const PoolId& one : deleted) {
      empty(one);
    }
  }

  // Opens a pool for the threads that search it. PyTorch's allocator opens a pool once, so all threads that
  // search one share an opening. Returns false if the pool was deleted, or the program has opened it.
  bool join_search(Device& device, PoolId pool) {
    std::lock_guard<std::mutex> begin_lock(begin_mutex_);
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    if (device.pools_used_on_oom.count(pool) == 0) {
      return false;
    }
    auto search = device.searches.find(pool);
    if (search != device.searches.end()) {
      ++search->second;
      return true;
    }
    try {
      begin_native(device, pool, [pool](cudaStream_t) { return searched_pool == pool; });
    } catch (const c10::Error&) {
      return false;
    }
    device.searches.emplace(pool, 1);
    device.open_count.fetch_add(1, std::memory_order_release);
    return true;
  }

  void leave_search(Device& device, PoolId pool) {
    {
      std::lock_guard<std::mutex> lock(device.pools_mutex);
      auto search = device.searches.find(pool);
      if (--search->second > 0) {
        return;
      }
      device.searches.erase(search);
      shared_.native->endAllocateToPool(device.index, pool);
      device.open_count.fetch_sub(1, std::memory_order_release);
      release_native(device, pool);
    }
    empty_deleted();
  }

  // Begins, with a use more of the pool. After a failure the pool has the uses it had: PyTorch's allocator
  // adds one before it fails. The locks of begins and of the device's pools are held.
  void begin_native(Device& device, PoolId pool, const std::function<bool(cudaStream_t)>& filter) {
    int before = uses_of(device, pool).value_or(0);
    try {
      shared_.native->beginAllocateToPool(device.index, pool, filter);
    } catch (...) {
      if (uses_of(device, pool).value_or(0) > before) {
        shared_.native->releasePool(device.index, pool);
      }
      throw;
    }
  }

  // Ends a use of the pool. The lock of the device's pools is held.
  void release_native(Device& device, PoolId pool) {
    shared_.native->releasePool(device.index, pool);
    if (uses_of(device, pool).value_or(0) == 0) {
      device.pools_used_on_oom.erase(pool);
    }
  }

  // Returns the number of uses of a pool, or nothing if PyTorch's allocator has deleted it: another thread
  // that empties the cache does so with a pool that has no use.
  std::optional<int> uses_of(const Device& device, PoolId pool) const {
    try {
      return shared_.native->getPoolUseCount(device.index, pool);
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }

  Shared& shared_;
  Native& native_;
#if VRAMP_TORCH < 211
  SegmentSource source_of_pools_{shared_};
  SegmentSource source_of_comm_pools_{shared_, true};
#endif
  PoolAllocator source_, comm_source_;
  // Held while a pool is opened, and while the memory of a deleted one is freed.
  std::mutex begin_mutex_;
  // Pools that were deleted while a pool was open, whose memory is freed once none is.
  std::vector<PoolId> deleted_;
};

} // namespace vramp
