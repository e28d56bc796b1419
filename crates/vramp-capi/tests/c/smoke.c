/* Every function of the header, as a C program uses it, on a simulated card. */
#include <stdio.h>
#include <string.h>

#include "vramp.h"

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition,          \
                    vramp_last_error());                                        \
            return 1;                                                           \
        }                                                                       \
    } while (0)

int main(void) {
    vramp_allocator_t allocator = {0}, none = {0};
    vramp_stream_t stream, other;
    void *block = NULL, *small = NULL;
    size_t usable = 0;
    vramp_stats_t stats;

    CHECK(strlen(vramp_version()) >= 5);
    CHECK(strcmp(vramp_last_error(), "") == 0);
    CHECK(vramp_open("sim:h200", "preset=vramp,limit=256MiB", &allocator) == VRAMP_OK);
    CHECK(vramp_stream_create(allocator, &stream) == VRAMP_OK);
    CHECK(vramp_stream_adopt(allocator, (void *)0x10, &other) == VRAMP_OK);
    CHECK(vramp_malloc(allocator, 64 << 20, stream, &block) == VRAMP_OK && block != NULL);
    CHECK(vramp_malloc(allocator, 100, other, &small) == VRAMP_OK && small != NULL);
    CHECK(vramp_usable_size(allocator, small, &usable) == VRAMP_OK && usable >= 100);
    CHECK(vramp_record_use(allocator, block, other) == VRAMP_OK);

    memset(&stats, 0, sizeof stats);
    stats.struct_size = sizeof stats;
    CHECK(vramp_stats(allocator, &stats) == VRAMP_OK);
    CHECK(stats.live == (64 << 20) + 100 && stats.placed == 2 && stats.reserved >= stats.live);

    CHECK(vramp_free(allocator, block, stream) == VRAMP_OK);
    CHECK(vramp_free(allocator, block, stream) == VRAMP_ERROR_UNKNOWN_POINTER);
    CHECK(strstr(vramp_last_error(), "freed already") != NULL);
    CHECK(vramp_free(allocator, NULL, stream) == VRAMP_ERROR_UNKNOWN_POINTER);
    CHECK(vramp_free(none, small, stream) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    CHECK(vramp_malloc(allocator, 1u << 30, stream, &block) == VRAMP_ERROR_OUT_OF_MEMORY);
    CHECK(block == NULL);
    CHECK(strcmp(vramp_status_name(VRAMP_ERROR_OUT_OF_MEMORY), "VRAMP_ERROR_OUT_OF_MEMORY") == 0);

    CHECK(vramp_stream_forget(allocator, other) == VRAMP_OK);
    CHECK(vramp_free(allocator, small, stream) == VRAMP_OK);
    CHECK(vramp_trim(allocator, 0) == VRAMP_OK);
    CHECK(vramp_audit(allocator) == VRAMP_OK);
    CHECK(vramp_close(allocator) == VRAMP_OK);
    CHECK(vramp_close(allocator) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    puts("passed");
    return 0;
}
