//! Environment variables for PyTorch.
//!
//! - `VRAMP_CONF`: options as of `vramp_open`, such as `limit=80GiB,preset=vramp`, and `device`.
//! - `VRAMP_DEVICE`: `cuda` (the default), or `sim` or `sim:CARD` for tests without a GPU; with `sim:CARDxCOUNT` the
//!   devices are the cards of one machine. The option
//!   `device` of `VRAMP_CONF` takes precedence.
//! - The option `graph_pins` of `VRAMP_CONF`: `auto` (the default), `on` or `off`.
//! - The option `ipc` of `VRAMP_CONF`: `auto` (the default), `legacy` or `off`.
//!
//! With a preset of another project that project's own variables count too (`environment.rs`).

use vramp_core::Bytes;

use crate::device::Device;
use crate::environment::raw_variable;
use crate::options::{OptionError, Options, take, take_device};
use crate::status::{Failure, Kind, Result};

/// Settings of all devices, read once.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    device: String,
    pub options: Options,
    pub graph_pins: GraphPins,
    pub ipc: Ipc,
}

/// When graphs and memory pools get plain allocations, whose addresses `cudaIpcGetMemHandle` takes. The numbers
/// are those of `vramp_torch_ipc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ipc {
    /// Never.
    Off = 0,
    /// Always.
    Legacy = 1,
    /// Where the process takes part in a `torch.distributed` group of several.
    #[default]
    Auto = 2,
}

impl Ipc {
    fn parse(value: Option<&str>) -> Result<Ipc> {
        match value {
            None | Some("auto") => Ok(Ipc::Auto),
            Some("legacy") => Ok(Ipc::Legacy),
            Some("off") => Ok(Ipc::Off),
            Some(other) => {
                let text = format!(
                    "VRAMP_CONF is invalid: ipc={other} is invalid: use auto, legacy or off"
                );
                Err(Failure::new(Kind::Option, text))
            }
        }
    }
}

/// When a capture pins the memory that is live at its begin. The numbers are those of
/// `vramp_torch_graph_pins`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum GraphPins {
    /// Never.
    Off = 0,
    /// Always.
    On = 1,
    /// Where the process takes part in a `torch.distributed` group of several.
    #[default]
    Auto = 2,
}

impl GraphPins {
    fn parse(value: Option<&str>) -> Result<GraphPins> {
        match value {
            None | Some("auto") => Ok(GraphPins::Auto),
            Some("on") => Ok(GraphPins::On),
            Some("off") => Ok(GraphPins::Off),
            Some(other) => {
                let text = format!(
                    "VRAMP_CONF is invalid: graph_pins={other} is invalid: use auto, on or off"
                );
                Err(Failure::new(Kind::Option, text))
            }
        }
    }
}

impl Settings {
    /// Reads the environment.
    pub fn read() -> Result<Settings> {
        Settings::parse(|name| raw_variable(name).map(|value| value.into_string()))
    }

    fn parse(
        lookup: impl Fn(&str) -> Option<std::result::Result<String, std::ffi::OsString>>,
    ) -> Result<Settings> {
        let text = |variable: &str| match lookup(variable) {
            None => Ok(String::new()),
            Some(Ok(value)) => Ok(value),
            Some(Err(value)) => {
                let text = format!("{variable}={value:?} is not UTF-8: set it to UTF-8");
                Err(Failure::new(Kind::Text, text))
            }
        };
        let conf = text("VRAMP_CONF")?;
        let invalid = |error: OptionError| {
            Failure::new(Kind::Option, format!("VRAMP_CONF is invalid: {error}"))
        };
        let (named, others) = take_device(&conf).map_err(invalid)?;
        let (origin, device) = match named {
            Some(device) => ("VRAMP_CONF: device", device.to_owned()),
            None => ("VRAMP_DEVICE", text("VRAMP_DEVICE")?),
        };
        let known = ["", "cuda", "sim"].contains(&device.as_str()) || device.starts_with("sim:");
        if !known {
            let text = format!("{origin}={device} is invalid: use cuda, sim or sim:CARD");
            return Err(Failure::new(Kind::Device, text));
        }
        let (pins, others) = take(&others, "graph_pins").map_err(invalid)?;
        let graph_pins = GraphPins::parse(pins)?;
        let (ipc, others) = take(&others, "ipc").map_err(invalid)?;
        let ipc = Ipc::parse(ipc)?;
        let options = Options::parse(&others).map_err(invalid)?;
        // Smaller than a page of any device, so a unit is probably missing.
        if options.config(Bytes::tib(1), None).base.limit.is_some_and(|limit| limit < Bytes::mib(2))
        {
            let text = "VRAMP_CONF is invalid: the limit is below 2 MiB; write a unit, such \
                        as 80GiB";
            return Err(Failure::new(Kind::Option, text));
        }
        Ok(Settings { device, options, graph_pins, ipc })
    }

