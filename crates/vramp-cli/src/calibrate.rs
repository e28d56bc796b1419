//! `vramp calibrate`: the costs of a device's driver calls, as a file.

use std::fs;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use vramp_bench::calibrate::{self, Options};

use crate::args::Calibrate;
use crate::device::{self, Device};

pub(crate) fn run(args: &Calibrate, out: &mut dyn Write) -> Result<()> {
    let device = Device::open(&args.device)?;
    let driver = device.fresh(false)?.driver;
    let date = jiff::Timestamp::now().strftime("%F").to_string();
    let options = Options { duration: Duration::from_secs_f64(args.seconds), date };
    let calibration = calibrate::run(&*driver, &options)?;
    let text = calibration.to_toml();
    let Some(path) = &args.output else { return Ok(out.write_all(text.as_bytes())?) };
    fs::write(path, text).with_context(|| format!("cannot write '{}'", path.display()))?;
    device::announce(&device);
    let path = path.display();
    writeln!(out, "{path}: {}", calibration.spec.source)?;
    for not in &calibration.not_measured {
        writeln!(out, "not measured, as on the H200: {}: {}", not.key, not.reason)?;
    }
    Ok(writeln!(out, "Simulate this card anywhere with --device {path}")?)
}
