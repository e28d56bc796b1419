//! Log of driver calls, for tests that assert the calls of an operation.

use std::collections::VecDeque;
use std::fmt;

use vramp_core::{Bytes, DeviceAddr};

use crate::{Call, Stream};

/// A logged driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedCall {
    /// Kind of call.
    pub call: Call,
    /// Address argument, if any. Returned addresses are not logged.
    pub at: Option<DeviceAddr>,
    /// Length argument, if any.
    pub len: Option<Bytes>,
    /// Stream argument, if any.
    pub stream: Option<Stream>,
    /// Error code, if the call failed.
    pub error: Option<i32>,
}

impl LoggedCall {
    pub(super) fn new(call: Call) -> LoggedCall {
        LoggedCall { call, at: None, len: None, stream: None, error: None }
    }

    pub(super) fn at(mut self, at: DeviceAddr) -> LoggedCall {
        self.at = Some(at);
        self
    }

    pub(super) fn len(mut self, len: Bytes) -> LoggedCall {
        self.len = Some(len);
        self
    }

    pub(super) fn on(mut self, stream: Stream) -> LoggedCall {
        self.stream = Some(stream);
        self
    }
}

impl fmt::Display for LoggedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.call)?;
        if let Some(at) = self.at {
            write!(f, " {at}")?;
        }
        if let Some(len) = self.len {
            write!(f, " {len}")?;
        }
        if let Some(stream) = self.stream {
            write!(f, " on stream {}", stream.number())?;
        }
        if let Some(code) = self.error {
            write!(f, " failed ({code})")?;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct Log {
    /// Number of calls to keep; the oldest are dropped first.
    capacity: usize,
    calls: VecDeque<LoggedCall>,
}

impl Log {
    pub fn keeping(capacity: usize) -> Log {
        Log { capacity, calls: VecDeque::new() }
    }

    pub fn push(&mut self, call: LoggedCall) {
        if self.capacity == 0 {
            return;
        }
        if self.calls.len() == self.capacity {
            self.calls.pop_front();
        }
        self.calls.push_back(call);
    }

    pub fn take(&mut self) -> Vec<LoggedCall> {
        std::mem::take(&mut self.calls).into()
    }
}
