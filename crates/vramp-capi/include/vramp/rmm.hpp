// vramp as a memory resource of CCCL (the concept `cuda::mr::resource`) and of RMM, and so of libcudf, for C++17
// and later. See docs/cpp.md.
//
//     vramp::device_resource resource(0);
//     rmm::mr::set_current_device_resource(resource);
//     rmm::device_uvector<int> numbers(1 << 20, stream);
//
// It needs CCCL's headers. Where RMM's are found too, errors are RMM's exceptions: rmm::out_of_memory,
// rmm::cuda_error and rmm::logic_error. Otherwise, and with VRAMP_WITHOUT_RMM defined, they are
// vramp::out_of_memory, a std::bad_alloc, and vramp::error.

#ifndef VRAMP_RMM_HPP
#define VRAMP_RMM_HPP

#if !defined(__has_include) || __cplusplus < 201703L
#error "vramp/rmm.hpp needs C++17: compile with -std=c++17 or later"
#elif !__has_include(<cuda/memory_resource>)
#error "vramp/rmm.hpp needs CCCL: add the folder with cuda/memory_resource to the include path (-I); it is in the CUDA toolkit, in pip's nvidia-cuda-cccl, and in pip's librmm-cu12 and librmm-cu13 below include/rapids"
#elif !__has_include(<cuda_runtime_api.h>)
#error "vramp/rmm.hpp needs the headers of the CUDA runtime, as CCCL does: add the folder with cuda_runtime_api.h to the include path (-I)"
#endif

#ifndef LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE // CCCL before 2.8 asks for it
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE
#endif
#include <cuda/memory_resource>
#include <cuda/stream_ref>

#include "host.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <unordered_map>

#if __has_include(<rmm/error.hpp>) && !defined(VRAMP_WITHOUT_RMM)
#define VRAMP_RMM_ERRORS 1
#include <rmm/error.hpp>
#elif __has_include(<rmm/detail/error.hpp>) && !defined(VRAMP_WITHOUT_RMM)
#define VRAMP_RMM_ERRORS 1
#include <rmm/detail/error.hpp>
#else
#define VRAMP_RMM_ERRORS 0
#endif

#if VRAMP_RMM_ERRORS && __has_include(<rmm/process_is_exiting.hpp>)
#include <rmm/process_is_exiting.hpp>
#define VRAMP_RMM_EXITS 1
#else
#define VRAMP_RMM_EXITS 0
#endif

// RMM before 26.06 has a base class too.
#if VRAMP_RMM_ERRORS && __has_include(<rmm/mr/device_memory_resource.hpp>)
#define VRAMP_RMM_BASE 1
#include <rmm/mr/device_memory_resource.hpp>
#elif VRAMP_RMM_ERRORS && __has_include(<rmm/mr/device/device_memory_resource.hpp>)
#define VRAMP_RMM_BASE 1
#include <rmm/mr/device/device_memory_resource.hpp>
#else
#define VRAMP_RMM_BASE 0
#endif

// Files of one program may be compiled with different settings. What the settings change has a namespace for each.
#if VRAMP_RMM_ERRORS && defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
#define VRAMP_RESOURCES rmm_per_thread
#elif VRAMP_RMM_ERRORS
#define VRAMP_RESOURCES rmm_legacy
#elif defined(CUDA_API_PER_THREAD_DEFAULT_STREAM)
#define VRAMP_RESOURCES plain_per_thread
#else
#define VRAMP_RESOURCES plain_legacy
#endif

