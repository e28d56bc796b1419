// The C interface of vramp, a GPU memory manager. See docs/c-interface.md.
//
// Written by `cargo xtask header`; never edited by hand.

#ifndef VRAMP_H
#define VRAMP_H

#include <stddef.h>
#include <stdint.h>

// What a call came to. Zero is success; `vramp_last_error` has the whole text.
typedef enum {
  // The call did what it says.
  VRAMP_OK = 0,
  // A pointer that must not be null is null.
  VRAMP_ERROR_NULL = 1,
  // A text is not UTF-8.
  VRAMP_ERROR_TEXT = 2,
  // An option is unknown, or its value cannot be used on this device.
  VRAMP_ERROR_OPTION = 3,
  // The device is unknown or cannot be opened.
  VRAMP_ERROR_DEVICE = 4,
  // The allocator was never opened, or is closed.
  VRAMP_ERROR_UNKNOWN_ALLOCATOR = 5,
  // The stream is not this allocator's, or was forgotten.
  VRAMP_ERROR_UNKNOWN_STREAM = 6,
  // The address is not the start of a block that this allocator handed out, or it is free again.
  VRAMP_ERROR_UNKNOWN_POINTER = 7,
  // There is not enough memory; the text says what is free and what to do.
  VRAMP_ERROR_OUT_OF_MEMORY = 8,
  // A driver call failed; the text names it.
  VRAMP_ERROR_DRIVER = 9,
  // As many allocators are open as there can be.
  VRAMP_ERROR_TOO_MANY = 10,
  // The struct's `struct_size` is too small to be one.
  VRAMP_ERROR_STRUCT_SIZE = 11,
  // The allocator serves somebody else and cannot be closed.
  VRAMP_ERROR_IN_USE = 12,
  // A number is out of its range.
  VRAMP_ERROR_RANGE = 13,
  // The allocator's books do not add up. A defect of vramp.
  VRAMP_ERROR_INCONSISTENT = 14,
  // A panic inside of vramp. A defect of vramp.
  VRAMP_ERROR_INTERNAL = 15,
  // A file cannot be written.
  VRAMP_ERROR_FILE = 16,
  // The arena was never made by this allocator, or is destroyed.
  VRAMP_ERROR_UNKNOWN_ARENA = 17,
  // The graph was never made by this allocator, or is destroyed.
  VRAMP_ERROR_UNKNOWN_GRAPH = 18,
  // The lease was never given by this allocator, or has ended.
  VRAMP_ERROR_UNKNOWN_LEASE = 19,
  // Somebody else uses the arena; the text says who.
  VRAMP_ERROR_BUSY = 20,
  // A capture did not begin, came to nothing, or is in the way.
  VRAMP_ERROR_CAPTURE = 21,
  // The preset or the device cannot do it.
  VRAMP_ERROR_UNSUPPORTED = 22,
} vramp_status_t;

// What happened in an allocator.
typedef enum {
  // Memory was handed out: `address`, `size`, `requested`.
  VRAMP_EVENT_ALLOCATED = 0,
  // Memory was taken back: `address`, `size`, `requested`.
  VRAMP_EVENT_FREED = 1,
  // Physical memory was taken from the card: `size`.
  VRAMP_EVENT_GROWN = 2,
  // Physical memory was given back to the card: `size`.
  VRAMP_EVENT_SHRUNK = 3,
  // Free memory was moved to where it was needed: `size`.
  VRAMP_EVENT_REMAPPED = 4,
  // A request could not be served at first: `requested`.
  VRAMP_EVENT_SHORT = 5,
  // A request failed for good: `requested`.
  VRAMP_EVENT_OUT_OF_MEMORY = 6,
} vramp_event_kind_t;

// An allocator. A number and no pointer: any value may be passed to any function. Zero is none.
typedef struct {
  // Only to be compared.
  uint64_t id;
} vramp_allocator_t;

// A stream of an allocator. A number and no pointer. Zero is none.
typedef struct {
  // Only to be compared.
  uint64_t id;
} vramp_stream_t;

