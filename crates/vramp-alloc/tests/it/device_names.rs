//! Names of simulated machines with several devices.

use vramp_alloc::device::{
    AddrRange, Device, DeviceOptions, Driver, MemoryProperties, OpenError, open, open_all,
    open_all_mapped, open_mapped, open_ordinals_mapped,
};
use vramp_core::Bytes;

fn ids(name: &str) -> Vec<String> {
    let opened = open_all(name).expect("the name is valid");
    opened.iter().map(|opened| opened.info().id.clone()).collect()
}

#[test]
fn a_count_behind_a_card_names_a_machine() {
    assert_eq!(ids("sim"), ["sim:h200"]);
    assert_eq!(ids("sim:h200x2"), ["sim:h200x2:0", "sim:h200x2:1"]);
    // A card whose name ends with an x and digits is no count.
    assert_eq!(ids("sim:rtx4090"), ["sim:rtx4090"]);
    assert_eq!(ids("sim:rtx4090x3").len(), 3);
    assert_eq!(ids("sim:h200x1"), ["sim:h200"]);
}

#[test]
fn an_ordinal_names_one_device_whose_id_is_a_name() {
    for name in ["sim:h200x2:1", "sim:a100-80gx8:7"] {
        assert_eq!(ids(name), [name]);
        assert_eq!(open(name).expect("a device").info().id, name);
        assert_eq!(open_mapped(name).expect("a device").info().id, name);
        let device = Device::open(name).expect("a device");
        assert_eq!(device.info().id, name);
        assert_eq!(device.fresh(false).expect("a device").driver.info().id, name);
    }
    assert_eq!(open("sim:h200x2").expect("a device").info().id, "sim:h200x2:0");
}

#[test]
fn machines_that_cannot_be_are_refused() {
    for name in ["sim:h200x0", "sim:h200x65", "sim:h200x2:2"] {
        let error = open(name).err().expect("there is none");
        assert!(matches!(error, OpenError::Devices { .. }), "{error}");
        assert!(error.to_string().contains("1 to 64"), "{error}");
    }
    for name in ["sim:h900x2", "sim:h200xtwo", "sim:h200x2:one", "sim:h200:0"] {
        assert!(matches!(open_all(name), Err(OpenError::Card(_))), "{name}");
    }
}

#[test]
fn options_hold_for_every_card_of_a_machine() {
    let name = "sim:h200x2:1".to_owned();
    let usable = Some(Bytes::gib(2));
    let device = Device::with(DeviceOptions { name, usable, costs: None }).expect("a device");
    let driver = device.fresh(false).expect("a device").driver;
    assert_eq!(driver.memory_info().expect("a query").free, Bytes::gib(2));
}

#[test]
fn devices_of_one_call_share_addresses_and_those_of_two_do_not() {
    let len = Bytes::mib(2);
    let mapped = |driver: &dyn Driver, peers: &[u32]| {
        let range = AddrRange::new(driver.reserve(len, len)?, len);
        let handle = driver.create(len, MemoryProperties::DEVICE)?;
        driver.map(range.start, handle)?;
        driver.set_access(range, peers).map(|()| range)
    };
    let opened = open_all_mapped("sim:h200x2").expect("a machine");
    let [first, second] = [&opened[0], &opened[1]].map(|opened| &**opened);
    let ours = mapped(first, &[1]).expect("memory");
    let theirs = mapped(second, &[]).expect("memory");
    assert!(first.owns(ours) && second.owns(theirs) && !first.owns(theirs));
    let stream = second.create_stream().expect("a stream");
    second.fill(stream, ours, 9).expect("access was granted");
    second.synchronize_stream(stream).expect("the fill is legal");
    let others = open_all("sim:h200x2").expect("a machine");
    assert!(others.iter().all(|opened| !opened.owns(ours)));
}

#[test]
fn devices_are_opened_by_ordinal_in_the_order_asked_for() {
    let ids = |name: &str, ordinals: &[u32]| -> Vec<String> {
        let opened = open_ordinals_mapped(name, ordinals).expect("the machine has them");
        opened.iter().map(|opened| opened.info().id.clone()).collect()
    };
    assert_eq!(ids("sim:h200x4", &[3, 1]), ["sim:h200x4:3", "sim:h200x4:1"]);
    assert_eq!(ids("sim:h200x4:3", &[3]), ["sim:h200x4:3"]);
    assert_eq!(ids("sim", &[]), Vec::<String>::new());
    for (name, ordinals) in
        [("sim:h200x2", [0, 2]), ("sim:h200x2", [1, 1]), ("sim:h200x2:1", [1, 0])]
    {
        let error = open_ordinals_mapped(name, &ordinals).err().expect("there is no such device");
        let OpenError::Ordinal { ordinal, .. } = error else { panic!("{error}") };
        assert_eq!(ordinal, ordinals[1]);
    }
}

#[test]
fn a_card_without_its_prefix_is_named_as_it_is_meant() {
    for (name, meant) in
        [("h200", "sim:h200"), ("h200x2", "sim:h200x2"), ("rtx4090", "sim:rtx4090")]
    {
        let error = open(name).err().expect("it has no prefix").to_string();
        assert!(error.ends_with(&format!("did you mean '{meant}'?")), "{error}");
    }
    assert!(open("gpu").err().is_some_and(|error| error.to_string().ends_with("FILE.toml")));
}
