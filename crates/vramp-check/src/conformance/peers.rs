//! Rules of two devices that are peers of each other.

use vramp_core::{AddrRange, Bytes};

use super::rig::{Rig, pattern, refused};
use super::sharing::{POSIX_FD, expect_taken};
use super::{Checked, Failure, PeerCase, Verdict};
use vramp_driver::{Capabilities, DeviceCopy, Driver, ErrorKind, MemoryLocation, MemoryProperties};

const WITH_BYTES: fn(&Capabilities) -> bool = |can| can.virtual_memory && can.pinned_host;
const WITH_IMPORT: fn(&Capabilities) -> bool = |can| WITH_BYTES(can) && can.posix_fd;

macro_rules! peer_rules {
    ($($name:ident: $needs:expr,)*) => {
        pub(super) const CASES: &[PeerCase] = &[
            $(PeerCase { name: stringify!($name), needs: $needs, check: $name },)*
        ];
    };
}

peer_rules! {
    a_peer_copy_works_where_only_the_owners_have_access: WITH_BYTES,
    a_peer_copy_works_where_both_devices_have_access: WITH_BYTES,
    a_peer_copy_needs_memory_of_one_of_its_devices: WITH_BYTES,
    a_copy_to_another_device_without_access_is_refused: WITH_BYTES,
    access_is_granted_to_peers_only: WITH_BYTES,
    access_that_was_revoked_is_gone_and_the_own_stays: WITH_BYTES,
    memory_on_a_peer_is_counted_there_and_used_here: WITH_BYTES,
    memory_that_a_peer_exported_is_used_here: WITH_IMPORT,
}

impl PeerCase {
    /// Checks the rule on two devices and frees all that was allocated. Not applicable unless they are
    /// peers of each other.
    pub fn run(&self, device: &dyn Driver, peer: &dyn Driver) -> Verdict {
        let (own, other) = (device.info(), peer.info());
        let linked = own.peers.contains(&other.ordinal) && other.peers.contains(&own.ordinal);
        if !linked || ![own, other].iter().all(|info| (self.needs)(&info.capabilities)) {
            return Verdict::NotApplicable;
        }
        let rigs = [Rig::new(device), Rig::new(peer)];
        let mut checked = (self.check)(&rigs[0], &rigs[1]);
        // No memory is freed while work of the other device may use it.
        for rig in &rigs {
            checked = checked.and(rig.synchronize());
        }
        let checked = rigs.into_iter().fold(checked, |checked, rig| {
            let cleaned = rig.clean_up();
            checked.and(cleaned)
        });
        match checked {
            Ok(()) => Verdict::Passed,
            Err(Failure(seen)) => Verdict::Failed(seen),
        }
    }
}

fn copy(from: AddrRange, to: AddrRange) -> DeviceCopy {
    DeviceCopy { from: from.start, to: to.start, len: from.len }
}

/// Copies a pattern to the peer and back, on streams of both devices.
fn copy_there_and_back(rig: &Rig, peer: &Rig, ours: AddrRange, theirs: AddrRange) -> Checked {
    let bytes = pattern(3, ours.len);
    let (stream, other) = (rig.stream()?, peer.stream()?);
    rig.write(stream, ours.start, &bytes)?;
    rig.device.copy_peer(stream, copy(ours, theirs), peer.device)?;
    rig.device.synchronize_stream(stream)?;
    peer.expect_bytes(other, theirs, &bytes)?;
    rig.device.fill(stream, ours, 0)?;
    rig.device.synchronize_stream(stream)?;
    peer.device.copy_peer(other, copy(theirs, ours), rig.device)?;
    peer.device.synchronize_stream(other)?;
    rig.expect_bytes(stream, ours, &bytes)?;
    // A device also fetches from the other one.
    peer.device.fill(other, theirs, 0x51)?;
    peer.device.synchronize_stream(other)?;
    rig.device.copy_peer(stream, copy(theirs, ours), peer.device)?;
    rig.expect_filled(stream, ours, 0x51)
}

fn a_peer_copy_works_where_only_the_owners_have_access(rig: &Rig, peer: &Rig) -> Checked {
    let ours = rig.memory(&[rig.page, rig.page])?;
    let theirs = peer.memory(&[rig.pages(2)])?;
    copy_there_and_back(rig, peer, ours, theirs)
}

fn a_peer_copy_works_where_both_devices_have_access(rig: &Rig, peer: &Rig) -> Checked {
    let ours = rig.memory(&[rig.page, rig.page])?;
    let theirs = peer.memory(&[rig.pages(2)])?;
    rig.device.set_access(ours, &[peer.device.info().ordinal])?;
    peer.device.set_access(theirs, &[rig.device.info().ordinal])?;
    copy_there_and_back(rig, peer, ours, theirs)
}

fn a_peer_copy_needs_memory_of_one_of_its_devices(rig: &Rig, peer: &Rig) -> Checked {
    let ours = rig.memory(&[rig.page])?;
    let stream = rig.stream()?;
    let nowhere = AddrRange::new(ours.start + rig.page * 1_000_000, rig.page);
    for sides in [copy(ours, nowhere), copy(nowhere, ours)] {
        let copied = rig.device.copy_peer(stream, sides, peer.device);
        refused("copy of memory of neither", ErrorKind::InvalidUse, copied)?;
    }
    Ok(())
}

