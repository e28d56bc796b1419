//! Conformance suite: the rules of [`Driver`] as programs that every implementation must pass.
//!
//! The same cases run on the simulator in this crate's tests, and on a card with `vramp-check conformance
//! cuda:0`:
//!
//! ```
//! use vramp_check::conformance;
//! use vramp_driver::sim::{Contents, Simulator};
//! let device = Simulator::builder().contents(Contents::Stored).build();
//! let report = conformance::run_all(&device);
//! assert!(report.passed(), "{report}");
//! ```
//!
//! A case frees all that it allocated, also if it fails. No other program may use the card, because
//! some cases compare its free memory before and after. They need 512 MiB on the card, 64 MiB of
//! pinned host memory, and a device that stores bytes.
//!
//! [`peer_cases`] need two devices that are peers of each other: [`run_peers`].
//!
//! [`destructive_cases`] lose the device. Run each with [`Case::run`] on a new device; on a card, in a
//! new process.

mod captures;
mod copies;
mod graphs;
mod lost;
mod memory;
mod peers;
mod plain;
mod pool;
mod rig;
mod sharing;
mod streams;

use std::fmt;

use rig::{Checked, Failure, Rig};

use vramp_driver::{Capabilities, Driver};

/// A rule and the program that checks it.
#[derive(Clone, Copy)]
pub struct Case {
    /// Rule as a sentence: `a_mapping_is_unmapped_only_whole`.
    pub name: &'static str,
    /// Returns true if the rule applies to a device with these capabilities.
    needs: fn(&Capabilities) -> bool,
    check: fn(&Rig) -> Checked,
}

/// A rule of two devices and the program that checks it.
#[derive(Clone, Copy)]
pub struct PeerCase {
    /// Rule as a sentence.
    pub name: &'static str,
    /// Returns true if the rule applies to devices with these capabilities.
    needs: fn(&Capabilities) -> bool,
    check: fn(&Rig, &Rig) -> Checked,
}

/// Result of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The device keeps the rule.
    Passed,
    /// The device breaks the rule, as the text describes.
    Failed(String),
    /// The device lacks a capability that the rule is about.
    NotApplicable,
}

/// Results of a run of the suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Id and name of the device.
    pub device: String,
    /// Every case's name with its verdict, in the order they ran.
    pub verdicts: Vec<(&'static str, Verdict)>,
}

impl Report {
    /// Returns true if no case failed and at least one passed.
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

impl fmt::Debug for PeerCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerCase").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Case {
    /// Checks the rule on `device` and frees all that was allocated.
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

/// Returns every case that does not lose the device.
pub fn cases() -> Vec<Case> {
    [
        memory::CASES,
        plain::CASES,
        streams::CASES,
        copies::CASES,
        pool::CASES,
        captures::CASES,
        graphs::CASES,
        sharing::CASES,
    ]
    .concat()
}

/// Returns every case of two devices. None of them loses a device.
pub fn peer_cases() -> Vec<PeerCase> {
    peers::CASES.to_vec()
}

/// Returns the cases that lose the device.
pub fn destructive_cases() -> Vec<Case> {
    lost::CASES.to_vec()
}

/// Runs all [`cases`] on `device` and reports the results.
pub fn run_all(device: &dyn Driver) -> Report {
    let verdicts = cases().iter().map(|case| (case.name, case.run(device))).collect();
    Report { device: format!("{} ({})", device.info().id, device.info().name), verdicts }
}

/// Runs all [`peer_cases`] on two devices and reports the results. No case applies, and so
/// [`Report::passed`] is false, unless they are peers of each other.
///
/// ```
/// use vramp_check::conformance;
/// use vramp_driver::sim::{Contents, Simulator};
/// let devices = Simulator::builder().contents(Contents::Stored).build_machine(2);
/// let report = conformance::run_peers(&devices[0], &devices[1]);
/// assert!(report.passed(), "{report}");
/// ```
pub fn run_peers(device: &dyn Driver, peer: &dyn Driver) -> Report {
    let verdicts = peer_cases().iter().map(|case| (case.name, case.run(device, peer))).collect();
    Report { device: format!("{} and {}", device.info().id, peer.info().id), verdicts }
}

/// Defines a list of cases. Each is a function named like its rule, with the capabilities it needs.
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
