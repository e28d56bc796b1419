//! Launches a kernel that NVRTC compiles on slices of vramp: `cargo run --release --example launch`.

use std::error::Error;

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::compile_ptx;
use vramp_cudarc::{Bytes, Config, Pool};

const KERNEL: &str = r#"
extern "C" __global__ void axpy(float a, const float *x, float *y, size_t n) {
    size_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}"#;

fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: it loads the library, which other calls do too.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        println!("There is no libcuda here: run this on a machine with a card.");
        return Ok(());
    }
    // SAFETY: as above.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        println!("There is no libnvrtc here: add the CUDA toolkit's libraries to LD_LIBRARY_PATH.");
        return Ok(());
    }
    let context = CudaContext::new(0)?;
    let axpy = context.load_module(compile_ptx(KERNEL)?)?.load_function("axpy")?;
    let pool = Pool::new(&context, Config { limit: Some(Bytes::gib(1)), ..Config::default() })?;
    let stream = context.new_stream()?;

    let n = 1 << 20;
    let x = pool.clone_htod(&stream, &vec![2.0f32; n])?;
    let mut y = pool.alloc_zeros::<f32>(&stream, n)?;
    let mut launch = stream.launch_builder(&axpy);
    launch.arg(&3.0f32).arg(&x).arg(&mut y).arg(&n);
    // SAFETY: the arguments are those that the kernel declares, and it stays below `n`.
    unsafe { launch.launch(LaunchConfig::for_num_elems(n as u32)) }?;
    drop(x); // In stream order: the kernel still reads it.

    let sum: f32 = stream.clone_dtoh(&y)?.iter().sum();
    println!("The sum is {sum}, as expected: {}.", sum == 6.0 * n as f32);
    println!("vramp: {}", pool.allocator().census());
    Ok(())
}
