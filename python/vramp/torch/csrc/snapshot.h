// Adds vramp's memory and events to the snapshots of PyTorch's own allocator.

#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "recorder.h"
#include "shared.h"
#include "torch_api.h"

namespace vramp {

class Snapshots {
 public:
  Snapshots(Shared& shared, const Recorder& recorder) : shared_(shared), recorder_(recorder) {}

  // Adds to a snapshot of all memory: one of a pool has nothing of vramp.
  SnapshotInfo complete(SnapshotInfo snapshot, PoolId pool, bool include_traces) {
    if (pool != PoolId{0, 0}) {
      return snapshot;
    }
    auto to_ns = clock_.makeConverter();
    shared_.devices.each([&](Device& device) {
      add_segments(device, snapshot);
      std::vector<TraceEntry> events;
      if (include_traces) {
        std::lock_guard<std::recursive_mutex> lock(device.mutex);
        events = device.history.in_order();
      }
      for (TraceEntry& event : events) {
        event.time_.t_ = to_ns(event.time_.approx_t_) / 1000;
      }
      auto index = static_cast<size_t>(device.index);
      if (snapshot.device_traces.size() <= index) {
        snapshot.device_traces.resize(index + 1);
      }
      merge(snapshot.device_traces[index], std::move(events));
    });
    auto by_address = [](const SegmentInfo& a, const SegmentInfo& b) {
      return std::make_pair(a.device, a.address) < std::make_pair(b.device, b.address);
    };
    std::sort(snapshot.segments.begin(), snapshot.segments.end(), by_address);
    return snapshot;
  }

 private:
  // Merges events by time, and keeps as many of the last as were asked for.
  void merge(std::vector<TraceEntry>& into, std::vector<TraceEntry> events) const {
    if (events.empty()) {
      return;
    }
    std::vector<TraceEntry> all;
    all.reserve(into.size() + events.size());
    std::merge(std::make_move_iterator(into.begin()), std::make_move_iterator(into.end()),
               std::make_move_iterator(events.begin()), std::make_move_iterator(events.end()),
               std::back_inserter(all),
               [](const TraceEntry& a, const TraceEntry& b) { return a.time_.t_ < b.time_.t_; });
    size_t max = recorder_.settings()->max_entries;
    if (max > 0 && all.size() > max) {
      all.erase(all.begin(), all.end() - static_cast<ptrdiff_t>(max));
    }
    into = std::move(all);
  }

  void add_segments(Device& device, SnapshotInfo& snapshot) const {
    std::vector<vramp_torch_part_t> parts;
    auto visitor = [](const vramp_torch_part_t* part, void* user) {
      static_cast<std::vector<vramp_torch_part_t>*>(user)->push_back(*part);
    };
    if (shared_.vramp.visit(device.index, visitor, &parts) != VRAMP_OK) {
      shared_.fail("cannot list the memory");
    }
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    uint64_t end = 0;
    for (const vramp_torch_part_t& part : parts) {
      bool is_of_pool = part.state == 3;
      if (!is_of_pool) {
        add_part(device, snapshot.segments, part, part.address == end);
      }
      end = is_of_pool ? 0 : part.address + part.size;
    }
  }

  // Adds a part to the last segment if it continues that: a segment is a stretch of memory of one kind,
  // small or large, without a gap.
  static void add_part(Device& device, std::vector<SegmentInfo>& segments,
                       const vramp_torch_part_t& part, bool continues) {
    bool is_large = part.is_small == 0;
    if (!continues || segments.back().is_large != is_large) {
      SegmentInfo segment;
      segment.device = device.index;
      segment.address = part.address;
      segment.stream = reinterpret_cast<cudaStream_t>(part.stream);
      segment.is_large = is_large;
      segment.is_expandable = true;
      segments.push_back(std::move(segment));
    }
    BlockInfo block;
    block.size = part.size;
    block.requested_size = part.requested;
    block.allocated = part.state == 1;
    block.active = part.state != 0;
    auto& stacks = device.history.stacks;
    auto stack = block.allocated ? stacks.find(part.address) : stacks.end();
    if (stack != stacks.end()) {
      block.context_when_allocated = stack->second;
    }
    SegmentInfo& segment = segments.back();
    segment.total_size += block.size;
    segment.allocated_size += block.allocated ? block.size : 0;
    segment.active_size += block.active ? block.size : 0;
    segment.requested_size += block.active ? block.requested_size : 0;
    segment.blocks.push_back(std::move(block));
  }

  Shared& shared_;
  const Recorder& recorder_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

} // namespace vramp
