/*
 * Two processes share a block. The parent starts itself as its child, sends it a ticket through a pipe, and
 * both write to the same memory.
 *
 * On a simulated card the memory is the host's. On a GPU kernels write it: synchronize their stream
 * before the ticket is sent. Without a GPU: VRAMP_DEVICE=sim.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vramp.h>

#define SIZE ((size_t)64 << 20)

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

static vramp_allocator_t open_device(int *is_simulated) {
    vramp_allocator_t allocator;
    vramp_device_t device;
    check(vramp_map_simulated_cards());     /* a GPU does not need it */
    check(vramp_open("auto", NULL, &allocator));
    memset(&device, 0, sizeof device);
    device.struct_size = sizeof device;
    check(vramp_device(allocator, &device));
    *is_simulated = device.simulated;
    return allocator;
}

/* Opens the ticket that arrives on standard input, reads the memory and answers in it. */
static int child(void) {
    vramp_ticket_t ticket;
    void *address;
    size_t size;
    int is_simulated;
    vramp_allocator_t allocator = open_device(&is_simulated);
    expect(fread(&ticket, sizeof ticket, 1, stdin) == 1, "a ticket arrives");
    check(vramp_import(allocator, &ticket, &address, &size));
    expect(size >= SIZE, "the whole block is here");
    if (is_simulated) {
        expect(strcmp(address, "from the parent") == 0, "the parent's bytes are here");
        strcpy(address, "from the child");
    }
    check(vramp_import_close(allocator, address));
    check(vramp_close(allocator));
    return 0;
}

int main(int count, char **arguments) {
    vramp_stream_t stream;
    vramp_export_t exported;
    vramp_ticket_t ticket;
    vramp_allocator_t allocator;
    void *block;
    int ends[2], status, released, is_simulated;
    pid_t pid;

    if (count == 2 && strcmp(arguments[1], "child") == 0) return child();
    /* Before the first allocator: CUDA does not survive a fork, but a fork followed by exec is fine at
       any time. */
    expect(pipe(ends) == 0, "a pipe can be made");
    pid = fork();
    expect(pid >= 0, "a process can be started");
    if (pid == 0) {
        dup2(ends[0], 0);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "share", "child", (char *)NULL);
        _exit(127);
    }
    close(ends[0]);

    allocator = open_device(&is_simulated);
    check(vramp_stream_create(allocator, &stream));
    check(vramp_malloc(allocator, SIZE, stream, &block));
    if (is_simulated) strcpy(block, "from the parent");
    check(vramp_export(allocator, block, &exported));
    /* The ticket keeps the memory until the child has opened it. */
    check(vramp_export_ticket(allocator, exported, 1, &ticket));
    expect(write(ends[1], &ticket, sizeof ticket) == (ssize_t)sizeof ticket, "it can be sent");
    close(ends[1]);
    expect(waitpid(pid, &status, 0) == pid && status == 0, "the child ends well");
    check(vramp_export_wait(allocator, exported, 10000, &released));
    expect(released, "the child has closed it");
    if (is_simulated) expect(strcmp(block, "from the child") == 0, "the child's bytes are here");
    check(vramp_export_close(allocator, exported));
    check(vramp_free(allocator, block, stream));
    check(vramp_close(allocator));
    puts("passed");
    return 0;
}
