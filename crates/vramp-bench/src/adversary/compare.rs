//! The rows of one pattern side by side.

use vramp::peers::Preset;

use super::{Goal, Pattern, Row};

/// Memory may be this much above the best of the other allocators.
const MEMORY: f64 = 1.02;
/// Driver time is compared with allocators whose memory is at most this much larger.
const SIMILAR_MEMORY: f64 = 1.05;
/// Driver time may be this many times that of the best of them.
const DRIVER_TIME: f64 = 2.0;

/// What is best in a pattern, by one figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// The least reserved memory.
    Memory,
    /// The least time in driver calls.
    DriverTime,
    /// The least host time outside driver calls.
    HostTime,
}

impl Figure {
    /// Every figure.
    pub const ALL: [Figure; 3] = [Figure::Memory, Figure::DriverTime, Figure::HostTime];

    /// Returns its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Figure::Memory => "memory",
            Figure::DriverTime => "driver time",
            Figure::HostTime => "host time",
        }
    }

    fn of(self, row: &Row) -> f64 {
        match self {
            Figure::Memory => row.peak_reserved_bytes as f64,
            Figure::DriverTime => row.driver_ns as f64,
            Figure::HostTime => row.request_host_ns,
        }
    }
}

/// Returns the figures in which `row` is the best of `rows`, which are of one pattern. Allocators
/// that failed more requests than another one are the best in nothing.
pub fn best_in(row: &Row, rows: &[Row]) -> Vec<Figure> {
    let failed = rows.iter().map(|row| row.failed).min();
    if Some(row.failed) != failed {
        return Vec::new();
    }
    let rivals = || rows.iter().filter(|rival| Some(rival.failed) == failed);
    let is_best = |figure: &Figure| rivals().all(|rival| figure.of(row) <= figure.of(rival));
    Figure::ALL.into_iter().filter(is_best).collect()
}

/// One promise that the default allocator does not keep in a pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct Miss {
    /// The figure, if it is one of those compared in every pattern.
    pub figure: Option<Figure>,
    /// The promise and the values.
    pub text: String,
}

/// Returns the promises that the default allocator does not keep in `pattern`, whose rows are
/// `rows`. Promises that need another allocator's row count as kept without it.
pub fn misses(pattern: &Pattern, rows: &[Row]) -> Vec<Miss> {
    let Some(own) = rows.iter().find(|row| row.allocator == Preset::Vramp.name()) else {
        return Vec::new();
    };
    let mut misses = Vec::new();
    misses.extend(memory(own, rows));
    misses.extend(driver_time(own, rows));
    let goals = pattern.goals.iter().filter_map(|goal| goal.missed(own, rows));
    misses.extend(goals.map(|text| Miss { figure: None, text }));
    misses
}

/// Allocators that served as many requests: others had less memory to hold.
fn rivals<'a>(own: &'a Row, rows: &'a [Row]) -> impl Iterator<Item = &'a Row> {
    let is_other = |row: &&Row| row.allocator != own.allocator;
    rows.iter().filter(is_other).filter(|row| row.failed <= own.failed)
}

fn memory(own: &Row, rows: &[Row]) -> Option<Miss> {
    let best = rivals(own, rows).min_by_key(|row| row.peak_reserved_bytes)?;
    let ratio = |row: &Row| own.peak_reserved_bytes as f64 / row.peak_reserved_bytes.max(1) as f64;
    if ratio(best) <= MEMORY {
        return None;
    }
    let mut text = format!("{:.2} times the memory of {}", ratio(best), best.allocator);
    // The simulated pool of the driver never fragments: the next one says more.
    if best.allocator == Preset::StreamOrdered.name()
        && let Some(next) = rivals(own, rows)
            .filter(|row| row.allocator != best.allocator)
            .min_by_key(|row| row.peak_reserved_bytes)
    {
        text.push_str(&format!(", {:.2} times that of {}", ratio(next), next.allocator));
    }
    Some(Miss { figure: Some(Figure::Memory), text })
}

fn driver_time(own: &Row, rows: &[Row]) -> Option<Miss> {
    let most = own.peak_reserved_bytes as f64 * SIMILAR_MEMORY;
    let similar = rivals(own, rows).filter(|row| row.peak_reserved_bytes as f64 <= most);
    let best = similar.min_by_key(|row| row.driver_ns)?;
    let ratio = own.driver_ns as f64 / best.driver_ns.max(1) as f64;
    (ratio > DRIVER_TIME).then(|| Miss {
        figure: Some(Figure::DriverTime),
        text: format!("{ratio:.1} times the driver time of {}", best.allocator),
    })
}

impl Goal {
    /// Returns the promise in words.
    pub fn text(self) -> String {
        match self {
            Goal::NoDriverCalls => "no driver call after the warm-up".to_owned(),
            Goal::NoFailure => "no failed request".to_owned(),
            Goal::LooksAt(most) => format!("looks at {most} table entries a request at most"),
            Goal::Ratio(most) => format!("reserved/live at most {most}"),
            Goal::ReservedAsLittleAs(rival) => format!("reserved at most {}'s", rival.name()),
            Goal::FailsAsRarelyAs(rival, 0) => format!("failed at most {}'s", rival.name()),
            Goal::FailsAsRarelyAs(rival, more) => {
                format!("failed at most {}'s and {more}", rival.name())
            }
        }
    }

