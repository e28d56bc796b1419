//! Cost tables: host time of each driver call, and duration of each kind of work on a stream.
//!
//! The cost of a call on handles depends on their sizes. The first handle costs as much as a call on
//! it alone; the table lists what each further one adds. Further handles are the other ones in the
//! range of one call (set-access, unmap), or those of an unbroken run of the same call (create, map,
//! release). `costs/h200.toml` lists the sources of the numbers.

use std::collections::BTreeMap;

use vramp_core::Bytes;

pub(super) use super::cost_spec::Rates;
use super::cost_spec::{BY_SIZE, COST_MAX_US, CostError, CostSpec, SharingCosts, SizedCosts};
use crate::Call;

/// Sizes up to this many MiB are looked up instead of interpolated.
const TABLED_MIB: usize = 512;

/// A cost table, as read from TOML.
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_driver::{Call, sim::CostTable};
/// let costs = CostTable::h200();
/// let two_gib_in_pages = costs.range_ns(Call::Unmap, &vec![Bytes::mib(2); 1024]);
/// assert_eq!(two_gib_in_pages.div_ceil(1_000_000), 17);
/// ```
#[derive(Clone, Debug)]
pub struct CostTable {
    /// Name of the table.
    pub name: String,
    /// True if the numbers were measured on the card of this name.
    pub measured: bool,
    /// Source of the numbers.
    pub source: String,
    /// Memory of the card that the table describes, if it says so.
    pub memory: Option<Bytes>,
    /// The part of that memory that no tensor can use.
    pub context: Option<Bytes>,
    spec: CostSpec,
    sized: BTreeMap<Call, Sized>,
    fixed_ns: [u64; Call::ALL.len()],
}