namespace vramp {
inline namespace VRAMP_RESOURCES {

class device_resource;
class pinned_resource;
class reservation;

/// How an allocator is opened for a device_resource.
struct resource_options {
    /// The device, as vramp_open names it: "auto" is what VRAMP_DEVICE names, and card 0 without it.
    std::string device = "auto";
    /// Options of the allocator, as of vramp_open: "limit=80%,prefill=1GiB".
    std::string allocator;
    /// How long a request that finds no memory waits for other threads to free some.
    std::chrono::nanoseconds patience{0};
    /// Pinned memory of the host below the card: reservations and deferrable buffers need it, 1 MiB at least.
    /// Zero opens no tiers.
    std::uint64_t host_bytes = 0;
};

namespace resource_detail {

[[noreturn]] inline void raise_out_of_memory(const std::string &message) {
#if VRAMP_RMM_ERRORS
    throw rmm::out_of_memory(message);
#else
    throw out_of_memory(message);
#endif
}

/// Throws for a failed call, with the message of the thread.
[[noreturn]] inline void raise(vramp_status_t status) {
    std::string message =
        std::string(vramp_status_name(static_cast<int>(status))) + ": " + vramp_last_error();
    switch (status) {
    case VRAMP_ERROR_OUT_OF_MEMORY:
    case VRAMP_ERROR_OVER_RESERVATION:
    case VRAMP_ERROR_TIMEOUT:
        raise_out_of_memory(message);
#if VRAMP_RMM_ERRORS
    case VRAMP_ERROR_DRIVER:
    case VRAMP_ERROR_DEVICE:
        throw rmm::cuda_error(message);
    default:
        throw rmm::logic_error(message);
#else
    default:
        throw error(status);
#endif
    }
}

inline void check_resource(vramp_status_t status) {
    if (status != VRAMP_OK) raise(status);
}

/// Returns true while static objects end: CUDA may be gone.
inline bool process_is_exiting() noexcept {
#if VRAMP_RMM_EXITS
    return rmm::process_is_exiting();
#else
    return false;
#endif
}

/// The device's stream, as vramp adopts it.
inline void *raw_stream(cudaStream_t stream) noexcept {
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    if (stream == nullptr) return cudaStreamPerThread;
#endif
    return stream == cudaStreamLegacy ? nullptr : stream;
}

/// True while a shortage handler runs on this thread: requests made in it do not wait.
inline bool &is_in_handler() noexcept {
    static thread_local bool inside = false;
    return inside;
}

/// The allocator that copies of a resource share. The last one closes it.
class pool {
public:
    explicit pool(const resource_options &options) : patience_(options.patience) {
        check_resource(vramp_check_version(VRAMP_VERSION));
        check_resource(
            vramp_open(options.device.c_str(), options.allocator.c_str(), &allocator_));
        if (options.host_bytes == 0) return;
        vramp_tiers_options_t tiers = vramp_tiers_options_t();
        tiers.struct_size = sizeof(tiers);
        tiers.host_bytes = options.host_bytes;
        vramp_status_t opened = vramp_tiers_open_with(allocator_, &tiers);
        if (opened == VRAMP_OK) return;
        // The message is of the failure; closing a fresh allocator succeeds and leaves it.
        vramp_close(allocator_);
        raise(opened);
    }

    // Waits for work on the allocator's streams.
    ~pool() {
        if (process_is_exiting()) return;
        report("an allocator cannot be closed, and keeps its memory", vramp_close(allocator_));
    }

    pool(const pool &) = delete;
    pool &operator=(const pool &) = delete;

    vramp_allocator_t allocator() const noexcept { return allocator_; }

    vramp_stream_t adopt(cudaStream_t stream) const {
        vramp_stream_t adopted;
        check_resource(vramp_stream_adopt(allocator_, raw_stream(stream), &adopted));
        return adopted;
    }

    void *allocate(cudaStream_t stream, std::size_t bytes, std::size_t alignment,
                   const vramp_reservation_t *paid) {
        if (bytes == 0) return nullptr;
        if (alignment > 256) return allocate_aligned(stream, bytes, alignment, paid);
        void *address;
        vramp_status_t status = try_allocate(stream, bytes, paid, &address);
        if (status == VRAMP_OK) return address;
        return allocate_slowly(status, stream, bytes, paid);
    }

    void deallocate(cudaStream_t stream, void *address, std::size_t alignment) noexcept {
        if (address == nullptr) return;
        if (alignment > 256) address = start_of(address);
        vramp_stream_t adopted;
        vramp_status_t status = vramp_stream_adopt(allocator_, raw_stream(stream), &adopted);
        if (status == VRAMP_OK) status = vramp_free(allocator_, address, adopted);
        if (status != VRAMP_OK && !process_is_exiting()) report("memory stays allocated", status);
        if (patience_.count() > 0) notify_if_waiting();
    }

    void synchronize(cudaStream_t stream) const {
        check_resource(vramp_stream_synchronize(allocator_, adopt(stream)));
    }

    void forget(cudaStream_t stream) const {
        check_resource(vramp_stream_forget(allocator_, adopt(stream)));
    }

    void *allocate_pinned(std::size_t bytes, std::size_t alignment) const {
        if (bytes == 0) return nullptr;
        if (!host_detail::is_supported(alignment))
            raise_out_of_memory(host_detail::unsupported(alignment));
        void *address;
        check_resource(
            vramp_host_malloc(allocator_, host_detail::size_for(bytes, alignment), &address));
        return address;
    }

    void deallocate_pinned(void *address) const noexcept {
        if (address == nullptr || process_is_exiting()) return;
        host_detail::report(vramp_host_free(allocator_, address));
    }

    void deallocate_pinned(cudaStream_t stream, void *address) const noexcept {
        if (address == nullptr || process_is_exiting()) return;
        vramp_stream_t adopted;
        vramp_status_t status = vramp_stream_adopt(allocator_, raw_stream(stream), &adopted);
        if (status == VRAMP_OK) status = vramp_host_record_use(allocator_, address, adopted);
        if (status == VRAMP_OK) status = vramp_host_free(allocator_, address);
        host_detail::report(status);
    }

private:
    vramp_allocator_t allocator_{};
    std::chrono::nanoseconds patience_;
    // Threads that wait for a free, and the number of frees that they were told of.
    std::atomic<int> waiting_{0};
    std::mutex mutex_;
    std::condition_variable freed_;
    std::uint64_t frees_ = 0;
    // Starts of the blocks in which aligned memory lies that does not begin there.
    std::mutex starts_mutex_;
    std::unordered_map<void *, void *> starts_;

    static void report(const char *what, vramp_status_t status) noexcept {
        if (status == VRAMP_OK) return;
        std::fprintf(stderr, "vramp: %s: %s: %s\n", what,
                     vramp_status_name(static_cast<int>(status)), vramp_last_error());
    }

    vramp_status_t try_allocate(cudaStream_t stream, std::size_t bytes,
                                const vramp_reservation_t *paid, void **address) const noexcept {
        vramp_stream_t adopted;
        vramp_status_t status = vramp_stream_adopt(allocator_, raw_stream(stream), &adopted);
        if (status != VRAMP_OK) return status;
        if (paid == nullptr) return vramp_malloc(allocator_, bytes, adopted, address);
        return vramp_reservation_malloc(allocator_, *paid, bytes, adopted, address);
    }

    static bool is_short(vramp_status_t status) noexcept {
        return status == VRAMP_ERROR_OUT_OF_MEMORY || status == VRAMP_ERROR_OVER_RESERVATION;
    }

    /// Waits for other threads to free memory. Throws if they do not, or for another failure.
    void *allocate_slowly(vramp_status_t status, cudaStream_t stream, std::size_t bytes,
                          const vramp_reservation_t *paid) {
        if (!is_short(status) || patience_.count() <= 0 || is_in_handler()) raise(status);
        auto until = std::chrono::steady_clock::now() + patience_;
        waiting_.fetch_add(1);
        std::unique_lock<std::mutex> lock(mutex_);
        void *address = nullptr;
        for (bool is_over = false; is_short(status) && !is_over;) {
            std::uint64_t seen = frees_;
            lock.unlock();
            std::atomic_thread_fence(std::memory_order_seq_cst);
            status = try_allocate(stream, bytes, paid, &address);
            lock.lock();
            if (is_short(status))
                is_over = !freed_.wait_until(lock, until, [&] { return frees_ != seen; });
        }
        lock.unlock();
        waiting_.fetch_sub(1);
        check_resource(status);
        return address;
    }

    void notify_if_waiting() noexcept {
        // Either this thread sees the one that waits, or that one's next request sees what was freed.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (waiting_.load(std::memory_order_relaxed) == 0) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ++frees_;
        }
        freed_.notify_all();
    }

    /// The C interface aligns to 256 bytes at least.
    void *allocate_aligned(cudaStream_t stream, std::size_t bytes, std::size_t alignment,
                           const vramp_reservation_t *paid) {
        if ((alignment & (alignment - 1)) != 0 || bytes > SIZE_MAX - alignment)
            raise_out_of_memory("an alignment must be a power of two, and memory for " +
                                std::to_string(bytes) + " bytes aligned to " +
                                std::to_string(alignment) + " must have an address");
        void *start = allocate(stream, bytes + (alignment - 256), 256, paid);
        auto number = reinterpret_cast<std::uintptr_t>(start);
        auto aligned = reinterpret_cast<void *>((number + alignment - 1) & ~(alignment - 1));
        if (aligned == start) return aligned;
        try {
            std::lock_guard<std::mutex> lock(starts_mutex_);
            starts_.emplace(aligned, start);
        } catch (...) {
            deallocate(stream, start, 256);
            throw;
        }
        return aligned;
    }

    void *start_of(void *aligned) noexcept {
        std::lock_guard<std::mutex> lock(starts_mutex_);
        auto found = starts_.find(aligned);
        if (found == starts_.end()) return aligned;
        void *start = found->second;
        starts_.erase(found);
        return start;
    }
};

/// A reservation of a pool. The last copy releases it.
class reserved {
public:
    reserved(std::shared_ptr<pool> of, std::uint64_t bytes, std::chrono::nanoseconds patience,
             std::int32_t priority)
        : pool_(std::move(of)) {
        vramp_space_t card = {VRAMP_TIER_DEVICE, VRAMP_ANY_INDEX};
        check_resource(vramp_reserve(pool_->allocator(), card, bytes, priority,
                                     nanoseconds(patience), &handle_));
    }

    ~reserved() {
        if (!process_is_exiting()) vramp_reservation_release(pool_->allocator(), handle_);
    }

    reserved(const reserved &) = delete;
    reserved &operator=(const reserved &) = delete;

    const vramp_reservation_t &handle() const noexcept { return handle_; }
    const std::shared_ptr<pool> &owner() const noexcept { return pool_; }

    static std::uint64_t nanoseconds(std::chrono::nanoseconds time) noexcept {
        if (time == std::chrono::nanoseconds::max()) return VRAMP_FOREVER;
        return time.count() < 0 ? 0 : static_cast<std::uint64_t>(time.count());
    }

private:
    std::shared_ptr<pool> pool_;
    vramp_reservation_t handle_{};
};

} // namespace resource_detail

/// A shortage handler of a device_resource. It is removed with this.
class shortage_registration {
public:
    shortage_registration() noexcept = default;
    shortage_registration(shortage_registration &&other) noexcept
        : allocator_(other.allocator_), number_(other.number_), handler_(std::move(other.handler_)) {}
    shortage_registration &operator=(shortage_registration &&other) noexcept {
        end();
        allocator_ = other.allocator_;
        number_ = other.number_;
        handler_ = std::move(other.handler_);
        return *this;
    }
    ~shortage_registration() { end(); }

private:
    friend class device_resource;
    using handler = std::function<bool(const vramp_shortage_t &)>;

