// The recorded events of one device, and the call stacks of its live blocks.

#pragma once

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "torch_api.h"

namespace vramp {

// What torch.cuda.memory._record_memory_history chose. The same for all devices.
struct HistorySettings {
  bool enabled = false;
  CreateContextFn recorder = nullptr;
  size_t max_entries = 0;
  RecordContext when = RecordContext::NEVER;
  std::unordered_set<int> skipped;
};

// Not thread-safe: the device's lock is held.
class History {
 public:
  // A ring: at most `max` events are kept.
  void add(TraceEntry entry, size_t max) {
    if (max == 0) {
      return;
    }
    if (entries_.size() < max) {
      entries_.push_back(std::move(entry));
      return;
    }
    next_ %= entries_.size();
    entries_[next_++] = std::move(entry);
  }

  void clear() {
    entries_.clear();
    entries_.shrink_to_fit();
    next_ = 0;
  }

  // Keeps the last `max` events.
  void shrink(size_t max) {
    if (entries_.size() > max) {
      std::vector<TraceEntry> kept = in_order();
      kept.erase(kept.begin(), kept.end() - static_cast<ptrdiff_t>(max));
      entries_ = std::move(kept);
    } else {
      entries_ = in_order();
    }
    next_ = 0;
  }

  // Returns the events, oldest first.
  std::vector<TraceEntry> in_order() const {
    std::vector<TraceEntry> ordered;
    ordered.reserve(entries_.size());
    size_t start = entries_.empty() ? 0 : next_ % entries_.size();
    ordered.insert(ordered.end(), entries_.begin() + static_cast<ptrdiff_t>(start), entries_.end());
    ordered.insert(ordered.end(), entries_.begin(), entries_.begin() + static_cast<ptrdiff_t>(start));
    return ordered;
  }

  // Call stacks of live blocks, by address.
  std::unordered_map<size_t, std::shared_ptr<GatheredContext>> stacks;

 private:
  std::vector<TraceEntry> entries_;
  size_t next_ = 0;
};

} // namespace vramp
