// PyTorch's entry points as PyTorch calls them: by pointers found in the library, with C++
// exceptions let through. The first argument names the case.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "vramp.h"

static void check(bool holds, const char *what) {
    if (!holds) {
        std::fprintf(stderr, "%s: %s\n", what, vramp_last_error());
        std::exit(1);
    }
}

// PyTorch stores std::functions made from the addresses.
using Malloc = void *(*)(ssize_t, int, void *);
using Free = void (*)(void *, size_t, int, void *);
static const auto torch_malloc =
    reinterpret_cast<Malloc>(dlsym(RTLD_DEFAULT, "vramp_torch_malloc"));
static const auto torch_free = reinterpret_cast<Free>(dlsym(RTLD_DEFAULT, "vramp_torch_free"));

static std::string refusal(ssize_t size) {
    try {
        torch_malloc(size, 0, nullptr);
    } catch (const std::runtime_error &error) {
        return error.what();
    }
    return "";
}

static void out_of_memory() {
    void *held = torch_malloc(200 << 20, 0, nullptr);
    for (int i = 0; i < 100; i++) {
        std::string text = refusal(100 << 20);
        check(text.find("CUDA out of memory") == 0, text.c_str());
        check(text.find("tried to allocate 100.00 MiB") != std::string::npos, text.c_str());
        check(text.find("limit of 256.00 MiB") != std::string::npos, text.c_str());
    }
    check(vramp_torch_pool_malloc(100 << 20, 0, nullptr) == nullptr, "null on the MemPool route");
    torch_free(held, 200 << 20, 0, nullptr);
    check(refusal(100 << 20).empty(), "memory is there again");
}

// The hooks around captures. Nothing captures here, so allocations are not affected.
static void pools() {
    void *side = reinterpret_cast<void *>(0x7f00);
    for (uint64_t graph = 0; graph < 3; graph++) {
        vramp_torch_begin_pool(0, 7, 0, nullptr);
        torch_free(torch_malloc(4 << 20, 0, side), 4 << 20, 0, side);
        vramp_torch_end_pool(0, 7, 0);
    }
    // A failed capture has no end hook.
    vramp_torch_begin_pool(0, 8, 0, nullptr);
    vramp_torch_begin_pool(0, 0, 9, nullptr);
    vramp_torch_end_pool(0, 0, 9);
    vramp_torch_release_pool(0, 0, 9);
    for (int graph = 0; graph < 3; graph++) vramp_torch_release_pool(0, 7, 0);
    vramp_allocator_t allocator;
    vramp_stats_t stats{};
    stats.struct_size = sizeof stats;
    check(vramp_torch_allocator(0, &allocator) == VRAMP_OK, "allocator");
    check(vramp_stats(allocator, &stats) == VRAMP_OK && stats.live == 0, "everything is free");
    check(vramp_audit(allocator) == VRAMP_OK, "audit");
    // Reported on stderr, and nothing else.
    vramp_torch_end_pool(0, 7, 0);
    vramp_torch_release_pool(0, 7, 0);
    vramp_torch_release_pool(0, 8, 0);
    vramp_torch_begin_pool(-1, 7, 0, nullptr);
}

static void several_streams() {
    vramp_torch_init(1);
    std::vector<std::thread> threads;
    for (size_t t = 1; t <= 4; t++) {
        threads.emplace_back([t] {
            void *mine = reinterpret_cast<void *>(t << 8), *side = reinterpret_cast<void *>(t << 9);
            for (size_t i = 0; i < 2000; i++) {
                size_t size = (i * 7919 + t) % (4 << 20);
                void *block = torch_malloc(size, 0, mine);
                if (i % 3 == 0) vramp_torch_record_stream(block, side);
                torch_free(block, size, 0, i % 5 == 0 ? side : mine);
            }
        });
    }
    for (auto &thread : threads) thread.join();
    void *block = torch_malloc(5000, 0, nullptr);
    size_t size = 0;
    void *base = vramp_torch_base_alloc(static_cast<char *>(block) + 600, &size);
    check(base == block && size >= 5000, "base allocation");
    torch_free(block, 5000, 0, nullptr);
    vramp_torch_reset();
    vramp_allocator_t allocator;
    vramp_stats_t stats{};
    stats.struct_size = sizeof stats;
    check(vramp_torch_allocator(0, &allocator) == VRAMP_OK, "allocator");
    check(vramp_stats(allocator, &stats) == VRAMP_OK, "stats");
    check(stats.live == 0 && stats.placed == 8001 && stats.freed == 8001, "everything is free");
    check(vramp_audit(allocator) == VRAMP_OK, "audit");
    check(vramp_close(allocator) == VRAMP_ERROR_IN_USE, "close");
    // Reported on stderr, and nothing else.
    torch_free(nullptr, 0, 0, nullptr);
    torch_free(block, 5000, 0, nullptr);
    vramp_torch_record_stream(block, nullptr);
    vramp_torch_base_alloc(block, nullptr);
    vramp_torch_memory_fraction(0.5, 0);
}

static void bad_settings() {
    std::string text = refusal(1);
    check(text.find("is invalid") !=  std::string::npos, text.c_str());
    check(vramp_torch_pool_malloc(1, 0, nullptr) == nullptr, "null");
}

int main(int, char **argv) {
    std::string name = argv[1];
    if (name == "out_of_memory") out_of_memory();
    if (name == "several_streams") several_streams();
    if (name == "pools") pools();
    if (name == "bad_settings") bad_settings();
    std::puts("passed");
}
