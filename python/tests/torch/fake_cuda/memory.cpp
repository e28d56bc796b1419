#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

namespace fake {

namespace {

size_t number_from_environment(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// A file of `size` bytes in memory, or -1.
int new_file(size_t size) {
  int file = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (file < 0) return -1;
  if (!ftruncate(file, static_cast<off_t>(size))) return file;
  close(file);
  return -1;
}

// Maps `size` bytes at a multiple of `align`; `start` and `length` are what has to be unmapped.
void* map_aligned(size_t size, size_t align, int protection, void** start, size_t* length) {
  *length = size + align;
  *start = mmap(nullptr, *length, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*start == MAP_FAILED) return nullptr;
  auto address = reinterpret_cast<uintptr_t>(*start);
  return reinterpret_cast<void*>((address + align - 1) / align * align);
}

// The devices that CUDA_VISIBLE_DEVICES leaves: those before the first number that no device has.
size_t visible_devices() {
  const size_t devices = number_from_environment("FAKE_CUDA_DEVICES", 1);
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) return devices;
  for (size_t visible = 0;; ++visible) {
    char* end = nullptr;
    const long number = std::strtol(text, &end, 10);
    if (end == text || number < 0 || size_t(number) >= devices) return visible;
    if (*end != ',') return visible + 1;
    text = end + 1;
  }
}

}  // namespace

Memory& Memory::instance() {
  // Never destroyed: PyTorch frees memory while the process ends.
  static Memory* memory = new Memory;
  return *memory;
}

Memory::Memory()
    : capacity_(number_from_environment("FAKE_CUDA_MEMORY", size_t{1} << 30)),
      used_(visible_devices()),
      mallocs_(used_.size()),
      frees_(used_.size()),
      enabled_(used_.size()) {
  has_links_ = number_from_environment("FAKE_CUDA_LINKS", 1) != 0;
}

size_t Memory::used(int device) {
  std::lock_guard lock(mutex_);
  return used_[device];
}

size_t Memory::mallocs(int device) {
  std::lock_guard lock(mutex_);
  return mallocs_[device];
}

size_t Memory::frees(int device) {
  std::lock_guard lock(mutex_);
  return frees_[device];
}

void* Memory::allocate(int device, size_t size) {
  std::lock_guard lock(mutex_);
  if (size > capacity_ - used_[device]) return nullptr;
  void* pointer = map_file(new_file(size), size, device);
  if (!pointer) return nullptr;
  used_[device] += size;
  mallocs_[device]++;
  return pointer;
}

void* Memory::open(int file, size_t size, int device) {
  std::lock_guard lock(mutex_);
  return map_file(file, size, device, true);
}

// Owns `file`.
void* Memory::map_file(int file, size_t size, int device, bool imported) {
  if (file < 0) return nullptr;
  Range range{size, device, nullptr, 0, nullptr, file, 0, imported};
  void* pointer = map_aligned(size, kDeviceAlign, PROT_NONE, &range.start_of_mapping, &range.size_of_mapping);
  if (!pointer || mmap(pointer, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  ranges_[reinterpret_cast<uintptr_t>(pointer)] = range;
  return pointer;
}

bool Memory::file_of(const void* pointer, int* file, void** start, size_t* size) {
  std::lock_guard lock(mutex_);
  auto range = find(pointer);
  if (range == ranges_.end() || range->second.file < 0) return false;
  *file = range->second.file;
  *start = reinterpret_cast<void*>(range->first);
  *size = range->second.size;
  return true;
}

bool Memory::free(void* pointer) {
  std::lock_guard lock(mutex_);
  auto found = ranges_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == ranges_.end() || found->second.handle) return false;
  Range range = found->second;
  munmap(range.start_of_mapping, range.size_of_mapping);
  close(range.file);
  if (!range.imported) {
    used_[range.device] -= range.size;
    frees_[range.device]++;
  }
  ranges_.erase(found);
  return true;
}

void* Memory::allocate_host(size_t size) {
  void* pointer = nullptr;
  if (posix_memalign(&pointer, 4096, size ? size : 1)) return nullptr;
  register_host(pointer, size);
  return pointer;
}

bool Memory::free_host(void* pointer) {
  if (!unregister_host(pointer)) return false;
  std::free(pointer);
  return true;
}

void Memory::register_host(void* pointer, size_t size) {
  std::lock_guard lock(mutex_);
  host_[reinterpret_cast<uintptr_t>(pointer)] = size;
}

bool Memory::unregister_host(void* pointer) {
  std::lock_guard lock(mutex_);
  return host_.erase(reinterpret_cast<uintptr_t>(pointer)) == 1;
}

std::map<uintptr_t, Memory::Range>::iterator Memory::find(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = ranges_.upper_bound(address);
  if (after == ranges_.begin()) return ranges_.end();
  auto range = std::prev(after);
  return address < range->first + range->second.size ? range : ranges_.end();
}

int Memory::device_of(const void* pointer) {
  std::lock_guard lock(mutex_);
  auto range = find(pointer);
  return range == ranges_.end() ? -1 : range->second.device;
}

bool Memory::is_host(const void* pointer) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = host_.upper_bound(address);
  if (after == host_.begin()) return false;
  auto range = std::prev(after);
  return address < range->first + range->second;
}

bool Memory::is_device_range(const void* pointer, size_t size) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto end = address + size;
  while (address < end) {
    auto range = find(reinterpret_cast<void*>(address));
    if (range == ranges_.end()) return false;
    address = range->first + range->second.size;
  }
  return true;
}

