//! `vramp replay`: recorded jobs on several allocators, as a table or as lines of JSON.

mod command;
mod table;
mod total;

pub(crate) use command::run;
