// How a program reaches the driver: every way that programs use. Own declarations: no header of CUDA is needed.
#pragma once

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUpool_st *CUmemoryPool;
typedef struct CUgraph_st *CUgraph;

struct Properties {
  int type, shared_as, location, id;
  uint64_t rest[4];
};

struct Access {
  int location, id, flags;
};

struct Shared {
  unsigned char bytes[64];
};

// X(result and name without a version, exported name, arguments)
#define FUNCTIONS(X)                                                                                        \
  X(cuInit, cuInit, (unsigned))                                                                             \
  X(cuDeviceGetCount, cuDeviceGetCount, (int *))                                                            \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext *, int))                                 \
  X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (int))                                             \
  X(cuCtxCreate, cuCtxCreate_v2, (CUcontext *, unsigned, int))                                              \
  X(cuCtxDestroy, cuCtxDestroy_v2, (CUcontext))                                                             \
  X(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext))                                                          \
  X(cuCtxSynchronize, cuCtxSynchronize, (void))                                                             \
  X(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                     \
  X(cuMemAllocPitch, cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned))               \
  X(cuMemAllocManaged, cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned))                                \
  X(cuMemFree, cuMemFree_v2, (CUdeviceptr))                                                                 \
  X(cuMemAllocAsync, cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                                    \
  X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream))      \
  X(cuMemFreeAsync, cuMemFreeAsync, (CUdeviceptr, CUstream))                                                \
  X(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, (CUmemoryPool *, int))                            \
  X(cuMemPoolCreate, cuMemPoolCreate, (CUmemoryPool *, const struct Properties *))                          \
  X(cuDeviceSetMemPool, cuDeviceSetMemPool, (int, CUmemoryPool))                                            \
  X(cuMemPoolSetAccess, cuMemPoolSetAccess, (CUmemoryPool, const struct Access *, size_t))                  \
  X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *))                                                    \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t *, int))                                                 \
  X(cuMemGetAddressRange, cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr))                  \
  X(cuPointerGetAttribute, cuPointerGetAttribute, (void *, int, CUdeviceptr))                               \
  X(cuStreamCreate, cuStreamCreate, (CUstream *, unsigned))                                                 \
  X(cuStreamDestroy, cuStreamDestroy_v2, (CUstream))                                                        \
  X(cuStreamSynchronize, cuStreamSynchronize, (CUstream))                                                   \
  X(cuMemsetD8Async, cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                       \
  X(cuMemsetD8, cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t))                                        \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t))                                           \
  X(cuMemAddressReserve, cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t))       \
  X(cuMemCreate, cuMemCreate, (uint64_t *, size_t, const struct Properties *, uint64_t))                    \
  X(cuMemRelease, cuMemRelease, (uint64_t))                                                                 \
  X(cuMemMap, cuMemMap, (CUdeviceptr, size_t, size_t, uint64_t, uint64_t))                                  \
  X(cuMemUnmap, cuMemUnmap, (CUdeviceptr, size_t))                                                          \
  X(cuMemSetAccess, cuMemSetAccess, (CUdeviceptr, size_t, const struct Access *, size_t))                   \
  X(cuIpcGetMemHandle, cuIpcGetMemHandle, (struct Shared *, CUdeviceptr))                                   \
  X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr *, struct Shared, unsigned))                    \
  X(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr))                                                \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (CUstream, int))                                         \
  X(cuStreamEndCapture, cuStreamEndCapture, (CUstream, CUgraph *))                                          \
  X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, (CUgraph *, CUgraph, uint64_t))               \
  X(cuGraphLaunch, cuGraphLaunch, (CUgraph, CUstream))

#define POINTER(name, symbol, arguments) static CUresult(*name) arguments __asm__("pointer_" #name);
FUNCTIONS(POINTER)

#ifdef LINKED
#define DECLARE(name, symbol, arguments) extern CUresult symbol##_ arguments __asm__(#symbol);
FUNCTIONS(DECLARE)
#endif

typedef CUresult (*GetProcAddress)(const char *, void **, int, uint64_t);
typedef CUresult (*GetProcAddressWithStatus)(const char *, void **, int, uint64_t, int *);

static void fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  exit(99);
}

static void *found(void *address, const char *name) {
  if (!address) fail(name);
  return address;
}

static void *by_proc_address(void *library, const char *name) {
  static GetProcAddress get;
  if (!get) get = (GetProcAddress)found(dlsym(library, "cuGetProcAddress"), "cuGetProcAddress");
  void *address = NULL;
  if (get(name, &address, 12000, 0)) fail(name);
  return address;
}

// As the CUDA runtime does: it asks by name for the function that it asks with from then on.
static void *as_runtime(void *library, const char *name, uint64_t flags) {
  static GetProcAddressWithStatus get;
  if (!get) {
    GetProcAddress first = (GetProcAddress)found(dlsym(library, "cuGetProcAddress"), "cuGetProcAddress");
    if (first("cuGetProcAddress", (void **)&get, 12000, 0)) fail("cuGetProcAddress of 12.0");
  }
  void *address = NULL;
  int status = -1;
  if (get(name, &address, 12000, flags, &status) || status) fail(name);
  return address;
}

static void *reach(const char *way, void *library, const char *name, const char *symbol) {
  if (!strcmp(way, "dlopen")) return dlsym(library, symbol);
  if (!strcmp(way, "default")) return dlsym(RTLD_DEFAULT, symbol);
  if (!strcmp(way, "next")) return dlsym(RTLD_NEXT, symbol);
  if (!strcmp(way, "self")) return dlsym(dlopen(NULL, RTLD_NOW), symbol);
  if (!strcmp(way, "proc")) return by_proc_address(library, name);
  if (!strcmp(way, "runtime")) return as_runtime(library, name, 1);
  if (!strcmp(way, "threads")) return as_runtime(library, name, 2);
  return NULL;
}

// Ways: linked, dlopen, default, next, self, proc, runtime, threads (the runtime with a stream for each thread).
static void open_driver(const char *way) {
#ifdef LINKED
  if (!strcmp(way, "linked")) {
#define TAKE(name, symbol, arguments) name = symbol##_;
    FUNCTIONS(TAKE)
    return;
  }
  void *library = NULL;
#else
  void *library = dlopen("libcuda.so.1", RTLD_NOW | (strcmp(way, "default") ? RTLD_LOCAL : RTLD_GLOBAL));
  if (!library) fail(dlerror());
#endif
#define REACH(name, symbol, arguments) name = (CUresult(*) arguments)found(reach(way, library, #name, #symbol), #symbol);
  FUNCTIONS(REACH)
}
