/* Children of a process whose threads use vramp: every call returns a status, and none hangs. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vramp.h"

/* Seconds after which a call counts as hanging. It would hang for ever. */
#define TOO_LONG 20
#define THREADS 8
#define CHILDREN 10

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s; %s\n", __LINE__, #condition,          \
                    vramp_last_error());                                        \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

/* In a child nothing is printed, because a thread of the parent may have held the lock of stderr.
   The exit code is the line, as far as it fits. */
#define ANSWER(condition)                                                       \
    do {                                                                        \
        alarm(TOO_LONG);                                                        \
        if (!(condition)) _exit(__LINE__ % 250 + 1);                            \
    } while (0)

static vramp_allocator_t shared;
static vramp_stream_t stream;
static vramp_kv_t cache;
static volatile int stop;

static void ignore(const vramp_event_t *event, void *user) {
    (void)event;
    (void)user;
}

static int free_nothing(const vramp_shortage_t *shortage, void *user) {
    (void)shortage;
    (void)user;
    return 0;
}

static void ignore_stat(const char *name, uint64_t value, void *user) {
    (void)name;
    (void)value;
    (void)user;
}

static void *work(void *argument) {
    size_t number = (size_t)argument;
    vramp_stream_t own;
    CHECK(vramp_stream_create(shared, &own) == VRAMP_OK);
    while (!stop) {
        void *block = NULL, *large = NULL, *tensor = NULL;
        vramp_stats_t stats;
        vramp_allocator_t mine;
        vramp_region_scope_t scope;
        uint64_t registration = 0;
        /* Each has a page of its own. The arena's thread makes others ready. */
        vramp_kv_pages_t page = {(uint32_t)number * 3, (uint32_t)number * 3 + 1};
        CHECK(vramp_kv_commit(shared, cache, &page, 1, own) == VRAMP_OK);
        CHECK(vramp_kv_park(shared, cache, &page, 1, own) == VRAMP_OK);
        CHECK(number != 0 || vramp_kv_release(shared, cache, 0, NULL) == VRAMP_OK);
        CHECK(vramp_malloc(shared, 1000 * (number + 1), own, &block) == VRAMP_OK);
        CHECK(vramp_malloc(shared, 3 << 20, stream, &large) == VRAMP_OK);
        CHECK(vramp_free(shared, block, stream) == VRAMP_OK);
        CHECK(vramp_free(shared, large, own) == VRAMP_OK);
        CHECK(vramp_free(shared, NULL, own) == VRAMP_ERROR_UNKNOWN_POINTER);
        CHECK(vramp_region_begin(shared, "busy", NULL, &scope) == VRAMP_OK);
        CHECK(vramp_region_pause(shared, NULL, 0, NULL) == VRAMP_OK);
        CHECK(vramp_region_resume(shared, NULL, 0) == VRAMP_OK);
        CHECK(vramp_region_end(scope) == VRAMP_OK);
        stats.struct_size = sizeof stats;
        CHECK(vramp_stats(shared, &stats) == VRAMP_OK);
        if (number % 2 == 0) {
            CHECK(vramp_open("sim:h200", NULL, &mine) == VRAMP_OK);
            CHECK(vramp_close(mine) == VRAMP_OK);
            CHECK(vramp_observe(shared, ignore, NULL, &registration) == VRAMP_OK);
            CHECK(vramp_unobserve(shared, registration) == VRAMP_OK);
        } else {
            tensor = vramp_torch_pool_malloc(1 << 20, 0, NULL);
            CHECK(tensor != NULL);
            vramp_torch_free(tensor, 1 << 20, 0, NULL);
            CHECK(vramp_trim(shared, 0) == VRAMP_OK);
        }
    }
    return NULL;
}

