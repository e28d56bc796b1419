//! Parses options: `preset=vramp,limit=80GiB`.

use vramp_alloc::Bytes;
use vramp_alloc::config::{Mixed, Policy};
use vramp_alloc::device::CaptureMode;
use vramp_alloc::device::HandleType;
use vramp_alloc::graph::{ArenaConfig, ArenaPolicy, Overlap};
use vramp_alloc::kind::{Classify, Kind};
use vramp_alloc::sharing::{Peers, Rdma, SharingConfig};
use vramp_peers::torch::TorchConfig;
use vramp_peers::{Config, Preset, VariableError};

/// An option is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OptionError {
    #[error("unknown option '{key}': use {known}", known = known.join(", "))]
    Key { key: String, known: &'static [&'static str] },
    #[error("duplicate option '{0}': remove one")]
    Twice(String),
    #[error("'{0}' is not an option: write key=value, separated by commas")]
    Form(String),
    #[error("{key}={value} is invalid: {expected}")]
    Value { key: String, value: String, expected: String },
    #[error("the option torch has no effect on preset={0}: use preset=torch or torch-expandable")]
    NotTorch(&'static str),
    #[error(transparent)]
    Variable(#[from] VariableError),
}

impl Classify for OptionError {
    fn kind(&self) -> Kind {
        Kind::Option
    }
}

/// Limit of reserved bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Limit {
    Bytes(Bytes),
    /// Percent of the device's memory.
    Percent(f64),
}

impl Limit {
    fn of(self, memory: Bytes) -> Bytes {
        match self {
            Limit::Bytes(bytes) => bytes,
            Limit::Percent(percent) => part(memory, percent / 100.0),
        }
    }
}

fn part(whole: Bytes, part: f64) -> Bytes {
    Bytes::new((whole.count() as f64 * part) as u64)
}

/// Parsed options of an allocator.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Options {
    preset: Option<Preset>,
    limit: Option<Limit>,
    prefill: Option<Bytes>,
    page: Option<Bytes>,
    span: Option<Bytes>,
    torch: Option<TorchConfig>,
    sharing: Option<HandleType>,
    rdma: Option<Rdma>,
    peers: Option<Peers>,
    pinned_keep: Option<Bytes>,
}

/// A configuration, and what there is to say about its origin.
#[derive(Debug)]
pub(crate) struct Configured {
    pub config: Config,
    /// A line that names the variables used.
    pub notice: Option<String>,
}

impl Options {
    const KEYS: [&str; 10] = [
        "preset",
        "limit",
        "prefill",
        "page",
        "span",
        "torch",
        "sharing",
        "rdma",
        "peers",
        "pinned_keep",
    ];

    /// Parses `key=value` pairs separated by commas. Space around keys and values is ignored.
    pub fn parse(text: &str) -> Result<Options, OptionError> {
        let mut options = Options::default();
        for pair in pairs(text)? {
            let Pair { key, value } = pair;
            let refuse = |expected: String| pair.refuse(expected);
            let size = || pair.size();
            match key {
                "preset" => {
                    let preset = value.parse::<Preset>();
                    options.preset = Some(preset.map_err(|error| refuse(error.to_string()))?);
                }
                "limit" => options.limit = Some(pair.limit()?),
                "prefill" => options.prefill = Some(size()?),
                "page" => options.page = Some(size()?),
                "span" => options.span = Some(size()?),
                "torch" => {
                    let settings = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
                    let settings = settings.ok_or_else(|| {
                        refuse("write settings in brackets, as [max_split_size_mb:64]".into())
                    })?;
                    let config = TorchConfig::parse(settings);
                    options.torch = Some(config.map_err(|error| refuse(error.to_string()))?);
                }
                "sharing" => {
                    options.sharing = Some(pair.one_of(&[
                        ("none", HandleType::None),
                        ("posix-fd", HandleType::PosixFd),
                        ("fabric", HandleType::Fabric),
                    ])?);
                }
                "rdma" => {
                    let known = [("off", Rdma::Off), ("on", Rdma::On), ("auto", Rdma::Auto)];
                    options.rdma = Some(pair.one_of(&known)?);
                }
                "peers" => options.peers = Some(pair.peers()?),
                "pinned_keep" => options.pinned_keep = Some(size()?),
                _ => return Err(pair.unknown(&Options::KEYS)),
            }
        }
        let preset = options.preset();
        match options.torch {
            Some(_) if !preset.is_torch() => Err(OptionError::NotTorch(preset.name())),
            _ => Ok(options),
        }
    }

