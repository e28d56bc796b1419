// Deferrable buffers through the header for C++: every word of the proposal, on a simulated card with
// the host's memory. The functions are the kernels.

#include <vramp.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unordered_map>
#include <vector>

#define REQUIRE(condition)                                                      \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, vramp_last_error()); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

namespace {

const std::size_t MIB = std::size_t(1) << 20;

struct Changes {
    std::atomic<int> deferred{0}, retrieved{0}, locked{0}, unlocked{0}, freed{0};
};

void count(const vramp_buffer_event_t *event, void *user) {
    Changes &changes = *static_cast<Changes *>(user);
    switch (event->change) {
    case VRAMP_BUFFER_WAS_DEFERRED: ++changes.deferred; break;
    case VRAMP_BUFFER_RETRIEVED: ++changes.retrieved; break;
    case VRAMP_BUFFER_LOCKED: ++changes.locked; break;
    case VRAMP_BUFFER_UNLOCKED: ++changes.unlocked; break;
    case VRAMP_BUFFER_FREED: ++changes.freed; break;
    default: break;
    }
}

// Contents are there for the work of the stream: a function on the host waits for its turn.
void await(const vramp::buffer &of, vramp_stream_t stream) {
    vramp::check(vramp_stream_synchronize(of.allocator(), stream));
}

void fill(const vramp::buffer &to, int value) { std::memset(to.get(), value, to.size()); }

uint64_t restored(vramp_allocator_t of) {
    vramp_tiers_stats_t stats = vramp_tiers_stats_t();
    stats.struct_size = sizeof(stats);
    vramp::check(vramp_tiers_stats(of, &stats));
    return stats.from_host;
}

bool holds(const vramp::buffer &one, int value) {
    const unsigned char *bytes = static_cast<const unsigned char *>(one.get());
    return bytes[0] == value && bytes[one.size() - 1] == value;
}

} // namespace

int main() {
    vramp_allocator_t allocator;
    vramp_stream_t stream;
    vramp_tiers_options_t options = vramp_tiers_options_t();
    options.struct_size = sizeof(options);
    options.host_bytes = 256 * MIB;
    vramp::check(vramp_map_simulated_cards());
    vramp::check(vramp_open("sim:h200", "limit=64MiB", &allocator));
    vramp::check(vramp_tiers_open_with(allocator, &options));
    vramp::check(vramp_stream_create(allocator, &stream));

    Changes changes;
    uint64_t registration = 0;
    vramp::check(vramp_buffers_observe(allocator, count, &changes, &registration));

    // Eight buffers of which two fit at once.
    std::vector<vramp::buffer> buffers;
    std::unordered_map<uint64_t, int> values;
    for (int nth = 0; nth < 8; ++nth) {
        buffers.emplace_back(allocator, 24 * MIB);
        values[buffers.back().handle().id] = nth;
        int launches = 0;
        vramp::lock_and_launch(
            allocator, stream,
            [&](vramp::buffer &to, int value) {
                REQUIRE(to.is_locked());
                await(to, stream);
                fill(to, value);
                ++launches;
            },
            buffers.back(), nth + 1);
        REQUIRE(launches == 1);
        REQUIRE(!buffers.back().is_locked());
    }
    REQUIRE(values.size() == 8);
    REQUIRE(buffers[0].is_deferred() && !buffers[7].is_deferred());

    // Work on two of them, queued on a stream: both stay until it is synchronized.
    vramp::lock_and_launch_async(
        allocator, stream,
        [&](vramp_stream_t on, const vramp::buffer &from, vramp::buffer &to, const char *name) {
            REQUIRE(on.id == stream.id && std::strcmp(name, "copy") == 0);
            await(to, on);
            std::memcpy(to.get(), from.get(), from.size());
        },
        vramp::reads(buffers[0]), buffers[1], "copy");
    REQUIRE(buffers[0].is_locked() && buffers[1].is_locked());
    uint64_t freed = 1;
    vramp::check(vramp_evict(allocator, UINT64_MAX, &freed));
    REQUIRE(!buffers[0].is_deferred() && !buffers[1].is_deferred());
    vramp::sync_and_unlock(allocator, stream);
    REQUIRE(!buffers[0].is_locked() && !buffers[1].is_locked());

    // A function that throws leaves no lock.
    try {
        vramp::lock_and_launch(
            allocator, stream, [](vramp::buffer &) { throw std::runtime_error("none"); }, buffers[2]);
        REQUIRE(false);
    } catch (const vramp::error &) {
        REQUIRE(false);
    } catch (const std::runtime_error &thrown) {
        REQUIRE(std::strcmp(thrown.what(), "none") == 0);
    }
    REQUIRE(!buffers[2].is_locked());

    // A set that can never fit is an exception with a status.
    try {
        vramp::retrieve_and_lock(allocator, stream, buffers[0], buffers[1], buffers[2]);
        REQUIRE(false);
    } catch (const vramp::error &refused) {
        REQUIRE(refused.status() == VRAMP_ERROR_OUT_OF_MEMORY);
    }

    // Threads with streams of their own.
    std::vector<std::thread> threads;
    for (int nth = 0; nth < 4; ++nth) {
        threads.emplace_back([&, nth] {
            vramp_stream_t own;
            vramp::check(vramp_stream_create(allocator, &own));
            for (int round = 0; round < 20; ++round) {
                vramp::lock_and_launch(
                    allocator, own,
                    [&](const vramp::buffer &one) {
                        await(one, own);
                        REQUIRE(holds(one, nth + 5));
                    },
                    vramp::reads(buffers[nth + 4]));
            }
            vramp::check(vramp_stream_forget(allocator, own));
        });
    }
    for (std::thread &thread : threads) thread.join();

    buffers[1].retrieve();
    vramp::lock_and_launch(
        allocator, stream,
        [&](const vramp::buffer &one) {
            await(one, stream);
            REQUIRE(holds(one, 1));
        },
        vramp::reads(buffers[1]));

    // Contents that are overwritten are not copied back.
    REQUIRE(buffers[2].is_deferred());
    const uint64_t before = restored(allocator);
    vramp::lock_and_launch(
        allocator, stream,
        [&](vramp::buffer &to, int value) {
            await(to, stream);
            fill(to, value);
        },
        vramp::overwrites(buffers[2]), 77);
    REQUIRE(restored(allocator) == before && !buffers[2].is_deferred());
    vramp::lock_and_launch(
        allocator, stream, [](const vramp::buffer &one) { REQUIRE(holds(one, 77)); },
        vramp::reads(buffers[2]));

    vramp::buffer copy = buffers[3];
    buffers.clear();
    REQUIRE(copy == copy && copy.size() == 24 * MIB);
    vramp::sync_and_unlock(allocator, stream);
    while (changes.freed < 7) std::this_thread::yield();
    vramp::check(vramp_buffers_unobserve(allocator, registration));
    REQUIRE(changes.deferred > 0 && changes.retrieved > 0);
    REQUIRE(changes.locked == changes.unlocked);

    // The buffer outlives the allocator, and its end is no error.
    vramp::check(vramp_close(allocator));
    std::puts("passed");
    return 0;
}
