// A library that uses memory of the device while it is loaded.
#include <stdint.h>
#include <stdlib.h>

extern int cuMemAlloc_v2(uint64_t *, size_t), cuMemFree_v2(uint64_t);

__attribute__((constructor)) static void load(void) {
  uint64_t block;
  if (cuMemAlloc_v2(&block, 4096) || cuMemFree_v2(block)) abort();
}
