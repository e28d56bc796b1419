// Devices, contexts, errors, and how programs find the functions.
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CONTEXTS = 64, DEPTH = 16, VERSION = 13000 };

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_initialised, is_forked;
static struct Context primary[DEVICES], contexts[CONTEXTS];
static int retained[DEVICES];
static _Thread_local struct Context *stack[DEPTH];
static _Thread_local int depth;

// --- Counts ---

struct Count {
  char name[56];
  uint64_t calls;
};

enum { COUNTS = 256 };

static struct Count *counts(void) {
  static struct Count *mapped;
  const char *path = getenv("FAKE_CUDA_COUNTS");
  if (mapped || !path) return mapped;
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, COUNTS * sizeof *mapped)) abort();
  void *place = mmap(NULL, COUNTS * sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (place == MAP_FAILED) abort();
  close(fd);
  return mapped = place;
}

static uint64_t *counter_of(const char *name) {
  struct Count *table = counts();
  if (!table) return NULL;
  for (int at = 0; at < COUNTS; ++at) {
    // Another process may take the same entry at this moment.
    char *first = table[at].name;
    char empty = 0;
    if (__atomic_compare_exchange_n(first, &empty, 'c', false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      strncpy(first + 1, name + 1, sizeof table[at].name - 2);
      return &table[at].calls;
    }
    for (int tries = 0; tries < 1000 && !first[1]; ++tries) usleep(10);
    if (!strcmp(first, name)) return &table[at].calls;
  }
  abort();
}

void count_call(const char *name, uint64_t **counter) {
  static uint64_t unused;
  uint64_t *found = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
  if (!found) {
    pthread_mutex_lock(&lock);
    found = counter_of(name);
    pthread_mutex_unlock(&lock);
    if (!found) found = &unused;
    __atomic_store_n(counter, found, __ATOMIC_RELEASE);
  }
  __atomic_fetch_add(found, 1, __ATOMIC_RELAXED);
}

// --- Devices ---

static void forked(void) {
  if (is_initialised) is_forked = true;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

bool is_ready(void) { return is_initialised && !is_forked; }

int device_count(void) {
  const char *text = getenv("FAKE_CUDA_DEVICES");
  int count = text ? atoi(text) : 1;
  return count > DEVICES ? DEVICES : count;
}

PUBLIC CUresult cuInit(unsigned flags) {
  static uint64_t *counter;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  count_call("cuInit", &counter);
  // CUDA does not survive a fork.
  if (is_forked) return NOT_INITIALIZED;
  if (flags) return INVALID_VALUE;
  if (device_count() < 1) return NO_DEVICE;
  pthread_once(&once, watch_forks);
  is_initialised = true;
  return OK;
}

PUBLIC CUresult cuDriverGetVersion(int *version) {
  static uint64_t *counter;
  count_call("cuDriverGetVersion", &counter);
  return *version = VERSION, OK;
}

PUBLIC CUresult cuDeviceGetCount(int *count) {
  ENTER("cuDeviceGetCount");
  return *count = device_count(), OK;
}

#define DEVICE() \
  if (device < 0 || device >= device_count()) return INVALID_DEVICE

PUBLIC CUresult cuDeviceGet(CUdevice *found, int device) {
  ENTER("cuDeviceGet");
  DEVICE();
  return *found = device, OK;
}

PUBLIC CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
  ENTER("cuDeviceGetName");
  DEVICE();
  snprintf(name, (size_t)length, "Fake GPU %d", device);
  return OK;
}

PUBLIC CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device) {
  ENTER("cuDeviceGetUuid_v2");
  DEVICE();
  memset(uuid, 0, 16);
  // Of this run of a test alone: budgets are kept by the card's UUID.
  const char *path = getenv("FAKE_CUDA_COUNTS");
  if (path) strncpy((char *)uuid, path + (strlen(path) > 14 ? strlen(path) - 14 : 0), 14);
  return uuid[15] = (unsigned char)device, OK;
}

PUBLIC CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
  ENTER("cuDeviceGetPCIBusId");
  DEVICE();
  snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
  return OK;
}

