//! Export and import, in one process and between processes.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{
    Capabilities, Driver, DriverResult, ErrorKind, ExportedHandle, Handle, HandleType,
    MemoryLocation, MemoryProperties,
};
use vramp_host::MappedMemory;

const PAGE: Bytes = Bytes::mib(2);

const SHARED: MemoryProperties = MemoryProperties {
    location: MemoryLocation::Device,
    handle_type: HandleType::PosixFd,
    rdma: false,
};

fn mapped_to_host() -> Simulator {
    Simulator::builder().mapped_to(Arc::new(MappedMemory::new().unwrap())).checked().build()
}

fn in_tables() -> Simulator {
    Simulator::builder().contents(Contents::Stored).checked().build()
}

fn map(device: &Simulator, handle: Handle, len: Bytes) -> AddrRange {
    let range = AddrRange::new(device.reserve(len, PAGE).unwrap(), len);
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    range
}

fn fill(device: &Simulator, range: AddrRange, byte: u8) {
    let stream = device.create_stream().unwrap();
    device.fill(stream, range, byte).unwrap();
    device.synchronize_stream(stream).unwrap();
}

fn first_byte(device: &Simulator, range: AddrRange) -> u8 {
    device.peek(AddrRange::new(range.start, Bytes::new(1))).unwrap()[0]
}

fn kind<T: std::fmt::Debug>(result: DriverResult<T>) -> ErrorKind {
    result.expect_err("it is refused").kind
}

fn fd(exported: ExportedHandle) -> OwnedFd {
    match exported {
        ExportedHandle::PosixFd(fd) => fd,
        ExportedHandle::Fabric(_) => panic!("it is a descriptor"),
    }
}

#[test]
fn an_imported_handle_is_the_same_memory_and_outlives_the_exporters() {
    for device in [mapped_to_host(), in_tables()] {
        let handle = device.create(PAGE, SHARED).unwrap();
        let range = map(&device, handle, PAGE);
        fill(&device, range, 7);
        let exported = device.export(handle).unwrap();
        let imported = device.import(&exported, PAGE).unwrap();
        assert_ne!(imported, handle);
        assert_eq!((device.live().device_bytes, device.live().handles), (PAGE, 2));
        let again = map(&device, imported, PAGE);
        assert_eq!(first_byte(&device, again), 7);
        fill(&device, again, 8);
        assert_eq!(first_byte(&device, range), 8);
        device.unmap(range).unwrap();
        device.release(handle).unwrap();
        drop(exported);
        assert_eq!(first_byte(&device, again), 8);
        assert_eq!(device.live().device_bytes, PAGE);
        device.release(imported).unwrap();
        assert_eq!(device.live().device_bytes, PAGE);
        device.unmap(again).unwrap();
        assert_eq!(device.live().device_bytes, Bytes::ZERO);
        assert_eq!(device.hazards(), []);
    }
}

#[test]
fn a_descriptor_alone_keeps_the_memory_until_it_is_closed() {
    let host = Arc::new(MappedMemory::new().unwrap());
    for device in [in_tables(), Simulator::builder().mapped_to(Arc::clone(&host)).build()] {
        let free = device.memory_info().unwrap().free;
        let handle = device.create(PAGE, SHARED).unwrap();
        let range = map(&device, handle, PAGE);
        fill(&device, range, 3);
        let exported = device.export(handle).unwrap();
        device.unmap(range).unwrap();
        device.release(handle).unwrap();
        let live = device.live();
        assert_eq!((live.handles, live.handles_released_but_exported), (0, 1));
        assert_eq!(device.memory_info().unwrap().free, free - PAGE);
        let imported = device.import(&exported, PAGE).unwrap();
        let range = map(&device, imported, PAGE);
        assert_eq!(first_byte(&device, range), 3);
        device.unmap(range).unwrap();
        device.release(imported).unwrap();
        assert_eq!(device.live().device_bytes, PAGE);
        drop(exported);
        assert_eq!(device.memory_info().unwrap().free, free);
        assert_eq!(device.live().handles_released_but_exported, 0);
    }
    assert_eq!(host.pages(), 0);
}

