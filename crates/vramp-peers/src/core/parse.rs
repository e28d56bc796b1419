//! PyTorch's syntax of settings: `key:value,key:value`.

use std::fmt;
use std::str::FromStr;

use super::config::{Divisions, TorchConfig};
use vramp_core::Bytes;

/// Keys that have an effect here.
const HONOURED: [&str; 8] = [
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
];

/// Keys of PyTorch that have no effect on device memory, each with its kind of value.
const WITHOUT_EFFECT: [(&str, Takes); 10] = [
    ("expandable_segments_reserve", Takes::Anything),
    ("expandable_segments_reserve_by_class", Takes::Anything),
    ("graph_capture_record_stream_reuse", Takes::Bool),
    ("pinned_free_catch_all", Takes::Bool),
    ("pinned_num_register_threads", Takes::Threads),
    ("pinned_reserve_segment_size_mb", Takes::Count),
    ("pinned_use_background_threads", Takes::Bool),
    ("pinned_use_cuda_host_register", Takes::Bool),
    ("release_lock_on_cudamalloc", Takes::Bool),
    ("throw_on_cudamalloc_oom", Takes::Bool),
];

#[derive(Clone, Copy)]
enum Takes {
    Anything,
    Bool,
    Count,
    Threads,
}

/// Error of parsing settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TorchConfigError {
    /// The key is not a setting of PyTorch's allocator.
    #[error("'{key}' is not a setting of PyTorch's allocator: use one of {}", Known)]
    Key {
        /// Key that was given.
        key: String,
    },
    /// The value is not possible for its key.
    #[error("{key}:{value} cannot be used: it should be {expected}")]
    Value {
        /// Key that was given.
        key: String,
        /// Value that was given.
        value: String,
        /// Description of a possible value.
        expected: &'static str,
    },
    /// A key without a value.
    #[error("'{key}' has no value: write settings as key:value, separated by commas")]
    NoValue {
        /// Key that was given.
        key: String,
    },
}

/// Every known key, for the error.
struct Known;

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = WITHOUT_EFFECT.iter().map(|(key, _)| *key);
        let keys: Vec<&str> = HONOURED.into_iter().chain(others).collect();
        f.write_str(&keys.join(", "))
    }
}

impl FromStr for TorchConfig {
    type Err = TorchConfigError;

    fn from_str(text: &str) -> Result<TorchConfig, TorchConfigError> {
        TorchConfig::default().with(text)
    }
}

impl TorchConfig {
    /// Parses settings in the syntax of `PYTORCH_CUDA_ALLOC_CONF`. Settings that are not given keep
    /// their defaults; of a key given twice the last value counts.
    ///
    /// # Errors
    /// [`TorchConfigError`] lists the known keys, or describes a possible value.
    pub fn parse(text: &str) -> Result<TorchConfig, TorchConfigError> {
        text.parse()
    }

