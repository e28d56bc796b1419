// Records events, for torch.cuda.memory._record_memory_history and for trackers.
//
// Trackers are called under the device's lock, as PyTorch calls them under its own. Call stacks are taken
// without a lock: their recorder may take Python's.

#pragma once

#include <atomic>
#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "history.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

using Stack = std::shared_ptr<GatheredContext>;

// The stack of the thread's request or release, for the growth that it causes. Taken before: PyTorch's
// allocator may hold its lock when memory grows, and the recorder takes Python's.
inline thread_local Stack growth_stack;
// torch.compile's contexts of the thread.
inline thread_local std::vector<std::string> compile_contexts;

class Recorder {
 public:
  explicit Recorder(Shared& shared) : shared_(shared) {
    for (size_t index = 0; index < kDevices; ++index) {
      growth_[index].recorder = this;
      growth_[index].device = &shared.devices.at(static_cast<DeviceIndex>(index));
    }
  }

  // True if blocks are recorded, or have a stack from before.
  bool is_observed() const {
    return is_on() || is_tracked_.load(std::memory_order_relaxed) ||
        stacks_.load(std::memory_order_relaxed) > 0;
  }

  bool is_on() const {
    return is_on_.load(std::memory_order_relaxed);
  }

  std::shared_ptr<const HistorySettings> settings() const {
    return std::atomic_load(&settings_);
  }

  // Takes the stack of the thread. No lock is held: the recorder may take Python's.
  static Stack gather(const HistorySettings& settings, RecordContext level) {
    bool wanted = settings.enabled && settings.when >= level && settings.recorder != nullptr;
    return wanted ? settings.recorder() : nullptr;
  }

  // Starts, changes or ends the recording on all devices.
  void configure(HistorySettings settings, bool clear) {
    bool enabled = settings.enabled;
    size_t max_entries = settings.max_entries;
    std::atomic_store(&settings_, std::shared_ptr<const HistorySettings>(
                                      std::make_shared<HistorySettings>(std::move(settings))));
    is_on_.store(enabled);
    shared_.devices.each([&](Device& device) {
      {
        std::lock_guard<std::recursive_mutex> lock(device.mutex);
        if (!enabled || clear) {
          device.history.clear();
        } else {
          device.history.shrink(max_entries);
        }
      }
      observe_growth(growth_[static_cast<size_t>(device.index)], enabled);
    });
  }

  void add_tracker(AllocatorTraceTracker tracker) {
    std::lock_guard<std::mutex> lock(trackers_mutex_);
    auto trackers = std::make_shared<std::vector<AllocatorTraceTracker>>();
    if (auto before = std::atomic_load(&trackers_)) {
      *trackers = *before;
    }
    trackers->push_back(std::move(tracker));
    std::atomic_store(&trackers_,
                      std::shared_ptr<const std::vector<AllocatorTraceTracker>>(trackers));
    is_tracked_.store(true, std::memory_order_release);
  }

  // Records an allocation, and the stack of the block. The device's lock is held.
  void record_malloc(Device& device, const HistorySettings& settings, size_t address, size_t size,
                     cudaStream_t stream, const Stack& stack) {
    if (stack && device.history.stacks.insert_or_assign(address, stack).second) {
      stacks_.fetch_add(1, std::memory_order_relaxed);
    }
    record(device, settings, entry(TraceEntry::ALLOC, device.index, address, size, stream, stack));
  }

  // Records a free before it is made: any thread may have the address afterwards.
  void record_free(void* address) {
    vramp_torch_block_t block{};
    if (shared_.vramp.block_find(address, &block) != VRAMP_OK) {
      return;
    }
    auto now = settings();
    Stack stack = gather(*now, RecordContext::ALL);
    Device& device = shared_.devices.at(static_cast<DeviceIndex>(block.device));
    auto stream = reinterpret_cast<cudaStream_t>(block.stream);
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    auto found = device.history.stacks.find(block.address);
    if (found != device.history.stacks.end()) {
      stack = stack ? stack : found->second;
      device.history.stacks.erase(found);
      stacks_.fetch_sub(1, std::memory_order_relaxed);
    }
    for (auto action : {TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED}) {
      record(device, *now,
             entry(action, device.index, block.address, block.requested, stream, stack));
    }
  }

