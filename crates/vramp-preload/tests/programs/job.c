// A program that uses CUDA: job WAY CASE. It prints what it finds, and ends with 98 and a line where the driver's
// answer is not the one that it has to be.
#include "driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { KIB = 1 << 10, MIB = 1 << 20 };

static void check(CUresult code, int expected, const char *what) {
  if (code != expected) {
    fprintf(stderr, "%s: %d, not %d\n", what, code, expected);
    exit(98);
  }
}

#define CHECK(call) check(call, 0, #call)
#define REFUSED(call, code) check(call, code, #call)

static CUcontext context;

static void begin(int device) {
  CHECK(cuInit(0));
  CHECK(cuDevicePrimaryCtxRetain(&context, device));
  CHECK(cuCtxSetCurrent(context));
}

__attribute__((noinline)) static CUdeviceptr make_block(size_t size) {
  CUdeviceptr block = 0;
  CHECK(cuMemAlloc(&block, size));
  __asm__ volatile("");
  return block;
}

static void expect(CUdeviceptr block, size_t size, int value) {
  unsigned char *bytes = malloc(size);
  CHECK(cuMemcpyDtoH(bytes, block, size));
  for (size_t at = 0; at < size; ++at) {
    if (bytes[at] != value) {
      fprintf(stderr, "byte %zu of a block of %zu is %d, not %d\n", at, size, bytes[at], value);
      exit(98);
    }
  }
  free(bytes);
}

// Blocks of 1, 2 and 3 MiB, of which the first and the last are freed, one of 4 MiB on a stream, and rows.
__attribute__((noinline)) static void usual(void) {
  CUdeviceptr blocks[3], ordered, rows;
  size_t pitch;
  CUstream stream;
  for (int at = 0; at < 3; ++at) {
    blocks[at] = make_block((size_t)(at + 1) * MIB);
    CHECK(cuMemsetD8(blocks[at], (unsigned char)(at + 1), (size_t)(at + 1) * MIB));
  }
  CHECK(cuStreamCreate(&stream, 1));
  CHECK(cuMemAllocAsync(&ordered, 4 * MIB, stream));
  CHECK(cuMemsetD8Async(ordered, 9, 4 * MIB, stream));
  CHECK(cuStreamSynchronize(stream));
  expect(ordered, 4 * MIB, 9);
  CHECK(cuMemFreeAsync(ordered, stream));
  CHECK(cuMemAllocPitch(&rows, &pitch, 1000, 64, 4));
  for (int at = 0; at < 3; ++at) expect(blocks[at], (size_t)(at + 1) * MIB, at + 1);
  CHECK(cuMemFree(blocks[0]));
  CHECK(cuMemFree(blocks[2]));
  CHECK(cuMemFree(rows));
  REFUSED(cuMemFree(blocks[2]), 1);
  CHECK(cuStreamDestroy(stream));
  puts("done");
}

// Takes 16 MiB at a time until nothing is left.
static void full(void) {
  size_t available, total, again;
  CHECK(cuMemGetInfo(&available, &total));
  CHECK(cuDeviceTotalMem(&again, 0));
  printf("total %zu MiB and %zu MiB, free %zu MiB\n", total / MIB, again / MIB, available / MIB);
  CUdeviceptr blocks[1000], more;
  int count = 0;
  CUresult code;
  while (!(code = cuMemAlloc(&blocks[count], 16 * MIB))) ++count;
  CHECK(cuMemGetInfo(&available, &total));
  printf("%d blocks, then error %d, free %zu MiB\n", count, code, available / MIB);
  REFUSED(cuMemAllocAsync(&more, 16 * MIB, NULL), 2);
  REFUSED(cuMemAlloc(&more, SIZE_MAX), 2);
  CHECK(cuMemFree(blocks[--count]));
  CHECK(cuMemAlloc(&blocks[count++], 16 * MIB));
  while (count) CHECK(cuMemFree(blocks[--count]));
  CHECK(cuMemAlloc(&more, 16 * MIB));
}

