//! Allocators and settings to try on a job, each with the line that puts it into a program.

use vramp::peers::torch::{TorchConfig, TorchConfigError};
use vramp::peers::{Config, Preset};

use crate::replay::Recorded;

/// An allocator with settings.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its name: the allocator's, or PyTorch's settings.
    pub name: String,
    /// The line that a user puts into a shell or a program to use it. `None` if it is used already.
    pub line: Option<String>,
    /// The configuration for a replay, without a limit.
    pub config: Config,
}

/// Settings of PyTorch that help against fragmentation, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
const SETTINGS: [&str; 12] = [
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8",
    "max_split_size_mb:128,garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:64",
    "expandable_segments:True,garbage_collection_threshold:0.8",
];

/// Name of PyTorch's allocator without settings.
pub const TORCH_DEFAULT: &str = "PyTorch's defaults";

/// Name of the candidate that is the driver's own pool.
pub(crate) const DRIVERS_POOL: &str = "backend:cudaMallocAsync";

impl Candidate {
    /// Returns the candidate of a preset.
    pub fn preset(preset: Preset) -> Candidate {
        let line = match preset {
            Preset::Vramp => Some("import vramp.torch; vramp.torch.enable()".to_owned()),
            Preset::StreamOrdered => Some(export("backend:cudaMallocAsync")),
            Preset::TorchExpandable => Some(export("expandable_segments:True")),
            Preset::Vpmm | Preset::Torch => None,
        };
        Candidate { name: preset.name().to_owned(), line, config: Config::preset(preset) }
    }

    /// Returns PyTorch's allocator with settings in the syntax of `PYTORCH_CUDA_ALLOC_CONF`.
    ///
    /// # Errors
    /// As of [`TorchConfig::parse`].
    pub fn torch(settings: &str) -> Result<Candidate, TorchConfigError> {
        let torch = TorchConfig::parse(settings)?;
        let config = Config { torch, ..Config::preset(Preset::Torch) };
        Ok(Candidate { name: settings.to_owned(), line: Some(export(settings)), config })
    }

    /// Returns the candidate of a preset for a recorded program: without a line if that is only for PyTorch,
    /// and the program was recorded at the driver.
    pub fn preset_for(preset: Preset, recorded: &Recorded) -> Candidate {
        let candidate = Candidate::preset(preset);
        let line = match preset {
            _ if !recorded.is_driver => candidate.line,
            Preset::Vramp => Some("vramp exec --pool -- PROGRAM".to_owned()),
            _ => None,
        };
        Candidate { line, ..candidate }
    }

    /// Returns the allocator as it was recorded: PyTorch's, with the recorded settings where the model
    /// knows them, or the driver's own.
    pub fn recorded(recorded: &Recorded) -> Candidate {
        if recorded.is_driver {
            return Candidate::preset_for(Preset::StreamOrdered, recorded);
        }
        let settings = recorded.settings.as_deref();
        match settings.map(Candidate::torch) {
            Some(Ok(candidate)) => Candidate { line: None, ..candidate },
            Some(Err(_)) | None => Candidate {
                name: TORCH_DEFAULT.to_owned(),
                line: None,
                config: Config::preset(Preset::Torch),
            },
        }
    }

    /// Returns everything worth trying: PyTorch as recorded, its settings, the driver's own pool and
    /// vramp; of a program that was recorded at the driver, the driver and vramp.
    pub fn all(recorded: &Recorded) -> Vec<Candidate> {
        let mut all = vec![Candidate::recorded(recorded)];
        if recorded.is_driver {
            all.push(Candidate::preset_for(Preset::Vramp, recorded));
            return all;
        }
        let settings = SETTINGS.iter().filter_map(|settings| Candidate::torch(settings).ok());
        all.extend(settings);
        all.push(Candidate {
            name: DRIVERS_POOL.to_owned(),
            ..Candidate::preset(Preset::StreamOrdered)
        });
        all.push(Candidate::preset(Preset::Vramp));
        let first = all[0].config.torch.clone();
        let mut rest = all.split_off(1);
        // The recorded settings stand in the first row already.
        rest.retain(|it| !(it.config.preset == Preset::Torch && it.config.torch == first));
        all.append(&mut rest);
        all
    }
}

/// Returns the line that sets the variable in a shell. Settings such as `[256:1,>:8]` have characters
/// that mean something to it, and are quoted.
fn export(settings: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_:,.-".contains(c);
    match settings.chars().all(is_plain) {
        true => format!("export PYTORCH_CUDA_ALLOC_CONF={settings}"),
        false => {
            format!("export PYTORCH_CUDA_ALLOC_CONF='{}'", settings.replace('\'', r"'\''"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_one_that_the_model_knows() {
        for settings in SETTINGS {
            let candidate = Candidate::torch(settings).unwrap();
            assert_eq!(candidate.config.torch.without_effect, Vec::<String>::new(), "{settings}");
            assert_ne!(candidate.config.torch, TorchConfig::default(), "{settings}");
        }
    }

    #[test]
    fn a_line_to_paste_is_quoted_where_a_shell_would_change_it() {
        let line = |settings| Candidate::torch(settings).unwrap().line.unwrap();
        assert_eq!(
            line("roundup_power2_divisions:[256:1,>:8]"),
            "export PYTORCH_CUDA_ALLOC_CONF='roundup_power2_divisions:[256:1,>:8]'"
        );
        assert!(line("max_split_size_mb:64").ends_with("=max_split_size_mb:64"));
    }

    #[test]
    fn a_program_recorded_at_the_driver_gets_no_settings_of_pytorch() {
        let recorded = Recorded { is_driver: true, ..Recorded::default() };
        let all = Candidate::all(&recorded);
        let lines: Vec<_> = all.iter().map(|it| (it.name.as_str(), it.line.as_deref())).collect();
        let expected = [("stream-ordered", None), ("vramp", Some("vramp exec --pool -- PROGRAM"))];
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_recorded_settings_are_tried_once() {
        let settings = Some("expandable_segments:True".to_owned());
        let recorded = Recorded { settings, ..Recorded::default() };
        let names: Vec<String> = Candidate::all(&recorded).into_iter().map(|it| it.name).collect();
        assert_eq!(names.iter().filter(|name| *name == "expandable_segments:True").count(), 1);
        assert_eq!(names[0], "expandable_segments:True");
        assert_eq!(names.last().map(String::as_str), Some("vramp"));
    }
}
