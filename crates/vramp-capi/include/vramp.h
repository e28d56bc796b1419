/*
 * The C interface of vramp, a GPU memory manager. See docs/c-interface.md.
 *
 * For C89 and later, and C++. Written by `cargo xtask header`; never edited by hand.
 */

#ifndef VRAMP_H
#define VRAMP_H

#include <stddef.h>
#include <stdint.h>

/*
 * Version of this header. VRAMP_VERSION is major * 1000000 + minor * 1000 + patch.
 * vramp_check_version(VRAMP_VERSION) checks the library that was loaded.
 */
#define VRAMP_VERSION_MAJOR 0
#define VRAMP_VERSION_MINOR 1
#define VRAMP_VERSION_PATCH 0
#define VRAMP_VERSION 1000
#define VRAMP_VERSION_STRING "0.1.0"

/* Tier of a space: memory of a card. */
#define VRAMP_TIER_DEVICE 0

/* Tier of a space: pinned memory of the host. */
#define VRAMP_TIER_HOST 1

/* Tier of a space: files on a disk. */
#define VRAMP_TIER_DISK 2

/* Tier of contents: memory of another card. No space has it. */
#define VRAMP_TIER_PEER 3

/* Index of a space: any of its tier. */
#define VRAMP_ANY_INDEX UINT32_MAX

/* Time without end, for timeouts. */
#define VRAMP_FOREVER UINT64_MAX

/* Access of a lease: the work only reads. Several leases may hold the buffer. */
#define VRAMP_ACCESS_READ 0

/* Access of a lease: the work may read and write. */
#define VRAMP_ACCESS_WRITE 1

/*
 * Access of a lease: the work writes all of the buffer, alone, and reads nothing of it. What left the card
 * is not copied back: its bytes are any at first. When the lease ends all of it counts as written; if it is
 * cancelled the contents are as before. A buffer that a request also names with another access is restored.
 */
#define VRAMP_ACCESS_OVERWRITE 2

/* Hint: nothing is known of the next use. */
#define VRAMP_HINT_NONE 0

/* Hint: the buffer is needed soon. Others leave first. */
#define VRAMP_HINT_WILL_NEED 1

/* Hint: the buffer is not needed soon. It leaves before others. */
#define VRAMP_HINT_WONT_NEED 2

/* Backup of a region: its contents are copied to pinned memory of the host while it sleeps. */
#define VRAMP_BACKUP_HOST 0

/* Backup of a region: none. After a resume its contents are undefined. */
#define VRAMP_BACKUP_NONE 1

/*
 * Backup of a region: its contents go to a disk, through a few pinned blocks: that of the allocator's tiers,
 * or else that of vramp_region_set_disk.
 */
#define VRAMP_BACKUP_DISK 2

/* Longest tag of a region in bytes, without the final zero. */
#define VRAMP_TAG_MAX 127

/* Arrangement of tensors: one behind the other, each contiguous. What most kernels want. */
#define VRAMP_KV_SEPARATE 0

/* Arrangement of tensors: the same page of all of them side by side. A page of all tensors is one handle. */
#define VRAMP_KV_INTERLEAVED 1

/* Lock of kept memory: processes read it, and none writes. */
#define VRAMP_KEPT_READ 0

/* Lock of kept memory: this process writes it, and no other reads. */
#define VRAMP_KEPT_WRITE 1

/* No lock of kept memory: other processes may write it meanwhile. */
#define VRAMP_KEPT_UNLOCKED 2

/* Status of a call. Zero is success. vramp_last_error() has the message of a failure. */
typedef enum {
  /* Success. */
  VRAMP_OK = 0,
  /* A pointer that must not be null is null. */
  VRAMP_ERROR_NULL = 1,
  /* A string is not UTF-8. */
  VRAMP_ERROR_TEXT = 2,
  /* An option is unknown, or its value is invalid on this device. */
  VRAMP_ERROR_OPTION = 3,
  /* The device is unknown or cannot be opened. */
  VRAMP_ERROR_DEVICE = 4,
  /* The allocator was never opened, or is closed. */
  VRAMP_ERROR_UNKNOWN_ALLOCATOR = 5,
  /* The stream does not belong to this allocator, or was forgotten. */
  VRAMP_ERROR_UNKNOWN_STREAM = 6,
  /* The address is not the start of a live block of this allocator. */
  VRAMP_ERROR_UNKNOWN_POINTER = 7,
  /* Out of memory. The message says what is free and what to do. */
  VRAMP_ERROR_OUT_OF_MEMORY = 8,
  /* A driver call failed, for another reason than a capture. The message names it. */
  VRAMP_ERROR_DRIVER = 9,
  /* The maximum number of allocators is open. */
  VRAMP_ERROR_TOO_MANY = 10,
  /* `struct_size` is too small. */
  VRAMP_ERROR_STRUCT_SIZE = 11,
  /* The allocator serves PyTorch and cannot be closed. */
  VRAMP_ERROR_IN_USE = 12,
  /* A number is out of range. */
  VRAMP_ERROR_RANGE = 13,
  /* The allocator's state is inconsistent. A defect of vramp. */
  VRAMP_ERROR_INCONSISTENT = 14,
  /* vramp panicked. A defect of vramp. */
  VRAMP_ERROR_INTERNAL = 15,
  /* A file cannot be written. */
  VRAMP_ERROR_FILE = 16,
  /* The arena does not belong to this allocator, or is destroyed. */
  VRAMP_ERROR_UNKNOWN_ARENA = 17,
  /* The graph does not belong to this allocator, or is destroyed. */
  VRAMP_ERROR_UNKNOWN_GRAPH = 18,
  /* The lease does not belong to this allocator, or has ended. */
  VRAMP_ERROR_UNKNOWN_LEASE = 19,
  /* The arena or the allocator is in use. The message says by what. */
  VRAMP_ERROR_BUSY = 20,
  /* A capture cannot begin, failed, or forbids the call. */
  VRAMP_ERROR_CAPTURE = 21,
  /* The preset or the device does not support the call. */
  VRAMP_ERROR_UNSUPPORTED = 22,
  /* The process was forked from one that opened an allocator. */
  VRAMP_ERROR_FORKED = 23,
  /* The program was compiled with a header that the library does not serve. */
  VRAMP_ERROR_VERSION = 24,
  /* The export does not belong to this allocator, or is closed. */
  VRAMP_ERROR_UNKNOWN_EXPORT = 25,
  /* The pin does not belong to this allocator, or has ended. */
  VRAMP_ERROR_UNKNOWN_PIN = 26,
  /* The bytes are no ticket, or one of another version of vramp, or the secret in it is wrong. */
  VRAMP_ERROR_TICKET = 27,
  /* The exporting process ended, or closed the export. */
  VRAMP_ERROR_EXPORT_ENDED = 28,
  /*
   * Two processes cannot exchange memory: another user, no answer, no path between them, or a limit
   * of the system. The message names the cause.
   */
  VRAMP_ERROR_EXCHANGE = 29,
  /* The allocator has no tiers. */
  VRAMP_ERROR_NO_TIERS = 30,
  /* The space is not in the configuration of the tiers. */
  VRAMP_ERROR_UNKNOWN_SPACE = 31,
  /* The reservation does not belong to this allocator, or is released. */
  VRAMP_ERROR_UNKNOWN_RESERVATION = 32,
  /* The buffer does not belong to this allocator, or is destroyed. */
  VRAMP_ERROR_UNKNOWN_BUFFER = 33,
  /* The time is over, and other leases, work or reservations are still in the way. */
  VRAMP_ERROR_TIMEOUT = 34,
  /* The wait ended because the tiers are being closed. */
  VRAMP_ERROR_CANCELLED = 35,
  /* The wait would never end: reservations wait for each other. */
  VRAMP_ERROR_DEADLOCK = 36,
  /* The contents of a buffer cannot be read back. The message names where they were. */
  VRAMP_ERROR_CONTENTS = 37,
  /* A region of memory cannot be paused, resumed or used now, or has no such tag. The message says why. */
  VRAMP_ERROR_REGION = 38,
  /* The reservation that is to pay for an allocation has too few bytes left. */
  VRAMP_ERROR_OVER_RESERVATION = 39,
  /* A callback around the sleep of regions failed. The message names it. */
  VRAMP_ERROR_CALLBACK = 40,
  /* The keeper has no memory of the name. */
  VRAMP_ERROR_NOT_KEPT = 41,
  /* Another process has the lock of kept memory until the deadline. The message names it. */
  VRAMP_ERROR_KEPT_BUSY = 42,
  /* A process ended while it wrote kept memory: its contents are of no epoch. */
  VRAMP_ERROR_TORN = 43,
  /* There is no keeper, or it refuses or does not answer. The message says why. */
  VRAMP_ERROR_KEEPER = 44,
  /* The keeper or the kept memory is unknown, or was closed. */
  VRAMP_ERROR_UNKNOWN_KEPT = 45
} vramp_status_t;

/* Kind of an event. */
typedef enum {
  /*
   * A block was allocated: `address`, `size`, `requested`, `stream`. Any thread may free it
   * already.
   */
  VRAMP_EVENT_ALLOCATED = 0,
  /*
   * A block is freed: `address`, `size`, `requested`, `stream`. Its memory is not allocated again
   * before all observers have returned.
   */
  VRAMP_EVENT_FREED = 1,
  /* Physical memory was allocated from the device: `size`. */
  VRAMP_EVENT_GROWN = 2,
  /* Physical memory was released to the device: `size`. */
  VRAMP_EVENT_SHRUNK = 3,
  /* Free memory was remapped to a contiguous range: `size`. */
  VRAMP_EVENT_REMAPPED = 4,
  /* A request was short of memory and is retried: `requested`. */
  VRAMP_EVENT_SHORT = 5,
  /* A request failed: `requested`. */
  VRAMP_EVENT_OUT_OF_MEMORY = 6
} vramp_event_kind_t;

/* How memory can be exported to other processes. */
typedef enum {
  /* It cannot. */
  VRAMP_HANDLE_NONE = 0,
  /* As file descriptors, to processes on the same machine. */
  VRAMP_HANDLE_POSIX_FD = 1,
  /* As fabric handles. */
  VRAMP_HANDLE_FABRIC = 2
} vramp_handle_type_t;

/* Where the contents of a buffer are. */
typedef enum {
  /* It has none: nothing was written. */
  VRAMP_BUFFER_EMPTY = 0,
  /* All on the card. */
  VRAMP_BUFFER_RESIDENT = 1,
  /* Some or all below the card. A lease restores them. */
  VRAMP_BUFFER_DEFERRED = 2
} vramp_buffer_state_t;

/* What happened to a buffer. */
typedef enum {
  /* It was made. */
  VRAMP_BUFFER_CREATED = 0,
  /* `bytes` of its contents left the card for the tier `to`. */
  VRAMP_BUFFER_WAS_DEFERRED = 1,
  /* `bytes` of its contents came back from the tier `from`, for work queued from now on. */
  VRAMP_BUFFER_RETRIEVED = 2,
  /* `bytes` of its contents moved from the tier `from` to the tier `to`, both below the card. */
  VRAMP_BUFFER_MOVED = 3,
  /* A lease holds it: it stays on the card. */
  VRAMP_BUFFER_LOCKED = 4,
  /* A lease on it ended. Work that it queued may still run. */
  VRAMP_BUFFER_UNLOCKED = 5,
  /* Its contents were discarded. */
  VRAMP_BUFFER_DISCARDED = 6,
  /* It was destroyed, and its work is complete. The last event of the buffer. */
  VRAMP_BUFFER_FREED = 7,
  /*
   * The observer fell behind, and `bytes` is the number of events that were dropped. `buffer` is zero:
   * ask vramp_buffer_info for the states.
   */
  VRAMP_BUFFER_EVENTS_LOST = 8,
  /* Another change. */
  VRAMP_BUFFER_OTHER_CHANGE = 9
} vramp_buffer_change_t;

/* What a region does. */
typedef enum {
  /* It serves requests. */
  VRAMP_REGION_AWAKE = 0,
  /* It is being paused, or copied ahead. */
  VRAMP_REGION_PAUSING = 1,
  /* Some or all of its memory is off the card. */
  VRAMP_REGION_ASLEEP = 2,
  /* It is being resumed. */
  VRAMP_REGION_RESUMING = 3
} vramp_region_phase_t;

/* What a handle of kept memory stands for. */
typedef enum {
  /* Memory that is being made. No other process sees it. */
  VRAMP_KEPT_DRAFT = 0,
  /* Memory of a name. */
  VRAMP_KEPT_OPEN = 1,
  /* A commit failed: the memory is this process's own until it is closed. */
  VRAMP_KEPT_PRIVATE = 2
} vramp_kept_phase_t;

/* Handle of an allocator. An id that is looked up: any value may be passed. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_allocator_t;

/* Handle of a stream of an allocator. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_stream_t;

/* Statistics of an allocator. Amounts are in bytes. Later versions add fields at the end. */
typedef struct {
  /*
   * Set by the caller to `sizeof(vramp_stats_t)`: at most that many bytes are written. On
   * return, the number of bytes written.
   */
  uint64_t struct_size;
  /* Requested bytes of live blocks. */
  uint64_t live;
  /* Peak of `live`. */
  uint64_t live_peak;
  /* Physical memory that the allocator has reserved. */
  uint64_t reserved;
  /* Peak of `reserved`. */
  uint64_t reserved_peak;
  /* Number of blocks allocated. */
  uint64_t placed;
  /* Number of blocks freed. */
  uint64_t freed;
  /* Cache hits: allocations without driver calls for memory. */
  uint64_t hits;
  /* Cache misses. */
  uint64_t misses;
  /* Number of chunks (physical handles) created. */
  uint64_t chunks_created;
  /* Number of chunks mapped at a new address. */
  uint64_t chunks_moved;
  /* Number of chunks moved to an address where they were still mapped. */
  uint64_t chunks_reactivated;
  /* Number of chunks released to the device. */
  uint64_t chunks_released;
  /* Bytes of the chunks moved or reactivated. */
  uint64_t moved;
  /* Number of plans that failed and were undone. */
  uint64_t plans_undone;
  /* Free memory of the device. */
  uint64_t card_free;
  /* Total memory of the device. */
  uint64_t card_total;
  /* Number of callbacks that panicked. Zero for callbacks in C. */
  uint64_t callback_panics;
  /* Bytes of the chunks released to the device. */
  uint64_t released;
  /* Most bytes that may be reserved; zero if the memory of the device is the limit. */
  uint64_t limit;
  /*
   * Number of entries that requests looked at beside index searches: how the cost of requests
   * grows with the pool.
   */
  uint64_t looked_at;
  /*
   * Physical memory, part of `reserved`, that a failed driver call left unusable until a trim releases
   * it.
   */
  uint64_t quarantined;
  /* Addresses that a failed driver call left unusable until a trim unmaps them. */
  uint64_t quarantined_addresses;
  /* Pinned memory of the host: of the regions, and of the open tiers. */
  uint64_t host_pinned;
  /* What copies take of it. The rest is idle, and goes back after some seconds or with vramp_trim. */
  uint64_t host_used;
} vramp_stats_t;

/* An event. Fields that its kind does not list are zero. Later versions add fields at the end. */
typedef struct {
  /* Kind of the event. */
  vramp_event_kind_t kind;
  /* Address of the block. */
  uint64_t address;
  /* Size in bytes. */
  uint64_t size;
  /* Requested bytes. */
  uint64_t requested;
  /* Stream that the block is allocated for, or freed on. */
  vramp_stream_t stream;
} vramp_event_t;

/*
 * Called for every event, on the thread that caused it. No lock is held, so it may call vramp:
 * events of such calls on the same allocator reach no observer. vramp_close of the allocator
 * returns VRAMP_ERROR_BUSY in it. It must not unwind: no C++ exception may leave it.
 */
typedef void (*vramp_observer_t)(const vramp_event_t *event, void *user);

/* The device of an allocator. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_device_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Total memory in bytes. */
  uint64_t memory;
  /* Granularity of physical memory in bytes. */
  uint64_t granularity;
  /* Number of the device as CUDA counts it in this process; -1 for a simulated device. */
  int32_t ordinal;
  /*
   * 1 if the device is simulated: nothing can run on it, and its addresses must not be dereferenced
   * unless vramp_map_simulated_cards was called before it was opened. Otherwise 0.
   */
  int32_t simulated;
  /*
   * Name of the card, such as "NVIDIA H200". This text and the following ones end with a zero,
   * are cut to their arrays, and are empty where the device has none.
   */
  char name[96];
  /* Name that vramp_open accepts, such as "cuda:0" or "sim:h200". */
  char id[96];
  /* UUID of the card, such as "GPU-8932f937-...". */
  char uuid[48];
  /* PCI address of the card, such as "0000:3b:00.0". */
  char pci[16];
} vramp_device_t;

