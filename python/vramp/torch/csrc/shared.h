// What all parts of the allocator use: PyTorch's own allocator, the functions of vramp, and the devices.

#pragma once

#include <algorithm>
#include <atomic>

#include "device.h"
#include "library.h"
#include "torch_api.h"

namespace vramp {

struct Shared {
  Shared(CUDAAllocator* native_allocator, const char* library)
      : native(native_allocator), vramp(library) {}

  // Always throws, with vramp's last failure.
  void fail(const char* what) const {
    TORCH_CHECK(false, "vramp ", what, ": ", vramp.last_error());
  }

  // Returns zeros for a device that was not used.
  vramp_torch_memory_t memory_of(DeviceIndex device) const {
    vramp_torch_memory_t memory{};
    if (vramp.memory(device, &memory) != VRAMP_OK) {
      fail("cannot read the statistics");
    }
    return memory;
  }

  // Sets the part of a device's memory that PyTorch allows the process.
  void set_fraction(Device& device, double fraction) const {
    int64_t foreign;
    {
      std::lock_guard<std::recursive_mutex> lock(device.mutex);
      foreign = device.foreign;
    }
    limit(device, fraction, foreign);
    device.fraction.store(fraction);
  }

  // Limits vramp to a fraction of the device less what pools with an allocator of their own have.
  void limit(const Device& device, double fraction, int64_t foreign) const {
    if (foreign != 0) {
      // PyTorch's allocator uses the device already.
      if (vramp.open(device.index) != VRAMP_OK) {
        fail("cannot set the memory fraction");
      }
      double total = static_cast<double>(memory_of(device.index).device_total);
      fraction = std::clamp(fraction - static_cast<double>(foreign) / total, 0.0, 1.0);
    }
    if (vramp.set_fraction(device.index, fraction) != VRAMP_OK) {
      fail("cannot set the memory fraction");
    }
  }

  void report_to_profiler(const Device& device, void* address, int64_t size,
                          int64_t allocated) const {
    if (C10_LIKELY(!c10::memoryProfilingEnabled())) {
      return;
    }
    uint64_t reserved = 0;
    (void)vramp.reserved(device.index, &reserved);
    c10::reportMemoryUsageToProfiler(address, size, static_cast<size_t>(allocated), reserved,
                                     device.cuda());
  }

  CUDAAllocator* const native;
  const Library vramp;
  Devices devices;
  // True once a tensor was sent to another process.
  std::atomic<bool> has_sent{false};
};

} // namespace vramp
