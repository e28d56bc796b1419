//! Upper bounds of the default allocator's counts, in a file with one line for each pattern.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde::Deserialize;
use vramp::peers::Preset;

use super::{Pattern, Row};

const HEAD: &str = "\
# Upper bounds of what each pattern of `vramp bench adversary` costs the allocator `vramp` on sim:h200,
# which CI checks. After a change that is better in sum, write them anew:
#
#     cargo run --release -p vramp-cli -- bench adversary --allocator vramp --device sim:h200 \\
#         --bounds bench/adversary-bounds.toml --write
#
# failed        requests that failed
# driver_calls  driver calls after the warm-up
# waits         waits of one stream for another after the warm-up
# ratio         peak reserved memory over peak live memory
# driver_us     modelled time in all driver calls
# looked_at     table entries that a malloc or free looks at after the warm-up
# goal          what is promised beside memory within 2 % of the best allocator's and driver time
#               within twice that of the best of similar memory
#
# Written values are rounded up to two digits. Real threads differ from run to run: only their failed
# requests are held.

";

/// Bounds of every pattern.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bounds(BTreeMap<String, Bound>);

/// Bounds of one pattern; `None` for figures that are not held.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bound {
    failed: u64,
    driver_calls: Option<u64>,
    waits: Option<u64>,
    ratio: Option<f64>,
    driver_us: Option<u64>,
    looked_at: Option<f64>,
    #[serde(default)]
    goal: String,
}

impl Bounds {
    /// Reads the lines of a file.
    ///
    /// # Errors
    /// A line is not as [`Bounds::text`] writes it.
    pub fn parse(text: &str) -> Result<Bounds> {
        Ok(Bounds(toml::from_str(text).context("the bounds cannot be read")?))
    }

    /// Returns the text of the file: a line for each of `patterns` with bounds, in their order.
    pub fn text(&self, patterns: &[Pattern]) -> String {
        let mut text = HEAD.to_owned();
        for pattern in patterns {
            if let Some(bound) = self.0.get(&pattern.name) {
                let _ = writeln!(text, "\"{}\" = {}", pattern.name, bound.text());
            }
        }
        text
    }

    /// Sets the bounds of a pattern to the figures of `row`, rounded up.
    pub fn set(&mut self, pattern: &Pattern, row: &Row) {
        self.0.insert(pattern.name.clone(), Bound::of(pattern, row));
    }

    /// Returns true for rows of the allocator that has bounds.
    pub fn are_of(&self, row: &Row) -> bool {
        row.allocator == Preset::Vramp.name()
    }

