// Makes vramp the CUDA allocator of a PyTorch process. The only file that is compiled: the class is in
// allocator.h, and its parts in the other headers.

#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>

#include "allocator.h"

extern "C" {

// Returns 0 if this file works with PyTorch's libraries: exceptions pass both ways, and text is formatted. A
// compiler may link an unwinder or a C++ library of its own, and two of them in a process do not agree.
__attribute__((visibility("default"))) int vramp_torch_self_test() {
  using namespace vramp;
  int caught = 0;
  try {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "thrown here: ", format_size(3 << 19), ", ", 1);
  } catch (const c10::OutOfMemoryError& error) {
    caught += std::string(error.what_without_backtrace()) == "thrown here: 1.50 MiB, 1" ? 1 : 0;
  }
  try {
    // No device has this index.
    (void)torch_api::allocator.load()->getDeviceStats(127);
  } catch (const c10::Error&) {
    ++caught;
  }
  return caught == 2 ? 0 : 1;
}

// Pools that the thread makes from now on are for memory that libraries register, or are not.
__attribute__((visibility("default"))) void vramp_torch_make_comm_pools(int on) {
  vramp::makes_comm_pool = on != 0;
}

// Sets what says whether the process takes part in a group of several. It is called when a capture begins.
__attribute__((visibility("default"))) void vramp_torch_ask_distributed(int (*ask)()) {
  vramp::is_distributed = ask;
}

// Makes vramp the CUDA allocator of this process, with the functions of the loaded library at this
// path. Returns null, or why it cannot. The text is valid until the thread's next call.
__attribute__((visibility("default"))) const char* vramp_torch_install(const char* library) {
  using namespace vramp;
  static std::mutex mutex;
  static thread_local std::string failure;
  std::lock_guard<std::mutex> lock(mutex);
  if (installed != nullptr) {
    return nullptr;
  }
  try {
    CUDAAllocator* native = torch_api::allocator.load();
    if (native->initialized()) {
      throw std::runtime_error(
          "PyTorch has initialized CUDA already: call vramp.torch.enable() before the first use of CUDA");
    }
    if (native->name() != "native") {
      throw std::runtime_error("PyTorch's allocator is " + native->name() +
                               ", and vramp needs its native one: remove backend from "
                               "PYTORCH_CUDA_ALLOC_CONF, or the other allocator");
    }
    // Never destroyed: tensors are freed by destructors of globals.
    auto* allocator = new Allocator(native, library);
    std::string version = allocator->library().version();
    if (version != VRAMP_VERSION_STRING) {
      throw std::runtime_error("this file was compiled for vramp " VRAMP_VERSION_STRING
                               ", and the library is of version " + version);
    }
    installed = allocator;
    torch_api::allocator.store(allocator);
    c10::SetAllocator(c10::DeviceType::CUDA, allocator);
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
  return nullptr;
}

} // extern "C"
