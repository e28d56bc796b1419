//! What needs a card: the time that kernels take.

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUevent_flags;

use crate::checks::Rig;

/// Checks by name, for cards.
pub const CHECKS: &[(&str, fn())] = &[("two streams read a slice at once", reads_at_once)];

fn reads_at_once() {
    let rig = Rig::new();
    let (one, two) = (rig.stream(), rig.stream());
    let from = rig.filled(&one, 1);
    let (mut first, mut second) = (rig.filled(&one, 0), rig.filled(&two, 0));
    let event =
        |stream: &CudaStream| stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
    rig.copy_late(&one, &from, &mut first);
    let first_ends = event(&one);
    let second_begins = event(&two);
    rig.copy_late(&two, &from, &mut second);
    let second_ends = event(&two);
    let between = second_begins.elapsed_ms(&first_ends).unwrap();
    assert!(between > 0.0, "the second waited for the first: {between} ms");
    let all = second_begins.elapsed_ms(&second_ends).unwrap();
    assert!(all < 1.6 * between, "{all} ms, {between} ms until the first ended");
    for stream in [&one, &two] {
        rig.pool.record_use(&from, stream).unwrap();
    }
    drop(from);
    assert_eq!(one.clone_dtoh(&first).unwrap()[0], 1);
    assert_eq!(two.clone_dtoh(&second).unwrap()[0], 1);
}
