// Pinned memory of the host as a std::pmr::memory_resource, for C++17 and later. See docs/cpp.md.
//
//     vramp::pinned_memory_resource pinned(allocator);
//     std::pmr::vector<float> staging(1 << 20, &pinned);

#ifndef VRAMP_HOST_HPP
#define VRAMP_HOST_HPP

#include "../vramp.hpp"

#if !defined(__has_include) || __cplusplus < 201703L
#error "vramp/host.hpp needs C++17: compile with -std=c++17 or later"
#endif

#include <cstdio>
#include <memory_resource>
#include <new>

namespace vramp {

/// Out of memory.
class out_of_memory : public std::bad_alloc {
public:
    explicit out_of_memory(std::string message) : message_(std::move(message)) {}
    const char *what() const noexcept override { return message_.c_str(); }

private:
    std::string message_;
};

namespace host_detail {

/// Alignment of memory that fills a page or more.
constexpr std::size_t largest_alignment = 4096;

/// Returns the size to ask for. Memory is aligned to the power of two that its size is rounded up to.
inline std::size_t size_for(std::size_t bytes, std::size_t alignment) noexcept {
    return bytes < alignment ? alignment : bytes;
}

inline bool is_supported(std::size_t alignment) noexcept {
    return (alignment & (alignment - 1)) == 0 && alignment <= largest_alignment;
}

inline std::string unsupported(std::size_t alignment) {
    return "pinned memory aligned to " + std::to_string(alignment) +
           " bytes: use a power of two up to 4096";
}

inline void report(vramp_status_t status) noexcept {
    if (status == VRAMP_OK) return;
    std::fprintf(stderr, "vramp: pinned memory stays allocated: %s: %s\n",
                 vramp_status_name(static_cast<int>(status)), vramp_last_error());
}

} // namespace host_detail

/// Pinned memory of the host from the pool of an allocator, which stays open for longer. The device reads and writes
/// it at the same address. Resources of one allocator are equal.
///
/// Allocations throw vramp::out_of_memory, a std::bad_alloc. Memory is freed once no work uses it, or after
/// vramp_host_record_use. All functions may be called from any thread.
class pinned_memory_resource : public std::pmr::memory_resource {
public:
    explicit pinned_memory_resource(vramp_allocator_t allocator) noexcept : allocator_(allocator) {}

    vramp_allocator_t allocator() const noexcept { return allocator_; }

private:
    void *do_allocate(std::size_t bytes, std::size_t alignment) override {
        if (!host_detail::is_supported(alignment))
            throw out_of_memory(host_detail::unsupported(alignment));
        void *address;
        vramp_status_t status =
            vramp_host_malloc(allocator_, host_detail::size_for(bytes, alignment), &address);
        if (status == VRAMP_ERROR_OUT_OF_MEMORY) throw out_of_memory(vramp_last_error());
        check(status);
        return address;
    }

    void do_deallocate(void *address, std::size_t, std::size_t) override {
        host_detail::report(vramp_host_free(allocator_, address));
    }

    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        auto same = dynamic_cast<const pinned_memory_resource *>(&other);
        return same != nullptr && same->allocator_.id == allocator_.id;
    }

    vramp_allocator_t allocator_;
};

} // namespace vramp

#endif
