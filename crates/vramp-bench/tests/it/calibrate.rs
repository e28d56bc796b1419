//! A calibration of the simulator returns the simulator's own costs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vramp::Bytes;
use vramp::device::sim::{CardModel, CostSpec, CostTable, FaultPlan, LiveObjects, Simulator};
use vramp::device::{Call, Capabilities, Driver};
use vramp_bench::calibrate::{Calibration, Options, run};
use vramp_testing::failing_calls;

fn calibrated(device: &Simulator) -> Calibration {
    let options = Options { duration: Duration::from_secs(120), date: "2030-01-02".to_owned() };
    let calibration = run(device, &options).expect("the simulator is not lost");
    assert_eq!(device.live(), LiveObjects::default(), "nothing is left");
    calibration
}

/// Returns a table in which every number differs from the H200's, each by another factor.
fn made() -> CostSpec {
    let mut spec = CostTable::h200().spec().clone();
    let mut factor = 1.5;
    let mut change = |number: &mut f64| {
        factor = if factor > 3.0 { 0.4 } else { factor * 1.07 };
        *number *= factor;
    };
    for costs in spec.sized.values_mut() {
        costs.alone.iter_mut().chain(&mut costs.further).for_each(|(_, us)| change(us));
    }
    spec.fixed.values_mut().for_each(&mut change);
    let (per_mib, rates) = (&mut spec.per_mib, &mut spec.rates);
    for number in [
        &mut per_mib.alloc_host,
        &mut per_mib.register_host,
        &mut per_mib.free_host,
        &mut per_mib.create_host_numa,
        &mut per_mib.set_access_host_numa,
        &mut rates.to_device,
        &mut rates.to_host,
        &mut rates.fill,
        &mut rates.copy,
        &mut rates.host_numa_copy,
        &mut spec.pool.growth_us,
    ] {
        change(number);
    }
    // A copy of host memory that is mapped for the device is not faster than one on the card.
    rates.host_numa_copy = rates.host_numa_copy.min(rates.copy / 2.0);
    spec.pool.granule_mib = 20;
    spec
}

fn device(spec: &CostSpec) -> Simulator {
    let costs = CostTable::new(spec.clone()).expect("the numbers are possible");
    Simulator::builder().costs(costs).build()
}

/// Every number of a table by its key.
fn numbers(spec: &CostSpec) -> BTreeMap<String, f64> {
    let table = CostTable::new(spec.clone()).expect("the numbers are possible");
    let mut numbers = BTreeMap::new();
    let mut add = |key: String, value: f64| {
        numbers.insert(key, value);
    };
    for (call, costs) in CostTable::h200().spec().sized.clone() {
        for (mib, _) in costs.alone {
            let us = table.handle_ns(call, Bytes::mib(mib as u64), false) as f64 / 1e3;
            add(format!("{call} alone {mib}"), us);
        }
        for (mib, _) in costs.further.into_iter().filter(|(mib, _)| *mib <= 512.0) {
            let us = table.handle_ns(call, Bytes::mib(mib as u64), true) as f64 / 1e3;
            add(format!("{call} further {mib}"), us);
        }
    }
    spec.fixed.iter().for_each(|(call, us)| add(call.to_string(), *us));
    let (per_mib, rates) = (spec.per_mib, spec.rates);
    for (key, value) in [
        ("alloc_host", per_mib.alloc_host),
        ("register_host", per_mib.register_host),
        ("free_host", per_mib.free_host),
        ("create_host_numa", per_mib.create_host_numa),
        ("set_access_host_numa", per_mib.set_access_host_numa),
        ("to_device", rates.to_device),
        ("to_host", rates.to_host),
        ("fill", rates.fill),
        ("copy", rates.copy),
        ("host_numa_copy", rates.host_numa_copy),
        ("granule_mib", spec.pool.granule_mib as f64),
        ("growth_us", spec.pool.growth_us),
    ] {
        add(key.to_owned(), value);
    }
    numbers
}

