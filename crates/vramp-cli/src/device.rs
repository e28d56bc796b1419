//! The devices that commands run on.

use std::io::{self, Write};

pub use vramp_bench::{Device, FreshDevice};

/// Says on standard error which card is simulated because `auto` found none.
pub(crate) fn announce(device: &Device) {
    if let Some(notice) = notice(device) {
        // If standard error is closed, the result is printed without the notice.
        let _ = writeln!(io::stderr(), "{notice}");
    }
}

/// Returns the line that says which card is simulated because `auto` found none. `None` for a card,
/// or a simulated one that was named. `vramp info` shows the reason.
fn notice(device: &Device) -> Option<String> {
    device.fell_back().map(|_| simulating(&device.info().name))
}

/// Returns the line for a simulated card of this name.
pub(crate) fn simulating(name: &str) -> String {
    let card = name.trim_start_matches("NVIDIA ").trim_end_matches(" (simulated)");
    format!("No CUDA device found; simulating an {card} (choose one with --device sim:CARD)")
}
