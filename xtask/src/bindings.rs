//! `cargo xtask bindings`: writes `crates/vramp-cuda/src/sys.rs` from NVIDIA's own header.
//!
//! The header, libclang and bindgen are fetched into `target/bindings`, each at a pinned version,
//! so that the same command gives the same file on any machine with Python and a C compiler.
//! Nothing of it is needed to build vramp.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell;

/// The wheel that carries `cuda.h`.
const HEADER_WHEEL: &str = "nvidia-cuda-runtime==13.5.37";
/// The wheel that carries `libclang.so`.
const CLANG_WHEEL: &str = "libclang==18.1.1";
/// The generator.
const BINDGEN_VERSION: &str = "0.73.2";

/// The entry points vramp calls, by the symbol that `cuda.h` resolves each name to.
///
/// A new name here is all it takes to make another call available.
const SYMBOLS: &[&str] = &[
    // The driver, its devices and their primary contexts.
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetPCIBusId",
    "cuDeviceGetUuid_v2",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    // Virtual memory.
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetHandleForAddressRange",
    "cuMemGetInfo_v2",
    // Plain allocations.
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    // Memory of other code.
    "cuPointerGetAttributes",
    "cuMemGetAddressRange_v2",
    // Streams and events.
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    // Work.
    "cuMemsetD8Async",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    // The driver's own stream-ordered pool.
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolGetAttribute",
    "cuMemPoolTrimTo",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    // Pinned host memory.
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    // Graph capture.
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphGetNodes",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphDestroy",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
];

/// Constants that are macros or enums which no listed function mentions.
const CONSTANTS: &[&str] = &[
    "CUDA_VERSION",
    "CUmemFabricHandle",
    "CUmemorytype",
    "CUmemorytype_enum",
    "CUmemRangeHandleType",
    "CU_MEMHOSTALLOC_PORTABLE",
    "CU_MEMHOSTREGISTER_PORTABLE",
    "CUstream_flags",
    "CUstream_flags_enum",
    "CUevent_flags",
    "CUevent_flags_enum",
];

/// Writes the declarations anew. The diff, if any, is for a person to read and commit.
pub fn run(root: &Path) -> Result<()> {
    let work = root.join("target/bindings");
    std::fs::create_dir_all(&work)?;
    let bindgen = install_bindgen(&work)?;
    let site = install_wheels(&work)?;
    let include = find(&site, "cuda.h")?;
    let clang = find(&site, "libclang.so")?;

    let output = root.join("crates/vramp-cuda/src/sys.rs");
    let header = work.join("cuda_only.h");
    std::fs::write(&header, "#include <cuda.h>\n")?;
    let mut command = Command::new(&bindgen);
    command
        .env("LIBCLANG_PATH", &clang)
        .arg(&header)
        .args(["--dynamic-loading", "Api"])
        .args(["--rust-target", "1.90", "--rust-edition", "2024"])
        .args(["--default-enum-style", "newtype", "--no-prepend-enum-name"])
        .args(["--with-derive-default", "--no-doc-comments", "--sort-semantically"])
        .args(["--merge-extern-blocks", "--wrap-unsafe-ops"])
        .args(["--allowlist-function", &SYMBOLS.join("|")])
        .args(["--allowlist-var", &CONSTANTS.join("|")])
        .args(["--allowlist-type", &CONSTANTS.join("|")]);
    for line in preamble() {
        command.arg("--raw-line").arg(line);
    }
    command.arg("--output").arg(&output).arg("--").arg(format!("-I{}", include.display()));
    command.arg("-isystem").arg(compiler_headers()?);
    shell::run(&mut command)?;
    shell::run(Command::new("cargo").args(["fmt", "--package", "vramp-cuda"]).current_dir(root))?;
    println!("wrote {}", output.display());
    Ok(())
}

fn preamble() -> Vec<String> {
    vec![
        "//! The declarations of libcuda that vramp uses, generated by `cargo xtask bindings`.".into(),
        "//!".into(),
        format!("//! Never edited by hand. Source: `cuda.h` of {HEADER_WHEEL}, bindgen {BINDGEN_VERSION}."),
        "//!".into(),
        "//! Every function of [`Api`] is a symbol loaded on its own: one that the installed driver lacks is".into(),
        "//! an error value in its field.".into(),
        "#![allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals)]".into(),
        "#![allow(dead_code, clippy::all, clippy::undocumented_unsafe_blocks)]".into(),
        "#![allow(clippy::multiple_unsafe_ops_per_block)]".into(),
        String::new(),
    ]
}

fn install_bindgen(work: &Path) -> Result<PathBuf> {
    let tools = work.join("tools");
    let bindgen = tools.join("bin/bindgen");
    if !bindgen.exists() {
        shell::run(
            Command::new("cargo")
                .args(["install", "--locked", "bindgen-cli", "--version", BINDGEN_VERSION])
                .arg("--root")
                .arg(&tools),
        )?;
    }
    Ok(bindgen)
}

fn install_wheels(work: &Path) -> Result<PathBuf> {
    let site = work.join("site");
    if !site.join("done").exists() {
        let venv = work.join("venv");
        shell::run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        shell::run(
            Command::new(venv.join("bin/pip"))
                .args(["install", "--quiet", "--no-deps", "--target"])
                .arg(&site)
                .args([HEADER_WHEEL, CLANG_WHEEL]),
        )?;
        std::fs::write(site.join("done"), "")?;
    }
    Ok(site)
}

/// The folder below `start` that holds `name`.
fn find(start: &Path, name: &str) -> Result<PathBuf> {
    let mut folders = vec![start.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|file| file == name) {
                return Ok(folder);
            }
        }
    }
    bail!("{name} is nowhere below {}", start.display())
}

/// The folder with `stddef.h`, which the libclang wheel lacks.
fn compiler_headers() -> Result<String> {
    let output = shell::output(Command::new("cc").arg("-print-file-name=include"))
        .context("a C compiler is needed for its headers")?;
    Ok(output.trim().to_owned())
}