/*
 * Called for each statistic of vramp_memory_stats. `name` is valid until it returns. It must not
 * unwind: no C++ exception may leave it.
 */
typedef void (*vramp_stat_visitor_t)(const char *name, uint64_t value, void *user);

/* Why a request finds no memory, in bytes. Later versions add fields at the end. */
typedef struct {
  /* Requested bytes. */
  uint64_t requested;
  /* Physical memory that the allocator has reserved. */
  uint64_t reserved;
  /* Bytes of live blocks, rounding included. */
  uint64_t used;
  /* Free memory of the allocator, whether this request can use it or not. */
  uint64_t free;
  /* Largest block that remapping all free memory could make. */
  uint64_t largest;
  /* Freed memory that work of other streams still uses. */
  uint64_t waiting;
  /* Limit that the request would exceed; zero if it exceeds none. */
  uint64_t limit;
  /* Stream of the request; zero for memory behind addresses that exist already. */
  vramp_stream_t stream;
} vramp_shortage_t;

/*
 * Called before a request fails for want of memory, on the thread of the request. No lock is held.
 * It may free blocks and call vramp. It returns nonzero if it freed something: then the request is
 * tried again. Requests made in it call no handler and do not wait. vramp_close of the allocator
 * returns VRAMP_ERROR_BUSY in it. It must not unwind: no C++ exception may leave it.
 */
typedef int (*vramp_shortage_handler_t)(const vramp_shortage_t *shortage, void *user);

/* Handle of an arena: memory for captured graphs. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_arena_t;

/* Memory of an arena, in bytes. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_arena_report_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Size of the address range. */
  uint64_t capacity;
  /* High-water mark: the highest end of a block so far. */
  uint64_t high_water;
  /* Requested bytes of live blocks. */
  uint64_t live;
  /* Number of live blocks. */
  uint64_t blocks;
  /* Physical memory that the arena owns. */
  uint64_t backed;
  /* Physical memory of the arena that is lent to other allocations while the arena is idle. */
  uint64_t lent;
} vramp_arena_report_t;

/* Handle of a captured graph, or of a hold on the memory of a graph. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_graph_t;

/* Handle of a lease: the right of one stream to use an arena. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_lease_t;

/* Memory that a capture needed, in bytes. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_capture_report_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Number of blocks allocated in the capture. */
  uint64_t blocks;
  /* Number of blocks that outlive the capture. */
  uint64_t escaped;
  /* Bytes without any reuse of freed blocks. */
  uint64_t monotone;
  /* Bytes that the capture took. */
  uint64_t taken;
  /* Bytes that the next capture of the same shape takes; zero if no layout was planned. */
  uint64_t planned;
  /* Peak of the live bytes. No layout needs less. */
  uint64_t lower_bound;
  /* Memory from before the capture that was freed in it and is kept for the graph. */
  uint64_t kept;
} vramp_capture_report_t;

/* Handle of an export: a block that other processes may open. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_export_t;

/*
 * Lets another process of the user open an export. May be copied, stored and sent in any way, whole or
 * its first `length` bytes of `bytes`. It has a secret: a process of the user that reads it can open the
 * export.
 */
typedef struct {
  /* Number of bytes in use: 160 at most. */
  uint32_t length;
  /* The bytes. Those beyond `length` are zero. */
  uint8_t bytes[252];
} vramp_ticket_t;

/* Handle of a pin: memory that stays at its addresses. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_pin_t;

/* What an allocator shares. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_sharing_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* How memory can be exported. */
  vramp_handle_type_t handle_type;
  /* 1 if network cards can access the memory. Otherwise 0. */
  int32_t rdma;
  /* The cards that have access: bit N is device N. */
  uint64_t peers;
  /*
   * Number of blocks that are exported, those of closed exports that importers still have open
   * included.
   */
  uint64_t exported;
  /* Number of physical handles that are pinned, exported ones included. */
  uint64_t pinned;
  /* Bytes of the pinned handles. */
  uint64_t pinned_bytes;
  /* Number of imports of this allocator. */
  uint64_t imports;
  /*
   * Why less is possible than the options said. Ends with a zero, is cut to the array, and is empty
   * where all is as the options said.
   */
  char fallback[160];
} vramp_sharing_t;

/*
 * A store of the caller's own in place of files, for contents that the host has no room for: another
 * process, a file format, a network. Set the struct to zero before. It is copied. Later versions add
 * fields at the end.
 *
 * Each object is written once under a key of its own, read any number of times, and removed once. The
 * functions are called with `user`, at the same time for different keys: `write` and `read` on threads of
 * vramp, `remove` on the thread that drops a copy, perhaps in the middle of its vramp_malloc. No lock is
 * held, and they may block: what moves waits for them. They return VRAMP_OK, VRAMP_ERROR_OUT_OF_MEMORY if
 * there is no room, or any other number if they failed. They must not unwind: no C++ exception may leave
 * them.
 *
 * In these functions each call that takes an allocator returns VRAMP_ERROR_BUSY and does nothing, for any
 * allocator: it could wait for its own end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_store_t)`. */
  uint64_t struct_size;
  /* Most bytes in the store. Not zero. */
  uint64_t capacity;
  /* Passed to the functions. */
  void *user;
  /*
   * Stores `size` bytes under a key that was not used before. If it fails they stay where they were, and
   * `remove` is called for the key.
   */
  int32_t (*write)(void *user, uint64_t key, const void *bytes, size_t size);
  /*
   * Fills `bytes` with the object, which has `size` bytes. If it fails the object stays, and may be read
   * again. Other bytes than were written are found by a checksum.
   */
  int32_t (*read)(void *user, uint64_t key, void *bytes, size_t size);
  /* Removes an object, also one whose `write` failed. If it fails it is not called again for the key. */
  int32_t (*remove)(void *user, uint64_t key);
  /*
   * Called once, after the last call of the other functions: the tiers were closed, and every call that
   * used them has returned. On any thread, with no lock held. Null for none.
   */
  void (*release)(void *user);
  /* Most calls of `write` and `read` at the same time, up to 64. Zero means 4. */
  uint64_t threads;
} vramp_store_t;

/*
 * Sizes of the tiers below an allocator, for vramp_tiers_open_with. Set the struct to zero before.
 * Later versions add fields at the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_tiers_options_t)`. */
  uint64_t struct_size;
  /*
   * Budget of the card for reservations and buffers. Zero means the allocator's limit, or the
   * memory of the device.
   */
  uint64_t device_bytes;
  /* Pinned memory of the host for spilled contents. At least 1 MiB. */
  uint64_t host_bytes;
  /* Directory for contents that the host has no room for. Null or empty for none. A path in UTF-8. */
  const char *disk_directory;
  /* Most bytes in the directory. Not zero if there is a directory. */
  uint64_t disk_bytes;
  /*
   * A store of the caller in place of the directory: the space VRAMP_TIER_DISK with index 0. Null for
   * none.
   */
  const vramp_store_t *store;
  /*
   * Most bytes of free memory that are taken of each other card that this one has peer access to, for
   * contents of buffers. 1 GiB there stays free. Zero takes none.
   */
  uint64_t peer_bytes;
} vramp_tiers_options_t;

/* A budget: a card, the pinned memory of a NUMA node, or a directory on a disk. */
typedef struct {
  /* VRAMP_TIER_DEVICE, VRAMP_TIER_HOST or VRAMP_TIER_DISK. */
  uint32_t tier;
  /* Index in the tier, from the configuration. */
  uint32_t index;
} vramp_space_t;

/* Statistics of a space, in bytes where not said otherwise. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_space_stats_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Upper bound of all charges. */
  uint64_t capacity;
  /* Upper bound of reservations. */
  uint64_t limit;
  /* From this total up, data should be spilled. */
  uint64_t trigger;
  /* From this total down, spilling should stop. */
  uint64_t stop;
  /* Unit of all amounts: requests are rounded up to it. */
  uint64_t granule;
  /* All charges: `reserved + overrun + orphaned + unreserved`. */
  uint64_t total;
  /* Peak of `total`. */
  uint64_t peak;
  /* Free below the limit. */
  uint64_t available;
  /* Free below the capacity. */
  uint64_t available_capacity;
  /* Sum of the sizes of active reservations. */
  uint64_t reserved;
  /* What active reservations use beyond their sizes. */
  uint64_t overrun;
  /* What is still allocated from released reservations. */
  uint64_t orphaned;
  /* What is charged without a reservation. */
  uint64_t unreserved;
  /* Number of active reservations. */
  uint64_t reservations;
  /* Number of requests that wait, in all spaces. */
  uint64_t waiting;
  /* Number of reservations made so far. */
  uint64_t reserves;
  /* Number of requests refused so far. */
  uint64_t refusals;
  /* Number of reservations released so far. */
  uint64_t releases;
} vramp_space_stats_t;

/* Handle of a reservation: memory of a space that is kept free for its owner. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_reservation_t;

/* State of a reservation, in bytes. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_reservation_info_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Space of the reservation. */
  vramp_space_t space;
  /* Size: the requested bytes, in whole granules of the space. */
  uint64_t size;
  /* Bytes charged to it. */
  uint64_t used;
  /* What can still be charged to it. */
  uint64_t unused;
  /* Peak of `used`. */
  uint64_t peak;
} vramp_reservation_info_t;

/*
 * Handle of a deferrable buffer: its contents may leave the card while no lease holds it. Zero is
 * none.
 */
typedef struct {
  /* Opaque. May be compared, and hashed: it is never reused. */
  uint64_t id;
} vramp_buffer_t;

/* State of a buffer. Without a lease it may change at once. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_buffer_info_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Its address, which never changes. There is memory behind it only under a lease. */
  void *address;
  /* Its length in bytes. */
  uint64_t size;
  /* Where its contents are. */
  vramp_buffer_state_t state;
  /* Number of leases on it. While there are some it is locked: it stays where it is. */
  uint32_t leases;
  /* Bytes of contents on the card. */
  uint64_t device_bytes;
  /* Bytes of contents with a valid copy on the host. */
  uint64_t host_bytes;
  /* Bytes of contents with a valid copy on the disk. */
  uint64_t disk_bytes;
  /* Bytes of contents with a valid copy on another card. */
  uint64_t peer_bytes;
  /* Bytes that move now, in any direction. */
  uint64_t moving_bytes;
  /* Stream of the last lease, which may be forgotten. Zero before the first. */
  vramp_stream_t last_stream;
} vramp_buffer_info_t;

/*
 * Called with `user` when memory that vramp_buffer_adopt took is not needed any more. It must not
 * unwind: no C++ exception may leave it.
 */
typedef void (*vramp_release_t)(void *user);

/* A buffer of a lease, and what the work does with it. */
typedef struct {
  /* The buffer. */
  vramp_buffer_t buffer;
  /* VRAMP_ACCESS_READ, VRAMP_ACCESS_WRITE or VRAMP_ACCESS_OVERWRITE. */
  uint32_t access;
} vramp_buffer_use_t;

/* Handle of a lease on buffers: while it is held they stay on the card. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_buffer_lease_t;

/*
 * A change of a buffer. Fields that its kind does not list are zero. Later versions add fields at the
 * end.
 */
typedef struct {
  /* What happened. */
  vramp_buffer_change_t change;
  /* Tier that contents left. */
  uint32_t from;
  /* Tier that they went to. */
  uint32_t to;
  /* Number of leases on the buffer after the change. */
  uint32_t leases;
  /* The buffer. It may be destroyed already. */
  vramp_buffer_t buffer;
  /* Bytes of contents. A long buffer moves in pieces, with an event for each. */
  uint64_t bytes;
  /* Length of the buffer. */
  uint64_t size;
  /* Bytes of its contents below the card after the change. */
  uint64_t deferred_bytes;
  /* Time, in nanoseconds of the device's clock. */
  uint64_t at_ns;
} vramp_buffer_event_t;

/*
 * Called for every change of a buffer, on a thread of vramp. No lock is held, so it may call vramp; but
 * vramp_close and vramp_tiers_close return VRAMP_ERROR_BUSY in it, for any allocator. It must not unwind:
 * no C++ exception may leave it.
 */
typedef void (*vramp_buffer_observer_t)(const vramp_buffer_event_t *event, void *user);

/* Statistics of buffers. Amounts are in bytes. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_tiers_stats_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Number of buffers. */
  uint64_t buffers;
  /* Number of leases. */
  uint64_t leases;
  /* Number of lease requests that wait. */
  uint64_t waiting;
  /* Length of all buffers. */
  uint64_t total;
  /* Without contents. */
  uint64_t empty;
  /* On the card. */
  uint64_t resident;
  /* Below the card only. */
  uint64_t deferred;
  /* Valid copies on the host. */
  uint64_t host_copies;
  /* Valid copies on the disk. */
  uint64_t disk_copies;
  /* Valid copies on other cards. */
  uint64_t peer_copies;
  /* In leased buffers. */
  uint64_t leased;
  /* Copied to the host so far. */
  uint64_t to_host;
  /* Written to the disk so far. */
  uint64_t to_disk;
  /* Copied to other cards so far. */
  uint64_t to_peer;
  /* Restored from the host so far. */
  uint64_t from_host;
  /* Restored from the disk so far. */
  uint64_t from_disk;
  /* Restored from other cards so far. */
  uint64_t from_peer;
  /* Number of evictions requested so far. */
  uint64_t evictions;
  /* What they freed. */
  uint64_t evicted;
  /* Number of lease requests that waited so far. */
  uint64_t waits;
  /* Nanoseconds that they waited. */
  uint64_t waited_ns;
  /* Number of moves that failed so far. vramp_tiers_failures has the last ones. */
  uint64_t failures;
  /* Pinned memory of the host. */
  uint64_t host_pinned;
  /* What copies take of it. The rest is idle, and goes back after some seconds or with vramp_trim. */
  uint64_t host_used;
  /* Number of buffers read in place so far. */
  uint64_t reads_in_place;
  /* Number of buffers restored so far because they were read in place often. */
  uint64_t promotions;
} vramp_tiers_stats_t;

/*
 * Called with a text, which is valid until it returns. It must not unwind: no C++ exception may leave
 * it.
 */
typedef void (*vramp_text_visitor_t)(const char *text, void *user);

/*
 * Options of a region, for vramp_region_begin. Set the struct to zero before. Later versions add fields at
 * the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_region_options_t)`. */
  uint64_t struct_size;
  /*
   * Where contents go while the region sleeps: VRAMP_BACKUP_HOST, VRAMP_BACKUP_NONE or
   * VRAMP_BACKUP_DISK.
   */
  uint32_t backup;
  /*
   * Not zero if the program writes each block once, before the first pause after its allocation. Then
   * later pauses copy nothing until something is allocated or freed in the region.
   */
  int32_t read_only;
} vramp_region_options_t;

/* Handle of a scope: the calling thread allocates in a region, or outside of regions. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_region_scope_t;

/*
 * Options of a pause, for vramp_region_pause. Set the struct to zero before. Later versions add fields at
 * the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_pause_options_t)`. */
  uint64_t struct_size;
  /* Bytes of each region that stay on the card, at most. */
  uint64_t keep;
  /*
   * Not zero to give contents up instead of copying them. After the resume all contents of the regions
   * are undefined, also those of memory that stayed on the card.
   */
  int32_t discard;
} vramp_pause_options_t;

/* State of a region at one moment. Amounts are in bytes. Later versions add fields at the end. */
typedef struct {
  /*
   * In the first struct of an array, set by the caller to `sizeof(vramp_region_status_t)`: the distance
   * from one to the next. On return the same number is in all of them.
   */
  uint64_t struct_size;
  /* What it does. */
  vramp_region_phase_t phase;
  /* Its backup: VRAMP_BACKUP_HOST, VRAMP_BACKUP_NONE or VRAMP_BACKUP_DISK. */
  uint32_t backup;
  /* 1 if it is read-only. Otherwise 0. */
  int32_t read_only;
  /* Bytes of the tag, which may be longer than `tag` if Python made the region. */
  uint32_t tag_length;
  /* Memory of the card. */
  uint64_t on_card;
  /* Memory that is the region's but not on the card. */
  uint64_t asleep;
  /* Pinned memory of the host that keeps its contents. */
  uint64_t on_host;
  /* What is charged to the disk for its contents. */
  uint64_t on_disk;
  /* What the move in progress, or the last one, has copied. */
  uint64_t copied;
  /* What that has to copy. */
  uint64_t to_copy;
  /* The tag. Ends with a zero, and is cut to the array. */
  char tag[128];
} vramp_region_status_t;

/*
 * Called around the sleep of regions. It returns zero, or another number if it failed. No lock is held. It may
 * allocate, free, export and pin; calls that move or read a region return VRAMP_ERROR_BUSY in it, and vramp_close of the
 * allocator too. Moves of regions that it covers wait for it. It must not unwind: no C++ exception may leave it.
 */
