// Streams, events, captures, and the work that is queued on them.
//
// A stream is the time at which its last work is done. Work is done by one thread in the order of these times, so that
// what is freed or reused too early meets it.
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct Stream {
  struct Context *context;
  int64_t done;
  struct Graph *capture;
};

struct Event {
  int64_t done;
};

struct Graph {
  struct Work *work;
  size_t count;
};

// Work that waits for its time.
struct Job {
  struct Job *next;
  int64_t due;
  int device;
  struct Work work;
};

static struct Job *jobs;
static int64_t device_done[DEVICES];
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool has_worker;
static CUresult sticky;
// Captures under way, and whether one was made invalid.
static int captures;
static bool has_invalid;
static struct Stream legacy[DEVICES];
static _Thread_local struct Stream own[DEVICES];
static _Thread_local int capture_mode;

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static int64_t late(void) {
  const char *text = getenv("FAKE_CUDA_LATE_US");
  return text ? atoll(text) * 1000 : 0;
}

struct Stream *stream_of(CUstream stream, bool per_thread) {
  uintptr_t number = (uintptr_t)stream;
  if (number > 2) return stream;
  struct Context *context = current();
  if (!context) return NULL;
  bool is_own = number == 2 || (number == 0 && per_thread);
  struct Stream *found = is_own ? &own[context->device] : &legacy[context->device];
  found->context = context;
  return found;
}

bool capturing(CUstream stream, bool per_thread) {
  struct Stream *found = stream_of(stream, per_thread);
  return found && found->capture;
}

static void perform(const struct Work *work) {
  bool reaches = work->kind == RELEASE_BLOCK || (is_accessible(work->to, work->size) || work->kind == COPY);
  if (!reaches) {
    sticky = ILLEGAL_ADDRESS;
    return;
  }
  switch (work->kind) {
    case FILL: memset((void *)work->to, (int)work->value, work->size); break;
    case COPY: memcpy((void *)work->to, (void *)work->from, work->size); break;
    case RELEASE_BLOCK: release(work->to); break;
  }
}

static void *perform_all(void *unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  for (;;) {
    struct timespec until;
    if (!jobs) {
      pthread_cond_wait(&changed, &lock);
    } else if (jobs->due > now()) {
      int64_t wait = jobs->due - now();
      clock_gettime(CLOCK_REALTIME, &until);
      wait += until.tv_nsec;
      until.tv_sec += wait / 1000000000, until.tv_nsec = wait % 1000000000;
      pthread_cond_timedwait(&changed, &lock, &until);
    } else {
      struct Job *job = jobs;
      jobs = job->next;
      perform(&job->work);
      free(job);
      pthread_cond_broadcast(&changed);
    }
  }
  return NULL;
}

static void record(struct Graph *graph, struct Work work) {
  graph->work = realloc(graph->work, (graph->count + 1) * sizeof work);
  graph->work[graph->count++] = work;
}

static void queue(struct Stream *stream, struct Work work) {
  int64_t delay = late();
  if (!delay) {
    perform(&work);
    return;
  }
  if (!has_worker) {
    pthread_t thread;
    has_worker = !pthread_create(&thread, NULL, perform_all, NULL);
    pthread_detach(thread);
  }
  int device = stream->context->device;
  int64_t start = stream->done > now() ? stream->done : now();
  stream->done = start + delay;
  if (stream->done > device_done[device]) device_done[device] = stream->done;
  struct Job *job = malloc(sizeof *job), **at = &jobs;
  while (*at && (*at)->due <= stream->done) at = &(*at)->next;
  *job = (struct Job){*at, stream->done, device, work};
  *at = job;
  pthread_cond_broadcast(&changed);
}

CUresult enqueue(CUstream stream, bool per_thread, struct Work work) {
  struct Stream *found = stream_of(stream, per_thread);
  if (!found) return INVALID_CONTEXT;
  pthread_mutex_lock(&lock);
  if (found->capture) record(found->capture, work);
  else queue(found, work);
  CUresult code = sticky;
  pthread_mutex_unlock(&lock);
  return code;
}

// Waits until all work that is due by a time is done.
static CUresult wait_until(int64_t done) {
  pthread_mutex_lock(&lock);
  while (jobs && jobs->due <= done) pthread_cond_wait(&changed, &lock);
  CUresult code = sticky;
  pthread_mutex_unlock(&lock);
  return code;
}

void synchronize(int device) { wait_until(device_done[device]); }

static bool is_done(int64_t done) {
  pthread_mutex_lock(&lock);
  bool found = !jobs || jobs->due > done;
  pthread_mutex_unlock(&lock);
  return found;
}

PUBLIC CUresult cuCtxSynchronize(void) {
  ENTER("cuCtxSynchronize");
  struct Context *context = current();
  if (__atomic_load_n(&captures, __ATOMIC_SEQ_CST)) return has_invalid = true, CAPTURE_UNSUPPORTED;
  return context ? wait_until(device_done[context->device]) : INVALID_CONTEXT;
}

// --- Streams ---