void* Memory::reserve(size_t size, size_t align) {
  std::lock_guard lock(mutex_);
  void* start;
  size_t length;
  void* pointer = map_aligned(size, align > kDeviceAlign ? align : kDeviceAlign, PROT_NONE, &start, &length);
  if (!pointer) return nullptr;
  // The ends that alignment left over go back at once.
  auto first = static_cast<char*>(start), wanted = static_cast<char*>(pointer);
  if (wanted > first) munmap(first, wanted - first);
  if (first + length > wanted + size) munmap(wanted + size, first + length - wanted - size);
  reserved_[reinterpret_cast<uintptr_t>(pointer)] = size;
  return pointer;
}

bool Memory::unreserve(void* pointer, size_t size) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto found = reserved_.find(address);
  if (found == reserved_.end() || found->second != size) return false;
  auto mapped = ranges_.lower_bound(address);
  if (mapped != ranges_.end() && mapped->first < address + size) return false;
  munmap(pointer, size);
  reserved_.erase(found);
  return true;
}

Physical* Memory::create(int device, size_t size) {
  std::lock_guard lock(mutex_);
  if (size > capacity_ - used_[device]) return nullptr;
  int file = new_file(size);
  if (file < 0) return nullptr;
  used_[device] += size;
  mallocs_[device]++;
  auto* handle = new Physical{file, size, device, 1, false};
  handles_[handle] = true;
  return handle;
}

int Memory::export_file(Physical* handle) {
  std::lock_guard lock(mutex_);
  return handles_.count(handle) ? fcntl(handle->file, F_DUPFD_CLOEXEC, 0) : -1;
}

