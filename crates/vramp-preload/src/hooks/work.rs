//! Functions that use the card's memory. They wait while it is away, and go on to the driver's own.
//!
//! Their arguments are never looked at, so one piece of code serves all: it keeps the registers that hold arguments,
//! passes the gate, copies the arguments on the stack, of which no function has more than [`WORDS`], and calls.

use std::ffi::c_void;

use super::Hook;
use crate::driver::{Code, Function, NOT_FOUND};
use crate::{gate, process};

/// Words of arguments on the stack that are copied, an even number: those of `cuLaunchKernel` are five. Not more, because a
/// stack that the program made may end above its arguments.
#[cfg(target_arch = "x86_64")]
const WORDS: usize = 6;

/// Exports the functions, and makes their part of the table.
macro_rules! gated {
    ($($symbol:ident, $name:literal since $since:literal $(per $thread:ident)?;)*) => {
        /// The driver's own functions.
        #[allow(non_upper_case_globals, reason = "each is named as the function is")]
        mod real {
            use crate::driver::Function;
            $(pub static $symbol: Function = Function::new(
                // SAFETY: the text ends with its only zero.
                unsafe { std::ffi::CStr::from_bytes_with_nul_unchecked(concat!(stringify!($symbol), "\0").as_bytes()) }
            );)*
        }

        $(
            /// As the driver's function of this name.
            ///
            /// # Safety
            /// As of the driver's function.
            #[cfg(target_arch = "x86_64")]
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol() -> Code {
                std::arch::naked_asm!(
                    "lea r11, [rip + {real}]",
                    "jmp {through}",
                    real = sym real::$symbol,
                    through = sym through,
                )
            }
        )*

        /// The functions for `vramp exec --sleepable`.
        #[cfg(target_arch = "x86_64")]
        pub static GATED: &[Hook] = &[$(Hook {
            driver: &real::$symbol,
            own: $symbol as *const c_void,
            name: $name,
            since: $since,
            is_per_thread: gated!(@per $($thread)?),
        }),*];
    };
    (@per thread) => { true };
    (@per) => { false };
}

/// No function waits.
#[cfg(not(target_arch = "x86_64"))]
pub static GATED: &[Hook] = &[];

/// Calls the function in `r11` with the arguments as they are, in the gate.
///
/// # Safety
/// As of the driver's function.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn through() -> Code {
    std::arch::naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "sub rsp, 64",
        "mov [rbp - 8], rdi",
        "mov [rbp - 16], rsi",
        "mov [rbp - 24], rdx",
        "mov [rbp - 32], rcx",
        "mov [rbp - 40], r8",
        "mov [rbp - 48], r9",
        "mov rdi, r11",
        "call {begin}",
        "mov [rbp - 56], rax",
        "sub rsp, {bytes}",
        "lea rsi, [rbp + 16]",
        "mov rdi, rsp",
        "mov ecx, {words}",
        "cld",
        "rep movsq",
        "mov rdi, [rbp - 8]",
        "mov rsi, [rbp - 16]",
        "mov rdx, [rbp - 24]",
        "mov rcx, [rbp - 32]",
        "mov r8, [rbp - 40]",
        "mov r9, [rbp - 48]",
        "call [rbp - 56]",
        "mov [rbp - 56], rax",
        "call {end}",
        "mov rax, [rbp - 56]",
        "leave",
        "ret",
        begin = sym begin,
        end = sym end,
        bytes = const WORDS * 8,
        words = const WORDS,
    )
}

/// Passes the gate, and returns the driver's function.
#[cfg(target_arch = "x86_64")]
extern "C" fn begin(function: &Function) -> *mut c_void {
    // Calls that the pool makes are those of a pause too.
    if !process::is_inside() {
        gate::enter();
    }
    let address = function.address();
    if address.is_null() { missing as *mut c_void } else { address }
}

#[cfg(target_arch = "x86_64")]
extern "C" fn end() {
    if !process::is_inside() {
        gate::leave();
    }
}

/// What is called where the driver lacks a function.
#[cfg(target_arch = "x86_64")]
extern "C" fn missing() -> Code {
    NOT_FOUND
}