// Two handles mapped side by side, a third one that is never mapped.
static void mapped(void) {
  CUdeviceptr place;
  uint64_t handles[3];
  struct Properties properties = {1, 0, 1, 0, {0}};
  struct Access access = {1, 0, 3};
  CHECK(cuMemAddressReserve(&place, 64 * MIB, 0, 0, 0));
  for (int at = 0; at < 3; ++at) CHECK(cuMemCreate(&handles[at], 16 * MIB, &properties, 0));
  for (int at = 0; at < 2; ++at) CHECK(cuMemMap(place + (size_t)at * 16 * MIB, 16 * MIB, 0, handles[at], 0));
  CHECK(cuMemSetAccess(place, 32 * MIB, &access, 1));
  CHECK(cuMemsetD8(place, 5, 32 * MIB));
  expect(place, 32 * MIB, 5);
  // The mapping keeps the memory of a released handle.
  CHECK(cuMemRelease(handles[0]));
  size_t available, total;
  CHECK(cuMemGetInfo(&available, &total));
  printf("free %zu MiB of %zu MiB\n", available / MIB, total / MIB);
  uint64_t more;
  printf("48 MiB more: %d\n", cuMemCreate(&more, 48 * MIB, &properties, 0));
  CHECK(cuMemUnmap(place, 32 * MIB));
  CHECK(cuMemRelease(handles[1]));
  CHECK(cuMemRelease(handles[2]));
  CHECK(cuMemCreate(&more, 48 * MIB, &properties, 0));
}

// What is freed in the order of one stream and used on another has to wait for the work of the first.
static void ordered(void) {
  CUstream streams[4];
  for (int at = 0; at < 4; ++at) CHECK(cuStreamCreate(&streams[at], 1));
  for (int round = 0; round < 60; ++round) {
    CUstream stream = streams[round % 4];
    CUdeviceptr block;
    size_t size = (size_t)(round % 3 + 1) * MIB;
    CHECK(cuMemAllocAsync(&block, size, stream));
    CHECK(cuMemsetD8Async(block, (unsigned char)round, size, stream));
    if (round % 5 == 4) {
      CHECK(cuStreamSynchronize(stream));
      expect(block, size, round);
    }
    if (round % 7 == 6) {
      CHECK(cuMemFree(block));
    } else {
      CHECK(cuMemFreeAsync(block, stream));
    }
    // A block for all streams, whose memory the others have just used.
    CUdeviceptr other = make_block(size);
    CHECK(cuMemsetD8Async(other, 200, size, streams[(round + 1) % 4]));
    CHECK(cuStreamSynchronize(streams[(round + 1) % 4]));
    expect(other, size, 200);
    CHECK(cuMemFree(other));
  }
  CHECK(cuCtxSynchronize());
  puts("in order");
}

static uint64_t next(uint64_t *seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return *seed >> 33;
}

