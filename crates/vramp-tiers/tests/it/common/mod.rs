//! What several tests share.

pub mod blocks;
pub mod faulty;
