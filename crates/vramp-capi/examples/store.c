/* Buffers whose contents go to a store of the program: here files of its own, named by their keys. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vramp.h>

#define BYTES ((size_t)8 << 20)

static void check(vramp_status_t status) {
    if (status == VRAMP_OK) return;
    fprintf(stderr, "%s: %s\n", vramp_status_name(status), vramp_last_error());
    exit(1);
}

static const char *path_of(void *user, uint64_t key, char *path) {
    sprintf(path, "%.200s/%lu.object", (const char *)user, (unsigned long)key);
    return path;
}

/* Called on threads of vramp, with no lock held, at the same time for different keys. */
static int32_t store_write(void *user, uint64_t key, const void *bytes, size_t size) {
    char path[256];
    FILE *file = fopen(path_of(user, key, path), "wb");
    size_t written = file ? fwrite(bytes, 1, size, file) : 0;
    int closed = file && fclose(file) == 0;
    return closed && written == size ? VRAMP_OK : VRAMP_ERROR_FILE; /* the contents stay */
}

static int32_t store_read(void *user, uint64_t key, void *bytes, size_t size) {
    char path[256];
    FILE *file = fopen(path_of(user, key, path), "rb");
    size_t found = file ? fread(bytes, 1, size, file) : 0;
    if (file) fclose(file);
    return found == size ? VRAMP_OK : VRAMP_ERROR_FILE;
}

static int32_t store_remove(void *user, uint64_t key) {
    char path[256];
    return remove(path_of(user, key, path)) == 0 ? VRAMP_OK : VRAMP_ERROR_FILE;
}

int main(int count, char **arguments) {
    static char bytes[BYTES], back[BYTES];
    vramp_store_t store = {0};
    vramp_tiers_options_t options = {0};
    vramp_allocator_t allocator;
    vramp_buffer_t buffer;
    store.struct_size = sizeof store;
    store.capacity = (uint64_t)1 << 30;
    store.user = count > 1 && *arguments[1] ? arguments[1] : ".";
    store.write = store_write, store.read = store_read, store.remove = store_remove;
    options.struct_size = sizeof options;
    options.host_bytes = (uint64_t)64 << 20;
    options.store = &store;
    check(vramp_map_simulated_cards());
    check(vramp_open("auto", "limit=256MiB", &allocator));
    check(vramp_tiers_open_with(allocator, &options));
    check(vramp_buffer_create(allocator, BYTES, &buffer));
    memset(bytes, 7, BYTES);
    check(vramp_buffer_write(allocator, buffer, 0, bytes, BYTES));
    check(vramp_buffer_spill_to(allocator, buffer, VRAMP_TIER_DISK, NULL));
    check(vramp_buffer_read(allocator, buffer, 0, back, BYTES));
    check(vramp_close(allocator)); /* removes the objects */
    puts(memcmp(bytes, back, BYTES) == 0 ? "passed" : "other bytes");
    return 0;
}
