/* Arenas for caches in C: every function, and what a program may do wrong, on a simulated card with the host's
   memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vramp.h"

#define MIB ((size_t)1 << 20)
#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition,          \
                    vramp_last_error());                                        \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static vramp_allocator_t allocator;
static vramp_stream_t stream;
static const vramp_stream_t any = {0};

static vramp_kv_pages_t pages(uint32_t first, uint32_t end) {
    vramp_kv_pages_t made;
    made.first = first;
    made.end = end;
    return made;
}

/* 4 tensors of 16 pages of 2 MiB. */
static vramp_kv_options_t options(uint32_t arrangement) {
    vramp_kv_options_t made;
    memset(&made, 0, sizeof made);
    made.struct_size = sizeof made;
    made.tensors = 4;
    made.bytes_each = 32 * MIB;
    made.arrangement = arrangement;
    made.superpage = 2 * MIB;
    return made;
}

static vramp_kv_stats_t stats_of(vramp_kv_t kv) {
    vramp_kv_stats_t stats;
    memset(&stats, 0, sizeof stats);
    stats.struct_size = sizeof stats;
    CHECK(vramp_kv_stats(allocator, kv, &stats) == VRAMP_OK);
    CHECK(stats.struct_size == sizeof stats && stats.pages == 16 && stats.page_bytes == 8 * MIB);
    return stats;
}

static void moves(uint32_t arrangement) {
    vramp_kv_options_t wanted = options(arrangement);
    vramp_kv_t kv;
    vramp_kv_pages_t some[3], taken[16];
    void *first, *second;
    size_t length = 0, ranges = 0;
    uint64_t released = 0;
    vramp_export_t exported;
    CHECK(vramp_kv_create(allocator, &wanted, &kv) == VRAMP_OK && kv.id != 0);
    CHECK(vramp_kv_address(allocator, kv, 0, &first, &length) == VRAMP_OK);
    CHECK(vramp_kv_address(allocator, kv, 1, &second, NULL) == VRAMP_OK);
    if (arrangement == VRAMP_KV_SEPARATE) {
        CHECK(length == 32 * MIB && (char *)second == (char *)first + 32 * MIB);
    } else {
        CHECK(length == 128 * MIB && (char *)second == (char *)first + 2 * MIB);
    }

    some[0] = pages(0, 2);
    some[1] = pages(5, 6);
    CHECK(vramp_kv_commit(allocator, kv, some, 2, stream) == VRAMP_OK);
    memset(first, 7, 2 * MIB);
    memset(second, 8, 2 * MIB);
    CHECK(*(char *)first == 7 && stats_of(kv).committed == 3);
    CHECK(vramp_kv_record_use(allocator, kv, stream) == VRAMP_OK);
    CHECK(vramp_kv_park_first(allocator, kv, 1, taken, 16, &ranges) == VRAMP_OK && ranges == 1);
    CHECK(taken[0].end == taken[0].first + 1);
    CHECK(vramp_kv_park(allocator, kv, &some[0], 1, stream) == VRAMP_OK);
    CHECK(stats_of(kv).committed == 1 && stats_of(kv).parked == 2 && stats_of(kv).moving == 0);
    CHECK(vramp_kv_take(allocator, kv, 2, any, taken, 16, &ranges) == VRAMP_OK);
    CHECK(ranges == 1 && taken[0].first == 0 && taken[0].end == 2 && *(char *)first == 7);
    CHECK(vramp_export_range(allocator, first, 2 * MIB, &exported) == VRAMP_OK);
    CHECK(vramp_kv_park(allocator, kv, some, 2, any) == VRAMP_OK);
    CHECK(vramp_kv_release(allocator, kv, 0, &released) == VRAMP_OK && stats_of(kv).parked == 1);
    CHECK(released < 24 * MIB && *(char *)first == 7);
    CHECK(vramp_export_close(allocator, exported) == VRAMP_OK);
    CHECK(vramp_kv_release(allocator, kv, 0, &released) == VRAMP_OK && stats_of(kv).parked == 0);
    CHECK(vramp_export_range(allocator, first, 2 * MIB, &exported) != VRAMP_OK);
    CHECK(vramp_kv_commit(allocator, kv, some, 2, any) == VRAMP_OK);
    CHECK(vramp_kv_park(allocator, kv, some, 2, any) == VRAMP_OK);
    CHECK(vramp_kv_release(allocator, kv, 8 * MIB, &released) == VRAMP_OK && released == 16 * MIB);
    CHECK(vramp_kv_release(allocator, kv, 0, NULL) == VRAMP_OK && stats_of(kv).parked == 0);

    CHECK(vramp_kv_set_limit(allocator, kv, 16 * MIB) == VRAMP_OK && stats_of(kv).limit == 16 * MIB);
    some[0] = pages(0, 3);
    CHECK(vramp_kv_commit(allocator, kv, some, 1, any) == VRAMP_ERROR_OUT_OF_MEMORY);
    CHECK(strstr(vramp_last_error(), "limit") != NULL && stats_of(kv).committed == 0);
    CHECK(vramp_kv_set_limit(allocator, kv, 0) == VRAMP_OK && stats_of(kv).limit == 0);
    CHECK(vramp_kv_commit(allocator, kv, some, 1, any) == VRAMP_OK);
    CHECK(vramp_kv_destroy(allocator, kv) == VRAMP_OK);
    CHECK(vramp_audit(allocator) == VRAMP_OK);
}

