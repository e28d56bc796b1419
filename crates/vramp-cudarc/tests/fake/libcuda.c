/* A libcuda for tests without a card: one device whose memory is the host's. Work is done at once, in the order of
   the calls; but it counts as complete only for those who wait for it. Each stream, each event and the host have a
   vector clock. Work that touches bytes which earlier work wrote, or writes bytes that it read, without being ordered
   behind it, ends the process, as does a stream that was destroyed, or a free of memory that is not the driver's.
   A capture is of one stream, and its graph does its work again in the same order. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_READY = 600, ILLEGAL_ADDRESS = 700, CAPTURES = 900, ISOLATION = 905 };
enum { SLOTS = 256, PAGE = 2 << 20, MEMORY = 1 << 30 };

typedef struct { uint64_t at[SLOTS]; } Clock;
/* Work of a capture: a copy, or a fill where `from` is zero. */
typedef struct Node { uint64_t to, from, len; unsigned char value; struct Node *before; } Node;
typedef struct Graph { Node **nodes; size_t count; } Graph;
typedef struct { int slot, alive; Clock clock; uint64_t capture; Graph *graph; } Stream;
typedef struct { int recorded; Clock clock; } Event;
typedef struct { uint64_t start, end; int slot, write; uint64_t count; } Access;
typedef struct { uint64_t start, end; } Owned;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Clock host;
static Stream null_stream = { 0, 1, { { 0 } }, 0, NULL };
static Stream *slots[SLOTS] = { &null_stream };
static Access accesses[1 << 16];
static size_t access_count;
static Owned owned[4096];
static size_t owned_count;
static int next_slot = 1;
static _Thread_local void *current;
static char primary[1];
/* What calls return once a kernel has read a bad address. */
static CUresult lost;
/* Bytes of physical memory that is created. */
static uint64_t created;

#define ENTER pthread_mutex_lock(&lock)
#define LEAVE(code) do { int code_ = lost ? lost : (code); pthread_mutex_unlock(&lock); return code_; } while (0)

static void fail(const char *why) {
    fprintf(stderr, "fake libcuda: %s\n", why);
    abort();
}

static void join(Clock *into, const Clock *from) {
    for (int i = 0; i < SLOTS; i++)
        if (into->at[i] < from->at[i]) into->at[i] = from->at[i];
}

static Stream *stream_of(void *raw) {
    Stream *stream = raw == NULL ? &null_stream : raw;
    if (!stream->alive) fail("a call with a stream that was destroyed");
    return stream;
}

/* One piece of work on a stream: behind its earlier work, and what the host has waited for. */
static Stream *work(void *raw) {
    Stream *stream = stream_of(raw);
    join(&stream->clock, &host);
    stream->clock.at[stream->slot]++;
    return stream;
}

static void touch(Stream *by, uint64_t start, uint64_t len, int write) {
    uint64_t end = start + len;
    size_t kept = 0;
    if (len == 0) return;
    for (size_t i = 0; i < access_count; i++) {
        Access it = accesses[i];
        int overlaps = it.start < end && start < it.end;
        if (overlaps && (write || it.write) && by->clock.at[it.slot] < it.count)
            fail(it.write ? "work beside a write of the same bytes" : "a write beside a read of the same bytes");
        /* Whoever is ordered behind the new access is behind this one too. */
        int covered = start <= it.start && it.end <= end && by->clock.at[it.slot] >= it.count;
        if (!(covered && (write || !it.write))) accesses[kept++] = it;
    }
    access_count = kept;
    if (access_count == sizeof accesses / sizeof *accesses) fail("too many accesses");
    Access new = { start, end, by->slot, write, by->clock.at[by->slot] };
    accesses[access_count++] = new;
}

/* Ends what is known of bytes that are unmapped or freed. */
static void forget(uint64_t start, uint64_t len, const Clock *behind, const char *why) {
    size_t kept = 0;
    for (size_t i = 0; i < access_count; i++) {
        Access it = accesses[i];
        int overlaps = it.start < start + len && start < it.end;
        if (overlaps && behind->at[it.slot] < it.count) fail(why);
        if (!overlaps) accesses[kept++] = it;
    }
    access_count = kept;
}

