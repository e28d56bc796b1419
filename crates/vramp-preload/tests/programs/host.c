// Loads the plugin and asks it.
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **arguments) {
  void *plugin = dlopen(count > 1 ? arguments[1] : "plugin.so", RTLD_NOW | RTLD_LOCAL);
  if (!plugin) return puts(dlerror()), 97;
  int (*look_around)(void) = (int (*)(void))dlsym(plugin, "look_around");
  return look_around();
}