    shortage_registration(vramp_allocator_t allocator, handler function)
        : allocator_(allocator), handler_(std::make_unique<handler>(std::move(function))) {
        resource_detail::check_resource(vramp_on_shortage(allocator_, call, handler_.get(), &number_));
    }

    static int call(const vramp_shortage_t *shortage, void *user) noexcept {
        bool outside = std::exchange(resource_detail::is_in_handler(), true);
        bool freed = false;
        try {
            freed = (*static_cast<handler *>(user))(*shortage);
        } catch (...) {
            // The request fails, and says that it is out of memory.
        }
        resource_detail::is_in_handler() = outside;
        return freed ? 1 : 0;
    }

    // The allocator may be closed by now: then nothing calls the handler.
    void end() noexcept {
        if (handler_ != nullptr) vramp_unobserve(allocator_, number_);
        handler_.reset();
    }

    vramp_allocator_t allocator_{};
    std::uint64_t number_ = 0;
    std::unique_ptr<handler> handler_;
};

/// Memory of a device, in the order of streams: a `cuda::mr::resource` with the property
/// `cuda::mr::device_accessible`.
///
/// Copies share one allocator, and are equal: memory of one may be freed by another. The last one closes it, which
/// waits for the work on its streams and releases all memory. All functions may be called from any thread, whichever
/// device is current.
class device_resource {
public:
    /// Opens an allocator. Reserves no memory yet, unless the option prefill is set.
    explicit device_resource(const resource_options &options = {})
        : pool_(std::make_shared<resource_detail::pool>(options)) {}

