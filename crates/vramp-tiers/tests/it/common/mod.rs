//! What several tests share.

pub mod blocks;
pub mod budget;
pub mod child;
pub mod faulty;
pub mod reserving;
