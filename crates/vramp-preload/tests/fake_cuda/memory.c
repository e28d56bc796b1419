// Memory: allocations, virtual memory, pools, and what a program asks about addresses.
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct Handle {
  int fd, device, holders;
  bool is_released;
  size_t size;
};

struct Pool {
  int device;
  uint64_t threshold, used, used_high;
};

// Sorted by start.
struct Table {
  struct Range *ranges;
  size_t count, room;
};

static struct Table blocks, reservations;
static uint64_t used[DEVICES];
static struct Pool pools[DEVICES], *chosen[DEVICES];

static uint64_t memory(void) {
  const char *text = getenv("FAKE_CUDA_MEMORY");
  return text ? strtoull(text, NULL, 10) : 1ull << 30;
}

// The index of the first range that begins above an address.
static size_t above(const struct Table *table, uint64_t address) {
  size_t low = 0, high = table->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (table->ranges[middle].start <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static struct Range *find(struct Table *table, uint64_t address) {
  size_t at = above(table, address);
  if (!at) return NULL;
  struct Range *range = &table->ranges[at - 1];
  return address - range->start < range->size ? range : NULL;
}

static void insert(struct Table *table, struct Range range) {
  if (table->count == table->room) {
    table->room = table->room ? 2 * table->room : 64;
    table->ranges = realloc(table->ranges, table->room * sizeof *table->ranges);
  }
  size_t at = above(table, range.start);
  memmove(table->ranges + at + 1, table->ranges + at, (table->count - at) * sizeof range);
  table->ranges[at] = range;
  ++table->count;
}

static void erase(struct Table *table, struct Range *range) {
  size_t at = (size_t)(range - table->ranges);
  memmove(range, range + 1, (--table->count - at) * sizeof *range);
}

struct Range *range_of(CUdeviceptr address) { return find(&blocks, address); }

bool is_accessible(CUdeviceptr address, size_t size) {
  uint64_t end = address + size;
  while (address < end) {
    struct Range *range = find(&blocks, address);
    if (!range || !range->is_accessible) return false;
    address = range->start + range->size;
  }
  return true;
}

static bool take(int device, size_t size) {
  if (size > memory() - used[device]) return false;
  used[device] += size;
  return true;
}

// A file for memory of a device, whose name says which.
static int memory_file(int device, size_t size) {
  char name[32];
  snprintf(name, sizeof name, "fake-cuda-%d", device);
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, (off_t)size)) close(fd), fd = -1;
  return fd;
}

CUresult allocate(struct Context *context, size_t size, struct Pool *pool, CUdeviceptr *address) {
  if (!size || !address) return INVALID_VALUE;
  int device = pool ? pool->device : context->device;
  size_t rounded = (size + 511) & ~(size_t)511;
  if (rounded < size || !take(device, rounded)) return OUT_OF_MEMORY;
  int fd = memory_file(device, rounded);
  void *place = fd < 0 ? MAP_FAILED : mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (place == MAP_FAILED) return used[device] -= rounded, OUT_OF_MEMORY;
  *address = (uint64_t)place;
  if (pool) {
    pool->used += rounded;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
  }
  insert(&blocks, (struct Range){*address, rounded, DEVICE_MEMORY, context, fd, device, true, NULL, pool});
  return OK;
}

static void drop(struct Range *range) {
  if (range->kind == DEVICE_MEMORY) used[range->device] -= range->size;
  if (range->pool) range->pool->used -= range->size;
  munmap((void *)range->start, range->size);
  if (range->fd >= 0) close(range->fd);
  erase(&blocks, range);
}

CUresult release(CUdeviceptr address) {
  struct Range *range = range_of(address);
  if (!range || range->start != address || (range->kind != DEVICE_MEMORY && range->kind != MANAGED)) return INVALID_VALUE;
  drop(range);
  return OK;
}

void release_all_of(const struct Context *context) {
  for (size_t at = blocks.count; at-- > 0;) {
    struct Range *range = &blocks.ranges[at];
    if (range->context == context && (range->kind == DEVICE_MEMORY || range->kind == MANAGED)) drop(range);
  }
}

struct Pool *default_pool(int device) {
  if (pools[device].device != device) pools[device].device = device;
  return &pools[device];
}

int device_of_pool(const struct Pool *pool) { return pool->device; }

// --- Allocations of the program ---

#define CONTEXT()                        \
  struct Context *context = current();   \
  if (!context) return INVALID_CONTEXT

static CUresult locked_allocate(struct Context *context, size_t size, CUdeviceptr *address) {
  pthread_mutex_lock(&lock);
  CUresult code = allocate(context, size, NULL, address);
  pthread_mutex_unlock(&lock);
  return code;
}

