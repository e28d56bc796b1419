//! Tests of the caching allocator on paper.
