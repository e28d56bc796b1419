// PyTorch's interface of allocators, and the differences between its versions. VRAMP_TORCH is the
// version that is compiled against, as 100 * major + minor.

#pragma once

#include <dlfcn.h>

#include <sstream>
#include <string>

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/Exception.h>

#ifndef VRAMP_TORCH
#error "compile with -DVRAMP_TORCH=211 for PyTorch 2.11, and so on"
#endif
#if VRAMP_TORCH < 209
#error "PyTorch 2.9 or newer is needed"
#endif

namespace vramp {

namespace torch_api = c10::cuda::CUDACachingAllocator;

using c10::DataPtr;
using c10::DeviceIndex;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::GatheredContext;
using torch_api::AllocatorTraceTracker;
using torch_api::BlockInfo;
using torch_api::CreateContextFn;
using torch_api::CUDAAllocator;
using torch_api::RecordContext;
using torch_api::SegmentInfo;
using torch_api::SnapshotInfo;
using torch_api::TraceEntry;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using PoolId = c10::cuda::MempoolId_t;

#if VRAMP_TORCH >= 211
using PoolAllocator = std::shared_ptr<CUDAAllocator>;
#else
using PoolAllocator = CUDAAllocator*;
#endif

// Makes PyTorch ask for access between devices again. Its function for that has moved between libraries, and is
// declared in a header of its version alone; where it is missing, PyTorch asks once.
inline void forget_peer_access(int devices) {
  for (const char* name : {"_ZN3c104cuda6detail21init_p2p_access_cacheEl", "_ZN2at4cuda6detail21init_p2p_access_cacheEl"}) {
    if (auto* forget = reinterpret_cast<void (*)(int64_t)>(dlsym(RTLD_DEFAULT, name))) {
      forget(devices);
    }
  }
}

// The text that PyTorch uses for amounts of memory.
inline std::string format_size(uint64_t size) {
  std::ostringstream text;
  text.precision(2);
  text << std::fixed;
  if (size <= 1024) {
    text << size << " bytes";
  } else if (size <= 1048576) {
    text << static_cast<double>(size) / 1024.0 << " KiB";
  } else if (size <= 1073741824ULL) {
    text << static_cast<double>(size) / 1048576.0 << " MiB";
  } else {
    text << static_cast<double>(size) / 1073741824.0 << " GiB";
  }
  return text.str();
}

} // namespace vramp
