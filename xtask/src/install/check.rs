//! `cargo xtask install-check`: installs, moves the folder, and builds the examples against it as a
//! stranger does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Destination, To, exported, uninstall};
use crate::header::Version;
use crate::{library, shell};

/// The examples: folder and program.
const EXAMPLES: [(&str, &str); 2] = [("examples/c", "batches"), ("examples/cpp", "blocks")];

/// Installs with the development profile and checks the installation.
pub fn run(root: &Path) -> Result<()> {
    let work = root.join("target/install-check");
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    let to = |prefix: &Path| To { prefix: prefix.to_owned(), destdir: None };
    let (first, moved) = (work.join("first"), work.join("moved"));
    super::run(root, &Destination::new(&to(&first), Path::new("lib"))?, "dev")?;
    fs::rename(&first, &moved)?;

    let version = Version::read(root)?;
    check_shared(&moved.join("lib").join(format!("{}.{version}", library::NAME)))?;
    let place = Place { root, prefix: &moved, work: &work, version };
    // CMake and pkg-config may be missing.
    match has("pkg-config") && has("make") {
        true => place.check_pkg_config()?,
        false => println!("no pkg-config or make here, so pkg-config is not tried"),
    }
    match has("cmake") {
        true => place.check_cmake()?,
        false => println!("no cmake here, so find_package is not tried"),
    }
    uninstall(&to(&moved))?;
    let left = fs::read_dir(&moved)?.count();
    ensure!(left == 0, "{left} entries are left in {} after uninstall", moved.display());
    Ok(())
}

fn has(tool: &str) -> bool {
    let mut version = Command::new(tool);
    version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}

/// The installed library exports the interface and nothing else, and is stripped.
fn check_shared(shared: &Path) -> Result<()> {
    let foreign: Vec<String> =
        exported(shared)?.into_iter().filter(|name| !name.starts_with("vramp_")).collect();
    ensure!(foreign.is_empty(), "the shared library exports {foreign:?}");
    let sections = shell::output(Command::new("readelf").args(["-W", "-S"]).arg(shared))?;
    ensure!(
        !sections.contains(".debug_info") && !sections.contains(".symtab"),
        "it is not stripped"
    );
    Ok(())
}

struct Place<'a> {
    root: &'a Path,
    prefix: &'a Path,
    work: &'a Path,
    version: Version,
}

impl Place<'_> {
    fn check_pkg_config(&self) -> Result<()> {
        let version = shell::output(self.tool("pkg-config").args(["--modversion", "vramp"]))?;
        ensure!(version.trim() == self.version.to_string(), "pkg-config finds vramp {version}");
        for (folder, name) in EXAMPLES {
            for (link, is_shared) in [("vramp", true), ("vramp-static", false)] {
                let program = self.work.join(format!("{name}-{link}"));
                let mut make = self.tool("make");
                make.arg("--silent").arg("-C").arg(self.root.join(folder));
                make.arg(format!("LINK={link}")).arg(format!("OUT={}", program.display()));
                shell::run(&mut make)?;
                self.check_program(&program, is_shared)?;
            }
        }
        Ok(())
    }

    fn check_cmake(&self) -> Result<()> {
        for (folder, name) in EXAMPLES {
            for (option, is_shared) in [("OFF", true), ("ON", false)] {
                let build = self.work.join(format!("{name}-cmake-{option}"));
                let mut configure = self.tool("cmake");
                configure.arg("-S").arg(self.root.join(folder)).arg("-B").arg(&build);
                configure.arg(format!("-DCMAKE_PREFIX_PATH={}", self.prefix.display()));
                shell::output(configure.arg(format!("-DSTATIC={option}")))?;
                shell::output(self.tool("cmake").arg("--build").arg(&build))?;
                self.check_program(&build.join(name), is_shared)?;
            }
        }
        self.check_versions()
    }

    /// CMake accepts requests of the same ABI up to the version, and no others.
    fn check_versions(&self) -> Result<()> {
        let Version { major, minor, patch } = self.version;
        let of = |major, minor, patch| format!("{major}.{minor}.{patch}");
        let (newer, other) = (of(major, minor, patch + 1), of(major, minor + 1, 0));
        let own = [self.version.to_string(), self.version.abi(), major.to_string()];
        let asked = own.iter().map(|asked| (asked, true));
        for (asked, expected) in asked.chain([(&newer, false), (&other, false)]) {
            let file = self.prefix.join("lib/cmake/vramp/vrampConfigVersion.cmake");
            let parts: Vec<&str> = asked.split('.').collect();
            let part = |nth: usize| parts.get(nth).copied().unwrap_or("0");
            let script = self.work.join("version.cmake");
            let text = format!(
                "set(PACKAGE_FIND_VERSION {asked})\nset(PACKAGE_FIND_VERSION_COUNT {})\n\
                 set(PACKAGE_FIND_VERSION_MAJOR {})\nset(PACKAGE_FIND_VERSION_MINOR {})\n\
                 include({})\nmessage(STATUS \"served ${{PACKAGE_VERSION_COMPATIBLE}}\")\n",
                parts.len(),
                part(0),
                part(1),
                file.display()
            );
            fs::write(&script, text)?;
            let said = shell::output(self.tool("cmake").arg("-P").arg(&script))?;
            let served = said.contains("served TRUE");
            ensure!(served == expected, "find_package(vramp {asked}): {said}");
        }
        Ok(())
    }

    fn check_program(&self, program: &Path, is_shared: bool) -> Result<()> {
        println!("{}", program.strip_prefix(self.work).unwrap_or(program).display());
        let dynamic = shell::output(Command::new("readelf").args(["-W", "-d"]).arg(program))?;
        let needed = dynamic.contains(&format!("[{}]", library::soname(self.version)));
        ensure!(
            needed == is_shared && (is_shared || !dynamic.contains("libvramp")),
            "{} is linked to the wrong library:\n{dynamic}",
            program.display()
        );
        let mut run = Command::new(program);
        let printed = shell::output(run.arg("sim:h200").env_remove("LD_LIBRARY_PATH"))
            .with_context(|| format!("{} failed", program.display()))?;
        ensure!(printed.contains(" MiB"), "{} printed: {printed}", program.display());
        Ok(())
    }

    /// A program that looks for libraries in the installation first.
    fn tool(&self, name: &str) -> Command {
        let config: PathBuf = self.prefix.join("lib/pkgconfig");
        let mut command = Command::new(name);
        command.env("PKG_CONFIG_PATH", config);
        command
    }
}