CUresult cuInit(unsigned flags) { return flags == 0 ? OK : INVALID; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return OK; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return OK; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? OK : 101; }
CUresult cuDeviceGetName(char *name, int len, int device) { (void)device; snprintf(name, len, "Fake"); return OK; }
CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = MEMORY; return OK; }
CUresult cuMemGetInfo_v2(size_t *avail, size_t *total) {
    ENTER;
    *avail = MEMORY - created;
    *total = MEMORY;
    LEAVE(OK);
}
CUresult cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    *value = which == 75 ? 9 : which == 102 || which == 115; /* compute, virtual memory, pools */
    return OK;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = primary; return OK; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
CUresult cuCtxGetCurrent(void **context) { *context = current; return OK; }
CUresult cuCtxSetCurrent(void *context) { current = context; return OK; }
CUresult cuCtxCreate_v4(void **context, void *params, unsigned flags, int device) {
    (void)params; (void)flags; (void)device;
    *context = current = calloc(1, 1);
    return OK;
}
CUresult cuCtxDestroy_v2(void *context) {
    if (context == primary) fail("the primary context is destroyed");
    if (current == context) current = NULL;
    free(context);
    return OK;
}
CUresult cuCtxSynchronize(void) {
    ENTER;
    for (int i = 0; i < SLOTS; i++)
        if (slots[i]) join(&host, &slots[i]->clock);
    LEAVE(OK);
}
CUresult cuGetErrorString(CUresult code, const char **text) { *text = code ? "an error" : "none"; return OK; }
CUresult cuGetErrorName(CUresult code, const char **text) { *text = code ? "ERROR" : "NONE"; return OK; }

CUresult cuStreamCreate(void **out, unsigned flags) {
    (void)flags;
    ENTER;
    for (int tried = 0; slots[next_slot] && slots[next_slot]->alive; tried++) {
        if (tried == SLOTS) fail("too many streams");
        next_slot = next_slot % (SLOTS - 1) + 1;
    }
    Stream *stream = calloc(1, sizeof *stream), *before = slots[next_slot];
    stream->slot = next_slot;
    stream->alive = 1;
    if (before) stream->clock.at[next_slot] = before->clock.at[next_slot];
    slots[next_slot] = stream;
    next_slot = next_slot % (SLOTS - 1) + 1;
    *out = stream;
    LEAVE(OK);
}
CUresult cuStreamDestroy_v2(void *raw) {
    ENTER;
    stream_of(raw)->alive = 0;
    LEAVE(OK);
}
CUresult cuStreamSynchronize(void *raw) {
    ENTER;
    if (stream_of(raw)->capture) LEAVE(CAPTURES);
    join(&host, &stream_of(raw)->clock);
    LEAVE(OK);
}
static int complete(const Clock *clock) {
    for (int i = 0; i < SLOTS; i++)
        if (host.at[i] < clock->at[i]) return 0;
    return 1;
}
CUresult cuStreamQuery(void *raw) {
    ENTER;
    if (stream_of(raw)->capture) LEAVE(CAPTURES);
    LEAVE(complete(&stream_of(raw)->clock) ? OK : NOT_READY);
}
CUresult cuStreamIsCapturing(void *raw, int *status) {
    ENTER;
    *status = stream_of(raw)->capture != 0;
    LEAVE(OK);
}
CUresult cuStreamWaitEvent(void *raw, Event *event, unsigned flags) {
    (void)flags;
    ENTER;
    if (stream_of(raw)->capture) LEAVE(event->recorded ? ISOLATION : OK);
    Stream *stream = work(raw);
    if (event->recorded) join(&stream->clock, &event->clock);
    LEAVE(OK);
}
CUresult cuEventCreate(Event **event, unsigned flags) {
    (void)flags;
    ENTER;
    *event = lost ? NULL : calloc(1, sizeof **event);
    LEAVE(OK);
}
CUresult cuEventDestroy_v2(Event *event) { free(event); return OK; }
CUresult cuEventRecord(Event *event, void *raw) {
    ENTER;
    event->recorded = !stream_of(raw)->capture;
    if (event->recorded) event->clock = work(raw)->clock;
    LEAVE(OK);
}
CUresult cuEventQuery(Event *event) {
    ENTER;
    LEAVE(!event->recorded || complete(&event->clock) ? OK : NOT_READY);
}
CUresult cuEventSynchronize(Event *event) {
    ENTER;
    if (event->recorded) join(&host, &event->clock);
    LEAVE(OK);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const void *prop, int option) {
    (void)prop; (void)option;
    *bytes = PAGE;
    return OK;
}
static uint64_t addresses(size_t len) {
    char *at = mmap(NULL, len + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) fail("no addresses");
    size_t before = -(uint64_t)at & (PAGE - 1), behind = (PAGE - before) & ~(size_t)4095;
    if (before) munmap(at, before);
    if (behind) munmap(at + before + ((len + 4095) & ~(size_t)4095), behind);
    return (uint64_t)at + before;
}
CUresult cuMemAddressReserve(CUdeviceptr *at, size_t len, size_t align, CUdeviceptr wish, unsigned long long flags) {
    (void)align; (void)wish; (void)flags;
    *at = addresses(len);
    return OK;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t len) { munmap((void *)(uintptr_t)at, len); return OK; }
