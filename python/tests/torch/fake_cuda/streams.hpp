// Streams, events and captures of the fake CUDA runtime.
//
// Work is counted and not run. It is complete at once, unless its stream is held: whatever is submitted
// after `hold` is unfinished until `release`, as behind a kernel that runs for long. A wait for an event makes
// the work that follows depend on the event's. To wait on the host releases what it waits for.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace fake {

struct Stream;

// The work of a stream up to a number; complete if that and everything it waits for is.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t index = 0;
};

struct Capture {
  uint64_t id;
  int mode;
  uint64_t thread;
  bool valid = true;
  size_t nodes = 0;
  std::set<Stream*> streams;
};

struct Stream {
  int device = 0;
  int priority = 0;
  unsigned flags = 0;
  uint64_t submitted = 0;
  uint64_t held_after = UINT64_MAX;
  struct Wait {
    uint64_t index;
    Point point;
  };
  std::vector<Wait> waits;
  std::shared_ptr<Capture> capture;
};

struct Event {
  int device = 0;
  unsigned flags = 0;
  Point point;
  uint64_t recorded_at = 0;
  // The capture in which it was recorded last; it is no event of the device then.
  std::shared_ptr<Capture> capture;
};

// One lock for all of them: streams refer to each other.
std::mutex& stream_mutex();
// All of these need the lock.
bool is_complete(const Point& point);
void finish(const Point& point);
void finish_device(int device);

}  // namespace fake
