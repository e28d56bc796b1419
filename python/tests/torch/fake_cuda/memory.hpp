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

// One physical allocation: a file in memory, so that several mappings of it show the same bytes, also in
// other processes. An imported one counts against no device here: it does in the process that made it.
struct Physical {
  int file;
  size_t size;
  int device;
  size_t references;
  bool imported;
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
  // The file of the allocation at an address, its first address and size, for another process.
  bool file_of(const void* pointer, int* file, void** start, size_t* size);
  // Maps another process's allocation. Owns `file`.
  void* open(int file, size_t size, int device);

  void* allocate_host(size_t size);
  bool free_host(void* pointer);
  void register_host(void* pointer, size_t size);
  bool unregister_host(void* pointer);

  // The device whose memory has this address, or -1.
  int device_of(const void* pointer);
  bool is_host(const void* pointer);
  // Whether a whole range is readable and writable device memory of this runtime.
  bool is_device_range(const void* pointer, size_t size);
  // Whether a device may access a whole range: its own memory, what cuMemSetAccess granted it, and memory of
  // cudaMalloc of a device whose access was enabled.
  bool may_access(int device, const void* pointer, size_t size);
  // Whether a copy that a device makes may name a range: what it may access, and memory of cudaMalloc of any
  // device, which the driver copies through the host if need be.
  bool may_copy(int device, const void* pointer, size_t size);

  // Whether the two devices have a link.
  bool are_peers(int device, int other) const;
  // Allows a device to access memory of cudaMalloc of another one. False if it was allowed before.
  bool enable_peer(int device, int other);
  // Allows devices to access mapped memory, or takes it. False if not all of the range is mapped.
  bool set_access(void* pointer, size_t size, int device, bool allowed);
  // Successful calls of cuMemMap and cuMemUnmap, and the bytes mapped now.
  size_t calls_of_map();
  size_t calls_of_unmap();
  size_t mapped();
  // Watches a range; returns the number of calls of cuMemUnmap that touched watched ranges so far.
  size_t watch(void* pointer, size_t size);

  // Driver: address ranges and physical memory.
  void* reserve(size_t size, size_t align);
  bool unreserve(void* pointer, size_t size);
  Physical* create(int device, size_t size);
  // A descriptor of a handle's memory, which the caller owns, or -1.
  int export_file(Physical* handle);
  Physical* import_file(int file, int device);
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
    // The file of memory of cudaMalloc.
    int file;
    // One bit for each device that may access mapped memory.
    uint64_t access;
    // True for memory of cudaMalloc of another process.
    bool imported;
  };
  Memory();
  std::map<uintptr_t, Range>::iterator find(const void* pointer);
  void drop(Physical* handle);
  void* map_file(int file, size_t size, int device, bool imported = false);

  std::mutex mutex_;
  size_t capacity_;
  bool has_links_;
  size_t maps_ = 0, unmaps_ = 0, mapped_ = 0;
  std::vector<size_t> used_, mallocs_, frees_;
  // Bits of the devices whose memory of cudaMalloc each device may access.
  std::vector<uint64_t> enabled_;
  std::map<uintptr_t, Range> ranges_;
  std::map<uintptr_t, size_t> host_, reserved_, watched_;
  size_t touched_ = 0;
  std::map<Physical*, bool> handles_;
};

}  // namespace fake
