//! `vramp top` and `vramp ctl`: processes that share the memory of a card by budgets.
//!
//! 1. [`find`] opens the groups of the user that the arguments choose.
//! 2. [`top`] prints who has what, once or again and again.
//! 3. [`ctl`] sends a command to members and prints what came of it.

pub(crate) mod args;
pub(crate) mod ctl;
mod find;
pub(crate) mod top;

pub(crate) use find::default_directory;
