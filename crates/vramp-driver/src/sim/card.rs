//! Models of cards, by name.

use std::fmt;

use vramp_core::Bytes;

/// Name, memory and limits of a card that can be simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardModel {
    /// Short name: `h200`, opened as `sim:h200`.
    pub id: &'static str,
    /// Name of the card as nvidia-smi prints it.
    pub name: &'static str,
    /// Other names of the card. Case, spaces, dashes and the form factor do not matter.
    pub aliases: &'static [&'static str],
    /// Memory of the card, as nvidia-smi prints it.
    pub memory: Bytes,
    /// The part of `memory` that no tensor can use: what the driver keeps for itself, and the CUDA
    /// context and libraries of one process.
    pub context: Bytes,
    /// Granularity of physical memory.
    pub page: Bytes,
    /// Address space that one process can reserve in total.
    pub address_space: Bytes,
    /// True if the costs were measured on this card; false if they are those of the H200.
    pub measured: bool,
    /// Source of the memory size and the costs.
    pub source: &'static str,
}

/// Fifteen reservations of 8 TiB succeeded on an H200 and the sixteenth failed: the process itself
/// uses a part of the 128 TiB of 47 address bits. The driver is the same for every card here.
const ADDRESS_SPACE: Bytes = Bytes::tib(127);

/// Granularity as measured on the H200; NVIDIA states 2 MiB pages for all cards here.
const PAGE: Bytes = Bytes::mib(2);

/// Of a PyTorch process on an H200 that ran out of memory: 143,771 MiB in total, less 126,899 MiB that
/// `cuMemGetInfo` called free, less 15,562 MiB that PyTorch had reserved. About 0.6 GiB of it is the
/// difference between the totals of nvidia-smi and of `cuMemGetInfo`; the rest is the context, cuBLAS
/// and loaded kernels. The other large cards of its generation and the next one are assumed to need
/// as much.
const LARGE_CONTEXT: Bytes = Bytes::mib(1310);

/// Two out-of-memory texts of PyTorch that were published, computed in the same way: 1,079 MiB on an RTX
/// 5090 (Wan-Video/Wan2.1 issue 465) and about 1,000 MiB on an RTX 6000 Ada (DINGYANB/MTVCrafter issue
/// 21). Assumed for all other cards.
const CONTEXT: Bytes = Bytes::gib(1);

/// What all cards have in common but the H200, which is the only one with measured costs.
const OTHER: CardModel = CardModel {
    id: "",
    name: "",
    aliases: &[],
    memory: Bytes::ZERO,
    context: CONTEXT,
    page: PAGE,
    address_space: ADDRESS_SPACE,
    measured: false,
    source: "",
};

/// The text of [`CardModel::source`] for a memory size from `$source`.
macro_rules! source {
    ($source:literal) => {
        concat!("memory: nvidia-smi, ", $source, "; costs are those measured on the H200")
    };
}

