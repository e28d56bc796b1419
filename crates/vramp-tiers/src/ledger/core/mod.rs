//! The pure half: what is charged where (`accounts/`), and who is served next (`queue/`).

mod accounts;
mod links;
mod queue;
mod space;
mod strategy;
#[cfg(test)]
mod tests;

pub use accounts::*;
pub use links::{Distance, LinkKey, Links, Rate};
pub use queue::*;
pub use space::{Level, LevelName, Levels, SpaceConfig, SpaceConfigError, SpaceId, Tier};
pub use strategy::{Candidates, Strategy, StrategyError};
