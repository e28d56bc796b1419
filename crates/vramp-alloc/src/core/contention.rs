//! Whether threads contend for the allocator's lock, with hysteresis.

/// Acquisitions of the lock after which the verdict is taken anew.
const WINDOW: u64 = 1024;
/// Acquisitions within a window that had to wait, from which on threads contend. Two threads that
/// take turns, as a program and its autograd do, stay far below it.
const CONTENDED_FROM: u64 = WINDOW / 4;
/// Windows in a row below [`CONTENDED_FROM`] after which threads no longer contend. Not fewer:
/// where heaps serve threads well the lock is hardly taken, and a few acquisitions would decide.
const CALM_WINDOWS: u64 = 64;

/// Counts acquisitions of the lock, and those that had to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contention {
    acquired: u64,
    waited: u64,
    calm_windows: u64,
    contended: bool,
}

impl Contention {
    /// Counts one acquisition. Returns whether threads contend.
    pub(crate) fn record(&mut self, waited: bool) -> bool {
        self.acquired += 1;
        self.waited += u64::from(waited);
        if self.acquired == WINDOW {
            if self.waited >= CONTENDED_FROM {
                self.contended = true;
                self.calm_windows = 0;
            } else {
                self.calm_windows += 1;
                self.contended &= self.calm_windows < CALM_WINDOWS;
            }
            (self.acquired, self.waited) = (0, 0);
        }
        self.contended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs one window of which `waited` acquisitions wait. Returns the verdict at its end.
    fn window(contention: &mut Contention, waited: u64) -> bool {
        (0..WINDOW).map(|n| contention.record(n < waited)).last().expect("a window is not empty")
    }

    #[test]
    fn the_verdict_changes_only_at_the_end_of_a_window() {
        let mut contention = Contention::default();
        assert!((1..WINDOW).all(|_| !contention.record(true)));
        assert!(contention.record(true));
        assert!((1..WINDOW).all(|_| contention.record(false)));
    }

    #[test]
    fn one_busy_window_contends_and_many_calm_ones_end_it() {
        // Windows in order: how often, acquisitions that wait in each, the verdict after the last.
        let cases: &[&[(u64, u64, bool)]] = &[
            &[(1, 0, false)],
            &[(1, CONTENDED_FROM - 1, false)],
            &[(1, CONTENDED_FROM, true)],
            &[(1, WINDOW, true), (CALM_WINDOWS - 1, 0, true), (1, 0, false)],
            &[(1, WINDOW, true), (CALM_WINDOWS, CONTENDED_FROM - 1, false)],
            // A busy window starts the count of calm ones again.
            &[(1, WINDOW, true), (CALM_WINDOWS - 1, 0, true), (1, WINDOW, true), (1, 0, true)],
            // Calm windows before do not help.
            &[(CALM_WINDOWS, 0, false), (1, WINDOW, true), (CALM_WINDOWS - 1, 0, true)],
        ];
        for case in cases {
            let mut contention = Contention::default();
            for &(windows, waited, verdict) in *case {
                let mut last = false;
                (0..windows).for_each(|_| last = window(&mut contention, waited));
                assert_eq!(last, verdict, "{windows} windows with {waited} waits in {case:?}");
            }
        }
    }
}
