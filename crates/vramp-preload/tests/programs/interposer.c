// A library that a user preloads: it stands in front of cuMemAlloc and of dlsym, and says so.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *(*Dlsym)(void *, const char *);

static void say(const char *line) {
  if (write(2, line, strlen(line)) < 0) abort();
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
  static int (*next)(uint64_t *, size_t);
  if (!next) next = (int (*)(uint64_t *, size_t))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
  say("interposed cuMemAlloc\n");
  return next ? next(address, size) : 302;
}

#ifdef OWN_DLSYM
void *dlsym(void *handle, const char *name) {
  static Dlsym next;
  if (!next) {
    next = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!next) next = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
    if (!next) next = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  }
  if (!strcmp(name, "cuInit")) say("interposed dlsym\n");
  return next(handle, name);
}
#endif
