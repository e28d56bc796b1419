// vramp as PyTorch's CUDA allocator: the class that PyTorch calls.
//
// Tensors are blocks of vramp. While a graph is captured into a pool, or inside
// torch.cuda.use_mem_pool, allocations go to PyTorch's own caching allocator, which has all rules of
// private pools (checkpoints, deferred frees, sharing), and takes its segments from vramp. So do allocations
// on streams of other libraries, with memory of the device: vramp uses the streams of its blocks later, and
// those may be destroyed.
//
// An address belongs to vramp if vramp knows a block there, and to PyTorch's allocator otherwise. Both
// kinds of memory carry one deleter, which PyTorch compares.
//
// Locks: `Device::mutex` protects statistics and history. No memory is allocated or freed and no Python
// is run while it is held.
//
// The parts, each of which uses those before it: Shared (the devices), Recorder (history), OutOfMemory
// (failures), Native (memory of PyTorch's own allocator), Pools, Blocks, Snapshots, Imports.

#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <c10/util/env.h>
#include <cuda_runtime_api.h>

#include "blocks.h"
#include "forwarding.h"
#include "imports.h"
#include "native.h"
#include "out_of_memory.h"
#include "pools.h"
#include "recorder.h"
#include "segments.h"
#include "shared.h"
#include "snapshot.h"
#include "torch_api.h"

namespace vramp {

constexpr size_t kTooLarge = 1152921504606846976ULL;

class Allocator;
// The allocator of this process, once it is installed.
inline Allocator* installed = nullptr;
// Returns 1 if the process takes part in a group of several. Null until it is set.
inline int (*is_distributed)() = nullptr;

inline void delete_block(void* address);

class Allocator : public Forwarding {
 public:
  Allocator(CUDAAllocator* native, const char* library)
      : Forwarding(native), shared_(native, library) {
    // PyTorch's allocator reads the same variable.
    caching_allowed_ = !c10::utils::has_env("PYTORCH_NO_CUDA_MEMORY_CACHING") ||
        c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") != true;
    enabled_.store(caching_allowed_);
  }

  const Library& library() const {
    return shared_.vramp;
  }

  // --- memory ---

  DataPtr allocate(size_t size) override {
    DeviceIndex device = current_device();
    c10::Device where(c10::DeviceType::CUDA, device);
    if (!is_caching()) {
      return native_->allocate(size);
    }
    if (size == 0) {
      return {nullptr, nullptr, &delete_block, where};
    }
    void* address = malloc(device, size, Queue(c10::cuda::getCurrentCUDAStream(device)));
    return {address, address, &delete_block, where};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return is_caching() ? &delete_block : native_->raw_deleter();
  }

  void* raw_alloc(size_t size) override {
    DeviceIndex device = current_device();
    return raw_alloc_on(device, size, Queue(c10::cuda::getCurrentCUDAStream(device)));
  }

  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override {
    DeviceIndex device = current_device();
    Queue current(c10::cuda::getCurrentCUDAStream(device));
    bool is_lasting = stream == nullptr || (stream == current.stream && !current.is_external);
    return raw_alloc_on(device, size, Queue(stream, !is_lasting));
  }

  void raw_delete(void* address) override {
    vramp_torch_block_t found{};
    if (!is_caching() && shared_.vramp.block_find(address, &found) != VRAMP_OK) {
      native_->raw_delete(address);
      return;
    }
    free(address);
  }

  // Keeps the memory of a tensor from reuse until the work queued on `stream` so far is over.
  void recordStream(const DataPtr& pointer, c10::cuda::CUDAStream stream) override {
    void* address = pointer.get();
    if (address == nullptr) {
      return;
    }
    // Memory of other processes and of other libraries is not ours to keep.
    bool is_native = pointer.get_deleter() == native_->raw_deleter();
    if (pointer.get_deleter() != &delete_block && !is_native) {
      return;
    }
    if (!is_native && blocks_.record_use(address, pointer.device().index(), stream)) {
      return;
    }
    DataPtr of_pool(address, address, native_->raw_deleter(), pointer.device());
    auto keep = c10::make_scope_exit([&] { of_pool.release_context(); });
    native_->recordStream(of_pool, stream);
  }

