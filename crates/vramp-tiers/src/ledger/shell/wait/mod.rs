//! How requests wait: from the builder to how the wait ended.

mod cancel;
#[cfg(all(test, loom))]
mod models;
mod request;
mod slot;

pub use cancel::CancelToken;
pub use request::{Deadline, RequestBuilder};
pub(crate) use slot::WaitSlot;
