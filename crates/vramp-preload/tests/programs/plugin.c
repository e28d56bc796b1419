// A library that a program loads for itself (RTLD_LOCAL). It is linked against the driver, and looks names up in the
// scope that it sees: the driver's, and one of its own that begins like those of the driver.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

int cuInit(unsigned flags);

int curious(void) { return 42; }

// Returns 0 if all are found.
int look_around(void) {
  int (*own)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "curious");
  if (!own || own() != 42) return 1;
  if (!dlsym(RTLD_DEFAULT, "cuInit") || !dlsym(RTLD_DEFAULT, "cuMemAlloc_v2")) return 2;
  if (dlsym(RTLD_DEFAULT, "cu") || dlsym(RTLD_NEXT, "curious")) return 3;
  return cuInit(0);
}
