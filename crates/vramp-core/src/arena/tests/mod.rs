//! The arena's rules.
