/*
 * A program that gives its memory of the card up for a while: weights, which come back with their contents,
 * and a cache, whose contents need not be kept. A reservation pays for a third block.
 *
 * On a simulated card the memory is the host's, so the program looks at it itself. On a GPU kernels do.
 * Without a GPU: VRAMP_DEVICE=sim.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vramp.h>

#define WEIGHTS ((size_t)48 << 20)
#define CACHE ((size_t)64 << 20)

static void check(vramp_status_t status) {
    if (status == VRAMP_OK) return;
    fprintf(stderr, "%s: %s\n", vramp_status_name(status), vramp_last_error());
    exit(1);
}

static void expect(int is_true, const char *what) {
    if (is_true) return;
    fprintf(stderr, "not so: %s\n", what);
    exit(1);
}

/* Returns the bytes of the card that regions have, and prints each region. */
static uint64_t on_card(vramp_allocator_t allocator) {
    vramp_region_status_t regions[8];
    size_t count, nth;
    uint64_t bytes = 0;
    memset(regions, 0, sizeof regions);
    regions[0].struct_size = sizeof regions[0];
    check(vramp_region_status(allocator, regions, 8, &count));
    for (nth = 0; nth < count && nth < 8; nth++) {
        fprintf(stderr, "%s: %lu bytes on the card, %lu asleep, %lu on the host\n", regions[nth].tag,
                (unsigned long)regions[nth].on_card, (unsigned long)regions[nth].asleep,
                (unsigned long)regions[nth].on_host);
        bytes += regions[nth].on_card;
    }
    return bytes;
}

int main(void) {
    const char *weights_tag = "weights";
    vramp_allocator_t allocator;
    vramp_stream_t stream;
    vramp_device_t device;
    vramp_region_scope_t scope;
    vramp_region_options_t options;
    vramp_tiers_options_t tiers;
    vramp_space_t card;
    vramp_reservation_t reservation;
    void *weights, *cache, *scratch;

    check(vramp_map_simulated_cards());                 /* a GPU does not need it */
    check(vramp_open("auto", "limit=256MiB", &allocator));
    check(vramp_stream_create(allocator, &stream));
    memset(&device, 0, sizeof device);
    device.struct_size = sizeof device;
    check(vramp_device(allocator, &device));

    /* What this thread allocates until the end of a scope is in its region. */
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.backup = VRAMP_BACKUP_HOST;
    options.read_only = 1;                              /* copied once, however often it sleeps */
    check(vramp_region_begin(allocator, weights_tag, &options, &scope));
    check(vramp_malloc(allocator, WEIGHTS, stream, &weights));
    check(vramp_region_end(scope));
    options.backup = VRAMP_BACKUP_NONE;
    options.read_only = 0;
    check(vramp_region_begin(allocator, "cache", &options, &scope));
    check(vramp_malloc(allocator, CACHE, stream, &cache));
    check(vramp_region_end(scope));
    if (device.simulated) memset(weights, 7, WEIGHTS);

    /* Other programs use the card meanwhile. Null means all regions. */
    check(vramp_region_pause(allocator, NULL, 0, NULL));
    expect(on_card(allocator) == 0, "nothing is on the card");
    check(vramp_region_resume(allocator, &weights_tag, 1));
    expect(on_card(allocator) == WEIGHTS, "the weights are back");
    if (device.simulated) expect(((char *)weights)[WEIGHTS - 1] == 7, "with their contents");
    check(vramp_region_resume(allocator, NULL, 0));

    /* Memory that other requests cannot take: 32 MiB, of which a block uses 20. */
    memset(&tiers, 0, sizeof tiers);
    tiers.struct_size = sizeof tiers;
    tiers.host_bytes = (uint64_t)64 << 20;
    check(vramp_tiers_open_with(allocator, &tiers));
    card.tier = VRAMP_TIER_DEVICE;
    card.index = VRAMP_ANY_INDEX;
    check(vramp_reserve(allocator, card, (uint64_t)32 << 20, 0, VRAMP_FOREVER, &reservation));
    check(vramp_reservation_malloc(allocator, reservation, (size_t)20 << 20, stream, &scratch));
    expect(vramp_reservation_malloc(allocator, reservation, (size_t)20 << 20, stream, &cache) ==
               VRAMP_ERROR_OVER_RESERVATION, "a second one does not fit");
    check(vramp_free(allocator, scratch, stream));      /* gives the 20 MiB back to the reservation */
    check(vramp_reservation_malloc(allocator, reservation, (size_t)32 << 20, stream, &scratch));
    check(vramp_reservation_release(allocator, reservation));
    check(vramp_close(allocator));
    puts("passed");
    return 0;
}