// What an allocator did so far. Amounts are in bytes. Later versions add fields at the end.
typedef struct {
  // Set by the caller to `sizeof(vramp_stats_t)`: no more than that is written. On return, how
  // much was.
  uint64_t struct_size;
  // Bytes that were asked for and are held.
  uint64_t live;
  // The most that `live` was.
  uint64_t live_peak;
  // Physical memory that the allocator holds.
  uint64_t reserved;
  // The most that `reserved` was.
  uint64_t reserved_peak;
  // Blocks handed out.
  uint64_t placed;
  // Blocks freed.
  uint64_t freed;
  // Blocks that needed no plan of driver calls.
  uint64_t hits;
  // Blocks that did.
  uint64_t misses;
  // Pieces of physical memory created.
  uint64_t chunks_created;
  // Pieces mapped at a new address.
  uint64_t chunks_moved;
  // Pieces moved to an address where they were still mapped.
  uint64_t chunks_reactivated;
  // Pieces given back to the card.
  uint64_t chunks_released;
  // Bytes of the pieces moved or reactivated.
  uint64_t moved;
  // Plans that failed and were undone.
  uint64_t plans_undone;
  // Memory of the card that nobody has.
  uint64_t card_free;
  // Memory of the card.
  uint64_t card_total;
} vramp_stats_t;

// An event. What its kind does not name is zero.
typedef struct {
  // What happened.
  vramp_event_kind_t kind;
  // The block's address.
  uint64_t address;
  // How many bytes it is about.
  uint64_t size;
  // How many bytes were asked for.
  uint64_t requested;
} vramp_event_t;

// Called for every event, by the thread that caused it and without a lock: it may call vramp.
typedef void (*vramp_observer_t)(const vramp_event_t *event, void *user);

// Memory for captured graphs. A number and no pointer. Zero is none.
typedef struct {
  // Only to be compared.
  uint64_t id;
} vramp_arena_t;

// What an arena has. Amounts are in bytes. Later versions add fields at the end.
typedef struct {
  // Set by the caller to `sizeof(vramp_arena_report_t)`, as in vramp_stats_t.
  uint64_t struct_size;
  // Addresses.
  uint64_t capacity;
  // Up to where blocks were ever placed.
  uint64_t high_water;
  // Bytes that were asked for and are held.
  uint64_t live;
  // Blocks that are held.
  uint64_t blocks;
  // Physical memory of its own.
  uint64_t backed;
  // Physical memory at its addresses that others may take.
  uint64_t lent;
} vramp_arena_report_t;

// A captured graph, or the hold on the memory of one. A number and no pointer. Zero is none.
typedef struct {
  // Only to be compared.
  uint64_t id;
} vramp_graph_t;

// The right of one stream to an arena. A number and no pointer. Zero is none.
typedef struct {
  // Only to be compared.
  uint64_t id;
} vramp_lease_t;

// How much memory a capture needed. Amounts are in bytes. Later versions add fields at the end.
typedef struct {
  // Set by the caller to `sizeof(vramp_capture_report_t)`, as in vramp_stats_t.
  uint64_t struct_size;
  // Blocks that the capture made.
  uint64_t blocks;
  // Blocks that outlive it.
  uint64_t escaped;
  // What it would take if nothing served twice.
  uint64_t monotone;
  // What it took.
  uint64_t taken;
  // What the next one of the same shape takes; zero where no layout was planned.
  uint64_t planned;
  // The most that was live at once: no layout needs less.
  uint64_t lower_bound;
  // Memory from outside that was freed within the capture and is kept for the graph.
  uint64_t kept;
} vramp_capture_report_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library, such as "0.1.0". Never null.
const char *vramp_version(void);

// The name of a code, such as "VRAMP_ERROR_OUT_OF_MEMORY". Never null; "unknown" for others.
const char *vramp_status_name(int status);

// What the calling thread's last failed call has to say, in full. Never null; empty before the
// first failure. Good until the thread's next failing call; a call that succeeds leaves it.
const char *vramp_last_error(void);

// Opens an allocator on a device.
//
// `device` is "auto" (card 0 if there is one, else the simulator), "cuda", "cuda:N", "sim" or
// "sim:CARD"; null means "auto". `options` are key=value pairs with commas between: preset (vramp,
// vpmm or stream-ordered), limit (such as 80GiB, or 90% of the card), prefill, page, span; null
// means the defaults. Takes no memory yet, unless prefill says so.
//
// What the caller promises:
// The texts are null or end with a zero; `allocator` is null or good for writing.
vramp_status_t vramp_open(const char *device, const char *options, vramp_allocator_t *allocator);

