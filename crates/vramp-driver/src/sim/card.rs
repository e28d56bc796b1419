//! Cards the simulator knows by name.

use vramp_core::Bytes;

/// What is known about one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardModel {
    /// The short name: `h200`, asked for as `sim:h200`.
    pub id: &'static str,
    /// The card's full name.
    pub name: &'static str,
    /// Memory on the card.
    pub memory: Bytes,
    /// The granule of physical memory.
    pub page: Bytes,
    /// Addresses that one process can reserve in all.
    pub address_space: Bytes,
    /// True if the costs were measured on this card, false if they are those of the H200.
    pub measured: bool,
    /// Where the memory size and limits come from.
    pub source: &'static str,
}

/// Fifteen reservations of 8 TiB succeeded on an H200 and the sixteenth failed: of the 128 TiB that
/// 47 address bits give a process, its own part is taken. The same driver serves every card here.
const ADDRESS_SPACE: Bytes = Bytes::tib(127);

/// Granularity as measured on the H200; NVIDIA states 2 MiB pages for all cards here.
const PAGE: Bytes = Bytes::mib(2);

const PRESETS: [CardModel; 4] = [
    CardModel {
        id: "h200",
        name: "NVIDIA H200",
        memory: Bytes::mib(143_771),
        page: PAGE,
        address_space: ADDRESS_SPACE,
        measured: true,
        source: "nvidia-smi on an H200 (sold as 141 GB); costs measured with driver 580.159.04",
    },
    CardModel {
        id: "h100",
        name: "NVIDIA H100 80GB HBM3",
        memory: Bytes::gib(80),
        page: PAGE,
        address_space: ADDRESS_SPACE,
        measured: false,
        source: "NVIDIA H100 datasheet: 80 GB; costs are those measured on the H200",
    },
    CardModel {
        id: "a100-80g",
        name: "NVIDIA A100-SXM4-80GB",
        memory: Bytes::gib(80),
        page: PAGE,
        address_space: ADDRESS_SPACE,
        measured: false,
        source: "NVIDIA A100 80GB datasheet: 80 GB; costs are those measured on the H200",
    },
    CardModel {
        id: "rtx4090",
        name: "NVIDIA GeForce RTX 4090",
        memory: Bytes::gib(24),
        page: PAGE,
        address_space: ADDRESS_SPACE,
        measured: false,
        source: "NVIDIA GeForce RTX 4090 product page: 24 GB; costs are those measured on the H200",
    },
];

/// A card that is not in the list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no simulated card is called '{asked}': known are {}", known.join(", "))]
pub struct UnknownCard {
    /// What was asked for.
    pub asked: String,
    /// What there is.
    pub known: Vec<&'static str>,
}

impl CardModel {
    /// Every card, the default first.
    pub fn all() -> &'static [CardModel] {
        &PRESETS
    }

    /// The card called `id`, with or without `sim:` before it.
    ///
    /// ```
    /// use vramp_driver::sim::CardModel;
    /// assert_eq!(CardModel::find("sim:h200"), CardModel::find("h200"));
    /// assert!(CardModel::find("voodoo").unwrap_err().to_string().contains("known are h200, h100"));
    /// ```
    ///
    /// # Errors
    /// [`UnknownCard`] lists the cards there are.
    pub fn find(id: &str) -> Result<&'static CardModel, UnknownCard> {
        let wanted = id.strip_prefix("sim:").unwrap_or(id);
        PRESETS.iter().find(|preset| preset.id == wanted).ok_or_else(|| UnknownCard {
            asked: id.to_owned(),
            known: PRESETS.iter().map(|preset| preset.id).collect(),
        })
    }
}
