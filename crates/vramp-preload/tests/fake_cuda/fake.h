// A CUDA driver without a card, for tests of programs that reach it in any way. Device memory is memory of the host in
// files without a name, so that the calls about virtual memory do what the driver's do. Own declarations: no header of
// CUDA is needed.
//
// Environment: FAKE_CUDA_DEVICES, number of devices (1); FAKE_CUDA_MEMORY, bytes of each (1 GiB); FAKE_CUDA_LATE_US, how
// late each piece of work is done (0: at once); FAKE_CUDA_COUNTS, a file that counts calls: entries of 64 bytes, a name
// of 56 bytes and a number of 64 bits, which all processes add to.
#pragma once

#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct Context *CUcontext;
typedef struct Stream *CUstream;
typedef struct Event *CUevent;
typedef struct Pool *CUmemoryPool;
typedef struct Graph *CUgraph;
typedef struct Graph *CUgraphExec;

enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  PEER_ENABLED = 704,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
};

enum { DEVICES = 16, GRANULARITY = 2 << 20 };

#define PUBLIC __attribute__((visibility("default")))

// Begins a function of the driver: counts the call, and refuses it before cuInit and in a forked child.
#define ENTER(name)                    \
  static uint64_t *counter_;           \
  count_call(name, &counter_);         \
  if (!is_ready()) return NOT_INITIALIZED

void count_call(const char *name, uint64_t **counter);
bool is_ready(void);

// Everything is protected by one lock.
extern pthread_mutex_t lock;

struct Context {
  int device;
  bool is_primary, is_alive;
};

int device_count(void);
struct Context *current(void);
bool is_context(const struct Context *context);

// What begins at an address.
enum Kind { FREE, DEVICE_MEMORY, MANAGED, HOST, MAPPING, IMPORTED, RESERVATION };

struct Handle;
struct Range {
  uint64_t start, size;
  enum Kind kind;
  struct Context *context;
  int fd, device;
  bool is_accessible;
  struct Handle *handle;
  struct Pool *pool;
};

// Of the calling thread's device, or of the pool's.
CUresult allocate(struct Context *context, size_t size, struct Pool *pool, CUdeviceptr *address);
CUresult release(CUdeviceptr address);
struct Range *range_of(CUdeviceptr address);
bool is_accessible(CUdeviceptr address, size_t size);
void release_all_of(const struct Context *context);
struct Pool *default_pool(int device);
int device_of_pool(const struct Pool *pool);

// A piece of work.
struct Work {
  enum { FILL, COPY, RELEASE_BLOCK } kind;
  uint64_t to, from;
  size_t size;
  unsigned value;
};

struct Stream;
struct Stream *stream_of(CUstream stream, bool per_thread);
CUresult enqueue(CUstream stream, bool per_thread, struct Work work);
void synchronize(int device);
bool capturing(CUstream stream, bool per_thread);
