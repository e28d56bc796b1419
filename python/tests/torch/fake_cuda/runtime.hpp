// What the parts of the fake CUDA runtime share.

#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "streams.hpp"

namespace fake {

// The calling thread's device.
int& current_device();
// Every stream that was created and not destroyed, with the default streams. Needs the stream lock.
std::vector<std::shared_ptr<Stream>> all_streams();
// Keeps `error` for cudaGetLastError and returns it.
cudaError_t fail(cudaError_t error);
// A function of the driver by its name, or null.
void* driver_function(const char* name);

}  // namespace fake
