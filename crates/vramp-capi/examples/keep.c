/*
 * Weights that outlive the process that loaded them. The argument is the directory of a keeper: run `vramp keep
 * --directory DIR` before. The parent starts itself twice, one after the other: the first process finds nothing, loads
 * the weights and ends; the second one opens what it has loaded, without a copy.
 *
 * On a simulated card the memory is the host's. On a GPU kernels and copies write it: record their stream before
 * the commit. Without a GPU: VRAMP_DEVICE=sim.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vramp.h>

#define NAME "example/weights"
#define SIZE ((size_t)64 << 20)
#define SECOND ((uint64_t)1000000000)

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

static void load(vramp_allocator_t allocator, vramp_keeper_t keeper, int is_simulated,
                 const unsigned char *digest, vramp_kept_t *kept) {
    vramp_kept_options_t options;
    vramp_stream_t stream;
    void *weights;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.bytes = SIZE;
    check(vramp_kept_draft(allocator, keeper, NAME, &options, 30 * SECOND, kept));
    check(vramp_kept_place(allocator, *kept, SIZE, &weights));
    if (is_simulated) strcpy(weights, "loaded once");
    check(vramp_stream_create(allocator, &stream));
    /* queue copies to the weights on the stream */
    check(vramp_kept_record_use(allocator, *kept, stream));
    check(vramp_kept_commit(allocator, *kept, "one tensor", 10, digest, 0));
}

/* Finds the weights or loads them. Returns 10 if it found them. */
static int child(const char *directory) {
    vramp_allocator_t allocator;
    vramp_keeper_t keeper;
    vramp_kept_t kept;
    vramp_kept_state_t state;
    vramp_device_t device;
    vramp_status_t status;
    unsigned char digest[32] = "weights.safetensors 3f2a";
    char layout[16];
    size_t length;

    check(vramp_map_simulated_cards());     /* a GPU does not need it */
    check(vramp_open("auto", NULL, &allocator));
    memset(&device, 0, sizeof device);
    device.struct_size = sizeof device;
    check(vramp_device(allocator, &device));
    check(vramp_keeper_open(allocator, directory, 0, &keeper));

    status = vramp_kept_open(allocator, keeper, NAME, NULL, 30 * SECOND, &kept);
    if (status == VRAMP_ERROR_NOT_KEPT) load(allocator, keeper, device.simulated, digest, &kept);
    else check(status);

    memset(&state, 0, sizeof state);
    state.struct_size = sizeof state;
    check(vramp_kept_state(allocator, kept, &state));
    expect(memcmp(state.digest, digest, sizeof digest) == 0, "they are these weights");
    expect(state.bytes >= SIZE && !state.writable, "all of them are here, for reading");
    check(vramp_kept_layout(allocator, kept, layout, sizeof layout, &length));
    expect(length == 10 && memcmp(layout, "one tensor", 10) == 0, "the layout is here");
    if (device.simulated)
        expect(strcmp(state.address, "loaded once") == 0, "the bytes are here");
    check(vramp_kept_close(allocator, kept));
    check(vramp_close(allocator));
    return status == VRAMP_OK ? 10 : 0;
}

/* Returns the exit code of a process that runs child(). */
static int run(const char *directory) {
    int status;
    pid_t pid = fork();
    expect(pid >= 0, "a process can be started");
    if (pid == 0) {
        execl("/proc/self/exe", "keep", directory, "child", (char *)NULL);
        _exit(127);
    }
    expect(waitpid(pid, &status, 0) == pid && WIFEXITED(status), "the child ends");
    return WEXITSTATUS(status);
}

int main(int count, char **arguments) {
    if (count == 3) return child(arguments[1]);
    expect(count == 2, "the argument is the directory of a keeper");
    expect(run(arguments[1]) == 0, "the first process loads the weights");
    expect(run(arguments[1]) == 10, "the second process finds them");
    puts("passed");
    return 0;
}