PUBLIC CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  ENTER("cuDeviceGetAttribute");
  DEVICE();
  switch (attribute) {
    case 75: *value = 9; break;                                    // compute capability
    case 41: case 102: case 103: case 115: *value = 1; break;      // unified addresses, virtual memory, its export, pools
    case 134: *value = -1; break;                                  // NUMA node
    default: *value = 0;
  }
  return OK;
}

PUBLIC CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice other) {
  ENTER("cuDeviceCanAccessPeer");
  DEVICE();
  return *can = device != other, OK;
}

// --- Contexts ---

struct Context *current(void) { return depth ? stack[depth - 1] : NULL; }

PUBLIC CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  DEVICE();
  pthread_mutex_lock(&lock);
  primary[device] = (struct Context){device, true, true};
  ++retained[device];
  pthread_mutex_unlock(&lock);
  return *context = &primary[device], OK;
}

static void end_primary(CUdevice device) {
  retained[device] = 0;
  release_all_of(&primary[device]);
  primary[device].is_alive = false;
}

PUBLIC CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  ENTER("cuDevicePrimaryCtxRelease_v2");
  DEVICE();
  pthread_mutex_lock(&lock);
  CUresult code = retained[device] ? OK : INVALID_CONTEXT;
  if (!code && !--retained[device]) end_primary(device);
  pthread_mutex_unlock(&lock);
  return code;
}

PUBLIC CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  ENTER("cuDevicePrimaryCtxReset_v2");
  DEVICE();
  synchronize(device);
  pthread_mutex_lock(&lock);
  end_primary(device);
  pthread_mutex_unlock(&lock);
  return OK;
}

PUBLIC CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  ENTER("cuDevicePrimaryCtxGetState");
  DEVICE();
  *flags = 0;
  return *active = retained[device] > 0, OK;
}

static CUresult push(struct Context *context) {
  if (!context || depth == DEPTH) return INVALID_CONTEXT;
  return stack[depth++] = context, OK;
}

static CUresult create(CUcontext *made, CUdevice device) {
  DEVICE();
  pthread_mutex_lock(&lock);
  struct Context *found = NULL;
  for (int at = 0; at < CONTEXTS && !found; ++at) {
    if (!contexts[at].is_alive) found = &contexts[at];
  }
  if (found) *found = (struct Context){device, false, true};
  pthread_mutex_unlock(&lock);
  if (!found) return OUT_OF_MEMORY;
  *made = found;
  return push(found);
}

PUBLIC CUresult cuCtxCreate_v2(CUcontext *made, unsigned flags, CUdevice device) {
  ENTER("cuCtxCreate_v2");
  (void)flags;
  return create(made, device);
}

PUBLIC CUresult cuCtxCreate_v4(CUcontext *made, void *parameters, unsigned flags, CUdevice device) {
  ENTER("cuCtxCreate_v4");
  (void)parameters, (void)flags;
  return create(made, device);
}

PUBLIC CUresult cuCtxDestroy_v2(CUcontext context) {
  ENTER("cuCtxDestroy_v2");
  if (!context || context->is_primary || !context->is_alive) return INVALID_CONTEXT;
  synchronize(context->device);
  pthread_mutex_lock(&lock);
  release_all_of(context);
  context->is_alive = false;
  pthread_mutex_unlock(&lock);
  if (current() == context) --depth;
  return OK;
}

PUBLIC CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER("cuCtxSetCurrent");
  if (depth) --depth;
  return context ? push(context) : OK;
}

PUBLIC CUresult cuCtxGetCurrent(CUcontext *context) {
  ENTER("cuCtxGetCurrent");
  return *context = current(), OK;
}

PUBLIC CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER("cuCtxPushCurrent_v2");
  return push(context);
}

PUBLIC CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  ENTER("cuCtxPopCurrent_v2");
  if (!depth) return INVALID_CONTEXT;
  struct Context *popped = stack[--depth];
  if (context) *context = popped;
  return OK;
}

PUBLIC CUresult cuCtxGetDevice(CUdevice *device) {
  ENTER("cuCtxGetDevice");
  if (!current()) return INVALID_CONTEXT;
  return *device = current()->device, OK;
}

PUBLIC CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  ENTER("cuCtxEnablePeerAccess");
  (void)flags;
  return peer ? OK : INVALID_CONTEXT;
}

// --- Errors ---

