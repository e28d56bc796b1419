//! What a hit costs through the C interface, beside the Rust interface and the system's malloc in
//! the same run, and what it costs each of many threads with a stream of its own:
//! `cargo run --release -p vramp-capi --example overhead -- [DEVICE]`.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::CString;
use std::hint::black_box;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use vramp_alloc::{Allocator, Bytes, Config};
use vramp_capi::abi::vramp_status_t::VRAMP_OK;
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::interface::*;
use vramp_capi::torch::{vramp_torch_allocator, vramp_torch_free, vramp_torch_pool_malloc};

const PAIRS: u32 = 200_000;
const ROUNDS: usize = 9;

/// The median over the rounds of what one pair takes, in nanoseconds.
fn pair_ns(mut pair: impl FnMut()) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..PAIRS).for_each(|_| pair());
            start.elapsed().as_nanos() as f64 / f64::from(PAIRS)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "sim:h200".to_owned());
    let driver = vramp_alloc::open(&device)?;
    let rust = Allocator::new(driver, Config::default())?;
    let on = rust.create_stream()?;

    let (mut c, mut stream) = (vramp_allocator_t::default(), vramp_stream_t::default());
    let name = CString::new(device.as_str())?;
    // SAFETY: the texts end with zeros and the result outlives the call.
    let opened = unsafe { vramp_open(name.as_ptr(), c"".as_ptr(), &mut c) };
    assert_eq!(opened, VRAMP_OK);
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_stream_create(c, &mut stream) }, VRAMP_OK);

    // PyTorch's entry points open what VRAMP_DEVICE says, a card by default.
    let mut torch = vramp_allocator_t::default();
    // SAFETY: the result outlives the call.
    let with_torch = unsafe { vramp_torch_allocator(0, &mut torch) } == VRAMP_OK;
    if !with_torch {
        println!("PyTorch's entry points are left out: set VRAMP_DEVICE=sim");
    }

    println!("one malloc and free, one thread, nanoseconds, median of {ROUNDS}");
    let layout = Layout::from_size_align(64, 16)?;
    let system = pair_ns(|| {
        // SAFETY: the layout is not empty.
        let block = unsafe { alloc(layout) };
        // SAFETY: the block was just made by this layout.
        unsafe { dealloc(black_box(block), layout) };
    });
    println!("{:>10}  system's malloc of 64 bytes {system:6.1}", "");
    for size in [512usize, 64 << 10, 1 << 20, 4 << 20, 256 << 20] {
        let bytes = Bytes::new(size as u64);
        let in_rust = pair_ns(|| {
            let block = rust.malloc(bytes, on).expect("there is room");
            rust.free(black_box(block), on).expect("it was just made");
        });
        let in_c = pair_ns(|| pair(c, size, stream));
        print!("{:>10}  Rust {in_rust:6.1}  C {in_c:6.1}", bytes.to_string());
        if with_torch {
            let in_torch = pair_ns(|| {
                // SAFETY: null is the default stream.
                let block = unsafe { vramp_torch_pool_malloc(size as isize, 0, null_mut()) };
                // SAFETY: null is the default stream.
                unsafe { vramp_torch_free(black_box(block), size, 0, null_mut()) };
            });
            print!("  PyTorch {in_torch:6.1}");
        }
        println!();
    }
    let all = std::thread::available_parallelism()?.get();
    for count in [1, all] {
        let pair_ns = on_threads(count, c);
        println!(
            "{count:>3} threads, 4 KiB each  C {pair_ns:6.1} a thread, {:.1} million pairs a second",
            count as f64 / pair_ns * 1000.0
        );
    }
    assert_eq!(vramp_close(c), VRAMP_OK);
    Ok(())
}

/// One malloc and free through the C interface.
fn pair(allocator: vramp_allocator_t, size: usize, stream: vramp_stream_t) {
    let mut block = null_mut();
    // SAFETY: the result outlives the call.
    let placed = unsafe { vramp_malloc(allocator, size, stream, &mut block) };
    assert_eq!(placed, VRAMP_OK);
    assert_eq!(vramp_free(allocator, black_box(block), stream), VRAMP_OK);
}

/// What a pair takes each of `count` threads, in nanoseconds; the mean over them.
fn on_threads(count: usize, allocator: vramp_allocator_t) -> f64 {
    let start = Barrier::new(count);
    let total: f64 = thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|_| {
                scope.spawn(|| {
                    let mut stream = vramp_stream_t::default();
                    // SAFETY: the result outlives the call.
                    let made = unsafe { vramp_stream_create(allocator, &mut stream) };
                    assert_eq!(made, VRAMP_OK);
                    start.wait();
                    pair_ns(|| pair(allocator, 4096, stream))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).sum()
    });
    total / count as f64
}