gated! {
    cuLaunchKernel, "cuLaunchKernel" since 4000;
    cuLaunchKernel_ptsz, "cuLaunchKernel" since 7000 per thread;
    cuLaunchKernelEx, "cuLaunchKernelEx" since 11060;
    cuLaunchKernelEx_ptsz, "cuLaunchKernelEx" since 11060 per thread;
    cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel" since 9000;
    cuLaunchCooperativeKernel_ptsz, "cuLaunchCooperativeKernel" since 9000 per thread;
    cuGraphLaunch, "cuGraphLaunch" since 10000;
    cuGraphLaunch_ptsz, "cuGraphLaunch" since 10000 per thread;
    cuGraphUpload, "cuGraphUpload" since 11010;
    cuGraphUpload_ptsz, "cuGraphUpload" since 11010 per thread;
    cuLaunchCooperativeKernelMultiDevice, "cuLaunchCooperativeKernelMultiDevice" since 9000;
    cuLaunch, "cuLaunch" since 2000;
    cuLaunchGrid, "cuLaunchGrid" since 2000;
    cuLaunchGridAsync, "cuLaunchGridAsync" since 2000;
    cuMemcpy, "cuMemcpy" since 4000;
    cuMemcpy_ptds, "cuMemcpy" since 7000 per thread;
    cuMemcpyAsync, "cuMemcpyAsync" since 4000;
    cuMemcpyAsync_ptsz, "cuMemcpyAsync" since 7000 per thread;
    cuMemcpyPeer, "cuMemcpyPeer" since 4000;
    cuMemcpyPeer_ptds, "cuMemcpyPeer" since 7000 per thread;
    cuMemcpyPeerAsync, "cuMemcpyPeerAsync" since 4000;
    cuMemcpyPeerAsync_ptsz, "cuMemcpyPeerAsync" since 7000 per thread;
    cuMemcpyHtoD_v2, "cuMemcpyHtoD" since 3020;
    cuMemcpyHtoD_v2_ptds, "cuMemcpyHtoD" since 7000 per thread;
    cuMemcpyDtoH_v2, "cuMemcpyDtoH" since 3020;
    cuMemcpyDtoH_v2_ptds, "cuMemcpyDtoH" since 7000 per thread;
    cuMemcpyDtoD_v2, "cuMemcpyDtoD" since 3020;
    cuMemcpyDtoD_v2_ptds, "cuMemcpyDtoD" since 7000 per thread;
    cuMemcpyDtoA_v2, "cuMemcpyDtoA" since 3020;
    cuMemcpyDtoA_v2_ptds, "cuMemcpyDtoA" since 7000 per thread;
    cuMemcpyAtoD_v2, "cuMemcpyAtoD" since 3020;
    cuMemcpyAtoD_v2_ptds, "cuMemcpyAtoD" since 7000 per thread;
    cuMemcpyHtoA_v2, "cuMemcpyHtoA" since 3020;
    cuMemcpyHtoA_v2_ptds, "cuMemcpyHtoA" since 7000 per thread;
    cuMemcpyAtoH_v2, "cuMemcpyAtoH" since 3020;
    cuMemcpyAtoH_v2_ptds, "cuMemcpyAtoH" since 7000 per thread;
    cuMemcpyAtoA_v2, "cuMemcpyAtoA" since 3020;
    cuMemcpyAtoA_v2_ptds, "cuMemcpyAtoA" since 7000 per thread;
    cuMemcpy2D_v2, "cuMemcpy2D" since 3020;
    cuMemcpy2D_v2_ptds, "cuMemcpy2D" since 7000 per thread;
    cuMemcpy2DUnaligned_v2, "cuMemcpy2DUnaligned" since 3020;
    cuMemcpy2DUnaligned_v2_ptds, "cuMemcpy2DUnaligned" since 7000 per thread;
    cuMemcpy3D_v2, "cuMemcpy3D" since 3020;
    cuMemcpy3D_v2_ptds, "cuMemcpy3D" since 7000 per thread;
    cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync" since 3020;
    cuMemcpyHtoDAsync_v2_ptsz, "cuMemcpyHtoDAsync" since 7000 per thread;
    cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync" since 3020;
    cuMemcpyDtoHAsync_v2_ptsz, "cuMemcpyDtoHAsync" since 7000 per thread;
    cuMemcpyDtoDAsync_v2, "cuMemcpyDtoDAsync" since 3020;
    cuMemcpyDtoDAsync_v2_ptsz, "cuMemcpyDtoDAsync" since 7000 per thread;
    cuMemcpyHtoAAsync_v2, "cuMemcpyHtoAAsync" since 3020;
    cuMemcpyHtoAAsync_v2_ptsz, "cuMemcpyHtoAAsync" since 7000 per thread;
    cuMemcpyAtoHAsync_v2, "cuMemcpyAtoHAsync" since 3020;
    cuMemcpyAtoHAsync_v2_ptsz, "cuMemcpyAtoHAsync" since 7000 per thread;
    cuMemcpy2DAsync_v2, "cuMemcpy2DAsync" since 3020;
    cuMemcpy2DAsync_v2_ptsz, "cuMemcpy2DAsync" since 7000 per thread;
    cuMemcpy3DAsync_v2, "cuMemcpy3DAsync" since 3020;
    cuMemcpy3DAsync_v2_ptsz, "cuMemcpy3DAsync" since 7000 per thread;
    cuMemcpy3DPeer, "cuMemcpy3DPeer" since 4000;
    cuMemcpy3DPeer_ptds, "cuMemcpy3DPeer" since 7000 per thread;
    cuMemcpy3DPeerAsync, "cuMemcpy3DPeerAsync" since 4000;
    cuMemcpy3DPeerAsync_ptsz, "cuMemcpy3DPeerAsync" since 7000 per thread;
    cuMemcpyBatchAsync, "cuMemcpyBatchAsync" since 12080;
    cuMemcpyBatchAsync_ptsz, "cuMemcpyBatchAsync" since 12080 per thread;
    cuMemcpyBatchAsync_v2, "cuMemcpyBatchAsync" since 13000;
    cuMemcpyBatchAsync_v2_ptsz, "cuMemcpyBatchAsync" since 13000 per thread;
    cuMemBatchDecompressAsync, "cuMemBatchDecompressAsync" since 12060;
    cuMemBatchDecompressAsync_ptsz, "cuMemBatchDecompressAsync" since 12060 per thread;
    cuMemcpy3DBatchAsync, "cuMemcpy3DBatchAsync" since 12080;
    cuMemcpy3DBatchAsync_ptsz, "cuMemcpy3DBatchAsync" since 12080 per thread;
    cuMemcpy3DBatchAsync_v2, "cuMemcpy3DBatchAsync" since 13000;
    cuMemcpy3DBatchAsync_v2_ptsz, "cuMemcpy3DBatchAsync" since 13000 per thread;
    cuMemsetD8_v2, "cuMemsetD8" since 3020;
    cuMemsetD8_v2_ptds, "cuMemsetD8" since 7000 per thread;
    cuMemsetD8Async, "cuMemsetD8Async" since 3020;
    cuMemsetD8Async_ptsz, "cuMemsetD8Async" since 7000 per thread;
    cuMemsetD16_v2, "cuMemsetD16" since 3020;
    cuMemsetD16_v2_ptds, "cuMemsetD16" since 7000 per thread;
    cuMemsetD16Async, "cuMemsetD16Async" since 3020;
    cuMemsetD16Async_ptsz, "cuMemsetD16Async" since 7000 per thread;
    cuMemsetD32_v2, "cuMemsetD32" since 3020;
    cuMemsetD32_v2_ptds, "cuMemsetD32" since 7000 per thread;
    cuMemsetD32Async, "cuMemsetD32Async" since 3020;
    cuMemsetD32Async_ptsz, "cuMemsetD32Async" since 7000 per thread;
    cuMemsetD2D8_v2, "cuMemsetD2D8" since 3020;
    cuMemsetD2D8_v2_ptds, "cuMemsetD2D8" since 7000 per thread;
    cuMemsetD2D8Async, "cuMemsetD2D8Async" since 3020;
    cuMemsetD2D8Async_ptsz, "cuMemsetD2D8Async" since 7000 per thread;
    cuMemsetD2D16_v2, "cuMemsetD2D16" since 3020;
    cuMemsetD2D16_v2_ptds, "cuMemsetD2D16" since 7000 per thread;
    cuMemsetD2D16Async, "cuMemsetD2D16Async" since 3020;
    cuMemsetD2D16Async_ptsz, "cuMemsetD2D16Async" since 7000 per thread;
    cuMemsetD2D32_v2, "cuMemsetD2D32" since 3020;
    cuMemsetD2D32_v2_ptds, "cuMemsetD2D32" since 7000 per thread;
    cuMemsetD2D32Async, "cuMemsetD2D32Async" since 3020;
    cuMemsetD2D32Async_ptsz, "cuMemsetD2D32Async" since 7000 per thread;
    cuStreamWaitValue32, "cuStreamWaitValue32" since 8000;
    cuStreamWaitValue32_ptsz, "cuStreamWaitValue32" since 8000 per thread;
    cuStreamWaitValue32_v2, "cuStreamWaitValue32" since 11070;
    cuStreamWaitValue32_v2_ptsz, "cuStreamWaitValue32" since 11070 per thread;
    cuStreamWriteValue32, "cuStreamWriteValue32" since 8000;
    cuStreamWriteValue32_ptsz, "cuStreamWriteValue32" since 8000 per thread;
    cuStreamWriteValue32_v2, "cuStreamWriteValue32" since 11070;
    cuStreamWriteValue32_v2_ptsz, "cuStreamWriteValue32" since 11070 per thread;
    cuStreamWaitValue64, "cuStreamWaitValue64" since 8000;
    cuStreamWaitValue64_ptsz, "cuStreamWaitValue64" since 8000 per thread;
    cuStreamWaitValue64_v2, "cuStreamWaitValue64" since 11070;
    cuStreamWaitValue64_v2_ptsz, "cuStreamWaitValue64" since 11070 per thread;
    cuStreamWriteValue64, "cuStreamWriteValue64" since 8000;
    cuStreamWriteValue64_ptsz, "cuStreamWriteValue64" since 8000 per thread;
    cuStreamWriteValue64_v2, "cuStreamWriteValue64" since 11070;
    cuStreamWriteValue64_v2_ptsz, "cuStreamWriteValue64" since 11070 per thread;
    cuStreamBatchMemOp, "cuStreamBatchMemOp" since 8000;
    cuStreamBatchMemOp_ptsz, "cuStreamBatchMemOp" since 8000 per thread;
    cuStreamBatchMemOp_v2, "cuStreamBatchMemOp" since 11070;
    cuStreamBatchMemOp_v2_ptsz, "cuStreamBatchMemOp" since 11070 per thread;
}