impl Rates {
    /// Returns the nanoseconds that `len` bytes take at `rate`.
    pub fn ns(rate: f64, len: Bytes) -> u64 {
        (len.count() as f64 / rate).ceil() as u64
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PoolCosts {
    pub granule: Bytes,
    /// Cost of each granule by which the pool grows.
    pub growth_ns: u64,
}

impl CostTable {
    /// Returns the costs measured on an H200.
    pub fn h200() -> CostTable {
        CostTable::from_toml(include_str!("../../costs/h200.toml"))
            .expect("the embedded cost table is read by a test")
    }

    /// Makes a table of the contents of a cost file.
    ///
    /// # Errors
    /// [`CostError`] names the key and says what to do.
    pub fn new(spec: CostSpec) -> Result<CostTable, CostError> {
        spec.check()?;
        let mut fixed_ns = [0; Call::ALL.len()];
        for (call, us) in spec.all_fixed() {
            fixed_ns[call as usize] = to_ns(us);
        }
        Ok(CostTable {
            name: spec.name.clone(),
            measured: spec.measured,
            source: spec.source.clone(),
            memory: spec.memory_mib.map(Bytes::mib),
            context: spec.context_mib.map(Bytes::mib),
            sized: BY_SIZE.into_iter().map(|call| (call, Sized::new(&spec.sized[&call]))).collect(),
            fixed_ns,
            spec,
        })
    }

    /// Reads a cost table. `costs/h200.toml` explains the format.
    ///
    /// # Errors
    /// [`CostError`] names the key and says what to do.
    pub fn from_toml(text: &str) -> Result<CostTable, CostError> {
        CostTable::new(CostSpec::from_toml(text)?)
    }

    /// Returns the table in the format that [`from_toml`](CostTable::from_toml) reads.
    pub fn to_toml(&self) -> String {
        let CostTable { name, measured, source, .. } = self.clone();
        CostSpec { name, measured, source, ..self.spec.clone() }.to_toml()
    }

    /// Returns the numbers that the table was made of.
    pub fn spec(&self) -> &CostSpec {
        &self.spec
    }

    /// Returns the cost of one set-access or unmap over mapped handles of these sizes.
    ///
    /// The largest handle counts as the first.
    pub fn range_ns(&self, call: Call, handles: &[Bytes]) -> u64 {
        let Some(sized) = self.sized.get(&call) else { return self.fixed_ns(call) };
        let further: u64 = handles.iter().map(|len| sized.further.ns(*len)).sum();
        let first =
            handles.iter().map(|len| sized.alone.ns(*len) as i64 - sized.further.ns(*len) as i64);
        further.saturating_add_signed(first.max().unwrap_or(0))
    }

    /// Returns the cost of one create, map or release. `in_a_run` is true if the call before it was
    /// of the same kind.
    pub fn handle_ns(&self, call: Call, len: Bytes, in_a_run: bool) -> u64 {
        match self.sized.get(&call) {
            Some(sized) if in_a_run => sized.further.ns(len),
            Some(sized) => sized.alone.ns(len),
            None => self.fixed_ns(call),
        }
    }

    /// Returns the cost of a call that does not depend on its arguments.
    pub fn fixed_ns(&self, call: Call) -> u64 {
        self.fixed_ns[call as usize]
    }

    /// Returns the cost of allocating `len` of pinned host memory.
    pub fn alloc_host_ns(&self, len: Bytes) -> u64 {
        per_mib_ns(self.spec.per_mib.alloc_host, len)
    }

    /// Returns the cost of pinning `len` of host memory.
    pub fn register_host_ns(&self, len: Bytes) -> u64 {
        per_mib_ns(self.spec.per_mib.register_host, len)
    }

    /// Returns the cost of freeing or unpinning `len` of host memory.
    pub fn free_host_ns(&self, len: Bytes) -> u64 {
        per_mib_ns(self.spec.per_mib.free_host, len)
    }

    /// Returns the cost of creating `len` of physical memory on a host NUMA node.
    pub fn create_host_numa_ns(&self, len: Bytes) -> u64 {
        per_mib_ns(self.spec.per_mib.create_host_numa, len)
    }

    /// Returns what set-access to `len` on a host NUMA node costs more than to device memory.
    pub fn set_access_host_numa_ns(&self, len: Bytes) -> u64 {
        per_mib_ns(self.spec.per_mib.set_access_host_numa, len)
    }

    /// Returns what set-access costs more for this number of pairs of a mapping and a peer.
    pub fn set_access_peers_ns(&self, grants: usize) -> u64 {
        to_ns(self.spec.sharing.peer_set_access) * grants as u64
    }

    /// Returns what an unmap costs more for this number of pairs of a mapping and a peer.
    pub fn unmap_peers_ns(&self, grants: usize) -> u64 {
        to_ns(self.spec.sharing.peer_unmap) * grants as u64
    }

    /// Returns what a call on memory for network cards costs more for this number of mappings: a map
    /// or an unmap.
    pub fn rdma_ns(&self, call: Call, mappings: usize) -> u64 {
        let us = match call {
            Call::Map => self.spec.sharing.rdma_map,
            Call::Unmap => self.spec.sharing.rdma_unmap,
            _ => 0.0,
        };
        to_ns(us) * mappings as u64
    }

    pub(super) fn sharing(&self) -> SharingCosts {
        self.spec.sharing
    }

    pub(super) fn rates(&self) -> Rates {
        self.spec.rates
    }

    pub(super) fn pool(&self) -> PoolCosts {
        let pool = self.spec.pool;
        PoolCosts { granule: Bytes::mib(pool.granule_mib), growth_ns: to_ns(pool.growth_us) }
    }
}

fn per_mib_ns(us_per_mib: f64, len: Bytes) -> u64 {
    (us_per_mib * 1000.0 * len.count() as f64 / (1 << 20) as f64) as u64
}

fn to_ns(us: f64) -> u64 {
    (us * 1000.0).round() as u64
}

/// Costs by handle size.
#[derive(Clone, Debug)]
struct Sized {
    alone: Curve,
    further: Curve,
}

impl Sized {
    fn new(costs: &SizedCosts) -> Sized {
        Sized { alone: Curve::new(&costs.alone), further: Curve::new(&costs.further) }
    }
}

#[derive(Clone, Debug)]
struct Curve {
    /// (log2 of the size in MiB, log2 of the cost in ns), sizes ascending.
    points: Vec<(f64, f64)>,
    /// Costs by whole MiB, from 0 on.
    table: Vec<u64>,
}

impl Curve {
    /// `points` were checked: see [`CostSpec::check`].
    fn new(points: &[(f64, f64)]) -> Curve {
        let points = points.iter().map(|(mib, us)| (mib.log2(), (us * 1000.0).log2())).collect();
        let mut curve = Curve { points, table: Vec::new() };
        curve.table =
            (0..=TABLED_MIB as u64).map(|mib| curve.interpolated_ns(mib.max(1) as f64)).collect();
        curve
    }

    fn ns(&self, len: Bytes) -> u64 {
        let mib = len.count() >> 20;
        match self.table.get(mib as usize) {
            Some(ns) => *ns,
            None => self.interpolated_ns(mib as f64),
        }
    }

    fn interpolated_ns(&self, mib: f64) -> u64 {
        let at = mib.log2();
        let (first, last) = (self.points[0], self.points[self.points.len() - 1]);
        if at <= first.0 || self.points.len() == 1 {
            return first.1.exp2().round() as u64;
        }
        let above = self.points.partition_point(|(size, _)| *size < at).min(self.points.len() - 1);
        let (low, high) = (self.points[above - 1], self.points[above]);
        let mut slope = (high.1 - low.1) / (high.0 - low.0);
        if at > last.0 {
            // Beyond the measured sizes, a larger handle never costs less, and at most in proportion:
            // one disturbed measurement must not make large handles cost seconds.
            slope = slope.clamp(0.0, 1.0);
            let ns = (high.1 + slope * (at - high.0)).exp2();
            return ns.min(COST_MAX_US * 1000.0).round() as u64;
        }
        (low.1 + slope * (at - low.0)).exp2().round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(what: &str, modelled_ns: u64, measured_us: f64) {
        let modelled_us = modelled_ns as f64 / 1000.0;
        // Whole microseconds were printed, so a small number may be off by half of one.
        let tolerance = (0.15 * measured_us).max(if measured_us < 4.0 { 0.5 } else { 0.0 });
        assert!(
            (modelled_us - measured_us).abs() <= tolerance,
            "{what}: modelled {modelled_us} us, measured {measured_us} us"
        );
    }

    const CALLS: [Call; 5] = [Call::Create, Call::Map, Call::SetAccess, Call::Unmap, Call::Release];

    #[test]
    fn single_calls_cost_as_measured() {
        let costs = CostTable::h200();
        for (mib, measured_us) in [
            (2, [7.5, 0.5, 22.3, 13.2, 8.5]),
            (32, [7.3, 0.5, 20.2, 12.9, 15.8]),
            (128, [7.8, 0.5, 21.8, 13.6, 39.9]),
            (512, [11.8, 0.5, 39.6, 20.1, 147.6]),
            (1024, [16.6, 0.6, 51.4, 24.3, 297.0]),
            (4096, [31.9, 0.7, 134.6, 49.4, 1109.0]),
        ] {
            for (call, us) in CALLS.into_iter().zip(measured_us) {
                let len = Bytes::mib(mib);
                assert_near(&format!("{call} {mib} MiB"), costs.handle_ns(call, len, false), us);
                assert_near(&format!("{call} {mib} MiB"), costs.range_ns(call, &[len]), us);
            }
        }
    }

    #[test]
    fn building_and_moving_two_gib_costs_as_measured() {
        let costs = CostTable::h200();
        for (mib, measured_us) in [
            (2, [10474.0, 1084.0, 25973.0, 16070.0, 18926.0]),
            (8, [1880.0, 147.0, 5731.0, 3687.0, 2761.0]),
            (32, [562.0, 34.0, 1480.0, 1011.0, 1860.0]),
            (128, [203.0, 13.0, 481.0, 282.0, 1404.0]),
            (512, [68.0, 3.0, 182.0, 82.0, 1149.0]),
            (2048, [64.0, 1.0, 88.0, 34.0, 948.0]),
        ] {
            let handles = vec![Bytes::mib(mib); 2048 / mib as usize];
            for (call, us) in CALLS.into_iter().zip(measured_us) {
                let what = format!("{call}, 2 GiB in {mib} MiB handles");
                if matches!(call, Call::SetAccess | Call::Unmap) {
                    assert_near(&what, costs.range_ns(call, &handles), us);
                } else {
                    let run = handles.iter().enumerate();
                    let ns = run.map(|(n, len)| costs.handle_ns(call, *len, n > 0)).sum();
                    assert_near(&what, ns, us);
                }
            }
        }
    }

    #[test]
    fn costs_between_measured_sizes_lie_between_the_measured_costs() {
        let costs = CostTable::h200();
        let at = |mib| costs.handle_ns(Call::Release, Bytes::mib(mib), false);
        assert!(at(32) < at(64));
        assert!(at(64) < at(128));
        assert!(at(8192) > at(4096));
    }
}