    /// Opens an allocator on a card, by its number in this process.
    explicit device_resource(int device, resource_options options = {})
        : device_resource(on_card(device, std::move(options))) {}

    /// Allocates memory for work on a stream, aligned to 256 bytes at least. Zero bytes are null. No driver call
    /// on a hit.
    ///
    /// Throws rmm::out_of_memory (or vramp::out_of_memory) if there is none, after vramp's shortage handlers, and
    /// after waiting for frees of other threads for the `patience` of the options.
    [[nodiscard]] void *allocate(cuda::stream_ref stream, std::size_t bytes,
                                 std::size_t alignment = 256) {
        return pool_->allocate(stream.get(), bytes, alignment, paid());
    }

    /// Frees memory after the work that is queued on a stream, which need not be that of its allocation. All work on
    /// the memory is queued there, or ordered before. Never waits or throws: a failure is a line on stderr.
    void deallocate(cuda::stream_ref stream, void *address, std::size_t /*bytes*/,
                    std::size_t alignment = 256) noexcept {
        pool_->deallocate(stream.get(), address, alignment);
    }

    /// Allocates memory that any stream may use at once: waits on the host for the default stream.
    [[nodiscard]] void *allocate_sync(std::size_t bytes, std::size_t alignment = 256) {
        void *address = pool_->allocate(nullptr, bytes, alignment, paid());
        if (address == nullptr) return nullptr;
        try {
            pool_->synchronize(nullptr);
        } catch (...) {
            pool_->deallocate(nullptr, address, alignment);
            throw;
        }
        return address;
    }