PUBLIC CUresult cuGetErrorName(CUresult error, const char **text) {
  switch (error) {
    case OK: *text = "CUDA_SUCCESS"; return OK;
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case NOT_INITIALIZED: *text = "CUDA_ERROR_NOT_INITIALIZED"; return OK;
    default: *text = "CUDA_ERROR_OF_THE_FAKE_DRIVER"; return OK;
  }
}

PUBLIC CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

// --- Names ---

struct Entry {
  const char *name, *symbol;
  int since;
  bool per_thread;
};

static const struct Entry ENTRIES[] = {
    {"cuGetProcAddress", "cuGetProcAddress", 11030, false},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000, false},
    {"cuMemAlloc", "cuMemAlloc_v2", 3020, false},
    {"cuMemAllocPitch", "cuMemAllocPitch_v2", 3020, false},
    {"cuMemFree", "cuMemFree_v2", 3020, false},
    {"cuMemGetInfo", "cuMemGetInfo_v2", 3020, false},
    {"cuMemGetAddressRange", "cuMemGetAddressRange_v2", 3020, false},
    {"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020, false},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000, false},
    {"cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxReset_v2", 11000, false},
    {"cuCtxCreate", "cuCtxCreate_v2", 3020, false},
    {"cuCtxCreate", "cuCtxCreate_v4", 13000, false},
    {"cuCtxDestroy", "cuCtxDestroy_v2", 4000, false},
    {"cuCtxPushCurrent", "cuCtxPushCurrent_v2", 4000, false},
    {"cuCtxPopCurrent", "cuCtxPopCurrent_v2", 4000, false},
    {"cuStreamDestroy", "cuStreamDestroy_v2", 4000, false},
    {"cuEventDestroy", "cuEventDestroy_v2", 4000, false},
    {"cuMemcpyHtoD", "cuMemcpyHtoD_v2", 3020, false},
    {"cuMemcpyDtoH", "cuMemcpyDtoH_v2", 3020, false},
    {"cuMemsetD8", "cuMemsetD8_v2", 3020, false},
    {"cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2", 11000, false},
    {"cuStreamBeginCapture", "cuStreamBeginCapture_v2", 10010, false},
    {"cuStreamBeginCapture", "cuStreamBeginCapture_v2_ptsz", 10010, true},
    {"cuStreamEndCapture", "cuStreamEndCapture", 10000, false},
    {"cuStreamEndCapture", "cuStreamEndCapture_ptsz", 10000, true},
    {"cuMemAllocAsync", "cuMemAllocAsync", 11020, false},
    {"cuMemAllocAsync", "cuMemAllocAsync_ptsz", 11020, true},
    {"cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync", 11020, false},
    {"cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz", 11020, true},
    {"cuMemFreeAsync", "cuMemFreeAsync", 11020, false},
    {"cuMemFreeAsync", "cuMemFreeAsync_ptsz", 11020, true},
    {"cuMemsetD8Async", "cuMemsetD8Async", 3020, false},
    {"cuMemsetD8Async", "cuMemsetD8Async_ptsz", 7000, true},
    {"cuStreamSynchronize", "cuStreamSynchronize", 2000, false},
    {"cuStreamSynchronize", "cuStreamSynchronize_ptsz", 7000, true},
};

// Names that have one version and are their own symbol.
static const char *const OTHERS[] = {
    "cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxGetState", "cuCtxSetCurrent", "cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxSynchronize",
    "cuCtxEnablePeerAccess", "cuMemAllocManaged", "cuMemHostAlloc", "cuMemFreeHost", "cuPointerGetAttribute",
    "cuPointerGetAttributes", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap",
    "cuMemUnmap", "cuMemSetAccess", "cuMemRetainAllocationHandle", "cuStreamCreate", "cuDeviceGetMemPool",
    "cuDeviceGetDefaultMemPool", "cuMemPoolCreate", "cuIpcGetMemHandle", "cuIpcCloseMemHandle",
    "cuDeviceSetMemPool", "cuMemPoolSetAccess", "cuGraphInstantiateWithFlags", "cuGraphLaunch",
};

// As the program's own calls of dlsym are not: the driver looks into its own table.
static void *address_of(const char *symbol);

