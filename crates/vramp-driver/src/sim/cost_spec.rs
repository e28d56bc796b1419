//! The contents of a cost file, and why one is refused.
//!
//! 1. [`CostSpec`] is what the file says: read from TOML, made by hand, or measured.
//! 2. [`CostSpec::check`] refuses what no table can be made of, and names the key.
//! 3. [`CostTable::new`](super::CostTable::new) makes the table.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Call;

/// Calls with costs by size.
pub(super) const BY_SIZE: [Call; 7] = [
    Call::Create,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::Release,
    Call::AllocMemory,
    Call::FreeMemory,
];

/// Calls with costs by MiB, which [`PerMib`] names.
const BY_MIB: [Call; 3] = [Call::AllocHost, Call::RegisterHost, Call::FreeHost];

/// Calls that a file may leave out, with the H200's microseconds: files were written before the driver
/// had them.
const OPTIONAL: [(Call, f64); 6] = [
    (Call::RevokeAccess, 24.0),
    (Call::Export, 185.0),
    (Call::Import, 33.0),
    (Call::ExportDmaBuf, 185.0),
    (Call::AdoptMemory, 1.0),
    (Call::CopyPeer, 2.0),
];

/// Largest cost of one call: a minute. With it the clock of a simulator does not overflow.
pub(super) const COST_MAX_US: f64 = 60e6;

/// Largest cost for each MiB.
const PER_MIB_MAX_US: f64 = 1e6;

/// Largest size of a handle in a curve: 1 PiB. The simulator has fewer addresses.
const SIZE_MAX_MIB: f64 = (1u64 << 30) as f64;

/// Slowest and fastest rate.
const RATES_GB_S: [f64; 2] = [1e-3, 1e6];

/// What a cost file says about a card: costs in microseconds, sizes in MiB, rates in GB/s.
/// `costs/h200.toml` explains each part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostSpec {
    /// Name of the table, and of the card that it describes.
    pub name: String,
    /// True if the numbers were measured on the card of this name.
    pub measured: bool,
    /// Source of the numbers: card, driver and date.
    pub source: String,
    /// Memory of the card. With it the file is a card of its own, which `--device FILE` opens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// The part of the memory that no tensor can use: driver, context and libraries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_mib: Option<u64>,
    /// Costs of calls on memory.
    pub sized: BTreeMap<Call, SizedCosts>,
    /// Costs of calls that do not depend on the arguments.
    pub fixed: BTreeMap<Call, f64>,
    /// Costs of calls on host memory.
    pub per_mib: PerMib,
    /// Rates of work on streams.
    pub rates: Rates,
    /// The device's own stream-ordered pool.
    pub pool: PoolSpec,
    /// Memory that other devices and network cards can access.
    #[serde(default)]
    pub sharing: SharingCosts,
}

/// Costs of one call by handle size: pairs of MiB and microseconds, sizes ascending.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SizedCosts {
    /// One call on one handle.
    pub alone: Vec<(f64, f64)>,
    /// Each further handle: in the same call (set-access, unmap), or in an unbroken run of the same
    /// call (the others).
    pub further: Vec<(f64, f64)>,
}

/// Costs of calls on host memory, in microseconds for each MiB.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct PerMib {
    /// Allocate pinned memory.
    pub alloc_host: f64,
    /// Pin memory of the process.
    pub register_host: f64,
    /// Free or unpin memory.
    pub free_host: f64,
    /// Create physical memory on a NUMA node.
    pub create_host_numa: f64,
    /// Set access to physical memory on a NUMA node, beyond the cost of device memory.
    pub set_access_host_numa: f64,
}

/// Rates in GB/s, which is also bytes per nanosecond.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Copies from pinned memory to the card.
    pub to_device: f64,
    /// Copies from the card to pinned memory.
    pub to_host: f64,
    /// Fills.
    pub fill: f64,
    /// Copies on the card.
    pub copy: f64,
    /// Copies and fills of host memory that is mapped for the device.
    pub host_numa_copy: f64,
    /// Kernels that access host memory that is mapped for the device.
    pub host_numa_kernel: f64,
}