typedef int (*vramp_sleep_callback_t)(void *user);

/*
 * A pair of callbacks around the sleep of regions, for vramp_region_around_sleep. Set the struct to zero before. Later
 * versions add fields at the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_sleep_callbacks_t)`. */
  uint64_t struct_size;
  /* A name for error messages, not null. */
  const char *name;
  /* Called before memory leaves the card. Null calls nothing. */
  vramp_sleep_callback_t before;
  /* Called after memory is back. Null calls nothing. */
  vramp_sleep_callback_t after;
  /* Passed to both. */
  void *user;
  /*
   * Not zero if the callbacks wait for other processes, which pause and resume too: regions that the pair covers are
   * not paused under pressure then, which other processes need not have.
   */
  int32_t is_collective;
} vramp_sleep_callbacks_t;

/*
 * Layout and settings of an arena for caches, for vramp_kv_create. Set the struct to zero before. Amounts are
 * in bytes, and zero is the default. Later versions add fields at the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_kv_options_t)`. */
  uint64_t struct_size;
  /* Number of tensors, which get memory together: keys and values of all layers. */
  uint32_t tensors;
  /* Where they lie: VRAMP_KV_SEPARATE or VRAMP_KV_INTERLEAVED. */
  uint32_t arrangement;
  /* Length of each tensor, rounded up to whole pages. */
  uint64_t bytes_each;
  /* Page of a tensor: a multiple of the device's. 2 MiB. */
  uint64_t page;
  /*
   * Longest handle: neighbours that are committed at once share one, and it goes back once none of them is
   * in use. A page.
   */
  uint64_t superpage;
  /* Most memory of the arena, parked pages included. None. */
  uint64_t limit;
  /* Most memory that a thread of the arena makes ready before it is needed. None, and no thread. */
  uint64_t ahead;
} vramp_kv_options_t;

/* Handle of an arena for caches. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_kv_t;

/* Consecutive pages of an arena for caches, the same ones of all its tensors. */
typedef struct {
  /* The first page. They are counted from zero. */
  uint32_t first;
  /* The page behind the last. */
  uint32_t end;
} vramp_kv_pages_t;

/* What an arena for caches has. Pages count once for all tensors. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_kv_stats_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Pages of each tensor. */
  uint32_t pages;
  /* Pages in use. */
  uint32_t committed;
  /* Pages that are mapped and not in use. */
  uint32_t parked;
  /* Pages that threads are giving memory to. */
  uint32_t moving;
  /* Bytes of one page in all tensors. */
  uint64_t page_bytes;
  /* Limit in bytes; zero without one. */
  uint64_t limit;
} vramp_kv_stats_t;

/*
 * How an allocator shares a card with other processes, for vramp_budget_join. Set the struct to zero before.
 * Amounts are in bytes. Later versions add fields at the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_budget_options_t)`. */
  uint64_t struct_size;
  /* A directory that only the user may use. It is made if it is missing, and its parent is there. */
  const char *directory;
  /* The card, by its UUID: the same text in all processes. */
  const char *card;
  /* Name of the group of processes. */
  const char *group;
  /* Name of this program in messages, of which 64 bytes are used. Null is none. */
  const char *program;
  /*
   * What the group shares: the card's memory, less what contexts and other programs need. The same in all
   * processes.
   */
  uint64_t capacity;
  /* What this process can always claim. */
  uint64_t guaranteed;
  /* What it may claim at most; zero for all of the capacity. */
  uint64_t limit;
  /* What is claimed beyond a request where it is free; zero for 64 MiB. */
  uint64_t ahead;
  /* Milliseconds to wait for others to give back, here and in each request that claims. */
  uint64_t patience_ms;
  /* From 0 to 255: the larger is served first, and gives back last. */
  uint32_t priority;
  /* Zero. */
  uint32_t reserved;
} vramp_budget_options_t;

/* What a process can have of a card that it shares, in bytes. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_budget_room_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* What it has claimed. */
  uint64_t claimed;
  /* What it can claim now. */
  uint64_t available;
  /* What it can claim once the others have given back what is idle. */
  uint64_t obtainable;
  /* What it can claim if the others give back all that they are not guaranteed. */
  uint64_t most;
} vramp_budget_room_t;

/*
 * Called when another process lacks so many bytes and nothing is idle, on the thread of the budget. No lock is
 * held. It may free blocks and call vramp, but for vramp_close. It must not unwind: no C++ exception may leave it.
 */
typedef void (*vramp_reclaim_handler_t)(uint64_t bytes, void *user);

/*
 * Called when `vramp ctl` or another program pauses (`resume` is 0) or resumes (1) the memory of this process, on
 * the thread of the budget. Returns 1 if that is done, 0 if it is not. No lock is held. It may call vramp, but for
 * vramp_close. It must not unwind: no C++ exception may leave it.
 */
typedef int (*vramp_sleep_handler_t)(int resume, void *user);

/* Handle of a keeper. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_keeper_t;

/* A name of a keeper. Later versions add fields at the end. */
typedef struct {
  /*
   * In the first struct of an array, set by the caller to `sizeof(vramp_kept_entry_t)`: the distance from one to
   * the next. On return the same number is in all of them.
   */
  uint64_t struct_size;
  /* Bytes on the card; zero if the name has no memory yet. */
  uint64_t bytes;
  /* Number of the last commit; zero if the name has no memory yet. */
  uint64_t epoch;
  /* How often it is open. */
  uint64_t holders;
  /* Calls that wait for its lock, or to make a draft of the name. */
  uint64_t waiting;
  /* Earlier memory of the name that processes have open. */
  uint64_t superseded;
  /* Nanoseconds that no process has had it open; zero while one has. */
  uint64_t idle_ns;
  /* Where the keeper needs room, memory without holders goes by this, the lowest first. */
  int32_t priority;
  /* 1 if a process ended while it wrote. Otherwise 0. */
  int32_t torn;
  /* Process with the lock for writing; zero for none. */
  uint32_t writer;
  /* Process that makes a draft of the name; zero for none. */
  uint32_t drafter;
  /* Its card. Ends with a zero, and is cut to the array. */
  char device[96];
  /* The name. Ends with a zero. */
  char name[208];
} vramp_kept_entry_t;

/*
 * What kept memory is made as, for vramp_kept_draft. Set the struct to zero before. Later versions add fields at
 * the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_kept_options_t)`. */
  uint64_t struct_size;
  /* Most bytes that will be placed in it, with 511 more for each place. Not zero. */
  uint64_t bytes;
  /* Bytes of one physical handle, rounded up to whole pages. Zero for 1 GiB. */
  uint64_t part;
  /* Nanoseconds that the keeper keeps it when no process has it open. Zero for ever. */
  uint64_t kept_for_ns;
  /* Where the keeper needs room, memory without holders goes by this, the lowest first. */
  int32_t priority;
  /* Zero. */
  uint32_t reserved;
} vramp_kept_options_t;

/* Handle of kept memory: a draft, or memory that is open. Zero is none. */
typedef struct {
  /* Opaque. May be compared. */
  uint64_t id;
} vramp_kept_t;

/*
 * How kept memory is opened, for vramp_kept_open. Zero is the default of each field. Later versions add fields at
 * the end.
 */
typedef struct {
  /* Set by the caller to `sizeof(vramp_kept_open_options_t)`. */
  uint64_t struct_size;
  /* Lock that it is opened with: VRAMP_KEPT_READ, VRAMP_KEPT_WRITE or VRAMP_KEPT_UNLOCKED. */
  uint32_t lock;
  /* 1 if work of the card writes it. Otherwise a write ends the context. */
  int32_t writable;
  /* 1 if it may lie anywhere. Otherwise it has the addresses that its publisher had, where they are free here. */
  int32_t any_addresses;
  /* Zero. */
  uint32_t reserved;
} vramp_kept_open_options_t;

/* The state of kept memory. Later versions add fields at the end. */
typedef struct {
  /* Set by the caller to `sizeof(vramp_kept_state_t)`, as in vramp_stats_t. */
  uint64_t struct_size;
  /* Address of the first byte in this process. It does not change. */
  void *address;
  /* Bytes in use. */
  uint64_t bytes;
  /* Number of the last commit. Of a draft, that of the name's memory when the draft began; zero for a new name. */
  uint64_t epoch;
  /* Bytes of the layout. */
  uint64_t layout_bytes;
  /* The publisher's digest. Of a draft, that of the name's memory when the draft began. */
  uint8_t digest[32];
  /* Whether it is a draft, memory of a name, or private to this process. */
  vramp_kept_phase_t phase;
  /* Lock of this process: VRAMP_KEPT_READ, VRAMP_KEPT_WRITE or VRAMP_KEPT_UNLOCKED. */
  uint32_t lock;
  /* 1 if work of the card may write it. Otherwise 0. */
  int32_t writable;
  /* 1 if a process ended while it wrote. Otherwise 0. */
  int32_t torn;
  /* 1 if the name has other memory by now, or none. This memory stays as it is. Otherwise 0. */
  int32_t superseded;
  /* 1 while no keeper knows of it. It stays valid, and is restored at the next keeper. Otherwise 0. */
  int32_t adrift;
  /* 1 if a process waits to write. Otherwise 0. */
  int32_t writer_waits;
  /* Zero. */
  uint32_t reserved;
} vramp_kept_state_t;

/* A block, as PyTorch's statistics need it. Amounts are in bytes. */
typedef struct {
  /* Address of its first byte. */
  uint64_t address;
  /* Usable bytes: those requested, rounded up. */
  uint64_t size;
  /* Requested bytes. */
  uint64_t requested;
  /* The stream that it was allocated for: a `cudaStream_t`. */
  uint64_t stream;
  /* PyTorch's index of the device. */
  int device;
  /* 1 for a block of PyTorch's small pool: in a slab, which has blocks up to 1 MiB only. */
  int is_small;
} vramp_torch_block_t;

/* A ticket for memory, and where an address lies in it. */
typedef struct {
  /* Distance of the address from the first byte of the shared memory. */
  uint64_t offset;
  /* Number of bytes of the ticket. */
  uint64_t length;
  /* The ticket. */
  uint8_t bytes[160];
} vramp_torch_ticket_t;

/* Memory of another process. */
typedef struct {
  /* Number for vramp_torch_share_close. */
  uint64_t number;
  /* Address of its first byte here. */
  uint64_t address;
  /* Bytes. */
  uint64_t size;
} vramp_torch_opened_t;

/* What is shared now. */
typedef struct {
  /* Blocks and segments that other processes can open. */
  uint64_t published;
  /*
   * Blocks and segments that are kept for other processes: those published, and freed ones that are still
   * open elsewhere.
   */
  uint64_t exported;
  /* Memory of other processes that is open here. */
  uint64_t opened;
  /* Its bytes. */
  uint64_t opened_bytes;
} vramp_torch_shared_t;

/*
 * What the statistics of PyTorch need besides the blocks, in bytes and counts. Of each pair, the first
 * is of memory for requests up to 1 MiB.
 */
typedef struct {
  /* Physical memory reserved, segments included. */
  uint64_t reserved;
  /* Peak of `reserved` since the last reset. */
  uint64_t reserved_peak;
  /* Physical memory created so far, in total. */
  uint64_t reserved_total;
  /* Physical memory released so far, in total. */
  uint64_t released_total;
  /* Part of `reserved` that serves only requests up to 1 MiB. */
  uint64_t reserved_small;
  /* Number of freed blocks that other streams may still use. */
  uint64_t waiting[2];
  /* Bytes of these. */
  uint64_t waiting_bytes[2];
  /* Number of physical handles created. */
  uint64_t created;
  /* Number of physical handles released. */
  uint64_t released;
  /* Number of requests that were retried. */
  uint64_t retries;
  /* Limit of `reserved`, or the memory of the device. */
  uint64_t limit;
  /* Free memory of the device. */
  uint64_t device_free;
  /* Memory of the device. */
  uint64_t device_total;
} vramp_torch_memory_t;

/* A part of reserved memory. */
typedef struct {
  /* Address of its first byte. */
  uint64_t address;
  /* Its bytes. */
  uint64_t size;
  /* Requested bytes of a block. */
  uint64_t requested;
  /* The stream of the block, or the one that used the memory last. */
  uint64_t stream;
  /*
   * 0 for free memory, 1 for a block, 2 for a freed block that other streams may still use, 3 for a
   * segment that PyTorch's own allocator has.
   */
  uint32_t state;
  /* 1 for memory of the small pool: of slabs, which serve only requests up to 1 MiB. */
  uint32_t is_small;
} vramp_torch_part_t;

/* Receives one part of memory. */
typedef void (*vramp_torch_visitor_t)(const vramp_torch_part_t *part, void *user);

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the version of the library, such as "0.1.0". Never null. */
const char *vramp_version(void);

/*
 * Returns the name of a status, such as "VRAMP_ERROR_OUT_OF_MEMORY". Never null; "unknown" for
 * others.
 */
const char *vramp_status_name(int status);

/*
 * Returns the message of the calling thread's last failed call. Never null; empty before the first
 * failure. Valid until the next failed call of the thread. Successful calls do not change it. While
 * a thread ends, after its thread-local storage, it is a fixed text that says so.
 */
const char *vramp_last_error(void);

/*
 * Opens an allocator on a device.
 *
 * `device` is "auto" (what VRAMP_DEVICE names; card 0 without it), "cuda", "cuda:N", "sim",
 * "sim:CARD", or "sim:CARDxCOUNT:N" for card N of a simulated machine; null means "auto". `options` are
 * key=value pairs separated by commas: preset (vramp, vpmm, stream-ordered, torch or
 * torch-expandable), limit (such as 80GiB, or 90% of the device), prefill, page, span, torch (settings
 * in PyTorch's syntax in brackets, such as `[max_split_size_mb:64]`), sharing (none, posix-fd or
 * fabric), rdma (off, on or auto), peers (none, on-demand, all or a list such as `[0,1]`); null means
 * the defaults. Reserves no memory yet, unless prefill is set.
 *
 * The preset vpmm also reads VPMM_PAGE_SIZE, VPMM_VA_SIZE and VPMM_PAGES, and the presets of PyTorch
 * PYTORCH_ALLOC_CONF or else PYTORCH_CUDA_ALLOC_CONF, as far as no option says otherwise. A line on
 * stderr names those that were used.
 *
 * What the caller promises:
 * The texts are null or zero-terminated; `allocator` is null or valid for writing.
 */
vramp_status_t vramp_open(const char *device,
                          const char *options,
                          vramp_allocator_t *allocator);

/*
 * Closes an allocator: waits for its streams, forgotten ones included, and releases all its memory,
 * also of blocks that were not freed. Exports, imports and pins end with it: what other processes
 * opened stays theirs, later opens fail. While a stream captures a graph that vramp did not begin it
 * returns VRAMP_ERROR_CAPTURE, and VRAMP_ERROR_DRIVER if the wait fails: then nothing is released,
 * and the allocator stays open. Waits for calls in progress on other threads. Later calls return
 * VRAMP_ERROR_UNKNOWN_ALLOCATOR. Inside a callback it never waits for calls: it returns
 * VRAMP_ERROR_BUSY for the callback's own allocator, and for another one while calls are in
 * progress on it. In a forked child it returns VRAMP_ERROR_FORKED, and there is nothing to close.
 */
vramp_status_t vramp_close(vramp_allocator_t allocator);

/*
 * Adopts a stream that the caller made: a `cudaStream_t`, or null for the legacy default stream.
 * Adopting it again returns the same handle. No driver call. On the simulator every value is a
 * simulated stream. `cudaStreamPerThread` is the calling thread's own stream: each thread gets another
 * handle, two driver calls at first, which ends with the thread. Other threads may pass it to free and to
 * record uses; requests for it are the thread's own.
 *
 * What the caller promises:
 * On a GPU, `raw` is null or a stream of the device's primary context that lives until it is
 * forgotten or the allocator is closed. `stream` is null or valid for writing.
 */
vramp_status_t vramp_stream_adopt(vramp_allocator_t allocator,
                                  void *raw,
                                  vramp_stream_t *stream);

/*
 * Creates a stream, for programs that have none of their own. One driver call.
 *
 * What the caller promises:
 * `stream` is null or valid for writing.
 */
vramp_status_t vramp_stream_create(vramp_allocator_t allocator, vramp_stream_t *stream);

/*
 * Forgets a stream, created or adopted. Call it before destroying an adopted stream; while the stream
 * captures a graph it returns VRAMP_ERROR_CAPTURE. Never waits: queued work still runs, and memory
 * that it uses is not reused before it completes. Blocks of the stream stay live, and may be freed on
 * it or on another stream. After VRAMP_ERROR_DRIVER the call can be repeated.
 */
vramp_status_t vramp_stream_forget(vramp_allocator_t allocator,
                                   vramp_stream_t stream);

