//! Contents that take fewer bytes on the disk, from the card and from the host.

use vramp_defer::SpillError;
use vramp_driver::HostSlice;
use vramp_host::Direction;
use vramp_tiers::disk::DiskTierError;
use vramp_tiers::movers::MoveError;

use super::below::{fail, flip, to_disk};
use super::faulty::{EINTR, EIO, ENOSPC, Fault, Faulty};
use super::*;

/// Compresses whatever saves a tenth, however long that takes.
const ALWAYS: CompressionConfig =
    CompressionConfig { least_saving_per_mille: 100, short_below_per_mille: 1000 };

/// How contents reach the disk.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// From the card, for the host has no room but for staging.
    Straight,
    /// From the host, where they were first.
    Pushed,
}

const WAYS: [Way; 2] = [Way::Straight, Way::Pushed];

fn plan(way: Way, io: Option<Arc<dyn BlockIo>>) -> Plan {
    let host = match way {
        Way::Straight => MIB(4),
        Way::Pushed => MIB(512),
    };
    Plan { host, compression: Some(ALWAYS), ..to_disk(io) }
}

/// In turn a MiB of words of which every other is zero, one that does not compress, and one byte.
fn mixture(seed: u64, len: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![seed as u8; len as usize];
    for (index, part) in bytes.chunks_mut(1 << 20).enumerate() {
        match index % 3 {
            0 => part.chunks_mut(8).step_by(2).for_each(|word| random.fill(word)),
            1 => random.fill(part),
            _ => {}
        }
    }
    bytes
}

impl Rig {
    fn holding(&self, bytes: &[u8]) -> DeferrableBuffer {
        let len = Bytes::new(bytes.len() as u64);
        let buffer = self.manager.buffer(len).unwrap();
        let host = self.sim.alloc_host(len).unwrap();
        self.sim.write_host(host, Bytes::ZERO, bytes).unwrap();
        let lease = buffer.lease(Access::Exclusive, self.stream).unwrap();
        let slice = HostSlice { buffer: host, offset: Bytes::ZERO, len };
        self.sim.copy_to_device(self.queue, slice, lease.address(0).start).unwrap();
        drop(lease);
        self.sim.synchronize_stream(self.queue).unwrap();
        self.sim.free_host(host).unwrap();
        buffer
    }

    /// Reads all its bytes, under a lease.
    fn bytes_of(&self, buffer: &DeferrableBuffer) -> Result<Vec<u8>, SpillError> {
        let lease = buffer.lease(Access::Shared, self.stream)?;
        self.sim.synchronize_stream(self.queue).unwrap();
        Ok(self.sim.peek(lease.address(0)).unwrap())
    }

    /// Evicts everything to the disk, as far as possible.
    fn send(&self, way: Way) {
        self.manager.spill(MIB(64));
        if matches!(way, Way::Pushed) {
            self.manager.relieve_host(MIB(512));
        }
    }
}

#[test]
fn compressed_contents_come_back_whichever_way_they_reached_the_disk() {
    for (way, choice) in
        WAYS.iter().flat_map(|way| [IoChoice::Auto, IoChoice::Threads].map(|choice| (*way, choice)))
    {
        let rig = plan(way, Some(open_io(choice, 8).unwrap().io)).build();
        let contents = [mixture(1, (20 << 20) + 12_345), mixture(2, (9 << 20) + 1)];
        let buffers = contents.each_ref().map(|bytes| rig.holding(bytes));
        for _ in 0..2 {
            rig.send(way);
            assert!(buffers.iter().all(|buffer| !buffer.is_resident()));
            for (buffer, bytes) in buffers.iter().zip(&contents) {
                assert!(&rig.bytes_of(buffer).unwrap() == bytes, "{way:?} {choice:?}");
            }
        }
        rig.check();
        // A third is as it was, of the rest less than a third is left.
        let all: u64 = contents.iter().map(|bytes| bytes.len() as u64).sum();
        let on_disk = rig.total(SpaceId::disk(0)).count();
        assert!((all / 3..all * 6 / 10).contains(&on_disk), "{on_disk} of {all}");
        let stats = rig.store.as_ref().unwrap().stats().compression;
        assert!(stats.writes > 0 && stats.bytes > stats.on_disk, "{stats:?}");
        assert!(stats.decompressed * 2 > stats.bytes, "{stats:?}");
        // What moved is counted in bytes of the contents.
        assert_eq!(rig.manager.stats().to_disk_bytes, all);
        drop(buffers);
        rig.expect_nothing();
    }
}

