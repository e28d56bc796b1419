//! Topologies read from directories of test files, valid and malformed, and all forms of
//! `CUDA_VISIBLE_DEVICES`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;
use vramp_core::Bytes;
use vramp_host::NumaNode;
use vramp_host::topology::{
    DiskKind, IgnoreReason, MigId, NicCheck, PathType, Topology, TopologyError, VisibleDevice,
    VisibleDevices,
};

/// A temporary directory with the files of a machine.
struct Machine(TempDir);

impl Machine {
    fn new() -> Machine {
        Machine(TempDir::new().unwrap())
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, to: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(to, path).unwrap();
    }

    /// Adds a PCI device below these bridges. Returns its path in `sys`.
    fn pci(&self, bridges: &str, address: &str, node: i32, class: &str, vendor: &str) -> String {
        let place = format!("devices/{bridges}/{address}");
        self.link(&format!("sys/bus/pci/devices/{address}"), &format!("../../../{place}"));
        for (file, text) in [
            ("vendor", vendor),
            ("class", class),
            ("numa_node", &node.to_string()),
            ("local_cpulist", if node == 1 { "32-63,96-127" } else { "0-31,64-95" }),
            ("current_link_speed", "2.5 GT/s PCIe"),
            ("current_link_width", "16"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("max_link_width", "16"),
        ] {
            self.file(&format!("sys/{place}/{file}"), &format!("{text}\n"));
        }
        place
    }

    fn gpu(&self, bridges: &str, address: &str, node: i32, uuid: &str) {
        self.pci(bridges, address, node, "0x030200", "0x10de");
        self.file(
            &format!("proc/driver/nvidia/gpus/{address}/information"),
            &format!(
                "Model: \t\t NVIDIA H200\nIRQ:   \t\t 17\nGPU UUID: \t {uuid}\n\
                 Bus Location: \t {address}\nGPU Excluded:\t No\n"
            ),
        );
    }

    fn node(&self, node: u32, kib: u64, cpus: &str) {
        let folder = format!("sys/devices/system/node/node{node}");
        let free = kib / 2;
        self.file(
            &format!("{folder}/meminfo"),
            &format!("Node {node} MemTotal:  {kib} kB\nNode {node} MemFree:  {free} kB\n"),
        );
        self.file(&format!("{folder}/cpulist"), cpus);
    }

    fn read(&self) -> Result<Topology, TopologyError> {
        Topology::read(self.0.path())
    }
}

const SWITCH: &str = "pci0000:3a/0000:3a:00.0/0000:3b:00.0";

/// Two nodes and four GPUs: two below one switch, one below a port beside it, one at the other
/// node.
fn server() -> Machine {
    let machine = Machine::new();
    machine.gpu(&format!("{SWITCH}/0000:3c:00.0"), "0000:3d:00.0", 0, "GPU-aaaa1111-0000");
    machine.gpu(&format!("{SWITCH}/0000:3c:01.0"), "0000:3e:00.0", 0, "GPU-aaaa2222-0000");
    machine.gpu("pci0000:3a/0000:3a:01.0", "0000:50:00.0", 0, "GPU-bbbb3333-0000");
    machine.gpu("pci0000:a0/0000:a0:01.0", "0000:a1:00.0", 1, "GPU-????????-????");
    machine.pci("pci0000:3a", "0000:3a:1f.0", 0, "0x060100", "0x8086");
    machine.pci("pci0000:00", "0000:00:02.0", 0, "0x030000", "0x1a03");
    machine.file("sys/devices/system/node/online", "0-1\n");
    machine.node(0, 1 << 20, "0-31,64-95\n");
    machine.node(1, 1 << 21, "32-63,96-127\n");
    add_disks(&machine);
    add_networks(&machine);
    machine
}

/// Adds an NVMe drive below the GPUs' switch with a volume on its partition, and a hard disk.
fn add_disks(machine: &Machine) {
    let bridges = format!("{SWITCH}/0000:3c:02.0");
    let slot = machine.pci(&bridges, "0000:3f:00.0", 0, "0x010802", "0x144d");
    let disk = format!("{slot}/nvme/nvme0/nvme0n1");
    machine.link("sys/block/nvme0n1", &format!("../{disk}"));
    machine.file(&format!("sys/{disk}/dev"), "259:0\n");
    machine.file(&format!("sys/{disk}/size"), "7501476528\n");
    machine.file(&format!("sys/{disk}/device/model"), "SAMSUNG MZQL23T8HCLS-00A07          \n");
    machine.file(&format!("sys/{disk}/nvme0n1p1/dev"), "259:1\n");
    machine.file(&format!("sys/{disk}/nvme0n1p1/partition"), "1\n");
    machine.file("sys/block/sda/dev", "8:0\n");
    machine.file("sys/block/sda/size", "1024\n");
    machine.file("sys/block/sda/device/model", "Plates\n");
    machine.file("sys/block/sda/queue/rotational", "1\n");
    machine.file("sys/block/loop0/size", "1024\n");
    machine.file("sys/block/dm-0/dev", "253:0\n");
    machine.file("sys/block/dm-0/slaves/nvme0n1p1/keep", "");
    machine.file(
        "proc/self/mountinfo",
        "22 1 8:0 / / rw,relatime shared:1 - xfs /dev/sda rw\n\
         30 22 253:0 / /data\\040fast rw - ext4 /dev/mapper/fast rw\n\
         31 22 0:44 / /pool rw - btrfs /dev/sda rw,subvol=/\n\
         32 22 0:5 / /dev rw - devtmpfs udev rw\n",
    );
}

/// Adds a network card with an address, one without, and one that is down and has no interface.
fn add_networks(machine: &Machine) {
    let bridges = format!("{SWITCH}/0000:3c:03.0");
    let slot = machine.pci(&bridges, "0000:41:00.0", 0, "0x020000", "0x15b3");
    machine.link("sys/class/net/eth0", &format!("../../{slot}/net/eth0"));
    machine.file(&format!("sys/{slot}/net/eth0/device/vendor"), "0x15b3\n");
    machine.file(&format!("sys/{slot}/net/eth0/operstate"), "up\n");
    machine.file(&format!("sys/{slot}/net/eth0/speed"), "400000\n");
    machine.link("sys/class/infiniband/mlx5_0", &format!("../../{slot}/infiniband/mlx5_0"));
    machine.file(&format!("sys/{slot}/infiniband/mlx5_0/ports/1/state"), "4: ACTIVE\n");
    machine.file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n");
    machine.file("dev/infiniband/uverbs0", "");
    let slot = machine.pci("pci0000:a0/0000:a0:02.0", "0000:a2:00.0", 1, "0x020000", "0x8086");
    machine.link("sys/class/net/eth1", &format!("../../{slot}/net/eth1"));
    machine.file(&format!("sys/{slot}/net/eth1/device/vendor"), "0x8086\n");
    machine.file(&format!("sys/{slot}/net/eth1/operstate"), "up\n");
    machine.file(&format!("sys/{slot}/net/eth1/speed"), "-1\n");
    let slot = machine.pci("pci0000:a0/0000:a0:03.0", "0000:a3:00.0", 1, "0x020700", "0x15b3");
    machine.link("sys/class/infiniband/mlx5_1", &format!("../../{slot}/infiniband/mlx5_1"));
    machine.file(&format!("sys/{slot}/infiniband/mlx5_1/ports/1/state"), "1: DOWN\n");
    machine.file("sys/class/net/lo/operstate", "unknown\n");
    machine.file("proc/net/route", "Iface\tDestination\neth0\t0000A8C0\n");
}

#[test]
fn a_server_is_discovered_with_its_cards_and_nodes() {
    let topology = server().read().unwrap();
    assert_eq!(topology.warnings, []);
    let cards: Vec<String> = topology.gpus.iter().map(|gpu| gpu.pci.address.to_string()).collect();
    assert_eq!(cards, ["0000:3d:00.0", "0000:3e:00.0", "0000:50:00.0", "0000:a1:00.0"]);
    let gpu = &topology.gpus[0];
    assert_eq!(gpu.model.as_deref(), Some("NVIDIA H200"));
    assert_eq!(gpu.uuid.as_deref(), Some("GPU-aaaa1111-0000"));
    assert_eq!(topology.gpus[3].uuid, None, "it was never used");
    assert_eq!(gpu.pci.numa, Some(NumaNode(0)));
    assert_eq!(gpu.pci.cpus.as_ref().unwrap().to_string(), "0-31,64-95");
    assert_eq!(gpu.pci.link.max.unwrap().to_string(), "PCIe 5 x16");
    assert_eq!(gpu.pci.link.current.unwrap().to_string(), "PCIe 1 x16");
    assert_eq!(topology.nodes.len(), 2);
    let node = topology.node(NumaNode(1)).unwrap();
    assert_eq!((node.memory, node.free), (Some(Bytes::gib(2)), Some(Bytes::gib(1))));
}

#[test]
fn disks_are_discovered_with_what_is_mounted_from_them() {
    let topology = server().read().unwrap();
    let [nvme, plates] = topology.disks.as_slice() else { panic!("two disks") };
    assert_eq!((nvme.name.as_str(), nvme.kind), ("nvme0n1", Some(DiskKind::Nvme)));
    assert_eq!((plates.name.as_str(), plates.kind), ("sda", Some(DiskKind::Rotational)));
    assert_eq!(nvme.capacity, Some(Bytes::new(7_501_476_528 * 512)));
    assert_eq!(nvme.model.as_deref(), Some("SAMSUNG MZQL23T8HCLS-00A07"));
    assert_eq!(nvme.pci.as_ref().unwrap().address.to_string(), "0000:3f:00.0");
    assert_eq!(nvme.mounts.len(), 1, "through the volume on its partition");
    assert_eq!(nvme.mounts[0].point, Path::new("/data fast"));
    let points: Vec<&Path> = plates.mounts.iter().map(|mount| mount.point.as_path()).collect();
    assert_eq!(points, [Path::new("/"), Path::new("/pool")], "btrfs by the name of its source");
}

#[test]
fn network_cards_are_discovered_with_their_devices_for_remote_access() {
    let topology = server().read().unwrap();
    let names: Vec<&str> = topology.nics.iter().map(|nic| nic.name.as_str()).collect();
    assert_eq!(names, ["eth0", "eth1", "mlx5_1"], "nothing without hardware");
    assert_eq!(topology.nics[0].rdma, ["mlx5_0"]);
    assert_eq!(topology.nics[0].megabits, Some(400_000));
    assert_eq!(topology.nics[1].megabits, None);
}

#[test]
fn the_path_between_devices_comes_from_the_tree_of_bridges_and_not_from_bus_numbers() {
    let topology = server().read().unwrap();
    let gpu = |nth: usize| &topology.gpus[nth].pci;
    let nvme = topology.disks[0].pci.as_ref().unwrap();
    assert_eq!(topology.path(gpu(0), gpu(0)), PathType::Same);
    assert_eq!(topology.path(gpu(0), gpu(1)), PathType::Pix);
    assert_eq!(topology.path(gpu(0), nvme), PathType::Pix);
    // Two ports of one host bridge, nineteen bus numbers apart.
    assert_eq!(topology.path(gpu(0), gpu(2)), PathType::Phb);
    assert_eq!(topology.path(gpu(0), gpu(3)), PathType::Sys);
    assert_eq!(topology.path(gpu(3), topology.nics[1].pci.as_ref().unwrap()), PathType::Phb);
}

#[test]
fn each_check_of_network_cards_is_stricter_than_the_last_and_the_strictest_is_the_default() {
    let topology = server().read().unwrap();
    let passing = |check| {
        let passing = topology.nics.iter().filter(|nic| nic.passes(check));
        let mut names: Vec<_> = passing.map(|nic| nic.name.as_str()).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(passing(NicCheck::Exists), ["eth0", "eth1", "mlx5_1"]);
    assert_eq!(passing(NicCheck::Active), ["eth0", "eth1"]);
    assert_eq!(passing(NicCheck::Addressed), ["eth0"]);
    assert_eq!(NicCheck::default(), NicCheck::Addressed);
}

#[test]
fn a_machine_without_cards_is_a_machine_and_one_without_files_is_an_error() {
    let bare = Machine::new();
    let error = bare.read().unwrap_err().to_string();
    assert!(error.contains(&bare.0.path().display().to_string()), "{error}");
    bare.file("proc/meminfo", "MemTotal:       1048576 kB\nMemFree:         524288 kB\n");
    bare.file("sys/devices/system/cpu/online", "0-3\n");
    let topology = bare.read().unwrap();
    assert_eq!(topology.gpus, []);
    assert_eq!(topology.nodes.len(), 1, "a kernel without nodes has one");
    assert_eq!(topology.nodes[0].memory, Some(Bytes::gib(1)));
    assert_eq!(topology.nodes[0].cpus.as_ref().unwrap().len(), 4);
}

#[test]
fn cards_that_only_the_driver_lists_are_cards() {
    let container = Machine::new();
    container.file("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t NVIDIA L4\n");
    let topology = container.read().unwrap();
    assert_eq!(topology.gpus[0].model.as_deref(), Some("NVIDIA L4"));
    assert_eq!(topology.gpus[0].pci.path, None);
}

#[test]
fn this_machine_is_discovered_whatever_it_is() {
    let topology = Topology::discover().unwrap();
    assert!(topology.host_nodes().next().is_some());
    let here = topology.directory(&std::env::temp_dir()).unwrap();
    assert!(here.capacity >= here.free && !here.capacity.is_zero(), "{here:?}");
    let error = topology.directory(Path::new("/no/such/place")).unwrap_err().to_string();
    assert!(error.contains("/no/such/place") && error.contains("name one"), "{error}");
}

#[test]
fn what_cannot_be_read_is_absent_and_what_is_malformed_is_remarked_on() {
    let machine = server();
    let gpu = format!("sys/devices/{SWITCH}/0000:3c:00.0/0000:3d:00.0");
    machine.file(&format!("{gpu}/numa_node"), "-1\n");
    machine.file(&format!("{gpu}/local_cpulist"), "many\n");
    machine.file(&format!("{gpu}/max_link_speed"), "Unknown\n");
    machine.file(&format!("{gpu}/current_link_width"), "wide\n");
    machine.file("sys/devices/system/node/node1/meminfo", "nothing\n");
    machine.file("sys/devices/system/node/node1/cpulist", "\n");
    fs::remove_file(machine.0.path().join("sys/block/sda/size")).unwrap();
    machine.file("proc/self/mountinfo", "no mount\n");
    let topology = machine.read().unwrap();
    let pci = &topology.gpus[0].pci;
    assert_eq!((pci.numa, pci.cpus.as_ref()), (None, None));
    assert_eq!((pci.link.max, pci.link.current), (None, None));
    assert_eq!(topology.nodes[1].memory, None);
    assert!(topology.nodes[1].is_device_memory(), "a node without processors");
    assert_eq!(topology.host_nodes().count(), 1);
    assert_eq!(topology.disks[1].capacity, None);
    let warnings: Vec<String> = topology.warnings.iter().map(ToString::to_string).collect();
    for words in [
        "cpulist has unexpected contents: 'many'",
        "current_link_width",
        "node1/meminfo",
        "'no mount'",
    ] {
        assert!(warnings.iter().any(|warning| warning.contains(words)), "{words}: {warnings:?}");
    }
    assert!(!warnings.iter().any(|warning| warning.contains("max_link_speed")), "{warnings:?}");
}

#[test]
fn a_disk_with_several_ways_to_it_sits_where_its_controller_does() {
    let machine = Machine::new();
    let slot = machine.pci("pci0000:00/0000:00:01.0", "0000:01:00.0", -1, "0x010802", "0x144d");
    let subsystem = "devices/virtual/nvme-subsystem/nvme-subsys0";
    machine.link("sys/block/nvme0n1", &format!("../{subsystem}/nvme0n1"));
    machine.file(&format!("sys/{subsystem}/nvme0n1/size"), "8\n");
    machine.file(&format!("sys/{subsystem}/nvme0n1/device/model"), "Disk\n");
    machine.link(&format!("sys/{subsystem}/nvme0"), &format!("../../../../{slot}/nvme/nvme0"));
    let topology = machine.read().unwrap();
    let pci = topology.disks[0].pci.as_ref().unwrap();
    assert_eq!(pci.address.to_string(), "0000:01:00.0");
    assert_eq!(pci.numa, None);
}

#[test]
fn a_directory_is_on_the_disk_its_mount_is_on() {
    let machine = server();
    let place = TempDir::new().unwrap();
    let path = place.path().canonicalize().unwrap();
    let point = path.display();
    machine.file(
        "proc/self/mountinfo",
        &format!("2 1 8:0 / / rw - xfs /dev/sda rw\n3 2 259:1 / {point} rw - ext4 /dev/x rw\n"),
    );
    let directory = machine.read().unwrap().directory(&path).unwrap();
    assert_eq!(directory.disk.as_deref(), Some("nvme0n1"));
    assert_eq!(directory.mount.unwrap().filesystem, "ext4");
}

#[test]
fn no_text_in_any_file_breaks_the_discovery() {
    let machine = server();
    let gpu = format!("sys/devices/{SWITCH}/0000:3c:00.0/0000:3d:00.0");
    let on_the_card = ["class", "numa_node", "local_cpulist", "max_link_speed", "max_link_width"];
    let mut files = on_the_card.map(|file| format!("{gpu}/{file}")).to_vec();
    files.extend(
        [
            "sys/devices/system/node/online",
            "sys/devices/system/node/node0/meminfo",
            "sys/devices/system/node/node0/cpulist",
            "sys/block/sda/size",
            "sys/block/sda/dev",
            "sys/block/sda/queue/rotational",
            "proc/self/mountinfo",
            "proc/net/route",
            "proc/driver/nvidia/gpus/0000:50:00.0/information",
        ]
        .map(str::to_owned),
    );
    proptest!(|(text in "\\PC{0,60}|[-0-9, :/kB]{0,30}")| {
        for file in &files {
            machine.file(file, &text);
        }
        prop_assert!(machine.read().is_ok());
    });
}

const UUIDS: [Option<&str>; 4] =
    [Some("GPU-9942190a-aa31"), Some("GPU-9e8d35e3-a134"), Some("GPU-e429a63e-c61c"), None];

/// Returns the GPUs that a value shows.
fn shown(variable: &str) -> Vec<usize> {
    VisibleDevices::parse(Some(variable), &UUIDS).gpus().collect()
}

/// Returns the reasons why entries of a value are ignored.
fn reasons(variable: &str) -> Vec<IgnoreReason> {
    let visible = VisibleDevices::parse(Some(variable), &UUIDS);
    visible.ignored.iter().map(|ignored| ignored.reason).collect()
}

const NONE: [usize; 0] = [];
const OUT: IgnoreReason = IgnoreReason::OutOfRange { count: 4 };

#[test]
fn an_unset_variable_shows_all_cards_and_an_empty_one_none() {
    let all = VisibleDevices::parse(None, &UUIDS);
    assert_eq!(all.gpus().collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(VisibleDevices::parse(Some(""), &UUIDS), VisibleDevices::default());
    assert_eq!(shown("  "), NONE);
}

#[test]
fn numbers_show_cards_in_the_order_of_the_list() {
    assert_eq!(shown("2,1"), [2, 1]);
    assert_eq!(shown(" 0 ,\t3"), [0, 3]);
    assert_eq!(shown("2, +3, -0, 1"), [2, 3, 0, 1]);
    assert_eq!(shown("1gpu2,2ampere"), [1, 2]);
}

#[test]
fn a_number_out_of_range_hides_itself_and_all_behind_it_and_is_no_error() {
    assert_eq!(shown("0,2,-1,1"), [0, 2]);
    assert_eq!(reasons("0,2,-1,1"), [OUT, IgnoreReason::AfterInvalid]);
    assert_eq!(shown("1,4,0"), [1]);
    assert_eq!(shown("one,2"), NONE);
    assert_eq!(shown("3,two,1"), [3]);
    assert_eq!(shown("0,,1"), [0]);
    let bare = VisibleDevices::parse(Some("0"), &[]);
    assert_eq!(bare.ignored[0].reason, IgnoreReason::OutOfRange { count: 0 });
}

#[test]
fn a_number_that_fits_in_no_integer_is_out_of_range_and_never_another_number() {
    for number in ["4294967296", "18446744073709551616", "99999999999999999999999999"] {
        assert_eq!(reasons(number), [OUT], "{number}");
        assert_eq!(shown(&format!("1,-{number},2")), [1]);
    }
}

#[test]
fn the_beginning_of_a_uuid_shows_the_only_card_that_has_it() {
    assert_eq!(shown("GPU-e4, GPU-9e8d35e3"), [2, 1]);
    assert_eq!(shown("GPU-e429a63e-c61c"), [2]);
    assert_eq!(shown("GPU-9e,GPU-9,GPU-e"), [1]);
    let ambiguous = IgnoreReason::AmbiguousUuid { matches: 2 };
    assert_eq!(reasons("GPU-9e,GPU-9,GPU-e"), [ambiguous, IgnoreReason::AfterInvalid]);
    assert_eq!(reasons("GPU-123,GPU-e4"), [IgnoreReason::UnknownUuid, IgnoreReason::AfterInvalid]);
}

#[test]
fn an_entry_of_another_form_ends_the_list() {
    assert_eq!(shown("GPU-e4, 1"), [2]);
    assert_eq!(shown("1,GPU-e4,0"), [1]);
    assert_eq!(reasons("1,GPU-e4,0"), [IgnoreReason::MixedForms, IgnoreReason::AfterInvalid]);
}

#[test]
fn a_card_named_twice_hides_all() {
    assert_eq!(shown("0,1,2,1"), NONE);
    assert_eq!(shown("GPU-e4,GPU-9e,GPU-e429"), NONE);
    let others = IgnoreReason::HiddenByDuplicate;
    assert_eq!(reasons("0,0,1"), [others, IgnoreReason::Duplicate, others]);
    assert_eq!(shown("0,-1,0"), [0], "what is hidden is not named");
}

#[test]
fn one_part_of_a_split_card_is_shown() {
    let visible = VisibleDevices::parse(Some("MIG-GPU-e429a63e-c61c/1/2,MIG-89c850dc"), &UUIDS);
    let gpu = "GPU-e429a63e-c61c".to_owned();
    let id = MigId::Instance { gpu, gpu_instance: 1, compute_instance: 2 };
    assert_eq!(id.to_string(), "MIG-GPU-e429a63e-c61c/1/2");
    assert_eq!(visible.devices, [VisibleDevice::Mig { id, gpu: Some(2) }]);
    assert_eq!(visible.ignored[0].reason, IgnoreReason::ExtraMig);
    let alone = VisibleDevices::parse(Some("MIG-89c850dc-1"), &UUIDS);
    let id = MigId::Uuid("MIG-89c850dc-1".to_owned());
    assert_eq!(alone.devices, [VisibleDevice::Mig { id, gpu: None }]);
}

#[test]
fn a_name_of_no_part_is_refused() {
    for text in [
        "MIG-",
        "MIG-GPU-",
        "MIG-GPU-e4",
        "MIG-GPU-e4/1",
        "MIG-GPU-e4/1/2/3",
        "MIG-GPU-e4/+1/2",
        "MIG-xyz",
    ] {
        assert_eq!(reasons(text), [IgnoreReason::NotADevice], "{text}");
        let error = text.parse::<MigId>().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

proptest! {
    #[test]
    fn any_text_shows_each_card_at_most_once_and_accounts_for_every_entry(
        text in "\\PC{0,40}|[-+0-9,GPUMI/e ]{0,40}|(GPU-|MIG-|MIG-GPU-)?[0-9a-f/,-]{0,20}",
        count in 0usize..5,
    ) {
        let uuids = &UUIDS[..count.min(UUIDS.len())];
        let visible = VisibleDevices::parse(Some(&text), uuids);
        let mut shown: Vec<usize> = visible.gpus().collect();
        prop_assert!(shown.iter().all(|&place| place < uuids.len()));
        shown.sort_unstable();
        shown.dedup();
        prop_assert_eq!(shown.len(), visible.gpus().count());
        let entries = if text.is_empty() { 0 } else { text.split(',').count() };
        prop_assert_eq!(visible.devices.len() + visible.ignored.len(), entries);
    }
}
