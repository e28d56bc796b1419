// A program without CUDA: prints its environment and how many libraries are loaded, and ends with 5.
#define _GNU_SOURCE
#include <link.h>
#include <stdio.h>
#include <string.h>

extern char **environ;

static int count_library(struct dl_phdr_info *info, size_t size, void *count) {
  (void)size;
  if (strstr(info->dlpi_name, "libcuda")) puts("libcuda is loaded");
  ++*(int *)count;
  return 0;
}

int main(int count, char **arguments) {
  for (char **variable = environ; *variable; ++variable) {
    if (strncmp(*variable, "LD_PRELOAD=", 11) && strncmp(*variable, "VRAMP_EXEC=", 11)) puts(*variable);
  }
  for (int at = 0; at < count; ++at) puts(arguments[at]);
  int libraries = 0;
  dl_iterate_phdr(count_library, &libraries);
  fprintf(stderr, "%d\n", libraries);
  return 5;
}
