// Containers in pinned memory, through vramp/host.hpp, on a simulated card.

#include <vramp/host.hpp>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#define REQUIRE(condition)                                                      \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, vramp_last_error()); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

namespace {

vramp_stats_t stats(vramp_allocator_t allocator) {
    vramp_stats_t found = vramp_stats_t();
    found.struct_size = sizeof(found);
    vramp::check(vramp_stats(allocator, &found));
    return found;
}

template <typename Function>
bool is_out_of_memory(Function &&function) {
    try {
        function();
    } catch (const vramp::out_of_memory &error) {
        return std::string(error.what()).size() > 10;
    }
    return false;
}

} // namespace

int main() {
    vramp_allocator_t allocator, other;
    vramp_stream_t stream;
    vramp::check(vramp_open("sim:h200", "", &allocator));
    vramp::check(vramp_open("sim:h200", "", &other));
    vramp::check(vramp_stream_create(allocator, &stream));
    {
        vramp::pinned_memory_resource pinned(allocator), same(allocator), foreign(other);
        REQUIRE(pinned == same && pinned != foreign && pinned != *std::pmr::new_delete_resource());

        std::pmr::vector<std::uint64_t> numbers(&pinned);
        for (std::uint64_t n = 0; n < 1000000; n++) numbers.push_back(n);
        REQUIRE(numbers[999999] == 999999 && stats(allocator).host_used >= (8 << 20));
        std::pmr::map<int, std::pmr::string> names(&pinned);
        for (int n = 0; n < 1000; n++) names[n] = std::pmr::string(n, 'x');
        REQUIRE(names[999].size() == 999 && names[999].get_allocator().resource() == &pinned);
        std::pmr::monotonic_buffer_resource above(&pinned);
        std::pmr::vector<char> small(10, 'y', &above);

        for (std::size_t alignment = 1; alignment <= 4096; alignment *= 2) {
            void *address = pinned.allocate(3, alignment);
            REQUIRE(reinterpret_cast<std::uintptr_t>(address) % alignment == 0);
            pinned.deallocate(address, 3, alignment);
        }
        void *empty = pinned.allocate(0);
        REQUIRE(empty != nullptr);
        pinned.deallocate(empty, 0);
        REQUIRE(is_out_of_memory([&] { (void)pinned.allocate(1, 8192); }));
        REQUIRE(is_out_of_memory([&] { (void)pinned.allocate(SIZE_MAX / 2); }));

        void *copied = pinned.allocate(100);
        vramp::check(vramp_host_record_use(allocator, copied, stream));
        same.deallocate(copied, 100);

        std::vector<std::thread> threads;
        for (int thread = 0; thread < 8; thread++)
            threads.emplace_back([&pinned, thread] {
                for (int step = 1; step < 200; step++) {
                    std::pmr::vector<int> own(step * 10, thread, &pinned);
                    REQUIRE(own.front() == thread && own.back() == thread);
                }
            });
        for (std::thread &thread : threads) thread.join();
    }
    // Blocks that small memory shares stay until a trim.
    REQUIRE(stats(allocator).host_used < (20 << 20));
    vramp::check(vramp_trim(allocator, 0));
    REQUIRE(stats(allocator).host_used == 0 && stats(allocator).host_pinned == 0);
    vramp::check(vramp_audit(allocator));

    void *address;
    REQUIRE(vramp_host_malloc(allocator, 100, NULL) == VRAMP_ERROR_NULL);
    REQUIRE(vramp_host_free(allocator, NULL) == VRAMP_ERROR_UNKNOWN_POINTER);
    vramp::check(vramp_host_malloc(allocator, 100, &address));
    REQUIRE(vramp_host_free(other, address) == VRAMP_ERROR_UNKNOWN_POINTER);
    REQUIRE(vramp_free(allocator, address, stream) == VRAMP_ERROR_UNKNOWN_POINTER);
    vramp_stream_t none = {0};
    REQUIRE(vramp_host_record_use(allocator, address, none) == VRAMP_ERROR_UNKNOWN_STREAM);
    REQUIRE(vramp_host_record_use(allocator, &address, stream) == VRAMP_ERROR_UNKNOWN_POINTER);
    vramp::check(vramp_host_free(allocator, address));
    REQUIRE(vramp_host_free(allocator, address) == VRAMP_ERROR_UNKNOWN_POINTER);
    // What is not freed goes with the allocator.
    vramp::check(vramp_host_malloc(allocator, 3 << 20, &address));
    vramp::check(vramp_close(allocator));
    REQUIRE(vramp_host_free(allocator, address) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    vramp::check(vramp_close(other));
    std::puts("passed");
    return 0;
}
