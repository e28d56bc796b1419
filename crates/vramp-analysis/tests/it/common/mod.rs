//! What several tests share.

pub mod made_job;
pub mod remedies;
