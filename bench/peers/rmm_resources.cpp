// vramp and RMM's own resources in the loops of RMM's benchmarks, through cuda::mr::any_resource as RMM's containers
// call them. One table on standard output, and the two ratios that are asked for.
//
//   rmm_resources [--only vramp,vramp-prefilled,pool,async,arena] [--seconds 0.5] [TRACE.bin...]
//
// The pool and vramp-prefilled begin with half of the free memory, as in RMM's benchmarks; vramp and async with none.
//
// hit      one allocation and free of one size, one thread: nanoseconds, median of rounds
// threads  pairs of sizes from 512 B to 1 MiB, each thread with a stream: million pairs a second
// random   `random_allocations`: allocations of random sizes, freed in random order: milliseconds
// streams  `multi_stream_allocations`: a vector for each kernel of 4 streams, here a memset: microseconds a round
// replay   `replay`: a trace of trace-to-bin.py, as fast as it goes: nanoseconds an operation
#include <vramp/rmm.hpp>

#include <rmm/cuda_device.hpp>
#include <rmm/device_uvector.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include "replay_common.hpp"

#include <map>
#include <random>

using Resource = cuda::mr::any_resource<cuda::mr::device_accessible>;
using replay::ns_now;

namespace {

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;
double seconds = 0.5;
const char *const NAMES[] = {"vramp", "vramp-prefilled", "pool", "async", "arena"};

Resource make(const std::string &name) {
    if (name == "vramp") return vramp::device_resource(rmm::get_current_cuda_device().value());
    if (name == "vramp-prefilled") {
        vramp::resource_options options;
        options.allocator = "prefill=" + std::to_string(rmm::percent_of_free_device_memory(50));
        return vramp::device_resource(rmm::get_current_cuda_device().value(), options);
    }
    if (name == "pool")
        return rmm::mr::pool_memory_resource(rmm::mr::cuda_memory_resource{},
                                             rmm::percent_of_free_device_memory(50));
    if (name == "async") return rmm::mr::cuda_async_memory_resource();
    if (name == "arena") return rmm::mr::arena_memory_resource(rmm::mr::cuda_memory_resource{});
    throw std::runtime_error("--only: use vramp, vramp-prefilled, pool, async and arena");
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

double hit(Resource &mr, cudaStream_t stream, std::size_t size) {
    auto pair = [&] { mr.deallocate(stream, mr.allocate(stream, size, 256), size, 256); };
    for (int i = 0; i < 1000; i++) pair();
    cudaStreamSynchronize(stream);
    std::vector<double> rounds;
    for (int round = 0; round < 9; round++) {
        const int count = 5000;
        auto start = ns_now();
        for (int i = 0; i < count; i++) pair();
        rounds.push_back(double(ns_now() - start) / count);
        cudaStreamSynchronize(stream);
    }
    return median(rounds);
}

double threads(Resource &mr, const std::vector<cudaStream_t> &streams, int count) {
    std::atomic<int> ready{0}, phase{0};
    std::vector<std::uint64_t> pairs(std::size_t(count) * 16);
    auto body = [&](int id) {
        cudaSetDevice(0);
        cudaStream_t stream = streams[std::size_t(id)];
        replay::Rng rng{0xabcdef + std::uint64_t(id) * 7919};
        std::vector<std::size_t> sizes(4096);
        for (auto &size : sizes)
            size = std::size_t(std::exp(std::log(512.0) + rng.unit() * std::log(2048.0)));
        std::vector<std::pair<void *, std::size_t>> held(32);
        std::uint64_t done = 0;
        auto one = [&] {
            auto &block = held[rng.below(32)];
            if (block.first != nullptr) mr.deallocate(stream, block.first, block.second, 256);
            block.second = sizes[done++ & 4095];
            block.first = mr.allocate(stream, block.second, 256);
        };
        for (auto until = ns_now() + 200000000ull; done < 8192 && ns_now() < until;) one();
        ready++;
        while (phase == 0) std::this_thread::yield();
        auto before = done;
        while (phase.load(std::memory_order_relaxed) == 1) one();
        pairs[std::size_t(id) * 16] = done - before;
        for (auto &block : held) {
            if (block.first != nullptr) mr.deallocate(stream, block.first, block.second, 256);
        }
    };
    std::vector<std::thread> all;
    for (int id = 0; id < count; id++) all.emplace_back(body, id);
    while (ready < count) std::this_thread::yield();
    auto start = ns_now();
    phase = 1;
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    phase = 2;
    auto took = double(ns_now() - start);
    for (auto &thread : all) thread.join();
    cudaDeviceSynchronize();
    std::uint64_t sum = 0;
    for (auto number : pairs) sum += number;
    return double(sum) / took * 1e3;
}

/// 73 of 100 operations allocate, while fewer than `count` were made and the blocks fit in 16 GB.
double random_allocations(Resource &mr, int count, std::size_t largest) {
    std::default_random_engine generator;
    std::uniform_int_distribution<std::size_t> size_of(1, largest), index_of(0, SIZE_MAX / 2);
    std::uniform_int_distribution<int> chance(0, 99);
    std::vector<std::pair<void *, std::size_t>> live;
    std::size_t bytes = 0;
    int made = 0;
    cudaStream_t stream = nullptr;
    auto start = ns_now();
    for (int step = 0; step < 2 * count; step++) {
        auto size = size_of(generator);
        bool allocates = live.empty() ||
                         (chance(generator) < 73 && made < count && bytes + size < 16000 * MiB);
        if (allocates) {
            try {
                live.emplace_back(mr.allocate(stream, size, 256), size);
                made++;
                bytes += size;
                continue;
            } catch (const std::bad_alloc &) {
                if (live.empty()) continue;
            }
        }
        auto &chosen = live[index_of(generator) % live.size()];
        std::swap(chosen, live.back());
        mr.deallocate(stream, live.back().first, live.back().second, 256);
        bytes -= live.back().second;
        live.pop_back();
    }
    auto took = double(ns_now() - start) * 1e-6;
    for (auto &block : live) mr.deallocate(stream, block.first, block.second, 256);
    cudaDeviceSynchronize();
    return took;
}

double multi_stream(Resource &mr, const std::vector<cudaStream_t> &streams, int kernels) {
    std::vector<double> rounds;
    for (int round = 0; round < 200; round++) {
        auto start = ns_now();
        for (int kernel = 0; kernel < kernels; kernel++) {
            cudaStream_t stream = streams[std::size_t(kernel) % 4];
            rmm::device_uvector<std::int64_t> buffer(1, stream, mr);
            cudaMemsetAsync(buffer.data(), 0, sizeof(std::int64_t), stream);
        }
        cudaDeviceSynchronize();
        rounds.push_back(double(ns_now() - start) * 1e-3);
    }
    return median(rounds);
}

double replay_trace(Resource &mr, const replay::Trace &trace, const std::vector<cudaStream_t> &streams) {
    std::vector<double> passes;
    for (int pass = 0; pass < 3; pass++) {
        std::vector<std::pair<void *, std::size_t>> slots(trace.n_slots);
        auto start = ns_now();
        for (const auto &op : trace.ops) {
            auto &slot = slots[op.slot];
            cudaStream_t stream = streams[(op.alloc_stream & ~replay::kAlloc) % streams.size()];
            if (op.alloc_stream & replay::kAlloc)
                slot = {mr.allocate(stream, op.size, 256), op.size};
            else
                mr.deallocate(stream, std::exchange(slot.first, nullptr), op.size, 256);
        }
        passes.push_back(double(ns_now() - start) / double(trace.ops.size()));
        for (auto &slot : slots)
            if (slot.first != nullptr) mr.deallocate(streams[0], slot.first, slot.second, 256);
        cudaDeviceSynchronize();
    }
    return median(passes);
}

} // namespace

int main(int argc, char **argv) {
    std::string only = "vramp,vramp-prefilled,pool,async,arena";
    std::vector<replay::Trace> traces;
    for (int i = 1; i < argc; i++) {
        std::string word = argv[i];
        if (word == "--only" && i + 1 < argc) only = argv[++i];
        else if (word == "--seconds" && i + 1 < argc) seconds = std::atof(argv[++i]);
        else if (traces.emplace_back(); !replay::load(argv[i], traces.back())) return 2;
    }
    replay::init_context();
    std::vector<cudaStream_t> streams;
    for (int i = 0; i < 16; i++) streams.push_back(replay::new_stream());

    std::vector<std::string> rows;
    std::map<std::string, std::map<std::string, double>> results;
    auto note = [&](const std::string &row, const std::string &name, double value) {
        if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
        results[row][name] = value;
    };
    for (std::string name : NAMES) {
        if (("," + only + ",").find("," + name + ",") == std::string::npos) continue;
        // A loop that one resource cannot finish leaves the others their turn.
        auto run = [&](const std::string &row, auto &&loop) {
            try {
                Resource mr = make(name);
                note(row, name, loop(mr));
            } catch (const std::exception &error) {
                std::fprintf(stderr, "%s, %s: %.300s\n", name.c_str(), row.c_str(), error.what());
                note(row, name, -1);
            }
        };
        for (std::size_t size : {256 * std::size_t(1), 4 * KiB, 64 * KiB, MiB, 64 * MiB})
            run("hit, " + std::to_string(size) + " B, ns",
                [&](Resource &mr) { return hit(mr, streams[0], size); });
        for (int count : {1, 4, 16})
            run("threads, " + std::to_string(count) + ", Mpairs/s",
                [&](Resource &mr) { return threads(mr, streams, count); });
        for (int count : {1000, 10000})
            for (std::size_t largest : {std::size_t(1), std::size_t(64), std::size_t(1024)})
                run("random, " + std::to_string(count) + " up to " + std::to_string(largest) + " MiB, ms",
                    [&](Resource &mr) { return random_allocations(mr, count, largest * MiB); });
        run("streams, 4 kernels, us", [&](Resource &mr) { return multi_stream(mr, streams, 4); });
        run("streams, 64 kernels, us", [&](Resource &mr) { return multi_stream(mr, streams, 64); });
        for (const auto &trace : traces)
            run("replay, " + trace.name + ", ns",
                [&](Resource &mr) { return replay_trace(mr, trace, streams); });
    }

    std::printf("%-36s", "");
    for (auto name : NAMES) std::printf("%16s", name);
    std::printf("\n");
    for (const auto &row : rows) {
        std::printf("%-36s", row.c_str());
        for (auto name : NAMES) {
            auto found = results[row].find(name);
            if (found == results[row].end()) std::printf("%16s", "-");
            else if (found->second < 0) std::printf("%16s", "failed");
            else std::printf("%16.3f", found->second);
        }
        std::printf("\n");
    }
    auto at = [&](const char *row, const char *name) { return results[row][name]; };
    if (at("hit, 4096 B, ns", "vramp") > 0 && at("hit, 4096 B, ns", "pool") > 0)
        std::printf("hit of 4 KiB: pool / vramp = %.2f (asked: 3 at least)\n",
                    at("hit, 4096 B, ns", "pool") / at("hit, 4096 B, ns", "vramp"));
    if (at("threads, 16, Mpairs/s", "vramp") > 0 && at("threads, 16, Mpairs/s", "pool") > 0)
        std::printf("16 threads: vramp / pool = %.2f (asked: 10 at least)\n",
                    at("threads, 16, Mpairs/s", "vramp") / at("threads, 16, Mpairs/s", "pool"));
    return 0;
}
