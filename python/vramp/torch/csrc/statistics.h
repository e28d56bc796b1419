// Statistics of one device: the blocks of vramp and those of PyTorch's own allocator, which serves
// graphs and memory pools, as one.

#pragma once

#include <mutex>

#include "library.h"
#include "torch_api.h"

namespace vramp {

// The segments of vramp that PyTorch's own allocator has, in bytes.
struct SegmentTotals {
  int64_t current = 0;
  int64_t added = 0;
  int64_t removed = 0;

  void add(uint64_t size) {
    current += static_cast<int64_t>(size);
    added += static_cast<int64_t>(size);
  }

  void remove(uint64_t size) {
    current -= static_cast<int64_t>(size);
    removed += static_cast<int64_t>(size);
  }
};

// Not thread-safe: the device's lock is held.
//
// `current` and `peak` are of both allocators together, so that a peak is one of the sum; `allocated`
// and `freed` are of vramp's blocks, and those of PyTorch's are added when statistics are read.
class Statistics {
 public:
  void add_block(const vramp_torch_block_t& block) {
    size_t size = block.size;
    size_t requested = block.requested;
    each_type(block, [&](size_t type) {
      allocation_[type].increase(1);
      allocated_bytes_[type].increase(size);
      requested_bytes_[type].increase(requested);
    });
  }

