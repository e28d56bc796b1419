//! `vramp calibrate`: the costs of a device's driver calls, as a file.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use vramp_bench::calibrate::{self, Options};

use crate::args::Calibrate;
use crate::device::Device;
use crate::output::Output;
use crate::text::printable;

pub(crate) fn run(args: &Calibrate, out: &mut dyn Write) -> Result<()> {
    // Before the measurement, which takes minutes.
    let output = args.output.as_deref().map(|path| {
        let cannot_write = || format!("cannot write '{}'", path.display());
        Output::new(path).with_context(cannot_write).map(|output| (path, output))
    });
    let output = output.transpose()?;
    let device = Device::open(&args.device)?;
    let driver = device.fresh(false)?.driver;
    let date = jiff::Timestamp::now().strftime("%F").to_string();
    let options = Options { duration: Duration::from_secs_f64(args.seconds), date };
    let calibration = calibrate::run(&*driver, &options)?;
    let text = calibration.to_toml();
    let Some((path, output)) = output else { return Ok(out.write_all(text.as_bytes())?) };
    output
        .write(out, |out| out.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write '{}'", path.display()))?;
    if matches!(output, Output::Standard) {
        return Ok(());
    }
    let path = printable(&path.display().to_string());
    writeln!(out, "{path}: {}", calibration.spec.source)?;
    for not in &calibration.not_measured {
        writeln!(out, "not measured, as on the H200: {}: {}", not.key, not.reason)?;
    }
    Ok(writeln!(out, "Simulate this card anywhere with --device {path}")?)
}