#[test]
fn a_dma_buf_keeps_all_memory_that_it_covers() {
    for device in [mapped_to_host(), in_tables()] {
        let range = AddrRange::new(device.reserve(PAGE * 3, PAGE).unwrap(), PAGE * 3);
        for at in 0..2 {
            let handle = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
            device.map(range.start + PAGE * at, handle).unwrap();
            device.release(handle).unwrap();
        }
        assert_eq!(kind(device.export_dma_buf(range)), ErrorKind::InvalidUse);
        let both = AddrRange::new(range.start, PAGE * 2);
        let buffer = device.export_dma_buf(both).unwrap();
        assert_eq!(
            kind(device.import(&ExportedHandle::PosixFd(buffer.try_clone().unwrap()), PAGE)),
            ErrorKind::InvalidUse
        );
        device.unmap(both).unwrap();
        assert_eq!(device.live().device_bytes, PAGE * 2);
        drop(buffer);
        assert_eq!(device.live().device_bytes, Bytes::ZERO);
    }
    let none = Capabilities { dma_buf: false, ..in_tables().info().capabilities };
    let device = Simulator::builder().capabilities(none).build();
    let at = device.alloc_memory(PAGE).unwrap();
    let refused = device.export_dma_buf(AddrRange::new(at, PAGE));
    assert_eq!(kind(refused), ErrorKind::NotSupported);
}

#[test]
fn what_cannot_be_exported_or_imported_is_refused() {
    let device = mapped_to_host();
    let private = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
    let refused = device.export(private).unwrap_err();
    assert_eq!((refused.code, refused.kind), (1, ErrorKind::InvalidUse));
    assert!(refused.to_string().contains("posix-fd"), "{refused}");
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let file = File::open("/proc/self/exe").unwrap();
    for garbage in [OwnedFd::from(socket), OwnedFd::from(file)] {
        let garbage = ExportedHandle::PosixFd(garbage);
        assert_eq!(kind(device.import(&garbage, PAGE)), ErrorKind::InvalidUse);
    }
    assert_eq!(kind(device.import(&ExportedHandle::Fabric([1; 64]), PAGE)), ErrorKind::InvalidUse);
    let on_host = MemoryProperties { location: MemoryLocation::HostNuma(0), ..SHARED };
    assert_eq!(kind(device.create(PAGE, on_host)), ErrorKind::NotSupported);
    let shared = device.create(PAGE, SHARED).unwrap();
    let exported = device.export(shared).unwrap();
    assert_eq!(kind(device.import(&exported, Bytes::new(1))), ErrorKind::InvalidUse);
    let short = device.import(&exported, PAGE * 2).unwrap();
    let at = device.reserve(PAGE * 2, PAGE).unwrap();
    assert_eq!(kind(device.map(at, short)), ErrorKind::NotSupported);
    device.release(short).unwrap();
    assert_eq!(kind(device.release(short)), ErrorKind::InvalidUse);
    // Without the host's memory the bytes of another simulator are out of reach.
    let tables = in_tables();
    for (importer, exporter) in [(&tables, &device), (&device, &tables), (&tables, &in_tables())] {
        let handle = exporter.create(PAGE, SHARED).unwrap();
        let exported = exporter.export(handle).unwrap();
        let refused = importer.import(&exported, PAGE).unwrap_err();
        assert_eq!(refused.kind, ErrorKind::NotSupported);
        assert!(refused.to_string().contains("mapped_to"), "{refused}");
    }
}

