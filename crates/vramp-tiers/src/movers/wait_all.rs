//! Waiting for several transfers at once.

use vramp_core::Bytes;

use super::core::pipeline::{Running, next_to_wait};
use super::error::MoveError;
use super::transfer::Transfer;

/// Waits until all transfers have ended, of either direction and of any mover. Each keeps its window of
/// steps full meanwhile, so copies in both directions overlap. The calling thread waits for one event at
/// a time and does not poll.
///
/// Driver calls: for each step those of [`Transfer::wait`], and at most five queries. O(transfers) for
/// each step.
///
/// # Errors
/// The first error of a transfer. The other transfers go on to their ends first; each returns its own
/// error when it is waited for again.
pub fn wait_all(transfers: &mut [&mut Transfer]) -> Result<(), MoveError> {
    let before: Vec<Bytes> = transfers.iter().map(|transfer| transfer.progress().moved).collect();
    let mut first_error = None;
    let mut running: Vec<usize> = (0..transfers.len()).collect();
    loop {
        running.retain(|&index| match transfers[index].fill_window() {
            Ok(done) => !done,
            Err(error) => {
                first_error.get_or_insert(error);
                false
            }
        });
        let queued = running.iter().filter_map(|&index| {
            let transfer = &transfers[index];
            Some((
                index,
                Running {
                    arrived: transfer.progress().moved - before[index],
                    next: transfer.next_in_flight()?,
                },
            ))
        });
        let queued: Vec<(usize, Running)> = queued.collect();
        let next = next_to_wait(queued.iter().map(|(_, running)| *running));
        // Without a step in flight in any of them, other transfers use the window.
        let next = next.map(|at| queued[at].0).or(running.first().copied());
        let Some(index) = next else { return first_error.map_or(Ok(()), Err) };
        if let Err(error) = transfers[index].advance() {
            first_error.get_or_insert(error);
            running.retain(|&other| other != index);
        }
    }
}
