//! Call stacks of compiled programs, as `vramp exec` records them: from the driver outwards.
//!
//! The *site* of such a stack is its innermost frame that is neither of CUDA's libraries nor of the code
//! between them and a program: allocators, containers, the runtime of the language, an interpreter. The
//! *operation* is what the site called.

use vramp_trace::Frame;

/// The driver, whose function is the innermost frame.
const DRIVER: &str = "libcuda.so.1";

/// Beginnings of the names of files with such code.
const FILES: [&str; 27] = [
    "libcuda",
    "libvramp",
    "libcublas",
    "libcudnn",
    "libcufft",
    "libcurand",
    "libcusolver",
    "libcusparse",
    "libcutensor",
    "libnccl",
    "libnpp",
    "libnvJitLink",
    "libnvidia",
    "libnvjpeg",
    "libnvrtc",
    "librmm",
    "libc10",
    "ld-linux",
    "libc.so",
    "libc-2",
    "libdl.so",
    "libgcc_s",
    "libgomp",
    "libpthread",
    "libpython",
    "libstdc++",
    "python",
];

/// Beginnings of the names of such functions, wherever they were linked.
const FUNCTIONS: [&str; 25] = [
    "__cuda",
    "libcudart_static_",
    "cudart::",
    "operator new",
    "operator delete",
    "malloc",
    "calloc",
    "free",
    "std::",
    "__gnu_cxx::",
    "thrust::",
    "cub::",
    "cuda::",
    "rmm::",
    "c10::",
    "core::",
    "alloc::",
    "cudarc::",
    "cust::",
    "__rust_",
    "__libc_",
    "_start",
    "clone",
    "start_thread",
    "_Unwind_",
];

/// Returns true if the stack is one of these.
pub(crate) fn is_native(frames: &[Frame<'_>]) -> bool {
    frames.first().is_some_and(is_driver)
}

/// Returns true for a function of the driver.
pub(crate) fn is_driver(frame: &Frame<'_>) -> bool {
    frame.filename == DRIVER
}

/// Returns the index of the site among the frames of such a stack. Where no frame is the program's, it is
/// the one that called the driver.
pub(crate) fn site(frames: &[Frame<'_>]) -> usize {
    let own = frames.iter().position(|frame| !is_between(frame));
    own.unwrap_or(usize::from(frames.len() > 1))
}

/// Returns the index of the operation.
pub(crate) fn operation(frames: &[Frame<'_>]) -> usize {
    site(frames).saturating_sub(1)
}

/// Returns true for a frame of CUDA or of the code between it and a program.
pub(crate) fn is_between(frame: &Frame<'_>) -> bool {
    let file = frame.filename.rsplit('/').next().unwrap_or(frame.filename);
    let name = frame.name.trim_start_matches(['<', '&', '*']);
    FILES.iter().any(|start| file.starts_with(start))
        || FUNCTIONS.iter().any(|start| begins(name, start))
        || is_cuda(name)
}

/// Returns true if a name begins with these words: `free` is not the beginning of `free_lists`.
fn begins(name: &str, start: &str) -> bool {
    let Some(rest) = name.strip_prefix(start) else { return false };
    let open = start.ends_with(['_', ':']) || start.starts_with('_');
    open || !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_')
}

/// Returns true for functions of the runtime and the driver, linked statically, such as `cudaMalloc`.
fn is_cuda(name: &str) -> bool {
    let rest = name.strip_prefix("cuda").or_else(|| name.strip_prefix("cu"));
    rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame<'a>(filename: &'a str, name: &'a str) -> Frame<'a> {
        Frame { name, filename, line: 0 }
    }

    #[test]
    fn the_site_is_the_programs_innermost_function() {
        let driver = frame(DRIVER, "cuMemAlloc");
        let main = frame("/home/me/bin/train", "main");
        let outer = frame("/lib/x86_64-linux-gnu/libc.so.6", "__libc_start_main");
        for (inner, expected) in [
            (&[][..], "main"),
            (&[frame("/usr/lib/libcudart.so.13", "cudaMalloc")], "main"),
            // The runtime is linked statically.
            (&[frame("/home/me/bin/train", "cudaMalloc")], "main"),
            (
                &[
                    frame("/home/me/bin/train", "thrust::detail::vector_base<float>::append"),
                    frame("/home/me/src/job.cu", "Job::batches"),
                ],
                "Job::batches",
            ),
            (
                &[
                    frame(
                        "/rust/lib/x.rs",
                        "<alloc::vec::Vec<T> as core::iter::FromIterator>::from_iter",
                    ),
                    frame("src/pool.rs", "job::pool::grow"),
                ],
                "job::pool::grow",
            ),
            (
                &[frame("/usr/lib/libcublasLt.so.13", "+0x1a40"), frame("libengine.so", "freeze")],
                "freeze",
            ),
        ] {
            let frames = [&[driver], inner, &[main, outer]].concat();
            assert!(is_native(&frames));
            assert_eq!(frames[site(&frames)].name, expected);
        }
        let python = [
            driver,
            frame("/usr/lib/libcublas.so.13", "cublasCreate_v2"),
            frame("/usr/bin/python3.12", "_PyEval"),
        ];
        assert_eq!(python[site(&python)].name, "cublasCreate_v2");
        assert_eq!((site(&[driver]), operation(&[driver])), (0, 0));
    }
}