#[test]
fn another_simulator_imports_the_bytes_and_keeps_them_when_the_exporter_is_gone() {
    let (exporter, importer) = (mapped_to_host(), mapped_to_host());
    let handle = exporter.create(PAGE * 2, SHARED).unwrap();
    let range = map(&exporter, handle, PAGE * 2);
    fill(&exporter, range, 31);
    let exported = exporter.export(handle).unwrap();
    let wrong = importer.import(&exported, PAGE).unwrap();
    let at = importer.reserve(PAGE, PAGE).unwrap();
    assert_eq!(kind(importer.map(at, wrong)), ErrorKind::NotSupported);
    importer.release(wrong).unwrap();
    let imported = importer.import(&exported, PAGE * 2).unwrap();
    drop(exported);
    assert_eq!((importer.live().handles, importer.live().device_bytes), (1, Bytes::ZERO));
    let theirs = map(&importer, imported, PAGE * 2);
    assert_eq!(first_byte(&importer, theirs), 31);
    fill(&importer, theirs, 32);
    assert_eq!(first_byte(&exporter, range), 32);
    // What was imported can be exported again, and a dma-buf of it is the exporter's business.
    let again = exporter.import(&importer.export(imported).unwrap(), PAGE * 2).unwrap();
    assert_eq!(exporter.live().device_bytes, PAGE * 2);
    exporter.release(again).unwrap();
    assert_eq!(kind(importer.export_dma_buf(theirs)), ErrorKind::NotSupported);
    exporter.unmap(range).unwrap();
    exporter.release(handle).unwrap();
    assert_eq!(exporter.live().device_bytes, PAGE * 2);
    drop(exporter);
    assert_eq!(first_byte(&importer, theirs), 32);
    importer.release(imported).unwrap();
    assert_eq!(first_byte(&importer, theirs), 32);
    importer.unmap(theirs).unwrap();
    assert_eq!(importer.live().handles_released_but_mapped, 0);
}

#[test]
fn a_mapping_alone_keeps_the_exporters_memory() {
    let (exporter, importer) = (mapped_to_host(), mapped_to_host());
    let handle = exporter.create(PAGE, SHARED).unwrap();
    let imported = importer.import(&exporter.export(handle).unwrap(), PAGE).unwrap();
    let range = map(&importer, imported, PAGE);
    exporter.release(handle).unwrap();
    importer.release(imported).unwrap();
    assert_eq!(exporter.live().device_bytes, PAGE);
    importer.unmap(range).unwrap();
    assert_eq!(exporter.live().device_bytes, Bytes::ZERO);
}

#[test]
fn fabric_handles_need_permission() {
    let fabric = MemoryProperties { handle_type: HandleType::Fabric, ..SHARED };
    let device = in_tables();
    assert!(device.info().capabilities.fabric);
    let refused = device.create(PAGE, fabric).unwrap_err();
    assert_eq!((refused.code, refused.name.as_ref()), (800, "CUDA_ERROR_NOT_PERMITTED"));
    let [first, second] = <[Simulator; 2]>::try_from(
        Simulator::builder().contents(Contents::Stored).with_fabric().build_machine(2),
    )
    .unwrap();
    let handle = first.create(PAGE, fabric).unwrap();
    let range = map(&first, handle, PAGE);
    fill(&first, range, 4);
    let exported = first.export(handle).unwrap();
    let imported = second.import(&exported, PAGE).unwrap();
    let theirs = map(&second, imported, PAGE);
    assert_eq!(first_byte(&second, theirs), 4);
    assert_eq!(kind(device.import(&exported, PAGE)), ErrorKind::NotSupported);
    second.unmap(theirs).unwrap();
    second.release(imported).unwrap();
    first.unmap(range).unwrap();
    first.release(handle).unwrap();
    // The bytes keep nothing alive.
    assert_eq!(first.live().device_bytes, Bytes::ZERO);
    assert_eq!(kind(second.import(&exported, PAGE)), ErrorKind::InvalidUse);
}

#[test]
fn another_device_of_the_machine_imports_memory_of_the_first() {
    let [first, second] = <[Simulator; 2]>::try_from(
        Simulator::builder().contents(Contents::Stored).checked().build_machine(2),
    )
    .unwrap();
    let handle = first.create(PAGE, SHARED).unwrap();
    let ours = map(&first, handle, PAGE);
    let imported = second.import(&first.export(handle).unwrap(), PAGE).unwrap();
    let theirs = map(&second, imported, PAGE);
    fill(&second, theirs, 9);
    assert_eq!(first_byte(&first, ours), 9);
    assert_eq!(second.live().device_bytes, Bytes::ZERO);
    assert_eq!(first.live().device_bytes, PAGE);
    // One memory by two addresses on two devices: the race detector sees it.
    let (one, two) = (first.create_stream().unwrap(), second.create_stream().unwrap());
    first.fill(one, ours, 1).unwrap();
    second.fill(two, theirs, 2).unwrap();
    assert_eq!(first.hazards_found(), 1);
}