  // Records a request that failed. The device's lock is held.
  void record_oom(Device& device, const HistorySettings& settings, uint64_t device_free, size_t size,
                  cudaStream_t stream, Stack stack) {
    record(device, settings,
           entry(TraceEntry::OOM, device.index, device_free, size, stream, std::move(stack)));
  }

#if VRAMP_TORCH >= 214
  // Records a text about a live block.
  void record_annotation(const vramp_torch_block_t& block, const std::string& metadata) {
    auto index = static_cast<DeviceIndex>(block.device);
    TraceEntry entry(TraceEntry::ANNOTATE, index, block.address, block.requested,
                     reinterpret_cast<cudaStream_t>(block.stream), PoolId{0, 0},
                     c10::getApproximateTime(), nullptr, compile_context(), metadata);
    Device& device = shared_.devices.at(index);
    auto now = settings();
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    record(device, *now, std::move(entry));
  }
#endif

  // Returns the stack of a live block's allocation, or null.
  Stack stack_of(const vramp_torch_block_t& block) {
    Device& device = shared_.devices.at(static_cast<DeviceIndex>(block.device));
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    auto stack = device.history.stacks.find(block.address);
    return stack == device.history.stacks.end() ? nullptr : stack->second;
  }

 private:
  // What the observer of a device's growth needs.
  struct Growth {
    Recorder* recorder = nullptr;
    Device* device = nullptr;
    bool is_observed = false;
  };

  static std::string compile_context() {
    return compile_contexts.empty() ? std::string() : compile_contexts.back();
  }

  TraceEntry entry(TraceEntry::Action action, DeviceIndex device, size_t address, size_t size,
                   cudaStream_t stream, Stack stack) {
    return TraceEntry(action, device, address, size, stream, PoolId{0, 0},
                      c10::getApproximateTime(), std::move(stack), compile_context()
#if VRAMP_TORCH >= 210
                      , shared_.native->getUserMetadata()
#endif
    );
  }

  // The device's lock is held. Events have stacks if PyTorch asked for those of all allocations.
  void record(Device& device, const HistorySettings& settings, TraceEntry entry) {
    if (settings.when < RecordContext::ALLOC) {
      entry.context_ = nullptr;
    }
    if (auto trackers = std::atomic_load(&trackers_)) {
      for (const auto& tracker : *trackers) {
        tracker(entry);
      }
    }
    if (settings.enabled && settings.skipped.count(entry.action_) == 0) {
      device.history.add(std::move(entry), settings.max_entries);
    }
  }

  // Records when vramp's memory grows and shrinks, from the first allocation of the device on.
  void observe_growth(Growth& growth, bool observe) {
    if (observe == growth.is_observed) {
      return;
    }
    auto observer = [](const vramp_event_t* event, void* user) {
      auto* growth = static_cast<Growth*>(user);
      bool grown = event->kind == VRAMP_EVENT_GROWN;
      if (grown || event->kind == VRAMP_EVENT_SHRUNK) {
        growth->recorder->record_growth(*growth->device, grown, event->size);
      }
    };
    vramp_observer_t chosen = observe ? +observer : nullptr;
    if (shared_.vramp.observe(growth.device->index, chosen, &growth) == VRAMP_OK) {
      growth.is_observed = observe;
    }
  }

  void record_growth(Device& device, bool grown, size_t size) {
    auto now = settings();
    auto action = grown ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_UNMAP;
    // One allocation may create memory at several addresses: the event has the amount.
    TraceEntry event = entry(action, device.index, 0, size, nullptr, growth_stack);
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    record(device, *now, std::move(event));
  }

  Shared& shared_;
  std::array<Growth, kDevices> growth_;
  std::mutex trackers_mutex_;
  std::shared_ptr<const std::vector<AllocatorTraceTracker>> trackers_;
  std::shared_ptr<const HistorySettings> settings_ = std::make_shared<HistorySettings>();
  std::atomic<bool> is_on_{false};
  std::atomic<bool> is_tracked_{false};
  // Number of stacks of live blocks. They stay when the history ends, as PyTorch's do.
  std::atomic<int64_t> stacks_{0};
};

} // namespace vramp