    /// Returns this configuration with the settings of `text` applied.
    ///
    /// # Errors
    /// As of [`TorchConfig::parse`].
    pub fn with(mut self, text: &str) -> Result<TorchConfig, TorchConfigError> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        for setting in split_outside_brackets(&text) {
            let Some((key, value)) = setting.split_once(':') else {
                return Err(match is_known(setting) {
                    true => TorchConfigError::NoValue { key: setting.to_owned() },
                    false => TorchConfigError::Key { key: setting.to_owned() },
                });
            };
            self.set(key, value)?;
        }
        Ok(self)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), TorchConfigError> {
        let of = Setting { key, value };
        match key {
            "backend" => match value {
                "native" => {}
                "cudaMallocAsync" => {
                    return Err(
                        of.refused("native; cudaMallocAsync is the allocator stream-ordered")
                    );
                }
                _ => return Err(of.refused("native or cudaMallocAsync")),
            },
            "expandable_segments" => self.expandable_segments = of.bool()?,
            "garbage_collection_threshold" => {
                let threshold =
                    of.number(|part| part > 0.0 && part < 1.0, "above 0 and below 1")?;
                self.garbage_collection_threshold = Some(threshold);
            }
            "per_process_memory_fraction" => {
                let fraction = of.number(|part| (0.0..=1.0).contains(&part), "from 0 to 1")?;
                self.per_process_memory_fraction = Some(fraction);
            }
            "large_segment_size_mb" => {
                let expected = "an even number of MiB from 10 on";
                let mib = of.count(|mib| mib >= 10 && mib.is_multiple_of(2), expected)?;
                self.large_segment_size = Bytes::mib(mib);
            }
            "max_non_split_rounding_mb" => {
                let mib = of.count(|mib| mib > 20, "a number of MiB above 20")?;
                self.max_non_split_rounding = Bytes::mib(mib);
            }
            "max_split_size_mb" => {
                let mib = of.count(|mib| mib > 20, "a number of MiB above 20")?;
                self.max_split_size = Some(Bytes::mib(mib));
            }
            "roundup_power2_divisions" => self.roundup_power2_divisions = of.divisions()?,
            _ => {
                let Some((_, takes)) = WITHOUT_EFFECT.iter().find(|(known, _)| *known == key)
                else {
                    return Err(TorchConfigError::Key { key: key.to_owned() });
                };
                match takes {
                    Takes::Anything => {}
                    Takes::Bool => of.bool().map(|_| ())?,
                    Takes::Count => of.count(|_| true, "a whole number").map(|_| ())?,
                    Takes::Threads => {
                        let possible = |threads: u64| threads.is_power_of_two() && threads <= 128;
                        of.count(possible, "a power of two up to 128")?;
                    }
                }
                if self.without_effect.iter().all(|known| known != key) {
                    self.without_effect.push(key.to_owned());
                }
            }
        }
        Ok(())
    }
}

/// One key with its value.
struct Setting<'a> {
    key: &'a str,
    value: &'a str,
}

impl Setting<'_> {
    fn refused(&self, expected: &'static str) -> TorchConfigError {
        let (key, value) = (self.key.to_owned(), self.value.to_owned());
        TorchConfigError::Value { key, value, expected }
    }

    fn bool(&self) -> Result<bool, TorchConfigError> {
        match self.value {
            "True" => Ok(true),
            "False" => Ok(false),
            _ => Err(self.refused("True or False")),
        }
    }

    fn count(
        &self,
        possible: impl Fn(u64) -> bool,
        expected: &'static str,
    ) -> Result<u64, TorchConfigError> {
        let count = self.value.parse().ok();
        // The number of bytes must fit 64 bits too.
        let count = count.filter(|&count| count < 1 << 32 && possible(count));
        count.ok_or_else(|| self.refused(expected))
    }

    fn number(
        &self,
        possible: impl Fn(f64) -> bool,
        expected: &'static str,
    ) -> Result<f64, TorchConfigError> {
        let number = self.value.parse().ok().filter(|&number| possible(number));
        number.ok_or_else(|| self.refused(expected))
    }

    /// Parses one number for all sizes, or a list such as `[256:1,512:2,>:8]`: sizes from 256 MiB
    /// to 512 MiB in one part, and so on. Sizes below the first interval are divided as that one.
    fn divisions(&self) -> Result<Divisions, TorchConfigError> {
        const EXPECTED: &str = "a power of two, or a list such as [256:1,512:2,>:8] of powers of two \
                                in MiB with the divisions of each, a power of two or 0";
        let refused = || self.refused(EXPECTED);
        let power = |text: &str| text.parse().ok().filter(|number: &u64| number.is_power_of_two());
        let Some(list) = self.value.strip_prefix('[') else {
            return power(self.value).map(Divisions::everywhere).ok_or_else(refused);
        };
        let list = list.strip_suffix(']').ok_or_else(refused)?;
        let mut divisions = [0; Divisions::INTERVALS];
        let mut last: Option<usize> = None;
        for entry in list.split(',') {
            let (interval, parts) = entry.split_once(':').ok_or_else(refused)?;
            let parts = if parts == "0" { 0 } else { power(parts).ok_or_else(refused)? };
            if interval == ">" {
                divisions[last.map_or(0, |last| last + 1)..].fill(parts);
                continue;
            }
            let mib = power(interval).ok_or_else(refused)?;
            let index = (mib.ilog2() as usize).min(Divisions::INTERVALS - 1);
            if last.is_none() {
                divisions[..index].fill(parts);
            }
            divisions[index] = parts;
            last = Some(index);
        }
        Ok(Divisions(divisions))
    }
}

