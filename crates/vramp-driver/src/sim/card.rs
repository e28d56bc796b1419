//! Models of cards, by name.

use vramp_core::Bytes;

/// Name, memory and limits of a card that can be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardModel {
    /// Short name: `h200`, opened as `sim:h200`.
    pub id: &'static str,
    /// Full name of the card.
    pub name: &'static str,
    /// Memory on the card.
    pub memory: Bytes,
    /// Granularity of physical memory.
    pub page: Bytes,
    /// Address space that one process can reserve in total.
    pub address_space: Bytes,
    /// True if the costs were measured on this card; false if they are those of the H200.
    pub measured: bool,
    /// Source of the memory size and the limits.
    pub source: &'static str,
}

/// Fifteen reservations of 8 TiB succeeded on an H200 and the sixteenth failed: the process itself
/// uses a part of the 128 TiB of 47 address bits. The driver is the same for every card here.
const ADDRESS_SPACE: Bytes = Bytes::tib(127);

/// Granularity as measured on the H200; NVIDIA states 2 MiB pages for all cards here.
const PAGE: Bytes = Bytes::mib(2);

const MODELS: [CardModel; 4] = [
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

/// Error for a name that no card model has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown simulated card '{name}'; known cards: {}", known.join(", "))]
pub struct UnknownCard {
    /// Name that was given.
    pub name: String,
    /// Names of all card models.
    pub known: Vec<&'static str>,
}

impl CardModel {
    /// Returns every card model, the default first.
    pub fn all() -> &'static [CardModel] {
        &MODELS
    }

    /// Returns the card model named `id`, with or without the prefix `sim:`.
    ///
    /// ```
    /// use vramp_driver::sim::CardModel;
    /// assert_eq!(CardModel::find("sim:h200"), CardModel::find("h200"));
    /// assert!(CardModel::find("voodoo").unwrap_err().to_string().contains("known cards: h200, h100"));
    /// ```
    ///
    /// # Errors
    /// [`UnknownCard`] lists the names.
    pub fn find(id: &str) -> Result<&'static CardModel, UnknownCard> {
        let wanted = id.strip_prefix("sim:").unwrap_or(id);
        MODELS.iter().find(|model| model.id == wanted).ok_or_else(|| UnknownCard {
            name: id.to_owned(),
            known: MODELS.iter().map(|model| model.id).collect(),
        })
    }
}