    /// Opens PyTorch's device `ordinal`.
    pub fn device(&self, ordinal: usize) -> Result<Device> {
        Ok(Device::numbered(&self.device, ordinal)?)
    }
}

#[cfg(test)]
impl Settings {
    pub fn of(device: &str, conf: &str) -> Result<Settings> {
        Settings::parse(|variable| {
            Some(Ok(if variable == "VRAMP_DEVICE" { device } else { conf }.to_owned()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_gpus_unless_the_simulator_is_selected() {
        let of = |device| Settings::of(device, "").unwrap().device;
        assert_eq!((of(""), of("cuda")), (String::new(), "cuda".to_owned()));
        let card = Settings::of("sim:a100-80g", "").unwrap().device(3).unwrap();
        assert!(card.driver.info().simulated);
    }

    #[test]
    fn the_options_may_name_the_device() {
        let of = |device, conf| Settings::of(device, conf).unwrap().device;
        assert_eq!(of("", "limit=1GiB, device = sim:a100-80g,preset=torch"), "sim:a100-80g");
        assert_eq!(of("sim", "device=cuda"), "cuda");
        let settings = Settings::of("", "preset=torch,torch=[a:b],device=sim");
        assert!(settings.unwrap_err().to_string().contains("torch"));
        let message = Settings::of("", "device=gpu").unwrap_err().to_string();
        assert_eq!(message, "VRAMP_CONF: device=gpu is invalid: use cuda, sim or sim:CARD");
    }

    #[test]
    fn bad_settings_name_the_variable() {
        let message = |device, conf| Settings::of(device, conf).unwrap_err().to_string();
        assert_eq!(message("gpu", ""), "VRAMP_DEVICE=gpu is invalid: use cuda, sim or sim:CARD");
        assert_eq!(
            message("", "limits=1"),
            "VRAMP_CONF is invalid: unknown option 'limits': use preset, limit, prefill, \
             page, span, torch, sharing, rdma, peers, pinned_keep"
        );
        assert!(message("", "limit=80").contains("write a unit"));
        assert!(message("", "graph_pins=yes").ends_with("use auto, on or off"));
        assert!(message("", "ipc=yes").ends_with("use auto, legacy or off"));
    }

    #[test]
    fn graphs_have_plain_memory_as_chosen() {
        let of = |conf| Settings::of("sim", conf).unwrap().ipc;
        assert_eq!(of("limit=1GiB,graph_pins=on"), Ipc::Auto);
        assert_eq!(of("ipc=legacy,limit=1GiB"), Ipc::Legacy);
        assert_eq!(of("graph_pins=on,ipc = off"), Ipc::Off);
    }

    #[test]
    fn graphs_pin_as_chosen() {
        let of = |conf| Settings::of("sim", conf).unwrap().graph_pins;
        assert_eq!(of("limit=1GiB"), GraphPins::Auto);
        assert_eq!(of("graph_pins=on,limit=1GiB"), GraphPins::On);
        assert_eq!(of("limit=1GiB,graph_pins = off"), GraphPins::Off);
    }
}