PUBLIC CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
  ENTER("cuMemAlloc_v2");
  CONTEXT();
  return locked_allocate(context, size, address);
}

PUBLIC CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned element) {
  ENTER("cuMemAllocPitch_v2");
  CONTEXT();
  if (!pitch || (element != 4 && element != 8 && element != 16)) return INVALID_VALUE;
  *pitch = (width + 511) & ~(size_t)511;
  return locked_allocate(context, *pitch * height, address);
}

PUBLIC CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER("cuMemFree_v2");
  CONTEXT();
  if (!address) return OK;
  synchronize(context->device);
  pthread_mutex_lock(&lock);
  CUresult code = release(address);
  pthread_mutex_unlock(&lock);
  return code;
}

static CUresult host(struct Context *context, size_t size, enum Kind kind, uint64_t *address) {
  if (!size || !address) return INVALID_VALUE;
  size = (size + 4095) & ~(size_t)4095;
  void *place = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return OUT_OF_MEMORY;
  *address = (uint64_t)place;
  pthread_mutex_lock(&lock);
  insert(&blocks, (struct Range){*address, size, kind, context, -1, context->device, true, NULL, NULL});
  pthread_mutex_unlock(&lock);
  return OK;
}

PUBLIC CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags) {
  ENTER("cuMemAllocManaged");
  CONTEXT();
  (void)flags;
  return host(context, size, MANAGED, address);
}

PUBLIC CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags) {
  ENTER("cuMemHostAlloc");
  CONTEXT();
  (void)flags;
  return host(context, size, HOST, (uint64_t *)address);
}

PUBLIC CUresult cuMemAllocHost_v2(void **address, size_t size) { return cuMemHostAlloc(address, size, 0); }

PUBLIC CUresult cuMemFreeHost(void *address) {
  ENTER("cuMemFreeHost");
  pthread_mutex_lock(&lock);
  struct Range *range = range_of((uint64_t)address);
  bool is_host = range && range->kind == HOST && range->start == (uint64_t)address;
  if (is_host) drop(range);
  pthread_mutex_unlock(&lock);
  return is_host ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
  ENTER("cuMemHostRegister_v2");
  (void)flags;
  return address && size ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuMemHostUnregister(void *address) {
  ENTER("cuMemHostUnregister");
  return address ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
  ENTER("cuMemGetInfo_v2");
  CONTEXT();
  if (!available || !total) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  *total = memory();
  *available = memory() - used[context->device];
  pthread_mutex_unlock(&lock);
  return OK;
}

PUBLIC CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice device) {
  ENTER("cuDeviceTotalMem_v2");
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  return *total = memory(), OK;
}

// --- What a program asks about addresses ---

PUBLIC CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
  ENTER("cuMemGetAddressRange_v2");
  CONTEXT();
  (void)context;
  pthread_mutex_lock(&lock);
  struct Range *range = range_of(address);
  if (range && base) *base = range->start;
  if (range && size) *size = range->size;
  pthread_mutex_unlock(&lock);
  return range ? OK : NOT_FOUND;
}

static CUresult attribute(void *data, int attribute, CUdeviceptr address) {
  struct Range *range = range_of(address);
  if (!range) return INVALID_VALUE;
  switch (attribute) {
    case 1: *(struct Context **)data = range->kind == MAPPING ? NULL : range->context; return OK;
    case 2: *(unsigned *)data = range->kind == HOST ? 1 : 2; return OK;
    case 3: *(CUdeviceptr *)data = address; return OK;
    case 8: *(int *)data = range->kind == MANAGED; return OK;
    case 9: *(int *)data = range->device; return OK;
    case 11: *(CUdeviceptr *)data = range->start; return OK;
    case 12: *(size_t *)data = range->size; return OK;
    case 13: *(int *)data = 1; return OK;
    default: return NOT_SUPPORTED;
  }
}

PUBLIC CUresult cuPointerGetAttribute(void *data, int which, CUdeviceptr address) {
  ENTER("cuPointerGetAttribute");
  if (!data) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  CUresult code = attribute(data, which, address);
  pthread_mutex_unlock(&lock);
  return code;
}

PUBLIC CUresult cuPointerGetAttributes(unsigned count, int *which, void **data, CUdeviceptr address) {
  ENTER("cuPointerGetAttributes");
  // As the driver does, for addresses that it does not know too.
  pthread_mutex_lock(&lock);
  for (unsigned at = 0; at < count; ++at) {
    if (attribute(data[at], which[at], address)) memset(data[at], 0, which[at] == 2 || which[at] > 12 ? 4 : 8);
  }
  pthread_mutex_unlock(&lock);
  return OK;
}

