//! Parses options: `preset=vramp,limit=80GiB`.

use vramp_alloc::config::Mixed;
use vramp_alloc::device::CaptureMode;
use vramp_alloc::graph::{ArenaConfig, ArenaPolicy, Overlap};
use vramp_alloc::{Bytes, Config, Preset};

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
}

impl Options {
    const KEYS: [&str; 5] = ["preset", "limit", "prefill", "page", "span"];

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
                "limit" => {
                    options.limit = Some(limit(value).ok_or_else(|| {
                        refuse(
                            "write a size such as 80GiB, or a part of the device such as 90%"
                                .into(),
                        )
                    })?)
                }
                "prefill" => options.prefill = Some(size()?),
                "page" => options.page = Some(size()?),
                "span" => options.span = Some(size()?),
                _ => return Err(pair.unknown(&Options::KEYS)),
            }
        }
        Ok(options)
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

    /// Returns the configuration for a device with `memory`, limited to `fraction` of it.
    pub fn config(&self, memory: Bytes, fraction: Option<f64>) -> Config {
        let mut config = Config::preset(self.preset.unwrap_or(Preset::Vramp));
        let fraction = fraction.map(|fraction| part(memory, fraction));
        let limit = self.limit.map(|limit| limit.of(memory));
        config.limit = limit.into_iter().chain(fraction).min();
        config.prefill = self.prefill.unwrap_or(config.prefill);
        config.page = self.page.or(config.page);
        // Chunks are whole pages. Their sizes are no options.
        let Mixed { chunk_min, chunk_usual, chunk_max, .. } = &mut config.mixed;
        for chunk in [chunk_min, chunk_usual, chunk_max] {
            *chunk = (*chunk).max(self.page.unwrap_or(*chunk));
        }
        config.span = self.span.unwrap_or(config.span);
        config
    }
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

    fn one_of<T: Copy>(&self, known: &[(&str, T)]) -> Result<T, OptionError> {
        let found = known.iter().find(|(name, _)| *name == self.value);
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        found
            .map(|(_, value)| *value)
            .ok_or_else(|| self.refuse(format!("use {}", names.join(" or "))))
    }
}

/// Splits options at commas and `=`. Space around keys and values is ignored.
fn pairs(text: &str) -> Result<Vec<Pair<'_>>, OptionError> {
    let mut pairs: Vec<Pair> = Vec::new();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
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
        assert_eq!(config.limit, Some(Bytes::gib(40)));
        assert_eq!(config.prefill, Bytes::mib(4));
        assert_eq!(config.page, Some(Bytes::mib(4)));
        assert_eq!(config.span, Bytes::tib(1));
    }

    #[test]
    fn the_smaller_of_limit_and_fraction_holds() {
        let options = Options::parse("limit=30GiB").unwrap();
        let limit = |fraction| options.config(Bytes::gib(80), fraction).limit;
        assert_eq!(limit(Some(0.25)), Some(Bytes::gib(20)));
        assert_eq!(limit(Some(0.5)), Some(Bytes::gib(30)));
        assert_eq!(Options::default().config(Bytes::gib(80), None).limit, None);
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
        let mixed = |text| Options::parse(text).unwrap().config(Bytes::gib(80), None).mixed;
        assert_eq!(mixed(""), Mixed::default());
        assert_eq!(mixed("page=4MiB"), Mixed::default());
        let large = mixed("page=1GiB");
        assert_eq!([large.chunk_min, large.chunk_usual, large.chunk_max], [Bytes::gib(1); 3]);
    }

    #[test]
    fn an_invalid_option_is_named() {
        let message = |text| Options::parse(text).unwrap_err().to_string();
        assert_eq!(
            message("size=1"),
            "unknown option 'size': use preset, limit, prefill, page, span"
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
