// vramp as PyTorch's CUDA allocator.
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
// is run while it is held. Trackers are called under it, as PyTorch calls them under its own lock.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <c10/util/env.h>
#include <cuda_runtime_api.h>

#include "history.h"
#include "library.h"
#include "statistics.h"
#include "torch_api.h"

namespace vramp {
namespace {

constexpr size_t kDevices = 64;
// Requests between two looks at what waits in PyTorch's own allocator.
constexpr uint32_t kRequestsBetween = 16;
constexpr size_t kTooLarge = 1152921504606846976ULL;

// True on a thread that asks whether a pool has free memory: no segment is added then.
thread_local bool no_new_segments = false;
// Why the thread's last segment could not be allocated.
thread_local std::string segment_failure;
// The stack of the thread's request or release, for the growth that it causes. Taken before: PyTorch's
// allocator may hold its lock when memory grows, and the recorder takes Python's.
thread_local std::shared_ptr<GatheredContext> growth_stack;
// torch.compile's contexts of the thread.
thread_local std::vector<std::string> compile_contexts;

class Allocator;
Allocator* installed = nullptr;

void delete_block(void* address);

// A begin of allocations to a pool without its end.
struct OpenPool {
  PoolId id;
  std::function<bool(cudaStream_t)> filter;
};

// A stream, and whether another library made it. PyTorch's own streams last as long as the process; others
// may be destroyed once the tensors on them are freed. PyTorch's ids of streams have a lowest bit of 1,
// that of the default stream is 0, and that of an external stream is its address.
struct Queue {
  explicit Queue(c10::cuda::CUDAStream of)
      : stream(of.stream()), is_external(of.id() != 0 && (of.id() & 1) == 0) {}

  Queue(cudaStream_t of, bool external) : stream(of), is_external(external) {}

  cudaStream_t stream;
  bool is_external;
};

// What is kept for one device.
struct Device {
  // Recursive, as PyTorch's own: a tracker may allocate.
  std::recursive_mutex mutex;
  Statistics statistics;
  History history;
  // What PyTorch's allocator has of vramp.
  SegmentTotals segments;
  // What it has besides, in pools with an allocator of their own, in bytes.
  int64_t foreign = 0;

  std::mutex pools_mutex;
  std::vector<OpenPool> open_pools;
  // Pools that exist in PyTorch's allocator.
  std::set<PoolId> known_pools;
  std::set<PoolId> pools_used_on_oom;
  std::atomic<int> open_count{0};
  // True while PyTorch's allocator has freed blocks that wait for other streams.
  std::atomic<bool> native_waits{false};
  // Number of requests since it was last made to look at them.
  std::atomic<uint32_t> requests_since{0};
  // True once PyTorch's allocator has served anything on this device.
  std::atomic<bool> has_pools{false};
  // Number of the observer of growth, while history is recorded.
  uint64_t observer = 0;
  DeviceIndex index = 0;
};

class Allocator : public CUDAAllocator {
 public:
  Allocator(CUDAAllocator* native, const char* library) : native_(native), vramp_(library) {
    for (size_t index = 0; index < kDevices; ++index) {
      devices_[index].index = static_cast<DeviceIndex>(index);
      fractions_[index].store(1.0);
    }
    // PyTorch's allocator reads the same variable.
    caching_allowed_ = !c10::utils::has_env("PYTORCH_NO_CUDA_MEMORY_CACHING") ||
        c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") != true;
    enabled_.store(caching_allowed_);
  }

  void use_segments(PoolAllocator segments) {
    segments_ = std::move(segments);
  }

  const Library& library() const {
    return vramp_;
  }

  // --- memory ---

  DataPtr allocate(size_t size) override {
    DeviceIndex device = current_device();
    c10::Device where(c10::DeviceType::CUDA, device);
    if (!enabled_.load(std::memory_order_relaxed)) {
      return native_->allocate(size);
    }
    if (size == 0) {
      return {nullptr, nullptr, &delete_block, where};
    }
    void* address = malloc(device, size, Queue(c10::cuda::getCurrentCUDAStream(device)));
    return {address, address, &delete_block, where};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return enabled_.load(std::memory_order_relaxed) ? &delete_block : native_->raw_deleter();
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
    if (!enabled_.load(std::memory_order_relaxed)) {
      vramp_torch_block_t found{};
      if (vramp_.block_find(address, &found) != VRAMP_OK) {
        native_->raw_delete(address);
        return;
      }
    }
    free(address);
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    native_->copy_data(to, from, count);
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
    if (!is_native) {
      vramp_status_t status = vramp_.block_record(address, stream.stream());
      if (status == VRAMP_OK) {
        if (Queue(stream).is_external) {
          std::lock_guard<std::mutex> lock(external_mutex_);
          external_uses_[address].insert(stream.stream());
          has_external_uses_.store(true, std::memory_order_release);
        }
        return;
      }
      if (status == VRAMP_ERROR_FORKED) {
        // The child of a fork queues no work on the parent's streams.
        return;
      }
      if (status != VRAMP_ERROR_UNKNOWN_POINTER) {
        fail("cannot record the use of a tensor");
      }
    }
    DataPtr of_pool(address, address, native_->raw_deleter(), pointer.device());
    auto keep = c10::make_scope_exit([&] { of_pool.release_context(); });
    native_->recordStream(of_pool, stream);
  }

  void* getBaseAllocation(void* address, size_t* size) override {
    vramp_torch_block_t found{};
    if (vramp_.containing(address, &found) != VRAMP_OK) {
      return native_->getBaseAllocation(address, size);
    }
    if (size != nullptr) {
      *size = found.size;
    }
    return reinterpret_cast<void*>(found.address);
  }

