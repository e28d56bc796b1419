//! Tests of `vramp-alloc` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attached_captures;
mod captures;
mod common;
mod driver_calls;
mod faults;
mod graph_arenas;
mod graph_faults;
mod graph_lending;
mod graph_mistakes;
mod hazards;
mod hits;
mod hosted;
mod random_graphs;
mod random_streams;
mod rmm_anchors;
mod shortage;
mod stable;
mod statistics;
mod torch_anchors;
mod torch_pool_anchors;
mod torch_snapshot_anchors;
mod torture;
mod trim;
mod vpmm_anchors;
mod vpmm_defects;
mod vpmm_walkthrough;