PUBLIC CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  ENTER("cuStreamCreate");
  (void)flags;
  struct Context *context = current();
  if (!context) return INVALID_CONTEXT;
  *stream = calloc(1, sizeof **stream);
  return (*stream)->context = context, OK;
}

PUBLIC CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  (void)priority;
  return cuStreamCreate(stream, flags);
}

PUBLIC CUresult cuStreamDestroy_v2(CUstream stream) {
  ENTER("cuStreamDestroy_v2");
  if ((uintptr_t)stream <= 2) return INVALID_HANDLE;
  if (stream->capture) __atomic_sub_fetch(&captures, 1, __ATOMIC_SEQ_CST);
  free(stream);
  return OK;
}

PUBLIC CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
  ENTER("cuStreamGetCtx");
  struct Stream *found = stream_of(stream, false);
  if (!found) return INVALID_CONTEXT;
  return *context = found->context, OK;
}

#define OF_STREAM(suffix, per_thread)                                                              \
  PUBLIC CUresult cuStreamSynchronize##suffix(CUstream stream) {                                   \
    ENTER("cuStreamSynchronize" #suffix);                                                          \
    struct Stream *found = stream_of(stream, per_thread);                                          \
    if (!found) return INVALID_CONTEXT;                                                            \
    return found->capture ? CAPTURE_UNSUPPORTED : wait_until(found->done);                         \
  }                                                                                                \
  PUBLIC CUresult cuStreamQuery##suffix(CUstream stream) {                                         \
    ENTER("cuStreamQuery" #suffix);                                                                \
    struct Stream *found = stream_of(stream, per_thread);                                          \
    if (!found) return INVALID_CONTEXT;                                                            \
    return is_done(found->done) ? sticky : NOT_READY;                                              \
  }                                                                                                \
  PUBLIC CUresult cuStreamWaitEvent##suffix(CUstream stream, CUevent event, unsigned flags) {      \
    ENTER("cuStreamWaitEvent" #suffix);                                                            \
    (void)flags;                                                                                   \
    struct Stream *found = stream_of(stream, per_thread);                                          \
    if (!found) return INVALID_CONTEXT;                                                            \
    pthread_mutex_lock(&lock);                                                                     \
    if (event->done > found->done) found->done = event->done;                                      \
    pthread_mutex_unlock(&lock);                                                                   \
    return OK;                                                                                     \
  }                                                                                                \
  PUBLIC CUresult cuEventRecord##suffix(CUevent event, CUstream stream) {                          \
    ENTER("cuEventRecord" #suffix);                                                                \
    struct Stream *found = stream_of(stream, per_thread);                                          \
    if (!found) return INVALID_CONTEXT;                                                            \
    return event->done = found->done, OK;                                                          \
  }                                                                                                \
  PUBLIC CUresult cuStreamIsCapturing##suffix(CUstream stream, int *status) {                      \
    ENTER("cuStreamIsCapturing" #suffix);                                                          \
    return *status = capturing(stream, per_thread), OK;                                            \
  }                                                                                                \
  PUBLIC CUresult cuMemsetD8Async##suffix(CUdeviceptr to, unsigned char value, size_t size,        \
                                          CUstream stream) {                                       \
    ENTER("cuMemsetD8Async" #suffix);                                                              \
    return enqueue(stream, per_thread, (struct Work){FILL, to, 0, size, value});                   \
  }                                                                                                \
  PUBLIC CUresult cuMemcpyHtoDAsync_v2##suffix(CUdeviceptr to, const void *from, size_t size,      \
                                               CUstream stream) {                                  \
    ENTER("cuMemcpyHtoDAsync_v2" #suffix);                                                         \
    return enqueue(stream, per_thread, (struct Work){COPY, to, (uint64_t)from, size, 0});          \
  }                                                                                                \
  PUBLIC CUresult cuMemcpyDtoHAsync_v2##suffix(void *to, CUdeviceptr from, size_t size,            \
                                               CUstream stream) {                                  \
    ENTER("cuMemcpyDtoHAsync_v2" #suffix);                                                         \
    return enqueue(stream, per_thread, (struct Work){COPY, (uint64_t)to, from, size, 0});          \
  }                                                                                                \
  PUBLIC CUresult cuMemcpyDtoDAsync_v2##suffix(CUdeviceptr to, CUdeviceptr from, size_t size,      \
                                               CUstream stream) {                                  \
    ENTER("cuMemcpyDtoDAsync_v2" #suffix);                                                         \
    return enqueue(stream, per_thread, (struct Work){COPY, to, from, size, 0});                    \
  }
OF_STREAM(, false)
OF_STREAM(_ptsz, true)

PUBLIC CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext its, CUdeviceptr from, CUcontext other, size_t size,
                                  CUstream stream) {
  (void)its, (void)other;
  return cuMemcpyDtoDAsync_v2(to, from, size, stream);
}

