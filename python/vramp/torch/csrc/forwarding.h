// An allocator that makes all calls of another one. Classes that change some calls derive from it.

#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "torch_api.h"

namespace vramp {

class Forwarding : public CUDAAllocator {
 public:
  explicit Forwarding(CUDAAllocator* to) : native_(to) {}

  // --- memory ---

  DataPtr allocate(size_t size) override {
    return native_->allocate(size);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return native_->raw_deleter();
  }

  void* raw_alloc(size_t size) override {
    return native_->raw_alloc(size);
  }

  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    return native_->raw_alloc_with_stream(size, stream);
  }

  void raw_delete(void* address) override {
    native_->raw_delete(address);
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    native_->copy_data(to, from, count);
  }

  void recordStream(const DataPtr& pointer, c10::cuda::CUDAStream stream) override {
    native_->recordStream(pointer, stream);
  }

  void* getBaseAllocation(void* address, size_t* size) override {
    return native_->getBaseAllocation(address, size);
  }

  void emptyCache(PoolId pool) override {
    native_->emptyCache(pool);
  }

  void cacheInfo(DeviceIndex device, size_t* largest) override {
    native_->cacheInfo(device, largest);
  }

  // --- devices ---

  void init(int count) override {
    native_->init(count);
  }

  bool initialized() override {
    return native_->initialized();
  }

  double getMemoryFraction(DeviceIndex device) override {
    return native_->getMemoryFraction(device);
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    native_->setMemoryFraction(fraction, device);
  }

  void enable(bool value) override {
    native_->enable(value);
  }

  bool isEnabled() const override {
    return native_->isEnabled();
  }

  // PyTorch's programs compare the name with those of its own two allocators.
  std::string name() override {
    return native_->name();
  }

  // --- graphs and memory pools ---

  void createOrIncrefPool(DeviceIndex device, PoolId pool, PoolAllocator allocator) override {
    native_->createOrIncrefPool(device, pool, std::move(allocator));
  }

  void beginAllocateToPool(DeviceIndex device, PoolId pool,
                           std::function<bool(cudaStream_t)> filter) override {
    native_->beginAllocateToPool(device, pool, std::move(filter));
  }

  void endAllocateToPool(DeviceIndex device, PoolId pool) override {
    native_->endAllocateToPool(device, pool);
  }

  void releasePool(DeviceIndex device, PoolId pool) override {
    native_->releasePool(device, pool);
  }

  int getPoolUseCount(DeviceIndex device, PoolId pool) override {
    return native_->getPoolUseCount(device, pool);
  }

#if VRAMP_TORCH >= 211
  void setUseOnOOM(DeviceIndex device, PoolId pool, bool use_on_oom) override {
    native_->setUseOnOOM(device, pool, use_on_oom);
  }
#else
  void setUseOnOOM(DeviceIndex device, PoolId pool) override {
    native_->setUseOnOOM(device, pool);
  }
#endif

#if VRAMP_TORCH >= 210
  void setNoSplit(DeviceIndex device, PoolId pool) override {
    native_->setNoSplit(device, pool);
  }
#endif

#if VRAMP_TORCH >= 213
  void markCaptureBegin(DeviceIndex device) override {
    native_->markCaptureBegin(device);
  }

  void markCaptureEnd(DeviceIndex device) override {
    native_->markCaptureEnd(device);
  }
#endif

  bool checkPoolLiveAllocations(DeviceIndex device, PoolId pool,
                                const std::unordered_set<void*>& expected) override {
    return native_->checkPoolLiveAllocations(device, pool, expected);
  }

  std::shared_ptr<torch_api::AllocatorState> getCheckpointState(DeviceIndex device,
                                                                PoolId pool) override {
    return native_->getCheckpointState(device, pool);
  }

  torch_api::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device, std::shared_ptr<torch_api::AllocatorState> state) override {
    return native_->setCheckpointPoolState(device, std::move(state));
  }

  // --- statistics ---

  DeviceStats getDeviceStats(DeviceIndex device) override {
    return native_->getDeviceStats(device);
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    native_->resetAccumulatedStats(device);
  }

  void resetPeakStats(DeviceIndex device) override {
    native_->resetPeakStats(device);
  }

#if VRAMP_TORCH >= 210
  std::vector<torch_api::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return native_->getExpandableSegmentSizes(device);
  }
#endif

  // --- history and snapshots ---

  bool isHistoryEnabled() override {
    return native_->isHistoryEnabled();
  }

#if VRAMP_TORCH >= 211
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override {
    native_->recordHistory(enabled, recorder, max_entries, when, clear, skipped);
  }
#else
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when,
                     bool clear) override {
    native_->recordHistory(enabled, recorder, max_entries, when, clear);
  }
#endif

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    native_->recordAnnotation(values);
  }

  void pushCompileContext(std::string& context) override {
    native_->pushCompileContext(context);
  }

  void popCompileContext() override {
    native_->popCompileContext();
  }

#if VRAMP_TORCH >= 210
  void setUserMetadata(const std::string& metadata) override {
    native_->setUserMetadata(metadata);
  }

  std::string getUserMetadata() override {
    return native_->getUserMetadata();
  }
#endif

#if VRAMP_TORCH >= 214
  bool supportsUserMetadata() override {
    return native_->supportsUserMetadata();
  }

  void annotateMemory(const void* address, const std::string& metadata) override {
    native_->annotateMemory(address, metadata);
  }
#endif

#if VRAMP_TORCH >= 212
  std::shared_ptr<GatheredContext> getContextForPointer(const void* address) override {
    return native_->getContextForPointer(address);
  }

  void attachOomRejectionObserver(torch_api::OomRejectionObserver observer) override {
    native_->attachOomRejectionObserver(std::move(observer));
  }
#endif

  void attachOutOfMemoryObserver(torch_api::OutOfMemoryObserver observer) override {
    native_->attachOutOfMemoryObserver(std::move(observer));
  }

  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(std::move(tracker));
  }

#if VRAMP_TORCH >= 211
  SnapshotInfo snapshot(PoolId pool, bool include_traces) override {
    return native_->snapshot(pool, include_traces);
  }
#else
  SnapshotInfo snapshot(PoolId pool) override {
    return native_->snapshot(pool);
  }
#endif

  // --- several devices and processes ---

  torch_api::ShareableHandle shareIpcHandle(void* address) override {
    return native_->shareIpcHandle(address);
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native_->getIpcDevPtr(std::move(handle));
  }

  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override {
    native_->enablePeerAccess(device, peer);
  }

  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool p2p_enabled) override {
    return native_->memcpyAsync(to, to_device, from, from_device, count, stream, p2p_enabled);
  }

 protected:
  CUDAAllocator* const native_;
};

} // namespace vramp
