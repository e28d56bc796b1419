// Statistics of one device: the blocks of vramp and those of PyTorch's own allocator, which serves
// graphs and memory pools, as one.

#pragma once

#include <mutex>

#include "library.h"
#include "torch_api.h"

namespace vramp {

// Largest request of the small pool.
constexpr size_t kSmallMax = 1048576;

// Not thread-safe: the device's lock is held.
//
// `current` and `peak` are of both allocators together, so that a peak is one of the sum; `allocated`
// and `freed` are of vramp's blocks, and those of PyTorch's are added when statistics are read.
class Statistics {
 public:
  void add_block(size_t size, size_t requested) {
    each_type(size, [&](size_t type) {
      allocation_[type].increase(1);
      allocated_bytes_[type].increase(size);
      requested_bytes_[type].increase(requested);
    });
  }

  void remove_block(size_t size, size_t requested) {
    each_type(size, [&](size_t type) {
      allocation_[type].decrease(1);
      allocated_bytes_[type].decrease(size);
      requested_bytes_[type].decrease(requested);
    });
  }

  // Takes over what PyTorch's own allocator has now.
  void update_native(const DeviceStats& native) {
    for (size_t type = 0; type < allocation_.size(); ++type) {
      follow(allocation_[type], native_.allocation[type].current, native.allocation[type].current);
      follow(allocated_bytes_[type], native_.allocated_bytes[type].current,
             native.allocated_bytes[type].current);
      follow(requested_bytes_[type], native_.requested_bytes[type].current,
             native.requested_bytes[type].current);
    }
    native_ = native;
  }

  int64_t allocated_bytes() const {
    return allocated_bytes_[static_cast<size_t>(StatType::AGGREGATE)].current;
  }

  // Bytes of vramp's blocks alone.
  int64_t own_bytes() const {
    return allocated_bytes() -
        native_.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].current;
  }

  int64_t native_reserved() const {
    return native_.reserved_bytes[static_cast<size_t>(StatType::AGGREGATE)].current;
  }

  void count_oom() {
    ++ooms_;
  }

  // Returns all statistics. `memory` is vramp's, of which `segments` bytes are segments of PyTorch's own
  // allocator.
  DeviceStats read(const vramp_torch_memory_t& memory, size_t segments) {
    DeviceStats all = native_;
    for (size_t type = 0; type < allocation_.size(); ++type) {
      auto merge = [&](Stat& into, const Stat& own) {
        into.current = own.current;
        into.peak = own.peak;
        into.allocated += own.allocated;
        into.freed += own.freed;
      };
      Stat native_active = all.active[type];
      Stat native_active_bytes = all.active_bytes[type];
      merge(all.allocation[type], allocation_[type]);
      merge(all.allocated_bytes[type], allocated_bytes_[type]);
      merge(all.requested_bytes[type], requested_bytes_[type]);
      auto waiting = [&](const uint64_t (&pair)[2]) -> int64_t {
        switch (static_cast<StatType>(type)) {
          case StatType::SMALL_POOL:
            return static_cast<int64_t>(pair[0]);
          case StatType::LARGE_POOL:
            return static_cast<int64_t>(pair[1]);
          default:
            return static_cast<int64_t>(pair[0] + pair[1]);
        }
      };
      active(all.active[type], active_peak_[type], allocation_[type], native_.allocation[type],
             native_active, waiting(memory.waiting));
      active(all.active_bytes[type], active_bytes_peak_[type], allocated_bytes_[type],
             native_.allocated_bytes[type], native_active_bytes, waiting(memory.waiting_bytes));
    }
    reserved(all, memory, static_cast<int64_t>(segments));
    all.num_alloc_retries += static_cast<int64_t>(memory.retries - base_.retries);
    all.num_ooms = ooms_;
    all.num_device_alloc += static_cast<int64_t>(memory.created - base_.created);
    all.num_device_free += static_cast<int64_t>(memory.released - base_.released);
    return all;
  }

  void reset_accumulated(const vramp_torch_memory_t& memory) {
    for (size_t type = 0; type < allocation_.size(); ++type) {
      allocation_[type].reset_accumulated();
      allocated_bytes_[type].reset_accumulated();
      requested_bytes_[type].reset_accumulated();
    }
    ooms_ = 0;
    base_ = memory;
  }

  void reset_peaks() {
    for (size_t type = 0; type < allocation_.size(); ++type) {
      allocation_[type].reset_peak();
      allocated_bytes_[type].reset_peak();
      requested_bytes_[type].reset_peak();
      active_peak_[type] = 0;
      active_bytes_peak_[type] = 0;
      reserved_peak_[type] = 0;
    }
  }

 private:
  template <typename F>
  static void each_type(size_t size, F f) {
    f(static_cast<size_t>(StatType::AGGREGATE));
    f(static_cast<size_t>(size <= kSmallMax ? StatType::SMALL_POOL : StatType::LARGE_POOL));
  }

  static void follow(Stat& stat, int64_t before, int64_t now) {
    stat.current += now - before;
    stat.peak = std::max(stat.peak, stat.current);
  }

  // Live blocks, and freed ones that other streams may still use.
  static void active(Stat& into, int64_t& seen_peak, const Stat& live, const Stat& native_live,
                     const Stat& native_active, int64_t waiting) {
    int64_t own = live.current - native_live.current + waiting;
    into.current = own + native_active.current;
    seen_peak = std::max({seen_peak, live.peak, into.current});
    into.peak = seen_peak;
    into.allocated = native_active.allocated + live.allocated;
    into.freed = native_active.freed + live.allocated - own;
  }

  void reserved(DeviceStats& all, const vramp_torch_memory_t& memory, int64_t segments) {
    auto of = [&](StatType type) -> Stat& {
      return all.reserved_bytes[static_cast<size_t>(type)];
    };
    // Memory of PyTorch's own allocator that is not vramp's: of pools with an allocator of their own.
    int64_t foreign = of(StatType::AGGREGATE).current - segments;
    int64_t total = static_cast<int64_t>(memory.reserved) + foreign;
    int64_t small =
        static_cast<int64_t>(memory.reserved_small) + of(StatType::SMALL_POOL).current;
    auto set = [&](StatType type, int64_t current, int64_t at_least) {
      int64_t& peak = reserved_peak_[static_cast<size_t>(type)];
      peak = std::max({peak, current, at_least});
      of(type).current = current;
      of(type).peak = peak;
    };
    Stat& sum = of(StatType::AGGREGATE);
    int64_t foreign_in = sum.allocated - segments;
    set(StatType::SMALL_POOL, small, 0);
    set(StatType::LARGE_POOL, total - small, 0);
    set(StatType::AGGREGATE, total, static_cast<int64_t>(memory.reserved_peak) + foreign);
    sum.allocated = static_cast<int64_t>(memory.reserved_total - base_.reserved_total) +
        std::max<int64_t>(foreign_in, 0);
    sum.freed = sum.allocated - total;
  }

  StatArray allocation_;
  StatArray allocated_bytes_;
  StatArray requested_bytes_;
  std::array<int64_t, static_cast<size_t>(StatType::NUM_TYPES)> active_peak_{};
  std::array<int64_t, static_cast<size_t>(StatType::NUM_TYPES)> active_bytes_peak_{};
  std::array<int64_t, static_cast<size_t>(StatType::NUM_TYPES)> reserved_peak_{};
  int64_t ooms_ = 0;
  DeviceStats native_;
  vramp_torch_memory_t base_{};
};

} // namespace vramp