#[test]
fn ten_thousand_exports_that_were_closed_leave_nothing() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let device = mapped_to_host();
    let (before, descriptors) = (device.live(), open());
    for _ in 0..10_000 {
        let handle = device.create(PAGE, SHARED).unwrap();
        let exported = device.export(handle).unwrap();
        let imported = device.import(&exported, PAGE).unwrap();
        device.release(handle).unwrap();
        device.release(imported).unwrap();
        assert_eq!(device.live().handles_released_but_exported, 1);
        drop(exported);
        assert_eq!(device.live(), before);
    }
    // Other tests of this program open descriptors at the same time.
    assert!(open() < descriptors + 200);
}

// --- two processes ---

/// Variable by which the test program is the other process of a test.
const ROLE: &str = "VRAMP_TEST_IMPORTER";

/// Starts this program as the importer of `exported`, which it gets as its standard input. It prints a
/// line when it has imported, and ends when its standard output is read and its input is closed.
fn importer(exported: &ExportedHandle, keeps: &str) -> Child {
    let ExportedHandle::PosixFd(fd) = exported else { panic!("it is a descriptor") };
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sharing::the_importing_process", "--nocapture"])
        .env(ROLE, keeps)
        .stdin(Stdio::from(fd.try_clone().unwrap()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Reads lines of the importer up to one with `wanted`.
fn wait_for(child: &mut Child, wanted: &str) {
    use std::io::{BufRead, BufReader};
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let found = lines.map_while(Result::ok).any(|line| line.contains(wanted));
    assert!(found, "the importer ended without '{wanted}'");
}

/// What the importing process does. Nothing unless a test of this file started it.
#[test]
fn the_importing_process() {
    let Ok(keeps) = std::env::var(ROLE) else { return };
    let device = mapped_to_host();
    let received = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let handle = device.import(&ExportedHandle::PosixFd(received), PAGE).unwrap();
    assert_eq!(device.live().device_bytes, Bytes::ZERO);
    let range = map(&device, handle, PAGE);
    assert_eq!(first_byte(&device, range), 21);
    fill(&device, range, 22);
    if keeps == "ends" {
        return;
    }
    println!("imported");
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

#[test]
fn another_process_imports_what_this_one_exported() {
    let host = Arc::new(MappedMemory::new().unwrap());
    let device = Simulator::builder().mapped_to(Arc::clone(&host)).build();
    let handle = device.create(PAGE, SHARED).unwrap();
    let range = map(&device, handle, PAGE);
    fill(&device, range, 21);
    let exported = device.export(handle).unwrap();
    let output = importer(&exported, "ends").wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(first_byte(&device, range), 22);
    drop(exported);
    device.unmap(range).unwrap();
    device.release(handle).unwrap();
    assert_eq!((device.live().device_bytes, host.pages()), (Bytes::ZERO, 0));
}

#[test]
fn a_killed_importer_gives_the_memory_back() {
    let host = Arc::new(MappedMemory::new().unwrap());
    let device = Simulator::builder().mapped_to(Arc::clone(&host)).build();
    let handle = device.create(PAGE, SHARED).unwrap();
    let range = map(&device, handle, PAGE);
    fill(&device, range, 21);
    let exported = device.export(handle).unwrap();
    let mut child = importer(&exported, "stays");
    drop(fd(exported));
    wait_for(&mut child, "imported");
    device.unmap(range).unwrap();
    device.release(handle).unwrap();
    // Only the other process keeps it, by a descriptor and a mapping.
    assert_eq!(device.live().device_bytes, PAGE);
    assert_eq!(host.pages() * 4096, PAGE.count());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((device.live().device_bytes, host.pages()), (Bytes::ZERO, 0));
}