    /// Frees memory whose work is over, or is on the default stream.
    void deallocate_sync(void *address, std::size_t /*bytes*/, std::size_t alignment = 256) noexcept {
        pool_->deallocate(nullptr, address, alignment);
    }

    bool operator==(const device_resource &other) const noexcept { return pool_ == other.pool_; }
    bool operator!=(const device_resource &other) const noexcept { return pool_ != other.pool_; }

    friend constexpr void get_property(const device_resource &, cuda::mr::device_accessible) noexcept {}

    /// Calls a function before a request fails for want of memory, until it returns false: the place to free or
    /// spill. It runs on the thread of the request and may use this resource. An exception counts as false.
    [[nodiscard]] shortage_registration
    on_shortage(std::function<bool(const vramp_shortage_t &)> handler) const {
        return shortage_registration(allocator(), std::move(handler));
    }

    /// Forgets a stream, which may be destroyed afterwards: call it before. Never waits. Queued work still runs, and
    /// memory that it uses is not reused before.
    void forget(cuda::stream_ref stream) const { pool_->forget(stream.get()); }

    /// Records that work queued on a stream so far uses memory that will be freed on another.
    void record_use(void *address, cuda::stream_ref stream) const {
        resource_detail::check_resource(
            vramp_record_use(allocator(), address, pool_->adopt(stream.get())));
    }

    /// Releases idle memory to the device until at most `keep` bytes are reserved. Never waits.
    void trim(std::size_t keep = 0) const { resource_detail::check_resource(vramp_trim(allocator(), keep)); }

    [[nodiscard]] vramp_stats_t stats() const {
        vramp_stats_t found = vramp_stats_t();
        found.struct_size = sizeof(found);
        resource_detail::check_resource(vramp_stats(allocator(), &found));
        return found;
    }

    /// Returns the allocator, for the rest of the C interface and vramp.hpp. Do not close it.
    [[nodiscard]] vramp_allocator_t allocator() const noexcept { return pool_->allocator(); }

private:
    friend class reservation;
    friend class pinned_resource;

    device_resource(std::shared_ptr<resource_detail::pool> of, std::shared_ptr<resource_detail::reserved> paid)
        : pool_(std::move(of)), paid_(std::move(paid)) {}

    static resource_options on_card(int device, resource_options options) {
        options.device = "cuda:" + std::to_string(device);
        return options;
    }

    const vramp_reservation_t *paid() const noexcept {
        return paid_ == nullptr ? nullptr : &paid_->handle();
    }

    std::shared_ptr<resource_detail::pool> pool_;
    std::shared_ptr<resource_detail::reserved> paid_;
};

/// Memory of the card that no other request gets. Copies are the same reservation, which is released with the last
/// copy and the last resource of it. Blocks that it paid for stay allocated.
class reservation {
public:
    /// Reserves memory of the device of a resource that was opened with `host_bytes`. Waits for it, and spills
    /// deferrable buffers meanwhile; std::chrono::nanoseconds::max() waits for ever. A larger priority goes first.
    reservation(const device_resource &of, std::uint64_t bytes,
                std::chrono::nanoseconds patience = std::chrono::nanoseconds(0),
                std::int32_t priority = 0)
        : reserved_(std::make_shared<resource_detail::reserved>(of.pool_, bytes, patience, priority)) {}

    /// Returns a resource whose allocations this pays for: beyond its size they throw out of memory. It equals the
    /// resource of the reservation, so that either frees the memory of both.
    [[nodiscard]] device_resource resource() const {
        return device_resource(reserved_->owner(), reserved_);
    }

