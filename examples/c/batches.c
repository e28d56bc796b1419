/* Batches of different sizes under a limit, beside a cache that is dropped when memory runs short. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vramp.h>

#define MIB ((size_t)1 << 20)
#define CACHED 4

static void check(vramp_status_t status, const char *what) {
    if (status != VRAMP_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, vramp_status_name(status), vramp_last_error());
        exit(1);
    }
}

/* Memory that the program can do without. */
struct cache {
    vramp_allocator_t allocator;
    void *blocks[CACHED];
};

/* Called before a request fails: frees a block, and has the request tried again. */
static int drop_one(const vramp_shortage_t *shortage, void *user) {
    struct cache *cache = user;
    int i;
    for (i = 0; i < CACHED; i++) {
        if (cache->blocks[i] != NULL) {
            printf("%lu MiB are short: a cached block is freed\n",
                   (unsigned long)(shortage->requested / MIB));
            check(vramp_free_on_own_stream(cache->allocator, cache->blocks[i]), "free");
            cache->blocks[i] = NULL;
            return 1;
        }
    }
    return 0;
}

int main(int count, char **arguments) {
    struct cache cache;
    vramp_allocator_t allocator;
    vramp_device_t device;
    vramp_stream_t stream;
    vramp_stats_t stats;
    vramp_status_t status;
    uint64_t handler;
    void *raw, *batch;
    int i;

    check(vramp_check_version(VRAMP_VERSION), "version");
    check(vramp_open(count > 1 ? arguments[1] : "auto", "limit=1GiB", &allocator), "open");
    memset(&device, 0, sizeof device);
    device.struct_size = sizeof device;
    check(vramp_device(allocator, &device), "device");
    printf("%s: %s\n", device.id, device.name);

    check(vramp_stream_create(allocator, &stream), "stream");
    if (!device.simulated) {
        /* What kernels are launched on: a CUstream, which is a cudaStream_t. */
        check(vramp_stream_raw(allocator, stream, &raw), "raw stream");
        printf("stream %p\n", raw);
    }

    cache.allocator = allocator;
    for (i = 0; i < CACHED; i++) {
        check(vramp_malloc(allocator, 128 * MIB, stream, &cache.blocks[i]), "malloc");
    }
    check(vramp_on_shortage(allocator, drop_one, &cache, &handler), "handler");

    for (i = 1; i <= 7; i++) {
        check(vramp_malloc(allocator, (size_t)i * 100 * MIB, stream, &batch), "malloc");
        /* Queue work on the stream that uses the batch. The free does not wait for it. */
        check(vramp_free(allocator, batch, stream), "free");
    }
    status = vramp_malloc(allocator, 2048 * MIB, stream, &batch);
    if (status != VRAMP_ERROR_OUT_OF_MEMORY || batch != NULL) {
        fprintf(stderr, "2 GiB do not fit into 1 GiB: %s\n", vramp_status_name(status));
        return 1;
    }

    memset(&stats, 0, sizeof stats);
    stats.struct_size = sizeof stats;
    check(vramp_stats(allocator, &stats), "stats");
    printf("peak allocated %lu MiB, peak reserved %lu MiB\n",
           (unsigned long)(stats.live_peak / MIB), (unsigned long)(stats.reserved_peak / MIB));
    check(vramp_close(allocator), "close");
    return 0;
}