  void emptyCache(PoolId pool) override {
    // The destructor of a pool calls this. PyTorch's allocator ends the process if any pool is open then.
    if (pool == PoolId{0, 0}) {
      native_->emptyCache(pool);
    } else {
      std::lock_guard<std::mutex> lock(begin_mutex_);
      if (any_open()) {
        deleted_pools_.push_back(pool);
        return;
      }
      native_->emptyCache(pool);
    }
    for_each_device([&](Device& device) {
      if (device.has_pools.load(std::memory_order_relaxed)) {
        forget_deleted_pools(device);
        follow_native(device);
      }
    });
    if (pool == PoolId{0, 0}) {
      growth_stack = gather(*history_settings(), RecordContext::ALL);
      auto end = c10::make_scope_exit([] { growth_stack = nullptr; });
      if (vramp_.trim() != VRAMP_OK) {
        fail("cannot release cached memory");
      }
    }
  }

  // Estimates the largest request that would succeed: free memory can be remapped to one block.
  void cacheInfo(DeviceIndex device, size_t* largest) override {
    vramp_torch_memory_t memory = memory_of(device);
    Device& state = at(device);
    int64_t used;
    {
      std::lock_guard<std::recursive_mutex> lock(state.mutex);
      used = state.statistics.own_bytes() + state.segments.current;
    }
    int64_t idle = std::max<int64_t>(static_cast<int64_t>(memory.reserved) - used, 0);
    uint64_t room = memory.limit > memory.reserved ? memory.limit - memory.reserved : 0;
    size_t possible = static_cast<size_t>(idle) + std::min(room, memory.device_free);
    if (state.has_pools.load(std::memory_order_relaxed)) {
      native_->cacheInfo(device, largest);
    }
    *largest = std::max(*largest, possible);
  }

  // --- devices ---

  void init(int count) override {
    native_->init(count);
    count_ = std::min<int>(count, kDevices);
    for (int device = 0; device < count_; ++device) {
      // A fraction of PYTORCH_CUDA_ALLOC_CONF holds for all memory of the process.
      double fraction = native_->getMemoryFraction(static_cast<DeviceIndex>(device));
      if (fraction < 1.0) {
        set_vramp_fraction(static_cast<DeviceIndex>(device), fraction);
      }
    }
  }

  bool initialized() override {
    return native_->initialized();
  }

  double getMemoryFraction(DeviceIndex device) override {
    check_device(device);
    return fractions_[static_cast<size_t>(device)].load();
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    check_device(device);
    set_vramp_fraction(device, fraction);
    // For pools with an allocator of their own.
    native_->setMemoryFraction(fraction, device);
  }

  void enable(bool value) override {
    native_->enable(value);
    enabled_.store(value && caching_allowed_);
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
    check_device(device);
    Device& state = at(device);
    std::lock_guard<std::mutex> lock(state.pools_mutex);
    state.has_pools.store(true, std::memory_order_relaxed);
    if (!allocator && state.known_pools.count(pool) == 0) {
      allocator = segment_source();
    }
    native_->createOrIncrefPool(device, pool, std::move(allocator));
    state.known_pools.insert(pool);
  }

  void beginAllocateToPool(DeviceIndex device, PoolId pool,
                           std::function<bool(cudaStream_t)> filter) override {
    check_device(device);
    Device& state = at(device);
    std::lock_guard<std::mutex> begin_lock(begin_mutex_);
    std::lock_guard<std::mutex> lock(state.pools_mutex);
    state.has_pools.store(true, std::memory_order_relaxed);
    bool is_new = state.known_pools.insert(pool).second;
    if (is_new) {
      native_->createOrIncrefPool(device, pool, segment_source());
    }
    native_->beginAllocateToPool(device, pool, filter);
    if (is_new) {
      // The begin has added a use of its own.
      native_->releasePool(device, pool);
    }
    state.open_pools.push_back({pool, std::move(filter)});
    state.open_count.fetch_add(1, std::memory_order_release);
  }

  void endAllocateToPool(DeviceIndex device, PoolId pool) override {
    check_device(device);
    Device& state = at(device);
    {
      std::lock_guard<std::mutex> lock(state.pools_mutex);
      native_->endAllocateToPool(device, pool);
      auto& open = state.open_pools;
      auto found =
          std::find_if(open.begin(), open.end(), [&](auto& one) { return one.id == pool; });
      if (found != open.end()) {
        open.erase(found);
        state.open_count.fetch_sub(1, std::memory_order_release);
      }
    }
    if (!any_open()) {
      std::vector<PoolId> deleted;
      {
        std::lock_guard<std::mutex> lock(begin_mutex_);
        deleted.swap(deleted_pools_);
      }
      for (const PoolId& one : deleted) {
        emptyCache(one);
      }
    }
  }

  void releasePool(DeviceIndex device, PoolId pool) override {
    check_device(device);
    Device& state = at(device);
    std::lock_guard<std::mutex> lock(state.pools_mutex);
    native_->releasePool(device, pool);
    if (native_->getPoolUseCount(device, pool) == 0) {
      state.pools_used_on_oom.erase(pool);
    }
  }

