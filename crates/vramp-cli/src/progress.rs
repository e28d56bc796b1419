//! What a command shows while it computes: on standard error, and nothing where that is no terminal.

use std::fmt::Display;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use vramp_trace::Workload;

use crate::text::{name, printable};

/// Returns the bar of a replay, which counts requests.
pub(crate) fn of_replay(allocator: &str, workload: &Workload) -> ProgressBar {
    let bar = ProgressBar::new(workload.requests.len() as u64);
    let style = ProgressStyle::with_template("{msg} {wide_bar} {human_pos}/{human_len} {eta}");
    bar.set_style(style.expect("the template is well formed"));
    bar.set_message(format!("{} on {allocator}", name(&workload.name)));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Shows until it is dropped what is computed, and for how long.
pub(crate) struct Busy(ProgressBar);

impl Busy {
    /// Begins to show `what`, such as "reading job.pickle".
    pub(crate) fn with(what: impl Display) -> Busy {
        let style = ProgressStyle::with_template("{msg} ... {elapsed}");
        let style = style.expect("the template is well formed");
        let bar = ProgressBar::new_spinner().with_style(style);
        let bar = bar.with_message(printable(&what.to_string()));
        bar.enable_steady_tick(Duration::from_secs(1));
        Busy(bar)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
