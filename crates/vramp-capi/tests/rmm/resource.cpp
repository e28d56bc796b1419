// vramp/rmm.hpp on a simulated card, with CCCL's headers, and with RMM's where they are found.
// `cargo xtask rmm` compiles it in each of these ways and runs it.

#include <vramp/rmm.hpp>

#include <cstdlib>
#include <set>
#include <thread>
#include <unistd.h>
#include <vector>

#if VRAMP_RMM_ERRORS
#include <rmm/mr/failure_callback_resource_adaptor.hpp>
#include <rmm/mr/per_device_resource.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>
using short_of_memory = rmm::out_of_memory;
using wrong_call = rmm::logic_error;
using failed_device = rmm::cuda_error;
#else
using short_of_memory = vramp::out_of_memory;
using wrong_call = vramp::error;
using failed_device = vramp::error;
#endif

#define REQUIRE(condition)                                                                    \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            std::fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, vramp_last_error());   \
            std::exit(1);                                                                     \
        }                                                                                     \
    } while (0)

using namespace std::chrono_literals;

namespace {

static_assert(cuda::mr::synchronous_resource<vramp::device_resource>);
static_assert(cuda::mr::resource<vramp::device_resource>);
static_assert(cuda::mr::resource_with<vramp::device_resource, cuda::mr::device_accessible>);
static_assert(!cuda::has_property<vramp::device_resource, cuda::mr::host_accessible>);
static_assert(cuda::mr::resource_with<vramp::pinned_resource, cuda::mr::device_accessible,
                                      cuda::mr::host_accessible>);
static_assert(std::is_base_of_v<std::bad_alloc, short_of_memory>);
static_assert(std::is_nothrow_move_constructible_v<vramp::device_resource>);

const std::size_t MIB = std::size_t(1) << 20;

vramp::resource_options simulated(const char *allocator = "") {
    vramp::resource_options options;
    options.device = "sim:h200";
    options.allocator = allocator;
    return options;
}

cuda::stream_ref stream(std::uintptr_t number) {
    return cuda::stream_ref(reinterpret_cast<cudaStream_t>(number));
}

template <typename Error, typename Function>
bool throws(Function &&function) {
    try {
        function();
    } catch (const Error &) {
        return true;
    }
    return false;
}

/// What a function prints to stderr.
template <typename Function>
std::string printed(Function &&function) {
    std::fflush(stderr);
    int old = dup(2);
    std::FILE *file = std::tmpfile();
    REQUIRE(file != nullptr && dup2(fileno(file), 2) == 2);
    function();
    std::fflush(stderr);
    dup2(old, 2);
    close(old);
    std::string text(4096, '\0');
    std::rewind(file);
    text.resize(std::fread(&text[0], 1, text.size(), file));
    std::fclose(file);
    return text;
}

std::uint64_t live(const vramp::device_resource &resource) { return resource.stats().live; }

void is_what_cccl_takes() {
    vramp::device_resource resource(simulated());
    cuda::mr::resource_ref<cuda::mr::device_accessible> reference(resource);
    void *address = reference.allocate(stream(0), 1000, 256);
    REQUIRE(address != nullptr && live(resource) == 1000);
    reference.deallocate(stream(0), address, 1000, 256);
    REQUIRE(live(resource) == 0);
#if CCCL_VERSION >= 3002000
    cuda::mr::any_resource<cuda::mr::device_accessible> any(resource);
    auto other = any;
    REQUIRE(any == other);
    address = any.allocate(stream(64), 1000, 256);
    other.deallocate(stream(64), address, 1000, 256);
    REQUIRE(live(resource) == 0);
#endif
    address = resource.allocate_sync(10, 16);
    REQUIRE(address != nullptr && live(resource) == 10);
    resource.deallocate_sync(address, 10, 16);
    REQUIRE(live(resource) == 0);
}

void copies_share_one_allocator() {
    vramp_allocator_t allocator;
    void *address = nullptr;
    {
        vramp::device_resource outer(simulated());
        allocator = outer.allocator();
        {
            vramp::device_resource copy(outer), other(simulated());
            REQUIRE(copy == outer && !(copy != outer) && other != outer);
            address = copy.allocate(stream(64), 100);
        }
        REQUIRE(live(outer) == 100);
        outer.deallocate(stream(64), address, 100);
        vramp::device_resource moved(std::move(outer));
        REQUIRE(live(moved) == 0);
        // What is not freed goes with the allocator.
        address = moved.allocate(stream(64), 100);
    }
    vramp_stats_t stats = vramp_stats_t();
    stats.struct_size = sizeof(stats);
    REQUIRE(vramp_stats(allocator, &stats) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
}

void sizes_and_alignments() {
    vramp::device_resource resource(simulated());
    REQUIRE(resource.allocate(stream(0), 0) == nullptr);
    REQUIRE(resource.allocate(stream(0), 0, 4096) == nullptr);
    REQUIRE(resource.allocate_sync(0) == nullptr);
    resource.deallocate(stream(0), nullptr, 0);
    resource.deallocate_sync(nullptr, 0);
    std::vector<std::pair<void *, std::size_t>> blocks;
    for (std::size_t alignment = 1; alignment <= 4 * MIB; alignment *= 2)
        for (int nth = 0; nth < 20; nth++) {
            void *address = resource.allocate(stream(64), 700 + nth, alignment);
            REQUIRE(reinterpret_cast<std::uintptr_t>(address) % alignment == 0);
            blocks.emplace_back(address, alignment);
        }
    std::set<void *> starts;
    for (auto &block : blocks) REQUIRE(starts.insert(block.first).second);
    REQUIRE(printed([&] {
        for (auto &block : blocks) resource.deallocate(stream(64), block.first, 700, block.second);
    }).empty());
    REQUIRE(live(resource) == 0);
    REQUIRE(throws<short_of_memory>([&] { (void)resource.allocate(stream(0), 10, 768); }));
    REQUIRE(throws<short_of_memory>([&] { (void)resource.allocate(stream(0), SIZE_MAX, 512); }));
    REQUIRE(throws<short_of_memory>([&] { (void)resource.allocate(stream(0), SIZE_MAX); }));
}

void errors_have_types_and_texts() {
    vramp::resource_options wrong = simulated("limit=many");
    REQUIRE(throws<wrong_call>([&] { vramp::device_resource resource(wrong); }));
    wrong = simulated();
    wrong.device = "sim:toaster";
    REQUIRE(throws<failed_device>([&] { vramp::device_resource resource(wrong); }));
    wrong = simulated();
    wrong.host_bytes = 1;
    REQUIRE(throws<std::exception>([&] { vramp::device_resource resource(wrong); }));

    vramp::device_resource resource(simulated("limit=64MiB"));
    try {
        (void)resource.allocate(stream(64), 100 * MIB);
        REQUIRE(false);
    } catch (const std::bad_alloc &error) {
        std::string text = error.what();
        REQUIRE(text.find("VRAMP_ERROR_OUT_OF_MEMORY") != std::string::npos);
        REQUIRE(text.find("100.00 MiB") != std::string::npos);
    }
    int nothing = 0;
    auto text = printed([&] { resource.deallocate(stream(64), &nothing, 4); });
    REQUIRE(text.find("VRAMP_ERROR_UNKNOWN_POINTER") != std::string::npos);
    void *address = resource.allocate(stream(64), 4);
    resource.deallocate(stream(64), address, 4);
    text = printed([&] { resource.deallocate(stream(64), address, 4); });
    REQUIRE(text.find("VRAMP_ERROR_UNKNOWN_POINTER") != std::string::npos);
}

/// The stream that each allocation of an allocator was for.
struct allocations {
    std::mutex mutex;
    std::vector<std::uint64_t> streams;

    static void add(const vramp_event_t *event, void *user) {
        auto all = static_cast<allocations *>(user);
        std::lock_guard<std::mutex> lock(all->mutex);
        if (event->kind == VRAMP_EVENT_ALLOCATED) all->streams.push_back(event->stream.id);
    }
};

void default_streams() {
    allocations seen;
    vramp::device_resource resource(simulated());
    std::uint64_t registration;
    vramp::check(vramp_observe(resource.allocator(), allocations::add, &seen, &registration));
    auto use = [&](cudaStream_t raw) {
        resource.deallocate(cuda::stream_ref(raw), resource.allocate(cuda::stream_ref(raw), 8), 8);
    };
    use(nullptr);
    use(cudaStreamLegacy);
    use(cudaStreamPerThread);
    use(cudaStreamPerThread);
    std::thread([&] { use(cudaStreamPerThread); }).join();
    auto &all = seen.streams;
    REQUIRE(all.size() == 5 && all[2] == all[3] && all[3] != all[4] && all[1] != all[2]);
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    REQUIRE(all[0] == all[2]);
#else
    REQUIRE(all[0] == all[1]);
#endif
    vramp::check(vramp_unobserve(resource.allocator(), registration));
}

void streams_differ_and_end() {
    vramp::device_resource resource(simulated());
    void *address = resource.allocate(stream(64), MIB);
    resource.record_use(address, stream(128));
    resource.deallocate(stream(192), address, MIB);
    address = resource.allocate(stream(64), MIB);
    resource.forget(stream(64));
    resource.deallocate(stream(128), address, MIB);
    address = resource.allocate(stream(64), MIB);
    resource.deallocate(stream(64), address, MIB);
    REQUIRE(live(resource) == 0);
    vramp::check(vramp_audit(resource.allocator()));
    resource.trim();
    REQUIRE(resource.stats().reserved == 0);
}

void handlers_are_called_when_memory_is_short() {
    vramp::device_resource resource(simulated("limit=64MiB"));
    void *cached = resource.allocate(stream(64), 60 * MIB);
    int calls = 0;
    {
        auto spilling = resource.on_shortage([&](const vramp_shortage_t &shortage) {
            calls++;
            REQUIRE(shortage.requested == 50 * MIB);
            if (cached == nullptr) return false;
            resource.deallocate(stream(64), std::exchange(cached, nullptr), 60 * MIB);
            return true;
        });
        void *address = resource.allocate(stream(64), 50 * MIB);
        REQUIRE(calls == 1 && cached == nullptr);
        REQUIRE(throws<short_of_memory>([&] { (void)resource.allocate(stream(64), 50 * MIB); }));
        REQUIRE(calls >= 2);
        resource.deallocate(stream(64), address, 50 * MIB);
        auto moved = std::move(spilling);
    }
    calls = 0;
    REQUIRE(throws<short_of_memory>([&] { (void)resource.allocate(stream(64), 100 * MIB); }));
    REQUIRE(calls == 0);
    auto throwing = resource.on_shortage([](const vramp_shortage_t &) -> bool { throw 1; });
    REQUIRE(throws<short_of_memory>([&] { (void)resource.allocate(stream(64), 100 * MIB); }));
}

void a_request_waits_for_frees_of_other_threads() {
    vramp::resource_options options = simulated("limit=64MiB");
    options.patience = 60s;
    vramp::device_resource resource(options);
    void *first = resource.allocate(stream(64), 30 * MIB);
    void *second = resource.allocate(stream(64), 30 * MIB);
    std::atomic<bool> is_tried{false};
    auto watching = resource.on_shortage([&](const vramp_shortage_t &) {
        is_tried = true;
        return false;
    });
    std::thread other([&] {
        while (!is_tried) std::this_thread::yield();
        resource.deallocate(stream(128), first, 30 * MIB);
        resource.deallocate(stream(128), second, 30 * MIB);
    });
    void *address = resource.allocate(stream(64), 60 * MIB);
    other.join();
    REQUIRE(address != nullptr && live(resource) == 60 * MIB);

    options.patience = 1ms;
    vramp::device_resource hasty(options);
    void *all = hasty.allocate(stream(64), 60 * MIB);
    REQUIRE(throws<short_of_memory>([&] { (void)hasty.allocate(stream(64), 60 * MIB); }));
    // A handler that allocates does not wait, and calls no handler.
    options.patience = 60s;
    vramp::device_resource nested(options);
    all = nested.allocate(stream(64), 60 * MIB);
    bool was_short = false;
    auto allocating = nested.on_shortage([&](const vramp_shortage_t &) {
        was_short = throws<short_of_memory>([&] { (void)nested.allocate(stream(64), 60 * MIB); });
        nested.deallocate(stream(64), all, 60 * MIB);
        return true;
    });
    address = nested.allocate(stream(64), 60 * MIB);
    REQUIRE(was_short && address != nullptr);
}

void reservations_pay() {
    vramp::device_resource plain(simulated());
    REQUIRE(throws<wrong_call>([&] { vramp::reservation none(plain, MIB); }));

    vramp::resource_options options = simulated("limit=256MiB");
    options.host_bytes = 64 * MIB;
    vramp::device_resource resource(options);
    void *address;
    {
        std::optional<vramp::device_resource> paid;
        {
            vramp::reservation of(resource, 128 * MIB);
            REQUIRE(of.info().size == 128 * MIB);
            REQUIRE(throws<short_of_memory>([&] { vramp::reservation more(resource, 200 * MIB); }));
            paid = of.resource();
            address = paid->allocate(stream(64), 100 * MIB);
            REQUIRE(of.info().used == 100 * MIB && *paid == resource);
            REQUIRE(throws<short_of_memory>([&] { (void)paid->allocate(stream(64), 100 * MIB); }));
            // Any equal resource frees it.
            resource.deallocate(stream(128), address, 100 * MIB);
            REQUIRE(of.info().used == 0);
            address = paid->allocate(stream(64), 50 * MIB);
            REQUIRE(of.shrink() == 78 * MIB && of.info().size == 50 * MIB);
            of.grow(10 * MIB);
            REQUIRE(of.info().size == 60 * MIB);
        }
        // The resource keeps it.
        resource.deallocate(stream(64), paid->allocate(stream(64), 5 * MIB), 5 * MIB);
    }
    // A block outlives its reservation.
    resource.deallocate(stream(64), address, 50 * MIB);
    REQUIRE(live(resource) == 0);
    vramp::reservation again(resource, 200 * MIB, std::chrono::nanoseconds::max());
}

void pinned_memory_is_read_and_written() {
    vramp::device_resource resource(simulated());
    vramp::pinned_resource pinned(resource), same(resource);
    REQUIRE(pinned == same && pinned.allocator().id == resource.allocator().id);
    REQUIRE(pinned.allocate(stream(64), 0) == nullptr);
    for (std::size_t bytes : {std::size_t(1), std::size_t(5000), 3 * MIB}) {
        auto first = static_cast<char *>(pinned.allocate(stream(64), bytes, 4096));
        auto second = static_cast<char *>(pinned.allocate_sync(bytes, 64));
        REQUIRE(reinterpret_cast<std::uintptr_t>(first) % 4096 == 0 && first != second);
        first[0] = 1;
        first[bytes - 1] = 2;
        second[bytes - 1] = 3;
        REQUIRE(printed([&] {
            same.deallocate(stream(64), first, bytes, 4096);
            pinned.deallocate_sync(second, bytes, 64);
        }).empty());
    }
    REQUIRE(throws<short_of_memory>([&] { (void)pinned.allocate_sync(1, 8192); }));
    REQUIRE(throws<short_of_memory>([&] { (void)pinned.allocate_sync(1, 48); }));
    int nothing = 0;
    auto text = printed([&] { pinned.deallocate_sync(&nothing, 4); });
    REQUIRE(text.find("VRAMP_ERROR_UNKNOWN_POINTER") != std::string::npos);
    REQUIRE(resource.stats().host_pinned > 0);
    resource.trim();
    REQUIRE(resource.stats().host_pinned == 0);
}

void threads_allocate_and_free_for_each_other() {
    vramp::device_resource resource(simulated());
    const int count = 8;
    std::mutex mutex;
    std::vector<std::pair<void *, std::size_t>> shared;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < count; thread++)
        threads.emplace_back([&, thread, copy = resource]() mutable {
            auto own = stream(64 * (thread + 1));
            for (int step = 0; step < 2000; step++) {
                std::size_t bytes = 1 + (step * 7919u + thread * 104729u) % (64 << 10);
                std::size_t alignment = step % 16 == 0 ? 4096 : 256;
                std::pair<void *, std::size_t> block(copy.allocate(own, bytes, alignment), alignment);
                {
                    std::lock_guard<std::mutex> lock(mutex);
                    shared.push_back(block);
                    std::swap(shared.back(), shared[step % shared.size()]);
                    if (shared.size() < 100) continue;
                    block = shared.back();
                    shared.pop_back();
                }
                copy.deallocate(own, block.first, 1, block.second);
            }
        });
    for (auto &thread : threads) thread.join();
    REQUIRE(printed([&] {
        for (auto &block : shared) resource.deallocate(stream(0), block.first, 1, block.second);
    }).empty());
    REQUIRE(live(resource) == 0 && resource.stats().placed >= count * 2000);
    vramp::check(vramp_audit(resource.allocator()));
}

#if VRAMP_RMM_ERRORS && CCCL_VERSION >= 3004000
void is_rmms_resource_of_a_device() {
    vramp::device_resource resource(simulated("limit=64MiB"));
    rmm::cuda_device_id device{0};
    auto old = rmm::mr::set_per_device_resource(device, resource);
    auto current = rmm::mr::get_per_device_resource_ref(device);
    void *address = current.allocate(stream(0), MIB, rmm::CUDA_ALLOCATION_ALIGNMENT);
    REQUIRE(live(resource) == MIB);
    current.deallocate(stream(0), address, MIB, rmm::CUDA_ALLOCATION_ALIGNMENT);
    REQUIRE(live(resource) == 0);

    rmm::mr::statistics_resource_adaptor counting(resource);
    address = counting.allocate(stream(64), MIB, 256);
    REQUIRE(counting.get_bytes_counter().value == static_cast<std::int64_t>(MIB));
    counting.deallocate(stream(64), address, MIB, 256);

    // RMM's adaptor for failures knows them by their type.
    void *cached = resource.allocate(stream(64), 60 * MIB);
    auto spill = [](std::size_t, void *user) {
        auto &with = *static_cast<std::pair<vramp::device_resource *, void **> *>(user);
        if (*with.second == nullptr) return false;
        with.first->deallocate(stream(64), std::exchange(*with.second, nullptr), 60 * MIB);
        return true;
    };
    std::pair<vramp::device_resource *, void **> with(&resource, &cached);
    rmm::mr::failure_callback_resource_adaptor<> retrying(resource, spill, &with);
    address = retrying.allocate(stream(64), 50 * MIB, 256);
    REQUIRE(cached == nullptr && live(resource) == 50 * MIB);
    retrying.deallocate(stream(64), address, 50 * MIB, 256);
    // The map of RMM keeps the resource, and its allocator, until the process ends.
}
#endif

} // namespace

int main() {
    is_what_cccl_takes();
    copies_share_one_allocator();
    sizes_and_alignments();
    errors_have_types_and_texts();
    default_streams();
    streams_differ_and_end();
    handlers_are_called_when_memory_is_short();
    a_request_waits_for_frees_of_other_threads();
    reservations_pay();
    pinned_memory_is_read_and_written();
    threads_allocate_and_free_for_each_other();
#if VRAMP_RMM_ERRORS && CCCL_VERSION >= 3004000
    is_rmms_resource_of_a_device();
#endif
    std::puts("passed");
    return 0;
}
