//! Regions by tag: scopes, pauses and resumes.

mod closing;
mod failing;
mod moving;
mod wrong_calls;