Physical* Memory::import_file(int file, int device) {
  std::lock_guard lock(mutex_);
  struct stat about{};
  if (fstat(file, &about)) return nullptr;
  int own = fcntl(file, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return nullptr;
  auto* handle = new Physical{own, static_cast<size_t>(about.st_size), device, 1, true};
  handles_[handle] = true;
  return handle;
}

void Memory::drop(Physical* handle) {
  if (--handle->references) return;
  close(handle->file);
  if (!handle->imported) {
    used_[handle->device] -= handle->size;
    frees_[handle->device]++;
  }
  handles_.erase(handle);
  delete handle;
}

bool Memory::release(Physical* handle) {
  std::lock_guard lock(mutex_);
  if (!handles_.count(handle)) return false;
  drop(handle);
  return true;
}

bool Memory::map(void* pointer, size_t size, size_t offset, Physical* handle) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  if (!handles_.count(handle) || offset + size > handle->size) return false;
  auto after = ranges_.lower_bound(address);
  if (after != ranges_.end() && after->first < address + size) return false;
  if (mmap(pointer, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, handle->file,
           static_cast<off_t>(offset)) == MAP_FAILED) {
    return false;
  }
  handle->references++;
  maps_++;
  mapped_ += size;
  ranges_[address] = Range{size, handle->device, pointer, size, handle, -1, 0, false};
  return true;
}

bool Memory::unmap(void* pointer, size_t size) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto first = ranges_.find(address);
  if (first == ranges_.end() || !first->second.handle) return false;
  while (first != ranges_.end() && first->first < address + size) {
    Physical* handle = first->second.handle;
    mapped_ -= first->second.size;
    first = ranges_.erase(first);
    drop(handle);
  }
  unmaps_++;
  for (auto& [start, length] : watched_) {
    if (start < address + size && address < start + length) {
      touched_++;
      break;
    }
  }
  mmap(pointer, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  return true;
}

Physical* Memory::retain(const void* pointer) {
  std::lock_guard lock(mutex_);
  auto range = find(pointer);
  if (range == ranges_.end() || !range->second.handle) return nullptr;
  range->second.handle->references++;
  return range->second.handle;
}

bool Memory::may_access(int device, const void* pointer, size_t size) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto end = address + size;
  while (address < end) {
    auto range = find(reinterpret_cast<void*>(address));
    if (range == ranges_.end()) return false;
    const Range& found = range->second;
    bool allowed = found.handle ? found.access >> device & 1
                                : found.device == device || (enabled_[device] >> found.device & 1);
    if (!allowed) return false;
    address = range->first + found.size;
  }
  return true;
}

bool Memory::may_copy(int device, const void* pointer, size_t size) {
  int file;
  void* start;
  size_t whole;
  return file_of(pointer, &file, &start, &whole) || may_access(device, pointer, size);
}

bool Memory::are_peers(int device, int other) const {
  auto is_device = [&](int number) { return 0 <= number && size_t(number) < used_.size(); };
  return has_links_ && device != other && is_device(device) && is_device(other);
}

bool Memory::enable_peer(int device, int other) {
  std::lock_guard lock(mutex_);
  uint64_t bit = uint64_t{1} << other;
  bool is_new = !(enabled_[device] & bit);
  enabled_[device] |= bit;
  return is_new;
}

bool Memory::set_access(void* pointer, size_t size, int device, bool allowed) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(pointer), end = address + size;
  for (auto at = address; at < end;) {
    auto range = ranges_.find(at);
    if (range == ranges_.end() || !range->second.handle) return false;
    at += range->second.size;
  }
  for (auto at = address; at < end;) {
    Range& range = ranges_[at];
    uint64_t bit = uint64_t{1} << device;
    range.access = allowed ? range.access | bit : range.access & ~bit;
    at += range.size;
  }
  return true;
}

size_t Memory::calls_of_map() {
  std::lock_guard lock(mutex_);
  return maps_;
}

size_t Memory::calls_of_unmap() {
  std::lock_guard lock(mutex_);
  return unmaps_;
}

size_t Memory::watch(void* pointer, size_t size) {
  std::lock_guard lock(mutex_);
  if (size) watched_[reinterpret_cast<uintptr_t>(pointer)] = size;
  return touched_;
}

size_t Memory::mapped() {
  std::lock_guard lock(mutex_);
  return mapped_;
}

bool Memory::is_handle(Physical* handle) {
  std::lock_guard lock(mutex_);
  return handles_.count(handle) == 1;
}

}  // namespace fake