CUresult cuMemCreate(uint64_t **handle, size_t len, const void *prop, unsigned long long flags) {
    (void)prop; (void)flags;
    ENTER;
    if (len > MEMORY - created) LEAVE(NO_MEMORY);
    created += len;
    *handle = malloc(sizeof **handle);
    **handle = len;
    LEAVE(OK);
}
CUresult cuMemRelease(uint64_t *handle) {
    ENTER;
    created -= *handle;
    free(handle);
    LEAVE(OK);
}
CUresult cuMemHostAlloc(void **at, size_t len, unsigned flags) {
    (void)flags;
    *at = malloc(len);
    return OK;
}
CUresult cuMemFreeHost(void *at) { free(at); return OK; }
CUresult cuMemMap(CUdeviceptr at, size_t len, size_t offset, uint64_t *handle, unsigned long long flags) {
    (void)at; (void)offset; (void)flags;
    return *handle == len ? OK : INVALID;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t len) {
    ENTER;
    forget(at, len, &host, "memory is unmapped under work");
    LEAVE(OK);
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t len, const void *desc, size_t count) {
    (void)at; (void)len; (void)desc; (void)count;
    return OK;
}

CUresult cuMemAllocAsync(CUdeviceptr *at, size_t len, void *raw) {
    ENTER;
    work(raw);
    *at = addresses(len);
    if (owned_count == sizeof owned / sizeof *owned) fail("too many blocks");
    Owned block = { *at, *at + len };
    owned[owned_count++] = block;
    LEAVE(OK);
}
CUresult cuMemFreeAsync(CUdeviceptr at, void *raw) {
    ENTER;
    Stream *stream = work(raw);
    for (size_t i = 0; i < owned_count; i++) {
        if (owned[i].start != at) continue;
        forget(at, owned[i].end - at, &stream->clock, "memory is freed beside work");
        munmap((void *)(uintptr_t)at, owned[i].end - at);
        owned[i] = owned[--owned_count];
        LEAVE(OK);
    }
    fail("the driver's free of memory that is not the driver's");
    LEAVE(INVALID);
}

