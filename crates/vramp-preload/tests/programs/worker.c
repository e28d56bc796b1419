// A program that works on its memory until it is asked to stop: worker MIB FILE. FILE is two numbers of 8 bytes: the steps
// so far, and whether to stop. It ends with 4 where a byte is not what was written last.
#include "driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static void check(CUresult code, const char *what) {
  if (code != 0) {
    fprintf(stderr, "%s: %d\n", what, code);
    exit(3);
  }
}

#define CHECK(call) check(call, #call)

enum { MIB = 1 << 20, BLOCKS_MAX = 4096 };

static CUdeviceptr blocks[BLOCKS_MAX];
static unsigned char written[BLOCKS_MAX];

static void compare(unsigned block) {
  static unsigned char bytes[MIB];
  CHECK(cuMemcpyDtoH(bytes, blocks[block], MIB));
  for (size_t i = 0; i < MIB; i++)
    if (bytes[i] != written[block]) {
      fprintf(stderr, "block %u has %u at %zu, not %u\n", block, bytes[i], i, written[block]);
      exit(4);
    }
}

int main(int count, char **words) {
  if (count < 3) return 2;
  unsigned number = (unsigned)atoi(words[1]);
  if (number > BLOCKS_MAX) return 2;
  int file = open(words[2], O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, 16)) return 2;
  volatile uint64_t *steps = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (steps == MAP_FAILED) return 2;
  open_driver("runtime");
  CUcontext context;
  CUstream stream;
  CHECK(cuInit(0));
  CHECK(cuDevicePrimaryCtxRetain(&context, 0));
  CHECK(cuCtxSetCurrent(context));
  CHECK(cuStreamCreate(&stream, 1));
  for (unsigned i = 0; i < number; i++) {
    CHECK(cuMemAlloc(&blocks[i], MIB));
    CHECK(cuMemsetD8(blocks[i], 0, MIB));
  }
  uint64_t random = 88172645463325252u;
  while (!steps[1]) {
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    unsigned block = (unsigned)(random % number);
    written[block] = (unsigned char)(random >> 32);
    CHECK(cuMemsetD8Async(blocks[block], written[block], MIB, stream));
    CUdeviceptr scratch;
    CHECK(cuMemAllocAsync(&scratch, 4096, stream));
    CHECK(cuMemFreeAsync(scratch, stream));
    CHECK(cuStreamSynchronize(stream));
    if (random % 4 == 0) compare(block);
    ++*steps;
    usleep(200);
  }
  for (unsigned i = 0; i < number; i++) {
    compare(i);
    CHECK(cuMemFree(blocks[i]));
  }
  puts("right");
  return 0;
}
