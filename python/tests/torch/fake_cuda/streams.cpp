#include "streams.hpp"

#include <algorithm>

#include "runtime.hpp"

namespace fake {

std::mutex& stream_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

bool is_complete(const Point& point) {
  if (!point.stream) return true;
  Stream& stream = *point.stream;
  if (point.index > stream.held_after) return false;
  // What is complete stays so, hence its waits are dropped. A wait that is not complete is moved aside
  // while it is asked about, for two streams may wait for each other's earlier work.
  auto waits = std::move(stream.waits);
  stream.waits.clear();
  bool complete = true;
  std::vector<Stream::Wait> left;
  for (auto& wait : waits) {
    if (is_complete(wait.point)) continue;
    if (wait.index <= point.index) complete = false;
    left.push_back(wait);
  }
  left.insert(left.end(), stream.waits.begin(), stream.waits.end());
  stream.waits = std::move(left);
  return complete;
}

void finish(const Point& point) {
  if (!point.stream) return;
  Stream& stream = *point.stream;
  if (point.index > stream.held_after) stream.held_after = UINT64_MAX;
  auto waits = std::move(stream.waits);
  stream.waits.clear();
  for (auto& wait : waits) {
    if (wait.index <= point.index) {
      finish(wait.point);
    } else {
      stream.waits.push_back(wait);
    }
  }
}

void finish_device(int device) {
  for (auto& stream : all_streams()) {
    if (stream->device == device) finish(Point{stream, stream->submitted});
  }
}

}  // namespace fake
