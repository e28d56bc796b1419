//! What an arena for caches decides, without a device.

pub(super) mod geometry;
pub(super) mod pages;

#[cfg(test)]
mod twin;