/*
 * Allocates at least `size` bytes for work on `stream`, aligned to 512 bytes, or to 256 bytes in a
 * capture into an arena. A block of zero bytes has a unique address too. On failure `*address` is
 * set to null. Before it fails for want of memory, it waits on the host for work that uses freed
 * memory.
 *
 * What the caller promises:
 * `address` is null or valid for writing.
 */
vramp_status_t vramp_malloc(vramp_allocator_t allocator,
                            size_t size,
                            vramp_stream_t stream,
                            void **address);

/*
 * Frees a block. All work on it must be queued on `stream`, or ordered before the work queued on
 * it so far, or recorded with vramp_record_use. `stream` may differ from the stream of the
 * allocation, and may be forgotten. Never waits.
 *
 * An address that is null, not the start of a block, of another allocator or free already is an
 * error and changes nothing. A new block at the same address cannot be distinguished from the old
 * one.
 */
vramp_status_t vramp_free(vramp_allocator_t allocator, void *address, vramp_stream_t stream);

/* Records that work queued on `stream` so far uses a block. No driver call. */
vramp_status_t vramp_record_use(vramp_allocator_t allocator, void *address, vramp_stream_t stream);

/*
 * Returns the usable bytes of a block: the requested size, or slightly more.
 *
 * What the caller promises:
 * `size` is null or valid for writing.
 */
vramp_status_t vramp_usable_size(vramp_allocator_t allocator, void *address, size_t *size);

/*
 * Releases idle memory to the device until at most `keep` bytes are reserved or no more memory is
 * idle, and unpins all idle memory of the host. Never waits.
 */
vramp_status_t vramp_trim(vramp_allocator_t allocator, size_t keep);

/*
 * Returns statistics. Set `stats->struct_size` to `sizeof(vramp_stats_t)` before.
 *
 * What the caller promises:
 * `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_stats(vramp_allocator_t allocator, vramp_stats_t *stats);

/* Checks every invariant of the state of the allocator and its tiers. O(n log n): for tests. */
vramp_status_t vramp_audit(vramp_allocator_t allocator);

/*
 * Sets the limit of reserved bytes; zero means the memory of the device. Idle memory above the
 * limit is released at once. Memory in use stays.
 */
vramp_status_t vramp_set_limit(vramp_allocator_t allocator, uint64_t limit);

/*
 * Starts to record the last `events` events, 40 bytes each; zero stops recording. More than
 * 10,000,000 are VRAMP_ERROR_RANGE. Recording takes a lock shared by all threads in each malloc
 * and free.
 */
vramp_status_t vramp_record_history(vramp_allocator_t allocator, uint32_t events);

/*
 * Writes all blocks and segments, and the history if one is recorded, to a file: a snapshot for
 * `torch/cuda/_memory_viz.py` and PyTorch's viewer, or, if the path ends with `.json`, a timeline
 * for Perfetto.
 *
 * What the caller promises:
 * `path` is null or is zero-terminated.
 */
vramp_status_t vramp_snapshot(vramp_allocator_t allocator, const char *path);

/*
 * Starts to record the last `events` events, 40 bytes each, of each device that PyTorch, Python and C share
 * in this process, also of those that are opened later; zero stops recording. More than 10,000,000 are
 * VRAMP_ERROR_RANGE.
 */
vramp_status_t vramp_record_history_of_devices(uint32_t events);

/*
 * Writes all blocks and segments, and the history if one is recorded, of each device that PyTorch, Python
 * and C share in this process to one file, as vramp_snapshot does for one allocator. Each device has the
 * number that PyTorch gives it.
 *
 * What the caller promises:
 * `path` is null or is zero-terminated.
 */
vramp_status_t vramp_snapshot_of_devices(const char *path);

/*
 * Registers `observer`, which is called with `user` for every event. `*registration` receives the
 * number for vramp_unobserve. Other threads may call the observer before it is written.
 *
 * What the caller promises:
 * `observer` may be called from any thread with `user` until the allocator is closed or
 * vramp_unobserve has returned; if that was called inside a callback, until calls in progress have
 * returned too. It does not unwind.
 * `registration` is null or valid for writing.
 */
vramp_status_t vramp_observe(vramp_allocator_t allocator,
                             vramp_observer_t observer,
                             void *user,
                             uint64_t *registration);

/*
 * Removes an observer, a shortage handler, or callbacks around a sleep. When it returns, no call of it is in progress
 * or begins, and `user` may be freed. So the caller must hold no lock that it takes. Inside a callback it does not wait
 * for calls in progress on other threads. An unknown number, or one that was removed before, is an error.
 */
vramp_status_t vramp_unobserve(vramp_allocator_t allocator,
                               uint64_t registration);

/* Returns the version of the library as a number, which has the form of VRAMP_VERSION. */
uint32_t vramp_version_number(void);

/*
 * Checks that the library serves a program that was compiled with the header of version `header`:
 * pass VRAMP_VERSION. VRAMP_ERROR_VERSION if the library is older than the header, or of another
 * ABI: another major version, or before 1.0 another minor version. Takes no allocator.
 */
vramp_status_t vramp_check_version(uint32_t header);

/*
 * Describes the device of an allocator. Set `device->struct_size` to `sizeof(vramp_device_t)`
 * before. No driver call.
 *
 * What the caller promises:
 * `device` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_device(vramp_allocator_t allocator, vramp_device_t *device);

/*
 * Returns the `CUstream` of a stream in `*raw`, to launch kernels on it. For an adopted stream that is
 * the adopted value, null for the legacy default stream. On failure `*raw` is set to null, which is
 * no other answer than the default stream's: look at the status. No driver call.
 *
 * The handle of a created stream is valid until vramp_stream_forget or vramp_close. Do not destroy
 * it, and do not adopt it. On a simulated device a created stream has no CUstream and returns
 * VRAMP_ERROR_UNSUPPORTED; an adopted one returns its value.
 *
 * What the caller promises:
 * `raw` is null or valid for writing.
 */
vramp_status_t vramp_stream_raw(vramp_allocator_t allocator,
                                vramp_stream_t stream,
                                void **raw);

/* Waits on the host for the work queued on a stream so far. VRAMP_ERROR_CAPTURE while it captures. */
vramp_status_t vramp_stream_synchronize(vramp_allocator_t allocator, vramp_stream_t stream);

/*
 * Frees a block on the stream that it was allocated for, as vramp_free does with that stream. The
 * stream may be forgotten. For blocks that were used on no other stream, or whose uses are recorded
 * with vramp_record_use.
 */
vramp_status_t vramp_free_on_own_stream(vramp_allocator_t allocator, void *address);

/*
 * Resets the peaks to the current values, as `torch.cuda.reset_peak_memory_stats` does: those of
 * vramp_stats and of vramp_memory_stats. O(threads).
 */
vramp_status_t vramp_reset_peaks(vramp_allocator_t allocator);

/*
 * Calls `visitor` with each statistic of `torch.cuda.memory_stats`, by PyTorch's name and in the
 * order of names, such as "allocated_bytes.all.peak" and "num_ooms". All are of one moment, before
 * the first call. "max_split_size" without bound is UINT64_MAX. The set of names may grow. O(n) in
 * the regions of the pool. `visitor` may call vramp, and close the allocator.
 *
 * What the caller promises:
 * `visitor` may be called with `user`, on this thread and before the function returns. It does not
 * unwind.
 */
vramp_status_t vramp_memory_stats(vramp_allocator_t allocator,
                                  vramp_stat_visitor_t visitor,
                                  void *user);

/*
 * Registers `handler`, which is called with `user` before a request fails for want of memory: the
 * place to free or evict blocks. All handlers run, in the order of registration. If one returns
 * nonzero the request is tried again, up to 64 times. `*registration` receives the number for
 * vramp_unobserve. Other threads may call the handler before it is written.
 *
 * What the caller promises:
 * As of vramp_observe: `handler` may be called from any thread with `user` until the allocator is
 * closed or vramp_unobserve has returned; if that was called inside a callback, until calls in
 * progress have returned too. It does not unwind.
 * `registration` is null or valid for writing.
 */
vramp_status_t vramp_on_shortage(vramp_allocator_t allocator,
                                 vramp_shortage_handler_t handler,
                                 void *user,
                                 uint64_t *registration);

/*
 * Creates an arena: an address range for the memory of captured graphs. Graphs captured one after
 * the other into one arena share its memory: together they need as much as the largest of them,
 * plus blocks that stay live between them. They must never run at the same time. Where one reads
 * the results of another, they must run in the order of their captures.
 *
 * `options` are key=value pairs separated by commas. The default comes first: policy (reusing; or
 * monotone, which never reuses freed blocks), capacity (size of the address range, 512GiB; a
 * monotone arena reserves as much memory before its first capture, a reusing one only what
 * captures need), overlap (refuse or order: what a launch does while a replay on another stream is
 * in flight), mode (thread-local, global or relaxed: of the driver's capture), replan (on or off:
 * whether to plan a tighter layout for the next capture of the same shape). Null means the
 * defaults. Only the preset vramp has arenas.
 *
 * What the caller promises:
 * `options` is null or is zero-terminated; `arena` is null or valid for writing.
 */
vramp_status_t vramp_arena_create(vramp_allocator_t allocator,
                                  const char *options,
                                  vramp_arena_t *arena);

/*
 * Destroys an arena. Its memory is released once its graphs are destroyed and its blocks freed.
 * VRAMP_ERROR_BUSY during a capture into it.
 */
vramp_status_t vramp_arena_destroy(vramp_allocator_t allocator, vramp_arena_t arena);

/*
 * Resets a monotone arena to its start, after the last use of its graphs. VRAMP_ERROR_BUSY during
 * a capture into it and while a block of it is live.
 */
vramp_status_t vramp_arena_reset(vramp_allocator_t allocator, vramp_arena_t arena);

/*
 * Reports the memory of an arena. Set `report->struct_size` to `sizeof(vramp_arena_report_t)`
 * before.
 *
 * What the caller promises:
 * `report` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_arena_report(vramp_allocator_t allocator,
                                  vramp_arena_t arena,
                                  vramp_arena_report_t *report);

/*
 * Begins a capture of `stream` into an arena. Allocations on this stream, and on streams that join
 * the capture, come from the arena. Allocations on other streams are not affected. Memory from
 * before the capture that is freed on those streams is kept until the graph is destroyed. An arena
 * serves one capture at a time. Until the capture ends, one thread at a time may use its streams, in
 * calls of this library and of CUDA.
 */
vramp_status_t vramp_capture_begin(vramp_allocator_t allocator,
                                   vramp_stream_t stream,
                                   vramp_arena_t arena);

/*
 * Ends the capture into an arena and instantiates its graph. On failure the capture is discarded
 * and `*graph` is zero. Unless the arena's mode is relaxed, call it on the thread that began the
 * capture: on another thread it is refused, and the capture goes on.
 *
 * What the caller promises:
 * `graph` is null or valid for writing.
 */
vramp_status_t vramp_capture_end(vramp_allocator_t allocator,
                                 vramp_arena_t arena,
                                 vramp_graph_t *graph);

/*
 * Attaches an arena to the capture of `stream`, which the caller began and will end. Allocations
 * and frees behave as after vramp_capture_begin, with the same rule for threads. The library does not see replays of the graph:
 * the arena never lends its memory from then on, and the caller must not let replays of its graphs
 * overlap.
 */
vramp_status_t vramp_capture_attach(vramp_allocator_t allocator,
                                    vramp_stream_t stream,
                                    vramp_arena_t arena);

/*
 * Detaches an arena from a capture, after the caller ended the capture. `*graph` is a hold on the
 * memory of the caller's graph, also if the capture failed: destroy it after the last launch.
 * Until then memory that was freed in the capture is kept, and memory of the arena that is freed
 * later is reused only by the arena's next capture.
 *
 * What the caller promises:
 * `graph` is null or valid for writing.
 */
vramp_status_t vramp_capture_detach(vramp_allocator_t allocator,
                                    vramp_arena_t arena,
                                    vramp_graph_t *graph);

/*
 * Launches a graph on `stream`. Takes lent memory of the arena back first. While a lease on the
 * arena is held, and until the work queued on its stream before its end completes, launches on
 * other streams return VRAMP_ERROR_BUSY; with overlap=order they are ordered after that work.
 *
 * `*lease` receives the lease. End it after queueing the work on `stream` that reads the graph's
 * results. If `lease` is null, the lease ends directly after the launch.
 *
 * What the caller promises:
 * `lease` is null or valid for writing.
 */
vramp_status_t vramp_graph_launch(vramp_allocator_t allocator,
                                  vramp_graph_t graph,
                                  vramp_stream_t stream,
                                  vramp_lease_t *lease);

/* Ends a lease. Other streams wait for the work queued on its stream so far. */
vramp_status_t vramp_lease_end(vramp_allocator_t allocator, vramp_lease_t lease);

/*
 * Reports the memory that the capture of a graph needed. Set `report->struct_size` to
 * `sizeof(vramp_capture_report_t)` before.
 *
 * What the caller promises:
 * `report` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_graph_report(vramp_allocator_t allocator,
                                  vramp_graph_t graph,
                                  vramp_capture_report_t *report);

/*
 * Destroys a graph, or a hold on the memory of a caller's graph. Never waits: a launch in flight
 * completes, and the memory is reused after it. Memory of a caller's graph is reused after all
 * work queued so far on every stream of the allocator.
 */
vramp_status_t vramp_graph_destroy(vramp_allocator_t allocator, vramp_graph_t graph);

/*
 * Maps the host's memory to the simulated cards that are opened in this process from now on. Then a
 * program may read and write what it allocates there, and share it with other processes that called
 * this function. Programs with a GPU need it for nothing.
 */
vramp_status_t vramp_map_simulated_cards(void);

/*
 * Exports the block that begins at `address` to other processes of the same user. The descriptor of
 * each physical handle is made once, 185 us, and kept for later exports, 256 in a process at most. A block may
 * be exported several times. A free of the block takes effect once its exports are closed and no importer has
 * it open any more, killed ones included.
 *
 * Importers may read and write all physical handles that the block lies in, also the blocks beside it.
 * VRAMP_ERROR_UNSUPPORTED if the memory was created for one process (sharing=none, and some presets).
 *
 * What the caller promises:
 * `exported` is null or valid for writing.
 */
vramp_status_t vramp_export(vramp_allocator_t allocator,
                            void *address,
                            vramp_export_t *exported);

/*
 * Exports `length` bytes from `address` on, as vramp_export does, whatever lies there: pages of an arena for
 * caches that have memory. Until the export is closed and no importer has it open any more, its physical handles
 * stay at their addresses, also while the pages are parked. Blocks that lie there are not kept: the caller does
 * not free them.
 *
 * VRAMP_ERROR_UNSUPPORTED if part of it has no memory of the pool, or memory that was created for one process.
 *
 * What the caller promises:
 * `exported` is null or valid for writing.
 */
vramp_status_t vramp_export_range(vramp_allocator_t allocator,
                                  void *address,
                                  size_t length,
                                  vramp_export_t *exported);

/*
 * Returns a ticket for another process, which can be opened any number of times while the export is
 * open. With `keep_until_opened` it also counts as a holder of the memory until it was opened once, or
 * vramp_export_revoke ends that. The bytes are those that work wrote: before the ticket is sent,
 * synchronize the stream that wrote them.
 *
 * What the caller promises:
 * `ticket` is null or valid for writing.
 */
vramp_status_t vramp_export_ticket(vramp_allocator_t allocator,
                                   vramp_export_t exported,
                                   int keep_until_opened,
                                   vramp_ticket_t *ticket);

/*
 * Ends what vramp_export_ticket began with `keep_until_opened`, for a ticket that did not arrive.
 * `*revoked` is 1, or 0 if it was opened or revoked before. `revoked` may be null.
 *
 * What the caller promises:
 * `ticket` is null or valid for reading, `revoked` null or valid for writing.
 */
vramp_status_t vramp_export_revoke(vramp_allocator_t allocator,
                                   vramp_export_t exported,
                                   const vramp_ticket_t *ticket,
                                   int *revoked);

/*
 * Returns in `*held` 1 while an importer has the export open or a ticket that keeps it was not opened,
 * else 0, and in `*opens` the number of opens that importers have not closed. Either may be null.
 *
 * What the caller promises:
 * `held` and `opens` are null or valid for writing.
 */
vramp_status_t vramp_export_is_held(vramp_allocator_t allocator,
                                    vramp_export_t exported,
                                    int *held,
                                    uint64_t *opens);

/*
 * Waits until the export is not held, for `timeout_ms` milliseconds at most. `*released` is 1, or 0 at
 * the end of that time; it may be null. A close of the export or the allocator does not wait for the call:
 * it ends the tickets, and the call returns once nothing is open.
 *
 * What the caller promises:
 * `released` is null or valid for writing.
 */
