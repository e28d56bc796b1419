/* Every function of the header, as a C program uses it, on a simulated card. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "vramp.h"

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition,          \
                    vramp_last_error());                                        \
            return 1;                                                           \
        }                                                                       \
    } while (0)

/* Frees the block that `user` holds, once. */
static vramp_allocator_t spilling;
static int spill(const vramp_shortage_t *shortage, void *user) {
    void **held = user;
    if (*held == NULL || shortage->requested != (200u << 20)) return 0;
    if (vramp_free_on_own_stream(spilling, *held) != VRAMP_OK) return 0;
    *held = NULL;
    return 1;
}

static void find_ooms(const char *name, uint64_t value, void *user) {
    if (strcmp(name, "num_ooms") == 0) *(uint64_t *)user = value;
}

int main(void) {
    vramp_allocator_t allocator = {0}, none = {0};
    vramp_stream_t stream, other;
    void *block = NULL, *small = NULL;
    size_t usable = 0;
    vramp_stats_t stats;
    vramp_arena_t arena;
    vramp_graph_t graph;
    vramp_lease_t lease;
    vramp_arena_report_t memory;
    vramp_capture_report_t needed;
    vramp_device_t device;
    uint64_t registration = 0, ooms = 0;
    void *raw = NULL;
    vramp_export_t exported;
    vramp_ticket_t ticket;
    vramp_allocator_t comm;
    vramp_pin_t pin;
    vramp_sharing_t sharing;
    uint64_t calls = 1, bytes = 1;
    size_t size = 0;
    int answer = 0;

    CHECK(strcmp(vramp_version(), VRAMP_VERSION_STRING) == 0);
    CHECK(vramp_version_number() == VRAMP_VERSION);
    CHECK(VRAMP_VERSION
          == VRAMP_VERSION_MAJOR * 1000000 + VRAMP_VERSION_MINOR * 1000 + VRAMP_VERSION_PATCH);
    CHECK(vramp_check_version(VRAMP_VERSION) == VRAMP_OK);
    CHECK(strcmp(vramp_last_error(), "") == 0);
    CHECK(vramp_check_version(VRAMP_VERSION + 1) == VRAMP_ERROR_VERSION);
    CHECK(strstr(vramp_last_error(), VRAMP_VERSION_STRING) != NULL);
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

    device.struct_size = sizeof device;
    CHECK(vramp_device(allocator, &device) == VRAMP_OK && device.simulated == 1);
    CHECK(device.ordinal == -1 && strcmp(device.id, "sim:h200") == 0 && device.memory > 0);
    CHECK(vramp_stream_raw(allocator, other, &raw) == VRAMP_OK && raw == (void *)0x10);
    CHECK(vramp_stream_raw(allocator, stream, &raw) == VRAMP_ERROR_UNSUPPORTED && raw == NULL);
    CHECK(vramp_memory_stats(allocator, find_ooms, &ooms) == VRAMP_OK && ooms == 1);
    CHECK(vramp_reset_peaks(allocator) == VRAMP_OK);
    stats.struct_size = sizeof stats;
    CHECK(vramp_stats(allocator, &stats) == VRAMP_OK && stats.live_peak == stats.live);
    CHECK(stats.limit == 256 << 20);

    spilling = allocator;
    CHECK(vramp_malloc(allocator, 128 << 20, stream, &raw) == VRAMP_OK);
    CHECK(vramp_on_shortage(allocator, spill, &raw, &registration) == VRAMP_OK);
    CHECK(vramp_malloc(allocator, 200 << 20, stream, &block) == VRAMP_OK && raw == NULL);
    CHECK(vramp_unobserve(allocator, registration) == VRAMP_OK);
    CHECK(vramp_free_on_own_stream(allocator, block) == VRAMP_OK);
    CHECK(vramp_free_on_own_stream(allocator, block) == VRAMP_ERROR_UNKNOWN_POINTER);

    CHECK(vramp_arena_create(allocator, "policy=reusing,overlap=order", &arena) == VRAMP_OK);
    CHECK(vramp_capture_begin(allocator, stream, arena) == VRAMP_OK);
    CHECK(vramp_malloc(allocator, 8 << 20, stream, &block) == VRAMP_OK);
    CHECK(vramp_free(allocator, block, stream) == VRAMP_OK);
    CHECK(vramp_capture_attach(allocator, stream, arena) == VRAMP_ERROR_BUSY);
    CHECK(vramp_capture_end(allocator, arena, &graph) == VRAMP_OK);
    CHECK(vramp_capture_attach(allocator, stream, arena) == VRAMP_ERROR_CAPTURE);
    CHECK(vramp_capture_detach(allocator, arena, &graph) == VRAMP_ERROR_CAPTURE && graph.id == 0);
    CHECK(vramp_capture_begin(allocator, stream, arena) == VRAMP_OK);
    CHECK(vramp_capture_end(allocator, arena, &graph) == VRAMP_OK);
    memory.struct_size = sizeof memory;
    CHECK(vramp_arena_report(allocator, arena, &memory) == VRAMP_OK);
    CHECK(memory.high_water == 8 << 20 && memory.live == 0 && memory.capacity >= 8 << 20);
    needed.struct_size = sizeof needed;
    CHECK(vramp_graph_report(allocator, graph, &needed) == VRAMP_OK && needed.blocks == 0);
    CHECK(vramp_graph_launch(allocator, graph, stream, &lease) == VRAMP_OK && lease.id != 0);
    CHECK(vramp_graph_launch(allocator, graph, other, NULL) == VRAMP_ERROR_BUSY);
    CHECK(vramp_lease_end(allocator, lease) == VRAMP_OK);
    CHECK(vramp_graph_launch(allocator, graph, other, NULL) == VRAMP_OK);
    CHECK(vramp_graph_destroy(allocator, graph) == VRAMP_OK);
    CHECK(vramp_arena_reset(allocator, arena) == VRAMP_OK);
    CHECK(vramp_arena_destroy(allocator, arena) == VRAMP_OK);
    CHECK(vramp_arena_destroy(allocator, arena) == VRAMP_ERROR_UNKNOWN_ARENA);

    CHECK(vramp_malloc(allocator, 16 << 20, stream, &block) == VRAMP_OK);
    CHECK(vramp_export(allocator, block, &exported) == VRAMP_OK && exported.id != 0);
    CHECK(vramp_export_ticket(allocator, exported, 1, &ticket) == VRAMP_OK && ticket.length > 0);
    CHECK(vramp_export_is_held(allocator, exported, &answer, &calls) == VRAMP_OK);
    CHECK(answer == 1 && calls == 0);
    CHECK(vramp_import(allocator, &ticket, &raw, &size) == VRAMP_OK && raw != NULL && raw != block);
    CHECK(size == 16 << 20 && vramp_import_record_use(allocator, raw, stream) == VRAMP_OK);
    CHECK(vramp_export_revoke(allocator, exported, &ticket, &answer) == VRAMP_OK && answer == 0);
    CHECK(vramp_export_wait(allocator, exported, 1, &answer) == VRAMP_OK && answer == 0);
    memset(&sharing, 0, sizeof sharing);
    sharing.struct_size = sizeof sharing;
    CHECK(vramp_sharing(allocator, &sharing) == VRAMP_OK && sharing.exported == 1);
    CHECK(sharing.handle_type == VRAMP_HANDLE_POSIX_FD && sharing.imports == 1);
    CHECK(vramp_import_close(allocator, raw) == VRAMP_OK);
    CHECK(vramp_import_close(allocator, raw) == VRAMP_ERROR_UNKNOWN_POINTER);
    CHECK(vramp_export_wait(allocator, exported, 10000, &answer) == VRAMP_OK && answer == 1);
    CHECK(vramp_export_close(allocator, exported) == VRAMP_OK);
    CHECK(vramp_export_close(allocator, exported) == VRAMP_ERROR_UNKNOWN_EXPORT);
    CHECK(vramp_import(allocator, &ticket, &raw, NULL) == VRAMP_ERROR_EXPORT_ENDED && raw == NULL);
    CHECK(vramp_pin(allocator, block, 4096, &pin) == VRAMP_OK);
    CHECK(vramp_unpin(allocator, pin) == VRAMP_OK);
    CHECK(vramp_unpin(allocator, pin) == VRAMP_ERROR_UNKNOWN_PIN);
    CHECK(vramp_export_dma_buf(allocator, block, 4096, &answer, &size, &pin) == VRAMP_OK);
    CHECK(answer >= 0 && size == 0 && close(answer) == 0);
    CHECK(vramp_unpin(allocator, pin) == VRAMP_OK);
    CHECK(vramp_grant_access(allocator, 1, &calls, &bytes) == VRAMP_ERROR_RANGE);
    CHECK(vramp_revoke_access(allocator, 1, NULL, NULL) == VRAMP_ERROR_RANGE);
    CHECK(vramp_comm_pool(allocator, "nccl", &comm) == VRAMP_OK);
    CHECK(vramp_malloc(comm, 2 << 20, stream, &raw) == VRAMP_OK);
    CHECK(vramp_free(comm, raw, stream) == VRAMP_OK);
    CHECK(vramp_close(comm) == VRAMP_OK);
    CHECK(vramp_free(allocator, block, stream) == VRAMP_OK);
    CHECK(vramp_map_simulated_cards() == VRAMP_OK);

    CHECK(vramp_host_malloc(allocator, 3 << 20, &raw) == VRAMP_OK && raw != NULL);
    memset(raw, 1, 3 << 20);
    CHECK(vramp_host_record_use(allocator, raw, other) == VRAMP_OK);
    CHECK(vramp_host_free(allocator, raw) == VRAMP_OK);
    CHECK(vramp_host_free(allocator, raw) == VRAMP_ERROR_UNKNOWN_POINTER);

    CHECK(vramp_stream_forget(allocator, other) == VRAMP_OK);
    CHECK(vramp_free(allocator, small, stream) == VRAMP_OK);
    CHECK(vramp_trim(allocator, 0) == VRAMP_OK);
    CHECK(vramp_audit(allocator) == VRAMP_OK);
    CHECK(vramp_close(allocator) == VRAMP_OK);
    CHECK(vramp_close(allocator) == VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    puts("passed");
    return 0;
}
