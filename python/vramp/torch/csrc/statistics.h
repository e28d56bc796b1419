// Statistics of one device: the blocks of vramp and those of PyTorch's own allocator, which serves
// graphs and memory pools, as one.
//
// 1. A thread counts its blocks in counters of its own (`Counts`), which only it writes: without a lock.
// 2. The sums and their peaks are behind a lock. A thread reports to them once its change exceeds its batch,
//    1/256 of the peak divided by the number of threads. While one thread alone allocates it never has to.
// 3. Who reads takes the lock and adds what the threads have not reported.
// 4. The blocks of PyTorch's own allocator change under the lock, once the thread has reported: so a peak is one
//    of both allocators together.
//
// What is current, allocated and freed is exact. So are the peaks while one thread allocates. With several, a
// peak is at least what any of them saw, which is what was reported with its own change, and differs from the
// true one by at most 1/128 of the peak of all bytes.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "library.h"
#include "torch_api.h"

namespace vramp {

constexpr size_t kDevices = 64;

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

// What is counted of blocks: their number, their bytes, and the bytes requested.
constexpr size_t kKinds = 3;
constexpr size_t kBytes = 1;
// PyTorch's types: all, the small pool, the large pool.
constexpr auto kTypes = static_cast<size_t>(StatType::NUM_TYPES);
constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
constexpr auto kSmall = static_cast<size_t>(StatType::SMALL_POOL);
constexpr auto kLarge = static_cast<size_t>(StatType::LARGE_POOL);

using Amounts = std::array<int64_t, kKinds>;
using Grid = std::array<Amounts, kTypes>;

// Returns what PyTorch's statistics have of a kind.
template <typename S>
auto& of_kind(S& stats, size_t kind) {
  return kind == 0 ? stats.allocation : kind == kBytes ? stats.allocated_bytes : stats.requested_bytes;
}

class Statistics;

// The blocks that one thread allocated and freed on a device.
struct Counts {
  // Written by the thread alone, and read by any.
  using Counter = std::atomic<int64_t>;

  static int64_t read(const Counter& counter) {
    return counter.load(std::memory_order_relaxed);
  }

  static void write(Counter& counter, int64_t value) {
    counter.store(value, std::memory_order_relaxed);
  }

  void allocate(size_t pool, const Amounts& amounts) {
    for (size_t kind = 0; kind < kKinds; ++kind) {
      write(allocated[pool][kind], read(allocated[pool][kind]) + amounts[kind]);
    }
  }

  void free(size_t pool, const Amounts& amounts) {
    // What is live has grown since the last free: its maximum is looked at here alone.
    int64_t is_higher = 0;
    for (size_t kind = 0; kind < kKinds; ++kind) {
      is_higher |= read(high[kAll][kind]) - live(kAll, kind);
      is_higher |= read(high[pool][kind]) - live(pool, kind);
    }
    if (is_higher < 0) {
      raise_high();
    }
    for (size_t kind = 0; kind < kKinds; ++kind) {
      write(freed[pool][kind], read(freed[pool][kind]) + amounts[kind]);
    }
  }

  void raise_high() {
    for (size_t type = 0; type < kTypes; ++type) {
      for (size_t kind = 0; kind < kKinds; ++kind) {
        write(high[type][kind], std::max(read(high[type][kind]), live(type, kind)));
      }
    }
  }

  // Less than zero in a thread that frees the blocks of others.
  int64_t live(size_t type, size_t kind) const {
    return type == kAll ? live(kSmall, kind) + live(kLarge, kind)
                        : read(allocated[type][kind]) - read(freed[type][kind]);
  }

  bool has_to_report() const {
    return std::abs(live(kAll, kBytes) - read(reported[kAll][kBytes])) > read(batch);
  }

  using Counters = std::array<std::array<Counter, kKinds>, kTypes>;
  // By pool.
  Counters allocated{};
  Counters freed{};
  // The most that was live when a block was freed, since the thread reported.
  Counters high{};
  // The largest change that is not reported, and what was live when it was. Any thread writes them, behind the
  // lock.
  Counter batch{0};
  Counters reported{};
  // Another thread reported or reset the peaks since: `high` is of before. Behind the lock.
  bool is_stale = false;
  Statistics* const of;

  explicit Counts(Statistics* statistics) : of(statistics) {}
};

// The counts of the thread by device. Null before its first block, and once it is ending.
inline thread_local std::array<Counts*, kDevices> own_counts{};
inline thread_local bool is_thread_ending = false;

class Statistics {
 public:
  void add_block(const vramp_torch_block_t& block) {
    Counts* own = counts_of(block);
    if (C10_UNLIKELY(own == nullptr)) {
      count_late(block, 1);
      return;
    }
    own->allocate(pool_of(block), amounts_of(block));
    report_if_needed(*own);
  }

  void remove_block(const vramp_torch_block_t& block) {
    Counts* own = counts_of(block);
    if (C10_UNLIKELY(own == nullptr)) {
      count_late(block, -1);
      return;
    }
    own->free(pool_of(block), amounts_of(block));
    report_if_needed(*own);
  }