    /// Returns a sentence for each figure of `row` above its bound. Rows of other allocators have
    /// no bounds.
    pub fn exceeded(&self, row: &Row) -> Vec<String> {
        if !self.are_of(row) {
            return Vec::new();
        }
        let name = &row.pattern;
        let Some(bound) = self.0.get(name) else {
            return vec![format!("{name} has no bounds")];
        };
        let exact = |figure: &str, most: Option<u64>, value: u64| {
            let most = most.filter(|&most| value > most)?;
            Some(format!("{name}: {figure} {value}, bound {most}"))
        };
        let real = |figure: &str, most: Option<f64>, value: f64| {
            let most = most.filter(|&most| value > most)?;
            Some(format!("{name}: {figure} {value:.4}, bound {most}"))
        };
        [
            exact("failed", Some(bound.failed), row.failed),
            exact("driver_calls", bound.driver_calls, row.driver_calls_warm),
            exact("waits", bound.waits, row.waits_warm),
            real("ratio", bound.ratio, row.reserved_over_live),
            exact("driver_us", bound.driver_us, row.driver_ns.div_ceil(1000)),
            real("looked_at", bound.looked_at, row.request_looked_at),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Returns the names with bounds that none of `patterns` has.
    pub fn unknown(&self, patterns: &[Pattern]) -> Vec<String> {
        let is_unknown = |name: &&String| patterns.iter().all(|pattern| pattern.name != **name);
        self.0.keys().filter(is_unknown).cloned().collect()
    }
}

impl Bound {
    fn of(pattern: &Pattern, row: &Row) -> Bound {
        let goals: Vec<String> = pattern.goals.iter().map(|goal| goal.text()).collect();
        let only_failed = Bound { failed: row.failed, goal: goals.join("; "), ..Bound::default() };
        if pattern.threads {
            return only_failed;
        }
        Bound {
            driver_calls: Some(rounded_up(row.driver_calls_warm)),
            waits: Some(rounded_up(row.waits_warm)),
            ratio: Some((row.reserved_over_live * 1e3).ceil() / 1e3),
            driver_us: Some(rounded_up(row.driver_ns.div_ceil(1000))),
            looked_at: Some(rounded_up((row.request_looked_at * 10.0).ceil() as u64) as f64 / 10.0),
            ..only_failed
        }
    }

    fn text(&self) -> String {
        let mut fields = vec![format!("failed = {}", self.failed)];
        let whole = [
            ("driver_calls", self.driver_calls),
            ("waits", self.waits),
            ("driver_us", self.driver_us),
        ];
        fields.extend(
            whole.iter().filter_map(|(name, value)| Some(format!("{name} = {}", (*value)?))),
        );
        let real = [("ratio", self.ratio), ("looked_at", self.looked_at)];
        fields.extend(
            real.iter().filter_map(|(name, value)| Some(format!("{name} = {:?}", (*value)?))),
        );
        if !self.goal.is_empty() {
            fields.push(format!("goal = \"{}\"", self.goal));
        }
        format!("{{ {} }}", fields.join(", "))
    }
}

/// Rounds up to two digits.
fn rounded_up(value: u64) -> u64 {
    let mut unit = 1;
    while value / unit >= 100 {
        unit *= 10;
    }
    value.next_multiple_of(unit)
}

#[cfg(test)]
mod tests {
    use super::super::compare::tests::row;
    use super::super::{Goal, Pattern};
    use super::*;

    fn pattern(name: &str) -> Pattern {
        Pattern::new(name, "nothing", |_| Ok(()))
    }

    #[test]
    fn written_bounds_hold_what_they_were_written_of_and_read_back() {
        let patterns = [pattern("p").goal(Goal::NoDriverCalls), pattern("other")];
        let own = row("vramp", 1024, 98_765_432, 3);
        let mut bounds = Bounds::default();
        bounds.set(&patterns[0], &own);
        assert_eq!(bounds.exceeded(&own), [""; 0]);
        let text = bounds.text(&patterns);
        assert_eq!(
            text.lines().last(),
            Some(
                "\"p\" = { failed = 3, driver_calls = 3, waits = 0, driver_us = 99000, \
                 ratio = 1.024, looked_at = 1.5, goal = \"no driver call after the warm-up\" }"
            )
        );
        assert_eq!(Bounds::parse(&text).unwrap(), bounds);
        assert_eq!(bounds.unknown(&patterns[1..]), ["p"]);
    }

    #[test]
    fn an_exceeded_bound_is_named_with_its_value() {
        let own = row("vramp", 1024, 98_765_432, 3);
        let mut bounds = Bounds::default();
        assert_eq!(bounds.exceeded(&own), ["p has no bounds"]);
        assert_eq!(bounds.exceeded(&row("torch", 1, 1, 1)), [""; 0]);
        bounds.set(&pattern("p"), &own);
        let worse = Row {
            failed: 4,
            driver_calls_warm: 4,
            waits_warm: 1,
            reserved_over_live: 1.0241,
            driver_ns: 99_000_001,
            request_looked_at: 1.6,
            ..own
        };
        assert_eq!(
            bounds.exceeded(&worse),
            [
                "p: failed 4, bound 3",
                "p: driver_calls 4, bound 3",
                "p: waits 1, bound 0",
                "p: ratio 1.0241, bound 1.024",
                "p: driver_us 99001, bound 99000",
                "p: looked_at 1.6000, bound 1.5",
            ]
        );
    }

    #[test]
    fn of_real_threads_only_failures_are_held() {
        let own = row("vramp", 1024, 98_765_432, 3);
        let mut bounds = Bounds::default();
        bounds.set(&pattern("p").threads(), &own);
        let other = Row { driver_calls_warm: 99, reserved_over_live: 9.0, ..own };
        assert_eq!(bounds.exceeded(&other), [""; 0]);
        assert_eq!(bounds.exceeded(&Row { failed: 4, ..other }), ["p: failed 4, bound 3"]);
    }

    #[test]
    fn values_are_rounded_up_to_two_digits() {
        let values = [0, 99, 100, 101, 1_670_400].map(rounded_up);
        assert_eq!(values, [0, 99, 100, 110, 1_700_000]);
    }

    #[test]
    fn a_line_with_an_unknown_figure_is_refused() {
        assert!(Bounds::parse("\"p\" = { failed = 0, cals = 1 }").is_err());
    }
}