    /// Returns the pinned memory that regions keep however long it is free.
    pub fn pinned_keep(&self) -> Bytes {
        self.pinned_keep.unwrap_or(Bytes::ZERO)
    }

    fn preset(&self) -> Preset {
        self.preset.unwrap_or(Preset::Vramp)
    }

    /// Returns an error for a limit under a page of the device: no request could succeed.
    pub fn check_limit(&self, memory: Bytes, page: Bytes) -> Result<(), OptionError> {
        let limit = self.limit.map(|limit| limit.of(memory));
        match limit.filter(|limit| *limit < page) {
            Some(limit) => Err(OptionError::Value {
                key: "limit".to_owned(),
                value: limit.to_string(),
                expected: format!("memory is reserved in pages of {page}: use at least that"),
            }),
            None => Ok(()),
        }
    }

    /// Returns the configuration for a device with `memory`, limited to `fraction` of it, with the
    /// variables of the preset's own project for what no option sets.
    pub fn with_variables(
        &self,
        memory: Bytes,
        fraction: Option<f64>,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Configured, OptionError> {
        let is_set = |variable: &str| match variable {
            "VPMM_PAGE_SIZE" => self.page.is_some(),
            "VPMM_VA_SIZE" => self.span.is_some(),
            "VPMM_PAGES" => self.prefill.is_some(),
            _ => self.torch.is_some(),
        };
        let lookup = |variable: &str| if is_set(variable) { None } else { lookup(variable) };
        let preset = self.preset();
        let (config, used) = Config::preset(preset).with_variables(lookup)?;
        let named = used.iter().map(|name| format!("{name}={}", lookup(name).unwrap_or_default()));
        let named: Vec<String> = named.collect();
        let ignored = &config.torch.without_effect;
        let notice = (!named.is_empty()).then(|| {
            let without = match &ignored[..] {
                [] => String::new(),
                ignored => format!(" ({} without effect)", ignored.join(", ")),
            };
            format!("vramp: preset={} uses {}{without}\n", preset.name(), named.join(", "))
        });
        Ok(Configured { config: self.apply(config, memory, fraction), notice })
    }

    /// Returns the configuration for a device with `memory`, limited to `fraction` of it.
    pub fn config(&self, memory: Bytes, fraction: Option<f64>) -> Config {
        self.apply(Config::preset(self.preset()), memory, fraction)
    }

    fn apply(&self, mut config: Config, memory: Bytes, fraction: Option<f64>) -> Config {
        let fraction = fraction.map(|fraction| part(memory, fraction));
        let limit = self.limit.map(|limit| limit.of(memory));
        config.base.limit = limit.into_iter().chain(fraction).min();
        config.base.prefill = self.prefill.unwrap_or(config.base.prefill);
        config.base.page = self.page.or(config.base.page);
        // Chunks are whole pages. Their sizes are no options.
        if let Policy::Mixed(mixed) = &mut config.base.policy {
            let Mixed { chunk_min, chunk_usual, chunk_max, .. } = mixed;
            for chunk in [chunk_min, chunk_usual, chunk_max] {
                *chunk = (*chunk).max(self.page.unwrap_or(*chunk));
            }
        }
        config.base.span = self.span.unwrap_or(config.base.span);
        config.torch = self.torch.clone().unwrap_or(config.torch);
        let SharingConfig { handle_type, rdma, peers } = config.base.sharing;
        config.base.sharing = SharingConfig {
            handle_type: self.sharing.unwrap_or(handle_type),
            rdma: self.rdma.unwrap_or(rdma),
            peers: self.peers.clone().unwrap_or(peers),
        };
        config
    }
}

/// Parses the value of the option `limit` for a device with `memory` in pages of `page`.
pub(crate) fn limit_of(value: &str, memory: Bytes, page: Bytes) -> Result<Bytes, OptionError> {
    let limit = Some(Pair { key: "limit", value }.limit()?);
    let options = Options { limit, ..Options::default() };
    options.check_limit(memory, page)?;
    Ok(options.limit.map_or(memory, |limit| limit.of(memory)))
}

/// Parses the options of an arena.
pub(crate) fn arena_config(text: &str) -> Result<ArenaConfig, OptionError> {
    let mut config = ArenaConfig::default();
    for pair in pairs(text)? {
        match pair.key {
            "policy" => {
                config.policy = pair.one_of(&[
                    ("reusing", ArenaPolicy::Reusing),
                    ("monotone", ArenaPolicy::Monotone),
                ])?;
            }
            "capacity" => config.capacity = pair.size()?,
            "overlap" => {
                config.overlap =
                    pair.one_of(&[("refuse", Overlap::Refuse), ("order", Overlap::Order)])?;
            }
            "mode" => {
                config.mode = pair.one_of(&[
                    ("global", CaptureMode::Global),
                    ("thread-local", CaptureMode::ThreadLocal),
                    ("relaxed", CaptureMode::Relaxed),
                ])?;
            }
            "replan" => config.replan = pair.one_of(&[("on", true), ("off", false)])?,
            _ => {
                return Err(pair.unknown(&["policy", "capacity", "overlap", "mode", "replan"]));
            }
        }
    }
    Ok(config)
}

/// Splits a device off options: `device=sim:h200,limit=1GiB`. Returns it and the other options.
pub(crate) fn take_device(text: &str) -> Result<(Option<&str>, String), OptionError> {
    take(text, "device")
}

/// Returns the value of one option, if it is given, and the other options.
pub(crate) fn take<'a>(text: &'a str, key: &str) -> Result<(Option<&'a str>, String), OptionError> {
    let (taken, others): (Vec<Pair>, Vec<Pair>) =
        pairs(text)?.into_iter().partition(|pair| pair.key == key);
    let others: Vec<String> =
        others.iter().map(|pair| format!("{}={}", pair.key, pair.value)).collect();
    Ok((taken.first().map(|pair| pair.value), others.join(",")))
}