// --- Virtual memory ---

// The first members of CUmemAllocationProp: the kind of memory, of handles to share, and the place.
struct Properties {
  int type, shared_as, location, id;
};

struct Access {
  int location, id, flags;
};

PUBLIC CUresult cuMemGetAllocationGranularity(size_t *granularity, const struct Properties *properties, int option) {
  ENTER("cuMemGetAllocationGranularity");
  (void)option;
  if (!granularity || !properties) return INVALID_VALUE;
  return *granularity = GRANULARITY, OK;
}

PUBLIC CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t align, CUdeviceptr hint, uint64_t flags) {
  ENTER("cuMemAddressReserve");
  (void)hint, (void)flags;
  if (!address || !size || size % GRANULARITY) return INVALID_VALUE;
  if (align < GRANULARITY) align = GRANULARITY;
  char *place = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return OUT_OF_MEMORY;
  size_t before = (align - (uint64_t)place % align) % align;
  if (before) munmap(place, before);
  munmap(place + before + size, align - before);
  *address = (uint64_t)place + before;
  pthread_mutex_lock(&lock);
  insert(&reservations, (struct Range){.start = *address, .size = size, .kind = RESERVATION, .fd = -1});
  pthread_mutex_unlock(&lock);
  return OK;
}

// True if nothing is mapped in a range.
static bool is_clear(uint64_t address, size_t size) {
  size_t at = above(&blocks, address);
  return !find(&blocks, address) && (at == blocks.count || blocks.ranges[at].start >= address + size);
}

PUBLIC CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  ENTER("cuMemAddressFree");
  pthread_mutex_lock(&lock);
  struct Range *range = find(&reservations, address);
  bool is_whole = range && range->start == address && range->size == size && is_clear(address, size);
  if (is_whole) munmap((void *)address, size), erase(&reservations, range);
  pthread_mutex_unlock(&lock);
  return is_whole ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuMemCreate(uint64_t *handle, size_t size, const struct Properties *properties, uint64_t flags) {
  ENTER("cuMemCreate");
  (void)flags;
  bool is_host = properties && properties->location > 1;
  if (!handle || !properties || !size || size % GRANULARITY) return INVALID_VALUE;
  int device = is_host ? 0 : properties->id;
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  pthread_mutex_lock(&lock);
  bool fits = is_host || take(device, size);
  pthread_mutex_unlock(&lock);
  if (!fits) return OUT_OF_MEMORY;
  struct Handle *made = malloc(sizeof *made);
  *made = (struct Handle){memory_file(device, size), is_host ? -1 : device, 0, false, size};
  *handle = (uint64_t)made;
  return OK;
}

static void forget_unused(struct Handle *handle) {
  if (!handle->is_released || handle->holders) return;
  if (handle->device >= 0) used[handle->device] -= handle->size;
  close(handle->fd);
  free(handle);
}

PUBLIC CUresult cuMemRelease(uint64_t number) {
  ENTER("cuMemRelease");
  struct Handle *handle = (struct Handle *)number;
  if (!handle) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  CUresult code = handle->is_released ? INVALID_VALUE : OK;
  handle->is_released = true;
  forget_unused(handle);
  pthread_mutex_unlock(&lock);
  return code;
}

PUBLIC CUresult cuMemRetainAllocationHandle(uint64_t *number, void *address) {
  ENTER("cuMemRetainAllocationHandle");
  pthread_mutex_lock(&lock);
  struct Range *range = range_of((uint64_t)address);
  bool is_mapping = range && range->kind == MAPPING;
  // The fake driver counts one holder: a program that asks for the handle has to have released its own.
  if (is_mapping) range->handle->is_released = false, *number = (uint64_t)range->handle;
  pthread_mutex_unlock(&lock);
  return is_mapping ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t number, uint64_t flags) {
  ENTER("cuMemMap");
  struct Handle *handle = (struct Handle *)number;
  if (!handle || flags || offset || size != handle->size || address % GRANULARITY) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  struct Range *around = find(&reservations, address);
  bool fits = around && address + size <= around->start + around->size && is_clear(address, size);
  if (fits) {
    mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0);
    ++handle->holders;
    int device = handle->device < 0 ? 0 : handle->device;
    insert(&blocks, (struct Range){address, size, MAPPING, NULL, -1, device, false, handle, NULL});
  }
  pthread_mutex_unlock(&lock);
  return fits ? OK : INVALID_VALUE;
}