static void child(void *block) {
    void *address = &address;
    size_t size = 0;
    vramp_stats_t stats;
    vramp_device_t device;
    vramp_allocator_t other;
    vramp_stream_t made;
    vramp_arena_t arena;
    vramp_graph_t graph;
    vramp_export_t exported;
    vramp_ticket_t ticket;
    vramp_pin_t pin;
    vramp_buffer_t buffer = {0};
    vramp_sharing_t sharing;
    vramp_reservation_t reservation = {1};
    vramp_region_scope_t scope = {1};
    vramp_kv_pages_t page = {40, 41};
    int number = 0;
    uint64_t registration = 0;
    ANSWER(vramp_malloc(shared, 100, stream, &address) == VRAMP_ERROR_FORKED && address == NULL);
    ANSWER(strstr(vramp_last_error(), "spawn or exec") != NULL);
    ANSWER(vramp_free(shared, block, stream) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_kv_commit(shared, cache, &page, 1, stream) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_kv_park(shared, cache, &page, 1, stream) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_kv_take(shared, cache, 1, stream, &page, 1, &size) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_kv_release(shared, cache, 0, NULL) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_kv_record_use(shared, cache, stream) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_kv_destroy(shared, cache) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_usable_size(shared, block, &size) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_record_use(shared, block, stream) == VRAMP_ERROR_FORKED);
    stats.struct_size = sizeof stats;
    ANSWER(vramp_stats(shared, &stats) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_audit(shared) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_trim(shared, 0) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_set_limit(shared, 0) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_record_history(shared, 10) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_snapshot(shared, "/nowhere/at/all") == VRAMP_ERROR_FORKED);
    ANSWER(vramp_record_history_of_devices(10) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_snapshot_of_devices("/nowhere/at/all") == VRAMP_ERROR_FORKED);
    ANSWER(vramp_observe(shared, ignore, NULL, &registration) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_unobserve(shared, 1) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_stream_create(shared, &made) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_stream_adopt(shared, NULL, &made) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_stream_forget(shared, stream) == VRAMP_ERROR_FORKED);
    device.struct_size = sizeof device;
    ANSWER(vramp_device(shared, &device) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_stream_raw(shared, stream, &address) == VRAMP_ERROR_FORKED && address == NULL);
    ANSWER(vramp_free_on_own_stream(shared, block) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_reset_peaks(shared) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_memory_stats(shared, ignore_stat, NULL) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_on_shortage(shared, free_nothing, NULL, &registration) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_check_version(VRAMP_VERSION) == VRAMP_OK);
    ANSWER(vramp_arena_create(shared, NULL, &arena) == VRAMP_ERROR_FORKED);
    arena.id = 1;
    ANSWER(vramp_capture_begin(shared, stream, arena) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_capture_end(shared, arena, &graph) == VRAMP_ERROR_FORKED && graph.id == 0);
    ANSWER(vramp_export(shared, block, &exported) == VRAMP_ERROR_FORKED);
    exported.id = 1;
    memset(&ticket, 0, sizeof ticket);
    ANSWER(vramp_export_ticket(shared, exported, 1, &ticket) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_export_wait(shared, exported, 100000, &number) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_export_close(shared, exported) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_import(shared, &ticket, &address, &size) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_import_close(shared, block) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_grant_access(shared, 1, NULL, NULL) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_revoke_access(shared, 1, NULL, NULL) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_pin(shared, block, 100, &pin) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_export_dma_buf(shared, block, 100, &number, &size, &pin) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_comm_pool(shared, NULL, &other) == VRAMP_ERROR_FORKED);
    sharing.struct_size = sizeof sharing;
    ANSWER(vramp_sharing(shared, &sharing) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_tiers_open(shared, "") == VRAMP_ERROR_FORKED);
    ANSWER(vramp_tiers_close(shared) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_buffer_create(shared, 4096, &buffer) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_buffer_retrieve(shared, buffer, VRAMP_FOREVER) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_sync_and_unlock(shared, stream) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_buffers_unobserve(shared, 1) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_buffer_destroy(shared, buffer) == VRAMP_ERROR_FORKED);
    address = &address;
    ANSWER(vramp_reservation_malloc(shared, reservation, 100, stream, &address) ==
               VRAMP_ERROR_FORKED && address == NULL);
    ANSWER(vramp_region_begin(shared, "a", NULL, &scope) == VRAMP_ERROR_FORKED && scope.id == 1);
    ANSWER(vramp_region_disable(shared, &scope) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_region_end(scope) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_region_pause(shared, NULL, 0, NULL) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_region_resume(shared, NULL, 0) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_region_clean(shared, NULL, 0) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_region_on_pressure(shared, NULL, 0, &registration) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_region_status(shared, NULL, 0, &size) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_map_simulated_cards() == VRAMP_ERROR_FORKED);
    ANSWER(vramp_open("sim:h200", NULL, &other) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_close(shared) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_torch_pool_malloc(100, 0, NULL) == NULL);
    /* This process has no libstdc++ to throw with. */
    ANSWER(vramp_torch_malloc(100, 0, NULL) == NULL);
    ANSWER((vramp_torch_free(block, 100, 0, NULL), 1));
    ANSWER((vramp_torch_record_stream(block, NULL), 1));
    ANSWER((vramp_torch_reset(), 1));
    ANSWER((vramp_torch_memory_fraction(0.5, 0), 1));
    ANSWER((vramp_torch_begin_pool(0, 0, 1, NULL), 1));
    ANSWER(vramp_torch_capture_begins(0, NULL) == VRAMP_ERROR_FORKED);
    ANSWER(vramp_torch_segment_awake(0, block) == VRAMP_ERROR_FORKED);
    ANSWER((vramp_torch_end_pool(0, 0, 1), 1));
    ANSWER((vramp_torch_release_pool(0, 0, 1), 1));
    ANSWER(vramp_torch_base_alloc(block, &size) == block && size == 0);
    ANSWER(vramp_torch_allocator(0, &other) == VRAMP_ERROR_FORKED);
    _exit(0);
}