// Random requests, fills and frees on a few streams. Every block has to hold what was written to it last.
static void *disorder(void *argument) {
  uint64_t seed = (uint64_t)argument;
  CHECK(cuCtxSetCurrent(context));
  struct {
    CUdeviceptr address;
    size_t size;
    CUstream stream;
    int value;
  } blocks[12] = {{0}}, *block;
  CUstream streams[3];
  for (int at = 0; at < 3; ++at) CHECK(cuStreamCreate(&streams[at], 1));
  for (int round = 0; round < 250; ++round) {
    block = &blocks[next(&seed) % 12];
    CUstream stream = next(&seed) % 8 ? streams[next(&seed) % 3] : NULL;
    if (!block->address) {
      block->size = next(&seed) % 4 ? (next(&seed) % 256 + 1) * KIB : (next(&seed) % 5 + 1) * MIB;
      block->stream = stream;
      block->value = (int)(next(&seed) % 250 + 1);
      if (next(&seed) % 3) {
        CHECK(cuMemAllocAsync(&block->address, block->size, stream));
      } else {
        CHECK(cuMemAlloc(&block->address, block->size));
      }
      CHECK(cuMemsetD8Async(block->address, (unsigned char)block->value, block->size, stream));
      continue;
    }
    CUdeviceptr base = 0;
    size_t size = 0;
    switch (next(&seed) % 4) {
      case 0:
        CHECK(cuStreamSynchronize(block->stream));
        expect(block->address, block->size, block->value);
        CHECK(cuMemFreeAsync(block->address, block->stream));
        break;
      case 1: CHECK(cuMemFreeAsync(block->address, block->stream)); break;
      case 2: CHECK(cuMemFree(block->address)); break;
      default:
        // Its use moves to another stream.
        CHECK(cuStreamSynchronize(block->stream));
        block->stream = stream;
        block->value = block->value % 250 + 1;
        CHECK(cuMemsetD8Async(block->address, (unsigned char)block->value, block->size, stream));
        CHECK(cuMemGetAddressRange(&base, &size, block->address + block->size / 2));
        if (base != block->address || size < block->size) fail("the range of a block");
        continue;
    }
    block->address = 0;
  }
  for (block = blocks; block < blocks + 12; ++block) {
    if (!block->address) continue;
    CHECK(cuStreamSynchronize(block->stream));
    expect(block->address, block->size, block->value);
    CHECK(cuMemFree(block->address));
  }
  for (int at = 0; at < 3; ++at) CHECK(cuStreamDestroy(streams[at]));
  return NULL;
}

static void chaos(uint64_t seed) {
  pthread_t ids[3];
  for (uint64_t at = 0; at < 3; ++at) pthread_create(&ids[at], NULL, disorder, (void *)(seed * 31 + at));
  for (int at = 0; at < 3; ++at) pthread_join(ids[at], NULL);
  puts("in order");
}

static void questions(void) {
  CUdeviceptr block = make_block(3 * MIB), base = 0, managed;
  size_t size = 0;
  CHECK(cuMemGetAddressRange(&base, &size, block + MIB));
  printf("base %d, size %zu KiB\n", base == block, size / KIB);
  unsigned kind = 0;
  int device = -1;
  CUcontext own = NULL;
  CHECK(cuPointerGetAttribute(&kind, 2, block + 1));
  CHECK(cuPointerGetAttribute(&device, 9, block + 1));
  CHECK(cuPointerGetAttribute(&own, 1, block + 1));
  printf("kind %u, device %d, own context %d\n", kind, device, own == context);
  REFUSED(cuMemAlloc(&block, 0), 1);
  REFUSED(cuMemAlloc(NULL, MIB), 1);
  REFUSED(cuMemFree(block + 512), 1);
  CHECK(cuMemFree(0));
  CHECK(cuMemAllocManaged(&managed, MIB, 1));
  CHECK(cuMemFree(managed));
  CHECK(cuMemFree(block));
}

// Another process reads a block, and writes it.
static void give(char *own, char *way) {
  CUdeviceptr around[2] = {make_block(MIB), make_block(3 * MIB)}, block = make_block(2 * MIB);
  CHECK(cuMemsetD8(block, 7, 2 * MIB));
  struct Shared handle;
  CHECK(cuIpcGetMemHandle(&handle, block));
  char text[129] = "";
  for (int at = 0; at < 64; ++at) sprintf(text + 2 * at, "%02x", handle.bytes[at]);
  char *arguments[] = {own, way, "take", text, NULL};
  pid_t child;
  int status;
  if (posix_spawn(&child, own, NULL, NULL, arguments, environ)) fail("posix_spawn");
  waitpid(child, &status, 0);
  if (status) fail("the other process");
  expect(block, 2 * MIB, 8);
  CHECK(cuMemFree(block));
  CHECK(cuMemFree(around[0]));
  CHECK(cuMemFree(around[1]));
}

