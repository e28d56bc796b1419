//! Fault injection: driver calls that fail by plan.

use crate::{Call, DriverError};

/// Plan of injected faults. An injected fault changes nothing on the device and takes no time, except
/// that one of kind [`crate::ErrorKind::DeviceLost`] loses the device.
///
/// Calls are numbered from 1 since the plan was set, over all kinds or within one kind.
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_driver::{Call, Driver, MemoryProperties, sim::{FaultPlan, Simulator}};
/// let device = Simulator::card("h200")?;
/// device.set_faults(FaultPlan::nth_of(Call::Create, 2).with_code(2));
/// assert!(device.create(Bytes::mib(2), MemoryProperties::DEVICE).is_ok());
/// assert!(device.create(Bytes::mib(2), MemoryProperties::DEVICE).is_err_and(|e| e.is_out_of_memory()));
/// assert!(device.create(Bytes::mib(2), MemoryProperties::DEVICE).is_ok());
/// # Ok::<(), vramp_driver::sim::UnknownCard>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultPlan {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq)]
struct Rule {
    when: When,
    code: i32,
}

#[derive(Clone, Debug, PartialEq)]
enum When {
    Nth(u64),
    NthOf(Call, u64),
    FromNthOf(Call, u64),
    Between(u64, u64),
    Randomly { call: Option<Call>, probability: f64 },
}

impl FaultPlan {
    /// Returns a plan in which no call fails.
    pub fn none() -> FaultPlan {
        FaultPlan::default()
    }

    /// Returns a plan in which the `n`-th call of any kind fails.
    pub fn nth(n: u64) -> FaultPlan {
        FaultPlan::rule(When::Nth(n))
    }

    /// Returns a plan in which the `n`-th call of this kind fails.
    pub fn nth_of(call: Call, n: u64) -> FaultPlan {
        FaultPlan::rule(When::NthOf(call, n))
    }

    /// Returns a plan in which every call of this kind fails from the `n`-th on.
    pub fn from_nth_of(call: Call, n: u64) -> FaultPlan {
        FaultPlan::rule(When::FromNthOf(call, n))
    }

    /// Returns a plan in which `count` calls of any kind fail from the `n`-th on, and none after them.
    pub fn several(n: u64, count: u64) -> FaultPlan {
        FaultPlan::rule(When::Between(n, n.saturating_add(count)))
    }

    /// Returns a plan in which each call fails with this probability, drawn from the device's seed.
    pub fn randomly(probability: f64) -> FaultPlan {
        FaultPlan::rule(When::Randomly { call: None, probability })
    }

    /// Returns a plan in which each call of this kind fails with this probability, drawn from the
    /// device's seed.
    pub fn randomly_of(call: Call, probability: f64) -> FaultPlan {
        FaultPlan::rule(When::Randomly { call: Some(call), probability })
    }

    /// Sets the driver code that calls fail with: see [`DriverError::from_code`]. The default is 2,
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn with_code(mut self, code: i32) -> FaultPlan {
        for rule in &mut self.rules {
            rule.code = code;
        }
        self
    }

    /// Combines two plans. If both fail a call, `self` determines the code.
    pub fn and(mut self, other: FaultPlan) -> FaultPlan {
        self.rules.extend(other.rules);
        self
    }

    fn rule(when: When) -> FaultPlan {
        FaultPlan { rules: vec![Rule { when, code: 2 }] }
    }
}

/// A plan with its counts so far.
#[derive(Debug)]
pub(super) struct Faults {
    plan: FaultPlan,
    calls: u64,
    calls_of: [u64; Call::ALL.len()],
    random: SplitMix,
}

impl Faults {
    pub fn new(plan: FaultPlan, seed: u64) -> Faults {
        Faults { plan, calls: 0, calls_of: [0; Call::ALL.len()], random: SplitMix(seed) }
    }

    /// Counts one call and returns its injected error, if any.
    pub fn next(&mut self, call: Call) -> Option<DriverError> {
        self.calls += 1;
        self.calls_of[call as usize] += 1;
        let (calls, of_kind) = (self.calls, self.calls_of[call as usize]);
        let mut code = None;
        for rule in &self.plan.rules {
            let hit = match &rule.when {
                When::Nth(n) => calls == *n,
                When::NthOf(kind, n) => *kind == call && of_kind == *n,
                When::FromNthOf(kind, n) => *kind == call && of_kind >= *n,
                When::Between(first, end) => (*first..*end).contains(&calls),
                When::Randomly { call: kind, probability } => {
                    kind.is_none_or(|kind| kind == call) && self.random.unit() < *probability
                }
            };
            if hit {
                code = code.or(Some(rule.code));
            }
        }
        let code = code?;
        Some(DriverError::from_code(call, code, format!("injected at call {calls}")))
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014). Its sequence does not change with the version of a
/// library.
#[derive(Debug)]
struct SplitMix(u64);

impl SplitMix {
    /// Returns a number from 0 to 1, excluding 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}
