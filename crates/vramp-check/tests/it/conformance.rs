//! The simulator passes the conformance suite.

use std::sync::Arc;

use vramp_check::conformance::{self, Verdict};
use vramp_core::{AddrRange, Bytes};
use vramp_driver::meter::Metered;
use vramp_driver::sim::{CardModel, Contents, FaultPlan, Simulator};
use vramp_driver::{Call, Capabilities, Driver};
use vramp_host::MappedMemory;

#[test]
fn every_card_model_passes_the_suite_without_hazards_or_leaks() {
    let models = CardModel::all();
    for number in vramp_testing::sampled(models.len() as u64, 3) {
        let preset = &models[number as usize - 1];
        let device = Simulator::builder().card(preset).contents(Contents::Stored).checked().build();
        let before = device.live();
        let report = conformance::run_all(&device);
        assert!(report.passed(), "{report}");
        let applied = report.verdicts.iter().all(|(_, verdict)| *verdict == Verdict::Passed);
        assert!(applied, "a simulated card can do everything: {report}");
        assert_eq!(device.live(), before);
        assert_eq!(device.hazards(), []);
    }
}

#[test]
fn a_card_that_is_mapped_to_the_host_passes_the_suite_and_leaves_no_page() {
    let host = Arc::new(MappedMemory::new().unwrap());
    let device = Simulator::builder().mapped_to(Arc::clone(&host)).checked().build();
    let before = device.live();
    let report = conformance::run_all(&device);
    assert!(report.passed(), "{report}");
    assert_eq!(device.live(), before);
    assert_eq!(device.hazards(), []);
    assert_eq!(host.pages(), 0);
    drop(device);
    assert_eq!(Arc::strong_count(&host), 1);
}

#[test]
fn what_the_card_writes_is_in_the_hosts_memory() {
    let host = Arc::new(MappedMemory::new().unwrap());
    let device = Simulator::builder().mapped_to(Arc::clone(&host)).build();
    let page = device.info().limits.page;
    let stream = device.create_stream().unwrap();
    let at = device.alloc_memory(page + page).unwrap();
    device.fill(stream, AddrRange::new(at + page, page), 7).unwrap();
    device.synchronize_stream(stream).unwrap();
    assert_eq!(host.pages() * 4096, page.count());
    device.free_memory(at).unwrap();
    assert_eq!(host.pages(), 0);
}

#[test]
fn two_devices_of_a_machine_pass_the_cases_of_two_devices() {
    for mapped in [false, true] {
        let mut builder = Simulator::builder().contents(Contents::Stored).checked();
        if mapped {
            builder = builder.mapped_to(Arc::new(MappedMemory::new().unwrap()));
        }
        let devices = builder.build_machine(3);
        let before: Vec<_> = devices.iter().map(Simulator::live).collect();
        // Pages of the host are written by system calls, which cost most of such a run.
        let pairs = if mapped { &[(2, 0)][..] } else { &[(0, 1), (2, 0)] };
        for &(one, other) in pairs {
            let report = conformance::run_peers(&devices[one], &devices[other]);
            assert!(report.passed(), "{report}");
            let applied = report.verdicts.iter().all(|(_, verdict)| *verdict == Verdict::Passed);
            assert!(applied, "{report}");
        }
        if !mapped {
            let alone = conformance::run_all(&devices[1]);
            assert!(alone.passed(), "{alone}");
        }
        assert_eq!(devices.iter().map(Simulator::live).collect::<Vec<_>>(), before);
        assert_eq!(devices[0].hazards(), []);
    }
}

#[test]
fn devices_without_a_link_run_no_case_of_two_devices() {
    let devices = Simulator::builder().without_link(0, 1).build_machine(2);
    let report = conformance::run_peers(&devices[0], &devices[1]);
    assert!(!report.passed());
    assert!(report.verdicts.iter().all(|(_, verdict)| *verdict == Verdict::NotApplicable));
}