const MODELS: [CardModel; 19] = [
    CardModel {
        id: "h200",
        name: "NVIDIA H200",
        aliases: &["h200-141g"],
        memory: Bytes::mib(143_771),
        context: LARGE_CONTEXT,
        measured: true,
        source: "nvidia-smi on an H200 (sold as 141 GB); costs measured with driver 580.159.04",
        ..OTHER
    },
    CardModel {
        id: "h100",
        name: "NVIDIA H100 80GB HBM3",
        aliases: &["h100-80g"],
        memory: Bytes::mib(81_559),
        context: LARGE_CONTEXT,
        source: source!("modal-labs/modal-client pull 2797"),
        ..OTHER
    },
    CardModel {
        id: "h100-nvl",
        name: "NVIDIA H100 NVL",
        aliases: &["h100-94g"],
        memory: Bytes::mib(95_830),
        context: LARGE_CONTEXT,
        source: source!("as printed in public logs"),
        ..OTHER
    },
    CardModel {
        id: "h20",
        name: "NVIDIA H20",
        aliases: &["h20-96g"],
        memory: Bytes::mib(97_871),
        context: LARGE_CONTEXT,
        source: source!("as printed in public logs"),
        ..OTHER
    },
    CardModel {
        id: "gh200",
        name: "NVIDIA GH200 480GB",
        aliases: &["gh200-96g", "gh200-120g", "gh200-480g"],
        memory: Bytes::mib(97_871),
        context: LARGE_CONTEXT,
        source: source!("as printed in public logs"),
        ..OTHER
    },
    CardModel {
        id: "b200",
        name: "NVIDIA B200",
        aliases: &["b200-180g", "b200-192g"],
        memory: Bytes::mib(183_359),
        context: LARGE_CONTEXT,
        source: source!("as printed in public logs"),
        ..OTHER
    },
    CardModel {
        id: "a100-40g",
        name: "NVIDIA A100-SXM4-40GB",
        memory: Bytes::mib(40_960),
        source: source!("modal-labs/modal-client pull 2797"),
        ..OTHER
    },
    CardModel {
        id: "a100-80g",
        name: "NVIDIA A100-SXM4-80GB",
        memory: Bytes::mib(81_920),
        source: source!("modal-labs/modal-client pull 2797"),
        ..OTHER
    },
    CardModel {
        id: "l4",
        name: "NVIDIA L4",
        aliases: &["l4-24g"],
        memory: Bytes::mib(23_034),
        source: source!("modal-labs/modal-client pull 2797"),
        ..OTHER
    },
    CardModel {
        id: "l40s",
        name: "NVIDIA L40S",
        aliases: &["l40s-48g"],
        memory: Bytes::mib(46_068),
        source: source!("modal-labs/modal-client pull 2797"),
        ..OTHER
    },
    CardModel {
        id: "a10",
        name: "NVIDIA A10",
        aliases: &["a10-24g", "a10g"],
        memory: Bytes::mib(23_028),
        source: source!("modal-labs/modal-client pull 2797"),
        ..OTHER
    },
    CardModel {
        id: "a6000",
        name: "NVIDIA RTX A6000",
        aliases: &["a6000-48g"],
        memory: Bytes::mib(49_140),
        source: source!("without a public log"),
        ..OTHER
    },
    CardModel {
        id: "rtx6000-ada",
        name: "NVIDIA RTX 6000 Ada Generation",
        aliases: &["rtx-6000-ada-48g"],
        memory: Bytes::mib(46_068),
        source: source!("DINGYANB/MTVCrafter issue 21"),
        ..OTHER
    },
    CardModel {
        id: "rtx5090",
        name: "NVIDIA GeForce RTX 5090",
        aliases: &["5090", "rtx5090-32g"],
        memory: Bytes::mib(32_607),
        source: source!("noonghunna/club-3090 issue 1229"),
        ..OTHER
    },
    CardModel {
        id: "rtx4090",
        name: "NVIDIA GeForce RTX 4090",
        aliases: &["4090", "rtx4090-24g"],
        memory: Bytes::mib(24_564),
        source: source!("RLinf/RLinf issue 255"),
        ..OTHER
    },
    CardModel {
        id: "rtx3090",
        name: "NVIDIA GeForce RTX 3090",
        aliases: &["3090", "rtx3090-24g"],
        memory: Bytes::mib(24_576),
        source: source!("noonghunna/club-3090 issue 390"),
        ..OTHER
    },
    CardModel {
        id: "v100-16g",
        name: "Tesla V100-SXM2-16GB",
        memory: Bytes::mib(16_384),
        source: source!(
            "half of the 32 GB card; old drivers show 16,160 MiB: 4paradigm/k8s-vgpu-scheduler issue 7"
        ),
        ..OTHER
    },
    CardModel {
        id: "v100-32g",
        name: "Tesla V100-SXM2-32GB",
        memory: Bytes::mib(32_768),
        source: source!("Wan-Video/Wan2.1 issue 5"),
        ..OTHER
    },
    CardModel {
        id: "t4",
        name: "Tesla T4",
        aliases: &["t4-16g"],
        memory: Bytes::mib(15_360),
        source: source!("modal-labs/modal-client pull 2797"),
        ..OTHER
    },
];

/// Largest difference between the recorded and the modelled usable memory of one card, in per cent of
/// the card's. What libraries of a process use differs, and so does the driver's own part.
const TOLERANCE_PERCENT: u64 = 4;

/// Error for a name that no card model has, or that several have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownCard {
    /// Name that was given.
    pub name: String,
    /// Card models that the name may stand for; empty if there are none. Several if it is ambiguous.
    pub candidates: Vec<&'static str>,
    /// Names of all card models.
    pub known: Vec<&'static str>,
}

impl std::error::Error for UnknownCard {}

impl fmt::Display for UnknownCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnknownCard { name, candidates, known } = self;
        match candidates.as_slice() {
            [] => write!(f, "unknown simulated card '{name}'")?,
            [one] => write!(f, "unknown simulated card '{name}'; did you mean '{one}'?")?,
            several => {
                return write!(
                    f,
                    "'{name}' may be any of these simulated cards: {}; name one of them",
                    several.join(", ")
                );
            }
        }
        let end = if candidates.is_empty() { ";" } else { "" };
        write!(f, "{end} known cards: {}", known.join(", "))
    }
}

