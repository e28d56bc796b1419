/* A small NCCL for tests: it keeps a log of calls, refuses memory that is not there, and waits for all ranks where NCCL
   does. With OLD it is one that cannot suspend. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

typedef struct {
    int device, ranks, is_suspended, fails, in_progress;
    pthread_barrier_t *together;
    char log[1 << 16];
} comm_t;

typedef struct {
    comm_t *comm;
    const char *address;
    size_t size;
} registration_t;

static void note(comm_t *comm, const char *call) {
    size_t used = strlen(comm->log);
    snprintf(comm->log + used, sizeof comm->log - used, "%s ", call);
}

static void meet(comm_t *comm) {
    if (comm->ranks > 1) pthread_barrier_wait(comm->together);
}

/* Whether the first and the last byte are mapped. */
static int is_there(const char *address, size_t size) {
    const char *ends[2] = {address, address + size - 1};
    char byte;
    int nth;
    for (nth = 0; nth < 2; ++nth) {
        struct iovec to = {&byte, 1}, from = {(void *)ends[nth], 1};
        if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1) return 0;
    }
    return 1;
}

/* Makes `ranks` communicators that wait for each other. */
void fake_make(int ranks, comm_t **comms) {
    pthread_barrier_t *together = malloc(sizeof *together);
    int rank;
    pthread_barrier_init(together, NULL, (unsigned)ranks);
    for (rank = 0; rank < ranks; ++rank) {
        comms[rank] = calloc(1, sizeof **comms);
        comms[rank]->ranks = ranks;
        comms[rank]->together = together;
    }
}

const char *fake_log(comm_t *comm) { return comm->log; }
void fake_forget(comm_t *comm) { comm->log[0] = 0; }
/* The next calls fail, or are in progress for so many looks. */
void fake_fail(comm_t *comm, int fails) { comm->fails = fails; }
void fake_delay(comm_t *comm, int looks) { comm->in_progress = looks; }

static int end(comm_t *comm) {
    if (comm->fails > 0) return --comm->fails, INVALID_USAGE;
    return comm->in_progress ? IN_PROGRESS : SUCCESS;
}

int ncclGetVersion(int *version) {
#ifdef OLD
    *version = 22703;
#else
    *version = 22907;
#endif
    return SUCCESS;
}

const char *ncclGetErrorString(int code) { return code == INVALID_USAGE ? "invalid usage" : "invalid argument"; }

int ncclCommGetAsyncError(comm_t *comm, int *state) {
    *state = comm->in_progress > 0 && --comm->in_progress > 0 ? IN_PROGRESS : SUCCESS;
    return SUCCESS;
}

int ncclCommCuDevice(comm_t *comm, int *device) {
    *device = comm->device;
    return SUCCESS;
}

static int begin(comm_t *comm, const char *call, const char *address, size_t size, registration_t **handle) {
    registration_t made = {comm, address, size};
    note(comm, call);
    if (comm->is_suspended) return INVALID_USAGE;
    if (!is_there(address, size)) return INVALID_ARGUMENT;
    *handle = malloc(sizeof made);
    **handle = made;
    return end(comm);
}

static int stop(comm_t *comm, const char *call, registration_t *handle) {
    note(comm, call);
    /* The memory is still there, and the communicator still works. */
    if (comm->is_suspended || handle->comm != comm) return INVALID_USAGE;
    if (!is_there(handle->address, handle->size)) return INVALID_ARGUMENT;
    if (end(comm) == INVALID_USAGE) return INVALID_USAGE;
    free(handle);
    return SUCCESS;
}

int ncclCommRegister(comm_t *comm, void *address, size_t size, void **handle) {
    return begin(comm, "register", address, size, (registration_t **)handle);
}

int ncclCommDeregister(comm_t *comm, void *handle) { return stop(comm, "deregister", handle); }

int ncclCommWindowRegister(comm_t *comm, void *address, size_t size, void **window, int flags) {
    char call[32];
    meet(comm);
    snprintf(call, sizeof call, "window%d", flags);
    return begin(comm, call, address, size, (registration_t **)window);
}

int ncclCommWindowDeregister(comm_t *comm, void *window) {
    meet(comm);
    return stop(comm, "no-window", window);
}

#ifndef OLD
int ncclCommSuspend(comm_t *comm, int flags) {
    meet(comm);
    note(comm, "suspend");
    if (comm->is_suspended || flags != 1) return INVALID_USAGE;
    if (end(comm) == INVALID_USAGE) return INVALID_USAGE;
    comm->is_suspended = 1;
    return end(comm);
}

int ncclCommResume(comm_t *comm) {
    meet(comm);
    note(comm, "resume");
    if (!comm->is_suspended) return INVALID_USAGE;
    if (end(comm) == INVALID_USAGE) return INVALID_USAGE;
    comm->is_suspended = 0;
    return end(comm);
}

int ncclCommMemStats(comm_t *comm, int statistic, uint64_t *value) {
    *value = statistic == 0 ? 1 << 20 : statistic == 1 ? (uint64_t)comm->is_suspended : 0;
    return SUCCESS;
}
#endif
