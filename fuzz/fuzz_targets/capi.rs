//! Life-cycle programs through the C interface, as C and as Python calls it. The bytes draw the operations:
//! which objects begin, are used by queued work and end, in which order.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use vramp_check::lifecycle::{self, CSubject, Calls, MakeSubject, Options, Preset, Subject};

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let preset = Preset::ALL[usize::from(first) % Preset::ALL.len()];
    let calls = if first < 128 { Calls::C } else { Calls::Python };
    let make: MakeSubject = Arc::new(move |device, preset| {
        Box::new(CSubject::new(device, preset, calls)) as Box<dyn Subject>
    });
    let options = Options { program: 400, ..Options::new(preset, 400, 0) };
    if let Err(failure) = lifecycle::from_bytes(&options, &make, bytes) {
        panic!("{failure}");
    }
});