vramp_status_t vramp_export_wait(vramp_allocator_t allocator,
                                 vramp_export_t exported,
                                 uint32_t timeout_ms,
                                 int *released);

/*
 * Closes an export: later opens fail, and tickets keep nothing any more. What importers have open stays
 * open, and keeps the block. Never waits.
 */
vramp_status_t vramp_export_close(vramp_allocator_t allocator,
                                  vramp_export_t exported);

/*
 * Opens the memory of a ticket: `*address` is where it lies in this process, `*size` its bytes. Waits for
 * the exporting process, 30 s for each of its answers at most. One import and one map for each physical
 * handle, 34 us together, and none for those that are mapped from an earlier open. The memory stays readable after
 * the exporting process has ended. Memory that is opened twice has one address, and is closed twice.
 *
 * On failure `*address` is set to null. VRAMP_ERROR_EXPORT_ENDED if the export or its process ended,
 * VRAMP_ERROR_TICKET if the bytes are no ticket.
 *
 * What the caller promises:
 * `ticket` is null or valid for reading; `address` is null or valid for writing; so is `size`, which may
 * be null.
 */
vramp_status_t vramp_import(vramp_allocator_t allocator,
                            const vramp_ticket_t *ticket,
                            void **address,
                            size_t *size);

/*
 * Records that work queued on `stream`, so far and from now on, uses an import: its close waits for it.
 * No driver call.
 */
vramp_status_t vramp_import_record_use(vramp_allocator_t allocator,
                                       void *address,
                                       vramp_stream_t stream);

/*
 * Closes an import: waits on the host for recorded work, and closes it at the exporter, which may use it for other
 * blocks then. Other work on it must be complete. It may stay mapped for ten seconds, for the next open.
 */
vramp_status_t vramp_import_close(vramp_allocator_t allocator,
                                  void *address);

/*
 * Grants card number `device` access to all memory of the allocator and of the pools made from it, now and
 * later. `*calls` receives the number of driver calls and `*bytes` how much was mapped; either may be
 * null, and both are zero if the card had access before. About 45 us for each physical handle; later
 * set-access and unmap calls take twice as long.
 *
 * VRAMP_ERROR_RANGE if the card is no peer, VRAMP_ERROR_UNSUPPORTED if the option `peers` excludes it.
 *
 * What the caller promises:
 * `calls` and `bytes` are null or valid for writing.
 */
vramp_status_t vramp_grant_access(vramp_allocator_t allocator,
                                  uint32_t device,
                                  uint64_t *calls,
                                  uint64_t *bytes);

/*
 * Takes back the access of card number `device`, with the results of vramp_grant_access. All work of that
 * card on the memory must be complete, and seen to be.
 *
 * What the caller promises:
 * As of vramp_grant_access.
 */
vramp_status_t vramp_revoke_access(vramp_allocator_t allocator,
                                   uint32_t device,
                                   uint64_t *calls,
                                   uint64_t *bytes);

/*
 * Pins the memory of `size` bytes from `address` on, for what registers it: network cards, communication
 * libraries. Until vramp_unpin it stays at its addresses and is not released, also if the block is freed
 * and allocated again. Pins are counted and may overlap. No driver call.
 *
 * What the caller promises:
 * `pin` is null or valid for writing.
 */
vramp_status_t vramp_pin(vramp_allocator_t allocator,
                         void *address,
                         size_t size,
                         vramp_pin_t *pin);

/* Ends a pin, after the registration has ended. No driver call. */
vramp_status_t vramp_unpin(vramp_allocator_t allocator, vramp_pin_t pin);

/*
 * Pins `size` bytes from `address` on as vramp_pin does, and returns a descriptor of the pages of 4 KiB that
 * they lie in, for drivers of other devices (ibv_reg_dmabuf_mr). `*offset` is where the bytes begin in it.
 * The caller closes the descriptor, which keeps the memory itself, and ends the pin after the
 * registration. One driver call. VRAMP_ERROR_UNSUPPORTED if the device has no dma-buf.
 *
 * What the caller promises:
 * `descriptor`, `offset` and `pin` are null or valid for writing.
 */
vramp_status_t vramp_export_dma_buf(vramp_allocator_t allocator,
                                    void *address,
                                    size_t size,
                                    int *descriptor,
                                    size_t *offset,
                                    vramp_pin_t *pin);

/*
 * Makes an allocator for memory that communication libraries register (NCCL, UCX): its segments are one
 * physical handle each, which stays until the segment is free as a whole and trimmed. It has the device,
 * the limit and the streams of `allocator`: a stream's handle is valid in both. Close both, in any order.
 *
 * `name` is for reports; null means "comm".
 *
 * What the caller promises:
 * `name` is null or zero-terminated; `pool` is null or valid for writing.
 */
vramp_status_t vramp_comm_pool(vramp_allocator_t allocator,
                               const char *name,
                               vramp_allocator_t *pool);

/*
 * Returns how the memory can be shared, and how much is. Set `state->struct_size` to
 * `sizeof(vramp_sharing_t)` before. No driver call.
 *
 * What the caller promises:
 * `state` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_sharing(vramp_allocator_t allocator, vramp_sharing_t *state);

/*
 * Opens tiers below an allocator, of the spaces in a configuration in TOML: `[[gpu]]` with the number of
 * its device, or none for the allocator's limit; `[[host]]`; `[[disk]]`; and `[[peer]]`, the number of another
 * card whose free memory holds contents. docs/tiers.md has the keys.
 * Pins the host's first pool. From then on requests that find too little memory spill buffers first.
 *
 * An allocator has at most one set of tiers: VRAMP_ERROR_BUSY if they are open. They end with
 * vramp_tiers_close or vramp_close.
 *
 * What the caller promises:
 * `config` is null or is zero-terminated.
 */
vramp_status_t vramp_tiers_open(vramp_allocator_t allocator,
                                const char *config);

/*
 * Opens tiers as vramp_tiers_open does, of the sizes in a struct. Where the call fails the store of the
 * struct is not released.
 *
 * What the caller promises:
 * `options` is null, or its first eight bytes hold a size that is valid for reading; its directory is
 * null or zero-terminated; its store is null, or as `options` is. The functions of the store may be called
 * from any thread with its `user` until `release` was called, and do not unwind.
 */
vramp_status_t vramp_tiers_open_with(vramp_allocator_t allocator,
                                     const vramp_tiers_options_t *options);

/*
 * Closes the tiers: ends leases at the work queued by then, destroys buffers and their contents, and
 * releases reservations, pinned memory and files. Waits for work on buffers. Calls of other threads
 * that wait for memory end with VRAMP_ERROR_CANCELLED. The allocator stays open, and its other memory
 * stays.
 *
 * VRAMP_ERROR_CAPTURE while a stream captures a graph, VRAMP_ERROR_IN_USE while Python uses the tiers:
 * nothing changes then. VRAMP_ERROR_BUSY in an observer of buffers.
 */
vramp_status_t vramp_tiers_close(vramp_allocator_t allocator);

/*
 * Returns the spaces of the tiers, the fastest tier first. `*count` receives their number; as many of
 * them are written to `spaces` as `capacity` says. `spaces` may be null if `capacity` is zero.
 *
 * What the caller promises:
 * `spaces` is null or valid for writing `capacity` structs. `count` is null or valid for writing.
 */
vramp_status_t vramp_spaces(vramp_allocator_t allocator,
                            vramp_space_t *spaces,
                            size_t capacity,
                            size_t *count);

/*
 * Returns the statistics of a space. Set `stats->struct_size` to `sizeof(vramp_space_stats_t)` before.
 *
 * What the caller promises:
 * `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_space_stats(vramp_allocator_t allocator,
                                 vramp_space_t space,
                                 vramp_space_stats_t *stats);

/* Resets the peak of a space to its present total. */
vramp_status_t vramp_space_reset_peak(vramp_allocator_t allocator, vramp_space_t space);

/*
 * Reserves `bytes` of a space: no other request gets them until they are released. With an index of
 * VRAMP_ANY_INDEX any space of the tier is taken. A larger `priority` goes first; zero is usual.
 *
 * It waits in order of arrival, spills buffers meanwhile, and ends with VRAMP_ERROR_TIMEOUT after
 * `timeout_ns` nanoseconds: at once if they are zero, never if they are VRAMP_FOREVER. A request that can
 * never be served is VRAMP_ERROR_OUT_OF_MEMORY at once. Of requests that wait for each other one ends with VRAMP_ERROR_DEADLOCK.
 *
 * What the caller promises:
 * `reservation` is null or valid for writing.
 */
vramp_status_t vramp_reserve(vramp_allocator_t allocator,
                             vramp_space_t space,
                             uint64_t bytes,
                             int32_t priority,
                             uint64_t timeout_ns,
                             vramp_reservation_t *reservation);

/*
 * Reserves at once as many of `most` bytes as a space has, and at least `least`. `*bytes` receives how
 * many; it may be null. With a `least` of zero the reservation may be empty, and can grow.
 *
 * What the caller promises:
 * `reservation` is null or valid for writing; so is `bytes`.
 */
vramp_status_t vramp_reserve_up_to(vramp_allocator_t allocator,
                                   vramp_space_t space,
                                   uint64_t least,
                                   uint64_t most,
                                   vramp_reservation_t *reservation,
                                   uint64_t *bytes);

/*
 * Returns the state of a reservation. Set `info->struct_size` to `sizeof(vramp_reservation_info_t)`
 * before.
 *
 * What the caller promises:
 * `info` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_reservation_info(vramp_allocator_t allocator,
                                      vramp_reservation_t reservation,
                                      vramp_reservation_info_t *info);

/*
 * Adds `bytes` to a reservation, with the timeout of vramp_reserve. Where it fails the reservation is
 * as before.
 */
vramp_status_t vramp_reservation_grow(vramp_allocator_t allocator,
                                      vramp_reservation_t reservation,
                                      uint64_t bytes,
                                      uint64_t timeout_ns);

/*
 * Shrinks a reservation to what is charged to it. `*released` receives the bytes that came back to the
 * space; it may be null.
 *
 * What the caller promises:
 * `released` is null or valid for writing.
 */
vramp_status_t vramp_reservation_shrink(vramp_allocator_t allocator,
                                        vramp_reservation_t reservation,
                                        uint64_t *released);

/* Releases a reservation. What is charged to it stays charged to the space until it is freed. */
vramp_status_t vramp_reservation_release(vramp_allocator_t allocator,
                                         vramp_reservation_t reservation);

/*
 * Attaches a reservation of the card's space to a stream: it pays for the memory of leases for work on
 * that stream, before the space does. A stream has at most one: VRAMP_ERROR_BUSY if it has another.
 * Until it is detached a reservation does not grow or shrink. A release detaches it.
 */
vramp_status_t vramp_reservation_attach(vramp_allocator_t allocator,
                                        vramp_reservation_t reservation,
                                        vramp_stream_t stream);

/*
 * Detaches a reservation from its stream. What leases used of it stays charged to it until that leaves
 * the card.
 */
vramp_status_t vramp_reservation_detach(vramp_allocator_t allocator,
                                        vramp_reservation_t reservation);

/*
 * Allocates a block as vramp_malloc does, which a reservation of the card's space pays for: its exact
 * length, in whole granules of the space. A free of the block, by any call and on any thread, gives the
 * bytes back to the reservation, or to the space if the reservation was released. The reservation may be
 * attached to a stream, which need not be this one.
 *
 * VRAMP_ERROR_OVER_RESERVATION if the reservation has too little left, after idle buffers that it paid for
 * have left the card: nothing is allocated. VRAMP_ERROR_UNKNOWN_SPACE if it is of another space. On failure
 * `*address` is set to null.
 *
 * What the caller promises:
 * `address` is null or valid for writing.
 */
vramp_status_t vramp_reservation_malloc(vramp_allocator_t allocator,
                                        vramp_reservation_t reservation,
                                        size_t size,
                                        vramp_stream_t stream,
                                        void **address);

/*
 * Creates a buffer of `size` bytes without contents. It has an address, and no memory before the first
 * lease. More of them may exist than fit on the card.
 *
 * What the caller promises:
 * `buffer` is null or valid for writing.
 */
vramp_status_t vramp_buffer_create(vramp_allocator_t allocator,
                                   uint64_t size,
                                   vramp_buffer_t *buffer);

/*
 * Allows vramp_buffers_lease_in_place to read the buffer while it is spilled: its copies lie in host memory
 * that is mapped at its address. For the buffer's life. What is spilled already is read in place only after it
 * was restored and left again. Each part that leaves costs three driver calls more, and it goes to the host
 * only, and to the disk after all other copies.
 *
 * VRAMP_ERROR_UNSUPPORTED if the device maps no host memory, or the buffer was adopted and has not left yet.
 */
vramp_status_t vramp_buffer_set_readable(vramp_allocator_t allocator,
                                         vramp_buffer_t buffer);

/*
 * Destroys a buffer. Never waits: leases on it, and work that was queued under them, keep its memory
 * until they end.
 */
vramp_status_t vramp_buffer_destroy(vramp_allocator_t allocator,
                                    vramp_buffer_t buffer);

/*
 * Returns the state of a buffer. Set `info->struct_size` to `sizeof(vramp_buffer_info_t)` before.
 * O(pieces).
 *
 * What the caller promises:
 * `info` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_buffer_info(vramp_allocator_t allocator,
                                 vramp_buffer_t buffer,
                                 vramp_buffer_info_t *info);

/* Sets the priority of a buffer, zero at first. Buffers of lower priority leave the card first. */
vramp_status_t vramp_buffer_set_priority(vramp_allocator_t allocator,
                                         vramp_buffer_t buffer,
                                         int32_t priority);

/*
 * Says when a buffer is needed next: VRAMP_HINT_WILL_NEED or VRAMP_HINT_WONT_NEED. A lease ends the
 * hint.
 */
vramp_status_t vramp_buffer_hint(vramp_allocator_t allocator, vramp_buffer_t buffer, uint32_t hint);

/*
 * Restores a buffer ahead of need, without a lease. Does not wait for other leases: then it returns
 * VRAMP_ERROR_TIMEOUT.
 */
vramp_status_t vramp_buffer_prefetch(vramp_allocator_t allocator, vramp_buffer_t buffer);

/*
 * Discards the contents of a buffer: they are neither copied out nor restored. VRAMP_ERROR_BUSY while
 * it is leased or moves.
 */
vramp_status_t vramp_buffer_discard(vramp_allocator_t allocator,
                                    vramp_buffer_t buffer);

/*
 * Writes `size` bytes at `offset` of a buffer from the host's memory, and waits until they are there.
 * The buffer is restored for that.
 *
 * What the caller promises:
 * `from` is null or valid for reading `size` bytes.
 */
vramp_status_t vramp_buffer_write(vramp_allocator_t allocator,
                                  vramp_buffer_t buffer,
                                  uint64_t offset,
                                  const void *from,
                                  size_t size);

/*
 * Reads `size` bytes at `offset` of a buffer to the host's memory, after work in flight that writes
 * the buffer. It is restored for that.
 *
 * What the caller promises:
 * `to` is null or valid for writing `size` bytes.
 */
vramp_status_t vramp_buffer_read(vramp_allocator_t allocator,
                                 vramp_buffer_t buffer,
                                 uint64_t offset,
                                 void *to,
                                 size_t size);

/*
 * Restores a buffer and waits until its contents are on the card, or other leases are in the way for
 * `timeout_ns` nanoseconds. Without a lease it may leave again at once.
 */
vramp_status_t vramp_buffer_retrieve(vramp_allocator_t allocator,
                                     vramp_buffer_t buffer,
                                     uint64_t timeout_ns);

/*
 * Evicts one buffer: all of it leaves the card, for the fastest tier with room. Waits for the copies and
 * for work on it. `*freed` receives the bytes of the card that became free; it may be null.
 *
 * VRAMP_ERROR_BUSY while a lease holds it or it moves, VRAMP_ERROR_OUT_OF_MEMORY if no tier has room. The
 * contents are whole, on the card or below.
 *
 * What the caller promises:
 * `freed` is null or valid for writing.
 */
vramp_status_t vramp_buffer_spill(vramp_allocator_t allocator,
                                  vramp_buffer_t buffer,
                                  uint64_t *freed);

/*
 * Evicts one buffer as vramp_buffer_spill does, down to the tier VRAMP_TIER_HOST or VRAMP_TIER_DISK: copies
 * on faster tiers are moved there or dropped.
 *
 * What the caller promises:
 * As of vramp_buffer_spill.
 */
vramp_status_t vramp_buffer_spill_to(vramp_allocator_t allocator,
                                     vramp_buffer_t buffer,
                                     uint32_t tier,
                                     uint64_t *freed);

/*
 * Evicts buffers until `bytes` more of the card are free, or none may leave. `*freed` receives the
 * bytes freed; it may be null.
 *
 * What the caller promises:
 * `freed` is null or valid for writing.
 */
