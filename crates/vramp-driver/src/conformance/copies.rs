//! Bytes through pinned host memory.

use vramp_core::{AddrRange, Bytes};

use super::bench::{Bench, pattern, refused};
use super::{Checked, ensure, rules};
use crate::{Capabilities, Copy, ErrorKind, HostBuffer, HostSlice};

const PINNED: fn(&Capabilities) -> bool = |can| can.pinned_host;
const WITH_MEMORY: fn(&Capabilities) -> bool = |can| can.pinned_host && can.virtual_memory;

rules! {
    the_host_reads_what_it_wrote: PINNED,
    host_memory_is_bounded: PINNED,
    host_memory_is_freed_once: PINNED,
    bytes_come_back_across_handles_and_at_odd_offsets: WITH_MEMORY,
    a_copy_moves_its_range_and_nothing_beside: WITH_MEMORY,
    a_fill_writes_its_range_and_nothing_beside: WITH_MEMORY,
    a_copy_beyond_host_memory_is_refused: WITH_MEMORY,
}

fn the_host_reads_what_it_wrote(bench: &Bench) -> Checked {
    let len = Bytes::mib(3);
    let buffer = bench.host(len)?;
    let bytes = pattern(1, len);
    bench.device.write_host(buffer, Bytes::ZERO, &bytes)?;
    let mut back = vec![0; 1000];
    bench.device.read_host(buffer, Bytes::new(12_345), &mut back)?;
    ensure!(back == bytes[12_345..13_345], "host memory does not hold what was written");
    Ok(())
}

fn host_memory_is_bounded(bench: &Bench) -> Checked {
    let invalid = ErrorKind::InvalidUse;
    let buffer = bench.host(Bytes::kib(64))?;
    let device = bench.device;
    let mut two = [0; 2];
    for offset in [Bytes::kib(64) - Bytes::new(1), Bytes::kib(65), Bytes::new(u64::MAX)] {
        refused("read beyond the end", invalid, device.read_host(buffer, offset, &mut two))?;
        refused("write beyond the end", invalid, device.write_host(buffer, offset, &two))?;
    }
    device.write_host(buffer, Bytes::kib(64) - Bytes::new(2), &two)?;
    Ok(())
}

fn host_memory_is_freed_once(bench: &Bench) -> Checked {
    let invalid = ErrorKind::InvalidUse;
    let buffer = bench.host(Bytes::kib(64))?;
    bench.free_host(buffer)?;
    refused("free twice", invalid, bench.free_host(buffer))?;
    let read = bench.device.read_host(buffer, Bytes::ZERO, &mut [0]);
    refused("read what was freed", invalid, read)?;
    let foreign = HostBuffer::from_number(u64::MAX - 1);
    refused("free a foreign buffer", invalid, bench.free_host(foreign))
}

fn bytes_come_back_across_handles_and_at_odd_offsets(bench: &Bench) -> Checked {
    let range = bench.memory(&[1, 2, 1].map(|pages| bench.pages(pages)))?;
    let stream = bench.stream()?;
    let inside = bench.page - Bytes::new(777);
    let bytes = pattern(5, bench.pages(2) + Bytes::new(1234));
    bench.write(stream, range.start + inside, &bytes)?;
    let written = AddrRange::new(range.start + inside, Bytes::new(bytes.len() as u64));
    bench.expect_bytes(stream, written, &bytes)
}

fn a_copy_moves_its_range_and_nothing_beside(bench: &Bench) -> Checked {
    let from = bench.memory(&[bench.page, bench.page])?;
    let to = bench.memory(&[bench.pages(2)])?;
    let stream = bench.stream()?;
    let bytes = pattern(7, from.len);
    bench.write(stream, from.start, &bytes)?;
    bench.device.fill(stream, to, 0xEE)?;
    let (source, target, len) = (Bytes::new(1001), Bytes::new(3), bench.page + Bytes::new(5));
    let copy = Copy { from: from.start + source, to: to.start + target, len };
    bench.device.copy(stream, copy)?;
    let mut expected = vec![0xEE; to.len.count() as usize];
    let (source, target, len) =
        (source.count() as usize, target.count() as usize, len.count() as usize);
    expected[target..target + len].copy_from_slice(&bytes[source..source + len]);
    bench.expect_bytes(stream, to, &expected)
}

fn a_fill_writes_its_range_and_nothing_beside(bench: &Bench) -> Checked {
    let range = bench.memory(&[bench.page, bench.page])?;
    let stream = bench.stream()?;
    bench.device.fill(stream, range, 0x01)?;
    let offset = bench.page - Bytes::new(3);
    let part = AddrRange::new(range.start + offset, Bytes::new(7));
    bench.device.fill(stream, part, 0x02)?;
    let mut expected = vec![0x01; range.len.count() as usize];
    let offset = offset.count() as usize;
    expected[offset..offset + 7].fill(0x02);
    bench.expect_bytes(stream, range, &expected)
}

fn a_copy_beyond_host_memory_is_refused(bench: &Bench) -> Checked {
    let range = bench.memory(&[bench.page])?;
    let buffer = bench.host(Bytes::kib(64))?;
    let stream = bench.stream()?;
    let slice = HostSlice { buffer, offset: Bytes::kib(32), len: Bytes::kib(33) };
    let in_copy = bench.device.copy_to_device(stream, slice, range.start);
    refused("copy from beyond the end", ErrorKind::InvalidUse, in_copy)?;
    let out_copy = bench.device.copy_to_host(stream, range.start, slice);
    refused("copy to beyond the end", ErrorKind::InvalidUse, out_copy)
}