#[test]
fn contents_that_do_not_compress_are_on_the_disk_as_they_are() {
    for way in WAYS {
        let rig = plan(way, None).build();
        let mut bytes = vec![0; 20 << 20];
        fastrand::Rng::with_seed(3).fill(&mut bytes);
        let buffer = rig.holding(&bytes);
        rig.send(way);
        assert_eq!(rig.total(SpaceId::disk(0)), MIB(20));
        assert!(rig.bytes_of(&buffer).unwrap() == bytes);
        let stats = rig.store.as_ref().unwrap().stats().compression;
        assert_eq!((stats.writes, stats.saved_too_little), (0, 5), "{way:?}");
        drop(buffer);
        rig.expect_nothing();
    }
}

#[test]
fn a_bit_that_flipped_in_compressed_contents_is_found_before_anybody_sees_them() {
    for way in WAYS {
        let rig = Plan { names: FileNames::Shown, ..plan(way, None) }.build();
        let bytes = mixture(5, 16 << 20);
        let buffer = rig.holding(&bytes);
        rig.send(way);
        let at = 4096 + (1 << 20) + 77;
        flip(&rig, at);
        let error = rig.bytes_of(&buffer).err().unwrap();
        let SpillError::Damaged { error: found, .. } = &error else { panic!("{error}") };
        assert!(matches!(found, DiskTierError::Corrupt { .. }), "{error}");
        assert!(!buffer.is_resident(), "what is wrong is never lent");
        flip(&rig, at);
        assert!(rig.bytes_of(&buffer).unwrap() == bytes);
        rig.check();
    }
}

#[test]
fn contents_whose_compressed_bytes_cannot_be_written_or_read_stay_whole_where_they_were() {
    for (way, code) in WAYS.iter().flat_map(|way| [EIO, ENOSPC].map(|code| (*way, code))) {
        let io = Faulty::new();
        let rig = plan(way, Some(Arc::<Faulty>::clone(&io))).build();
        let bytes = mixture(7, (24 << 20) + 5);
        let buffer = rig.holding(&bytes);
        for good in [0, 1, 5] {
            let mut seen = 0;
            io.set(move |request| {
                seen += u32::from(request.direction == Direction::Write);
                let hit = request.direction == Direction::Write && seen > good;
                if hit { Fault::Fail(code) } else { Fault::None }
            });
            rig.send(way);
            assert!(rig.manager.stats().failures > 0, "{way:?} {code} {good}");
            rig.check();
            io.heal();
            assert!(rig.bytes_of(&buffer).unwrap() == bytes);
            // Written again, it has no copy below.
            drop(buffer.lease(Access::Exclusive, rig.stream).unwrap());
        }
        rig.send(way);
        io.set(fail(Direction::Read, EIO));
        let error = rig.bytes_of(&buffer).err().unwrap();
        assert!(matches!(error, SpillError::Move(MoveError::Disk { .. })), "{error}");
        io.heal();
        assert!(rig.bytes_of(&buffer).unwrap() == bytes);
        drop(buffer);
        rig.expect_nothing();
    }
}

#[test]
fn failures_of_the_disk_at_random_lose_no_compressed_contents() {
    for seed in 0..6 {
        let io = Faulty::new();
        let way = WAYS[(seed % 2) as usize];
        let rig = plan(way, Some(Arc::<Faulty>::clone(&io))).build();
        let mut random = fastrand::Rng::with_seed(seed);
        let contents = [1, 2, 3].map(|index| mixture(seed * 3 + index, random.u64(5..20) << 20));
        let buffers = contents.each_ref().map(|bytes| rig.holding(bytes));
        let mut dice = fastrand::Rng::with_seed(seed + 1000);
        io.set(move |_| match dice.u32(..40) {
            0 => Fault::Fail(EIO),
            1 => Fault::Fail(ENOSPC),
            2..6 => Fault::Short(Bytes::kib(4)),
            6..9 => Fault::Fail(EINTR),
            _ => Fault::None,
        });
        for _ in 0..8 {
            rig.send(way);
            for buffer in &buffers {
                // It may fail.
                let _ = buffer.lease(Access::Exclusive, rig.stream);
            }
            rig.manager.audit().unwrap();
        }
        io.heal();
        for (buffer, bytes) in buffers.iter().zip(&contents) {
            assert!(&rig.bytes_of(buffer).unwrap() == bytes, "{way:?} {seed}");
        }
        rig.check();
        drop(buffers);
        rig.expect_nothing();
    }
}
