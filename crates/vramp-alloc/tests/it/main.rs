//! Tests of `vramp-alloc` through its public interface, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod addresses;
mod budget;
mod callbacks;
mod captures;
mod common;
mod device_names;
mod driver_calls;
mod ends;
mod faults;
mod graph_arenas;
mod graph_lending;
mod graph_mistakes;
mod graph_scale;
mod growth;
mod hazards;
mod hits;
mod hostile;
mod kv;
mod kv_ends;
mod limits;
mod random_kept;
mod random_sharing;
mod rmm_peers;
mod sharing;
mod shortage;
mod sleeping;
mod slow_streams;
mod stable;
mod statistics;
mod thread_streams;
mod torch_peers;
mod trim;
mod vpmm_defects;
mod vpmm_peers;
mod vpmm_small;