/// Costs of memory that other devices and network cards can access. Microseconds for each mapping, and
/// GB/s. What a file lacks is as on an H200.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct SharingCosts {
    /// What set-access and revoke-access cost more for each peer that they name.
    pub peer_set_access: f64,
    /// What an unmap costs more for each peer that may access the mapping.
    pub peer_unmap: f64,
    /// What a map costs more of memory that network cards can access.
    pub rdma_map: f64,
    /// What an unmap costs more of memory that network cards can access.
    pub rdma_unmap: f64,
    /// Rate of work that accesses memory of a peer.
    pub peer_access: f64,
    /// Rate of copies between two devices that may access both sides.
    pub peer_copy: f64,
    /// Rate of copies between two devices of which each may access its own side only.
    pub peer_copy_by_owners: f64,
}

impl Default for SharingCosts {
    /// Returns the costs measured on two H200s.
    fn default() -> SharingCosts {
        SharingCosts {
            peer_set_access: 45.0,
            peer_unmap: 19.0,
            rdma_map: 8.0,
            rdma_unmap: 8.0,
            peer_access: 395.0,
            peer_copy: 390.0,
            peer_copy_by_owners: 37.5,
        }
    }
}

/// The device's own stream-ordered pool.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolSpec {
    /// Amount by which the pool grows.
    pub granule_mib: u64,
    /// Cost of each granule by which it grows.
    pub growth_us: f64,
}

/// Error for a cost table that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CostError {
    /// The text is not TOML, a value has the wrong type, or a key is missing or unknown.
    #[error(
        "cannot read the cost table: {0}; compare it with a file of `vramp calibrate --device sim`"
    )]
    Syntax(String),
    /// A call has no costs.
    #[error("the cost table lacks {key}: add it, or measure the table with `vramp calibrate`")]
    Missing {
        /// Key of the call.
        key: String,
    },
    /// A call has costs of another kind than it needs.
    #[error(
        "the cost table has {key}, but the costs of this call are in {instead}: move them there"
    )]
    Misplaced {
        /// Key of the call.
        key: String,
        /// Table that the call belongs to.
        instead: &'static str,
    },
    /// A number is negative, not a number, or out of range.
    #[error("{key} = {value} is not possible: use a number from {min} to {max} ({unit})")]
    Number {
        /// Key of the number.
        key: String,
        /// The number.
        value: f64,
        /// Smallest possible number.
        min: f64,
        /// Largest possible number.
        max: f64,
        /// What is counted.
        unit: &'static str,
    },
    /// A list of costs by size has no entry.
    #[error("{key} is empty: give at least one pair of MiB and microseconds")]
    Empty {
        /// Key of the list.
        key: String,
    },
    /// A size comes after a larger one.
    #[error("{key}: {mib} MiB comes after a larger size: sort the sizes in ascending order")]
    Unsorted {
        /// Key of the list.
        key: String,
        /// The size.
        mib: f64,
    },
    /// A size has two costs.
    #[error("{key}: {mib} MiB has two costs: give each size once")]
    Duplicate {
        /// Key of the list.
        key: String,
        /// The size.
        mib: f64,
    },
}

