mod extents;

use vramp_core::Bytes;

use super::extents::ExtentError;
use super::*;

fn b(count: u64) -> Bytes {
    Bytes::new(count)
}
