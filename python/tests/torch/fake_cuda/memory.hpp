// Device and host memory of the fake CUDA runtime.
//
// A device allocation is a range of host addresses without storage until it is touched, so a card may be
// larger than the machine. Each device counts its bytes against a capacity. Alignment is 2 MiB, as on a
// card for large allocations.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace fake {

inline constexpr size_t kDeviceAlign = size_t{2} << 20;

// One physical allocation of the driver's virtual memory functions: a file in memory, so that several
// mappings of one handle show the same bytes.
struct Physical {
  int file;
  size_t size;
  int device;
  size_t references;
};

class Memory {
 public:
  static Memory& instance();

  size_t device_count() const { return used_.size(); }
  size_t capacity() const { return capacity_; }
  size_t used(int device);
  // Successful calls of cudaMalloc and cuMemCreate, of cudaFree and the last release of a handle.
  size_t mallocs(int device);
  size_t frees(int device);

  // Returns null if the device has too few bytes left.
  void* allocate(int device, size_t size);
  bool free(void* pointer);

  void* allocate_host(size_t size);
  bool free_host(void* pointer);
  void register_host(void* pointer, size_t size);
  bool unregister_host(void* pointer);

  // The device whose memory has this address, or -1.
  int device_of(const void* pointer);
  bool is_host(const void* pointer);
  // Whether a whole range is readable and writable device memory of this runtime.
  bool is_device_range(const void* pointer, size_t size);

  // Driver: address ranges and physical memory.
  void* reserve(size_t size, size_t align);
  bool unreserve(void* pointer, size_t size);
  Physical* create(int device, size_t size);
  bool release(Physical* handle);
  bool map(void* pointer, size_t size, size_t offset, Physical* handle);
  bool unmap(void* pointer, size_t size);
  Physical* retain(const void* pointer);
  bool is_handle(Physical* handle);

 private:
  struct Range {
    size_t size;
    int device;
    void* start_of_mapping;
    size_t size_of_mapping;
    Physical* handle;
  };
  Memory();
  std::map<uintptr_t, Range>::iterator find(const void* pointer);
  void drop(Physical* handle);

  std::mutex mutex_;
  size_t capacity_;
  std::vector<size_t> used_, mallocs_, frees_;
  std::map<uintptr_t, Range> ranges_;
  std::map<uintptr_t, size_t> host_, reserved_;
  std::map<Physical*, bool> handles_;
};

}  // namespace fake