#[test]
fn a_simulator_gives_back_its_own_table() {
    let made = made();
    let calibration = calibrated(&device(&made));
    let measured = numbers(&calibration.spec);
    let keys: Vec<_> = calibration.not_measured.iter().map(|it| it.key.as_str()).collect();
    for (key, expected) in numbers(&made) {
        if keys.contains(&format!("fixed.{key}").as_str()) {
            continue;
        }
        let measured = measured[&key];
        // Times are whole nanoseconds.
        let tolerance = (0.01 * expected).max(0.002);
        assert!((measured - expected).abs() <= tolerance, "{key}: {measured}, made {expected}");
    }
    // Memory of other code, which the simulator's driver has none of.
    let without = ["fixed.adopt-memory", "rates.host_numa_kernel"];
    let two_devices = ["fixed.revoke-access", "fixed.export-dma-buf", "fixed.copy-peer"];
    let mut others: Vec<_> = keys.iter().filter(|key| !two_devices.contains(*key)).collect();
    others.sort();
    assert_eq!(others, without.iter().collect::<Vec<_>>());
    assert!(two_devices.iter().all(|key| keys.contains(key)), "{keys:?}");
}

#[test]
fn the_file_says_what_it_is_and_is_a_card() {
    let model = CardModel::find("rtx4090").expect("the card is known");
    let calibration = calibrated(&Simulator::builder().card(model).build());
    let text = calibration.to_toml();
    assert!(text.contains("# Not measured, as on the H200: rates.host_numa_kernel"), "{text}");
    let table = CostTable::from_toml(&text).expect("it is read");
    assert_eq!(table.name, "rtx4090");
    for part in ["NVIDIA GeForce RTX 4090", "2030-01-02", "driver", "vramp calibrate"] {
        assert!(table.source.contains(part), "{}", table.source);
    }
    let again = Simulator::builder().described_by(table).build();
    assert_eq!(again.info().limits.memory, model.memory);
    assert_eq!(again.memory_info().expect("a query").free, model.usable());
}

#[test]
fn a_small_card_is_never_asked_for_more_than_half_of_what_is_free() {
    for mib in [0, 4, 50, 300, 3000] {
        let device = Simulator::builder().memory(Bytes::mib(mib.max(2))).build();
        calibrated(&device);
        assert!(device.device_bytes_peak() * 2 <= Bytes::mib(mib.max(2)) + Bytes::mib(2), "{mib}");
    }
}

#[test]
fn what_a_device_lacks_is_not_measured() {
    let none = Capabilities {
        virtual_memory: false,
        stream_ordered_pool: false,
        host_numa: false,
        pinned_host: false,
        remap_beside_kernels: false,
        graphs: false,
        posix_fd: false,
        fabric: false,
        rdma: false,
        dma_buf: false,
    };
    let calibration = calibrated(&Simulator::builder().capabilities(none).build());
    let text = calibration.to_toml();
    for key in
        ["sized.create.alone", "fixed.malloc-async", "per_mib.alloc-host", "fixed.instantiate"]
    {
        assert!(calibration.not_measured.iter().any(|it| it.key == key), "{key}: {text}");
    }
    let h200 = CostTable::h200();
    assert_eq!(calibration.spec.sized[&Call::Create], h200.spec().sized[&Call::Create]);
    assert!(CostTable::from_toml(&text).is_ok());
}

#[test]
fn a_failed_call_leaves_nothing_behind() {
    let probe = device(&made());
    calibrated(&probe);
    // The first call has failed before `calibrated`.
    for n in failing_calls(probe.calls() - 1) {
        let device = Arc::new(device(&made()));
        device.set_faults(FaultPlan::nth(n + 1).with_code(2));
        calibrated(&device);
    }
}

#[test]
fn a_lost_device_is_an_error() {
    let device = device(&made());
    device.set_faults(FaultPlan::nth_of(Call::Map, 3).with_code(700));
    let options = Options { duration: Duration::ZERO, date: String::new() };
    let error = run(&device, &options).expect_err("the device is lost").to_string();
    assert!(error.starts_with("cannot measure this device"), "{error}");
}