fn a_copy_to_another_device_without_access_is_refused(rig: &Rig, peer: &Rig) -> Checked {
    let ours = rig.memory(&[rig.page])?;
    let theirs = peer.memory(&[rig.page])?;
    let stream = rig.stream()?;
    for sides in [copy(ours, theirs), copy(theirs, ours)] {
        let copied = rig.device.copy(stream, sides);
        refused("copy without access", ErrorKind::InvalidUse, copied)?;
    }
    rig.device.fill(stream, ours, 0x52)?;
    rig.expect_filled(stream, ours, 0x52)
}

fn access_is_granted_to_peers_only(rig: &Rig, peer: &Rig) -> Checked {
    let ours = rig.memory(&[rig.page])?;
    let own = rig.device.info().ordinal;
    let unknown = rig.device.info().peers.iter().chain([&own]).max().map_or(1, |last| last + 1);
    for wrong in [own, unknown, u32::MAX] {
        let granted = rig.device.set_access(ours, &[wrong]);
        refused("access for no peer", ErrorKind::InvalidUse, granted)?;
        let revoked = rig.device.revoke_access(ours, &[wrong]);
        refused("no access for no peer", ErrorKind::InvalidUse, revoked)?;
        let properties = MemoryProperties::at(MemoryLocation::Peer(wrong));
        let created = rig.create_with(rig.page, properties);
        refused("memory on no peer", ErrorKind::InvalidUse, created)?;
    }
    let theirs = peer.device.info().ordinal;
    let gap = rig.reserve(rig.page)?;
    refused("access to nothing", ErrorKind::InvalidUse, rig.device.set_access(gap, &[theirs]))?;
    let revoked = rig.device.revoke_access(gap, &[theirs]);
    refused("no access to nothing", ErrorKind::InvalidUse, revoked)
}

fn access_that_was_revoked_is_gone_and_the_own_stays(rig: &Rig, peer: &Rig) -> Checked {
    let ours = rig.memory(&[rig.page, rig.page])?;
    let theirs = peer.memory(&[rig.pages(2)])?;
    let (stream, other) = (rig.stream()?, peer.stream()?);
    let ordinal = peer.device.info().ordinal;
    rig.device.set_access(ours, &[ordinal])?;
    rig.device.revoke_access(ours, &[ordinal])?;
    let copied = peer.device.copy(other, copy(ours, theirs));
    refused("copy after the access was revoked", ErrorKind::InvalidUse, copied)?;
    rig.device.fill(stream, ours, 0x53)?;
    rig.expect_filled(stream, ours, 0x53)?;
    // It can be granted again, and revoking what was not granted is no error.
    rig.device.revoke_access(ours, &[ordinal])?;
    rig.device.set_access(ours, &[ordinal])?;
    rig.device.copy_peer(stream, copy(ours, theirs), peer.device)?;
    rig.device.synchronize_stream(stream)?;
    peer.expect_filled(other, theirs, 0x53)
}

fn memory_on_a_peer_is_counted_there_and_used_here(rig: &Rig, peer: &Rig) -> Checked {
    let len = rig.whole_pages(Bytes::mib(64));
    let before = [rig.device.memory_info()?.free, peer.device.memory_info()?.free];
    let ordinal = peer.device.info().ordinal;
    let [seen, own] = [rig.device.peer_memory_info(ordinal)?, peer.device.memory_info()?];
    if seen.total != own.total {
        let (seen, own) = (seen.total, own.total);
        return Err(Failure(format!("a peer with {own} has {seen} as seen from here")));
    }
    let properties = MemoryProperties::at(MemoryLocation::Peer(ordinal));
    let handle = rig.create_with(len, properties)?;
    let range = rig.mapped_again(handle, len)?;
    expect_taken(rig, before[0], Bytes::ZERO, "on the device that created memory on a peer")?;
    expect_taken(peer, before[1], len, "on the peer")?;
    let ours = rig.memory(&[rig.page])?;
    let part = AddrRange::new(range.start, rig.page);
    let stream = rig.stream()?;
    let bytes = pattern(9, rig.page);
    rig.write(stream, ours.start, &bytes)?;
    rig.device.copy(stream, copy(ours, part))?;
    rig.expect_bytes(stream, part, &bytes)?;
    rig.device.fill(stream, part, 0x54)?;
    rig.device.copy(stream, copy(part, ours))?;
    rig.expect_filled(stream, ours, 0x54)
}

fn memory_that_a_peer_exported_is_used_here(rig: &Rig, peer: &Rig) -> Checked {
    let handle = peer.create_with(rig.page, POSIX_FD)?;
    let theirs = peer.mapped_again(handle, rig.page)?;
    let imported = rig.import(&peer.device.export(handle)?, rig.page)?;
    let here = rig.mapped_again(imported, rig.page)?;
    let ours = rig.memory(&[rig.page])?;
    let (stream, other) = (rig.stream()?, peer.stream()?);
    rig.device.fill(stream, ours, 0x55)?;
    rig.device.copy(stream, copy(ours, here))?;
    rig.device.synchronize_stream(stream)?;
    peer.expect_filled(other, theirs, 0x55)?;
    peer.device.fill(other, theirs, 0x56)?;
    peer.device.synchronize_stream(other)?;
    rig.expect_filled(stream, here, 0x56)
}