vramp_status_t vramp_evict(vramp_allocator_t allocator, uint64_t bytes, uint64_t *freed);

/*
 * Makes a buffer of memory on the device that the caller allocated, by any allocator: its contents may
 * leave the card from now on. Work queued on `stream` writes it. Nothing is copied.
 *
 * Leases return the adopted address until all of the buffer has left the card. Then `release` is called
 * with `user`, once, and the buffer comes back at an address of its own: ask each lease. It is called
 * by the thread that evicted the buffer or destroyed it, perhaps in the middle of a vramp_malloc, with
 * no lock held. It may free the memory, also with vramp_free. Where the call fails it is not called.
 * Memory of a region is VRAMP_ERROR_UNSUPPORTED: a pause would take it from the card under a lease.
 *
 * What the caller promises:
 * On a GPU, `size` bytes at `address` are memory of the device, and nothing else uses them until
 * `release` is called. `release` may be called from any thread with `user`, and does not unwind. `buffer`
 * is null or valid for writing.
 */
vramp_status_t vramp_buffer_adopt(vramp_allocator_t allocator,
                                  void *address,
                                  uint64_t size,
                                  vramp_stream_t stream,
                                  vramp_release_t release,
                                  void *user,
                                  vramp_buffer_t *buffer);

/*
 * Leases a set of buffers for work on `stream`: restores them at their addresses, all or none. The
 * stream waits for the copies and for earlier work on the buffers; the host does not. While the lease
 * is held none of them moves. Any thread may end it.
 *
 * If other leases are in the way it waits in order of arrival, for `timeout_ns` nanoseconds at most,
 * and then returns VRAMP_ERROR_TIMEOUT. A set that can never fit is VRAMP_ERROR_OUT_OF_MEMORY at once.
 * A thread that holds a lease and waits for another one may wait for a thread that waits for it: lease
 * all that is used together in one call.
 *
 * `addresses` receives the address of each buffer, which is that of vramp_buffer_info; it may be null.
 *
 * What the caller promises:
 * `uses` is null or valid for reading `count` structs; `addresses` is null or valid for writing `count`
 * pointers; `lease` is null or valid for writing.
 */
vramp_status_t vramp_buffers_lease(vramp_allocator_t allocator,
                                   const vramp_buffer_use_t *uses,
                                   size_t count,
                                   vramp_stream_t stream,
                                   uint64_t timeout_ns,
                                   void **addresses,
                                   vramp_buffer_lease_t *lease);

/*
 * Leases as vramp_buffers_lease does, but a buffer that is only read, and may be read while it is spilled
 * (vramp_buffer_set_readable), stays where it is if all that is below the card lies on the host: its spilled
 * parts are read over the bus, at the same address. Only the rest of the set has to fit on the card.
 * vramp_buffer_lease_is_in_place says which buffers stayed. After some reads in place, three by default, a
 * buffer is restored if that does not have to wait.
 *
 * What the caller promises:
 * As of vramp_buffers_lease.
 */
vramp_status_t vramp_buffers_lease_in_place(vramp_allocator_t allocator,
                                            const vramp_buffer_use_t *uses,
                                            size_t count,
                                            vramp_stream_t stream,
                                            uint64_t timeout_ns,
                                            void **addresses,
                                            vramp_buffer_lease_t *lease);

/*
 * Writes 1 to `*in_place` if the buffer at `index` in the request is read in place under the lease, and 0 if
 * it is on the card.
 *
 * What the caller promises:
 * `in_place` is null or valid for writing.
 */
vramp_status_t vramp_buffer_lease_is_in_place(vramp_allocator_t allocator,
                                              vramp_buffer_lease_t lease,
                                              size_t index,
                                              int *in_place);

/*
 * Says that work under a lease writes only `size` bytes at `offset` of the buffer at `index` in the
 * request. Copies of its other parts stay valid, so they can leave the card without a copy. After the
 * first call, for any buffer of the lease, only what such calls name counts as written.
 */
vramp_status_t vramp_buffer_lease_wrote(vramp_allocator_t allocator,
                                        vramp_buffer_lease_t lease,
                                        size_t index,
                                        uint64_t offset,
                                        uint64_t size);

/*
 * Ends a lease at the work queued on its stream so far: the buffers may move once that is complete. Does
 * not wait for it.
 */
vramp_status_t vramp_buffer_lease_end(vramp_allocator_t allocator,
                                      vramp_buffer_lease_t lease);

/* Ends a lease under which nothing was queued and nothing was written. */
vramp_status_t vramp_buffer_lease_cancel(vramp_allocator_t allocator, vramp_buffer_lease_t lease);

/*
 * Locks a set of buffers on a stream: a lease as of vramp_buffers_lease without a handle, which
 * vramp_unlock or vramp_sync_and_unlock of the stream ends.
 *
 * What the caller promises:
 * As of vramp_buffers_lease.
 */
vramp_status_t vramp_lock(vramp_allocator_t allocator,
                          const vramp_buffer_use_t *uses,
                          size_t count,
                          vramp_stream_t stream,
                          uint64_t timeout_ns,
                          void **addresses);

/*
 * Ends the locks of a stream at the work queued on it so far, and does not wait for it.
 * VRAMP_ERROR_UNKNOWN_LEASE if it has none.
 */
vramp_status_t vramp_unlock(vramp_allocator_t allocator, vramp_stream_t stream);

/*
 * Waits for the work queued on a stream, which may be forgotten, and ends its locks. Buffers that no
 * other lease holds may move when it returns. A stream without locks is waited for too. Where the wait
 * fails the locks stay.
 */
vramp_status_t vramp_sync_and_unlock(vramp_allocator_t allocator,
                                     vramp_stream_t stream);

/*
 * Registers `observer`, which a thread of vramp calls with `user` for every change of a buffer from now
 * on. No change waits for it: it gets events a little later, those of one buffer in their order. If it
 * falls behind by more than 65,536 events the oldest are dropped, and it gets VRAMP_BUFFER_EVENTS_LOST.
 * `*registration` receives the number for vramp_buffers_unobserve.
 *
 * What the caller promises:
 * `observer` may be called on another thread with `user` until vramp_buffers_unobserve,
 * vramp_tiers_close or vramp_close has returned; if vramp_buffers_unobserve was called inside it, until
 * it has returned. It does not unwind. `registration` is null or valid for writing.
 */
vramp_status_t vramp_buffers_observe(vramp_allocator_t allocator,
                                     vramp_buffer_observer_t observer,
                                     void *user,
                                     uint64_t *registration);

/*
 * Removes an observer of buffers. When it returns, no call of it is in progress or begins, and `user`
 * may be freed. So the caller must hold no lock that it takes. Inside an observer it does not wait.
 */
vramp_status_t vramp_buffers_unobserve(vramp_allocator_t allocator,
                                       uint64_t registration);

/*
 * Returns statistics of the buffers. Set `stats->struct_size` to `sizeof(vramp_tiers_stats_t)` before.
 * O(n) in the pieces of all buffers, which are summed while other calls wait.
 *
 * What the caller promises:
 * `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_tiers_stats(vramp_allocator_t allocator,
                                 vramp_tiers_stats_t *stats);

/*
 * Calls `visitor` with the last moves that failed, the oldest first: a text that names the piece and
 * the cause. Contents stayed where they were. `visitor` may call vramp, and close the allocator.
 *
 * What the caller promises:
 * `visitor` may be called with `user`, on this thread and before the function returns. It does not
 * unwind.
 */
vramp_status_t vramp_tiers_failures(vramp_allocator_t allocator,
                                    vramp_text_visitor_t visitor,
                                    void *user);

/*
 * Starts a scope on the calling thread: until vramp_region_end, blocks that this thread allocates from the
 * allocator, by any call, are in the region `tag`, at most VRAMP_TAG_MAX bytes of UTF-8. Creates the region
 * if there is none. Scopes nest, and the innermost one of an allocator counts. Other threads are not
 * affected. A block of a region is used and freed as any other, in and outside of scopes.
 *
 * `options` may be null for the defaults: contents go to the host. VRAMP_ERROR_OPTION if the region exists
 * with other options.
 *
 * While the region sleeps allocations in it return VRAMP_ERROR_REGION.
 *
 * What the caller promises:
 * `tag` is null or zero-terminated; `options` is null, or its first eight bytes hold a size that is valid
 * for reading; `scope` is null or valid for writing.
 */
vramp_status_t vramp_region_begin(vramp_allocator_t allocator,
                                  const char *tag,
                                  const vramp_region_options_t *options,
                                  vramp_region_scope_t *scope);

/*
 * Starts a scope on the calling thread in which blocks are in no region, whatever scopes are around it.
 *
 * What the caller promises:
 * `scope` is null or valid for writing.
 */
vramp_status_t vramp_region_disable(vramp_allocator_t allocator,
                                    vramp_region_scope_t *scope);

/*
 * Ends a scope of the calling thread, also after its allocator was closed. Scopes may end in any order, and
 * end with their thread. VRAMP_ERROR_REGION if it ended before, or began on another thread.
 */
vramp_status_t vramp_region_end(vramp_region_scope_t scope);

/*
 * Removes a region without live blocks, after its idle memory went back to the card, so that a program with a
 * tag for each job leaves nothing. Waits for the work of the allocator's streams. Scopes with the tag create the
 * region anew when they allocate; a registration of vramp_region_on_pressure leaves a removed region out. The
 * region's counts leave the allocator's statistics.
 *
 * VRAMP_ERROR_REGION for a tag that no region has, while the region has blocks, or memory that sleeps, is exported,
 * pinned or kept for graphs, and while a call of another thread uses it; VRAMP_ERROR_CAPTURE while a stream
 * captures a graph; VRAMP_ERROR_BUSY in a callback. The region is as before then.
 *
 * What the caller promises:
 * `tag` is null or zero-terminated.
 */
vramp_status_t vramp_region_remove(vramp_allocator_t allocator,
                                   const char *tag);

/*
 * Puts regions to sleep, one after the other: copies what is allocated to the host, and gives the memory to
 * the card. Waits for the work of the card's streams first. What sleeps as far already is left as it is. A
 * null `tags` with a `count` of zero means all regions.
 *
 * Until the resume work must not use the memory: a kernel that does ends the CUDA context. Frees are
 * served.
 *
 * `options` may be null for the defaults: nothing stays on the card, and contents are copied.
 *
 * VRAMP_ERROR_REGION for a tag that no region has, and where memory is exported or pinned; VRAMP_ERROR_CALLBACK if
 * one of vramp_region_around_sleep failed;
 * VRAMP_ERROR_CAPTURE while a stream captures a graph; VRAMP_ERROR_OUT_OF_MEMORY if the host has no room for
 * the copies; VRAMP_ERROR_UNSUPPORTED with presets other than vramp; VRAMP_ERROR_BUSY in a callback. Then
 * regions that this call paused are resumed. If that fails too, because the card is full, the message says
 * what sleeps, and a later resume goes on. A pause that discards may have given contents up before it
 * failed.
 *
 * What the caller promises:
 * `tags` is null or valid for reading `count` texts, each null or zero-terminated; `options` is null, or its
 * first eight bytes hold a size that is valid for reading.
 */
vramp_status_t vramp_region_pause(vramp_allocator_t allocator,
                                  const char *const *tags,
                                  size_t count,
                                  const vramp_pause_options_t *options);

/*
 * Brings regions back to the same addresses, with their contents, one after the other. Does nothing about
 * those that are awake. A null `tags` with a `count` of zero means all regions.
 *
 * VRAMP_ERROR_OUT_OF_MEMORY if the card has no room: the region sleeps on, those before it are awake, and a
 * later call goes on. VRAMP_ERROR_CALLBACK if one of vramp_region_around_sleep failed: the regions are awake, and a
 * later call calls it again. VRAMP_ERROR_REGION for a tag that no region has; VRAMP_ERROR_BUSY in a callback.
 *
 * What the caller promises:
 * `tags` is null or valid for reading `count` texts, each null or zero-terminated.
 */
vramp_status_t vramp_region_resume(vramp_allocator_t allocator,
                                   const char *const *tags,
                                   size_t count);

/*
 * Copies the contents of regions ahead, while they are awake, so that the next pause copies nothing. The
 * program writes nothing in them from this call until they were paused and resumed. Does nothing about
 * regions that sleep or have no backup. A null `tags` with a `count` of zero means all regions. Fails as
 * vramp_region_pause does; the region is as before.
 *
 * What the caller promises:
 * `tags` is null or valid for reading `count` texts, each null or zero-terminated.
 */
vramp_status_t vramp_region_clean(vramp_allocator_t allocator,
                                  const char *const *tags,
                                  size_t count);

/*
 * Opens a store in the folder `directory`, of at most `limit` bytes, or of the free space there if `limit` is
 * zero. Backups of regions with VRAMP_BACKUP_DISK go there from now on, of all allocators of the process but
 * those whose tiers have a disk. Files that are there already are left alone.
 *
 * VRAMP_ERROR_FILE if the folder cannot be used.
 *
 * What the caller promises:
 * `directory` is null or zero-terminated.
 */
vramp_status_t vramp_region_set_disk(const char *directory,
                                     uint64_t limit);

/*
 * Reads the contents of sleeping regions from the disk into pinned host memory, so that a later resume copies
 * from there only. Needs no memory of the card. Does nothing about regions that are awake or have no copy on
 * a disk. A null `tags` with a `count` of zero means all regions.
 *
 * VRAMP_ERROR_OUT_OF_MEMORY if the host has no room, and the region is as before.
 *
 * What the caller promises:
 * `tags` is null or valid for reading `count` texts, each null or zero-terminated.
 */
vramp_status_t vramp_region_prefetch(vramp_allocator_t allocator,
                                     const char *const *tags,
                                     size_t count);

/*
 * Reads `length` bytes of a block in a sleeping region, from `address` on, from the copy of the region to
 * `out`. VRAMP_ERROR_REGION if no sleeping region with a copy has these bytes.
 *
 * What the caller promises:
 * `out` is null or valid for writing `length` bytes.
 */
vramp_status_t vramp_region_read_backup(vramp_allocator_t allocator,
                                        const void *address,
                                        void *out,
                                        size_t length);

/*
 * Lets regions sleep by themselves, in this order and as far as needed, when a request finds no memory: one of
 * the allocator or in any of its regions, or a resume. The region whose own request or resume it is stays as it
 * is. They have to be resumed before they are used. A null `tags` with a `count` of zero means
 * the regions that there are now. `*registration` receives the number for vramp_unobserve, which ends that.
 *
 * What the caller promises:
 * `tags` is null or valid for reading `count` texts, each null or zero-terminated; `registration` is null or
 * valid for writing.
 */
vramp_status_t vramp_region_on_pressure(vramp_allocator_t allocator,
                                        const char *const *tags,
                                        size_t count,
                                        uint64_t *registration);

/*
 * Writes the states of at most `capacity` regions, in the order of their tags, and the number of all to
 * `*count`. Set `statuses->struct_size` of the first to `sizeof(vramp_region_status_t)` before. With a
 * `capacity` of zero only the number is written. Waits for no pause. No driver call.
 *
 * What the caller promises:
 * `statuses` is null, or its first eight bytes hold a size, and `capacity` times that size is valid for
 * reading and writing; `count` is null or valid for writing.
 */
vramp_status_t vramp_region_status(vramp_allocator_t allocator,
                                   vramp_region_status_t *statuses,
                                   size_t capacity,
                                   size_t *count);

/*
 * Registers a pair of callbacks: `before` is called before memory of the regions with these tags leaves the card, and
 * `after` after it is back at its addresses. They end what other libraries know of the memory, such as windows of NCCL,
 * and make it again: what is pinned or exported cannot leave. A null `tags` with a `count` of zero means all regions;
 * regions need not exist yet. `*registration` receives the number for vramp_unobserve, which ends that; nothing is
 * called then, also where `before` was.
 *
 * Pauses of every kind call them: vramp_region_pause, and vramp_region_on_pressure unless `is_collective` is set. A
 * pause calls `before` of each pair that covers one of its regions, in the order of registration, on its thread, before
 * it looks for pins; once, until `after` was called. A resume calls `after` of those of which no region sleeps any more,
 * in reverse order, and so does a pause that fails. If `before` fails no memory leaves, and `after` of those before it is
 * called. If `after` fails the memory is back, the others are called, and the next resume calls it again.
 *
 * What the caller promises:
 * The callbacks may be called from any thread with `user`, one call at a time, until the allocator is closed or
 * vramp_unobserve has returned; if that was called inside a callback, until a call in progress has returned too. They do
 * not unwind. `tags` is null or valid for reading `count` texts, each null or zero-terminated; `callbacks` is null, or its
 * first eight bytes hold a size that is valid for reading, and its name is null or zero-terminated; `registration` is
 * null or valid for writing.
 */
