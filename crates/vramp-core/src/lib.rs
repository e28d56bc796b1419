//! placeholder, being written
#![forbid(unsafe_code)]

mod bytes;

pub use bytes::{AddrRange, Bytes, DeviceAddr, ParseBytesError};
