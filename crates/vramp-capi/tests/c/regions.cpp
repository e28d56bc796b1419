// Regions through the header for C++, on a simulated card with the host's memory.

#include <vramp.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#define REQUIRE(condition)                                                      \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, vramp_last_error()); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

namespace {

const std::size_t MIB = std::size_t(1) << 20;

vramp_allocator_t allocator;
vramp_stream_t stream;

char *allocate(std::size_t size) {
    void *block = nullptr;
    vramp::check(vramp_malloc(allocator, size, stream, &block));
    return static_cast<char *>(block);
}

uint64_t on_card(const std::string &tag) {
    for (const vramp_region_status_t &region : vramp::region_status(allocator))
        if (tag == region.tag) return region.on_card;
    return 0;
}

vramp_status_t status_of_pause(const vramp::tags &of) {
    try {
        vramp::pause(allocator, of);
        return VRAMP_OK;
    } catch (const vramp::error &error) {
        return error.status();
    }
}

void scopes() {
    REQUIRE(vramp::region_status(allocator).empty());
    {
        vramp::region outer(allocator, "outer");
        {
            vramp::region inner(allocator, "inner", vramp::region_options(VRAMP_BACKUP_NONE));
            allocate(2 * MIB);
            vramp::disable_region none(allocator);
            allocate(4 * MIB);
        }
        allocate(6 * MIB);
        std::thread([] { allocate(8 * MIB); }).join();
    }
    allocate(10 * MIB);
    REQUIRE(on_card("outer") == 6 * MIB && on_card("inner") == 2 * MIB);
    // An exception ends the scope.
    try {
        vramp::region outer(allocator, "outer");
        throw std::runtime_error("work failed");
    } catch (const std::runtime_error &) {
    }
    allocate(2 * MIB);
    REQUIRE(on_card("outer") == 6 * MIB);
    try {
        vramp::region outer(allocator, "outer", vramp::region_options(VRAMP_BACKUP_HOST, true));
        REQUIRE(false);
    } catch (const vramp::error &error) {
        REQUIRE(error.status() == VRAMP_ERROR_OPTION);
    }
}

void moves() {
    char *block;
    {
        vramp::region weights(allocator, "weights");
        block = allocate(8 * MIB);
    }
    std::memset(block, 3, 8 * MIB);
    // No tags are not all tags.
    vramp::pause(allocator, vramp::tags());
    vramp::clean(allocator, {"weights"});
    REQUIRE(on_card("weights") == 8 * MIB && on_card("outer") == 6 * MIB);
    vramp::pause(allocator, {"weights", "outer"});
    REQUIRE(on_card("weights") == 0 && on_card("outer") == 0 && on_card("inner") == 2 * MIB);
    vramp::resume(allocator, {"weights"});
    REQUIRE(on_card("weights") == 8 * MIB && on_card("outer") == 0);
    REQUIRE(block[0] == 3 && block[8 * MIB - 1] == 3);
    vramp::resume(allocator);
    vramp::pause(allocator, {"weights"}, 4 * MIB);
    REQUIRE(on_card("weights") <= 4 * MIB);
    vramp::pause(allocator, {"weights"}, 0, true);
    vramp::pause(allocator);
    for (const vramp_region_status_t &region : vramp::region_status(allocator))
        REQUIRE(region.on_card == 0 && region.phase == VRAMP_REGION_ASLEEP);
    REQUIRE(status_of_pause({"weights", "wieghts"}) == VRAMP_ERROR_REGION);
    REQUIRE(status_of_pause({"weights"}) == VRAMP_OK);
    vramp::resume(allocator, {"outer", "inner", "weights"});
}

vramp_status_t status_of_resume() {
    try {
        vramp::resume(allocator);
        return VRAMP_OK;
    } catch (const vramp::error &error) {
        return error.status();
    }
}

void callbacks() {
    std::string log;
    bool fails = false;
    {
        vramp::around_sleep all(
            allocator, "all", [&] { log += "-all "; }, [&] { log += "+all "; });
        vramp::around_sleep one(
            allocator, "one", vramp::tags{"weights", "later"},
            [&] {
                log += "-one ";
                if (fails) throw std::runtime_error("no peer");
            },
            [&] {
                log += "+one ";
                if (fails) throw std::runtime_error("no peer");
            });
        vramp::around_sleep none(
            allocator, "none", vramp::tags(), [] { std::abort(); }, nullptr, true);
        REQUIRE(status_of_pause({"weights"}) == VRAMP_OK && log == "-all -one ");
        fails = true;
        REQUIRE(status_of_resume() == VRAMP_ERROR_CALLBACK && on_card("weights") >= 8 * MIB);
        REQUIRE(std::strstr(vramp_last_error(), "\"one\"") && one.failure() && !all.failure());
        REQUIRE(log == "-all -one +one +all ");
        fails = false;
        REQUIRE(status_of_resume() == VRAMP_OK && log == "-all -one +one +all +one ");
        fails = true;
        log.clear();
        REQUIRE(status_of_pause({"weights"}) == VRAMP_ERROR_CALLBACK && log == "-all -one +all ");
        REQUIRE(status_of_pause({"outer"}) == VRAMP_OK && log == "-all -one +all -all ");
    }
    vramp::pause(allocator);
    vramp::resume(allocator);
    REQUIRE(log == "-all -one +all -all ");
    try {
        vramp::around_sleep none(vramp_allocator_t(), "none", nullptr, nullptr);
        REQUIRE(false);
    } catch (const vramp::error &error) {
        REQUIRE(error.status() == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }
}

} // namespace

int main() {
    vramp::check(vramp_map_simulated_cards());
    vramp::check(vramp_open("sim:h200", "limit=256MiB", &allocator));
    vramp::check(vramp_stream_create(allocator, &stream));
    scopes();
    moves();
    callbacks();
    {
        vramp::region left(allocator, "weights");
        vramp::check(vramp_close(allocator));
    }
    std::puts("passed");
    return 0;
}