    /// Returns the promise with the values if it is not kept.
    fn missed(self, own: &Row, rows: &[Row]) -> Option<String> {
        let of = |rival: Preset| rows.iter().find(|row| row.allocator == rival.name());
        let values = match self {
            Goal::NoDriverCalls if own.driver_calls_warm > 0 => own.driver_calls_warm.to_string(),
            Goal::NoFailure if own.failed > 0 => own.failed.to_string(),
            Goal::LooksAt(most) if own.request_looked_at > most => {
                format!("{:.1}", own.request_looked_at)
            }
            Goal::Ratio(most) if own.reserved_over_live > most => {
                format!("{:.3}", own.reserved_over_live)
            }
            Goal::ReservedAsLittleAs(rival) => {
                let rival = of(rival)?;
                if own.peak_reserved_bytes <= rival.peak_reserved_bytes {
                    return None;
                }
                let ratio = own.peak_reserved_bytes as f64 / rival.peak_reserved_bytes as f64;
                format!("{ratio:.3} times")
            }
            Goal::FailsAsRarelyAs(rival, more) => {
                let rival = of(rival)?;
                if own.failed <= rival.failed + more {
                    return None;
                }
                format!("{} against {}", own.failed, rival.failed)
            }
            _ => return None,
        };
        Some(format!("{}: {values}", self.text()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a row of the pattern `p`.
    pub fn row(allocator: &'static str, reserved: u64, driver_ns: u64, failed: u64) -> Row {
        Row {
            pattern: "p".to_owned(),
            allocator,
            seed: 1,
            mallocs: 10,
            failed,
            pairs: 10,
            peak_live_bytes: 1000,
            peak_reserved_bytes: reserved,
            reserved_over_live: reserved as f64 / 1000.0,
            driver_calls: 5,
            driver_calls_warm: 3,
            driver_ns,
            driver_ns_warm: 0,
            waits_warm: 0,
            records_warm: 0,
            queries_warm: 0,
            synchronizations: 0,
            request_looked_at: 1.5,
            request_host_ns: 1.0,
            calls: [].into(),
        }
    }

    fn missed(goals: &[Goal], rows: &[Row]) -> Vec<String> {
        let mut pattern = Pattern::new("p", "nothing", |_| Ok(()));
        pattern.goals = goals.to_vec();
        misses(&pattern, rows).into_iter().map(|miss| miss.text).collect()
    }

    #[test]
    fn the_best_is_the_least_among_those_that_served_the_most() {
        let rows = [row("vramp", 1010, 90, 0), row("vpmm", 1000, 95, 0), row("torch", 900, 1, 1)];
        assert_eq!(best_in(&rows[0], &rows), [Figure::DriverTime, Figure::HostTime]);
        assert_eq!(best_in(&rows[1], &rows), [Figure::Memory, Figure::HostTime]);
        assert_eq!(best_in(&rows[2], &rows), []);
    }

    #[test]
    fn memory_is_compared_with_all_and_driver_time_with_those_of_similar_memory() {
        let own = || row("vramp", 1020, 200, 0);
        assert_eq!(missed(&[], &[own(), row("vpmm", 1000, 100, 0)]), [""; 0]);
        let wasteful = row("torch", 1072, 1, 0);
        assert_eq!(missed(&[], &[own(), wasteful]), [""; 0]);
        let failing = row("torch", 500, 1, 1);
        assert_eq!(missed(&[], &[own(), failing]), [""; 0]);
        assert_eq!(
            missed(&[], &[own(), row("vpmm", 999, 99, 0), row("torch", 1071, 98, 0)]),
            ["1.02 times the memory of vpmm", "2.0 times the driver time of torch"]
        );
        let driver = row("stream-ordered", 1000, 900, 0);
        assert_eq!(
            missed(&[], &[row("vramp", 1500, 200, 0), driver, row("torch", 1200, 900, 0)]),
            ["1.50 times the memory of stream-ordered, 1.25 times that of torch"]
        );
    }

    #[test]
    fn a_missed_goal_has_its_values() {
        let rows = [row("vramp", 1000, 1, 5), row("vpmm", 990, 1, 2), row("torch", 1, 1, 9)];
        let goals = [
            Goal::NoDriverCalls,
            Goal::NoFailure,
            Goal::LooksAt(1.0),
            Goal::LooksAt(2.0),
            Goal::Ratio(1.0),
            Goal::Ratio(0.9),
            Goal::ReservedAsLittleAs(Preset::Vpmm),
            Goal::ReservedAsLittleAs(Preset::TorchExpandable),
            Goal::FailsAsRarelyAs(Preset::Vpmm, 2),
            Goal::FailsAsRarelyAs(Preset::Vpmm, 3),
        ];
        assert_eq!(
            missed(&goals, &rows),
            [
                "no driver call after the warm-up: 3",
                "no failed request: 5",
                "looks at 1 table entries a request at most: 1.5",
                "reserved/live at most 0.9: 1.000",
                "reserved at most vpmm's: 1.010 times",
                "failed at most vpmm's and 2: 5 against 2",
            ]
        );
    }
}
