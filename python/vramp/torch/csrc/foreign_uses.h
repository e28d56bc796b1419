// Uses of blocks by streams of other devices.
//
// vramp's allocator of a device records its events on streams of that device alone. So a use by another
// device's stream is kept here. When the block is freed, an event of that stream is recorded on its own device
// and a stream of the block's device waits for it, which vramp then treats as any other user of the block. No
// thread waits.
//
// While the other stream is captured its event would become part of the graph. The free is put off then until
// a pool is closed or the cache is emptied.
//
// Growth: O(log n) for each free while n blocks have such uses, and one read otherwise.

#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "shared.h"
#include "torch_api.h"

namespace vramp {

class ForeignUses {
 public:
  explicit ForeignUses(Shared& shared) : shared_(shared) {}

  // Notes that a stream of another device uses the block at an address of device `own`.
  void add(void* address, DeviceIndex own, c10::cuda::CUDAStream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block& block = blocks_[address];
    block.own = own;
    block.users.insert({stream.device_index(), stream.stream()});
    count_.store(blocks_.size(), std::memory_order_release);
  }

  // Makes vramp wait for the uses of a block that is about to be freed. Returns false if it cannot be freed
  // now: it is freed by `take_postponed` then.
  bool settle(void* address) {
    if (C10_LIKELY(count_.load(std::memory_order_acquire) == 0)) {
      return true;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(address);
    if (found == blocks_.end()) {
      return true;
    }
    Block& block = found->second;
    auto& users = block.users;
    for (auto user = users.begin(); user != users.end();) {
      if (!order(address, block.own, user->first, user->second)) {
        postponed_.insert(address);
        return false;
      }
      user = users.erase(user);
    }
    blocks_.erase(found);
    count_.store(blocks_.size(), std::memory_order_release);
    return true;
  }

  // Returns the blocks whose free was put off, for another try.
  std::set<void*> take_postponed() {
    if (C10_LIKELY(count_.load(std::memory_order_acquire) == 0)) {
      return {};
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(postponed_, {});
  }

 private:
  struct Block {
    DeviceIndex own = 0;
    std::set<std::pair<DeviceIndex, cudaStream_t>> users;
  };

  // Makes the stream of device `own` that stands for others wait for a stream, and records its use. Throws
  // nothing. The lock is held.
  bool order(void* address, DeviceIndex own, DeviceIndex other, cudaStream_t stream) {
    DeviceIndex before = 0;
    if (c10::cuda::GetDevice(&before) != cudaSuccess) {
      return false;
    }
    cudaEvent_t event = nullptr;
    bool ordered = is_free_to_record(other, stream) &&
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess &&
        cudaEventRecord(event, stream) == cudaSuccess && c10::cuda::SetDevice(own) == cudaSuccess;
    cudaStream_t own_stream = ordered ? stream_of(own) : nullptr;
    ordered = own_stream != nullptr && cudaStreamWaitEvent(own_stream, event, 0) == cudaSuccess &&
        shared_.vramp.block_record(address, own_stream) == VRAMP_OK;
    if (event != nullptr) {
      // The driver keeps it until it has occurred.
      (void)cudaEventDestroy(event);
    }
    (void)c10::cuda::SetDevice(before);
    if (!ordered) {
      (void)cudaGetLastError();
    }
    return ordered;
  }

  static bool is_free_to_record(DeviceIndex device, cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return c10::cuda::SetDevice(device) == cudaSuccess &&
        cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone;
  }

  // Returns a stream of the current device, `own`; null if none can be made. It is never destroyed.
  cudaStream_t stream_of(DeviceIndex own) {
    cudaStream_t& stream = streams_[own];
    if (stream == nullptr && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
      stream = nullptr;
    }
    return stream;
  }

  Shared& shared_;
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  // Blocks of `blocks_` that were freed.
  std::set<void*> postponed_;
  std::map<DeviceIndex, cudaStream_t> streams_;
  std::atomic<size_t> count_{0};
};

} // namespace vramp
