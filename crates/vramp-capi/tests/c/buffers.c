/* Tiers in C: spaces, reservations, buffers, leases, observers and their errors. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <vramp.h>

#define MIB ((uint64_t)1 << 20)
#define COUNT 10000
#define THREADS 4
#define BUSY 20

#define REQUIRE(condition)                                                              \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%d: %s: %s\n", __LINE__, #condition, vramp_last_error());  \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

static vramp_allocator_t allocator;
static vramp_buffer_t buffers[COUNT];

/* Changes that the observer has seen. Under `counting`, since it runs on a thread of its own. */
struct seen {
    unsigned long created;
    unsigned long freed;
    unsigned long lost;
};

static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

static void see(const vramp_buffer_event_t *event, void *user) {
    struct seen *seen = user;
    vramp_buffer_info_t info = {0};
    pthread_mutex_lock(&counting);
    if (event->change == VRAMP_BUFFER_CREATED) {
        info.struct_size = sizeof info;
        REQUIRE(vramp_buffer_info(allocator, event->buffer, &info) != VRAMP_ERROR_STRUCT_SIZE);
        seen->created++;
    }
    if (event->change == VRAMP_BUFFER_FREED) seen->freed++;
    if (event->change == VRAMP_BUFFER_EVENTS_LOST) seen->lost += (unsigned long)event->bytes;
    pthread_mutex_unlock(&counting);
    REQUIRE(vramp_close(allocator) == VRAMP_ERROR_BUSY);
}

static void never(const char *text, void *user) {
    (void)user;
    fprintf(stderr, "a move failed: %s\n", text);
    exit(1);
}

/* Waits until the creation of every buffer was observed. Events still queued are dropped with their
 * observer. */
static void wait_for_events(const struct seen *seen) {
    const struct timespec pause = {0, 1000000};
    int rounds, all;
    for (rounds = 0; rounds < 60000; rounds++) {
        pthread_mutex_lock(&counting);
        all = seen->created + seen->lost >= COUNT;
        pthread_mutex_unlock(&counting);
        if (all) return;
        nanosleep(&pause, NULL);
    }
    fprintf(stderr, "the creation of buffers was not observed\n");
    exit(1);
}

/* Leases pairs of buffers and writes them. The simulated card has the host's memory. */
static void *work(void *argument) {
    size_t nth = (size_t)argument;
    vramp_stream_t stream;
    int round;
    REQUIRE(vramp_stream_create(allocator, &stream) == VRAMP_OK);
    for (round = 0; round < 200; round++) {
        size_t first = (nth * 977 + (size_t)round * 31) % BUSY;
        vramp_buffer_use_t uses[2];
        vramp_buffer_lease_t lease;
        void *addresses[2];
        uses[0].buffer = buffers[first];
        uses[0].access = VRAMP_ACCESS_WRITE;
        uses[1].buffer = buffers[first + 1];
        uses[1].access = VRAMP_ACCESS_READ;
        REQUIRE(vramp_buffers_lease(allocator, uses, 2, stream, VRAMP_FOREVER, addresses, &lease) ==
                VRAMP_OK);
        REQUIRE(vramp_stream_synchronize(allocator, stream) == VRAMP_OK);
        memset(addresses[0], (int)nth, 4096);
        REQUIRE(vramp_buffer_lease_end(allocator, lease) == VRAMP_OK);
    }
    REQUIRE(vramp_stream_forget(allocator, stream) == VRAMP_OK);
    return NULL;
}