  void* getBaseAllocation(void* address, size_t* size) override {
    vramp_torch_block_t found{};
    if (shared_.vramp.containing(address, &found) != VRAMP_OK) {
      return native_->getBaseAllocation(address, size);
    }
    if (size != nullptr) {
      *size = found.size;
    }
    return reinterpret_cast<void*>(found.address);
  }

  void emptyCache(PoolId pool) override {
    blocks_.free_postponed();
    imports_.close_postponed();
    if (pool != PoolId{0, 0}) {
      pools_.empty(pool);
      return;
    }
    pools_.empty_all();
    growth_stack = Recorder::gather(*recorder_.settings(), RecordContext::ALL);
    auto end = c10::make_scope_exit([] { growth_stack = nullptr; });
    if (shared_.vramp.trim() != VRAMP_OK) {
      shared_.fail("cannot release cached memory");
    }
  }

  // Estimates the largest request that would succeed: free memory can be remapped to one block.
  void cacheInfo(DeviceIndex index, size_t* largest) override {
    if (shared_.vramp.is_open(index) == 0) {
      native_->cacheInfo(index, largest);
      return;
    }
    vramp_torch_memory_t memory = shared_.memory_of(index);
    Device& device = shared_.devices.at(index);
    int64_t used;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      used = device.statistics.own_bytes() + device.segments.current;
    }
    int64_t idle = std::max<int64_t>(static_cast<int64_t>(memory.reserved) - used, 0);
    uint64_t room = memory.limit > memory.reserved ? memory.limit - memory.reserved : 0;
    size_t possible = static_cast<size_t>(idle) + std::min(room, memory.device_free);
    if (device.has_pools.load(std::memory_order_relaxed)) {
      native_->cacheInfo(index, largest);
    }
    *largest = std::max(*largest, possible);
  }

  // --- devices ---

  void init(int count) override {
    native_->init(count);
    shared_.devices.init(count);
    shared_.devices.each([&](Device& device) {
      // A fraction of PYTORCH_CUDA_ALLOC_CONF holds for all memory of the process.
      double fraction = native_->getMemoryFraction(device.index);
      if (fraction < 1.0) {
        shared_.set_fraction(device, fraction);
      }
    });
  }

  double getMemoryFraction(DeviceIndex device) override {
    return shared_.devices.checked(device).fraction.load();
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    shared_.set_fraction(shared_.devices.checked(device), fraction);
    // For pools with an allocator of their own.
    native_->setMemoryFraction(fraction, device);
  }

  void enable(bool value) override {
    native_->enable(value);
    enabled_.store(value && caching_allowed_);
  }

  // --- graphs and memory pools ---

  void createOrIncrefPool(DeviceIndex device, PoolId pool, PoolAllocator allocator) override {
    pools_.create(shared_.devices.checked(device), pool, std::move(allocator));
  }

  void beginAllocateToPool(DeviceIndex device, PoolId pool,
                           std::function<bool(cudaStream_t)> filter) override {
    note_plain_segments(shared_.devices.checked(device));
    pools_.begin(shared_.devices.checked(device), pool, std::move(filter), pins_for_graphs());
  }

  void endAllocateToPool(DeviceIndex device, PoolId pool) override {
    pools_.end(shared_.devices.checked(device), pool);
    blocks_.free_postponed();
    imports_.close_postponed();
  }

  void releasePool(DeviceIndex device, PoolId pool) override {
    pools_.release(shared_.devices.checked(device), pool);
  }

#if VRAMP_TORCH >= 211
  void setUseOnOOM(DeviceIndex device, PoolId pool, bool use_on_oom) override {
    native_->setUseOnOOM(device, pool, use_on_oom);
    pools_.mark_used_on_oom(shared_.devices.checked(device), pool, use_on_oom);
  }
#else
  void setUseOnOOM(DeviceIndex device, PoolId pool) override {
    native_->setUseOnOOM(device, pool);
    pools_.mark_used_on_oom(shared_.devices.checked(device), pool, true);
  }
#endif