/// One option.
#[derive(Clone, Copy)]
struct Pair<'a> {
    key: &'a str,
    value: &'a str,
}

impl Pair<'_> {
    fn refuse(&self, expected: String) -> OptionError {
        OptionError::Value { key: self.key.to_owned(), value: self.value.to_owned(), expected }
    }

    fn unknown(&self, known: &'static [&'static str]) -> OptionError {
        OptionError::Key { key: self.key.to_owned(), known }
    }

    fn size(&self) -> Result<Bytes, OptionError> {
        match self.value.parse::<Bytes>() {
            Ok(size) if !size.is_zero() => Ok(size),
            _ => Err(self.refuse("write a size above zero, such as 2MiB or 80GiB".to_owned())),
        }
    }

    fn limit(&self) -> Result<Limit, OptionError> {
        limit(self.value).ok_or_else(|| {
            let expected = "write a size such as 80GiB, or a part of the device such as 90%";
            self.refuse(expected.to_owned())
        })
    }

    fn peers(&self) -> Result<Peers, OptionError> {
        let listed = self.value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let listed = listed.map(|list| {
            let numbers = list.split(',').map(str::trim).filter(|number| !number.is_empty());
            numbers.map(str::parse).collect::<Result<Vec<u32>, _>>()
        });
        match (self.value, listed) {
            ("none", _) => Ok(Peers::None),
            ("on-demand", _) => Ok(Peers::OnDemand),
            ("all", _) => Ok(Peers::All),
            (_, Some(Ok(ordinals))) => Ok(Peers::These(ordinals)),
            _ => Err(self.refuse("use none, on-demand, all or a list such as [0,1]".to_owned())),
        }
    }

    fn one_of<T: Copy>(&self, known: &[(&str, T)]) -> Result<T, OptionError> {
        let found = known.iter().find(|(name, _)| *name == self.value);
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        found
            .map(|(_, value)| *value)
            .ok_or_else(|| self.refuse(format!("use {}", names.join(" or "))))
    }
}

