//! vramp
#![forbid(unsafe_code)]

pub use vramp_alloc::*;
#[cfg(feature = "defer")]
pub use vramp_defer as defer;
#[cfg(feature = "tiers")]
pub use vramp_tiers as tiers;