static void busy(void) {
    pthread_t threads[THREADS];
    void *block = NULL;
    vramp_kv_options_t options = {0};
    size_t number;
    CHECK(vramp_open("sim:h200", NULL, &shared) == VRAMP_OK);
    CHECK(vramp_stream_create(shared, &stream) == VRAMP_OK);
    CHECK(vramp_malloc(shared, 4096, stream, &block) == VRAMP_OK);
    options.struct_size = sizeof options;
    options.tensors = 2;
    options.bytes_each = 64ull << 21;
    options.ahead = 32ull << 20;
    CHECK(vramp_kv_create(shared, &options, &cache) == VRAMP_OK);
    for (number = 0; number < THREADS; number++)
        CHECK(pthread_create(&threads[number], NULL, work, (void *)number) == 0);
    for (number = 0; number < CHILDREN; number++) {
        int status = 0;
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) child(block);
        CHECK(waitpid(pid, &status, 0) == pid);
        if (status != 0) {
            fprintf(stderr, "child %d: %s %d\n", (int)number,
                    WIFSIGNALED(status) ? "it hung, signal" : "the wrong answer near line",
                    WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status) - 1);
            exit(1);
        }
    }
    stop = 1;
    for (number = 0; number < THREADS; number++)
        CHECK(pthread_join(threads[number], NULL) == 0);
    /* The parent is as before. */
    CHECK(vramp_free(shared, block, stream) == VRAMP_OK);
    CHECK(vramp_kv_destroy(shared, cache) == VRAMP_OK);
    CHECK(vramp_audit(shared) == VRAMP_OK);
    CHECK(vramp_close(shared) == VRAMP_OK);
}

static void early(void) {
    int status = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        void *block = NULL;
        alarm(TOO_LONG);
        CHECK(vramp_open("sim:h200", NULL, &shared) == VRAMP_OK);
        CHECK(vramp_stream_create(shared, &stream) == VRAMP_OK);
        CHECK(vramp_malloc(shared, 100, stream, &block) == VRAMP_OK);
        CHECK(vramp_free(shared, block, stream) == VRAMP_OK);
        CHECK(vramp_close(shared) == VRAMP_OK);
        CHECK((block = vramp_torch_pool_malloc(100, 0, NULL)) != NULL);
        vramp_torch_free(block, 100, 0, NULL);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(vramp_open("sim:h200", NULL, &shared) == VRAMP_OK);
    CHECK(vramp_close(shared) == VRAMP_OK);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    if (strcmp(arguments[1], "busy") == 0) busy();
    else early();
    printf("passed\n");
    return 0;
}