static void take(const char *text) {
  struct Shared handle;
  CUdeviceptr block, again;
  for (int at = 0; at < 64; ++at) sscanf(text + 2 * at, "%2hhx", &handle.bytes[at]);
  CHECK(cuIpcOpenMemHandle(&block, handle, 1));
  CUdeviceptr own = make_block(MIB);
  expect(block, 2 * MIB, 7);
  CHECK(cuMemsetD8(block, 8, 2 * MIB));
  CHECK(cuIpcCloseMemHandle(block));
  CHECK(cuIpcOpenMemHandle(&again, handle, 1));
  expect(again, 2 * MIB, 8);
  CHECK(cuIpcCloseMemHandle(again));
  CHECK(cuMemFree(own));
  puts("taken");
}

// A graph that fills a block, launched while the program goes on requesting and freeing.
static void capture(void) {
  CUstream stream, other;
  CUgraph graph, launched;
  CUdeviceptr block = make_block(MIB);
  CHECK(cuStreamCreate(&stream, 1));
  CHECK(cuStreamCreate(&other, 1));
  CHECK(cuStreamBeginCapture(stream, 2));
  CHECK(cuMemsetD8Async(block, 3, MIB, stream));
  CUdeviceptr beside;
  CHECK(cuMemAllocAsync(&beside, MIB, other));
  CHECK(cuMemsetD8Async(beside, 4, MIB, other));
  CHECK(cuStreamEndCapture(stream, &graph));
  CHECK(cuGraphInstantiateWithFlags(&launched, graph, 0));
  for (int round = 0; round < 3; ++round) {
    CHECK(cuMemsetD8(block, 0, MIB));
    CHECK(cuGraphLaunch(launched, stream));
    CHECK(cuStreamSynchronize(stream));
    expect(block, MIB, 3);
    CHECK(cuMemFree(make_block(2 * MIB)));
  }
  CHECK(cuStreamSynchronize(other));
  expect(beside, MIB, 4);
  CHECK(cuMemFreeAsync(beside, other));
  CHECK(cuMemFree(block));
}

static void contexts(void) {
  CUcontext other;
  make_block(MIB);
  CHECK(cuCtxCreate(&other, 0, 0));
  make_block(2 * MIB);
  CHECK(cuCtxDestroy(other));
  CHECK(cuCtxSetCurrent(context));
  make_block(3 * MIB);
  CHECK(cuDevicePrimaryCtxReset(0));
  CHECK(cuDevicePrimaryCtxRetain(&context, 0));
  CHECK(cuCtxSetCurrent(context));
  CUdeviceptr block = make_block(4 * MIB);
  CHECK(cuMemsetD8(block, 1, 4 * MIB));
  CHECK(cuMemFree(block));
}

// Memory of a pool that the program made is of the kind that it asked for.
static void pools(void) {
  CUmemoryPool usual, own;
  struct Properties properties = {1, 1, 1, 0, {0}};
  CUdeviceptr blocks[2];
  CHECK(cuDeviceGetDefaultMemPool(&usual, 0));
  CHECK(cuMemPoolCreate(&own, &properties));
  CHECK(cuMemAllocFromPoolAsync(&blocks[0], MIB, usual, NULL));
  CHECK(cuMemAllocFromPoolAsync(&blocks[1], MIB, own, NULL));
  for (int at = 0; at < 2; ++at) CHECK(cuMemFreeAsync(blocks[at], NULL));
}

static void two_devices(void) {
  CUcontext other;
  CHECK(cuDevicePrimaryCtxRetain(&other, 1));
  CUdeviceptr block = make_block(MIB);
  CHECK(cuCtxSetCurrent(other));
  CUdeviceptr its = make_block(2 * MIB);
  // The other device's block, while this one is current.
  CHECK(cuMemFree(block));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuMemFree(its));
}

