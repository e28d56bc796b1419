// Included before each of RMM's tests by rmm_tests.py: vramp's resource in place of RMM's base resource.
#pragma once
#include <vramp/rmm.hpp>

#include <rmm/cuda_stream.hpp>
#include <rmm/mr/per_device_resource.hpp>

#include <cstdlib>

namespace vramp_tests {

/// The one allocator of the program, which ends with it.
inline vramp::device_resource &shared() {
    static auto *all = [] {
        vramp::resource_options options;
        const char *device = std::getenv("VRAMP_DEVICE");
        options.device = device == nullptr ? "cuda:0" : device;
        return new vramp::device_resource(options);
    }();
    return *all;
}

/// For `rmm::mr::cuda_memory_resource`, of which all objects are equal.
struct resource : vramp::device_resource {
    resource() : vramp::device_resource(shared()) {}
};

/// For `rmm::cuda_stream`: vramp is told before it is destroyed.
struct stream : rmm::cuda_stream {
    using rmm::cuda_stream::cuda_stream;
    stream(stream &&) = default;
    stream &operator=(stream &&) = default;
    ~stream() {
        if (is_valid()) shared().forget(cuda::stream_ref(value()));
    }
};

} // namespace vramp_tests
