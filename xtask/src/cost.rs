//! What commands cost: processor time and wall time.

use std::fmt;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// A cost, or a sum of costs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Of all processors, in user and system mode.
    pub cpu: Duration,
    pub wall: Duration,
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.cpu += other.cpu;
        self.wall += other.wall;
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU {:7.1} s, wall {:7.1} s", self.cpu.as_secs_f64(), self.wall.as_secs_f64())
    }
}

/// Measures what this program and the programs that it ran cost.
pub struct Watch {
    cpu: Duration,
    start: Instant,
}

impl Watch {
    pub fn start() -> Result<Watch> {
        Ok(Watch { cpu: spent()?, start: Instant::now() })
    }

    /// The cost since the start.
    pub fn read(&self) -> Result<Cost> {
        Ok(Cost { cpu: spent()?.saturating_sub(self.cpu), wall: self.start.elapsed() })
    }
}

/// Processor time of this process and of its children that ended, theirs included.
fn spent() -> Result<Duration> {
    let path = "/proc/self/stat";
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    ticks(&text).with_context(|| format!("{path} has no times: {text}"))
}

/// The sum of utime, stime, cutime and cstime of a line of `/proc/PID/stat`, in proc(5)'s words.
fn ticks(stat: &str) -> Option<Duration> {
    /// Linux shows times in units of a hundredth of a second, whatever its clock does.
    const TICK: Duration = Duration::from_millis(10);
    // The name of the program is in parentheses and may have spaces.
    let fields = stat.rsplit_once(')')?.1.split_whitespace();
    let times: Vec<u32> = fields.skip(11).take(4).map_while(|field| field.parse().ok()).collect();
    (times.len() == 4).then(|| TICK * times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_a_line_of_proc() {
        let line = "7 (a (b) c) S 1 7 7 0 -1 4194304 9 9 0 0 100 20 3000 400 20 0 1 0 5 6 7";
        assert_eq!(ticks(line), Some(Duration::from_millis(35_200)));
        assert_eq!(ticks("7 (a) S 1 2"), None);
    }

    #[test]
    fn programs_that_ran_are_counted() {
        let watch = Watch::start().unwrap();
        let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done";
        crate::shell::run(std::process::Command::new("sh").args(["-c", busy])).unwrap();
        let cost = watch.read().unwrap();
        assert!(cost.cpu > Duration::ZERO && cost.wall > Duration::ZERO, "{cost}");
    }
}
