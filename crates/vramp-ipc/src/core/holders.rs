//! Counts of those who hold an export: opens of importers, and grants that were not opened yet.

use std::collections::BTreeSet;

/// What an open request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Admitted,
    Withdrawn,
}

/// What is left after a close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterClose {
    /// Other holders.
    Held,
    /// No holder; the export can be opened again.
    Released,
    /// No holder, and none can come: the export is withdrawn.
    Ended,
}

/// Holders of one export. Every change is O(log grants).
#[derive(Debug, Default)]
pub struct Holders {
    withdrawn: bool,
    opens: usize,
    ever_opened: u64,
    granted: u64,
    grants: BTreeSet<u64>,
}

impl Holders {
    /// Adds a grant and returns its number, from 1. `None` after [`Holders::withdraw`].
    pub fn grant(&mut self) -> Option<u64> {
        if self.withdrawn {
            return None;
        }
        self.granted += 1;
        self.grants.insert(self.granted);
        Some(self.granted)
    }

    /// Removes a grant. Returns false if it was opened or revoked before.
    pub fn revoke(&mut self, grant: u64) -> bool {
        self.grants.remove(&grant)
    }

    /// Counts an open before its source is asked, so that a withdrawal sees it.
    pub fn admit(&mut self) -> Admission {
        if self.withdrawn {
            return Admission::Withdrawn;
        }
        self.opens += 1;
        Admission::Admitted
    }

    /// Completes an admitted open: its grant, if it is one that is outstanding, becomes the open.
    pub fn opened(&mut self, grant: u64) {
        self.ever_opened += 1;
        self.grants.remove(&grant);
    }

    /// Ends an open, completed or failed.
    pub fn close(&mut self) -> AfterClose {
        self.opens -= 1;
        match (self.is_free(), self.withdrawn) {
            (false, _) => AfterClose::Held,
            (true, false) => AfterClose::Released,
            (true, true) => AfterClose::Ended,
        }
    }

    /// Refuses later opens and revokes all grants. Returns true if something is open, so that a
    /// close will return [`AfterClose::Ended`], once.
    pub fn withdraw(&mut self) -> bool {
        self.withdrawn = true;
        self.grants.clear();
        self.opens > 0
    }

    /// Returns true if nothing is open and no grant is outstanding.
    pub fn is_free(&self) -> bool {
        self.opens == 0 && self.grants.is_empty()
    }

    /// Returns the opens that were not closed.
    pub fn opens(&self) -> usize {
        self.opens
    }

    /// Returns the outstanding grants.
    pub fn grants(&self) -> usize {
        self.grants.len()
    }

    /// Returns the opens that completed.
    pub fn ever_opened(&self) -> u64 {
        self.ever_opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_holds_until_it_is_opened_and_the_open_until_it_is_closed() {
        let mut holders = Holders::default();
        assert!(holders.is_free());
        let grant = holders.grant().unwrap();
        assert!(!holders.is_free());
        assert_eq!(holders.admit(), Admission::Admitted);
        holders.opened(grant);
        assert_eq!((holders.opens(), holders.grants(), holders.ever_opened()), (1, 0, 1));
        assert!(!holders.revoke(grant));
        assert_eq!(holders.close(), AfterClose::Released);
    }

    #[test]
    fn a_ticket_that_is_opened_twice_takes_no_grant_of_another() {
        let mut holders = Holders::default();
        let first = holders.grant().unwrap();
        let second = holders.grant().unwrap();
        for _ in 0..2 {
            holders.admit();
            holders.opened(first);
        }
        assert_eq!(holders.close(), AfterClose::Held);
        assert_eq!(holders.close(), AfterClose::Held, "the second grant is outstanding");
        assert!(holders.revoke(second));
        assert!(holders.is_free());
    }

    #[test]
    fn a_failed_open_leaves_its_grant() {
        let mut holders = Holders::default();
        let grant = holders.grant().unwrap();
        holders.admit();
        assert_eq!(holders.close(), AfterClose::Held);
        assert_eq!(holders.ever_opened(), 0);
        assert!(holders.revoke(grant));
    }

    #[test]
    fn a_withdrawn_export_keeps_its_opens_and_loses_its_grants() {
        let mut holders = Holders::default();
        holders.admit();
        holders.opened(0);
        holders.grant().unwrap();
        assert!(holders.withdraw());
        assert_eq!(holders.admit(), Admission::Withdrawn);
        assert_eq!(holders.grant(), None);
        assert_eq!((holders.opens(), holders.grants()), (1, 0));
        assert_eq!(holders.close(), AfterClose::Ended);
        assert!(!holders.withdraw());
    }
}