// Closes an allocator: waits for its streams and gives all its memory back, also what was not
// freed. Calls under way on other threads are waited for; later ones find it unknown.
vramp_status_t vramp_close(vramp_allocator_t allocator);

// Makes a stream of the device known that the caller made: a `cudaStream_t`, or null for the
// default stream. The same one again gives the same answer. No driver call. On the simulator any
// value names a simulated stream.
//
// What the caller promises:
// On a card, `raw` is null or a stream of the card's primary context that lives until it is
// forgotten or the allocator is closed. `stream` is null or good for writing.
vramp_status_t vramp_stream_adopt(vramp_allocator_t allocator, void *raw, vramp_stream_t *stream);

// Makes a new stream, for programs that have none of their own. One driver call.
//
// What the caller promises:
// `stream` is null or good for writing.
vramp_status_t vramp_stream_create(vramp_allocator_t allocator, vramp_stream_t *stream);

// Lets go of a stream, made or adopted: to be called before an adopted one is destroyed, and not
// while it captures a graph. Never waits; work that is queued still runs, and memory it uses is
// not handed out before it ends. Blocks of the stream stay, and are freed on another one.
vramp_status_t vramp_stream_forget(vramp_allocator_t allocator, vramp_stream_t stream);

// At least `size` bytes for work on `stream`, aligned to 512 bytes, or to 256 within a capture that
// an arena serves. A request for nothing gets an
// address of its own too. On failure `*address` is set to null.
//
// What the caller promises:
// `address` is null or good for writing.
vramp_status_t vramp_malloc(vramp_allocator_t allocator,
                            size_t size,
                            vramp_stream_t stream,
                            void **address);

// Takes a block back. All work on it must be queued on `stream`, ordered before its present end,
// or noted with vramp_record_use; `stream` may be another one than the block's. Never waits.
//
// A null address, one that is not the start of a block, another allocator's or one that is free
// already is an error and changes nothing. A block that was handed out again at the same address
// cannot be told from the old one.
vramp_status_t vramp_free(vramp_allocator_t allocator, void *address, vramp_stream_t stream);

// Notes that work queued on `stream` so far uses a block. No driver call.
vramp_status_t vramp_record_use(vramp_allocator_t allocator, void *address, vramp_stream_t stream);

// How many bytes of a block may be used: what was asked, or a little more.
//
// What the caller promises:
// `size` is null or good for writing.
vramp_status_t vramp_usable_size(vramp_allocator_t allocator, void *address, size_t *size);

// Gives idle memory back to the card until the allocator holds no more than `keep` bytes or
// nothing more is idle. Never waits.
vramp_status_t vramp_trim(vramp_allocator_t allocator, size_t keep);

// What the allocator did so far. Set `stats->struct_size` to `sizeof(vramp_stats_t)` before.
//
// What the caller promises:
// `stats` is null, or its first eight bytes hold a size that is good for reading and writing.
vramp_status_t vramp_stats(vramp_allocator_t allocator, vramp_stats_t *stats);

// Checks every invariant of the allocator's books. O(n log n): for tests.
vramp_status_t vramp_audit(vramp_allocator_t allocator);

// The most physical memory the allocator may hold, in bytes; zero for as much as the card has.
// What is idle above it is given back at once; what is in use stays.
vramp_status_t vramp_set_limit(vramp_allocator_t allocator, uint64_t limit);

// Records the last `events` events from now on; zero ends a recording. A recording costs a lock
// shared by all threads for each malloc and free.
vramp_status_t vramp_record_history(vramp_allocator_t allocator, uint32_t events);

// Writes what the allocator holds, and its history if one is recorded, to a file: as a snapshot
// for `torch/cuda/_memory_viz.py` and its viewer, or, if the path ends with `.json`, as a timeline
// for Perfetto.
//
// What the caller promises:
// `path` is null or ends with a zero.
vramp_status_t vramp_snapshot(vramp_allocator_t allocator, const char *path);

