/* Regions by tag in C: every function, and what a program may do wrong, on a simulated card with the
   host's memory. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
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
static const char *const tags[] = {"cache", "weights"};

static void *allocate(const char *tag, const vramp_region_options_t *options, size_t size) {
    vramp_region_scope_t scope;
    void *block = NULL;
    CHECK(vramp_region_begin(allocator, tag, options, &scope) == VRAMP_OK && scope.id != 0);
    CHECK(vramp_malloc(allocator, size, stream, &block) == VRAMP_OK);
    CHECK(vramp_region_end(scope) == VRAMP_OK);
    CHECK(vramp_region_end(scope) == VRAMP_ERROR_REGION);
    return block;
}

static vramp_region_status_t status_of(const char *tag) {
    vramp_region_status_t regions[4];
    size_t count = 0, nth = 0;
    memset(regions, 0, sizeof regions);
    regions[0].struct_size = sizeof regions[0];
    CHECK(vramp_region_status(allocator, regions, 4, &count) == VRAMP_OK && count <= 4);
    while (nth < count && strcmp(regions[nth].tag, tag) != 0) nth++;
    CHECK(nth < count && regions[nth].tag_length == strlen(tag));
    return regions[nth];
}

static void *end_elsewhere(void *argument) {
    CHECK(vramp_region_end(*(vramp_region_scope_t *)argument) == VRAMP_ERROR_REGION);
    CHECK(strstr(vramp_last_error(), "thread that began it") != NULL);
    return NULL;
}

static void moves(void) {
    vramp_region_options_t options;
    vramp_pause_options_t part;
    char *weights, *cache;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    weights = allocate("weights", NULL, 8 * MIB);
    options.backup = VRAMP_BACKUP_NONE;
    cache = allocate("cache", &options, 16 * MIB);
    memset(weights, 5, 8 * MIB);
    CHECK(vramp_region_pause(allocator, tags, 2, NULL) == VRAMP_OK);
    CHECK(status_of("weights").phase == VRAMP_REGION_ASLEEP && status_of("weights").on_card == 0);
    CHECK(status_of("weights").on_host >= 8 * MIB && status_of("cache").on_host == 0);
    CHECK(vramp_region_resume(allocator, NULL, 0) == VRAMP_OK);
    CHECK(weights[0] == 5 && weights[8 * MIB - 1] == 5);
    CHECK(vramp_region_clean(allocator, &tags[1], 1) == VRAMP_OK);
    memset(&part, 0, sizeof part);
    part.struct_size = sizeof part;
    part.keep = 4 * MIB;
    CHECK(vramp_region_pause(allocator, &tags[1], 1, &part) == VRAMP_OK);
    CHECK(status_of("weights").on_card <= 4 * MIB && status_of("weights").to_copy == 0);
    part.keep = 0;
    part.discard = 1;
    CHECK(vramp_region_pause(allocator, &tags[1], 1, &part) == VRAMP_OK);
    CHECK(status_of("weights").on_card == 0 && status_of("weights").on_host == 0);
    CHECK(vramp_free(allocator, cache, stream) == VRAMP_OK);
    CHECK(vramp_free(allocator, weights, stream) == VRAMP_OK);
    CHECK(vramp_region_resume(allocator, tags, 2) == VRAMP_OK);
    CHECK(vramp_trim(allocator, 0) == VRAMP_OK && status_of("weights").on_card == 0);
}

static void misuse(void) {
    vramp_region_scope_t scope, outside, none = {0};
    vramp_region_options_t options = {0};
    vramp_arena_t arena;
    vramp_graph_t graph;
    pthread_t thread;
    size_t count = 0;
    const char *wrong = "wieghts", *null = NULL;
    void *block;
    CHECK(vramp_region_end(none) == VRAMP_ERROR_REGION);
    CHECK(vramp_region_pause(allocator, &wrong, 1, NULL) == VRAMP_ERROR_REGION);
    CHECK(strstr(vramp_last_error(), "\"weights\"") != NULL);
    CHECK(vramp_region_pause(allocator, &null, 1, NULL) == VRAMP_ERROR_NULL);
    CHECK(vramp_region_begin(allocator, "weights", &options, &scope) == VRAMP_ERROR_STRUCT_SIZE);
    options.struct_size = sizeof options;
    options.backup = 7;
    CHECK(vramp_region_begin(allocator, "weights", &options, &scope) == VRAMP_ERROR_RANGE);
    options.backup = VRAMP_BACKUP_NONE;
    CHECK(vramp_region_begin(allocator, "weights", &options, &scope) == VRAMP_ERROR_OPTION);
    CHECK(vramp_region_status(allocator, NULL, 0, &count) == VRAMP_OK && count == 2);

    CHECK(vramp_region_begin(allocator, "weights", NULL, &scope) == VRAMP_OK);
    CHECK(pthread_create(&thread, NULL, end_elsewhere, &scope) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(vramp_region_disable(allocator, &outside) == VRAMP_OK);
    CHECK(vramp_malloc(allocator, 4 * MIB, stream, &block) == VRAMP_OK);
    CHECK(status_of("weights").on_card == 0);
    CHECK(vramp_free(allocator, block, stream) == VRAMP_OK);
    CHECK(vramp_region_end(outside) == VRAMP_OK);
    CHECK(vramp_malloc(allocator, 4 * MIB, stream, &block) == VRAMP_OK);

    /* A capture may use the region. */
    CHECK(vramp_arena_create(allocator, NULL, &arena) == VRAMP_OK);
    CHECK(vramp_capture_begin(allocator, stream, arena) == VRAMP_OK);
    CHECK(vramp_region_pause(allocator, &tags[1], 1, NULL) == VRAMP_ERROR_CAPTURE);
    CHECK(vramp_capture_end(allocator, arena, &graph) == VRAMP_OK);
    CHECK(vramp_region_pause(allocator, &tags[1], 1, NULL) == VRAMP_OK);
    CHECK(vramp_free(allocator, block, stream) == VRAMP_OK);
    CHECK(vramp_malloc(allocator, 100, stream, &block) == VRAMP_ERROR_REGION && block == NULL);
    CHECK(vramp_close(allocator) == VRAMP_OK);
    /* The scope outlives the allocator. */
    CHECK(vramp_region_end(scope) == VRAMP_OK);
    CHECK(vramp_region_status(allocator, NULL, 0, &count) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
}

