//! The types of arenas for caches, with their C names.
#![allow(non_camel_case_types, reason = "these are the names of the C interface")]

/// Arrangement of tensors: one behind the other, each contiguous. What most kernels want.
pub const VRAMP_KV_SEPARATE: u32 = 0;
/// Arrangement of tensors: the same page of all of them side by side. A page of all tensors is one handle.
pub const VRAMP_KV_INTERLEAVED: u32 = 1;

/// Handle of an arena for caches. Zero is none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_kv_t {
    /// Opaque. May be compared.
    pub id: u64,
}

/// Consecutive pages of an arena for caches, the same ones of all its tensors.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct vramp_kv_pages_t {
    /// The first page. They are counted from zero.
    pub first: u32,
    /// The page behind the last.
    pub end: u32,
}

/// Layout and settings of an arena for caches, for vramp_kv_create. Set the struct to zero before. Amounts are
/// in bytes, and zero is the default. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_kv_options_t {
    /// Set by the caller to `sizeof(vramp_kv_options_t)`.
    pub struct_size: u64,
    /// Number of tensors, which get memory together: keys and values of all layers.
    pub tensors: u32,
    /// Where they lie: VRAMP_KV_SEPARATE or VRAMP_KV_INTERLEAVED.
    pub arrangement: u32,
    /// Length of each tensor, rounded up to whole pages.
    pub bytes_each: u64,
    /// Page of a tensor: a multiple of the device's. 2 MiB.
    pub page: u64,
    /// Longest handle: neighbours that are committed at once share one, and it goes back once none of them is
    /// in use. A page.
    pub superpage: u64,
    /// Most memory of the arena, parked pages included. None.
    pub limit: u64,
    /// Most memory that a thread of the arena makes ready before it is needed. None, and no thread.
    pub ahead: u64,
}

/// What an arena for caches has. Pages count once for all tensors. Later versions add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct vramp_kv_stats_t {
    /// Set by the caller to `sizeof(vramp_kv_stats_t)`, as in vramp_stats_t.
    pub struct_size: u64,
    /// Pages of each tensor.
    pub pages: u32,
    /// Pages in use.
    pub committed: u32,
    /// Pages that are mapped and not in use.
    pub parked: u32,
    /// Pages that threads are giving memory to.
    pub moving: u32,
    /// Bytes of one page in all tensors.
    pub page_bytes: u64,
    /// Limit in bytes; zero without one.
    pub limit: u64,
}