#[test]
fn a_failing_case_of_two_devices_frees_what_it_allocated() {
    for call in [Call::Create, Call::SetAccess, Call::CopyPeer, Call::RevokeAccess, Call::Import] {
        for (n, faulty) in [(1, 0), (2, 0), (1, 1), (2, 1)] {
            for case in conformance::peer_cases() {
                let builder = Simulator::builder().memory(Bytes::gib(1));
                let devices = builder.contents(Contents::Stored).build_machine(2);
                devices[faulty].set_faults(FaultPlan::nth_of(call, n).with_code(304));
                case.run(&devices[0], &devices[1]);
                for device in &devices {
                    assert_eq!(device.live(), Default::default(), "{} at {call} {n}", case.name);
                }
            }
        }
    }
}

#[test]
fn a_metered_device_passes_the_suite() {
    let simulator = Simulator::builder().contents(Contents::Stored).build();
    let device = Metered::new(&simulator);
    let report = conformance::run_all(&device);
    assert!(report.passed(), "{report}");
    assert_eq!(device.snapshot().total().calls, simulator.calls());
    assert_eq!(device.snapshot().total().total_ns, simulator.now_ns());
}

#[test]
fn a_card_with_fewer_capabilities_passes_what_is_left() {
    let all = Simulator::builder().build().info().capabilities;
    let lacking = [
        Capabilities { virtual_memory: false, ..all },
        Capabilities { stream_ordered_pool: false, ..all },
        Capabilities { host_numa: false, ..all },
        Capabilities { pinned_host: false, ..all },
        Capabilities { remap_beside_kernels: false, ..all },
        Capabilities { graphs: false, ..all },
        Capabilities { posix_fd: false, ..all },
        Capabilities { rdma: false, ..all },
        Capabilities { dma_buf: false, ..all },
    ];
    for number in vramp_testing::sampled(lacking.len() as u64, 4) {
        let capabilities = lacking[number as usize - 1];
        let device =
            Simulator::builder().contents(Contents::Stored).capabilities(capabilities).build();
        let report = conformance::run_all(&device);
        assert!(report.passed(), "{report}");
        let skipped = |(_, verdict): &(_, Verdict)| *verdict == Verdict::NotApplicable;
        assert!(report.verdicts.iter().any(skipped), "{report}");
    }
}

#[test]
fn destructive_cases_pass_on_a_device_of_their_own() {
    for case in conformance::destructive_cases() {
        let device = Simulator::builder().contents(Contents::Stored).build();
        assert_eq!(case.run(&device), Verdict::Passed, "{}", case.name);
        assert!(device.device_loss().is_some(), "{}", case.name);
    }
}

#[test]
fn a_device_that_keeps_no_bytes_fails_the_suite() {
    let device = Simulator::builder().contents(Contents::Discarded).build();
    let report = conformance::run_all(&device);
    assert!(!report.passed(), "{report}");
    assert_eq!(device.live(), Default::default(), "failed cases clean up too");
}

#[test]
fn a_failing_case_frees_what_it_allocated() {
    const CALLS: [Call; 12] = [
        Call::Map,
        Call::Create,
        Call::SetAccess,
        Call::Record,
        Call::AllocHost,
        Call::RegisterHost,
        Call::BeginCapture,
        Call::EndCapture,
        Call::Instantiate,
        Call::Export,
        Call::Import,
        Call::ExportDmaBuf,
    ];
    let device = |faults| {
        let builder = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored);
        builder.faults(faults).build()
    };
    let mut made = [0; CALLS.len()];
    for case in conformance::cases() {
        let whole = device(FaultPlan::none());
        assert_eq!(case.run(&whole), Verdict::Passed, "{}", case.name);
        for (call, made) in CALLS.into_iter().zip(&mut made) {
            *made += whole.calls_of(call);
            for n in 1..=whole.calls_of(call).min(3) {
                let faulty = device(FaultPlan::nth_of(call, n).with_code(304));
                case.run(&faulty);
                assert_eq!(faulty.live(), Default::default(), "{} at {call} {n}", case.name);
            }
        }
    }
    assert!(made.iter().all(|made| *made > 0), "a call is in no case: {made:?}");
}