static void misuse(void) {
    vramp_kv_options_t wanted = options(VRAMP_KV_SEPARATE);
    vramp_kv_t kv, none = {0};
    vramp_kv_pages_t some[2], taken[4];
    vramp_stream_t foreign = {77};
    size_t ranges = 0;
    void *address;
    wanted.struct_size = 0;
    CHECK(vramp_kv_create(allocator, &wanted, &kv) == VRAMP_ERROR_STRUCT_SIZE);
    wanted.struct_size = sizeof wanted;
    CHECK(vramp_kv_create(allocator, NULL, &kv) == VRAMP_ERROR_NULL);
    CHECK(vramp_kv_create(allocator, &wanted, NULL) == VRAMP_ERROR_NULL);
    wanted.arrangement = 9;
    CHECK(vramp_kv_create(allocator, &wanted, &kv) == VRAMP_ERROR_RANGE);
    wanted = options(VRAMP_KV_SEPARATE);
    wanted.page = 5;
    CHECK(vramp_kv_create(allocator, &wanted, &kv) == VRAMP_ERROR_RANGE);
    CHECK(strstr(vramp_last_error(), "multiple") != NULL);
    wanted = options(VRAMP_KV_SEPARATE);
    CHECK(vramp_kv_create(allocator, &wanted, &kv) == VRAMP_OK);
    CHECK(vramp_kv_address(allocator, kv, 4, &address, NULL) == VRAMP_ERROR_RANGE);

    some[0] = pages(0, 2);
    some[1] = pages(1, 3);
    CHECK(vramp_kv_commit(allocator, kv, some, 2, stream) == VRAMP_ERROR_RANGE);
    CHECK(strstr(vramp_last_error(), "page 1 is given twice") != NULL);
    CHECK(vramp_kv_commit(allocator, kv, NULL, 1, stream) == VRAMP_ERROR_NULL);
    CHECK(vramp_kv_commit(allocator, kv, some, 1, foreign) == VRAMP_ERROR_UNKNOWN_STREAM);
    CHECK(vramp_kv_commit(allocator, kv, some, 1, stream) == VRAMP_OK);
    CHECK(vramp_kv_commit(allocator, kv, some, 1, stream) == VRAMP_ERROR_RANGE);
    CHECK(strstr(vramp_last_error(), "page 0 is committed already") != NULL);
    CHECK(vramp_kv_park(allocator, kv, &some[1], 1, stream) == VRAMP_ERROR_RANGE);
    CHECK(strstr(vramp_last_error(), "page 2 is not committed") != NULL);
    some[0] = pages(15, 17);
    CHECK(vramp_kv_commit(allocator, kv, some, 1, stream) == VRAMP_ERROR_RANGE);
    CHECK(strstr(vramp_last_error(), "there are 16 pages") != NULL);
    CHECK(vramp_kv_take(allocator, kv, 5, stream, taken, 4, &ranges) == VRAMP_ERROR_RANGE);
    CHECK(vramp_kv_take(allocator, kv, 2, stream, NULL, 4, &ranges) == VRAMP_ERROR_NULL);
    CHECK(stats_of(kv).committed == 2);

    CHECK(vramp_kv_commit(allocator, none, some, 1, stream) == VRAMP_ERROR_UNKNOWN_ARENA);
    CHECK(strstr(vramp_last_error(), "vramp_kv_create") != NULL);
    CHECK(vramp_kv_destroy(allocator, kv) == VRAMP_OK);
    CHECK(vramp_kv_destroy(allocator, kv) == VRAMP_ERROR_UNKNOWN_ARENA);
    CHECK(vramp_kv_park(allocator, kv, some, 1, any) == VRAMP_ERROR_UNKNOWN_ARENA);
    CHECK(vramp_kv_create(allocator, &wanted, &kv) == VRAMP_OK);
}

int main(void) {
    CHECK(vramp_map_simulated_cards() == VRAMP_OK);
    CHECK(vramp_open("sim:h200", NULL, &allocator) == VRAMP_OK);
    CHECK(vramp_stream_create(allocator, &stream) == VRAMP_OK);
    moves(VRAMP_KV_SEPARATE);
    moves(VRAMP_KV_INTERLEAVED);
    misuse();
    /* With an arena that was not destroyed. */
    CHECK(vramp_close(allocator) == VRAMP_OK);
    printf("passed\n");
    return 0;
}
