//! Random programs on several streams, compared with what they would have on one.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use vramp_cudarc::{Bytes, VrampSlice};

use crate::checks::Rig;

const STREAMS: usize = 4;
const STEPS: usize = 400;

/// A slice with what it has to contain. One stream reads it between two writes, as cudarc requires.
struct Known {
    slice: VrampSlice<u8>,
    reader: Option<usize>,
    contents: Vec<u8>,
}

/// A sequence of numbers that a seed gives.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

/// Runs the program of this seed.
pub fn program(seed: u64) {
    let rig = Rig::new();
    let mut numbers = Numbers(seed);
    let mut streams: Vec<Arc<CudaStream>> = (0..STREAMS).map(|_| rig.stream()).collect();
    let mut known: Vec<Known> = Vec::new();
    for step in 0..STEPS {
        let on = numbers.below(STREAMS);
        let stream = streams[on].clone();
        match numbers.below(8) {
            0 | 1 => {
                let most = [100, 5000, 3 << 20][numbers.below(3)];
                let len = 1 + numbers.below(most);
                let contents = vec![step as u8; len];
                let slice = match numbers.below(2) {
                    0 => rig.pool.clone_htod(&stream, &contents).unwrap(),
                    // SAFETY: it is filled below, on any stream.
                    _ => unsafe { rig.pool.alloc(&stream, len) }.unwrap(),
                };
                known.push(Known { slice, reader: None, contents });
                let it = known.last_mut().unwrap();
                streams[numbers.below(STREAMS)].memcpy_htod(&it.contents, &mut it.slice).unwrap();
            }
            2 | 3 if !known.is_empty() => {
                drop(known.swap_remove(numbers.below(known.len())));
            }
            4 if !known.is_empty() => {
                let it = numbers.below(known.len());
                stream.memset_zeros(&mut known[it].slice).unwrap();
                known[it].contents.fill(0);
                known[it].reader = None;
            }
            5 if known.len() > 1 => {
                let (from, to) = (numbers.below(known.len() - 1), known.len() - 1);
                let len = known[from].contents.len().min(known[to].contents.len());
                let (before, after) = known.split_at_mut(to);
                let (from, to) = (&mut before[from], &mut after[0]);
                let reader = *from.reader.get_or_insert(on);
                let mut view = to.slice.slice_mut(..len);
                streams[reader].memcpy_dtod(&from.slice.slice(..len), &mut view).unwrap();
                to.contents[..len].copy_from_slice(&from.contents[..len]);
                to.reader = None;
            }
            6 if !known.is_empty() => {
                let it = numbers.below(known.len());
                let reader = *known[it].reader.get_or_insert(on);
                let contents = streams[reader].clone_dtoh(&known[it].slice).unwrap();
                assert!(contents == known[it].contents, "seed {seed}, step {step}");
            }
            // Another stream in its place: the old one ends with its last slice.
            7 if numbers.below(4) == 0 => {
                known.iter_mut().for_each(|it| {
                    if it.reader == Some(on) {
                        // What it reads may be unfinished, so no other stream reads before the next write.
                        rig.pool.record_use(&it.slice, &stream).unwrap();
                        it.reader = None;
                    }
                });
                stream.synchronize().unwrap();
                streams[on] = rig.stream();
            }
            _ => {}
        }
    }
    for it in &mut known {
        let reader = it.reader.unwrap_or(0);
        assert!(streams[reader].clone_dtoh(&it.slice).unwrap() == it.contents, "seed {seed}");
    }
    drop(known);
    assert_eq!(rig.pool.allocator().live(), Bytes::ZERO);
    rig.pool.allocator().audit().unwrap();
}