  // Takes over what PyTorch's own allocator has now.
  void update_native(DeviceIndex device, const DeviceStats& native) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Counts* own = own_counts[static_cast<size_t>(device)]) {
      report_own(*own);
    }
    each([&](size_t type, size_t kind) {
      now_[type][kind] += of_kind(native, kind)[type].current - native_current(type, kind);
    });
    native_ = native;
    raise_to_totals();
  }

  // Adds the counts of a thread that ends, and drops them.
  void end(Counts* counts) {
    std::lock_guard<std::mutex> lock(mutex_);
    report_own(*counts);
    each([&](size_t type, size_t kind) {
      ended_allocated_[type][kind] += allocated_in(*counts, type, kind);
    });
    auto is_it = [&](const std::unique_ptr<Counts>& one) { return one.get() == counts; };
    threads_.erase(std::find_if(threads_.begin(), threads_.end(), is_it));
    if (threads_.size() == 1 && !threads_[0]->is_stale) {
      Counts::write(threads_[0]->batch, batch());
    }
  }

  int64_t allocated_bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return total(kAll, kBytes);
  }

  // Bytes of vramp's blocks alone.
  int64_t own_bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return own_live(kAll, kBytes);
  }

  int64_t native_reserved() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return native_.reserved_bytes[kAll].current;
  }

  void count_oom() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++ooms_;
  }

  void count_retry() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++retries_;
  }

  // Returns all statistics. `memory` is vramp's, of which PyTorch's own allocator has `segments`.
  DeviceStats read(const vramp_torch_memory_t& memory, const SegmentTotals& segments) {
    std::lock_guard<std::mutex> lock(mutex_);
    raise_to_unreported();
    DeviceStats all = native_;
    each([&](size_t type, size_t kind) {
      Stat own = own_stat(type, kind);
      Stat& into = of_kind(all, kind)[type];
      into.current += own.current;
      into.peak = own.peak;
      into.allocated += own.allocated;
      into.freed += own.freed;
    });
    for (size_t type = 0; type < kTypes; ++type) {
      auto part = static_cast<StatType>(type);
      active(all.active[type], active_peak_[type], own_stat(type, 0), waiting(memory.waiting, part),
             waiting(base_.waiting, part));
      active(all.active_bytes[type], active_bytes_peak_[type], own_stat(type, kBytes),
             waiting(memory.waiting_bytes, part), waiting(base_.waiting_bytes, part));
    }
    reserved(all, memory, segments);
    all.num_alloc_retries = retries_ + static_cast<int64_t>(memory.retries - base_.retries);
    all.num_ooms = ooms_;
    all.num_device_alloc += static_cast<int64_t>(memory.created - base_.created);
    all.num_device_free += static_cast<int64_t>(memory.released - base_.released);
    return all;
  }

  void reset_accumulated(const vramp_torch_memory_t& memory, const SegmentTotals& segments) {
    std::lock_guard<std::mutex> lock(mutex_);
    each([&](size_t type, size_t kind) {
      base_allocated_[type][kind] = allocated_ever(type, kind);
      base_freed_[type][kind] = allocated_ever(type, kind) - own_live(type, kind);
    });
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
    std::lock_guard<std::mutex> lock(mutex_);
    each([&](size_t type, size_t kind) { peak_[type][kind] = total(type, kind); });
    for (const auto& thread : threads_) {
      make_stale(*thread);
    }
    active_peak_.fill(0);
    active_bytes_peak_.fill(0);
    reserved_peak_.fill(0);
  }

 private:
  static size_t pool_of(const vramp_torch_block_t& block) {
    return block.is_small != 0 ? kSmall : kLarge;
  }

  static Amounts amounts_of(const vramp_torch_block_t& block) {
    return {1, static_cast<int64_t>(block.size), static_cast<int64_t>(block.requested)};
  }

  template <typename F>
  static void each(F f) {
    for (size_t type = 0; type < kTypes; ++type) {
      for (size_t kind = 0; kind < kKinds; ++kind) {
        f(type, kind);
      }
    }
  }

  // Returns the counts of the thread; null for a thread that ends.
  Counts* counts_of(const vramp_torch_block_t& block) {
    Counts* own = own_counts[static_cast<size_t>(block.device)];
    return C10_LIKELY(own != nullptr) ? own : begin(block);
  }

  Counts* begin(const vramp_torch_block_t& block);

  // Counts a block behind the lock, once the thread's own counts are gone.
  void count_late(const vramp_torch_block_t& block, int64_t sign) {
    std::lock_guard<std::mutex> lock(mutex_);
    Amounts amounts = amounts_of(block);
    for (size_t kind = 0; kind < kKinds; ++kind) {
      for (size_t type : {kAll, pool_of(block)}) {
        now_[type][kind] += sign * amounts[kind];
        ended_allocated_[type][kind] += sign > 0 ? amounts[kind] : 0;
      }
    }
    raise_to_totals();
  }

  void report_if_needed(Counts& own) {
    if (C10_UNLIKELY(own.has_to_report())) {
      std::lock_guard<std::mutex> lock(mutex_);
      report_own(own);
    }
  }

  // The lock is held for all that follows.

  // Adds what a thread has not reported.
  void report(Counts& thread) {
    each([&](size_t type, size_t kind) {
      raise_to_high(thread, type, kind);
      int64_t live = thread.live(type, kind);
      now_[type][kind] += live - Counts::read(thread.reported[type][kind]);
      Counts::write(thread.reported[type][kind], live);
    });
  }

  // Adds what the calling thread has not reported.
  void report_own(Counts& own) {
    report(own);
    each([&](size_t type, size_t kind) {
      Counts::write(own.high[type][kind], own.live(type, kind));
    });
    own.is_stale = false;
    Counts::write(own.batch, batch());
  }

  // Lets the maximum of a thread begin with its next block, with which it reports.
  static void make_stale(Counts& thread) {
    thread.is_stale = true;
    Counts::write(thread.batch, -1);
  }

  void raise_to_high(const Counts& counts, size_t type, size_t kind) {
    int64_t high = counts.live(type, kind);
    if (!counts.is_stale) {
      high = std::max(high, Counts::read(counts.high[type][kind]));
    }
    int64_t reached = now_[type][kind] + high - Counts::read(counts.reported[type][kind]);
    peak_[type][kind] = std::max(peak_[type][kind], reached);
  }

  void raise_to_totals() {
    each([&](size_t type, size_t kind) {
      peak_[type][kind] = std::max(peak_[type][kind], total(type, kind));
    });
  }

  void raise_to_unreported() {
    for (const auto& thread : threads_) {
      each([&](size_t type, size_t kind) { raise_to_high(*thread, type, kind); });
    }
    raise_to_totals();
  }

  int64_t batch() const {
    if (threads_.size() < 2) {
      return std::numeric_limits<int64_t>::max();
    }
    return peak_[kAll][kBytes] / (256 * static_cast<int64_t>(threads_.size()));
  }

  // Returns what both allocators have now.
  int64_t total(size_t type, size_t kind) const {
    int64_t sum = now_[type][kind];
    for (const auto& thread : threads_) {
      sum += thread->live(type, kind) - Counts::read(thread->reported[type][kind]);
    }
    return sum;
  }

  int64_t native_current(size_t type, size_t kind) const {
    return of_kind(native_, kind)[type].current;
  }

  int64_t own_live(size_t type, size_t kind) const {
    return total(type, kind) - native_current(type, kind);
  }

  int64_t allocated_ever(size_t type, size_t kind) const {
    int64_t sum = ended_allocated_[type][kind];
    for (const auto& thread : threads_) {
      sum += allocated_in(*thread, type, kind);
    }
    return sum;
  }

  static int64_t allocated_in(const Counts& counts, size_t type, size_t kind) {
    auto of = [&](size_t pool) { return Counts::read(counts.allocated[pool][kind]); };
    return type == kAll ? of(kSmall) + of(kLarge) : of(type);
  }

  // Returns what is of vramp's blocks, but for the peak, which is of both allocators.
  Stat own_stat(size_t type, size_t kind) const {
    Stat stat;
    stat.current = own_live(type, kind);
    stat.peak = peak_[type][kind];
    stat.allocated = allocated_ever(type, kind) - base_allocated_[type][kind];
    stat.freed = allocated_ever(type, kind) - stat.current - base_freed_[type][kind];
    return stat;
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
  static void active(Stat& into, int64_t& seen_peak, const Stat& own, int64_t waiting,
                     int64_t waiting_at_reset) {
    into.current += own.current + waiting;
    seen_peak = std::max({seen_peak, own.peak, into.current});
    into.peak = seen_peak;
    into.allocated += own.allocated;
    into.freed += own.freed + waiting_at_reset - waiting;
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

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Counts>> threads_;
  // What both allocators have, and the most of it. Of vramp's blocks what threads have reported.
  Grid now_{};
  Grid peak_{};
  // What ended threads allocated.
  Grid ended_allocated_{};
  // Totals of vramp's blocks at the last reset.
  Grid base_allocated_{};
  Grid base_freed_{};
  std::array<int64_t, kTypes> active_peak_{};
  std::array<int64_t, kTypes> active_bytes_peak_{};
  std::array<int64_t, kTypes> reserved_peak_{};
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

// Ends the counts of a thread.
struct ThreadEnd {
  ~ThreadEnd() {
    is_thread_ending = true;
    for (Counts*& counts : own_counts) {
      if (Counts* ended = std::exchange(counts, nullptr)) {
        ended->of->end(ended);
      }
    }
  }
};

inline Counts* Statistics::begin(const vramp_torch_block_t& block) {
  if (is_thread_ending) {
    return nullptr;
  }
  static thread_local ThreadEnd at_end;
  (void)at_end;
  std::lock_guard<std::mutex> lock(mutex_);
  // What a thread has not reported while it was alone may be any amount.
  for (const auto& thread : threads_) {
    report(*thread);
    make_stale(*thread);
  }
  threads_.push_back(std::make_unique<Counts>(this));
  Counts::write(threads_.back()->batch, batch());
  return own_counts[static_cast<size_t>(block.device)] = threads_.back().get();
}

} // namespace vramp