/// A range of numbers with its unit.
struct Range(f64, f64, &'static str);

const COST: Range = Range(0.0, COST_MAX_US, "microseconds");
/// Costs by size are interpolated over their logarithms.
const SIZED_COST: Range = Range(0.001, COST_MAX_US, "microseconds");
const SIZE: Range = Range(0.001, SIZE_MAX_MIB, "MiB");
const PER_MIB: Range = Range(0.0, PER_MIB_MAX_US, "microseconds for each MiB");
const RATE: Range = Range(RATES_GB_S[0], RATES_GB_S[1], "GB/s");
const GRANULE: Range = Range(1.0, 65_536.0, "MiB");
const MEMORY: Range = Range(2.0, SIZE_MAX_MIB, "MiB");

impl Range {
    fn check(&self, key: &dyn Fn() -> String, value: f64) -> Result<(), CostError> {
        let &Range(min, max, unit) = self;
        match (min..=max).contains(&value) {
            true => Ok(()),
            false => Err(CostError::Number { key: key(), value, min, max, unit }),
        }
    }
}

impl CostSpec {
    /// Reads a cost file.
    ///
    /// # Errors
    /// [`CostError::Syntax`].
    pub fn from_toml(text: &str) -> Result<CostSpec, CostError> {
        toml::from_str(text).map_err(|error| CostError::Syntax(place_and_message(text, &error)))
    }

    /// Returns the contents of a cost file, without comments.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("names, numbers and tables are TOML")
    }

    /// Returns the calls that belong in [`fixed`](CostSpec::fixed).
    pub fn fixed_calls() -> impl Iterator<Item = Call> {
        Call::ALL.into_iter().filter(|call| !BY_SIZE.contains(call) && !BY_MIB.contains(call))
    }

    /// Returns the calls that need an entry in [`sized`](CostSpec::sized).
    pub fn sized_calls() -> impl Iterator<Item = Call> {
        BY_SIZE.into_iter()
    }

    /// Returns the cost of every call that does not depend on the arguments.
    pub(super) fn all_fixed(&self) -> impl Iterator<Item = (Call, f64)> + '_ {
        OPTIONAL.into_iter().chain(self.fixed.iter().map(|(call, us)| (*call, *us)))
    }

    /// Refuses contents that no table can be made of.
    pub(super) fn check(&self) -> Result<(), CostError> {
        for (call, us) in &self.fixed {
            COST.check(&|| format!("fixed.{call}"), *us)?;
            let instead = match call {
                call if BY_SIZE.contains(call) => "[sized]",
                call if BY_MIB.contains(call) => "[per_mib]",
                _ => continue,
            };
            return Err(CostError::Misplaced { key: format!("fixed.{call}"), instead });
        }
        for (call, costs) in &self.sized {
            if !BY_SIZE.contains(call) {
                let instead = if BY_MIB.contains(call) { "[per_mib]" } else { "[fixed]" };
                return Err(CostError::Misplaced { key: format!("sized.{call}"), instead });
            }
            check_curve(&|| format!("sized.{call}.alone"), &costs.alone)?;
            check_curve(&|| format!("sized.{call}.further"), &costs.further)?;
        }
        let missing = |key: String| Err(CostError::Missing { key });
        if let Some(call) = BY_SIZE.iter().find(|call| !self.sized.contains_key(call)) {
            return missing(format!("sized.{call}"));
        }
        let needed = |call: &Call| OPTIONAL.iter().all(|(optional, _)| optional != call);
        let mut lacking = CostSpec::fixed_calls().filter(|call| !self.fixed.contains_key(call));
        if let Some(call) = lacking.find(needed) {
            return missing(format!("fixed.{call}"));
        }
        let PerMib { alloc_host, register_host, free_host, create_host_numa, set_access_host_numa } =
            self.per_mib;
        let Rates { to_device, to_host, fill, copy, host_numa_copy, host_numa_kernel } = self.rates;
        let PoolSpec { granule_mib, growth_us } = self.pool;
        let sharing = self.sharing;
        let memory = self.memory_mib.map(|mib| (MEMORY, "memory_mib", mib as f64));
        let most = self.memory_mib.map_or(SIZE_MAX_MIB, |mib| mib.saturating_sub(2) as f64);
        let context = Range(0.0, most, "MiB, less than memory_mib");
        let context = self.context_mib.map(|mib| (context, "context_mib", mib as f64));
        let numbers = [
            (PER_MIB, "per_mib.alloc-host", alloc_host),
            (PER_MIB, "per_mib.register-host", register_host),
            (PER_MIB, "per_mib.free-host", free_host),
            (PER_MIB, "per_mib.create-host-numa", create_host_numa),
            (PER_MIB, "per_mib.set-access-host-numa", set_access_host_numa),
            (RATE, "rates.to_device", to_device),
            (RATE, "rates.to_host", to_host),
            (RATE, "rates.fill", fill),
            (RATE, "rates.copy", copy),
            (RATE, "rates.host_numa_copy", host_numa_copy),
            (RATE, "rates.host_numa_kernel", host_numa_kernel),
            (GRANULE, "pool.granule_mib", granule_mib as f64),
            (COST, "pool.growth_us", growth_us),
            (COST, "sharing.peer-set-access", sharing.peer_set_access),
            (COST, "sharing.peer-unmap", sharing.peer_unmap),
            (COST, "sharing.rdma-map", sharing.rdma_map),
            (COST, "sharing.rdma-unmap", sharing.rdma_unmap),
            (RATE, "sharing.peer-access", sharing.peer_access),
            (RATE, "sharing.peer-copy", sharing.peer_copy),
            (RATE, "sharing.peer-copy-by-owners", sharing.peer_copy_by_owners),
        ];
        for (range, key, value) in numbers.into_iter().chain(memory).chain(context) {
            range.check(&|| key.to_owned(), value)?;
        }
        Ok(())
    }
}