impl CardModel {
    /// Returns every card model, the default first.
    pub fn all() -> &'static [CardModel] {
        &MODELS
    }

    /// Returns the memory that tensors can use.
    pub fn usable(&self) -> Bytes {
        self.memory.saturating_sub(self.context)
    }

    /// Returns the card model of this name, with or without the prefix `sim:`: the short name, or the
    /// name as NVIDIA writes it, in any case, with or without spaces, dashes and the form factor.
    ///
    /// ```
    /// use vramp_driver::sim::CardModel;
    /// let card = CardModel::find("sim:a100-80g")?;
    /// assert_eq!(CardModel::find("NVIDIA A100-SXM4-80GB")?, card);
    /// assert_eq!(CardModel::find("RTX 4090")?, CardModel::find("4090")?);
    /// let error = CardModel::find("A100").unwrap_err().to_string();
    /// assert!(error.contains("a100-40g, a100-80g"));
    /// assert!(CardModel::find("h10").unwrap_err().to_string().contains("did you mean 'h100'?"));
    /// # Ok::<(), vramp_driver::sim::UnknownCard>(())
    /// ```
    ///
    /// # Errors
    /// [`UnknownCard`] lists the names, and the nearest one or those that an ambiguous name stands for.
    pub fn find(name: &str) -> Result<&'static CardModel, UnknownCard> {
        let wanted = key(name.strip_prefix("sim:").unwrap_or(name));
        if let Some(found) = MODELS.iter().find(|model| model.keys().any(|key| key == wanted)) {
            return Ok(found);
        }
        // A name without the size of the memory: `a100`.
        let family = |model: &&CardModel| model.id.split('-').next().is_some_and(|id| id == wanted);
        let mut candidates: Vec<_> = MODELS.iter().filter(family).map(|model| model.id).collect();
        if candidates.is_empty() {
            candidates.extend(nearest(&wanted));
        }
        let known = MODELS.iter().map(|model| model.id).collect();
        Err(UnknownCard { name: name.to_owned(), candidates, known })
    }

    /// Returns the card on which a process had `usable` memory in total, such as what was free and
    /// what the process had reserved when it ran out of memory. `None` if no card fits within a few
    /// per cent.
    ///
    /// The number tells cards apart by memory alone, and by no more than that: a 3090 and a 4090 have
    /// the same. Of these the one that comes nearest is returned.
    ///
    /// ```
    /// use vramp_core::Bytes;
    /// use vramp_driver::sim::CardModel;
    /// let recorded = Bytes::new(133_063_376_896 + 16_317_939_712);
    /// assert_eq!(CardModel::infer(recorded), CardModel::find("h200").ok());
    /// assert_eq!(CardModel::infer(Bytes::gib(60)), None);
    /// ```
    pub fn infer(usable: Bytes) -> Option<&'static CardModel> {
        let distance = |model: &&CardModel| model.usable().count().abs_diff(usable.count());
        let near = |model: &&CardModel| {
            distance(model) <= model.usable().count() / 100 * TOLERANCE_PERCENT
        };
        MODELS.iter().filter(near).min_by_key(distance)
    }

    /// Returns the smallest card with at least this much usable memory, for a number that a job is
    /// known to need. `None` if no card has as much.
    pub fn smallest_with(usable: Bytes) -> Option<&'static CardModel> {
        MODELS.iter().filter(|model| model.usable() >= usable).min_by_key(|model| model.usable())
    }

    fn keys(&self) -> impl Iterator<Item = String> + use<> {
        let aliases = self.aliases.iter().copied();
        [self.id, self.name].into_iter().chain(aliases).map(key)
    }
}

/// Words of a card's name that tell nothing about its memory and costs here.
const NOISE: [&str; 14] = [
    "nvidia",
    "geforce",
    "tesla",
    "quadro",
    "generation",
    "pcie",
    "sxm",
    "sxm2",
    "sxm3",
    "sxm4",
    "sxm5",
    "hbm2e",
    "hbm3",
    "hbm3e",
];

/// Returns the form of a name in which two ways to write it are equal.
fn key(name: &str) -> String {
    let name = name.to_lowercase();
    let words = name.split(|c: char| !c.is_alphanumeric()).filter(|word| !NOISE.contains(word));
    let mut key = String::new();
    for word in words {
        let size = word.strip_suffix("gb").filter(|size| size.parse::<u32>().is_ok());
        key.push_str(&size.map_or_else(|| word.to_owned(), |size| format!("{size}g")));
    }
    key
}