fn is_known(key: &str) -> bool {
    HONOURED.contains(&key) || WITHOUT_EFFECT.iter().any(|(known, _)| *known == key)
}

/// Returns the parts between commas outside of brackets, without empty ones.
fn split_outside_brackets(text: &str) -> Vec<&str> {
    let (mut parts, mut begin, mut depth) = (Vec::new(), 0, 0i32);
    for (at, c) in text.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[begin..]);
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> TorchConfig {
        TorchConfig::parse(text).expect("the settings are good")
    }

    #[test]
    fn nothing_given_is_pytorchs_default() {
        for text in ["", " ", ","] {
            assert_eq!(parsed(text), TorchConfig::default(), "{text:?}");
        }
    }

    #[test]
    fn every_setting_is_read_and_spaces_do_not_matter() {
        let config = parsed(
            "backend:native, max_split_size_mb: 40,max_non_split_rounding_mb:30,\
             garbage_collection_threshold:0.5,expandable_segments:True,\
             per_process_memory_fraction:0.25,large_segment_size_mb:12",
        );
        assert_eq!(config.max_split_size, Some(Bytes::mib(40)));
        assert_eq!(config.max_non_split_rounding, Bytes::mib(30));
        assert_eq!(config.garbage_collection_threshold, Some(0.5));
        assert_eq!(config.per_process_memory_fraction, Some(0.25));
        assert_eq!(config.large_segment_size, Bytes::mib(12));
        assert!(config.expandable_segments);
        assert_eq!(config.without_effect, Vec::<String>::new());
    }

    #[test]
    fn settings_of_host_memory_locks_and_reservations_are_accepted_and_named() {
        let config = parsed(
            "pinned_use_cuda_host_register:True,release_lock_on_cudamalloc:False,\
             pinned_num_register_threads:8,expandable_segments_reserve:2GiB,\
             expandable_segments_reserve_by_class:anything",
        );
        let named = ["pinned_use_cuda_host_register", "release_lock_on_cudamalloc"];
        assert_eq!(config.without_effect[..2], named.map(str::to_owned));
        assert_eq!(config.without_effect[3], "expandable_segments_reserve");
        assert_eq!(
            TorchConfig { without_effect: Vec::new(), ..config },
            TorchConfig::default(),
            "they change nothing"
        );
    }

    #[test]
    fn unknown_settings_are_refused_with_the_known_ones() {
        for text in ["foo:1", "foo", "max_split_size_mb:40,bar:2"] {
            let error = TorchConfig::parse(text).expect_err(text).to_string();
            for key in ["max_split_size_mb", "roundup_power2_divisions", "pinned_"] {
                assert!(error.contains(key), "{error}");
            }
        }
    }

    #[test]
    fn bad_values_are_refused_with_what_would_be_right() {
        for (text, word) in [
            ("garbage_collection_threshold:1.2", "below 1"),
            ("garbage_collection_threshold:0", "above 0"),
            ("garbage_collection_threshold:nan", "below 1"),
            ("max_split_size_mb:2", "above 20"),
            ("max_split_size_mb:99999999999999", "above 20"),
            ("max_non_split_rounding_mb:20", "above 20"),
            ("large_segment_size_mb:11", "even"),
            ("per_process_memory_fraction:1.5", "0 to 1"),
            ("expandable_segments:yes", "True or False"),
            ("release_lock_on_cudamalloc:none", "True or False"),
            ("pinned_use_cuda_host_register:none", "True or False"),
            ("pinned_num_register_threads:none", "power of two"),
            ("pinned_num_register_threads:1024", "128"),
            ("backend:cudaMallocAsync", "stream-ordered"),
            ("backend:jemalloc", "native"),
            ("roundup_power2_divisions:3", "power of two"),
            ("roundup_power2_divisions:[100:2]", "power of two"),
            ("roundup_power2_divisions:[256:3]", "power of two"),
            ("roundup_power2_divisions:[256:1", "list"),
            ("roundup_power2_divisions:[]", "list"),
            ("max_split_size_mb", "no value"),
        ] {
            let error = TorchConfig::parse(text).expect_err(text).to_string();
            assert!(error.contains(word), "'{word}' is not in: {error}");
        }
    }

    #[test]
    fn divisions_are_one_number_or_one_for_each_power_of_two() {
        assert_eq!(
            parsed("roundup_power2_divisions:4").roundup_power2_divisions,
            Divisions([4; 16])
        );
        let list = parsed("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]");
        let expected = [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8];
        assert_eq!(list.roundup_power2_divisions, Divisions(expected));
        let list = parsed("roundup_power2_divisions:[64:8,256:2]");
        let expected = [8, 8, 8, 8, 8, 8, 8, 0, 2, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(list.roundup_power2_divisions, Divisions(expected));
    }

    #[test]
    fn sizes_are_rounded_to_512_bytes_or_to_parts_of_a_power_of_two() {
        let rounded = |config: &TorchConfig, size| config.round(size).map(Bytes::count);
        let plain = TorchConfig::default();
        for (size, expected) in [(0, 512), (1, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)] {
            assert_eq!(rounded(&plain, Bytes::new(size)), Some(expected), "{size}");
        }
        assert_eq!(plain.round(Bytes::new(u64::MAX)), None);
        let quarters = parsed("roundup_power2_divisions:4");
        assert_eq!(quarters.round(Bytes::mib(84)), Some(Bytes::mib(96)));
        assert_eq!(quarters.round(Bytes::mib(64)), Some(Bytes::mib(64)));
        assert_eq!(quarters.round(Bytes::new(1200)), Some(Bytes::new(1536)), "too small to divide");
        let list = parsed("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]");
        assert_eq!(list.round(Bytes::mib(84)), Some(Bytes::mib(88)));
        assert_eq!(list.round(Bytes::mib(400)), Some(Bytes::mib(512)));
        assert_eq!(list.round(Bytes::mib(1500)), Some(Bytes::mib(1500)));
    }

    proptest! {
        #[test]
        fn any_settings_are_an_answer_and_any_accepted_ones_can_be_used(
            parts in prop::collection::vec(part(), 0..12),
            size in any::<u64>(),
        ) {
            let text = parts.concat();
            if let Ok(config) = TorchConfig::parse(&text) {
                let rounded = config.round(Bytes::new(size));
                prop_assert!(rounded.is_none_or(|rounded| rounded.count() >= size.max(512)));
                prop_assert!(rounded.is_none_or(|rounded| rounded.is_multiple_of(Bytes::new(512))));
            }
        }
    }

    fn part() -> impl Strategy<Value = String> {
        let fixed = [":", ",", "[", "]", ">", "True", "0", "16", "256", "4294967296", "-1", "0.5"];
        let keys = HONOURED.into_iter().chain(WITHOUT_EFFECT.iter().map(|(key, _)| *key));
        let words: Vec<String> = fixed.into_iter().chain(keys).map(str::to_owned).collect();
        prop_oneof![
            8 => prop::sample::select(words),
            1 => "\\PC{0,4}",
            1 => Just("roundup_power2_divisions:[256:4,>:".to_owned()),
            1 => (0..40u32).prop_map(|n| format!("roundup_power2_divisions:{},", 1u64 << n)),
        ]
    }
}