/// Returns the line of a file that an error is about, and the error, in one line.
fn place_and_message(text: &str, error: &toml::de::Error) -> String {
    let at = error.span().filter(|span| !span.is_empty()).map(|span| span.start);
    let Some(before) = at.and_then(|at| text.get(..at)) else { return error.message().to_owned() };
    let number = before.matches('\n').count();
    let line = text.lines().nth(number).unwrap_or_default().trim();
    format!("line {}, `{line}`: {}", number + 1, error.message())
}

fn check_curve(key: &dyn Fn() -> String, points: &[(f64, f64)]) -> Result<(), CostError> {
    if points.is_empty() {
        return Err(CostError::Empty { key: key() });
    }
    for &(mib, us) in points {
        SIZE.check(key, mib)?;
        SIZED_COST.check(key, us)?;
    }
    for pair in points.windows(2) {
        let mib = pair[1].0;
        if mib == pair[0].0 {
            return Err(CostError::Duplicate { key: key(), mib });
        }
        if mib < pair[0].0 {
            return Err(CostError::Unsorted { key: key(), mib });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::CostTable;

    const GOOD: &str = include_str!("../../costs/h200.toml");

    #[test]
    fn a_bad_cost_table_is_refused_with_the_key_and_what_to_do() {
        for (from, to, texts) in [
            ("[rates]", "[rates", ["cannot read", "compare it with"]),
            ("[fixed]", "[fixed]\nfly = 1.0", ["fly", "compare it with"]),
            ("name = \"h200\"\n", "", ["`name`", "compare it with"]),
            ("granule_mib = 32", "granule_mib = -1", ["granule_mib", "compare it with"]),
            ("\ncopy = 1782.0", "\ncopy = 0.0", ["rates.copy = 0", "from 0.001"]),
            ("\ncopy = 1782.0", "\ncopy = nan", ["rates.copy = NaN", "use a number"]),
            ("\nfill = 3564.0", "\nfill = 1e300", ["rates.fill", "to 1000000"]),
            (
                "host_numa_kernel = 51.0",
                "host_numa_kernel = -51.0",
                ["rates.host_numa_kernel", "use"],
            ),
            ("record = 0.19", "record = -1.0", ["fixed.record = -1", "from 0 to 60000000"]),
            ("record = 0.19", "record = inf", ["fixed.record = inf", "microseconds"]),
            ("record = 0.19\n", "", ["lacks fixed.record", "vramp calibrate"]),
            ("[sized.map]", "[sized.query]", ["sized.query", "[fixed]: move"]),
            ("record = 0.19", "record = 0.19\ncreate = 1.0", ["fixed.create", "[sized]: move"]),
            ("record = 0.19", "record = 0.19\nfree-host = 1.0", ["fixed.free-host", "[per_mib]"]),
            ("[[2, 13.2], [32", "[[2, 13.2], [1", ["sized.unmap.alone: 1 MiB", "sort"]),
            ("[[2, 13.2], [32", "[[2, 13.2], [2", ["sized.unmap.alone: 2 MiB", "once"]),
            ("[[2, 13.2], [32", "[[2, 0.0], [32", ["sized.unmap.alone = 0", "from 0.001"]),
            ("[[2, 13.2], [32", "[[nan, 13.2], [32", ["sized.unmap.alone = NaN", "MiB"]),
            ("[[2, 13.2], [32", "[[2, 1e9], [32", ["sized.unmap.alone = 1000000000", "60000000"]),
            (
                "further = [[2, 1.059], [8, 0.5745], [32, 0.5317], [128, 0.833], [512, 0.833]]",
                "further = []",
                ["sized.map.further is empty", "at least one pair"],
            ),
            ("alloc-host = 372.0", "alloc-host = -372.0", ["per_mib.alloc-host", "each MiB"]),
            ("peer-unmap = 19.0", "peer-unmap = -19.0", ["sharing.peer-unmap = -19", "from 0"]),
            ("peer-copy = 390.0", "peer-copy = 0.0", ["sharing.peer-copy = 0", "GB/s"]),
            ("[sharing]", "[sharing]\nfly = 1.0", ["fly", "compare it with"]),
            ("granule_mib = 32", "granule_mib = 0", ["pool.granule_mib = 0", "from 1"]),
            ("granule_mib = 32", "granule_mib = 1000000", ["pool.granule_mib", "to 65536"]),
            ("growth_us = 46.0", "growth_us = 1e300", ["pool.growth_us", "to 60000000"]),
            ("name = \"h200\"", "name = \"h200\"\nmemory_mib = 0", ["memory_mib = 0", "from 2"]),
            (
                "name = \"h200\"",
                "name = \"h200\"\nmemory_mib = 9\ncontext_mib = 9",
                ["context_mib = 9", "from 0 to 7 (MiB, less than memory_mib)"],
            ),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let error = CostTable::from_toml(&GOOD.replacen(from, to, 1)).expect_err(to);
            let error = error.to_string();
            assert!(texts.iter().all(|text| error.contains(text)), "{to}: {error}");
        }
        // A table that is missing altogether.
        let start = GOOD.find("[sized.release]").unwrap();
        let end = GOOD.find("# Plain allocations").unwrap();
        let error = CostTable::from_toml(&(GOOD[..start].to_owned() + &GOOD[end..])).unwrap_err();
        assert_eq!(error, CostError::Missing { key: "sized.release".to_owned() });
    }

    /// A file that was written before devices had peers, by the numbers that it has.
    #[test]
    fn a_file_without_the_costs_of_sharing_has_those_of_the_h200() {
        let start = GOOD.find("# Memory that other devices").unwrap();
        let end = GOOD.find("# The device's own stream-ordered pool").unwrap();
        let mut old = GOOD[..start].to_owned() + &GOOD[end..];
        for (call, us) in OPTIONAL {
            let line = format!("{call} = {us:.1}\n");
            assert!(old.contains(&line), "{line}");
            old = old.replacen(&line, "", 1);
        }
        let table = CostTable::from_toml(&old).unwrap();
        assert_eq!(table.spec().sharing, SharingCosts::default());
        let new = CostTable::h200();
        for call in CostSpec::fixed_calls() {
            assert_eq!(table.fixed_ns(call), new.fixed_ns(call), "{call}");
        }
        // It is written with what it has, and no more calls.
        let again = CostTable::from_toml(&table.to_toml()).unwrap();
        assert_eq!(again.spec(), table.spec());
        // A file may also have some of the numbers.
        let some = old + "\n[sharing]\npeer-copy = 100.0\n";
        let some = CostTable::from_toml(&some).unwrap().spec().sharing;
        assert_eq!(some, SharingCosts { peer_copy: 100.0, ..SharingCosts::default() });
    }

    #[test]
    fn the_h200s_file_has_the_default_costs_of_sharing() {
        let text: toml::Table = toml::from_str(GOOD).unwrap();
        let written = text["sharing"].as_table().unwrap();
        assert_eq!(written.len(), 7, "{written:?}");
        assert_eq!(CostSpec::from_toml(GOOD).unwrap().sharing, SharingCosts::default());
    }

    #[test]
    fn a_cost_table_is_written_as_it_is_read() {
        let spec = CostSpec {
            memory_mib: Some(24_564),
            context_mib: Some(1024),
            ..CostSpec::from_toml(GOOD).unwrap()
        };
        let text = CostTable::new(spec.clone()).unwrap().to_toml();
        assert_eq!(CostSpec::from_toml(&text).unwrap(), spec);
        assert_eq!(CostTable::from_toml(&text).unwrap().to_toml(), text);
    }

    #[test]
    fn the_steepest_curve_costs_at_most_a_minute_for_any_size() {
        let mut spec = CostSpec::from_toml(GOOD).unwrap();
        let costs = spec.sized.get_mut(&Call::Create).unwrap();
        costs.alone = vec![(2.0, 0.001), (2.000_001, COST_MAX_US)];
        let table = CostTable::new(spec).unwrap();
        let ns = table.handle_ns(Call::Create, vramp_core::Bytes::tib(100), false);
        assert_eq!(ns, (COST_MAX_US * 1000.0) as u64);
    }
}
