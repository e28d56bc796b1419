// Opens an allocator with the options of the first argument and allocates from it.
#include <stdio.h>
#include <stdlib.h>
#include <vramp.h>

static void check(vramp_status_t status) {
    if (status != VRAMP_OK) {
        fprintf(stderr, "%s: %s\n", vramp_status_name(status), vramp_last_error());
        exit(1);
    }
}

int main(int count, char **arguments) {
    vramp_allocator_t allocator;
    vramp_stream_t stream;
    void *block;
    check(vramp_open("sim:h200", count > 1 ? arguments[1] : NULL, &allocator));
    check(vramp_stream_create(allocator, &stream));
    check(vramp_malloc(allocator, 50u << 20, stream, &block));
    check(vramp_free(allocator, block, stream));
    check(vramp_close(allocator));
    puts("passed");
    return 0;
}
