//! Measured links.
