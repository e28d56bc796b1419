//! The rules of [`Driver`], as programs that any implementation must pass.
//!
//! The same list runs on the simulator in this crate's tests and on a card:
//!
//! ```
//! use vramp_driver::{conformance, sim::{Contents, Simulator}};
//! let device = Simulator::builder().contents(Contents::Stored).build();
//! let report = conformance::run_all(&device);
//! assert!(report.passed(), "{report}");
//! ```
//!
//! A case gives back all it took, also when it fails. Cases want the card to themselves: some
//! compare the card's free memory before and after. They need 512 MiB of memory on the card, 64 MiB of
//! pinned host memory, and bytes that are really kept.
//!
//! [`destructive_cases`] lose the device on purpose. Run each with [`Case::run`] on a device of its
//! own; on a card, in a process of its own.

mod captures;
mod copies;
mod graphs;
mod lost;
mod memory;
mod plain;
mod pool;
mod rig;
mod streams;

use std::fmt;

use rig::Rig;

use crate::{Capabilities, Driver};

/// One rule, and the program that checks it.
#[derive(Clone, Copy)]
pub struct Case {
    /// The rule as a sentence: `a_mapping_is_unmapped_only_whole`.
    pub name: &'static str,
    /// What the device must be able to do for the rule to matter.
    needs: fn(&Capabilities) -> bool,
    check: fn(&Rig) -> Checked,
}

/// Whether a device keeps a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It does.
    Passed,
    /// It does not, and this is what was seen.
    Failed(String),
    /// The device says that it cannot do what the rule is about.
    NotApplicable,
}

/// What a run of the suite found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Which device.
    pub device: String,
    /// Every case's name with its verdict, in the order they ran.
    pub verdicts: Vec<(&'static str, Verdict)>,
}

impl Report {
    /// True if no case failed, and at least one passed.
    pub fn passed(&self) -> bool {
        let passed = self.verdicts.iter().any(|(_, verdict)| *verdict == Verdict::Passed);
        passed && !self.verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::Failed(_)))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "conformance of {}", self.device)?;
        for (name, verdict) in &self.verdicts {
            match verdict {
                Verdict::Passed => writeln!(f, "  passed          {name}")?,
                Verdict::NotApplicable => writeln!(f, "  not applicable  {name}")?,
                Verdict::Failed(seen) => writeln!(f, "  FAILED          {name}: {seen}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Case {
    /// Checks the rule on `device` and gives back all that was taken.
    pub fn run(&self, device: &dyn Driver) -> Verdict {
        if !(self.needs)(&device.info().capabilities) {
            return Verdict::NotApplicable;
        }
        let rig = Rig::new(device);
        let checked = (self.check)(&rig);
        let cleaned = rig.clean_up();
        match checked.and(cleaned) {
            Ok(()) => Verdict::Passed,
            Err(failure) => Verdict::Failed(failure.0),
        }
    }
}

/// Every rule that can be checked without losing the device.
pub fn cases() -> Vec<Case> {
    [
        memory::CASES,
        plain::CASES,
        streams::CASES,
        copies::CASES,
        pool::CASES,
        captures::CASES,
        graphs::CASES,
    ]
    .concat()
}

/// Rules whose check loses the device.
pub fn destructive_cases() -> Vec<Case> {
    lost::CASES.to_vec()
}

/// Runs all [`cases`] on `device`, one after the other.
pub fn run_all(device: &dyn Driver) -> Report {
    let verdicts = cases().iter().map(|case| (case.name, case.run(device))).collect();
    Report { device: format!("{} ({})", device.info().id, device.info().name), verdicts }
}

/// What was seen instead of what the rule says.
#[derive(Debug)]
struct Failure(String);

type Checked<T = ()> = Result<T, Failure>;

impl From<crate::DriverError> for Failure {
    fn from(error: crate::DriverError) -> Failure {
        Failure(error.to_string())
    }
}

/// A list of cases: each is a function named like its rule, with what it needs.
macro_rules! rules {
    ($($name:ident: $needs:expr,)*) => {
        pub(super) const CASES: &[super::Case] = &[
            $(super::Case { name: stringify!($name), needs: $needs, check: $name },)*
        ];
    };
}
use rules;

/// Fails the case with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(super::Failure(format!($($message)+)));
        }
    };
}
use ensure;
