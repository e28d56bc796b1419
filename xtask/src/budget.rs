//! Budgets of processor time, and whether they were kept.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cost::{Cost, Watch};

const PATH: &str = "xtask/budgets.toml";

/// A step fails if it costs more than this many times its budget.
const TOLERANCE: f64 = 1.5;

/// Budgets in seconds of processor time, on the machine that they were measured on.
#[derive(Debug)]
pub struct Budgets {
    /// What [`calibrate`] takes there.
    calibration: f64,
    steps: BTreeMap<String, f64>,
    /// Of a test program that has none of its own.
    program: f64,
    programs: BTreeMap<String, f64>,
}

impl Budgets {
    pub fn read(root: &Path) -> Result<Budgets> {
        let text = std::fs::read_to_string(root.join(PATH)).context(PATH)?;
        Budgets::parse(&text).context(PATH)
    }

    fn parse(text: &str) -> Result<Budgets> {
        let table: toml::Table = text.parse()?;
        let seconds = |value: &toml::Value| match value {
            toml::Value::Integer(seconds) => Some(*seconds as f64),
            toml::Value::Float(seconds) => Some(*seconds),
            _ => None,
        };
        let section = |name: &str| -> Result<BTreeMap<String, f64>> {
            let section = table.get(name).and_then(toml::Value::as_table);
            let entries = section.with_context(|| format!("there is no table [{name}]"))?;
            let entries = entries.iter().map(|(key, value)| {
                let seconds = seconds(value).with_context(|| format!("{key} is no number"))?;
                Ok((key.clone(), seconds))
            });
            entries.collect()
        };
        let time = |name: &str| -> Result<f64> {
            let time = table.get(name).and_then(seconds).filter(|time| *time > 0.0);
            time.with_context(|| format!("there is no time `{name}`"))
        };
        Ok(Budgets {
            calibration: time("calibration")?,
            steps: section("steps")?,
            program: time("program")?,
            programs: section("programs")?,
        })
    }

    /// How many times as long this machine takes as the one of the budgets; 1 if it is faster.
    pub fn slowness(&self) -> Result<f64> {
        let seconds = calibrate()?.as_secs_f64();
        let slowness = (seconds / self.calibration).max(1.0);
        println!("a fixed amount of work takes {seconds:.2} s: budgets grow by {slowness:.2}");
        Ok(slowness)
    }

    /// Prints each step and each test program beside its budget on a machine of this slowness.
    ///
    /// # Errors
    ///
    /// What cost more than its budget allows, and what has no budget.
    pub fn check(
        &self,
        slowness: f64,
        steps: &[(String, Cost)],
        programs: &BTreeMap<String, Cost>,
    ) -> Result<()> {
        let mut over = Vec::new();
        println!("{:>36}  {:>7}  {:>7}  {:>7}", "", "CPU s", "budget", "wall s");
        let of_program = |name: &String| self.programs.get(name).copied().or(Some(self.program));
        let programs = programs.iter().map(|(name, cost)| (of_program(name), name, cost));
        let steps = steps.iter().map(|(name, cost)| (self.steps.get(name).copied(), name, cost));
        for (budget, name, cost) in programs.chain(steps) {
            let cpu = cost.cpu.as_secs_f64();
            let budget = budget.map(|budget| budget * slowness);
            let wall = cost.wall.as_secs_f64();
            let shown = budget.map_or("none".to_owned(), |budget| format!("{budget:.0}"));
            println!("{name:>36}  {cpu:7.1}  {shown:>7}  {wall:7.1}");
            match budget {
                None => over.push(format!("{name} has no budget and took {cpu:.1} s")),
                Some(budget) if cpu > TOLERANCE * budget => {
                    over.push(format!(
                        "{name} took {cpu:.1} s of CPU time, its budget is {budget:.0} s"
                    ));
                }
                Some(_) => {}
            }
        }
        match over.is_empty() {
            true => Ok(()),
            false => bail!(
                "over {TOLERANCE} times the budget; make it cheaper, or move what costs to \
                 `cargo xtask nightly`; {PATH} has the budgets:\n  {}",
                over.join("\n  ")
            ),
        }
    }
}

/// Processor time of a fixed amount of work, the least of three tries.
pub fn calibrate() -> Result<Duration> {
    let mut least = Duration::MAX;
    for _ in 0..3 {
        let watch = Watch::start()?;
        let mut table = vec![1_u64; 1 << 15];
        let mut bits = 1_u64;
        for _ in 0..15_000_000 {
            // A pseudorandom place, read and written: arithmetic and caches both count.
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let entry = &mut table[(bits >> 49) as usize];
            bits ^= *entry;
            *entry = bits;
        }
        black_box(&table);
        least = least.min(watch.read()?.cpu);
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "calibration = 0.5\nprogram = 60\n[steps]\nformat = 2\n[programs]\n\"vramp-core it\" = 10.5\n";

    fn cost(seconds: f64) -> Cost {
        Cost { cpu: Duration::from_secs_f64(seconds), wall: Duration::ZERO }
    }

    fn check(slowness: f64, format: f64, it: f64) -> Result<()> {
        let steps = [("format".to_owned(), cost(format))];
        let programs = BTreeMap::from([("vramp-core it".to_owned(), cost(it))]);
        Budgets::parse(TEXT)?.check(slowness, &steps, &programs)
    }

    #[test]
    fn a_step_fails_at_one_and_a_half_times_its_budget() {
        assert!(check(1.0, 2.9, 15.5).is_ok());
        let error = check(1.0, 3.1, 16.0).unwrap_err().to_string();
        assert!(error.contains("format took 3.1 s") && error.contains("vramp-core it"), "{error}");
        assert!(check(2.0, 5.9, 31.0).is_ok(), "the machine takes twice as long");
        assert!(check(2.0, 6.1, 31.0).is_err());
        let other = BTreeMap::from([("vramp-host it".to_owned(), cost(89.0))]);
        let budgets = Budgets::parse(TEXT).unwrap();
        assert!(budgets.check(1.0, &[], &other).is_ok(), "it has what every program has");
    }

    #[test]
    fn a_step_without_a_budget_fails() {
        let budgets = Budgets::parse(TEXT).unwrap();
        let steps = [("new".to_owned(), cost(0.1))];
        assert!(budgets.check(1.0, &steps, &BTreeMap::new()).is_err());
        for wrong in [
            "",
            "calibration = 0\nprogram = 1\n[steps]\n[programs]",
            "calibration = 1\nprogram = 1\n[programs]\n[steps]\nx = 'y'",
        ] {
            assert!(Budgets::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_budgets_of_the_project_can_be_read() {
        Budgets::read(&crate::root()).unwrap();
    }
}