  int getPoolUseCount(DeviceIndex device, PoolId pool) override {
    return native_->getPoolUseCount(device, pool);
  }

#if VRAMP_TORCH >= 211
  void setUseOnOOM(DeviceIndex device, PoolId pool, bool use_on_oom) override {
    native_->setUseOnOOM(device, pool, use_on_oom);
    mark_used_on_oom(device, pool, use_on_oom);
  }
#else
  void setUseOnOOM(DeviceIndex device, PoolId pool) override {
    native_->setUseOnOOM(device, pool);
    mark_used_on_oom(device, pool, true);
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
    auto delta = native_->setCheckpointPoolState(device, std::move(state));
    for (DataPtr& pointer : delta.dataptrs_allocd) {
      // The tensors of a graph are compared by their deleter.
      bool exchanged = pointer.compare_exchange_deleter(native_->raw_deleter(), &delete_block);
      TORCH_INTERNAL_ASSERT(exchanged, "a restored tensor has a foreign deleter");
    }
    follow_native(at(device));
    return delta;
  }

  // --- statistics ---

  DeviceStats getDeviceStats(DeviceIndex device) override {
    check_device(device);
    Device& state = at(device);
    vramp_torch_memory_t memory = memory_of(device);
    follow_native(state);
    std::lock_guard<std::recursive_mutex> lock(state.mutex);
    return state.statistics.read(memory, state.segments);
  }

  void resetAccumulatedStats(DeviceIndex device) override {
    check_device(device);
    native_->resetAccumulatedStats(device);
    vramp_torch_memory_t memory = memory_of(device);
    follow_native(at(device));
    std::lock_guard<std::recursive_mutex> lock(at(device).mutex);
    at(device).statistics.reset_accumulated(memory, at(device).segments);
  }

  void resetPeakStats(DeviceIndex device) override {
    check_device(device);
    native_->resetPeakStats(device);
    if (vramp_.reset_peaks(device) != VRAMP_OK) {
      fail("cannot reset the peaks");
    }
    follow_native(at(device));
    std::lock_guard<std::recursive_mutex> lock(at(device).mutex);
    at(device).statistics.reset_peaks();
  }

#if VRAMP_TORCH >= 210
  std::vector<torch_api::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return native_->getExpandableSegmentSizes(device);
  }
#endif

  // --- history and snapshots ---

  bool isHistoryEnabled() override {
    return history_on_.load(std::memory_order_relaxed);
  }

#if VRAMP_TORCH >= 211
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override {
    native_->recordHistory(enabled, recorder, max_entries, when, clear, skipped);
    std::unordered_set<int> actions;
    for (const std::string& action : skipped) {
      actions.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(action));
    }
    record_history({enabled, recorder, max_entries, when, std::move(actions)}, clear);
  }
#else
  void recordHistory(bool enabled, CreateContextFn recorder, size_t max_entries, RecordContext when,
                     bool clear) override {
    native_->recordHistory(enabled, recorder, max_entries, when, clear);
    record_history({enabled, recorder, max_entries, when, {}}, clear);
  }
#endif

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& values) override {
    native_->recordAnnotation(values);
  }

  void pushCompileContext(std::string& context) override {
    native_->pushCompileContext(context);
    if (isHistoryEnabled()) {
      compile_contexts.push_back(context);
    }
  }

  void popCompileContext() override {
    native_->popCompileContext();
    if (isHistoryEnabled() && !compile_contexts.empty()) {
      compile_contexts.pop_back();
    }
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
    return true;
  }

  void annotateMemory(const void* address, const std::string& metadata) override {
    vramp_torch_block_t found{};
    if (vramp_.block_find(const_cast<void*>(address), &found) != VRAMP_OK) {
      native_->annotateMemory(address, metadata);
      return;
    }
    TraceEntry entry(TraceEntry::ANNOTATE, static_cast<DeviceIndex>(found.device), found.address,
                     found.requested, reinterpret_cast<cudaStream_t>(found.stream), PoolId{0, 0},
                     c10::getApproximateTime(), nullptr, compile_context(), metadata);
    Device& device = at(static_cast<DeviceIndex>(found.device));
    auto settings = history_settings();
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    record(device, *settings, std::move(entry));
  }
#endif

#if VRAMP_TORCH >= 212
  std::shared_ptr<GatheredContext> getContextForPointer(const void* address) override {
    vramp_torch_block_t found{};
    if (vramp_.block_find(const_cast<void*>(address), &found) != VRAMP_OK) {
      return native_->getContextForPointer(address);
    }
    Device& device = at(static_cast<DeviceIndex>(found.device));
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    auto stack = device.history.stacks.find(found.address);
    return stack == device.history.stacks.end() ? nullptr : stack->second;
  }

  // vramp rejects no request ahead.
  void attachOomRejectionObserver(torch_api::OomRejectionObserver observer) override {
    native_->attachOomRejectionObserver(std::move(observer));
  }
#endif

  void attachOutOfMemoryObserver(torch_api::OutOfMemoryObserver observer) override {
    // PyTorch's allocator gets none: its failures are reported here, once.
    std::lock_guard<std::mutex> lock(observers_mutex_);
    observers_.push_back(std::move(observer));
  }

  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(tracker);
    std::lock_guard<std::mutex> lock(observers_mutex_);
    auto trackers = std::make_shared<std::vector<AllocatorTraceTracker>>();
    if (auto before = std::atomic_load(&trackers_)) {
      *trackers = *before;
    }
    trackers->push_back(std::move(tracker));
    std::atomic_store(&trackers_,
                      std::shared_ptr<const std::vector<AllocatorTraceTracker>>(trackers));
    is_tracked_.store(true, std::memory_order_release);
  }

#if VRAMP_TORCH >= 211
  SnapshotInfo snapshot(PoolId pool, bool include_traces) override {
    return complete(native_->snapshot(pool, include_traces), pool, include_traces);
  }