  torch_api::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device, std::shared_ptr<torch_api::AllocatorState> state) override {
    auto delta = native_->setCheckpointPoolState(device, std::move(state));
    for (DataPtr& pointer : delta.dataptrs_allocd) {
      // The tensors of a graph are compared by their deleter.
      bool exchanged = pointer.compare_exchange_deleter(native_->raw_deleter(), &delete_block);
      TORCH_INTERNAL_ASSERT(exchanged, "a restored tensor has a foreign deleter");
    }
    pool_memory_.follow(shared_.devices.at(device));
    return delta;
  }

  // --- statistics ---

  DeviceStats getDeviceStats(DeviceIndex index) override {
    Device& device = shared_.devices.checked(index);
    vramp_torch_memory_t memory = shared_.memory_of(index);
    pool_memory_.follow(device);
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    return device.statistics.read(memory, device.segments);
  }

  void resetAccumulatedStats(DeviceIndex index) override {
    Device& device = shared_.devices.checked(index);
    native_->resetAccumulatedStats(index);
    vramp_torch_memory_t memory = shared_.memory_of(index);
    pool_memory_.follow(device);
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    device.statistics.reset_accumulated(memory, device.segments);
  }

  void resetPeakStats(DeviceIndex index) override {
    Device& device = shared_.devices.checked(index);
    native_->resetPeakStats(index);
    if (shared_.vramp.reset_peaks(index) != VRAMP_OK) {
      shared_.fail("cannot reset the peaks");
    }
    pool_memory_.follow(device);
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    device.statistics.reset_peaks();
  }

  // --- history and snapshots ---

  bool isHistoryEnabled() override {
    return recorder_.is_on();
  }

#if VRAMP_TORCH >= 211
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override {
    native_->recordHistory(enabled, recorder, max_entries, when, clear, skipped);
    std::unordered_set<int> actions;
    for (const std::string& action : skipped) {
      actions.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(action));
    }
    recorder_.configure({enabled, recorder, max_entries, when, std::move(actions)}, clear);
  }
#else
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when,
                     bool clear) override {
    native_->recordHistory(enabled, recorder, max_entries, when, clear);
    recorder_.configure({enabled, recorder, max_entries, when, {}}, clear);
  }
#endif

  void pushCompileContext(std::string& context) override {
    native_->pushCompileContext(context);
    if (recorder_.is_on()) {
      compile_contexts.push_back(context);
    }
  }

  void popCompileContext() override {
    native_->popCompileContext();
    if (recorder_.is_on() && !compile_contexts.empty()) {
      compile_contexts.pop_back();
    }
  }

#if VRAMP_TORCH >= 214
  void annotateMemory(const void* address, const std::string& metadata) override {
    vramp_torch_block_t found{};
    if (shared_.vramp.block_find(const_cast<void*>(address), &found) != VRAMP_OK) {
      native_->annotateMemory(address, metadata);
    } else {
      recorder_.record_annotation(found, metadata);
    }
  }
#endif

#if VRAMP_TORCH >= 212
  std::shared_ptr<GatheredContext> getContextForPointer(const void* address) override {
    vramp_torch_block_t found{};
    if (shared_.vramp.block_find(const_cast<void*>(address), &found) != VRAMP_OK) {
      return native_->getContextForPointer(address);
    }
    return recorder_.stack_of(found);
  }
#endif

  void attachOutOfMemoryObserver(torch_api::OutOfMemoryObserver observer) override {
    out_of_memory_.add_observer(std::move(observer));
  }

  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(tracker);
    recorder_.add_tracker(std::move(tracker));
  }

#if VRAMP_TORCH >= 211
  SnapshotInfo snapshot(PoolId pool, bool include_traces) override {
    return snapshots_.complete(native_->snapshot(pool, include_traces), pool, include_traces);
  }
#else
  SnapshotInfo snapshot(PoolId pool) override {
    return snapshots_.complete(native_->snapshot(pool), pool, true);
  }