/* Does a piece of work, or adds it to the graph that the stream captures. */
static void perform(void *raw, Node node) {
    Stream *stream = stream_of(raw);
    if (stream->capture) {
        Graph *graph = stream->graph;
        Node *kept = malloc(sizeof *kept);
        *kept = node;
        kept->before = graph->count ? graph->nodes[graph->count - 1] : NULL;
        graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof *graph->nodes);
        graph->nodes[graph->count++] = kept;
        return;
    }
    stream = work(raw);
    void *to = (void *)(uintptr_t)node.to;
    if (node.from) touch(stream, node.from, node.len, 0);
    touch(stream, node.to, node.len, 1);
    if (node.from) memmove(to, (void *)(uintptr_t)node.from, node.len);
    else memset(to, node.value, node.len);
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t len, void *raw) {
    if (len == 0) return INVALID; /* whatever drivers do, no call is needed */
    ENTER;
    perform(raw, (Node){ at, 0, len, value, NULL });
    LEAVE(OK);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t len, void *raw) {
    if (len == 0) return INVALID;
    ENTER;
    perform(raw, (Node){ to, from, len, 0, NULL });
    LEAVE(OK);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t len, void *raw) {
    if (len == 0) return INVALID;
    ENTER;
    if (stream_of(raw)->capture) LEAVE(CAPTURES);
    touch(work(raw), to, len, 1);
    memcpy((void *)(uintptr_t)to, from, len);
    LEAVE(OK);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t len, void *raw) {
    ENTER;
    if (stream_of(raw)->capture) LEAVE(CAPTURES);
    Stream *stream = work(raw);
    touch(stream, from, len, 0);
    memcpy(to, (void *)(uintptr_t)from, len);
    join(&host, &stream->clock); /* memory that is not pinned */
    LEAVE(OK);
}

CUresult cuStreamBeginCapture_v2(void *raw, int mode) {
    static uint64_t next = 1;
    (void)mode;
    ENTER;
    Stream *stream = stream_of(raw);
    if (stream->capture || stream == &null_stream) LEAVE(CAPTURES);
    stream->capture = next++;
    stream->graph = calloc(1, sizeof *stream->graph);
    LEAVE(OK);
}
CUresult cuStreamEndCapture(void *raw, Graph **graph) {
    ENTER;
    Stream *stream = stream_of(raw);
    if (!stream->capture) LEAVE(INVALID);
    *graph = stream->graph;
    stream->capture = 0;
    LEAVE(OK);
}
CUresult cuStreamGetCaptureInfo_v3(void *raw, int *status, uint64_t *id, Graph **graph, Node ***nodes, void **edges,
                                   size_t *count) {
    ENTER;
    Stream *stream = stream_of(raw);
    *status = stream->capture != 0;
    if (id) *id = stream->capture;
    size_t last = stream->capture ? stream->graph->count : 0;
    if (graph) *graph = stream->graph;
    if (nodes) *nodes = last ? stream->graph->nodes + last - 1 : NULL;
    if (edges) *edges = NULL;
    if (count) *count = last != 0;
    LEAVE(OK);
}
CUresult cuGraphNodeGetDependencies_v2(Node *node, Node **before, void *edges, size_t *count) {
    (void)edges;
    if (before && node->before) before[0] = node->before;
    *count = node->before != NULL;
    return OK;
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int now;
    int before = now;
    now = *mode;
    *mode = before;
    return OK;
}
/* The graph is its own executable form. Neither is freed: the other may be in use. */
CUresult cuGraphInstantiateWithFlags(Graph **exec, Graph *graph, unsigned long long flags) {
    (void)flags;
    *exec = graph;
    return OK;
}
CUresult cuGraphDestroy(Graph *graph) { return graph ? OK : INVALID; }
CUresult cuGraphExecDestroy(Graph *exec) { return exec ? OK : INVALID; }
CUresult cuGraphLaunch(Graph *exec, void *raw) {
    ENTER;
    for (size_t i = 0; i < exec->count; i++) perform(raw, *exec->nodes[i]);
    LEAVE(OK);
}

/* Modules have one kernel: `copy_late(to, from, n, cycles)` of the tests. */
CUresult cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return OK; }
CUresult cuModuleUnload(void *module) { (void)module; return OK; }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return strcmp(name, "copy_late") == 0 ? OK : 500;
}
CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *raw, void **args, void **extra) {
    (void)function; (void)gx; (void)gy; (void)gz; (void)bx; (void)by; (void)bz; (void)shared; (void)extra;
    ENTER;
    Node node = { *(uint64_t *)args[0], *(uint64_t *)args[1], *(uint64_t *)args[2] * 4, 0, NULL };
    if (node.from < 4096) lost = ILLEGAL_ADDRESS;
    if (!lost) perform(raw, node);
    LEAVE(OK);
}