// True if whole mappings fill a range.
static bool is_filled(uint64_t address, size_t size) {
  for (uint64_t at = address; at < address + size;) {
    struct Range *range = find(&blocks, at);
    if (!range || range->kind != MAPPING || range->start != at) return false;
    at += range->size;
    if (at > address + size) return false;
  }
  return size > 0;
}

PUBLIC CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  ENTER("cuMemUnmap");
  pthread_mutex_lock(&lock);
  bool fits = is_filled(address, size);
  for (uint64_t end = address + size; fits && address < end;) {
    struct Range *range = find(&blocks, address);
    size_t whole = range->size;
    struct Handle *handle = range->handle;
    mmap((void *)address, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    erase(&blocks, range);
    --handle->holders;
    forget_unused(handle);
    address += whole;
  }
  pthread_mutex_unlock(&lock);
  return fits ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const struct Access *wanted, size_t count) {
  ENTER("cuMemSetAccess");
  pthread_mutex_lock(&lock);
  bool fits = is_filled(address, size);
  for (uint64_t at = address; fits && at < address + size;) {
    struct Range *range = find(&blocks, at);
    for (size_t one = 0; one < count; ++one) {
      if (wanted[one].location == 1 && wanted[one].id != range->device) continue;
      range->is_accessible = wanted[one].flags == 3;
      mprotect((void *)at, range->size, range->is_accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
    at += range->size;
  }
  pthread_mutex_unlock(&lock);
  return fits ? OK : INVALID_VALUE;
}

// --- Sharing ---

PUBLIC CUresult cuMemExportToShareableHandle(void *shared, uint64_t number, int type, uint64_t flags) {
  ENTER("cuMemExportToShareableHandle");
  (void)flags;
  if (type != 1 || !number) return NOT_SUPPORTED;
  *(int *)shared = fcntl(((struct Handle *)number)->fd, F_DUPFD_CLOEXEC, 3);
  return OK;
}

static int device_of_file(int fd) {
  char link[64], name[64] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, name, sizeof name - 1);
  const char *dash = length > 0 ? strrchr(strtok(name, " "), '-') : NULL;
  return dash ? atoi(dash + 1) : 0;
}

PUBLIC CUresult cuMemImportFromShareableHandle(uint64_t *number, void *shared, int type) {
  ENTER("cuMemImportFromShareableHandle");
  struct stat found;
  int fd = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 3);
  if (type != 1 || fd < 0 || fstat(fd, &found)) return INVALID_VALUE;
  struct Handle *made = malloc(sizeof *made);
  // The exporter has the memory: it is counted once.
  *made = (struct Handle){fd, -1, 0, false, (size_t)found.st_size};
  *number = (uint64_t)made;
  return OK;
}

PUBLIC CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t size, int type, uint64_t flags) {
  ENTER("cuMemGetHandleForAddressRange");
  (void)handle, (void)address, (void)size, (void)type, (void)flags;
  return NOT_SUPPORTED;
}

struct IpcHandle {
  int pid, fd;
  char reserved[56];
};

PUBLIC CUresult cuIpcGetMemHandle(struct IpcHandle *handle, CUdeviceptr address) {
  ENTER("cuIpcGetMemHandle");
  pthread_mutex_lock(&lock);
  struct Range *range = range_of(address);
  // As the driver, for memory that the program mapped or that is of a pool.
  bool is_shared = range && range->kind == DEVICE_MEMORY && !range->pool;
  if (is_shared) *handle = (struct IpcHandle){getpid(), range->fd, ""};
  pthread_mutex_unlock(&lock);
  return is_shared ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, struct IpcHandle handle, unsigned flags) {
  ENTER("cuIpcOpenMemHandle_v2");
  CONTEXT();
  (void)flags;
  char path[64];
  struct stat found;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0 || fstat(fd, &found)) return INVALID_VALUE;
  size_t size = (size_t)found.st_size;
  void *place = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  *address = (uint64_t)place;
  pthread_mutex_lock(&lock);
  insert(&blocks, (struct Range){*address, size, IMPORTED, context, fd, device_of_file(fd), true, NULL, NULL});
  pthread_mutex_unlock(&lock);
  return OK;
}

PUBLIC CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  ENTER("cuIpcCloseMemHandle");
  pthread_mutex_lock(&lock);
  struct Range *range = range_of(address);
  bool is_imported = range && range->kind == IMPORTED;
  if (is_imported) drop(range);
  pthread_mutex_unlock(&lock);
  return is_imported ? OK : INVALID_VALUE;
}

// --- Pools ---

