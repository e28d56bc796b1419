//! The only place that reads the environment.
//!
//! - `VRAMP_CONF` and `VRAMP_DEVICE`, for PyTorch (`torch/settings.rs`); `VRAMP_DEVICE` also for the device `auto`
//!   (`device.rs`).
//! - `VRAMP_IPC_DIRECTORY`, for the socket of exports (`exchange.rs`).
//! - The variables of the projects whose allocators are presets, where that preset is asked for:
//!   VPMM's and PyTorch's own (`Config::with_variables`). Options take precedence.

use std::ffi::OsString;

/// Returns a variable's value.
pub(crate) fn raw_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// Returns a variable's value as text. What is not UTF-8 is replaced, so that it is refused as what
/// it is a value of.
pub(crate) fn variable(name: &str) -> Option<String> {
    raw_variable(name).map(|value| value.to_string_lossy().into_owned())
}