#else
  SnapshotInfo snapshot(PoolId pool) override {
    return complete(native_->snapshot(pool), pool, true);
  }
#endif

  // --- several devices and processes ---

  torch_api::ShareableHandle shareIpcHandle(void*) override {
    TORCH_CHECK(false,
                "vramp does not share CUDA memory with other processes yet: send a copy in host "
                "memory (tensor.cpu()), or run without vramp");
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native_->getIpcDevPtr(std::move(handle));
  }

  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override {
    native_->enablePeerAccess(device, peer);
  }

  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool p2p_enabled) override {
    (void)p2p_enabled;
    if (to_device == from_device) {
      return cudaMemcpyAsync(to, from, count, cudaMemcpyDeviceToDevice, stream);
    }
    // Mapped memory is accessible to its own device alone; only this call copies it.
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, count, stream);
  }

  // --- for the deleter and the source of segments ---

  void free(void* address) {
    if (address == nullptr) {
      return;
    }
    if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace()) {
      (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA,
                                                    reinterpret_cast<uintptr_t>(address));
    }
    if (is_observed()) {
      record_free(address);
    }
    std::set<cudaStream_t> external;
    if (C10_UNLIKELY(has_external_uses_.load(std::memory_order_acquire))) {
      external = take_external_uses(address);
    }
    vramp_torch_block_t block{};
    vramp_status_t status = vramp_.block_free(address, &block);
    for (cudaStream_t stream : external) {
      // PyTorch's contract ends here: the stream may be destroyed. vramp waits for an event instead.
      (void)vramp_.stream_forget(block.device, stream);
    }
    if (status == VRAMP_ERROR_UNKNOWN_POINTER) {
      native_->raw_delete(address);
      for_each_device([&](Device& device) {
        if (device.has_pools.load(std::memory_order_relaxed)) {
          follow_native(device);
        }
      });
      return;
    }
    if (status == VRAMP_ERROR_FORKED) {
      // The child of a fork has no device, and nothing to free.
      return;
    }
    if (status != VRAMP_OK) {
      fail("cannot free memory");
    }
    Device& device = at(static_cast<DeviceIndex>(block.device));
    int64_t allocated;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.remove_block(block);
      allocated = device.statistics.allocated_bytes();
    }
    report_to_profiler(device, address, -static_cast<int64_t>(block.size), allocated);
  }

  void* segment_alloc(size_t size) {
    DeviceIndex device = current_device();
    void* address = nullptr;
    if (no_new_segments) {
      segment_failure = "";
      return nullptr;
    }
    if (vramp_.segment_malloc(device, size, &address) != VRAMP_OK) {
      segment_failure = vramp_.last_error();
      return nullptr;
    }
    std::lock_guard<std::recursive_mutex> lock(at(device).mutex);
    at(device).segments.add(size);
    return address;
  }

  void segment_delete(void* address) {
    int device = 0;
    if (vramp_.segment_device(address, &device) != VRAMP_OK) {
      return;
    }
    // PyTorch frees segments with cudaFree, which waits for the device. While another thread captures a
    // graph the wait is refused, and vramp keeps the memory until the work queued now is over.
    c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(device));
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    bool relaxed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
    bool waited = cudaDeviceSynchronize() == cudaSuccess;
    if (!waited) {
      (void)cudaGetLastError();
    }
    if (relaxed) {
      (void)cudaThreadExchangeStreamCaptureMode(&mode);
    }
    uint64_t size = 0;
    vramp_status_t status = vramp_.segment_free(address, waited ? 0 : 1, &size);
    if (status == VRAMP_OK) {
      Device& state = at(static_cast<DeviceIndex>(device));
      std::lock_guard<std::recursive_mutex> lock(state.mutex);
      state.segments.remove(size);
    } else if (status != VRAMP_ERROR_FORKED) {
      fail("cannot free a segment");
    }
  }

 private:
  // --- allocation ---

  static DeviceIndex current_device() {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
  }

  Device& at(DeviceIndex device) {
    return devices_[static_cast<size_t>(device)];
  }

  template <typename F>
  void for_each_device(F f) {
    for (int device = 0; device < count_; ++device) {
      f(devices_[static_cast<size_t>(device)]);
    }
  }

  bool any_open() const {
    return std::any_of(devices_.begin(), devices_.end(), [](const Device& device) {
      return device.open_count.load(std::memory_order_acquire) > 0;
    });
  }

  void check_device(DeviceIndex device) const {
    TORCH_CHECK(0 <= device && device < count_, "Invalid device argument ",
                static_cast<int>(device), ": did you call init?");
  }

  // Always throws.
  void fail(const char* what) const {
    TORCH_CHECK(false, "vramp ", what, ": ", vramp_.last_error());
  }

  void* raw_alloc_on(DeviceIndex device, size_t size, Queue queue) {
    if (!enabled_.load(std::memory_order_relaxed)) {
      return native_->raw_alloc_with_stream(size, queue.stream);
    }
    return size == 0 ? nullptr : malloc(device, size, queue);
  }

  void* malloc(DeviceIndex device_index, size_t size, Queue queue) {
    check_device(device_index);
    TORCH_CHECK_WITH(OutOfMemoryError, size < kTooLarge,
                     "CUDA out of memory. Tried to allocate more than 1EB memory.");
    Device& device = at(device_index);
    void* address;
    if (C10_UNLIKELY(queue.is_external) ||
        (C10_UNLIKELY(device.open_count.load(std::memory_order_acquire) > 0) &&
         goes_to_pool(device, queue.stream))) {
      device.has_pools.store(true, std::memory_order_relaxed);
      address = malloc_native(device, size, queue.stream);
    } else {
      address = malloc_block(device, size, queue.stream);
    }
    if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace()) {
      (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA,
                                                  reinterpret_cast<uintptr_t>(address));
    }
    return address;
  }

  void* malloc_block(Device& device, size_t size, cudaStream_t stream) {
    if (C10_UNLIKELY(device.native_waits.load(std::memory_order_relaxed)) &&
        device.requests_since.fetch_add(1, std::memory_order_relaxed) % kRequestsBetween == 0) {
      process_native_events(device, stream);
    }
    bool observed = is_observed();
    std::shared_ptr<GatheredContext> stack;
    std::shared_ptr<const HistorySettings> settings;
    if (observed) {
      settings = history_settings();
      stack = gather(*settings, RecordContext::STATE);
      growth_stack = stack;
    }
    auto end = c10::make_scope_exit([&] {
      if (observed) {
        growth_stack = nullptr;
      }
    });
    vramp_torch_block_t block{};
    vramp_status_t status = vramp_.block_malloc(device.index, size, stream, &block);
    if (C10_UNLIKELY(status != VRAMP_OK)) {
      if (void* in_pool = retry(device, size, stream, status, &block)) {
        return in_pool;
      }
    }
    int64_t allocated;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.add_block(block);
      allocated = device.statistics.allocated_bytes();
      if (observed) {
        if (stack && device.history.stacks.insert_or_assign(block.address, stack).second) {
          stacks_.fetch_add(1, std::memory_order_relaxed);
        }
        record(device, *settings,
               entry(TraceEntry::ALLOC, device.index, block.address, size, stream, stack));
      }
    }
    void* address = reinterpret_cast<void*>(block.address);
    report_to_profiler(device, address, static_cast<int64_t>(block.size), allocated);
    return address;
  }

  // Frees memory and tries again. Returns an address if a pool has served the request, and null if
  // `*block` has. Throws if nothing helps.
  void* retry(Device& device, size_t size, cudaStream_t stream, vramp_status_t status,
              vramp_torch_block_t* block) {
    if (status != VRAMP_ERROR_OUT_OF_MEMORY) {
      fail("cannot allocate");
    }
    std::string report = vramp_.last_error();
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.count_retry();
    }
    auto again = [&] {
      status = vramp_.block_malloc(device.index, size, stream, block);
      if (status == VRAMP_ERROR_OUT_OF_MEMORY) {
        report = vramp_.last_error();
      } else if (status != VRAMP_OK) {
        fail("cannot allocate");
      }
      return status == VRAMP_OK;
    };
    bool freed = false;
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
    if (freed && again()) {
      return nullptr;
    }
    if (void* address = malloc_in_any_pool(device, size, stream)) {
      return address;
    }
    if (device.has_pools.load(std::memory_order_relaxed)) {
      int64_t before = segment_bytes(device);
      native_->emptyCache({0, 0});
      forget_deleted_pools(device);
      follow_native(device);
      if (segment_bytes(device) < before && again()) {
        return nullptr;
      }
    }
    out_of_memory(device, size, stream, report);
    return nullptr;
  }

  // Always throws.
  void out_of_memory(Device& device, size_t size, cudaStream_t stream,
                                  const std::string& report) {
    vramp_torch_memory_t memory{};
    (void)vramp_.memory(device.index, &memory);
    auto settings = history_settings();
    std::shared_ptr<GatheredContext> stack = gather(*settings, RecordContext::STATE);
    int64_t allocated;
    int64_t reserved;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.count_oom();
      allocated = device.statistics.allocated_bytes();
      reserved = static_cast<int64_t>(memory.reserved) + device.statistics.native_reserved() -
          device.segments.current;
      record(device, *settings,
             entry(TraceEntry::OOM, device.index, memory.device_free, size, stream, stack));
    }
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(size), static_cast<size_t>(allocated),
                                     static_cast<size_t>(reserved), cuda(device));
    std::vector<torch_api::OutOfMemoryObserver> observers;
    {
      std::lock_guard<std::mutex> lock(observers_mutex_);
      observers = observers_;
    }
    for (const auto& observer : observers) {
      observer(device.index, size, std::min(memory.limit, memory.device_total),
               memory.device_free);
    }
    std::string allowed = memory.limit < memory.device_total
        ? format_size(memory.limit) + " allowed; " : "";
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(size),
        ". GPU ", static_cast<int>(device.index), " has a total capacity of ",
        format_size(memory.device_total), " of which ", format_size(memory.device_free),
        " is free. ", allowed, "Of the allocated memory ", format_size(allocated),
        " is allocated by PyTorch, and ",
        format_size(static_cast<uint64_t>(std::max<int64_t>(reserved - allocated, 0))),
        " is reserved by PyTorch but unallocated.\nvramp: ", report);
  }

  // Takes the streams of other libraries that use a block.
  std::set<cudaStream_t> take_external_uses(void* address) {
    std::lock_guard<std::mutex> lock(external_mutex_);
    auto found = external_uses_.find(address);
    if (found == external_uses_.end()) {
      return {};
    }
    std::set<cudaStream_t> streams = std::move(found->second);
    external_uses_.erase(found);
    has_external_uses_.store(!external_uses_.empty(), std::memory_order_release);
    return streams;
  }

  // --- pools ---

  bool goes_to_pool(Device& device, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    return std::any_of(device.open_pools.begin(), device.open_pools.end(),
                       [&](const OpenPool& open) { return open.filter(stream); });
  }

  // Allocates from PyTorch's own allocator.
  void* malloc_native(Device& device, size_t size, cudaStream_t stream) {
    segment_failure.clear();
    void* address = nullptr;
    c10::cuda::CUDAGuard guard(device.index);
    try {
      address = native_->raw_alloc_with_stream(size, stream);
    } catch (const c10::OutOfMemoryError& error) {
      follow_native(device);
      if (no_new_segments) {
        throw;
      }
      if (segment_failure.empty() && vramp_.trim() == VRAMP_OK) {
        // PyTorch's allocator asked the device, and not vramp. Now vramp's idle memory is the device's.
        return malloc_after_trim(device, size, stream);
      }
      std::string report = segment_failure.empty() ? error.what_without_backtrace() : segment_failure;
      out_of_memory(device, size, stream, report);
    }
    follow_native(device);
    return address;
  }

  void* malloc_after_trim(Device& device, size_t size, cudaStream_t stream) {
    void* address = nullptr;
    try {
      address = native_->raw_alloc_with_stream(size, stream);
    } catch (const c10::OutOfMemoryError& error) {
      follow_native(device);
      out_of_memory(device, size, stream, error.what_without_backtrace());
    }
    follow_native(device);
    return address;
  }

  // Looks for free memory in the pools that may serve any request when memory is short. Adds none.
  void* malloc_in_any_pool(Device& device, size_t size, cudaStream_t stream) {
    std::vector<PoolId> pools;
    {
      std::lock_guard<std::mutex> lock(device.pools_mutex);
      pools.assign(device.pools_used_on_oom.begin(), device.pools_used_on_oom.end());
    }
    for (const PoolId& pool : pools) {
      auto thread = std::this_thread::get_id();
      beginAllocateToPool(device.index, pool,
                          [thread](cudaStream_t) { return std::this_thread::get_id() == thread; });
      no_new_segments = true;
      auto end = c10::make_scope_exit([&] {
        no_new_segments = false;
        endAllocateToPool(device.index, pool);
        releasePool(device.index, pool);
      });
      try {
        return malloc_native(device, size, stream);
      } catch (const c10::OutOfMemoryError&) {
        continue;
      }
    }
    return nullptr;
  }

  void mark_used_on_oom(DeviceIndex device, PoolId pool, bool used) {
    check_device(device);
    std::lock_guard<std::mutex> lock(at(device).pools_mutex);
    if (used) {
      at(device).pools_used_on_oom.insert(pool);
    } else {
      at(device).pools_used_on_oom.erase(pool);
    }
  }

  // Drops the ids of pools that PyTorch's allocator has deleted. They are not used again.
  void forget_deleted_pools(Device& device) {
    std::lock_guard<std::mutex> lock(device.pools_mutex);
    for (auto pool = device.known_pools.begin(); pool != device.known_pools.end();) {
      bool exists = true;
      try {
        (void)native_->getPoolUseCount(device.index, *pool);
      } catch (const c10::Error&) {
        exists = false;
      }
      pool = exists ? std::next(pool) : device.known_pools.erase(pool);
    }
  }

  static int64_t segment_bytes(Device& device) {
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    return device.segments.current;
  }

  // Makes PyTorch's allocator reuse freed blocks of pools whose work on other streams is over. It looks at
  // them in each request outside of pools, and vramp serves those. Takes 2 MiB of the device, until the
  // cache is emptied.
  void process_native_events(Device& device, cudaStream_t stream) {
    if (device.open_count.load(std::memory_order_acquire) > 0) {
      return;
    }
    try {
      c10::cuda::CUDAGuard guard(device.index);
      native_->raw_delete(native_->raw_alloc_with_stream(1, stream));
    } catch (const c10::OutOfMemoryError&) {
      // The events are processed before memory is looked for.
    }
    follow_native(device);
  }

  // Takes over the statistics of PyTorch's own allocator.
  void follow_native(Device& device) {
    DeviceStats native = native_->getDeviceStats(device.index);
    int64_t foreign;
    bool is_changed;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      device.statistics.update_native(native);
      foreign = device.statistics.native_reserved() - device.segments.current;
      is_changed = foreign != std::exchange(device.foreign, foreign);
    }
    constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
    device.native_waits.store(native.active[kAll].current > native.allocation[kAll].current,
                              std::memory_order_relaxed);
    if (is_changed && fractions_[static_cast<size_t>(device.index)].load() < 1.0) {
      limit_vramp(device.index, fractions_[static_cast<size_t>(device.index)].load(), foreign);
    }
  }

  PoolAllocator segment_source();

  // --- statistics ---

  vramp_torch_memory_t memory_of(DeviceIndex device) const {
    vramp_torch_memory_t memory{};
    if (vramp_.memory(device, &memory) != VRAMP_OK) {
      fail("cannot read the statistics");
    }
    return memory;
  }

  void set_vramp_fraction(DeviceIndex device, double fraction) {
    int64_t foreign;
    {
      std::lock_guard<std::recursive_mutex> lock(at(device).mutex);
      foreign = at(device).foreign;
    }
    limit_vramp(device, fraction, foreign);
    fractions_[static_cast<size_t>(device)].store(fraction);
  }

  // Limits vramp to a fraction of the device less what pools with an allocator of their own have.
  void limit_vramp(DeviceIndex device, double fraction, int64_t foreign) {
    if (foreign != 0) {
      double total = static_cast<double>(memory_of(device).device_total);
      fraction = std::clamp(fraction - static_cast<double>(foreign) / total, 0.0, 1.0);
    }
    if (vramp_.set_fraction(device, fraction) != VRAMP_OK) {
      fail("cannot set the memory fraction");
    }
  }

  static c10::Device cuda(const Device& device) {
    return c10::Device(c10::DeviceType::CUDA, device.index);
  }

  void report_to_profiler(const Device& device, void* address, int64_t size, int64_t allocated) {
    if (C10_LIKELY(!c10::memoryProfilingEnabled())) {
      return;
    }
    uint64_t reserved = 0;
    (void)vramp_.reserved(device.index, &reserved);
    c10::reportMemoryUsageToProfiler(address, size, static_cast<size_t>(allocated), reserved,
                                     cuda(device));
  }

  // --- history ---

  bool is_observed() const {
    return history_on_.load(std::memory_order_relaxed) ||
        is_tracked_.load(std::memory_order_relaxed) || stacks_.load(std::memory_order_relaxed) > 0;
  }

  std::shared_ptr<const HistorySettings> history_settings() const {
    return std::atomic_load(&history_);
  }

  // Takes the stack of the thread. No lock is held: the recorder may take Python's.
  static std::shared_ptr<GatheredContext> gather(const HistorySettings& settings,
                                                 RecordContext level) {
    bool wanted = settings.enabled && settings.when >= level && settings.recorder != nullptr;
    return wanted ? settings.recorder() : nullptr;
  }

  static std::string compile_context() {
    return compile_contexts.empty() ? std::string() : compile_contexts.back();
  }

  TraceEntry entry(TraceEntry::Action action, DeviceIndex device, size_t address, size_t size,
                   cudaStream_t stream, std::shared_ptr<GatheredContext> stack) {
    return TraceEntry(action, device, address, size, stream, PoolId{0, 0},
                      c10::getApproximateTime(), std::move(stack), compile_context()
#if VRAMP_TORCH >= 210
                      , native_->getUserMetadata()
#endif
    );
  }

  // The device's lock is held. Events have stacks if PyTorch asked for those of all allocations.
  void record(Device& device, const HistorySettings& settings, TraceEntry entry) {
    if (settings.when < RecordContext::ALLOC) {
      entry.context_ = nullptr;
    }
    if (auto trackers = std::atomic_load(&trackers_)) {
      for (const auto& tracker : *trackers) {
        tracker(entry);
      }
    }
    if (settings.enabled && settings.skipped.count(entry.action_) == 0) {
      device.history.add(std::move(entry), settings.max_entries);
    }
  }

  // Records a free before it is made: any thread may have the address afterwards.
  void record_free(void* address) {
    vramp_torch_block_t block{};
    if (vramp_.block_find(address, &block) != VRAMP_OK) {
      return;
    }
    auto settings = history_settings();
    std::shared_ptr<GatheredContext> stack = gather(*settings, RecordContext::ALL);
    Device& device = at(static_cast<DeviceIndex>(block.device));
    auto stream = reinterpret_cast<cudaStream_t>(block.stream);
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    auto found = device.history.stacks.find(block.address);
    if (found != device.history.stacks.end()) {
      stack = stack ? stack : found->second;
      device.history.stacks.erase(found);
      stacks_.fetch_sub(1, std::memory_order_relaxed);
    }
    for (auto action : {TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED}) {
      record(device, *settings,
             entry(action, device.index, block.address, block.requested, stream, stack));
    }
  }

  void record_history(HistorySettings settings, bool clear) {
    bool enabled = settings.enabled;
    size_t max_entries = settings.max_entries;
    std::atomic_store(&history_, std::shared_ptr<const HistorySettings>(
                                     std::make_shared<HistorySettings>(std::move(settings))));
    history_on_.store(enabled);
    for_each_device([&](Device& device) {
      {
        std::lock_guard<std::recursive_mutex> lock(device.mutex);
        if (!enabled || clear) {
          device.history.clear();
        } else {
          device.history.shrink(max_entries);
        }
      }
      observe_growth(device, enabled);
    });
  }

  // Records when vramp's memory grows and shrinks.
  void observe_growth(Device& device, bool observe) {
    vramp_allocator_t handle{};
    if (observe == (device.observer != 0) || vramp_.allocator(device.index, &handle) != VRAMP_OK) {
      return;
    }
    if (!observe) {
      (void)vramp_.unobserve(handle, device.observer);
      device.observer = 0;
      return;
    }
    auto observer = [](const vramp_event_t* event, void* user) {
      auto* device = static_cast<Device*>(user);
      bool grown = event->kind == VRAMP_EVENT_GROWN;
      if (grown || event->kind == VRAMP_EVENT_SHRUNK) {
        installed->record_growth(*device, grown, event->size);
      }
    };
    (void)vramp_.observe(handle, observer, &device, &device.observer);
  }

  void record_growth(Device& device, bool grown, size_t size) {
    auto settings = history_settings();
    auto action = grown ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_UNMAP;
    // One allocation may create memory at several addresses: the event has the amount.
    TraceEntry event = entry(action, device.index, 0, size, nullptr, growth_stack);
    std::lock_guard<std::recursive_mutex> lock(device.mutex);
    record(device, *settings, std::move(event));
  }

  // --- snapshots ---

  // Adds vramp's memory and events to a snapshot of PyTorch's own allocator.
  SnapshotInfo complete(SnapshotInfo snapshot, PoolId pool, bool include_traces) {
    if (pool != PoolId{0, 0}) {
      return snapshot;
    }
    auto to_ns = clock_.makeConverter();
    for_each_device([&](Device& device) {
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

  // Merges events by time, and keeps as many of the last as were asked for.
  void merge(std::vector<TraceEntry>& into, std::vector<TraceEntry> events) {
    if (events.empty()) {
      return;
    }
    std::vector<TraceEntry> all;
    all.reserve(into.size() + events.size());
    std::merge(std::make_move_iterator(into.begin()), std::make_move_iterator(into.end()),
               std::make_move_iterator(events.begin()), std::make_move_iterator(events.end()),
               std::back_inserter(all),
               [](const TraceEntry& a, const TraceEntry& b) { return a.time_.t_ < b.time_.t_; });
    size_t max = history_settings()->max_entries;
    if (max > 0 && all.size() > max) {
      all.erase(all.begin(), all.end() - static_cast<ptrdiff_t>(max));
    }
    into = std::move(all);
  }

  void add_segments(Device& device, SnapshotInfo& snapshot) {
    std::vector<vramp_torch_part_t> parts;
    auto visitor = [](const vramp_torch_part_t* part, void* user) {
      static_cast<std::vector<vramp_torch_part_t>*>(user)->push_back(*part);
    };
    if (vramp_.visit(device.index, visitor, &parts) != VRAMP_OK) {
      fail("cannot list the memory");
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

  CUDAAllocator* const native_;
  const Library vramp_;
  std::array<Device, kDevices> devices_;
  std::array<std::atomic<double>, kDevices> fractions_;
  int count_ = 0;
  std::atomic<bool> enabled_{true};
  bool caching_allowed_ = true;
  PoolAllocator segments_{};

  std::mutex external_mutex_;
  // Streams of other libraries that tensors were recorded on, by block.
  std::unordered_map<void*, std::set<cudaStream_t>> external_uses_;
  std::atomic<bool> has_external_uses_{false};

  // Held while a pool is opened, and while the memory of a deleted one is freed. Taken before the locks of
  // devices.
  std::mutex begin_mutex_;
  // Pools that were deleted while a pool was open, whose memory is freed once none is.
  std::vector<PoolId> deleted_pools_;

  std::mutex observers_mutex_;
  std::vector<torch_api::OutOfMemoryObserver> observers_;
  std::shared_ptr<const std::vector<AllocatorTraceTracker>> trackers_;
  std::shared_ptr<const HistorySettings> history_ = std::make_shared<HistorySettings>();
  std::atomic<bool> history_on_{false};
  // Number of stacks of live blocks. They stay when the history ends, as PyTorch's do.
  std::atomic<int64_t> stacks_{0};
  std::atomic<bool> is_tracked_{false};
  c10::ApproximateClockToUnixTimeConverter clock_;
};

// Gives PyTorch's own allocator its segments. Only the two raw calls are used.
class SegmentSource : public Allocator {
 public:
  using Allocator::Allocator;

  void* raw_alloc(size_t size) override {
    return installed->segment_alloc(size);
  }

  void raw_delete(void* address) override {
    installed->segment_delete(address);
  }
};

PoolAllocator Allocator::segment_source() {
  return segments_;
}

void delete_block(void* address) {
  installed->free(address);
}

} // namespace
} // namespace vramp

extern "C" {

// Returns 0 if this file works with PyTorch's libraries: exceptions pass both ways, and text is formatted. A
// compiler may link an unwinder or a C++ library of its own, and two of them in a process do not agree.
__attribute__((visibility("default"))) int vramp_torch_self_test() {
  using namespace vramp;
  int caught = 0;
  try {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "thrown here: ", format_size(3 << 19), ", ", 1);
  } catch (const c10::OutOfMemoryError& error) {
    caught += std::string(error.what_without_backtrace()) == "thrown here: 1.50 MiB, 1" ? 1 : 0;
  }
  try {
    // No device has this index.
    (void)torch_api::allocator.load()->getDeviceStats(127);
  } catch (const c10::Error&) {
    ++caught;
  }
  return caught == 2 ? 0 : 1;
}

// Makes vramp the CUDA allocator of this process, with the functions of the loaded library at this
// path. Returns null, or why it cannot. The text is valid until the thread's next call.
__attribute__((visibility("default"))) const char* vramp_torch_install(const char* library) {
  using namespace vramp;
  static std::mutex mutex;
  static thread_local std::string failure;
  std::lock_guard<std::mutex> lock(mutex);
  if (installed != nullptr) {
    return nullptr;
  }
  try {
    CUDAAllocator* native = torch_api::allocator.load();
    if (native->initialized()) {
      throw std::runtime_error(
          "PyTorch has initialized CUDA already: call vramp.torch.enable() before the first use of CUDA");
    }
    if (native->name() != "native") {
      throw std::runtime_error("PyTorch's allocator is " + native->name() +
                               ", and vramp needs its native one: remove backend from "
                               "PYTORCH_CUDA_ALLOC_CONF, or the other allocator");
    }
    // Never destroyed: tensors are freed by destructors of globals.
    auto* allocator = new Allocator(native, library);
    std::string version = allocator->library().version();
    if (version != VRAMP_VERSION_STRING) {
      throw std::runtime_error("this file was compiled for vramp " VRAMP_VERSION_STRING
                               ", and the library is of version " + version);
    }
#if VRAMP_TORCH >= 211
    allocator->use_segments(std::make_shared<SegmentSource>(native, library));
#else
    allocator->use_segments(new SegmentSource(native, library));
#endif
    installed = allocator;
    torch_api::allocator.store(allocator);
    c10::SetAllocator(c10::DeviceType::CUDA, allocator);
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
  return nullptr;
}

} // extern "C"