static void *thread(void *argument) {
  uintptr_t seed = (uintptr_t)argument;
  CHECK(cuCtxSetCurrent(context));
  CUdeviceptr blocks[8] = {0};
  for (int round = 0; round < 100; ++round) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    CUdeviceptr *block = &blocks[(seed >> 33) % 8];
    if (*block) CHECK(cuMemFree(*block));
    CHECK(cuMemAlloc(block, ((seed >> 40) % 64 + 1) * KIB));
  }
  for (int at = 0; at < 8; ++at) {
    if (blocks[at]) CHECK(cuMemFree(blocks[at]));
  }
  return NULL;
}

static void threads(void) {
  pthread_t ids[6];
  for (uintptr_t at = 0; at < 6; ++at) pthread_create(&ids[at], NULL, thread, (void *)(at + 1));
  for (int at = 0; at < 6; ++at) pthread_join(ids[at], NULL);
  puts("done");
}

// Becomes another program, with the same process id.
static void become(char *own, char *way) {
  make_block(7 * MIB);
  char *arguments[] = {own, way, "usual", NULL};
  execv(own, arguments);
}

static int code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }

// Starts this program again, with the case `usual`.
static int start(const char *how, char *own, char *way) {
  char *arguments[] = {own, way, "usual", NULL};
  int status = 0;
  pid_t child;
  if (!strcmp(how, "exec")) return execv(own, arguments);
  if (!strcmp(how, "spawn")) {
    if (posix_spawn(&child, own, NULL, NULL, arguments, environ)) return 97;
    waitpid(child, &status, 0);
    return code_of(status);
  }
  char command[4096];
  snprintf(command, sizeof command, "'%s' %s usual", own, way);
  return code_of(system(command));
}

int main(int count, char **arguments) {
  const char *way = count > 1 ? arguments[1] : "dlopen", *name = count > 2 ? arguments[2] : "usual";
  for (const char *const *how = (const char *const[]){"exec", "spawn", "system", NULL}; *how; ++how) {
    if (!strcmp(name, *how)) return start(name, arguments[0], arguments[1]);
  }
  int forked = 0;
  if (!strcmp(name, "fork")) forked = fork() ? 1 : 2;
  open_driver(way);
  begin(0);
  if (!strcmp(name, "usual") || forked) usual();
  if (!strcmp(name, "full")) full();
  if (!strcmp(name, "mapped")) mapped();
  if (!strcmp(name, "ordered")) ordered();
  if (!strcmp(name, "questions")) questions();
  if (!strcmp(name, "contexts")) contexts();
  if (!strcmp(name, "pools")) pools();
  if (!strcmp(name, "give")) give(arguments[0], arguments[1]);
  if (!strcmp(name, "take")) {
    take(arguments[3]);
    return 0;
  }
  if (!strcmp(name, "capture")) capture();
  if (!strcmp(name, "become")) become(arguments[0], arguments[1]);
  if (!strcmp(name, "devices")) two_devices();
  if (!strcmp(name, "threads")) threads();
  if (!strncmp(name, "chaos-", 6)) chaos(strtoull(name + 6, NULL, 10));
  if (!strcmp(name, "late-fork")) {
    make_block(MIB);
    if (!fork()) {
      CUdeviceptr block;
      // CUDA does not survive a fork.
      _exit(cuMemAlloc(&block, MIB) == 3 ? 0 : 98);
    }
    int status;
    wait(&status);
    return code_of(status);
  }
  if (!strncmp(name, "signal-", 7)) {
    make_block(5 * MIB);
    fflush(stdout);
    raise(atoi(name + 7));
    return 97;
  }
  if (!strcmp(name, "_exit")) {
    make_block(5 * MIB);
    _exit(7);
  }
  int status = 0;
  if (forked == 1) wait(&status);
  return count > 3 ? atoi(arguments[3]) : code_of(status);
}