// Copies and fills that wait for all work, as on the legacy stream. `device` is an address that has to be the device's.
static CUresult at_once(struct Work work, CUdeviceptr device) {
  struct Context *context = current();
  if (!context) return INVALID_CONTEXT;
  wait_until(device_done[context->device]);
  pthread_mutex_lock(&lock);
  bool is_known = range_of(device);
  if (is_known) perform(&work);
  CUresult code = is_known ? sticky : INVALID_VALUE;
  pthread_mutex_unlock(&lock);
  return code;
}

PUBLIC CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
  ENTER("cuMemcpyHtoD_v2");
  return at_once((struct Work){COPY, to, (uint64_t)from, size, 0}, to);
}

PUBLIC CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
  ENTER("cuMemcpyDtoH_v2");
  return at_once((struct Work){COPY, (uint64_t)to, from, size, 0}, from);
}

PUBLIC CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
  ENTER("cuMemsetD8_v2");
  return at_once((struct Work){FILL, to, 0, size, value}, to);
}

// --- Events ---

PUBLIC CUresult cuEventCreate(CUevent *event, unsigned flags) {
  ENTER("cuEventCreate");
  (void)flags;
  return *event = calloc(1, sizeof **event), OK;
}

PUBLIC CUresult cuEventDestroy_v2(CUevent event) {
  ENTER("cuEventDestroy_v2");
  free(event);
  return OK;
}

PUBLIC CUresult cuEventQuery(CUevent event) {
  ENTER("cuEventQuery");
  return is_done(event->done) ? sticky : NOT_READY;
}

PUBLIC CUresult cuEventSynchronize(CUevent event) {
  ENTER("cuEventSynchronize");
  return wait_until(event->done);
}

// --- Captures ---

static CUresult begin_capture(struct Stream *stream) {
  if (!stream || stream->capture) return INVALID_VALUE;
  __atomic_add_fetch(&captures, 1, __ATOMIC_SEQ_CST);
  return stream->capture = calloc(1, sizeof *stream->capture), OK;
}

static CUresult end_capture(struct Stream *stream, CUgraph *graph) {
  if (!stream || !stream->capture) return INVALID_VALUE;
  bool is_invalid = __atomic_exchange_n(&has_invalid, false, __ATOMIC_SEQ_CST);
  __atomic_sub_fetch(&captures, 1, __ATOMIC_SEQ_CST);
  *graph = stream->capture;
  if (is_invalid) return stream->capture = NULL, CAPTURE_INVALIDATED;
  return stream->capture = NULL, OK;
}

PUBLIC CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
  ENTER("cuStreamBeginCapture_v2");
  (void)mode;
  // Not the legacy one.
  return stream ? begin_capture(stream_of(stream, false)) : CAPTURE_UNSUPPORTED;
}

PUBLIC CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode) {
  ENTER("cuStreamBeginCapture_v2_ptsz");
  (void)mode;
  return begin_capture(stream_of(stream, true));
}

PUBLIC CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  ENTER("cuStreamEndCapture");
  return end_capture(stream_of(stream, false), graph);
}

PUBLIC CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
  ENTER("cuStreamEndCapture_ptsz");
  return end_capture(stream_of(stream, true), graph);
}

PUBLIC CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int *status, uint64_t *id, CUgraph *graph, void *nodes,
                                          void *edges, size_t *count) {
  ENTER("cuStreamGetCaptureInfo_v3");
  (void)nodes, (void)edges;
  struct Stream *found = stream_of(stream, false);
  *status = found && found->capture;
  if (id) *id = found ? (uint64_t)found->capture : 0;
  if (graph) *graph = found ? found->capture : NULL;
  if (count) *count = 0;
  return OK;
}

PUBLIC CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  ENTER("cuThreadExchangeStreamCaptureMode");
  int before = capture_mode;
  capture_mode = *mode, *mode = before;
  return OK;
}

PUBLIC CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph, uint64_t flags) {
  ENTER("cuGraphInstantiateWithFlags");
  (void)flags;
  *made = calloc(1, sizeof **made);
  for (size_t at = 0; at < graph->count; ++at) record(*made, graph->work[at]);
  return OK;
}

PUBLIC CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  ENTER("cuGraphLaunch");
  CUresult code = OK;
  for (size_t at = 0; at < graph->count && !code; ++at) code = enqueue(stream, false, graph->work[at]);
  return code;
}

static void drop(struct Graph *graph) {
  free(graph->work);
  free(graph);
}

PUBLIC CUresult cuGraphDestroy(CUgraph graph) {
  ENTER("cuGraphDestroy");
  return drop(graph), OK;
}

PUBLIC CUresult cuGraphExecDestroy(CUgraphExec graph) {
  ENTER("cuGraphExecDestroy");
  return drop(graph), OK;
}

PUBLIC CUresult cuGraphGetNodes(CUgraph graph, void *nodes, size_t *count) {
  ENTER("cuGraphGetNodes");
  (void)graph, (void)nodes;
  return *count = 0, OK;
}

PUBLIC CUresult cuGraphNodeGetDependencies_v2(void *node, void *nodes, void *edges, size_t *count) {
  ENTER("cuGraphNodeGetDependencies_v2");
  (void)node, (void)nodes, (void)edges;
  return *count = 0, OK;
}