    [[nodiscard]] vramp_reservation_info_t info() const {
        vramp_reservation_info_t found = vramp_reservation_info_t();
        found.struct_size = sizeof(found);
        resource_detail::check_resource(vramp_reservation_info(allocator(), handle(), &found));
        return found;
    }

    /// Adds memory, as the constructor does. Where that throws the reservation is as before.
    void grow(std::uint64_t bytes,
              std::chrono::nanoseconds patience = std::chrono::nanoseconds(0)) const {
        resource_detail::check_resource(vramp_reservation_grow(allocator(), handle(), bytes,
                                                      resource_detail::reserved::nanoseconds(patience)));
    }

    /// Gives back what is not used, and returns how many bytes that are.
    std::uint64_t shrink() const {
        std::uint64_t released = 0;
        resource_detail::check_resource(vramp_reservation_shrink(allocator(), handle(), &released));
        return released;
    }

    [[nodiscard]] vramp_reservation_t handle() const noexcept { return reserved_->handle(); }
    [[nodiscard]] vramp_allocator_t allocator() const noexcept {
        return reserved_->owner()->allocator();
    }

private:
    std::shared_ptr<resource_detail::reserved> reserved_;
};

/// Pinned memory of the host: a `cuda::mr::resource` with the properties `cuda::mr::host_accessible` and
/// `cuda::mr::device_accessible`. It shares the allocator of a device_resource, and resources of one allocator are
/// equal. Alignments up to 4 KiB are served.
class pinned_resource {
public:
    explicit pinned_resource(const device_resource &of) : pool_(of.pool_) {}

    /// Allocates memory that the host and any stream may use at once. Zero bytes are null.
    [[nodiscard]] void *allocate(cuda::stream_ref, std::size_t bytes,
                                 std::size_t alignment = alignof(std::max_align_t)) {
        return pool_->allocate_pinned(bytes, alignment);
    }

    /// Frees memory after the work that is queued on a stream. At most three driver calls. Never waits or throws.
    void deallocate(cuda::stream_ref stream, void *address, std::size_t /*bytes*/,
                    std::size_t = alignof(std::max_align_t)) noexcept {
        pool_->deallocate_pinned(stream.get(), address);
    }

    [[nodiscard]] void *allocate_sync(std::size_t bytes,
                                      std::size_t alignment = alignof(std::max_align_t)) {
        return pool_->allocate_pinned(bytes, alignment);
    }

    /// Frees memory whose work is over. No driver call.
    void deallocate_sync(void *address, std::size_t /*bytes*/,
                         std::size_t = alignof(std::max_align_t)) noexcept {
        pool_->deallocate_pinned(address);
    }

    bool operator==(const pinned_resource &other) const noexcept { return pool_ == other.pool_; }
    bool operator!=(const pinned_resource &other) const noexcept { return pool_ != other.pool_; }

    friend constexpr void get_property(const pinned_resource &, cuda::mr::device_accessible) noexcept {}
    friend constexpr void get_property(const pinned_resource &, cuda::mr::host_accessible) noexcept {}

    [[nodiscard]] vramp_allocator_t allocator() const noexcept { return pool_->allocator(); }

private:
    std::shared_ptr<resource_detail::pool> pool_;
};

#if VRAMP_RMM_BASE
/// A device_resource as the base class of RMM before 26.06, for functions that take
/// `rmm::mr::device_memory_resource *`.
class device_memory_resource final : public rmm::mr::device_memory_resource {
public:
    explicit device_memory_resource(device_resource of) : of_(std::move(of)) {}

    [[nodiscard]] const device_resource &get() const noexcept { return of_; }

private:
    void *do_allocate(std::size_t bytes, rmm::cuda_stream_view stream) override {
        return of_.allocate(cuda::stream_ref(stream.value()), bytes);
    }

    void do_deallocate(void *address, std::size_t bytes, rmm::cuda_stream_view stream) noexcept override {
        of_.deallocate(cuda::stream_ref(stream.value()), address, bytes);
    }

    [[nodiscard]] bool
    do_is_equal(const rmm::mr::device_memory_resource &other) const noexcept override {
        auto same = dynamic_cast<const device_memory_resource *>(&other);
        return same != nullptr && same->of_ == of_;
    }

    device_resource of_;
};
#endif

} // namespace VRAMP_RESOURCES
} // namespace vramp

#undef VRAMP_RESOURCES

#endif
