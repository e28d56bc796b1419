// Tensors as blocks of vramp.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include <cuda_runtime_api.h>

#include <c10/util/ScopeExit.h>

#include "foreign_uses.h"
#include "native.h"
#include "out_of_memory.h"
#include "pools.h"
#include "recorder.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

// Requests between two looks at what waits in PyTorch's own allocator.
constexpr uint32_t kRequestsBetween = 16;

class Blocks {
 public:
  Blocks(Shared& shared, Recorder& recorder, OutOfMemory& out_of_memory, Native& native, Pools& pools)
      : shared_(shared),
        recorder_(recorder),
        out_of_memory_(out_of_memory),
        native_(native),
        pools_(pools) {}

  // Allocates a block. If memory is short a pool may serve the request instead.
  void* malloc(Device& device, size_t size, cudaStream_t stream) {
    if (C10_UNLIKELY(device.native_waits.load(std::memory_order_relaxed)) &&
        device.requests_since.fetch_add(1, std::memory_order_relaxed) % kRequestsBetween == 0) {
      native_.process_events(device, stream);
    }
    bool observed = recorder_.is_observed();
    Stack stack;
    std::shared_ptr<const HistorySettings> settings;
    if (observed) {
      settings = recorder_.settings();
      stack = Recorder::gather(*settings, RecordContext::STATE);
      growth_stack = stack;
    }
    auto end = c10::make_scope_exit([&] {
      if (observed) {
        growth_stack = nullptr;
      }
    });
    vramp_torch_block_t block{};
    vramp_status_t status = shared_.vramp.block_malloc(device.index, size, stream, &block);
    if (C10_UNLIKELY(status != VRAMP_OK)) {
      if (void* in_pool = retry(device, size, stream, status, &block)) {
        return in_pool;
      }
    }
    if (C10_UNLIKELY(shared_.has_sent.load(std::memory_order_relaxed))) {
      collect_if_grown(device);
    }
    int64_t allocated;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.add_block(block);
      allocated = device.statistics.allocated_bytes();
      if (observed) {
        recorder_.record_malloc(device, *settings, block.address, size, stream, stack);
      }
    }
    void* address = reinterpret_cast<void*>(block.address);
    shared_.report_to_profiler(device, address, static_cast<int64_t>(block.size), allocated);
    return address;
  }

  // Frees the blocks whose free had to wait for the end of a capture.
  void free_postponed() {
    for (void* address : foreign_uses_.take_postponed()) {
      (void)free(address);
    }
  }

  // Frees a block. Returns false if vramp has none at the address.
  bool free(void* address) {
    if (!foreign_uses_.settle(address)) {
      return true;
    }
    if (recorder_.is_observed()) {
      recorder_.record_free(address);
    }
    std::set<cudaStream_t> external;
    if (C10_UNLIKELY(has_external_uses_.load(std::memory_order_acquire))) {
      external = take_external_uses(address);
    }
    vramp_torch_block_t block{};
    vramp_status_t status = shared_.vramp.block_free(address, &block);
    for (cudaStream_t stream : external) {
      // PyTorch's contract ends here: the stream may be destroyed. vramp waits for an event instead.
      (void)shared_.vramp.stream_forget(block.device, stream);
    }
    if (status == VRAMP_ERROR_UNKNOWN_POINTER) {
      return false;
    }
    if (status == VRAMP_ERROR_FORKED) {
      // The child of a fork has no device, and nothing to free.
      return true;
    }
    if (status != VRAMP_OK) {
      shared_.fail("cannot free memory");
    }
    Device& device = shared_.devices.at(static_cast<DeviceIndex>(block.device));
    int64_t allocated;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.remove_block(block);
      allocated = device.statistics.allocated_bytes();
    }
    shared_.report_to_profiler(device, address, -static_cast<int64_t>(block.size), allocated);
    return true;
  }

  // Keeps a block of device `own` from reuse until the work queued on `stream` so far is over. Returns false if
  // vramp has none at the address.
  bool record_use(void* address, DeviceIndex own, c10::cuda::CUDAStream stream) {
    if (C10_LIKELY(stream.device_index() == own)) {
      return record_use(address, Queue(stream));
    }
    vramp_torch_block_t found{};
    if (shared_.vramp.block_find(address, &found) != VRAMP_OK) {
      return false;
    }
    foreign_uses_.add(address, own, stream);
    return true;
  }

  // Runs the callbacks with which PyTorch and programs free memory. Tensors that were sent to other processes
  // and freed there are freed here by one of them. Returns true if any was.
  static bool run_callbacks() {
    bool freed = false;
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
    return freed;
  }

 private:
  bool record_use(void* address, Queue queue) {
    vramp_status_t status = shared_.vramp.block_record(address, queue.stream);
    if (status == VRAMP_OK) {
      if (queue.is_external) {
        std::lock_guard<std::mutex> lock(external_mutex_);
        external_uses_[address].insert(queue.stream);
        has_external_uses_.store(true, std::memory_order_release);
      }
      return true;
    }
    if (status == VRAMP_ERROR_FORKED) {
      // The child of a fork queues no work on the parent's streams.
      return true;
    }
    if (status != VRAMP_ERROR_UNKNOWN_POINTER) {
      shared_.fail("cannot record the use of a tensor");
    }
    return false;
  }

  // Runs the callbacks where a request has taken memory of the device, as PyTorch's allocator does.
  void collect_if_grown(Device& device) {
    uint64_t reserved = 0;
    if (shared_.vramp.reserved(device.index, &reserved) == VRAMP_OK &&
        reserved > device.reserved_before.exchange(reserved)) {
      (void)run_callbacks();
    }
  }

  // Frees memory and tries again. Returns an address if a pool has served the request, and null if
  // `*block` has. Throws if nothing helps.
  void* retry(Device& device, size_t size, cudaStream_t stream, vramp_status_t status,
              vramp_torch_block_t* block) {
    if (status != VRAMP_ERROR_OUT_OF_MEMORY) {
      shared_.fail("cannot allocate");
    }
    std::string report = shared_.vramp.last_error();
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.count_retry();
    }
    auto again = [&] {
      status = shared_.vramp.block_malloc(device.index, size, stream, block);
      if (status == VRAMP_ERROR_OUT_OF_MEMORY) {
        report = shared_.vramp.last_error();
      } else if (status != VRAMP_OK) {
        shared_.fail("cannot allocate");
      }
      return status == VRAMP_OK;
    };
    if (run_callbacks() && again()) {
      return nullptr;
    }
    if (void* address = pools_.malloc_in_any(device, size, stream)) {
      return address;
    }
    if (pools_.reclaim(device) && again()) {
      return nullptr;
    }
    out_of_memory_.raise(device, size, stream, report);
    return nullptr;
  }

  // Takes the streams of other libraries that use a block.
  std::set<cudaStream_t> take_external_uses(void* address) {
    std::lock_guard<std::mutex> lock(external_mutex_);
    auto found = external_uses_.find(address);
    if (found == external_uses_.end()) {
      return {};
    }
    std::set<cudaStream_t> streams = std::move(found->second);
    external_uses_.erase(found);
    has_external_uses_.store(!external_uses_.empty(), std::memory_order_release);
    return streams;
  }

  Shared& shared_;
  Recorder& recorder_;
  OutOfMemory& out_of_memory_;
  Native& native_;
  Pools& pools_;
  ForeignUses foreign_uses_{shared_};
  std::mutex external_mutex_;
  // Streams of other libraries that tensors were recorded on, by block.
  std::unordered_map<void*, std::set<cudaStream_t>> external_uses_;
  std::atomic<bool> has_external_uses_{false};
};

} // namespace vramp