// Calls `observer` for every event from now on, with `user`, and writes a number to take it back
// by to `registration`.
//
// What the caller promises:
// `observer` may be called from any thread with `user` until the allocator is closed or
// vramp_unobserve has returned and no call of it is under way; it does not unwind. `registration`
// is null or good for writing.
vramp_status_t vramp_observe(vramp_allocator_t allocator,
                             vramp_observer_t observer,
                             void *user,
                             uint64_t *registration);

// Takes an observer back. A number that names none, or one taken back before, is an error.
vramp_status_t vramp_unobserve(vramp_allocator_t allocator, uint64_t registration);

// Sets addresses aside for the memory of captured graphs. Graphs captured one after the other into
// one arena share its memory: together they need what the largest of them needs, and what is live
// between them. They must never run at the same time, and run in the order of their captures where
// one reads what another left.
//
// `options` are key=value pairs with commas between: policy (reusing, or monotone, in which nothing
// serves twice), capacity (addresses, 512GiB; a monotone arena takes as much memory before its first
// capture, a reusing one only what captures need), overlap (refuse, or order: what a replay does
// while another stream's is not over), mode (thread-local, global or relaxed: of the driver's
// capture), replan (on or off: whether to plan a tighter layout for the next capture of the same
// shape); null means the defaults, which come first here. Only the preset vramp has arenas.
//
// What the caller promises:
// `options` is null or ends with a zero; `arena` is null or good for writing.
vramp_status_t vramp_arena_create(vramp_allocator_t allocator,
                                  const char *options,
                                  vramp_arena_t *arena);

// Lets go of an arena. Its memory goes once its graphs are destroyed and its blocks freed. Busy
// while it serves a capture.
vramp_status_t vramp_arena_destroy(vramp_allocator_t allocator, vramp_arena_t arena);

// Lets a monotone arena begin anew at its start, once its graphs are done with. Busy while it
// serves a capture or a block of it is held.
vramp_status_t vramp_arena_reset(vramp_allocator_t allocator, vramp_arena_t arena);

// What an arena has at present. Set `report->struct_size` to `sizeof(vramp_arena_report_t)` before.
//
// What the caller promises:
// `report` is null, or its first eight bytes hold a size that is good for reading and writing.
vramp_status_t vramp_arena_report(vramp_allocator_t allocator,
                                  vramp_arena_t arena,
                                  vramp_arena_report_t *report);

// Begins a capture of `stream` into an arena: what is asked for on it, and on streams that the
// capture draws in, comes from the arena; all else as ever, also from other threads. Memory from
// outside that is freed on those streams stays taken until the graph is destroyed. An arena serves
// one capture at a time.
vramp_status_t vramp_capture_begin(vramp_allocator_t allocator,
                                   vramp_stream_t stream,
                                   vramp_arena_t arena);

// Ends the capture that an arena serves, and makes its graph ready to launch. On failure the
// capture came to nothing and `*graph` is none. Unless the arena's mode is relaxed, call it on the
// thread that began.
//
// What the caller promises:
// `graph` is null or good for writing.
vramp_status_t vramp_capture_end(vramp_allocator_t allocator,
                                 vramp_arena_t arena,
                                 vramp_graph_t *graph);

// Lets an arena serve the capture that `stream` is part of, which the caller began and will end:
// requests and frees as of vramp_capture_begin. Nothing is known of the graph's replays, so the
// arena never lends from then on, and to keep replays of its graphs apart is the caller's.
vramp_status_t vramp_capture_attach(vramp_allocator_t allocator,
                                    vramp_stream_t stream,
                                    vramp_arena_t arena);

// Ends what vramp_capture_attach began, after the caller ended the capture. `*graph` names the hold
// on the memory of the caller's graph, or of none if that came to nothing: destroy it after the last
// launch. Until then memory that was freed within the capture stays taken, and memory of
// the arena that is freed later serves the arena's next capture only.
//
// What the caller promises:
// `graph` is null or good for writing.
vramp_status_t vramp_capture_detach(vramp_allocator_t allocator,
                                    vramp_arena_t arena,
                                    vramp_graph_t *graph);

// Queues a replay on `stream`, and brings back first what the arena lent. While a lease on the
// arena is held, and until the work that was queued on its stream up to its end is over, graphs of
// the arena are busy for other streams; with overlap=order such a replay comes behind that work.
//
// `lease` gets the lease: end it once what reads the graph's results is queued on `stream`. With
// null it ends behind the launch.
//
// What the caller promises:
// `lease` is null or good for writing.
vramp_status_t vramp_graph_launch(vramp_allocator_t allocator,
                                  vramp_graph_t graph,
                                  vramp_stream_t stream,
                                  vramp_lease_t *lease);

