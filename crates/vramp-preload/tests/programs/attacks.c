// What programs rarely do with CUDA, and may: attacks WAY CASE. It ends with 98 and a line where the driver's answer is
// not the one that it has to be.
#include "driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

static void check(CUresult code, int expected, const char *what) {
  if (code != expected) {
    fprintf(stderr, "%s: %d, not %d\n", what, code, expected);
    exit(98);
  }
}

#define CHECK(call) check(call, 0, #call)

static CUcontext context;

static CUdeviceptr make_block(size_t size) {
  CUdeviceptr block = 0;
  CHECK(cuMemAlloc(&block, size));
  return block;
}

static void expect(CUdeviceptr block, size_t size, int value) {
  unsigned char *bytes = malloc(size);
  CHECK(cuMemcpyDtoH(bytes, block, size));
  for (size_t at = 0; at < size; ++at) {
    if (bytes[at] != value) check(bytes[at], value, "a byte");
  }
  free(bytes);
}

// Fills the device and empties it again, three times.
static void fill(void) {
  for (int round = 0; round < 3; ++round) {
    CUdeviceptr blocks[7];
    for (int at = 0; at < 7; ++at) blocks[at] = make_block(16 * MIB);
    for (int at = 0; at < 7; ++at) CHECK(cuMemFree(blocks[at]));
  }
}

// A capture in the stream of the thread, and one that ends with its stream.
static void captures(void) {
  CUstream stream;
  CUgraph graph;
  CHECK(cuStreamBeginCapture(NULL, 2));
  CUdeviceptr block = make_block(MIB);
  CHECK(cuMemFree(block));
  CHECK(cuStreamEndCapture(NULL, &graph));
  fill();
  CHECK(cuStreamCreate(&stream, 1));
  CHECK(cuStreamBeginCapture(stream, 2));
  CHECK(cuStreamDestroy(stream));
  fill();
}

// What is freed in a capture is there after it.
static void kept(void) {
  CUstream stream;
  CUgraph graph;
  CHECK(cuStreamCreate(&stream, 1));
  CUdeviceptr block = make_block(100 * MIB);
  CHECK(cuStreamBeginCapture(stream, 2));
  CHECK(cuMemFree(block));
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuMemFree(make_block(100 * MIB)));
}

// The memory of another context of a device outlives its primary one.
static void reset(void) {
  CUcontext other;
  CHECK(cuMemFree(make_block(MIB)));
  CHECK(cuCtxCreate(&other, 0, 0));
  CUdeviceptr block = make_block(2 * MIB);
  CHECK(cuMemsetD8(block, 7, 2 * MIB));
  CHECK(cuDevicePrimaryCtxReset(0));
  expect(block, 2 * MIB, 7);
  CHECK(cuMemFree(block));
}

// Requests in the order of streams use the pool that the program chose.
static void pools(void) {
  CUmemoryPool usual, own;
  struct Properties properties = {1, 1, 1, 0, {0}};
  CUdeviceptr block;
  CHECK(cuDeviceGetDefaultMemPool(&usual, 0));
  CHECK(cuMemPoolCreate(&own, &properties));
  CHECK(cuDeviceSetMemPool(0, own));
  CHECK(cuMemAllocAsync(&block, MIB, NULL));
  CHECK(cuMemFreeAsync(block, NULL));
  CHECK(cuDeviceSetMemPool(0, usual));
  CHECK(cuMemAllocAsync(&block, MIB, NULL));
  CHECK(cuMemFreeAsync(block, NULL));
  struct Access access = {1, 1, 3};
  CHECK(cuMemPoolSetAccess(usual, &access, 1));
}

// Captures one graph after the other, until nothing is read any more.
static void pauses(void) {
  CUstream stream;
  CUgraph graph;
  CHECK(cuStreamCreate(&stream, 1));
  CUdeviceptr block = make_block(MIB);
  puts("ready");
  fflush(stdout);
  fcntl(0, F_SETFL, O_NONBLOCK);
  for (char byte; read(0, &byte, 1);) {
    CHECK(cuStreamBeginCapture(stream, 0));
    CHECK(cuMemsetD8Async(block, 1, MIB, stream));
    usleep(3000);
    CHECK(cuStreamEndCapture(stream, &graph));
  }
  CHECK(cuMemFree(block));
}