vramp_status_t vramp_region_around_sleep(vramp_allocator_t allocator,
                                         const char *const *tags,
                                         size_t count,
                                         const vramp_sleep_callbacks_t *callbacks,
                                         uint64_t *registration);

/*
 * Reserves addresses for tensors of a cache: keys and values of all layers, as long as they may ever be. They
 * stay the same until vramp_kv_destroy, so that captured graphs and kernels keep them. One driver call at most,
 * and no memory: an access to a page that has none is a fault of the card.
 *
 * VRAMP_ERROR_RANGE for lengths that no arena can have; VRAMP_ERROR_UNSUPPORTED unless the preset is vramp and
 * the device has virtual memory.
 *
 * What the caller promises:
 * `options` is null, or its first eight bytes hold a size that is valid for reading; `kv` is null or valid for
 * writing.
 */
vramp_status_t vramp_kv_create(vramp_allocator_t allocator,
                               const vramp_kv_options_t *options,
                               vramp_kv_t *kv);

/*
 * Ends an arena for caches. Its memory serves other requests once the work is over that was queued by now on
 * the streams that pages were committed for and parked behind, or recorded. Never waits, unless another thread
 * is in a call on the arena, which then ends it.
 */
vramp_status_t vramp_kv_destroy(vramp_allocator_t allocator,
                                vramp_kv_t kv);

/*
 * Returns the address of a tensor, counted from zero, and its length. With VRAMP_KV_INTERLEAVED it begins with
 * its first page, and every so many pages as there are tensors another one of its own follows; the length is
 * up to the end of the arena. `length` may be null.
 *
 * What the caller promises:
 * `address` and `length` are null or valid for writing.
 */
vramp_status_t vramp_kv_address(vramp_allocator_t allocator,
                                vramp_kv_t kv,
                                uint32_t tensor,
                                void **address,
                                size_t *length);

/*
 * Gives pages memory in all tensors, for work on `stream`: all of the pages, or none. The contents are not
 * defined. Pages that were parked cost no driver call.
 *
 * With a stream of zero the memory is for work on any stream: then the call waits on the host for work that
 * still uses it.
 *
 * VRAMP_ERROR_RANGE names a page that is committed, given twice, or beyond the last; VRAMP_ERROR_OUT_OF_MEMORY
 * if the card or the arena's limit has no room. Nothing is committed then, and what was parked stays parked.
 *
 * What the caller promises:
 * `pages` is null or valid for reading `count` values.
 */
vramp_status_t vramp_kv_commit(vramp_allocator_t allocator,
                               vramp_kv_t kv,
                               const vramp_kv_pages_t *pages,
                               size_t count,
                               vramp_stream_t stream);

/*
 * Gives up pages, once the work that is queued on `stream` by now is over; with a stream of zero, the work of
 * all streams of the allocator. They stay mapped: committed again they cost no driver call, and contents are
 * lost only when another request of the process takes the memory. No driver call.
 *
 * VRAMP_ERROR_RANGE names a page that is not committed. No page is parked then.
 *
 * What the caller promises:
 * `pages` is null or valid for reading `count` values.
 */
vramp_status_t vramp_kv_park(vramp_allocator_t allocator,
                             vramp_kv_t kv,
                             const vramp_kv_pages_t *pages,
                             size_t count,
                             vramp_stream_t stream);

/*
 * Commits `count` pages of the arena's choice, as vramp_kv_commit does: parked ones first. Writes them to
 * `pages`, of which there are `*ranges`. `capacity` has to be `count` at least: so many ranges there may be.
 *
 * VRAMP_ERROR_RANGE if fewer pages are left.
 *
 * What the caller promises:
 * `pages` is null or valid for writing `capacity` values; `ranges` is null or valid for writing.
 */
vramp_status_t vramp_kv_take(vramp_allocator_t allocator,
                             vramp_kv_t kv,
                             uint32_t count,
                             vramp_stream_t stream,
                             vramp_kv_pages_t *pages,
                             size_t capacity,
                             size_t *ranges);

/*
 * Returns parked pages to the card, the oldest first, until at most `keep` bytes are parked. `*released` is the
 * bytes that were; it may be null. Waits for no work: pages whose work is not over stay parked, and so do those
 * in one handle with committed ones, and pinned ones.
 *
 * What the caller promises:
 * `released` is null or valid for writing.
 */
vramp_status_t vramp_kv_release(vramp_allocator_t allocator,
                                vramp_kv_t kv,
                                uint64_t keep,
                                uint64_t *released);

/*
 * Finds at most `count` committed pages, those first that are best given up: a handle goes back once none of
 * its pages is committed. Writes the first `capacity` ranges of them, and the number of all to `*ranges`.
 *
 * What the caller promises:
 * `pages` is null or valid for writing `capacity` values; `ranges` is null or valid for writing.
 */
vramp_status_t vramp_kv_park_first(vramp_allocator_t allocator,
                                   vramp_kv_t kv,
                                   uint32_t count,
                                   vramp_kv_pages_t *pages,
                                   size_t capacity,
                                   size_t *ranges);

/*
 * Sets the most memory that an arena may have, parked pages included; zero is no limit. What is parked above it
 * serves other requests; what is committed stays.
 */
vramp_status_t vramp_kv_set_limit(vramp_allocator_t allocator,
                                  vramp_kv_t kv,
                                  uint64_t bytes);

/*
 * Notes that work queued on `stream` so far uses the arena. vramp_kv_destroy then leaves its memory alone until
 * that work is over. Streams of commits and parks are noted anyway.
 */
vramp_status_t vramp_kv_record_use(vramp_allocator_t allocator,
                                   vramp_kv_t kv,
                                   vramp_stream_t stream);

/*
 * Returns what an arena has. Set `stats->struct_size` to `sizeof(vramp_kv_stats_t)` before. No driver call.
 *
 * What the caller promises:
 * `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_kv_stats(vramp_allocator_t allocator,
                              vramp_kv_t kv,
                              vramp_kv_stats_t *stats);

/*
 * Allocates pinned memory of the host, which the device reads and writes at the same address. Memory of zero bytes
 * has a unique address too. It is aligned to the power of two that its size is rounded up to, at least 512 bytes
 * and at most 4 KiB. Driver calls only where more memory is pinned, 128 MiB at a time: milliseconds. What is idle
 * is unpinned after some seconds, or with vramp_trim. On failure `*address` is set to null.
 *
 * What the caller promises:
 * `address` is null or valid for writing.
 */
vramp_status_t vramp_host_malloc(vramp_allocator_t allocator,
                                 size_t size,
                                 void **address);

/*
 * Records that work queued on a stream so far uses memory of vramp_host_malloc: once freed, it is allocated again
 * after that work. At most two driver calls.
 */
vramp_status_t vramp_host_record_use(vramp_allocator_t allocator,
                                     void *address,
                                     vramp_stream_t stream);

/*
 * Frees memory of vramp_host_malloc. Work that uses it is complete, or recorded with vramp_host_record_use. Never
 * waits. VRAMP_ERROR_UNKNOWN_POINTER for another address, which changes nothing.
 */
vramp_status_t vramp_host_free(vramp_allocator_t allocator,
                               void *address);

/*
 * Joins a group of processes that share a card, and ties the allocator to the budget: from then on its limit is
 * what is claimed, and a request that passes it claims what it lacks. Other processes get idle memory of the
 * allocator, and then what vramp_budget_on_reclaim frees. The budget ends with the allocator.
 *
 * VRAMP_ERROR_OPTION for amounts and names that cannot be; VRAMP_ERROR_OUT_OF_MEMORY if the others are guaranteed
 * too much; VRAMP_ERROR_TIMEOUT if they gave back too little; VRAMP_ERROR_IN_USE if the allocator has a budget, or
 * another process counts with another capacity. The message names the processes. Then the allocator is as before.
 *
 * What the caller promises:
 * `options` is null, or its first eight bytes hold a size that is valid for reading, and its texts are null or
 * zero-terminated.
 */
vramp_status_t vramp_budget_join(vramp_allocator_t allocator,
                                 const vramp_budget_options_t *options);

/*
 * Returns what the process can have. Some instructions and a system call for each member.
 *
 * What the caller promises:
 * `room` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_budget_room(vramp_allocator_t allocator, vramp_budget_room_t *room);

/*
 * Returns idle memory of the allocator to the card, and gives back what is claimed and not reserved beyond the
 * guarantee. Returns the bytes in `*given`, which may be null.
 *
 * What the caller promises:
 * `given` is null or valid for writing.
 */
vramp_status_t vramp_budget_give_back(vramp_allocator_t allocator,
                                      uint64_t *given);

/*
 * Registers `handler`, which is called with `user` when another process lacks memory and nothing is idle: the
 * place to free blocks. Handlers run in the order of registration, until enough is free.
 *
 * What the caller promises:
 * `handler` may be called from any thread with `user` until the allocator is closed. It does not unwind.
 */
vramp_status_t vramp_budget_on_reclaim(vramp_allocator_t allocator,
                                       vramp_reclaim_handler_t handler,
                                       void *user);

/*
 * Registers `handler`, which is called with `user` when a person or another program pauses or resumes this process's
 * memory: `vramp ctl pause`. It replaces an earlier one.
 *
 * What the caller promises:
 * `handler` may be called from any thread with `user` until the allocator is closed. It does not unwind.
 */
vramp_status_t vramp_budget_on_sleep(vramp_allocator_t allocator,
                                     vramp_sleep_handler_t handler,
                                     void *user);

/*
 * Names the keeper of a directory, which only the user may use. No message: whether one runs, other calls find out.
 * A keeper that is silent for `timeout_ns` nanoseconds in one of its answers is an error; zero is 5 s. Waits for
 * other processes have timeouts of their own. The handle ends with the allocator, or with vramp_keeper_close. Use
 * one for all memory: it has the thread that restores what is open when the keeper is started again.
 *
 * What the caller promises:
 * `directory` is null or zero-terminated; `keeper` is null or valid for writing.
 */
vramp_status_t vramp_keeper_open(vramp_allocator_t allocator,
                                 const char *directory,
                                 uint64_t timeout_ns,
                                 vramp_keeper_t *keeper);

/* Ends the handle of a keeper. Memory that was opened with it stays open, and the keeper runs on. */
vramp_status_t vramp_keeper_close(vramp_allocator_t allocator, vramp_keeper_t keeper);

/*
 * Writes at most `capacity` names of a keeper with their states, in the order of the names, and the number of all to
 * `*count`. Set `entries->struct_size` of the first to `sizeof(vramp_kept_entry_t)` before. With a `capacity` of
 * zero only the number is written.
 *
 * What the caller promises:
 * `entries` is null, or its first eight bytes hold a size, and `capacity` times that size is valid for reading and
 * writing; `count` is null or valid for writing.
 */
vramp_status_t vramp_keeper_entries(vramp_allocator_t allocator,
                                    vramp_keeper_t keeper,
                                    vramp_kept_entry_t *entries,
                                    size_t capacity,
                                    size_t *count);

/*
 * Removes a name. Processes that have its memory open keep it; otherwise it is freed. VRAMP_ERROR_NOT_KEPT if the
 * keeper has no such name.
 *
 * What the caller promises:
 * `name` is null or zero-terminated.
 */
vramp_status_t vramp_keeper_remove(vramp_allocator_t allocator,
                                   vramp_keeper_t keeper,
                                   const char *name);

/*
 * Frees memory of the allocator's card that no process has open, the lowest priority and the longest idle first,
 * until `bytes` were freed. `*freed` is how many were; it may be null.
 *
 * What the caller promises:
 * `freed` is null or valid for writing.
 */
vramp_status_t vramp_keeper_evict(vramp_allocator_t allocator,
                                  vramp_keeper_t keeper,
                                  uint64_t bytes,
                                  uint64_t *freed);

/*
 * Begins memory of a name: 1 to 200 letters, digits and `._/:-`. It becomes the name's memory with vramp_kept_commit,
 * as a whole. A second draft of a name waits for the first, for `timeout_ns` nanoseconds: vramp_kept_state says what
 * epoch and digest the name has then, so that of several processes that load the same one does. Reserves addresses;
 * memory comes with vramp_kept_place.
 *
 * VRAMP_ERROR_KEEPER if no keeper runs; VRAMP_ERROR_KEPT_BUSY at the timeout; VRAMP_ERROR_OUT_OF_MEMORY if the keeper's
 * limit has no room; VRAMP_ERROR_OPTION for names and amounts that cannot be. vramp_close waits for the call.
 *
 * What the caller promises:
 * `name` is null or zero-terminated; `options` is null, or its first eight bytes hold a size that is valid for
 * reading; `kept` is null or valid for writing.
 */
vramp_status_t vramp_kept_draft(vramp_allocator_t allocator,
                                vramp_keeper_t keeper,
                                const char *name,
                                const vramp_kept_options_t *options,
                                uint64_t timeout_ns,
                                vramp_kept_t *kept);

/*
 * Returns the address of `size` bytes of a draft, aligned to 512 bytes, behind what was placed before. Contents are
 * not defined: work of the card or of the host fills them. Without memory on the card it makes room as vramp_malloc
 * does. Five driver calls for each new part.
 *
 * On failure `*address` is set to null. VRAMP_ERROR_RANGE if the draft has fewer bytes left. VRAMP_ERROR_BUSY while
 * another call uses the draft, as in a handler that this one calls.
 *
 * What the caller promises:
 * `address` is null or valid for writing.
 */
vramp_status_t vramp_kept_place(vramp_allocator_t allocator,
                                vramp_kept_t kept,
                                size_t size,
                                void **address);

/*
 * Waits on the host for the work that was recorded, and makes a draft the memory of its name, which other processes
 * see as a whole. The handle and the addresses stay. `layout` says what lies where, in `length` bytes of the program's
 * own, and `digest`, 32 bytes, which contents these are; null is zeros.
 *
 * With a `writable` of 0 work of this process may only read it from now on, and the process has the lock for reading.
 * Otherwise it has the lock for writing.
 *
 * After an error the memory is this process's own, until it is closed. VRAMP_ERROR_RANGE if nothing was placed or the
 * layout is longer than 16 MiB.
 *
 * What the caller promises:
 * `layout` is null or valid for reading `length` bytes, `digest` null or valid for reading 32.
 */
vramp_status_t vramp_kept_commit(vramp_allocator_t allocator,
                                 vramp_kept_t kept,
                                 const void *layout,
                                 size_t length,
                                 const uint8_t *digest,
                                 int32_t writable);

/*
 * Opens the memory of a name. No copy; three driver calls for each part and two more. Without options it is mapped for
 * reading only, with the lock for reading, which is waited for `timeout_ns` nanoseconds at most.
 *
 * VRAMP_ERROR_NOT_KEPT if there is no such memory; VRAMP_ERROR_KEPT_BUSY at the timeout, with the processes that have the
 * lock; VRAMP_ERROR_TORN; VRAMP_ERROR_KEEPER if no keeper runs; VRAMP_ERROR_DEVICE for memory of another card.
 * vramp_close waits for the call.
 *
 * What the caller promises:
 * `name` is null or zero-terminated; `options` is null, or its first eight bytes hold a size that is valid for
 * reading; `kept` is null or valid for writing.
 */
vramp_status_t vramp_kept_open(vramp_allocator_t allocator,
                               vramp_keeper_t keeper,
                               const char *name,
                               const vramp_kept_open_options_t *options,
                               uint64_t timeout_ns,
                               vramp_kept_t *kept);

/*
 * Returns the state of kept memory. Set `state->struct_size` to `sizeof(vramp_kept_state_t)` before. No message and
 * no driver call.
 *
 * What the caller promises:
 * `state` is null, or its first eight bytes hold a size that is valid for reading and writing.
 */
vramp_status_t vramp_kept_state(vramp_allocator_t allocator,
                                vramp_kept_t kept,
                                vramp_kept_state_t *state);

/*
 * Copies the first `capacity` bytes of the publisher's layout to `layout`, and writes the number of all to `*length`.
 * No message.
 *
 * What the caller promises:
 * `layout` is null or valid for writing `capacity` bytes; `length` is null or valid for writing.
 */
vramp_status_t vramp_kept_layout(vramp_allocator_t allocator,
                                 vramp_kept_t kept,
                                 void *layout,
                                 size_t capacity,
                                 size_t *length);

/*
 * Records that work queued on `stream`, so far and from now on, uses kept memory: a commit, and what gives the lock
 * or the memory back, waits for it on the host. No driver call.
 */
vramp_status_t vramp_kept_record_use(vramp_allocator_t allocator,
                                     vramp_kept_t kept,
                                     vramp_stream_t stream);

