//! Regions by tag: scopes, pauses and resumes.

mod moving;
mod wrong_calls;
