//! File descriptors that one process publishes and other processes of the same user open and close.
//!
//! It is the transport with which processes share memory. It carries descriptors and a description,
//! bytes with a meaning for the two programs, and counts who has them open. It knows no GPU.
//!
//! ```
//! use std::io::Read;
//! use std::os::fd::OwnedFd;
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//!
//! use vramp_ipc::{Connections, Offer, OpenOptions, Server, Source, Ticket};
//!
//! /// Files stand for memory here.
//! struct Files(&'static str);
//!
//! impl Source for Files {
//!     fn open(&self) -> Result<Offer, String> {
//!         Ok(Offer { description: b"two copies".to_vec(), descriptors: 2 })
//!     }
//!
//!     fn descriptor(&self, _index: usize) -> std::io::Result<OwnedFd> {
//!         Ok(std::fs::File::open(self.0)?.into())
//!     }
//!
//!     fn released(&self) {} // The memory may be changed and freed again.
//! }
//!
//! // In the exporting process:
//! let server = Server::new()?;
//! let published = server.publish(Arc::new(Files("/proc/version")))?;
//! let bytes = published.grant()?.to_bytes(); // For a queue, a pipe, a file.
//!
//! // In the importing process:
//! let connections = Connections::new(OpenOptions::default());
//! let mut opened = connections.open(&Ticket::from_bytes(&bytes)?)?;
//! assert_eq!(opened.description(), b"two copies");
//! while let Some(batch) = opened.next_batch()? {
//!     for descriptor in batch.descriptors {
//!         let mut text = String::new();
//!         std::fs::File::from(descriptor).read_to_string(&mut text)?; // Import it, close it.
//!         assert!(text.starts_with("Linux"));
//!     }
//! }
//! drop(opened); // The exporter may reuse the memory.
//!
//! // In the exporting process again:
//! assert!(published.wait_released(Instant::now() + Duration::from_secs(30)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod client;
mod core;
mod error;
mod pidfd;
mod server;
mod system;
mod ticket;

pub use client::{Batch, Connections, OpenOptions, Opened};
pub use error::{FetchError, OpenError, Refusal, ServeError, Side, TicketError};
pub use pidfd::fetch_descriptor;
pub use server::{
    MAX_CONNECTIONS, MAX_DESCRIPTION, MAX_DESCRIPTORS, MAX_OPENS, Offer, Published, Server, Source,
    Withdrawn,
};
pub use ticket::Ticket;