// Ends a lease: other streams wait for what is queued on its stream by now.
vramp_status_t vramp_lease_end(vramp_allocator_t allocator, vramp_lease_t lease);

// How much memory the capture of a graph needed. Set `report->struct_size` to
// `sizeof(vramp_capture_report_t)` before.
//
// What the caller promises:
// `report` is null, or its first eight bytes hold a size that is good for reading and writing.
vramp_status_t vramp_graph_report(vramp_allocator_t allocator,
                                  vramp_graph_t graph,
                                  vramp_capture_report_t *report);

// Destroys a graph, or the hold on the memory of the caller's own. Never waits: a launch in flight
// completes, and its memory comes back behind it; that of the caller's graph comes back behind all
// work that is queued by now on any stream that the allocator knows.
vramp_status_t vramp_graph_destroy(vramp_allocator_t allocator, vramp_graph_t graph);

// Memory for PyTorch's global route. On failure it throws a C++ `std::runtime_error`, whose text
// begins with "CUDA out of memory" if that is why; in a process without libstdc++ it prints the
// text and returns null.
//
// What the caller promises:
// `stream` is null or a stream of the device that lives as long as the process uses the device,
// and a C++ caller is ready to catch.
void *vramp_torch_malloc(ptrdiff_t size, int device, void *stream);

// Memory for PyTorch's MemPool route: null on failure, which PyTorch turns into
// `torch.OutOfMemoryError`. vramp_last_error has the text; what is not a lack of memory is printed.
//
// What the caller promises:
// `stream` is null or a stream of the device that lives as long as the process uses the device.
void *vramp_torch_pool_malloc(ptrdiff_t size, int device, void *stream);

// Takes memory of either route back. An address that is null, unknown or free already is printed
// and changes nothing. The size does not matter.
//
// What the caller promises:
// `stream` is null or a stream of the device that lives as long as the process uses the device.
void vramp_torch_free(void *address, size_t size, int device, void *stream);

// For `set_record_stream_fn`: work queued on `stream` so far uses the block.
//
// What the caller promises:
// `stream` is null or a stream of the device that lives as long as the process uses the device.
void vramp_torch_record_stream(void *address, void *stream);

// For `set_init_fn`. Devices open when they are first used, so there is nothing to do.
void vramp_torch_init(int device_count);

// For `set_reset_fn`, which `torch.cuda.empty_cache` calls: idle memory goes back to the cards.
void vramp_torch_reset(void);

// For `set_memory_fraction_fn`: the device's allocator may hold this part of the card, from now on.
void vramp_torch_memory_fraction(double fraction, int device);

// For `set_base_alloc_fn`: the start and size of the block that an address lies in. An unknown
// address is printed and comes back as it is, with size 0.
//
// What the caller promises:
// `size` is null or good for writing.
void *vramp_torch_base_alloc(void *address, size_t *size);

// For `set_begin_allocate_to_pool`, which PyTorch calls before it begins to capture a graph: what
// the capture asks for comes from an arena of the pool's. Where there can be none, requests within
// the capture fail with the reason. The filter is neither called nor kept.
void vramp_torch_begin_pool(int device,
                            uint64_t pool_first,
                            uint64_t pool_second,
                            const void *filter);

// For `set_end_allocate_to_pool_fn`, which PyTorch calls after a capture ended well.
void vramp_torch_end_pool(int device, uint64_t pool_first, uint64_t pool_second);

// For `set_release_pool`, which PyTorch calls for each graph of a pool before it destroys it. The
// pool's memory comes back with the last one, and with the last block of it that is still held,
// behind all work queued by then on streams that vramp knows.
void vramp_torch_release_pool(int device, uint64_t pool_first, uint64_t pool_second);

// The allocator that serves PyTorch's device, for vramp_stats, vramp_audit and vramp_trim. It is
// made if this is the device's first use, and cannot be closed.
//
// What the caller promises:
// `allocator` is null or good for writing.
vramp_status_t vramp_torch_allocator(int device, vramp_allocator_t *allocator);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VRAMP_H */