static CUresult look_up(const char *name, void **found, int version, uint64_t flags, int *status) {
  if (!name || !found) return INVALID_VALUE;
  const struct Entry *best = NULL;
  bool is_known = false, wants_thread = flags & 2;
  for (size_t at = 0; at < sizeof ENTRIES / sizeof *ENTRIES; ++at) {
    const struct Entry *entry = &ENTRIES[at];
    if (strcmp(entry->name, name)) continue;
    is_known = true;
    if (entry->since > version || (entry->per_thread && !wants_thread)) continue;
    if (!best || (entry->per_thread && !best->per_thread) ||
        (entry->per_thread == best->per_thread && entry->since > best->since)) {
      best = entry;
    }
  }
  const char *symbol = best ? best->symbol : NULL;
  for (size_t at = 0; at < sizeof OTHERS / sizeof *OTHERS && !is_known; ++at) {
    if (!strcmp(OTHERS[at], name)) symbol = name;
  }
  *found = symbol ? address_of(symbol) : NULL;
  if (status) *status = symbol ? 0 : is_known ? 2 : 1;
  return *found ? OK : NOT_FOUND;
}

PUBLIC CUresult cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
  static uint64_t *counter;
  count_call("cuGetProcAddress", &counter);
  return look_up(name, found, version, flags, NULL);
}

PUBLIC CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
  static uint64_t *counter;
  count_call("cuGetProcAddress_v2", &counter);
  return look_up(name, found, version, flags, status);
}

// The addresses inside this library, whatever stands in front of them.
#define SYMBOLS(X)                                                                                                   \
  X(cuGetProcAddress) X(cuGetProcAddress_v2) X(cuMemAlloc_v2) X(cuMemAllocPitch_v2) X(cuMemFree_v2)                  \
  X(cuMemGetInfo_v2) X(cuMemGetAddressRange_v2) X(cuDeviceTotalMem_v2) X(cuDevicePrimaryCtxRelease_v2)               \
  X(cuDevicePrimaryCtxReset_v2) X(cuCtxCreate_v2) X(cuCtxCreate_v4) X(cuCtxDestroy_v2) X(cuCtxPushCurrent_v2)        \
  X(cuCtxPopCurrent_v2) X(cuStreamDestroy_v2) X(cuEventDestroy_v2) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2)             \
  X(cuMemsetD8_v2) X(cuMemAllocAsync) X(cuMemAllocAsync_ptsz) X(cuMemAllocFromPoolAsync)                             \
  X(cuMemAllocFromPoolAsync_ptsz) X(cuMemFreeAsync) X(cuMemFreeAsync_ptsz) X(cuMemsetD8Async)                        \
  X(cuMemsetD8Async_ptsz) X(cuStreamSynchronize) X(cuStreamSynchronize_ptsz) X(cuInit) X(cuDriverGetVersion)         \
  X(cuDeviceGet) X(cuDeviceGetCount) X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxGetState) X(cuCtxSetCurrent)    \
  X(cuCtxGetCurrent) X(cuCtxGetDevice) X(cuCtxSynchronize) X(cuCtxEnablePeerAccess) X(cuMemAllocManaged)             \
  X(cuMemHostAlloc) X(cuMemFreeHost) X(cuPointerGetAttribute) X(cuPointerGetAttributes) X(cuMemAddressReserve)       \
  X(cuMemAddressFree) X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)                     \
  X(cuMemRetainAllocationHandle) X(cuStreamCreate) X(cuDeviceGetMemPool) X(cuDeviceGetDefaultMemPool)                \
  X(cuMemPoolCreate) X(cuIpcGetMemHandle) X(cuIpcOpenMemHandle_v2) X(cuIpcCloseMemHandle)                            \
  X(cuStreamBeginCapture_v2) X(cuStreamBeginCapture_v2_ptsz) X(cuStreamEndCapture) X(cuStreamEndCapture_ptsz)        \
  X(cuDeviceSetMemPool) X(cuMemPoolSetAccess) X(cuGraphInstantiateWithFlags) X(cuGraphLaunch)

#define DECLARE(symbol) extern char address_##symbol[] __asm__(#symbol);
SYMBOLS(DECLARE)

static void *address_of(const char *symbol) {
#define FIND(name) \
  if (!strcmp(symbol, #name)) return address_##name;
  SYMBOLS(FIND)
  return NULL;
}
