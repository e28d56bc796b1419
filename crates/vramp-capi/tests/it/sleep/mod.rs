//! Regions by tag: scopes, pauses and resumes.

mod closing;
mod disk;
mod failing;
mod moving;
mod wrong_calls;