/// Returns the name with the fewest edits from `wanted`, if there are few.
fn nearest(wanted: &str) -> Option<&'static str> {
    let edits = |model: &CardModel| {
        let distances = model.keys().map(|key| strsim::osa_distance(&key, wanted));
        distances.min().unwrap_or(usize::MAX)
    };
    let (edits, model) = MODELS.iter().map(|model| (edits(model), model)).min_by_key(|it| it.0)?;
    (edits <= 1 + wanted.len() / 4).then_some(model.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str) -> &'static str {
        CardModel::find(name).unwrap_or_else(|error| panic!("{error}")).id
    }

    #[test]
    fn cards_are_found_by_every_way_to_write_their_name() {
        for model in CardModel::all() {
            for name in [
                model.id.to_owned(),
                format!("sim:{}", model.id),
                model.id.to_uppercase(),
                model.id.replace('-', " "),
                model.id.replace('-', "_"),
                model.id.replace('-', ""),
                model.name.to_owned(),
                model.name.to_lowercase(),
            ] {
                assert_eq!(found(&name), model.id, "{name}");
            }
            assert!(model.aliases.iter().all(|alias| found(alias) == model.id));
        }
        for (name, id) in [
            ("4090", "rtx4090"),
            ("RTX 4090", "rtx4090"),
            ("NVIDIA A100 80GB PCIe", "a100-80g"),
            ("NVIDIA A100-PCIE-40GB", "a100-40g"),
            ("A100 80GB", "a100-80g"),
            ("Tesla V100-PCIE-32GB", "v100-32g"),
            ("NVIDIA H100 PCIe", "h100"),
            ("H100 NVL", "h100-nvl"),
            ("NVIDIA A10G", "a10"),
            ("RTX 6000 Ada", "rtx6000-ada"),
        ] {
            assert_eq!(found(name), id, "{name}");
        }
    }

    #[test]
    fn no_name_belongs_to_two_cards() {
        let mut keys: Vec<_> = CardModel::all()
            .iter()
            .flat_map(|model| {
                let mut keys: Vec<_> = model.keys().collect();
                keys.sort();
                keys.dedup();
                keys
            })
            .collect();
        keys.sort();
        let all = keys.len();
        keys.dedup();
        assert_eq!(keys.len(), all);
    }

    #[test]
    fn an_ambiguous_name_lists_the_cards_and_a_wrong_one_the_nearest() {
        for (name, candidates) in [
            ("a100", vec!["a100-40g", "a100-80g"]),
            ("Tesla V100", vec!["v100-16g", "v100-32g"]),
            ("h10", vec!["h100"]),
            ("h1000", vec!["h100"]),
            ("gtx4090", vec!["rtx4090"]),
            ("a100-81g", vec!["a100-80g"]),
            ("voodoo", vec![]),
            ("", vec![]),
        ] {
            let error = CardModel::find(name).expect_err(name);
            assert_eq!(error.candidates, candidates, "{name}");
            let text = error.to_string();
            match candidates.len() {
                2 => assert!(text.contains(&candidates.join(", ")), "{text}"),
                1 => {
                    assert!(text.contains(&format!("did you mean '{}'?", candidates[0])), "{text}");
                    assert!(text.contains("known cards: h200, h100"), "{text}");
                }
                _ => assert!(text.contains("'; known cards: h200, h100"), "{text}"),
            }
        }
    }

    #[test]
    fn a_card_is_inferred_from_what_a_process_could_use() {
        // Each card from its own usable memory, or one with the same.
        for model in CardModel::all() {
            for per_mille in [975, 1000, 1025] {
                let usable = Bytes::new(model.usable().count() / 1000 * per_mille);
                let inferred = CardModel::infer(usable).expect(model.id);
                let apart = inferred.usable().count().abs_diff(usable.count());
                assert!(apart <= usable.count() / 25, "{} for {}", inferred.id, model.id);
            }
            assert_eq!(
                CardModel::infer(model.usable()).map(CardModel::usable),
                Some(model.usable())
            );
        }
        for gib in [0, 1, 8, 12, 18, 27, 60, 110, 400] {
            assert_eq!(CardModel::infer(Bytes::gib(gib)), None, "{gib} GiB");
        }
        // The out-of-memory text of PyTorch on a 4090: 23.65 GiB in total, 0.4 GiB of it the context.
        let usable = Bytes::new((23.25 * f64::from(1 << 30)) as u64);
        assert!(CardModel::infer(usable).is_some_and(|card| card.id.ends_with("090")));
    }

    #[test]
    fn the_smallest_card_that_holds_a_job_has_at_least_its_memory() {
        assert_eq!(CardModel::smallest_with(Bytes::gib(1)).map(|card| card.id), Some("t4"));
        assert_eq!(CardModel::smallest_with(Bytes::gib(60)).map(|card| card.id), Some("h100"));
        assert_eq!(CardModel::smallest_with(Bytes::gib(150)).map(|card| card.id), Some("b200"));
        assert_eq!(CardModel::smallest_with(Bytes::gib(200)), None);
        let exact = CardModel::all()[0].usable();
        assert_eq!(CardModel::smallest_with(exact).map(|card| card.id), Some("h200"));
    }
}
