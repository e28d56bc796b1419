// The failure of a request, as PyTorch reports its own.

#pragma once

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "recorder.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

class OutOfMemory {
 public:
  OutOfMemory(Shared& shared, Recorder& recorder) : shared_(shared), recorder_(recorder) {}

  // PyTorch's allocator gets no observer: its failures are reported here, once.
  void add_observer(torch_api::OutOfMemoryObserver observer) {
    std::lock_guard<std::mutex> lock(mutex_);
    observers_.push_back(std::move(observer));
  }

  // Counts and records a failure, calls the observers and throws. `report` is vramp's text.
  void raise(Device& device, size_t size, cudaStream_t stream, const std::string& report) {
    vramp_torch_memory_t memory{};
    // Not open if PyTorch's allocator alone uses the device.
    (void)shared_.vramp.open(device.index);
    (void)shared_.vramp.memory(device.index, &memory);
    auto settings = recorder_.settings();
    Stack stack = Recorder::gather(*settings, RecordContext::STATE);
    int64_t allocated;
    int64_t reserved;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.count_oom();
      allocated = device.statistics.allocated_bytes();
      reserved = static_cast<int64_t>(memory.reserved) + device.statistics.native_reserved() -
          device.segments.current;
      recorder_.record_oom(device, *settings, memory.device_free, size, stream, std::move(stack));
    }
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(size), static_cast<size_t>(allocated),
                                     static_cast<size_t>(reserved), device.cuda());
    std::vector<torch_api::OutOfMemoryObserver> observers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      observers = observers_;
    }
    for (const auto& observer : observers) {
      observer(device.index, size, std::min(memory.limit, memory.device_total), memory.device_free);
    }
    std::string allowed =
        memory.limit < memory.device_total ? format_size(memory.limit) + " allowed; " : "";
    auto idle = static_cast<uint64_t>(std::max<int64_t>(reserved - allocated, 0));
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(size),
        ". GPU ", static_cast<int>(device.index), " has a total capacity of ",
        format_size(memory.device_total), " of which ", format_size(memory.device_free),
        " is free. ", allowed, "Of the allocated memory ", format_size(allocated),
        " is allocated by PyTorch, and ", format_size(idle),
        " is reserved by PyTorch but unallocated.\nvramp: ", report);
  }

 private:
  Shared& shared_;
  Recorder& recorder_;
  std::mutex mutex_;
  std::vector<torch_api::OutOfMemoryObserver> observers_;
};

} // namespace vramp
