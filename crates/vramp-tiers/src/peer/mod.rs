//! Free memory of another card, for data that leaves this one.
//!
//! Between two cards with NVLink a copy is several times faster than to the host. A [`PeerStore`] takes
//! chunks of the other card's memory through this card's driver, so plain copies on this card's streams
//! reach them.
//!
//! ```
//! use vramp_tiers::peer::{PeerStore, PeerStoreConfig};
//! use vramp_tiers::{Bytes, ReservationManager, SpaceConfig, SpaceId};
//!
//! let this = vramp_alloc::open("sim:h200x2:0")?;
//! let gpu = SpaceId::gpu(1);
//! let manager = ReservationManager::new([(gpu, SpaceConfig::gpu(Bytes::gib(128)))])?;
//! let space = manager.space(gpu).expect("it was configured");
//! let config = PeerStoreConfig { limit: Bytes::gib(16), ..PeerStoreConfig::default() };
//! let store = PeerStore::new(&this, 1, &space, config)?;
//!
//! let copy = store.allocate(Bytes::mib(20))?;
//! assert_eq!(copy.range().len, Bytes::mib(20));
//! assert_eq!(space.total(), Bytes::mib(32), "a chunk is charged to the other card's space");
//! drop(copy);
//! assert_eq!(space.total(), Bytes::ZERO);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The life of a chunk:
//!
//! 1. [`PeerStore::allocate`] finds no free part that is long enough. The chunk is charged to the other
//!    card's space, created on that card and mapped for this one: five driver calls.
//! 2. Allocations take parts of it.
//! 3. Once all of it is free it is kept if few free bytes are ([`PeerStoreConfig::ahead`]), or
//!    released and credited.
//! 4. When the other card needs its memory, [`PeerStore::give_way`] releases what is free and refuses
//!    allocations for a while. What is allocated has to be moved by its owner.
//!
//! # Cost
//!
//! O(log n) for each allocation and each free, in the number of free parts and chunks.
//!
//! # Locks
//!
//! The store's lock is held for no driver call and no call of the space. So a thread that holds the
//! lock of any allocator or manager may call the store, and two cards that store on each other never
//! wait for each other's locks.
//!
//! Deliberately absent: copies, the choice of what moves, and waiting: an allocation that finds no
//! memory is refused at once.

mod chunks;
mod config;
mod store;

pub use config::{PeerStoreConfig, PeerStoreError, PeerStoreStats};
pub use store::{PeerAllocation, PeerStore};
