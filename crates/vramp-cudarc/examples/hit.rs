//! Times pairs of an allocation and its drop that vramp's cache serves, beside vramp's own and cudarc's:
//! `cargo run --release --example hit`.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use cudarc::driver::CudaContext;
use vramp_cudarc::{Bytes, Config, Pool};

/// Pairs of one batch. The fastest of the batches counts.
const PAIRS: u32 = 10_000;
const BATCHES: usize = 100;

/// Returns the nanoseconds of a pair.
fn time(mut pair: impl FnMut()) -> f64 {
    let batch = |pair: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..PAIRS).for_each(|_| pair());
        start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
    };
    (0..BATCHES).map(|_| batch(&mut pair)).fold(f64::INFINITY, f64::min)
}

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: it loads the library, which other calls do too.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        println!("There is no libcuda here: run this on a machine with a card.");
        return Ok(());
    }
    let context = CudaContext::new(0)?;
    let pool = Pool::new(&context, Config::default())?;
    let stream = context.new_stream()?;
    let (allocator, id) = (pool.allocator().clone(), pool.stream_id(&stream)?);
    println!(
        "bytes      malloc+free  guard  slice  of guard  used slice  CudaSlice  (ns per pair)"
    );
    for len in [512, 64 << 10, 1 << 20, 64 << 20] {
        let size = Bytes::new(len as u64);
        let plain = time(|| {
            let block = allocator.malloc(size, id).expect("it is in the cache");
            allocator.free(black_box(block), id).expect("it is live");
        });
        let guard = time(|| drop(black_box(allocator.malloc_guard(size, id))));
        // SAFETY: it is not read.
        let slice = time(|| drop(black_box(unsafe { pool.alloc::<u8>(&stream, len) })));
        let used = time(|| {
            // SAFETY: it is not read.
            let slice = unsafe { pool.alloc::<u8>(&stream, len) }.expect("it is in the cache");
            black_box(slice.as_view());
        });
        // SAFETY: it is not read.
        let theirs = time(|| drop(black_box(unsafe { stream.alloc::<u8>(len) })));
        let ratio = slice / guard;
        println!(
            "{len:<10} {plain:11.1}  {guard:5.1}  {slice:5.1}  {ratio:8.2}  {used:10.1}  {theirs:9.1}"
        );
    }
    Ok(())
}
