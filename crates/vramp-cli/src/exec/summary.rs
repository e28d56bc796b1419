//! What is printed at the end: the report of each process, and what was recorded of it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use vramp::Bytes;
use vramp_analysis::number::plural;

use crate::text::printable;

/// One line for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    text: String,
    is_error: bool,
}

impl Line {
    /// What a process did.
    pub fn of(pid: u64, program: &str, text: String) -> Line {
        let space = if program.is_empty() { "" } else { " " };
        Line { text: format!("{program}{space}(process {pid}): {text}"), is_error: false }
    }

    /// What went wrong, printed with `--quiet` too.
    pub fn error(text: String) -> Line {
        Line { text, is_error: true }
    }
}

/// Prints lines to standard error. If it is closed, nothing is lost but these.
pub(super) fn print(lines: &[Line], quiet: bool) {
    for line in lines.iter().filter(|line| line.is_error || !quiet) {
        let _ = writeln!(io::stderr(), "vramp exec: {}", printable(&line.text));
    }
}

/// What a process left in its report.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    devices: BTreeMap<u64, Device>,
    served: u64,
    failed: u64,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Device {
    held: u64,
    held_peak: u64,
    reserved_peak: Option<u64>,
}

/// Returns the reports that processes left in a folder, as lines in the order of their ids.
pub(super) fn reports(folder: &Path) -> Vec<Line> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let read = |path: &Path| {
        let pid = path.file_name()?.to_str()?.strip_suffix(".report")?.parse().ok()?;
        Some((pid, Report::parse(&fs::read_to_string(path).ok()?)))
    };
    let reports: BTreeMap<u64, Report> = entries.filter_map(|it| read(&it.path())).collect();
    reports.iter().flat_map(|(&pid, report)| report.lines(pid)).collect()
}

impl Report {
    /// Reads lines `key value`. Those after `device N` are about that device. Others are left out: a later
    /// library may write more.
    fn parse(text: &str) -> Report {
        let mut report = Report::default();
        let mut unnamed = Device::default();
        let mut current = None;
        for line in text.lines() {
            let Some((key, value)) = line.split_once(' ') else { continue };
            let Ok(number) = value.trim().parse::<u64>() else { continue };
            if key == "device" {
                current = Some(number);
            }
            let device = match current {
                Some(number) => report.devices.entry(number).or_default(),
                None => &mut unnamed,
            };
            match key {
                "held" => device.held = number,
                "held_peak" => device.held_peak = number,
                "pool_reserved_peak" => device.reserved_peak = Some(number),
                "served" => report.served = number,
                "failed" => report.failed = number,
                _ => {}
            }
        }
        report
    }

    fn lines(&self, pid: u64) -> Vec<Line> {
        let of_device = |(number, device): (&u64, &Device)| {
            let mut text =
                format!("held at most {} on device {number}", Bytes::new(device.held_peak));
            if let Some(reserved) = device.reserved_peak {
                text += &format!(", for which the pool reserved {}", Bytes::new(reserved));
            }
            if device.held > 0 {
                text += &format!("; {} were not freed", Bytes::new(device.held));
            }
            Line::of(pid, "", text)
        };
        let mut lines: Vec<Line> = self.devices.iter().map(of_device).collect();
        if self.served + self.failed > 0 {
            let count = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
            let mut text = format!("{} served by the pool", plural(count(self.served), "request"));
            if self.failed > 0 {
                text += &format!(", {} failed", count(self.failed));
            }
            lines.push(Line::of(pid, "", text));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_line_for_each_device() {
        let report = Report::parse(
            "device 0\nheld 0\nheld_peak 1073741824\npool_live_peak 5\npool_reserved_peak 2147483648\n\
             device 2\nheld 1024\nheld_peak 2048\nbroken\nkey x\nserved 7\nfailed 1\n",
        );
        let lines: Vec<String> = report.lines(9).into_iter().map(|line| line.text).collect();
        assert_eq!(
            lines,
            [
                "(process 9): held at most 1.00 GiB on device 0, for which the pool reserved 2.00 GiB",
                "(process 9): held at most 2.00 KiB on device 2; 1.00 KiB were not freed",
                "(process 9): 7 requests served by the pool, 1 failed",
            ]
        );
        assert_eq!(Report::parse("held_peak 5"), Report::default());
    }
}