#endif

  // --- several devices and processes ---

  // Publishes memory for other processes until it is freed. PyTorch counts what it sends, and does not free it
  // before the receivers have.
  torch_api::ShareableHandle shareIpcHandle(void* address) override {
    shared_.has_sent.store(true, std::memory_order_relaxed);
    // Frees what was sent before and is not used any more: O(n) in the tensors that are still used elsewhere.
    (void)Blocks::run_callbacks();
    vramp_torch_ticket_t ticket{};
    vramp_status_t status = shared_.vramp.share(address, &ticket);
    if (status == VRAMP_ERROR_UNKNOWN_POINTER) {
      return native_->shareIpcHandle(address);
    }
    if (status != VRAMP_OK) {
      shared_.fail("cannot share CUDA memory with other processes");
    }
    std::string handle(kHandleMark, kHandleMarkSize);
    handle.append(reinterpret_cast<const char*>(ticket.bytes), ticket.length);
    return {static_cast<ptrdiff_t>(ticket.offset), std::move(handle)};
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    if (!Imports::is_handle(handle)) {
      return native_->getIpcDevPtr(std::move(handle));
    }
    return imports_.open(current_device(), handle);
  }

  // Grants a device access to the memory of another one. PyTorch asks once for each pair, with the first copy
  // between them, and remembers the answer before it is given.
  void enablePeerAccess(DeviceIndex device, DeviceIndex owner) override {
    if (shared_.vramp.enable_peer(device, owner) != VRAMP_OK) {
      std::string why = shared_.vramp.last_error();
      forget_peer_access(shared_.devices.count());
      TORCH_CHECK(false, "vramp cannot give device ", static_cast<int>(device), " access to memory of device ",
                  static_cast<int>(owner), ": ", why);
    }
    native_->enablePeerAccess(device, owner);
  }

  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool p2p_enabled) override {
    if (to_device == from_device || p2p_enabled) {
      return cudaMemcpyAsync(to, from, count, cudaMemcpyDeviceToDevice, stream);
    }
    // Mapped memory is accessible to its own device alone then; only this call copies it.
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, count, stream);
  }

  // The deleter of all tensors.
  void free(void* address) {
    if (address == nullptr) {
      return;
    }
    if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace()) {
      (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(address));
    }
    if (!blocks_.free(address)) {
      pool_memory_.free(address);
    }
  }

 private:
  // Returns true if captures keep memory in its place, for libraries that register what they use. Runs Python.
  bool pins_for_graphs() const {
    int mode = 0;
    if (shared_.vramp.graph_pins(&mode) != VRAMP_OK) {
      shared_.fail("cannot read VRAMP_CONF");
    }
    constexpr int kAuto = 2;
    return mode == kAuto ? is_distributed != nullptr && is_distributed() != 0 : mode != 0;
  }

  // Libraries pass addresses of graphs to cudaIpcGetMemHandle, which refuses mapped memory: vLLM's and SGLang's
  // all-reduce do. From the first pool that is opened where that may happen, segments are plain. Runs Python.
  void note_plain_segments(Device& device) const {
    if (device.has_plain_segments.load(std::memory_order_relaxed)) {
      return;
    }
    int mode = 0;
    if (shared_.vramp.ipc(&mode) != VRAMP_OK) {
      shared_.fail("cannot read VRAMP_CONF");
    }
    constexpr int kAuto = 2;
    bool is_plain = mode == kAuto ? is_distributed != nullptr && is_distributed() != 0 : mode != 0;
    device.has_plain_segments.store(is_plain, std::memory_order_relaxed);
  }

  // False if every request goes to the device, as PYTORCH_NO_CUDA_MEMORY_CACHING asks.
  bool is_caching() const {
    return enabled_.load(std::memory_order_relaxed);
  }

  void* raw_alloc_on(DeviceIndex device, size_t size, Queue queue) {
    if (!is_caching()) {
      return native_->raw_alloc_with_stream(size, queue.stream);
    }
    return size == 0 ? nullptr : malloc(device, size, queue);
  }

  void* malloc(DeviceIndex index, size_t size, Queue queue) {
    Device& device = shared_.devices.checked(index);
    TORCH_CHECK_WITH(OutOfMemoryError, size < kTooLarge,
                     "CUDA out of memory. Tried to allocate more than 1EB memory.");
    void* address;
    if (C10_UNLIKELY(queue.is_external) || pools_.is_open_for(device, queue.stream)) {
      device.has_pools.store(true, std::memory_order_relaxed);
      address = pool_memory_.malloc(device, size, queue.stream);
    } else {
      address = blocks_.malloc(device, size, queue.stream);
    }
    if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace()) {
      (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(address));
    }
    return address;
  }

  Shared shared_;
  Recorder recorder_{shared_};
  OutOfMemory out_of_memory_{shared_, recorder_};
  Native pool_memory_{shared_, out_of_memory_};
  Pools pools_{shared_, pool_memory_};
  Blocks blocks_{shared_, recorder_, out_of_memory_, pool_memory_, pools_};
  Snapshots snapshots_{shared_, recorder_};
  Imports imports_{shared_};
  std::atomic<bool> enabled_{true};
  bool caching_allowed_ = true;
};

inline void delete_block(void* address) {
  installed->free(address);
}

} // namespace vramp