/*
 * Closes kept memory: waits on the host for recorded work, unmaps it, and gives the lock back. The keeper goes on
 * keeping it. A draft is given up, and its memory is freed. If another thread is in a call on it, that call ends it.
 * If the wait fails, as while a recorded stream captures, it stays mapped until the process ends.
 */
vramp_status_t vramp_kept_close(vramp_allocator_t allocator,
                                vramp_kept_t kept);

/*
 * Takes the lock for reading, within `timeout_ns` nanoseconds. Returns the epoch in `*epoch`, which may be null. One
 * message each way, and none if the process has it. A close of the allocator does not wait for the call.
 *
 * VRAMP_ERROR_KEPT_BUSY at the timeout, with the processes that have the lock; VRAMP_ERROR_TORN; VRAMP_ERROR_KEEPER if
 * the process has the lock for writing.
 *
 * What the caller promises:
 * `epoch` is null or valid for writing.
 */
vramp_status_t vramp_kept_read(vramp_allocator_t allocator,
                               vramp_kept_t kept,
                               uint64_t timeout_ns,
                               uint64_t *epoch);

/*
 * Takes the lock for writing, within `timeout_ns` nanoseconds: other processes read the memory no more. Gives a lock
 * for reading back first, and has none after an error. Returns the epoch before in `*epoch`, which may be null.
 *
 * A process that ends with this lock, or closes the memory with it, leaves it torn: reading it is an error until a
 * process wrote all of it and committed. VRAMP_ERROR_UNSUPPORTED if it is mapped for reading only; otherwise as
 * vramp_kept_read.
 *
 * What the caller promises:
 * `epoch` is null or valid for writing.
 */
vramp_status_t vramp_kept_write(vramp_allocator_t allocator,
                                vramp_kept_t kept,
                                uint64_t timeout_ns,
                                uint64_t *epoch);

/*
 * Gives the lock for reading back, after it waited for recorded work. Other processes may write from now on.
 * VRAMP_ERROR_KEEPER if the process has the lock for writing.
 */
vramp_status_t vramp_kept_unlock(vramp_allocator_t allocator,
                                 vramp_kept_t kept);

/*
 * Lets a process that waits to write do so, and takes the lock for reading again after it, within `timeout_ns`
 * nanoseconds. For the moment between two steps: no message and no wait if none waits. Returns the epoch in `*epoch`,
 * which may be null. Errors are those of vramp_kept_read; without the lock the memory must not be read.
 *
 * What the caller promises:
 * `epoch` is null or valid for writing.
 */
vramp_status_t vramp_kept_yield_to_writer(vramp_allocator_t allocator,
                                          vramp_kept_t kept,
                                          uint64_t timeout_ns,
                                          uint64_t *epoch);

/*
 * Waits for recorded work, and makes what was written since vramp_kept_write the next epoch, whose number it returns
 * in `*epoch`, which may be null. `then` is the lock that the process has afterwards: VRAMP_KEPT_READ, VRAMP_KEPT_WRITE
 * or VRAMP_KEPT_UNLOCKED. VRAMP_ERROR_KEEPER without the lock for writing.
 *
 * What the caller promises:
 * `epoch` is null or valid for writing.
 */
vramp_status_t vramp_kept_commit_update(vramp_allocator_t allocator,
                                        vramp_kept_t kept,
                                        uint32_t then,
                                        uint64_t *epoch);

/* Gives the lock for writing back, if nothing was written: the epoch stays. */
vramp_status_t vramp_kept_release_unchanged(vramp_allocator_t allocator, vramp_kept_t kept);

/*
 * Waits until the name has a later epoch than `than`, in this memory or in other memory of the name, for `timeout_ns`
 * nanoseconds at most. Returns its number in `*epoch`, which may be null. VRAMP_ERROR_KEPT_BUSY at the timeout. A close
 * of the allocator does not wait for the call.
 *
 * What the caller promises:
 * `epoch` is null or valid for writing.
 */
vramp_status_t vramp_kept_wait_newer(vramp_allocator_t allocator,
                                     vramp_kept_t kept,
                                     uint64_t than,
                                     uint64_t timeout_ns,
                                     uint64_t *epoch);

/* Checks VRAMP_CONF and VRAMP_DEVICE, and opens nothing. */
vramp_status_t vramp_torch_check_settings(void);

/*
 * Allocates memory on PyTorch's global route. On failure it throws a C++ `std::runtime_error`; out
 * of memory, its message begins with "CUDA out of memory". In a process without libstdc++ it
 * prints the message and returns null.
 *
 * What the caller promises:
 * `stream` is null or a stream of the device that lives as long as the process uses the device,
 * and the caller is C++ that can catch the exception.
 */
void *vramp_torch_malloc(ptrdiff_t size, int device, void *stream);

/*
 * Allocates memory on PyTorch's MemPool route. Returns null on failure, which PyTorch converts to
 * `torch.OutOfMemoryError`. vramp_last_error() has the message. Failures other than out of memory
 * are printed.
 *
 * What the caller promises:
 * `stream` is null or a stream of the device that lives as long as the process uses the device.
 */
void *vramp_torch_pool_malloc(ptrdiff_t size, int device, void *stream);

/*
 * Frees memory of either route. An address that is null, unknown or free already is reported on
 * stderr and changes nothing. The size is ignored.
 *
 * What the caller promises:
 * `stream` is null or a stream of the device that lives as long as the process uses the device.
 */
void vramp_torch_free(void *address, size_t size, int device, void *stream);

/*
 * For `set_record_stream_fn`: records that work queued on `stream` so far uses the block.
 *
 * What the caller promises:
 * `stream` is null or a stream of the device that lives as long as the process uses the device.
 */
void vramp_torch_record_stream(void *address, void *stream);

/* For `set_init_fn`. Does nothing: devices are opened at their first use. */
void vramp_torch_init(int device_count);

/* For `set_reset_fn`, which `torch.cuda.empty_cache` calls: releases idle memory of all devices. */
void vramp_torch_reset(void);

/* For `set_memory_fraction_fn`: limits the allocator to this fraction of the device's memory. */
void vramp_torch_memory_fraction(double fraction, int device);

/*
 * For `set_base_alloc_fn`: returns the start and size of the block that contains an address. An
 * unknown address is reported on stderr and returned unchanged, with size 0.
 *
 * What the caller promises:
 * `size` is null or valid for writing.
 */
void *vramp_torch_base_alloc(void *address, size_t *size);

/*
 * For `set_begin_allocate_to_pool`, which PyTorch calls before it begins the capture of a graph:
 * allocations of the capture come from the pool's arena. If the arena cannot be created, they fail
 * with its error. The filter is neither called nor stored. The stream of the capture is known with its first
 * allocation or free: regions do not sleep from then on until its end. A caller that knows the stream calls
 * [`vramp_torch_capture_begins`] before.
 */
void vramp_torch_begin_pool(int device,
                            uint64_t pool_first,
                            uint64_t pool_second,
                            const void *filter);

/*
 * Notes that a capture is about to begin on a stream. From its begin to its end regions of the device do not
 * sleep: a pause is VRAMP_ERROR_REGION and names the stream. No driver call.
 *
 * What the caller promises:
 * `stream` is null or a stream of the device that lives as long as the process uses the device, or until
 * vramp_torch_stream_forget.
 */
vramp_status_t vramp_torch_capture_begins(int device,
                                          void *stream);

/* For `set_end_allocate_to_pool_fn`, which PyTorch calls after a successful capture. */
void vramp_torch_end_pool(int device, uint64_t pool_first, uint64_t pool_second);

/*
 * For `set_release_pool`, which PyTorch calls before it destroys a graph of a pool. With the last
 * graph, and the last live block of the pool, its memory is reused after all work queued by then
 * on the streams that vramp has adopted.
 */
void vramp_torch_release_pool(int device, uint64_t pool_first, uint64_t pool_second);

/*
 * Returns the allocator of a PyTorch device, for vramp_stats, vramp_audit and vramp_trim. Opens it
 * at the device's first use. It cannot be closed.
 *
 * What the caller promises:
 * `allocator` is null or valid for writing.
 */
vramp_status_t vramp_torch_allocator(int device, vramp_allocator_t *allocator);

/*
 * Allocates a block of any size, zero included, for work on `stream`. Never throws.
 *
 * What the caller promises:
 * `stream` is null or a stream of the device that lives as long as the process uses the device.
 * `block` is null or valid for writing.
 */
vramp_status_t vramp_torch_block_malloc(int device,
                                        uint64_t size,
                                        void *stream,
                                        vramp_torch_block_t *block);

/*
 * Frees a block on the stream that it was allocated for. `*block` describes it.
 * VRAMP_ERROR_UNKNOWN_POINTER if no block of any device begins at the address.
 *
 * What the caller promises:
 * `block` is null or valid for writing.
 */
vramp_status_t vramp_torch_block_free(void *address, vramp_torch_block_t *block);

/*
 * Describes the live block that begins at an address. VRAMP_ERROR_UNKNOWN_POINTER if there is none.
 *
 * What the caller promises:
 * `block` is null or valid for writing.
 */
vramp_status_t vramp_torch_block_find(void *address, vramp_torch_block_t *block);

/*
 * Records that work queued on `stream` so far uses a block. No driver call.
 *
 * What the caller promises:
 * `stream` is null or a stream of the device that lives as long as the process uses the device.
 */
vramp_status_t vramp_torch_block_record(void *address, void *stream);

/*
 * Describes the live block that contains an address. VRAMP_ERROR_UNKNOWN_POINTER if there is none.
 * O(n) in the blocks if the address lies more than 64 KiB behind the start.
 *
 * What the caller promises:
 * `block` is null or valid for writing.
 */
vramp_status_t vramp_torch_containing(void *address, vramp_torch_block_t *block);

/*
 * Forgets a stream of another library, which may be destroyed afterwards: memory that its work uses waits
 * for an event. Nothing if the device's allocator does not know the stream. VRAMP_ERROR_CAPTURE while it
 * captures a graph.
 */
vramp_status_t vramp_torch_stream_forget(int device,
                                         void *stream);

/*
 * Releases idle memory of all open devices to the driver. Waits on the host for queued work that uses
 * freed memory, as PyTorch does.
 */
vramp_status_t vramp_torch_trim(void);

/* Limits the allocator of a device to this fraction of the device's memory, from 0 to 1. */
vramp_status_t vramp_torch_set_fraction(int device, double fraction);

/*
 * Makes `observer` the one observer that PyTorch's class has of a device's allocator: it is called with
 * `user` for every event, from the first one of the device on. Opens no device. Null removes the observer
 * and waits for its calls in progress.
 *
 * What the caller promises:
 * `observer` may be called from any thread with `user` until a call with another observer or null has
 * returned. It does not unwind.
 */
vramp_status_t vramp_torch_observe(int device,
                                   vramp_observer_t observer,
                                   void *user);

/*
 * Returns 1 if the allocator of a device is open, and 0 if no memory of the device was used yet. Opens no
 * device.
 */
int vramp_torch_is_open(int device);

/*
 * Opens the allocator of a device with the options of VRAMP_CONF, if it is not open. After a failure
 * the call may be repeated with corrected options.
 */
vramp_status_t vramp_torch_open(int device);

/*
 * Grants device `device` access to the memory of device `owner`: what it has now and later, and what is open of
 * other processes. Opens no device. VRAMP_ERROR_OPTION where the option `peers` excludes it.
 */
vramp_status_t vramp_torch_enable_peer(int device,
                                       int owner);

/*
 * Returns the option `graph_pins`: 0 for `off`, 1 for `on`, 2 for `auto`.
 *
 * What the caller promises:
 * `mode` is null or valid for writing.
 */
vramp_status_t vramp_torch_graph_pins(int *mode);

/*
 * Keeps the memory of all live blocks of a device at its addresses, also after they are freed, until
 * vramp_torch_unpin is called for the pool. No driver call.
 */
vramp_status_t vramp_torch_pin_live(int device,
                                    uint64_t pool_first,
                                    uint64_t pool_second);

/* Ends what vramp_torch_pin_live began for a pool. */
vramp_status_t vramp_torch_unpin(int device, uint64_t pool_first, uint64_t pool_second);

/*
 * Allocates a segment for PyTorch's own allocator. Waits on the host for earlier work on its memory.
 *
 * What the caller promises:
 * `address` is null or valid for writing.
 */
vramp_status_t vramp_torch_segment_malloc(int device,
                                          uint64_t size,
                                          void **address);

/*
 * Allocates a segment for PyTorch's own allocator that is a plain allocation of the driver, or a part of one,
 * so that cudaIpcGetMemHandle takes its address. The caller's thread is in relaxed capture mode if a stream
 * captures. A line on stderr says so once. A thread in a region gets the region's memory.
 *
 * What the caller promises:
 * `address` is null or valid for writing.
 */
vramp_status_t vramp_torch_plain_malloc(int device,
                                        uint64_t size,
                                        void **address);

/*
 * Returns the option `ipc`: 0 for `off`, 1 for `legacy`, 2 for `auto`.
 *
 * What the caller promises:
 * `mode` is null or valid for writing.
 */
vramp_status_t vramp_torch_ipc(int *mode);

/*
 * Allocates a segment of one handle for PyTorch's own allocator: it never moves, and libraries can register and
 * export it.
 *
 * What the caller promises:
 * `address` is null or valid for writing.
 */
vramp_status_t vramp_torch_comm_malloc(int device,
                                       uint64_t size,
                                       void **address);

/*
 * VRAMP_ERROR_REGION if an address lies in a segment whose region sleeps: a block there must not be given
 * to a program.
 */
vramp_status_t vramp_torch_segment_awake(int device,
                                         const void *address);

/*
 * Returns the device of a segment. VRAMP_ERROR_UNKNOWN_POINTER if none begins at the address.
 *
 * What the caller promises:
 * `device` is null or valid for writing.
 */
vramp_status_t vramp_torch_segment_device(void *address, int *device);

/*
 * Frees a segment; `*size` is its size. With `may_be_in_use`, its memory is reused after all work that
 * is queued now on the streams of the device's allocator; otherwise no work uses it any more.
 *
 * What the caller promises:
 * `size` is null or valid for writing.
 */
vramp_status_t vramp_torch_segment_free(void *address,
                                        int may_be_in_use,
                                        uint64_t *size);

/*
 * Publishes the memory that contains an address for other processes of the user, and returns a ticket. It
 * is withdrawn when the memory is freed. VRAMP_ERROR_UNKNOWN_POINTER for memory that is not vramp's.
 *
 * What the caller promises:
 * `ticket` is null or valid for writing.
 */
vramp_status_t vramp_torch_share(void *address,
                                 vramp_torch_ticket_t *ticket);

/*
 * Opens the memory of a ticket for work of a device. Waits for the process that published it.
 *
 * What the caller promises:
 * `ticket` is null or has `length` readable bytes. `opened` is null or valid for writing.
 */
vramp_status_t vramp_torch_share_open(int device,
                                      const uint8_t *ticket,
                                      uint64_t length,
                                      vramp_torch_opened_t *opened);

/*
 * Closes memory of another process. All work on it is over, and seen to be. A failure is also printed:
 * destructors call this.
 */
vramp_status_t vramp_torch_share_close(uint64_t number);

/*
 * Writes a line of text about a device that is open: how its memory can be shared, and with which devices it is.
 * Empty if the device is not open. The text ends with a zero, and is cut after `capacity` bytes.
 *
 * What the caller promises:
 * `text` is null or has `capacity` writable bytes.
 */
vramp_status_t vramp_torch_sharing_text(int device,
                                        char *text,
                                        uint64_t capacity);

/*
 * Counts what PyTorch shares with other processes now.
 *
 * What the caller promises:
 * `shared` is null or valid for writing.
 */
vramp_status_t vramp_torch_shared(vramp_torch_shared_t *shared);

/*
 * Returns what PyTorch's statistics need of a device: zeros if it was not used.
 *
 * What the caller promises:
 * `memory` is null or valid for writing.
 */
vramp_status_t vramp_torch_memory(int device, vramp_torch_memory_t *memory);

/*
 * Returns the physical memory that a device's allocator and its regions have reserved, in bytes: zero if it
 * was not used. Memory of a region that sleeps is not reserved. At most one driver call.
 *
 * What the caller promises:
 * `reserved` is null or valid for writing.
 */
vramp_status_t vramp_torch_reserved(int device,
                                    uint64_t *reserved);

/*
 * Calls `visitor` for each part of a device's reserved memory, by address. There is none if it was not
 * used. No lock is held.
 *
 * What the caller promises:
 * `visitor` may be called with `user` on this thread until the call returns, and does not unwind.
 */
vramp_status_t vramp_torch_visit(int device,
                                 vramp_torch_visitor_t visitor,
                                 void *user);

/* Resets the peaks of a device, if it was used. */
vramp_status_t vramp_torch_reset_peaks(int device);

#ifdef __cplusplus
}
#endif

#endif  /* VRAMP_H */