static void pressure(void) {
    uint64_t registration = 0;
    void *block;
    allocate("weights", NULL, 40 * MIB);
    CHECK(vramp_malloc(allocator, 40 * MIB, stream, &block) == VRAMP_ERROR_OUT_OF_MEMORY);
    CHECK(vramp_region_on_pressure(allocator, &tags[1], 1, &registration) == VRAMP_OK);
    CHECK(vramp_malloc(allocator, 40 * MIB, stream, &block) == VRAMP_OK);
    CHECK(status_of("weights").phase == VRAMP_REGION_ASLEEP);
    CHECK(vramp_unobserve(allocator, registration) == VRAMP_OK);
    CHECK(vramp_free(allocator, block, stream) == VRAMP_OK);
    CHECK(vramp_trim(allocator, 0) == VRAMP_OK);
    CHECK(vramp_region_resume(allocator, NULL, 0) == VRAMP_OK);
    CHECK(vramp_trim(allocator, 0) == VRAMP_OK);
}

static int calls[2];

static int before_sleep(void *user) {
    ++calls[0];
    /* What moves regions, or closes the allocator, would wait for its own end. */
    CHECK(vramp_region_pause(allocator, NULL, 0, NULL) == VRAMP_ERROR_BUSY);
    CHECK(vramp_region_resume(allocator, NULL, 0) == VRAMP_ERROR_BUSY);
    CHECK(vramp_close(allocator) == VRAMP_ERROR_BUSY);
    return *(int *)user;
}

static int after_sleep(void *user) {
    void *block;
    (void)user;
    ++calls[1];
    CHECK(vramp_malloc(allocator, MIB, stream, &block) == VRAMP_OK);
    CHECK(vramp_free(allocator, block, stream) == VRAMP_OK);
    return 0;
}

static void around(void) {
    vramp_sleep_callbacks_t pair;
    uint64_t registration = 0;
    int result = 0;
    memset(&pair, 0, sizeof pair);
    CHECK(vramp_region_around_sleep(allocator, NULL, 0, NULL, &registration) == VRAMP_ERROR_NULL);
    CHECK(vramp_region_around_sleep(allocator, NULL, 0, &pair, &registration) ==
          VRAMP_ERROR_STRUCT_SIZE);
    pair.struct_size = sizeof pair;
    CHECK(vramp_region_around_sleep(allocator, NULL, 0, &pair, &registration) == VRAMP_ERROR_NULL);
    pair.name = "the network card";
    pair.before = before_sleep;
    pair.after = after_sleep;
    pair.user = &result;
    CHECK(vramp_region_around_sleep(allocator, NULL, 0, &pair, NULL) == VRAMP_ERROR_NULL);
    CHECK(vramp_region_around_sleep(allocator, NULL, 0, &pair, &registration) == VRAMP_OK);
    CHECK(vramp_region_pause(allocator, NULL, 0, NULL) == VRAMP_OK);
    allocate("weights", NULL, MIB);
    CHECK(calls[0] == 0);
    CHECK(vramp_region_pause(allocator, NULL, 0, NULL) == VRAMP_OK && calls[0] == 1);
    CHECK(vramp_region_resume(allocator, NULL, 0) == VRAMP_OK && calls[1] == 1);
    result = 7;
    CHECK(vramp_region_pause(allocator, NULL, 0, NULL) == VRAMP_ERROR_CALLBACK && calls[0] == 2);
    CHECK(strstr(vramp_last_error(), "\"the network card\": it returned 7") != NULL);
    CHECK(status_of("weights").phase == VRAMP_REGION_AWAKE);
    CHECK(vramp_unobserve(allocator, registration) == VRAMP_OK);
    CHECK(vramp_unobserve(allocator, registration) == VRAMP_ERROR_RANGE);
    CHECK(vramp_region_pause(allocator, NULL, 0, NULL) == VRAMP_OK && calls[0] == 2);
    CHECK(vramp_region_around_sleep(allocator, tags, 2, &pair, &registration) == VRAMP_OK);
    CHECK(vramp_close(allocator) == VRAMP_OK);
    CHECK(vramp_unobserve(allocator, registration) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
}

static void open_allocator(void) {
    CHECK(vramp_open("sim:h200", "limit=64MiB", &allocator) == VRAMP_OK);
    CHECK(vramp_stream_create(allocator, &stream) == VRAMP_OK);
}

int main(void) {
    CHECK(vramp_map_simulated_cards() == VRAMP_OK);
    open_allocator();
    pressure();
    CHECK(vramp_close(allocator) == VRAMP_OK);
    open_allocator();
    around();
    open_allocator();
    moves();
    misuse();
    puts("passed");
    return 0;
}
