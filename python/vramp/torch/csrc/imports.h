// Memory of other processes: tensors that were sent here.
//
// Tensors of one storage share an import, which lasts until the last of them is freed. It is closed once the
// device has finished all work, as PyTorch does. While a pool is open, into which a graph may be captured, the
// wait is not allowed: the close is put off until pools are closed.
//
// Growth: O(log n) for each tensor, with n imports open.

#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "segments.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

// What handles of vramp's memory begin with. Those of PyTorch's own begin with a small number.
constexpr char kHandleMark[] = "vramp/1:";
constexpr size_t kHandleMarkSize = sizeof kHandleMark - 1;

class Imports {
 public:
  explicit Imports(Shared& shared) : shared_(shared) {}

  static bool is_handle(const std::string& handle) {
    return handle.compare(0, kHandleMarkSize, kHandleMark) == 0;
  }

  // Returns the memory of a handle, for work of a device.
  std::shared_ptr<void> open(DeviceIndex device, const std::string& handle) {
    close_postponed();
    Key key{device, handle};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = live_.find(key);
      if (found != live_.end()) {
        if (std::shared_ptr<void> memory = found->second.lock()) {
          return memory;
        }
      }
    }
    // Without the lock: another process answers.
    auto* ticket = reinterpret_cast<const uint8_t*>(handle.data()) + kHandleMarkSize;
    vramp_torch_opened_t opened{};
    if (shared_.vramp.share_open(device, ticket, handle.size() - kHandleMarkSize, &opened) != VRAMP_OK) {
      shared_.fail("cannot open CUDA memory of another process");
    }
    Import import{device, opened.number};
    std::shared_ptr<void> memory(reinterpret_cast<void*>(opened.address), [this, import, key](void*) {
      forget(key);
      close(import);
    });
    std::lock_guard<std::mutex> lock(mutex_);
    live_[key] = memory;
    return memory;
  }

  // Closes what was freed while a graph was captured, if none is now.
  void close_postponed() {
    if (C10_LIKELY(postponed_count_.load(std::memory_order_acquire) == 0)) {
      return;
    }
    std::vector<Import> postponed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      postponed.swap(postponed_);
      postponed_count_.store(0, std::memory_order_release);
    }
    for (const Import& import : postponed) {
      close(import);
    }
  }

 private:
  using Key = std::pair<DeviceIndex, std::string>;

  struct Import {
    DeviceIndex device;
    uint64_t number;
  };

  void forget(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(key);
    // Another thread may have opened the same handle meanwhile.
    if (found != live_.end() && found->second.expired()) {
      live_.erase(found);
    }
  }

  // Destructors call this: it throws nothing.
  void close(const Import& import) {
    if (wait_for_device(shared_.devices.at(import.device))) {
      // vramp prints a failure.
      (void)shared_.vramp.share_close(import.number);
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    postponed_.push_back(import);
    postponed_count_.store(postponed_.size(), std::memory_order_release);
  }

  Shared& shared_;
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<void>> live_;
  std::vector<Import> postponed_;
  std::atomic<size_t> postponed_count_{0};
};

} // namespace vramp
