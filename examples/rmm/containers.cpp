// RMM's containers on vramp, on a card: fills, copies, grows and shrinks them on two streams, spills a cache when
// memory is short, and reserves memory.
//
//     ./containers [DEVICE]

#include <vramp/rmm.hpp>

#include <rmm/cuda_device.hpp>
#include <rmm/cuda_stream.hpp>
#include <rmm/device_buffer.hpp>
#include <rmm/device_scalar.hpp>
#include <rmm/device_uvector.hpp>
#include <rmm/mr/per_device_resource.hpp>

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

void require(bool condition, const char *what) {
    if (!condition) throw std::runtime_error(what);
}

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// The containers take their memory from the current device resource.
void fill_and_copy(cudaStream_t stream) {
    std::vector<int> numbers(3 * MiB);
    std::iota(numbers.begin(), numbers.end(), 0);
    rmm::device_uvector<int> first(numbers.size(), stream);
    check(cudaMemcpyAsync(first.data(), numbers.data(), numbers.size() * sizeof(int),
                          cudaMemcpyHostToDevice, stream));
    rmm::device_uvector<int> second(first, stream);
    second.resize(5 * MiB, stream);
    second.set_element_async(4 * MiB, numbers[7], stream);
    require(second.element(3 * MiB - 1, stream) == numbers.back(), "a copy differs");
    require(second.element(4 * MiB, stream) == 7, "an element differs");
    first.resize(10, stream);
    first.shrink_to_fit(stream);
    require(first.capacity() == 10 && first.element(9, stream) == 9, "a short vector differs");

    const double value = 1.5;
    rmm::device_scalar<double> scalar(value, stream);
    require(scalar.value(stream) == value, "a scalar differs");
    rmm::device_buffer empty(0, stream), large(100 * MiB, stream);
    large = rmm::device_buffer(10 * MiB, stream);
    require(large.size() == 10 * MiB && empty.data() == nullptr, "a buffer differs");
}

// Memory is freed on another stream than it was allocated for, after the work of both.
void use_two_streams(cudaStream_t one, cudaStream_t other) {
    cudaEvent_t written;
    check(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
    for (int round = 0; round < 1000; round++) {
        rmm::device_buffer buffer(std::size_t(round + 1) * 4096, one);
        check(cudaMemsetAsync(buffer.data(), round & 0xff, buffer.size(), one));
        check(cudaEventRecord(written, one));
        check(cudaStreamWaitEvent(other, written, 0));
        unsigned char last = 0;
        check(cudaMemcpyAsync(&last, static_cast<unsigned char *>(buffer.data()) + buffer.size() - 1, 1,
                              cudaMemcpyDeviceToHost, other));
        buffer.set_stream(other);
        buffer = rmm::device_buffer();
        check(cudaStreamSynchronize(other));
        require(last == (round & 0xff), "bytes differ");
    }
    check(cudaEventDestroy(written));
}

void spill_when_short(const vramp::resource_options &device, cudaStream_t stream) {
    vramp::resource_options options = device;
    options.allocator = "limit=256MiB";
    vramp::device_resource small(options);
    auto cache = std::make_unique<rmm::device_buffer>(200 * MiB, stream, small);
    {
        auto spilling = small.on_shortage([&](const vramp_shortage_t &) {
            bool has_some = cache != nullptr;
            cache.reset();
            return has_some;
        });
        rmm::device_buffer needed(100 * MiB, stream, small);
        require(cache == nullptr, "the cache was not dropped");
        try {
            rmm::device_buffer more(200 * MiB, stream, small);
            require(false, "the limit was passed");
        } catch (const rmm::out_of_memory &) {
            // Nothing is left to spill.
        }
    }
    small.forget(stream);
}

void reserve(const vramp::resource_options &device, cudaStream_t stream) {
    vramp::resource_options options = device;
    options.allocator = "limit=256MiB";
    options.host_bytes = 16 * MiB;
    vramp::device_resource all(options);
    vramp::reservation task(all, 128 * MiB);
    {
        rmm::device_buffer paid(100 * MiB, stream, task.resource());
        require(task.info().used >= 100 * MiB, "the reservation did not pay");
    }
    require(task.info().used == 0, "a free did not pay back");
    vramp::pinned_resource pinned(all);
    void *staging = pinned.allocate(stream, 4 * MiB, 256);
    rmm::device_buffer buffer(4 * MiB, stream, all);
    check(cudaMemcpyAsync(buffer.data(), staging, 4 * MiB, cudaMemcpyHostToDevice, stream));
    pinned.deallocate(stream, staging, 4 * MiB, 256);
    all.forget(stream);
}

} // namespace

int main(int argc, char **argv) {
    try {
        vramp::resource_options options;
        options.device = argc > 1 ? argv[1] : "cuda:" + std::to_string(rmm::get_current_cuda_device().value());
        vramp::device_resource resource(options);
        rmm::mr::set_current_device_resource(resource);
        cudaStream_t one, other;
        check(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
        check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));

        fill_and_copy(one);
        fill_and_copy(nullptr);
        fill_and_copy(cudaStreamPerThread);
        use_two_streams(one, other);
        spill_when_short(options, one);
        reserve(options, one);
        vramp_stats_t stats = resource.stats();
        std::printf("%llu allocations, %llu hits, peak %.1f MiB\n",
                    static_cast<unsigned long long>(stats.placed),
                    static_cast<unsigned long long>(stats.hits),
                    static_cast<double>(stats.live_peak) / static_cast<double>(MiB));
        require(stats.live == 0, "memory is left");

        // A stream is forgotten before it is destroyed.
        resource.forget(one);
        resource.forget(other);
        check(cudaStreamDestroy(one));
        check(cudaStreamDestroy(other));
        rmm::mr::reset_current_device_resource();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    std::puts("passed");
    return 0;
}
