//! Time that the processes of a machine share.

use rustix::time::{ClockId, clock_gettime};

/// Returns nanoseconds since the machine started, at least 1.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, rest) = (now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned());
    seconds.wrapping_mul(1_000_000_000).wrapping_add(rest).max(1)
}

/// Returns milliseconds since the machine started.
pub fn now_ms() -> u64 {
    now_ns() / 1_000_000
}