static void *first(void *unused) {
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuMemFree(make_block(4096)));
  return unused;
}

// The first request of a thread, while another loads a library that makes its own.
static void constructor(unsigned after) {
  pthread_t id;
  // In place of a deadlock.
  alarm(60);
  pthread_create(&id, NULL, first, NULL);
  usleep(after);
  if (!dlopen("constructor.so", RTLD_NOW)) fail(dlerror());
  pthread_join(id, NULL);
}

static pthread_key_t key;

static void at_the_end(void *block) {
  CUdeviceptr other;
  CHECK(cuMemFreeAsync((CUdeviceptr)block, (CUstream)2));
  CHECK(cuMemAlloc(&other, MIB));
  CHECK(cuMemFree(other));
  CHECK(cuMemAllocAsync(&other, MIB, (CUstream)2));
  CHECK(cuMemFreeAsync(other, (CUstream)2));
}

static void *short_life(void *unused) {
  CHECK(cuCtxSetCurrent(context));
  CUdeviceptr block;
  CHECK(cuMemAllocAsync(&block, 4096, (CUstream)2));
  CHECK(cuMemsetD8Async(block, 1, 4096, (CUstream)2));
  CHECK(cuMemFreeAsync(block, (CUstream)2));
  CHECK(cuMemAllocAsync(&block, 4096, (CUstream)2));
  pthread_setspecific(key, (void *)block);
  return unused;
}

// Threads whose last calls are made when their own variables are gone, many at a time.
static void threads(void) {
  pthread_key_create(&key, at_the_end);
  pthread_t ids[40];
  for (int round = 0; round < 5; ++round) {
    for (int at = 0; at < 40; ++at) pthread_create(&ids[at], NULL, short_life, NULL);
    for (int at = 0; at < 40; ++at) pthread_join(ids[at], NULL);
  }
}

// Bytes of this process that are in memory.
static long resident(void) {
  long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%*d %ld", &pages) != 1) fail("statm");
  fclose(file);
  return pages * 4096;
}

// Streams that end while memory is freed in their order, and before it is.
static void streams(int count) {
  long before = 0;
  for (int round = 0; round < count; ++round) {
    if (round == count / 4) before = resident();
    CUstream stream, other;
    CUdeviceptr block, kept, next;
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuStreamCreate(&other, 1));
    CHECK(cuMemAllocAsync(&kept, 64 << 10, stream));
    CHECK(cuMemAllocAsync(&block, 64 << 10, stream));
    CHECK(cuMemsetD8Async(block, 1, 64 << 10, stream));
    CHECK(cuMemFreeAsync(block, stream));
    CHECK(cuStreamDestroy(stream));
    CHECK(cuMemAllocAsync(&next, 64 << 10, other));
    CHECK(cuMemsetD8Async(next, 2, 64 << 10, other));
    if (round % 64 == 0) {
      CHECK(cuCtxSynchronize());
      expect(next, 64 << 10, 2);
    }
    CHECK(round % 2 ? cuMemFree(kept) : cuMemFreeAsync(kept, other));
    CHECK(cuMemFreeAsync(next, other));
    CHECK(cuStreamDestroy(other));
  }
  long grown = resident() - before;
  if (getenv("SHOW")) fprintf(stderr, "grown %ld\n", grown);
  if (grown > 8 * MIB) check((int)(grown / MIB), 0, "MiB more");
}

int main(int count, char **arguments) {
  const char *name = count > 2 ? arguments[2] : "";
  open_driver(arguments[1]);
  CHECK(cuInit(0));
  CHECK(cuDevicePrimaryCtxRetain(&context, 0));
  CHECK(cuCtxSetCurrent(context));
  if (!strcmp(name, "captures")) captures();
  if (!strcmp(name, "kept")) kept();
  if (!strcmp(name, "reset")) reset();
  if (!strcmp(name, "pools")) pools();
  if (!strcmp(name, "pauses")) pauses();
  if (!strcmp(name, "constructor")) constructor((unsigned)atoi(arguments[3]));
  if (!strcmp(name, "threads")) threads();
  if (!strcmp(name, "streams")) streams(count > 3 ? atoi(arguments[3]) : 400);
  puts("done");
  return 0;
}