  void remove_block(const vramp_torch_block_t& block) {
    size_t size = block.size;
    size_t requested = block.requested;
    each_type(block, [&](size_t type) {
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

  void count_retry() {
    ++retries_;
  }

  // Returns all statistics. `memory` is vramp's, of which PyTorch's own allocator has `segments`.
  DeviceStats read(const vramp_torch_memory_t& memory, const SegmentTotals& segments) {
    DeviceStats all = native_;
    for (size_t type = 0; type < allocation_.size(); ++type) {
      auto merge = [&](Stat& into, const Stat& own) {
        into.current = own.current;
        into.peak = own.peak;
        into.allocated += own.allocated;
        into.freed += own.freed;
      };
      merge(all.allocation[type], allocation_[type]);
      merge(all.allocated_bytes[type], allocated_bytes_[type]);
      merge(all.requested_bytes[type], requested_bytes_[type]);
      auto part = static_cast<StatType>(type);
      active(all.active[type], active_peak_[type], allocation_[type], native_.allocation[type],
             waiting(memory.waiting, part), waiting(base_.waiting, part));
      active(all.active_bytes[type], active_bytes_peak_[type], allocated_bytes_[type],
             native_.allocated_bytes[type], waiting(memory.waiting_bytes, part),
             waiting(base_.waiting_bytes, part));
    }
    reserved(all, memory, segments);
    all.num_alloc_retries = retries_ + static_cast<int64_t>(memory.retries - base_.retries);
    all.num_ooms = ooms_;
    all.num_device_alloc += static_cast<int64_t>(memory.created - base_.created);
    all.num_device_free += static_cast<int64_t>(memory.released - base_.released);
    return all;
  }

  void reset_accumulated(const vramp_torch_memory_t& memory, const SegmentTotals& segments) {
    for (size_t type = 0; type < allocation_.size(); ++type) {
      allocation_[type].reset_accumulated();
      allocated_bytes_[type].reset_accumulated();
      requested_bytes_[type].reset_accumulated();
    }
    ooms_ = 0;
    retries_ = 0;
    base_ = memory;
    base_segments_ = segments;
    small_.reset_accumulated();
    large_.reset_accumulated();
    allocated_ = 0;
    freed_ = 0;
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
  static void each_type(const vramp_torch_block_t& block, F f) {
    f(static_cast<size_t>(StatType::AGGREGATE));
    f(static_cast<size_t>(block.is_small != 0 ? StatType::SMALL_POOL : StatType::LARGE_POOL));
  }

  static void follow(Stat& stat, int64_t before, int64_t now) {
    stat.current += now - before;
    stat.peak = std::max(stat.peak, stat.current);
  }

  static int64_t waiting(const uint64_t (&pair)[2], StatType type) {
    switch (type) {
      case StatType::SMALL_POOL:
        return static_cast<int64_t>(pair[0]);
      case StatType::LARGE_POOL:
        return static_cast<int64_t>(pair[1]);
      default:
        return static_cast<int64_t>(pair[0] + pair[1]);
    }
  }

  // Completes PyTorch's own active blocks in `into` by vramp's: live ones, and freed ones that other
  // streams may still use.
  static void active(Stat& into, int64_t& seen_peak, const Stat& live, const Stat& native_live,
                     int64_t waiting, int64_t waiting_at_reset) {
    into.current += live.current - native_live.current + waiting;
    seen_peak = std::max({seen_peak, live.peak, into.current});
    into.peak = seen_peak;
    into.allocated += live.allocated;
    into.freed += live.freed + waiting_at_reset - waiting;
  }

  void reserved(DeviceStats& all, const vramp_torch_memory_t& memory,
                const SegmentTotals& segments) {
    auto of = [&](StatType type) -> Stat& {
      return all.reserved_bytes[static_cast<size_t>(type)];
    };
    Stat& sum = of(StatType::AGGREGATE);
    // Memory of PyTorch's own allocator that is not vramp's: of pools with an allocator of their own.
    int64_t foreign = sum.current - segments.current;
    int64_t total = static_cast<int64_t>(memory.reserved) + foreign;
    int64_t small = static_cast<int64_t>(memory.reserved_small) + of(StatType::SMALL_POOL).current;
    auto set = [&](StatType type, int64_t current, int64_t at_least) {
      int64_t& peak = reserved_peak_[static_cast<size_t>(type)];
      peak = std::max({peak, current, at_least});
      of(type).current = current;
      of(type).peak = peak;
    };
    set(StatType::SMALL_POOL, small, 0);
    set(StatType::LARGE_POOL, total - small, 0);
    set(StatType::AGGREGATE, total, static_cast<int64_t>(memory.reserved_peak) + foreign);
    int64_t allocated = sum.allocated - segments.added + base_segments_.added +
        static_cast<int64_t>(memory.reserved_total - base_.reserved_total);
    int64_t freed = sum.freed - segments.removed + base_segments_.removed +
        static_cast<int64_t>(memory.released_total - base_.released_total);
    attribute(allocated, freed, small);
    of(StatType::SMALL_POOL).allocated = small_.allocated;
    of(StatType::SMALL_POOL).freed = small_.freed;
    of(StatType::LARGE_POOL).allocated = large_.allocated;
    of(StatType::LARGE_POOL).freed = large_.freed;
    sum.allocated = small_.allocated + large_.allocated;
    sum.freed = small_.freed + large_.freed;
  }

  // Attributes to the two pools what was allocated and freed since the last call. Memory that went from
  // one pool to the other counts as freed there and as allocated here.
  void attribute(int64_t allocated, int64_t freed, int64_t small) {
    int64_t grown = std::max<int64_t>(allocated - allocated_, 0);
    int64_t shrunk = std::max<int64_t>(freed - freed_, 0);
    int64_t change = small - small_.current;
    int64_t small_grown = std::clamp<int64_t>(change, 0, grown);
    int64_t small_shrunk = std::clamp<int64_t>(-change, 0, shrunk);
    int64_t moved = change - small_grown + small_shrunk;
    small_.allocated += small_grown + std::max<int64_t>(moved, 0);
    small_.freed += small_shrunk + std::max<int64_t>(-moved, 0);
    large_.allocated += grown - small_grown + std::max<int64_t>(-moved, 0);
    large_.freed += shrunk - small_shrunk + std::max<int64_t>(moved, 0);
    small_.current = small;
    allocated_ = allocated;
    freed_ = freed;
  }

  StatArray allocation_;
  StatArray allocated_bytes_;
  StatArray requested_bytes_;
  std::array<int64_t, static_cast<size_t>(StatType::NUM_TYPES)> active_peak_{};
  std::array<int64_t, static_cast<size_t>(StatType::NUM_TYPES)> active_bytes_peak_{};
  std::array<int64_t, static_cast<size_t>(StatType::NUM_TYPES)> reserved_peak_{};
  int64_t ooms_ = 0;
  int64_t retries_ = 0;
  DeviceStats native_;
  // Reserved memory by pool: `current` of the small one, and what was allocated and freed in total.
  Stat small_;
  Stat large_;
  int64_t allocated_ = 0;
  int64_t freed_ = 0;
  // Totals at the last reset.
  vramp_torch_memory_t base_{};
  SegmentTotals base_segments_;
};

} // namespace vramp
