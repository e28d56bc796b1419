//! `vramp info`: the device that would be used, its capabilities, and who can reach its memory.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use vramp::device::{Driver, HandleType};
use vramp::sharing::{Rdma, Sharing, SharingConfig};
use vramp::{Allocator, Bytes, Config, CreateError};

use crate::args::Info;

/// The description of a device, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Description<'a> {
    name: &'a str,
    id: &'a str,
    driver: &'a str,
    simulated: bool,
    pci: Option<&'a str>,
    uuid: Option<&'a str>,
    host_numa: Option<u32>,
    ordinal: u32,
    peers: &'a [u32],
    capabilities: BTreeMap<&'static str, bool>,
    sharing: Option<SharingDescription>,
    page_bytes: u64,
    recommended_page_bytes: u64,
    address_space_bytes: Option<u64>,
    memory_free_bytes: u64,
    memory_total_bytes: u64,
}

/// How memory of the device can be shared, as `--json` prints it.
#[derive(Debug, Serialize)]
struct SharingDescription {
    /// How an allocator with the defaults exports memory.
    default_handle_type: &'static str,
    /// True if memory with fabric handles could be created.
    fabric: bool,
    /// Why it could not.
    fabric_refused: Option<String>,
    /// True if network cards can access memory where that is configured. The default is off.
    rdma: bool,
}

impl SharingDescription {
    /// Returns what allocators on the device can. One create and one release. `None` for a device on which
    /// the default allocator does not work.
    fn of(driver: &Arc<dyn Driver>) -> Result<Option<SharingDescription>> {
        let sharing = |sharing| -> Result<Sharing, CreateError> {
            let config = Config { sharing, ..Config::default() };
            Ok(Allocator::new(Arc::clone(driver), config)?.sharing())
        };
        let default = match sharing(SharingConfig::default()) {
            Err(CreateError::NotSupported { .. }) => return Ok(None),
            default => default?,
        };
        let most = SharingConfig {
            handle_type: HandleType::Fabric,
            rdma: Rdma::Auto,
            ..SharingConfig::default()
        };
        let most = sharing(most)?;
        Ok(Some(SharingDescription {
            default_handle_type: match default.handle_type {
                HandleType::None => "none",
                HandleType::PosixFd => "posix-fd",
                HandleType::Fabric => "fabric",
            },
            fabric: most.handle_type == HandleType::Fabric,
            fabric_refused: most.fallback,
            rdma: most.rdma,
        }))
    }

    /// Returns a line for each of the three who can reach the memory.
    fn lines(&self, peers: &[u32]) -> [String; 3] {
        let processes = match self.default_handle_type {
            "none" => "no",
            _ => "by file descriptors (default)",
        };
        let fabric = match &self.fabric_refused {
            Some(why) => format!("no fabric handles: {why}"),
            None => "fabric handles with sharing=fabric".to_owned(),
        };
        let cards = if peers.is_empty() { "no peers" } else { "on demand (default)" };
        let network = if self.rdma { "with rdma=on; off by default" } else { "no" };
        [
            format!("other processes: {processes}; {fabric}"),
            format!("other cards: {cards}"),
            format!("network cards: {network}"),
        ]
    }
}

pub(crate) fn run(args: &Info, out: &mut dyn Write) -> Result<()> {
    let device = args.device.open()?;
    let driver = device.fresh(false)?.driver;
    let memory = driver.memory_info()?;
    let info = driver.info();
    let can = info.capabilities;
    let description = Description {
        name: &info.name,
        id: &info.id,
        driver: &info.driver,
        simulated: info.simulated,
        pci: info.pci.as_deref(),
        uuid: info.uuid.as_deref(),
        host_numa: info.host_numa,
        ordinal: info.ordinal,
        peers: &info.peers,
        capabilities: BTreeMap::from([
            ("virtual_memory", can.virtual_memory),
            ("stream_ordered_pool", can.stream_ordered_pool),
            ("host_numa", can.host_numa),
            ("pinned_host", can.pinned_host),
            ("remap_beside_kernels", can.remap_beside_kernels),
            ("graphs", can.graphs),
            ("posix_fd", can.posix_fd),
            ("fabric", can.fabric),
            ("rdma", can.rdma),
            ("dma_buf", can.dma_buf),
        ]),
        sharing: SharingDescription::of(&driver)?,
        page_bytes: info.limits.page.count(),
        recommended_page_bytes: info.limits.recommended_page.count(),
        address_space_bytes: info.limits.address_space.map(Bytes::count),
        memory_free_bytes: memory.free.count(),
        memory_total_bytes: memory.total.count(),
    };
    if args.json {
        return crate::json::versioned_line(out, &description);
    }
    print(&description, out)
}

fn print(description: &Description<'_>, out: &mut dyn Write) -> Result<()> {
    let mut line = |label: &str, text: &str| writeln!(out, "{label:<16}{text}");
    line("device", &format!("{} ({})", description.id, description.name))?;
    line("driver", description.driver)?;
    line("simulated", yes_or_no(description.simulated))?;
    if let Some(address) = description.pci {
        line("address", address)?;
    }
    if let Some(uuid) = description.uuid {
        line("UUID", uuid)?;
    }
    if let Some(node) = description.host_numa {
        line("NUMA node", &node.to_string())?;
    }
    let peers: Vec<String> = description.peers.iter().map(u32::to_string).collect();
    let peers = if peers.is_empty() { "none".to_owned() } else { peers.join(", ") };
    line("peers", &peers)?;
    let free = Bytes::new(description.memory_free_bytes);
    let total = Bytes::new(description.memory_total_bytes);
    line("memory", &format!("{free} free of {total}"))?;
    let page = Bytes::new(description.page_bytes);
    let recommended = Bytes::new(description.recommended_page_bytes);
    line("granularity", &format!("{page}, recommended {recommended}"))?;
    let addresses = description.address_space_bytes.map(|count| Bytes::new(count).to_string());
    line("address space", addresses.as_deref().unwrap_or("unknown"))?;
    for (index, (capability, &works)) in description.capabilities.iter().enumerate() {
        let label = if index == 0 { "capabilities" } else { "" };
        line(label, &format!("{}: {}", capability.replace('_', " "), yes_or_no(works)))?;
    }
    let sharing = description.sharing.iter().flat_map(|of| of.lines(description.peers));
    for (index, text) in sharing.enumerate() {
        line(if index == 0 { "sharing" } else { "" }, &text)?;
    }
    Ok(())
}

fn yes_or_no(yes: bool) -> &'static str {
    if yes { "yes" } else { "no" }
}