/// Splits options at commas outside of brackets, and at `=`. Space around keys and values is ignored.
fn pairs(text: &str) -> Result<Vec<Pair<'_>>, OptionError> {
    let mut depth = 0;
    let split = text.split(|c| {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        c == ',' && depth <= 0
    });
    let mut pairs: Vec<Pair> = Vec::new();
    for pair in split.map(str::trim).filter(|pair| !pair.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(OptionError::Form(pair.to_owned()));
        };
        let (key, value) = (key.trim(), value.trim());
        if pairs.iter().any(|earlier| earlier.key == key) {
            return Err(OptionError::Twice(key.to_owned()));
        }
        pairs.push(Pair { key, value });
    }
    Ok(pairs)
}

fn limit(value: &str) -> Option<Limit> {
    match value.strip_suffix('%') {
        Some(percent) => {
            let percent: f64 = percent.trim().parse().ok()?;
            (percent > 0.0 && percent <= 100.0).then_some(Limit::Percent(percent))
        }
        None => value.parse().ok().filter(|size: &Bytes| !size.is_zero()).map(Limit::Bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_reaches_the_configuration() {
        let text = " preset = vpmm, limit=50%,prefill=4MiB , page=4MiB,span=1TiB,";
        let config = Options::parse(text).unwrap().config(Bytes::gib(80), None);
        assert_eq!(config.preset, Preset::Vpmm);
        assert_eq!(config.base.limit, Some(Bytes::gib(40)));
        assert_eq!(config.base.prefill, Bytes::mib(4));
        assert_eq!(config.base.page, Some(Bytes::mib(4)));
        assert_eq!(config.base.span, Bytes::tib(1));
    }

    #[test]
    fn settings_of_pytorch_are_an_option_in_brackets() {
        let list = "roundup_power2_divisions:[256:1,>:4]";
        let text = format!("preset=torch, torch = [max_split_size_mb:64,{list}],limit=1GiB");
        let config = Options::parse(&text).unwrap().config(Bytes::gib(80), None);
        assert_eq!((config.preset, config.base.limit), (Preset::Torch, Some(Bytes::gib(1))));
        assert_eq!(config.torch.max_split_size, Some(Bytes::mib(64)));
        let parsed = TorchConfig::parse(list).unwrap();
        assert_eq!(config.torch.roundup_power2_divisions, parsed.roundup_power2_divisions);
        let message = |text| Options::parse(text).unwrap_err().to_string();
        assert!(message("preset=torch,torch=max_split_size_mb:64").contains("in brackets"));
        assert!(message("preset=torch,torch=[max_split_size_mb:2]").contains("above 20"));
        assert!(message("preset=torch,torch=[a:[b,limit=1").contains("in brackets"));
        assert_eq!(
            message("torch=[max_split_size_mb:64]"),
            "the option torch has no effect on preset=vramp: use preset=torch or torch-expandable"
        );
    }

    /// Options with variables set: the configuration, the line, or the error.
    fn with(options: &str, set: &[(&str, &str)]) -> Result<Configured, String> {
        let lookup = |name: &str| {
            let found = set.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let options = Options::parse(options).unwrap();
        let configured = options.with_variables(Bytes::gib(80), None, lookup);
        configured.map_err(|error| error.to_string())
    }

    #[test]
    fn variables_of_vpmm_count_for_its_preset_where_no_option_does() {
        let set = [
            ("VPMM_PAGE_SIZE", "4194304"),
            ("VPMM_PAGES", "16"),
            ("VPMM_VA_SIZE", "1TiB"),
            ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64"),
        ];
        let Configured { config, notice } = with("preset=vpmm", &set).unwrap();
        assert_eq!((config.base.page, config.base.span), (Some(Bytes::mib(4)), Bytes::tib(1)));
        assert_eq!(config.base.prefill_pages, Some(16));
        assert_eq!(config.torch, TorchConfig::default());
        assert_eq!(
            notice.unwrap(),
            "vramp: preset=vpmm uses VPMM_PAGE_SIZE=4194304, VPMM_VA_SIZE=1TiB, VPMM_PAGES=16\n"
        );
        let Configured { config, notice } =
            with("preset=vpmm,page=2MiB,prefill=6MiB", &set).unwrap();
        assert_eq!((config.base.page, config.base.span), (Some(Bytes::mib(2)), Bytes::tib(1)));
        assert_eq!((config.base.prefill, config.base.prefill_pages), (Bytes::mib(6), None));
        assert_eq!(notice.unwrap(), "vramp: preset=vpmm uses VPMM_VA_SIZE=1TiB\n");
        for preset in ["", "preset=stream-ordered"] {
            let Configured { config, notice } = with(preset, &set).unwrap();
            assert_eq!((config.base.page, config.base.prefill_pages, notice), (None, None, None));
        }
        let error = with("preset=vpmm", &[("VPMM_PAGES", "many")]).unwrap_err();
        assert!(error.starts_with("VPMM_PAGES='many' cannot be used"), "{error}");
    }

    #[test]
    fn the_first_variable_of_pytorch_counts_for_its_presets() {
        let (new, old) = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF");
        let both = [(old, "max_split_size_mb:32"), (new, "max_split_size_mb:64")];
        for preset in ["preset=torch", "preset=torch-expandable"] {
            let Configured { config, notice } = with(preset, &both).unwrap();
            assert_eq!(config.torch.max_split_size, Some(Bytes::mib(64)));
            let named = format!("vramp: {preset} uses {new}=max_split_size_mb:64\n");
            assert_eq!(notice.unwrap(), named);
            let Configured { config, notice } = with(preset, &both[..1]).unwrap();
            assert_eq!(config.torch.max_split_size, Some(Bytes::mib(32)));
            assert!(notice.unwrap().contains(old));
        }
        let explicit = "preset=torch,torch=[garbage_collection_threshold:0.5]";
        let Configured { config, notice } = with(explicit, &both).unwrap();
        assert_eq!((config.torch.max_split_size, notice), (None, None));
        let Configured { notice, .. } =
            with("preset=torch", &[(new, "release_lock_on_cudamalloc:True")]).unwrap();
        let notice = notice.unwrap();
        assert!(notice.ends_with("(release_lock_on_cudamalloc without effect)\n"), "{notice}");
        let Configured { config, notice } = with("", &both).unwrap();
        assert_eq!((config.torch, notice), (TorchConfig::default(), None));
        let error = with("preset=torch", &[(old, "max_split_size_mb:2")]).unwrap_err();
        assert!(error.starts_with("PYTORCH_CUDA_ALLOC_CONF is invalid: "), "{error}");
    }

    #[test]
    fn the_smaller_of_limit_and_fraction_holds() {
        let options = Options::parse("limit=30GiB").unwrap();
        let limit = |fraction| options.config(Bytes::gib(80), fraction).base.limit;
        assert_eq!(limit(Some(0.25)), Some(Bytes::gib(20)));
        assert_eq!(limit(Some(0.5)), Some(Bytes::gib(30)));
        assert_eq!(Options::default().config(Bytes::gib(80), None).base.limit, None);
    }

    #[test]
    fn every_option_of_an_arena_reaches_its_configuration() {
        let text = "policy=monotone,capacity=64MiB,overlap=order,mode=relaxed,replan=off";
        let config = arena_config(text).unwrap();
        assert_eq!((config.policy, config.capacity), (ArenaPolicy::Monotone, Bytes::mib(64)));
        assert_eq!((config.overlap, config.mode), (Overlap::Order, CaptureMode::Relaxed));
        assert!(!config.replan && arena_config("").unwrap().replan);
        let message = |text| arena_config(text).unwrap_err().to_string();
        assert_eq!(
            message("limit=1GiB"),
            "unknown option 'limit': use policy, capacity, overlap, mode, replan"
        );
        assert_eq!(message("policy=tight"), "policy=tight is invalid: use reusing or monotone");
        assert!(message("capacity=0").contains("a size above zero"));
    }

    #[test]
    fn a_limit_under_a_page_is_refused_and_says_what_the_least_is() {
        let check = |text| Options::parse(text).unwrap().check_limit(Bytes::gib(80), Bytes::mib(2));
        for text in ["", "limit=2MiB", "limit=1%"] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
        let least = "is invalid: memory is reserved in pages of 2.00 MiB: use at least that";
        assert_eq!(check("limit=1").unwrap_err().to_string(), format!("limit=1 B {least}"));
        assert!(check("limit=0.0001%").unwrap_err().to_string().ends_with(least));
    }

    #[test]
    fn chunks_are_at_least_as_large_as_the_page() {
        let mixed = |text| {
            let config = Options::parse(text).unwrap().config(Bytes::gib(80), None);
            let Policy::Mixed(mixed) = config.base.policy else { panic!("vpmm was not asked for") };
            mixed
        };
        assert_eq!(mixed(""), Mixed::default());
        assert_eq!(mixed("page=4MiB"), Mixed::default());
        let large = mixed("page=1GiB");
        assert_eq!([large.chunk_min, large.chunk_usual, large.chunk_max], [Bytes::gib(1); 3]);
    }

    #[test]
    fn who_can_reach_the_memory_is_an_option() {
        let sharing =
            |text: &str| Options::parse(text).unwrap().config(Bytes::gib(80), None).base.sharing;
        assert_eq!(sharing(""), SharingConfig::default());
        let all = sharing("sharing=fabric, rdma=auto, peers=[ 2, 0]");
        assert_eq!((all.handle_type, all.rdma), (HandleType::Fabric, Rdma::Auto));
        assert_eq!(all.peers, Peers::These(vec![2, 0]));
        for (text, peers) in
            [("none", Peers::None), ("on-demand", Peers::OnDemand), ("all", Peers::All)]
        {
            assert_eq!(sharing(&format!("peers={text}")).peers, peers);
        }
        let message = |text| Options::parse(text).unwrap_err().to_string();
        assert_eq!(message("rdma=yes"), "rdma=yes is invalid: use off or on or auto");
        assert!(message("sharing=fd").contains("use none or posix-fd or fabric"));
        for bad in ["peers=1", "peers=[a]", "peers=[-1]", "peers=[1"] {
            assert!(message(bad).contains("a list such as [0,1]"), "{bad}");
        }
    }

    #[test]
    fn an_invalid_option_is_named() {
        let message = |text| Options::parse(text).unwrap_err().to_string();
        assert_eq!(
            message("size=1"),
            "unknown option 'size': use preset, limit, prefill, page, span, torch, sharing, rdma, \
             peers, pinned_keep"
        );
        assert_eq!(message("limit=1,limit=2"), "duplicate option 'limit': remove one");
        assert_eq!(
            message("80GiB"),
            "'80GiB' is not an option: write key=value, separated by commas"
        );
        for bad in ["limit=", "limit=0", "limit=-1%", "limit=101%", "limit=NaN%", "limit=many"] {
            assert!(message(bad).starts_with(&format!("{bad} is invalid: ")), "{bad}");
        }
        assert!(
            message("preset=best")
                .contains("use vramp, vpmm, stream-ordered, torch or torch-expandable")
        );
        assert!(message("page=0").contains("a size above zero"));
    }
}