int main(void) {
    vramp_tiers_options_t options;
    vramp_space_t card, spaces[4];
    vramp_space_stats_t space;
    vramp_reservation_t reservation;
    vramp_buffer_info_t info;
    vramp_buffer_lease_t lease;
    vramp_tiers_stats_t stats;
    vramp_stream_t stream;
    struct seen seen = {0, 0, 0};
    uint64_t registration, bytes;
    pthread_t threads[THREADS];
    char text[16] = "";
    size_t nth, count;

    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.host_bytes = 128 * MIB;
    REQUIRE(vramp_map_simulated_cards() == VRAMP_OK);
    REQUIRE(vramp_open("sim:h200", "limit=64MiB", &allocator) == VRAMP_OK);
    REQUIRE(vramp_buffer_create(allocator, 1, &buffers[0]) == VRAMP_ERROR_NO_TIERS);
    REQUIRE(vramp_tiers_open_with(allocator, &options) == VRAMP_OK);
    REQUIRE(vramp_stream_create(allocator, &stream) == VRAMP_OK);
    REQUIRE(vramp_spaces(allocator, spaces, 4, &count) == VRAMP_OK && count == 2);

    card.tier = VRAMP_TIER_DEVICE;
    card.index = 0;
    REQUIRE(vramp_reserve(allocator, card, 8 * MIB, 0, 0, &reservation) == VRAMP_OK);
    REQUIRE(vramp_reservation_attach(allocator, reservation, stream) == VRAMP_OK);
    memset(&space, 0, sizeof space);
    space.struct_size = sizeof space;
    REQUIRE(vramp_space_stats(allocator, card, &space) == VRAMP_OK);
    REQUIRE(space.capacity == 64 * MIB && space.reserved == 8 * MIB);

    REQUIRE(vramp_buffers_observe(allocator, see, &seen, &registration) == VRAMP_OK);
    for (nth = 0; nth < COUNT; nth++)
        REQUIRE(vramp_buffer_create(allocator, 4096, &buffers[nth]) == VRAMP_OK);
    REQUIRE(vramp_buffer_write(allocator, buffers[7], 100, "contents", 9) == VRAMP_OK);
    REQUIRE(vramp_evict(allocator, UINT64_MAX, &bytes) == VRAMP_OK && bytes > 0);
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    REQUIRE(vramp_buffer_info(allocator, buffers[7], &info) == VRAMP_OK);
    REQUIRE(info.state == VRAMP_BUFFER_DEFERRED && info.host_bytes == 4096 && info.leases == 0);
    REQUIRE(vramp_buffer_retrieve(allocator, buffers[7], VRAMP_FOREVER) == VRAMP_OK);
    REQUIRE(vramp_buffer_read(allocator, buffers[7], 100, text, 9) == VRAMP_OK);
    REQUIRE(strcmp(text, "contents") == 0);

    for (nth = 0; nth < THREADS; nth++)
        REQUIRE(pthread_create(&threads[nth], NULL, work, (void *)nth) == 0);
    for (nth = 0; nth < THREADS; nth++) REQUIRE(pthread_join(threads[nth], NULL) == 0);

    memset(&stats, 0, sizeof stats);
    stats.struct_size = sizeof stats;
    REQUIRE(vramp_tiers_stats(allocator, &stats) == VRAMP_OK);
    REQUIRE(stats.buffers == COUNT && stats.leases == 0 && stats.failures == 0);
    REQUIRE(vramp_tiers_failures(allocator, never, NULL) == VRAMP_OK);
    for (nth = 0; nth < COUNT; nth += 2)
        REQUIRE(vramp_buffer_destroy(allocator, buffers[nth]) == VRAMP_OK);
    wait_for_events(&seen);
    REQUIRE(vramp_buffers_unobserve(allocator, registration) == VRAMP_OK);
    REQUIRE(vramp_audit(allocator) == VRAMP_OK);

    /* Buffers, a lease and a reservation end with the allocator. */
    {
        vramp_buffer_use_t use;
        use.buffer = buffers[1];
        use.access = VRAMP_ACCESS_WRITE;
        REQUIRE(vramp_buffers_lease(allocator, &use, 1, stream, 0, NULL, &lease) == VRAMP_OK);
    }
    REQUIRE(vramp_close(allocator) == VRAMP_OK);
    REQUIRE(vramp_buffer_lease_end(allocator, lease) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    puts("passed");
    return 0;
}
