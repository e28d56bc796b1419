// What the fragments of the guides name. A test appends the code of one, and the end of the function.
#include <vramp.hpp>
typedef struct stream *cudaStream_t;
typedef struct graph *cudaGraph_t;
enum { cudaStreamCaptureModeThreadLocal };
void cudaStreamCreate(cudaStream_t *);
void cudaStreamBeginCapture(cudaStream_t, int);
void cudaStreamEndCapture(cudaStream_t, cudaGraph_t *);
using vramp::check;
struct { vramp_allocator_t handle() const; } device;
vramp_allocator_t allocator;
vramp_stream_t stream;
vramp_arena_t arena;
vramp_graph_t graph, hold;
vramp_lease_t lease;
vramp_export_t exported;
vramp_ticket_t ticket;
vramp_region_scope_t scope;
vramp_keeper_t keeper;
vramp_kept_t kept;
void *block, *weights, *address, *layout;
size_t bytes, size, length;
int32_t released, rows;
const char *tags[1], *directory;
unsigned char digest[32];
cudaStream_t raw;
cudaGraph_t yours;
void fragment() {