static CUresult from_pool(CUdeviceptr *address, size_t size, struct Pool *pool, CUstream stream, bool per_thread) {
  CONTEXT();
  if (!address || !size) return INVALID_VALUE;
  if (!stream_of(stream, per_thread)) return INVALID_HANDLE;
  if (!pool) pool = chosen[context->device];
  if (!pool) pool = default_pool(context->device);
  pthread_mutex_lock(&lock);
  CUresult code = allocate(context, size, pool, address);
  pthread_mutex_unlock(&lock);
  if (code == OUT_OF_MEMORY) {
    // What is freed in the order of streams may be pending.
    synchronize(pool->device);
    pthread_mutex_lock(&lock);
    code = allocate(context, size, pool, address);
    pthread_mutex_unlock(&lock);
  }
  return code;
}

static CUresult to_pool(CUdeviceptr address, CUstream stream, bool per_thread) {
  pthread_mutex_lock(&lock);
  struct Range *range = range_of(address);
  bool is_block = range && range->start == address && range->kind == DEVICE_MEMORY;
  pthread_mutex_unlock(&lock);
  if (!is_block) return INVALID_VALUE;
  return enqueue(stream, per_thread, (struct Work){.kind = RELEASE_BLOCK, .to = address});
}

#define ORDERED(suffix, per_thread)                                                                                  \
  PUBLIC CUresult cuMemAllocAsync##suffix(CUdeviceptr *address, size_t size, CUstream stream) {                      \
    ENTER("cuMemAllocAsync" #suffix);                                                                                \
    return from_pool(address, size, NULL, stream, per_thread);                                                       \
  }                                                                                                                  \
  PUBLIC CUresult cuMemAllocFromPoolAsync##suffix(CUdeviceptr *address, size_t size, struct Pool *pool,              \
                                                  CUstream stream) {                                                 \
    ENTER("cuMemAllocFromPoolAsync" #suffix);                                                                        \
    return pool ? from_pool(address, size, pool, stream, per_thread) : INVALID_VALUE;                                \
  }                                                                                                                  \
  PUBLIC CUresult cuMemFreeAsync##suffix(CUdeviceptr address, CUstream stream) {                                     \
    ENTER("cuMemFreeAsync" #suffix);                                                                                 \
    return to_pool(address, stream, per_thread);                                                                     \
  }
ORDERED(, false)
ORDERED(_ptsz, true)

PUBLIC CUresult cuDeviceGetMemPool(struct Pool **pool, CUdevice device) {
  ENTER("cuDeviceGetMemPool");
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  return *pool = chosen[device] ? chosen[device] : default_pool(device), OK;
}

PUBLIC CUresult cuDeviceSetMemPool(CUdevice device, struct Pool *pool) {
  ENTER("cuDeviceSetMemPool");
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  return chosen[device] = pool, OK;
}

PUBLIC CUresult cuMemPoolSetAccess(struct Pool *pool, const struct Access *wanted, size_t count) {
  ENTER("cuMemPoolSetAccess");
  return pool && wanted && count ? OK : INVALID_VALUE;
}

PUBLIC CUresult cuDeviceGetDefaultMemPool(struct Pool **pool, CUdevice device) {
  ENTER("cuDeviceGetDefaultMemPool");
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  return *pool = default_pool(device), OK;
}

PUBLIC CUresult cuMemPoolCreate(struct Pool **pool, const struct Properties *properties) {
  ENTER("cuMemPoolCreate");
  *pool = calloc(1, sizeof **pool);
  return (*pool)->device = properties->id, OK;
}

PUBLIC CUresult cuMemPoolDestroy(struct Pool *pool) {
  ENTER("cuMemPoolDestroy");
  if (pool == default_pool(pool->device)) return INVALID_VALUE;
  if (!pool->used) free(pool);
  return OK;
}

PUBLIC CUresult cuMemPoolTrimTo(struct Pool *pool, size_t keep) {
  ENTER("cuMemPoolTrimTo");
  (void)pool, (void)keep;
  return OK;
}

PUBLIC CUresult cuMemPoolGetAttribute(struct Pool *pool, int which, uint64_t *value) {
  ENTER("cuMemPoolGetAttribute");
  switch (which) {
    case 1: case 2: case 3: *(int *)value = 1; break;
    case 4: *value = pool->threshold; break;
    case 5: case 7: *value = pool->used; break;
    default: *value = pool->used_high;
  }
  return OK;
}

PUBLIC CUresult cuMemPoolSetAttribute(struct Pool *pool, int which, uint64_t *value) {
  ENTER("cuMemPoolSetAttribute");
  if (which == 4) pool->threshold = *value;
  return OK;
}
