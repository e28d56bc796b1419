/* Budgets in C: two allocators of one process stand for two processes. The argument is a directory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vramp.h"

#define GIB ((uint64_t)1 << 30)
#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition,          \
                    vramp_last_error());                                        \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static vramp_budget_options_t options(const char *directory, const char *program) {
    vramp_budget_options_t made;
    memset(&made, 0, sizeof made);
    made.struct_size = sizeof made;
    made.directory = directory;
    made.card = "card";
    made.group = "serving";
    made.program = program;
    made.capacity = 8 * GIB;
    made.guaranteed = GIB;
    made.patience_ms = 60000;
    return made;
}

static vramp_budget_room_t room(vramp_allocator_t allocator) {
    vramp_budget_room_t found;
    memset(&found, 0, sizeof found);
    found.struct_size = sizeof found;
    CHECK(vramp_budget_room(allocator, &found) == VRAMP_OK);
    return found;
}

struct cache {
    vramp_allocator_t allocator;
    vramp_stream_t stream;
    void *block;
    int calls;
};

static void reclaim(uint64_t bytes, void *user) {
    struct cache *cache = (struct cache *)user;
    CHECK(bytes > 0 && cache->block != NULL);
    CHECK(vramp_free(cache->allocator, cache->block, cache->stream) == VRAMP_OK);
    cache->block = NULL;
    cache->calls += 1;
}

static int asleep(int resume, void *user) {
    (void)user;
    return resume == 0;
}

int main(int count, char **arguments) {
    const char *directory = count > 1 ? arguments[1] : NULL;
    vramp_budget_options_t chat = options(directory, "chat"), wrong;
    vramp_allocator_t first, second;
    struct cache cache;
    vramp_stream_t stream;
    void *block;
    uint64_t given = 0;
    vramp_budget_room_t found;
    CHECK(directory != NULL);
    CHECK(vramp_open("sim:h200", NULL, &first) == VRAMP_OK);
    CHECK(vramp_open("sim:h200", NULL, &second) == VRAMP_OK);
    memset(&found, 0, sizeof found);
    found.struct_size = sizeof found;
    CHECK(vramp_budget_room(first, &found) == VRAMP_ERROR_OPTION);
    wrong = chat;
    wrong.guaranteed = 9 * GIB;
    CHECK(vramp_budget_join(first, &wrong) == VRAMP_ERROR_OPTION);
    wrong = chat;
    wrong.priority = 256;
    CHECK(vramp_budget_join(first, &wrong) == VRAMP_ERROR_RANGE);
    wrong = chat;
    wrong.card = NULL;
    CHECK(vramp_budget_join(first, &wrong) == VRAMP_ERROR_NULL);
    CHECK(vramp_budget_join(first, NULL) == VRAMP_ERROR_NULL);
    CHECK(vramp_budget_join(first, &chat) == VRAMP_OK);
    CHECK(vramp_budget_join(first, &chat) == VRAMP_ERROR_IN_USE);

    cache.allocator = first;
    cache.calls = 0;
    CHECK(vramp_stream_create(first, &cache.stream) == VRAMP_OK);
    CHECK(vramp_malloc(first, 5 * GIB, cache.stream, &cache.block) == VRAMP_OK);
    CHECK(vramp_budget_on_reclaim(first, NULL, NULL) == VRAMP_ERROR_NULL);
    CHECK(vramp_budget_on_sleep(first, NULL, NULL) == VRAMP_ERROR_NULL);
    CHECK(vramp_budget_on_sleep(second, asleep, NULL) == VRAMP_ERROR_OPTION);
    CHECK(vramp_budget_on_sleep(first, asleep, NULL) == VRAMP_OK);
    CHECK(vramp_budget_on_reclaim(first, reclaim, &cache) == VRAMP_OK);
    found = room(first);
    CHECK(found.claimed >= 5 * GIB && found.available == 8 * GIB - found.claimed);

    wrong = options(directory, "search");
    CHECK(vramp_budget_join(second, &wrong) == VRAMP_OK);
    CHECK(vramp_stream_create(second, &stream) == VRAMP_OK);
    CHECK(vramp_malloc(second, 4 * GIB, stream, &block) == VRAMP_OK);
    CHECK(cache.calls == 1 && cache.block == NULL);
    CHECK(vramp_malloc(second, 6 * GIB, stream, &cache.block) == VRAMP_ERROR_OUT_OF_MEMORY);
    CHECK(strstr(vramp_last_error(), "(chat) has") != NULL);
    CHECK(vramp_free(second, block, stream) == VRAMP_OK);
    CHECK(vramp_budget_give_back(second, &given) == VRAMP_OK && given >= 3 * GIB);

    /* A budget ends with its allocator. */
    CHECK(vramp_close(first) == VRAMP_OK);
    found = room(second);
    CHECK(found.available == 8 * GIB - found.claimed);
    CHECK(vramp_close(second) == VRAMP_OK);
    puts("passed");
    return 0;
}
