//! `cargo xtask install`: the C interface as an installation that compilers, pkg-config and CMake find.
//!
//! 1. [`Destination::new`] resolves the arguments, and [`Destination::check`] finds a wrong one before
//!    anything is built.
//! 2. [`library::build`] builds the shared library and the archive;
//!    [`archive`] makes the archive safe to link beside other libraries.
//! 3. [`place`] writes every file beside its place and renames it, so that a program that runs on an
//!    older library keeps it. A manifest lists the files and the folders made; files of an older
//!    manifest that are not in the new one are removed.
//! 4. [`uninstall`] removes what the manifest lists.

mod archive;
pub mod check;

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::header::{self, Version};
use crate::{library, shell};

/// System libraries that programs link with the archive, as rustc lists them for this crate
/// (`--print native-static-libs`).
const SYSTEM_LIBRARIES: [&str; 7] =
    ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// List of what was installed, relative to the prefix.
const MANIFEST: &str = "share/vramp/manifest.txt";

/// Arguments that say where to install.
#[derive(clap::Args)]
pub struct To {
    /// Folder that programs will find the installation in.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Folder to write below instead of the root, for packages.
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
}

/// Where to install, resolved.
pub struct Destination {
    /// The prefix below the destdir: where files are written.
    folder: PathBuf,
    /// Folder of the libraries, relative to the prefix.
    libdir: PathBuf,
}

impl Destination {
    /// Resolves the arguments. Nothing is written.
    pub fn new(to: &To, libdir: &Path) -> Result<Destination> {
        let is_within =
            libdir.components().all(|component| matches!(component, Component::Normal(_)));
        ensure!(
            is_within && libdir.components().next().is_some(),
            "--libdir {}: pass a folder relative to the prefix, such as lib or lib64",
            libdir.display()
        );
        let folder = match &to.destdir {
            None => std::path::absolute(&to.prefix)?,
            Some(destdir) => {
                let below = to.prefix.strip_prefix("/").with_context(|| {
                    format!("--prefix {}: pass an absolute path", to.prefix.display())
                })?;
                std::path::absolute(destdir)?.join(below)
            }
        };
        Ok(Destination { folder, libdir: libdir.to_owned() })
    }

    /// Returns an error if files cannot be written there. Leaves nothing.
    fn check(&self) -> Result<()> {
        let hint =
            || format!("cannot install to {}: pass a --prefix to write to", self.folder.display());
        let mut existing = self.folder.as_path();
        while !existing.exists() {
            existing = existing.parent().with_context(hint)?;
        }
        let probe = existing.join(format!(".vramp-install-{}", std::process::id()));
        if !existing.is_dir() {
            return Err(anyhow::anyhow!("{} is a file", existing.display())).with_context(hint);
        }
        fs::write(&probe, "")
            .and_then(|()| fs::remove_file(&probe))
            .with_context(|| format!("{} cannot be written", existing.display()))
            .with_context(hint)
    }
}

/// What was built, ready to be installed.
struct Artifacts {
    shared: PathBuf,
    archive: PathBuf,
}

enum Content {
    File { from: PathBuf, mode: u32 },
    Text(String),
    Link(String),
}

/// Builds with a profile of cargo and installs.
pub fn run(root: &Path, to: &Destination, profile: &str) -> Result<()> {
    to.check()?;
    let version = Version::read(root)?;
    let built = library::build(root, profile)?;
    let folder = root.join("target/install");
    fs::create_dir_all(&folder)?;
    let artifacts =
        Artifacts { shared: folder.join(library::NAME), archive: folder.join("libvramp.a") };
    fs::copy(&built.shared, &artifacts.shared)?;
    shell::run(Command::new("strip").arg("--strip-unneeded").arg(&artifacts.shared))?;
    archive::make(&built.archive, &exported(&artifacts.shared)?, &artifacts.archive)?;
    let count = place(&files(root, version, to, &artifacts)?, to)?;
    println!("vramp {version} is installed in {}: {count} files", to.folder.display());
    Ok(())
}

/// The symbols that a shared library defines for others.
fn exported(library: &Path) -> Result<BTreeSet<String>> {
    let mut nm = Command::new("nm");
    let text =
        shell::output(nm.args(["--dynamic", "--defined-only", "--format=posix"]).arg(library))?;
    Ok(text.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect())
}

/// Every file of the installation, by its path relative to the prefix.
fn files(
    root: &Path,
    version: Version,
    to: &Destination,
    artifacts: &Artifacts,
) -> Result<Vec<(PathBuf, Content)>> {
    let lib = |name: &str| to.libdir.join(name);
    let full = format!("{}.{version}", library::NAME);
    let soname = library::soname(version);
    let text = |template: &str, libraries: &str| {
        let up = |more| vec![".."; to.libdir.components().count() + more].join("/");
        let text = template
            .replace("@VERSION@", &version.to_string())
            .replace("@ABI@", &version.abi())
            .replace("@MAJOR@", &version.major.to_string())
            .replace("@LIBDIR@", &to.libdir.to_string_lossy())
            .replace("@UP_FROM_PKGCONFIG@", &up(1))
            .replace("@UP_FROM_CMAKE@", &up(2))
            .replace("@SYSTEM_LIBRARIES@", libraries);
        Content::Text(text)
    };
    let flags = SYSTEM_LIBRARIES.join(" ");
    let names = SYSTEM_LIBRARIES.map(|flag| flag.trim_start_matches("-l")).join(";");
    let copy = |from: &Path, mode| Content::File { from: from.to_owned(), mode };
    let mut files = vec![
        ("include/vramp.h".into(), copy(&root.join(header::PATH), 0o644)),
        ("include/vramp.hpp".into(), copy(&root.join(header::CPP_PATH), 0o644)),
        ("include/vramp/host.hpp".into(), copy(&root.join(header::HOST_PATH), 0o644)),
        ("include/vramp/rmm.hpp".into(), copy(&root.join(header::RMM_PATH), 0o644)),
        (lib(&full), copy(&artifacts.shared, 0o755)),
        (lib(&soname), Content::Link(full)),
        (lib(library::NAME), Content::Link(soname)),
        (lib("libvramp.a"), copy(&artifacts.archive, 0o644)),
        (lib("pkgconfig/vramp.pc"), text(include_str!("vramp.pc.in"), &flags)),
        (lib("pkgconfig/vramp-static.pc"), text(include_str!("vramp-static.pc.in"), &flags)),
        (lib("cmake/vramp/vrampConfig.cmake"), text(include_str!("vrampConfig.cmake.in"), &names)),
        (
            lib("cmake/vramp/vrampConfigVersion.cmake"),
            text(include_str!("vrampConfigVersion.cmake.in"), &names),
        ),
    ];
    for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let path = Path::new("share/licenses/vramp").join(license);
        files.push((path, copy(&root.join(license), 0o644)));
    }
    Ok(files)
}

/// Writes the files and the manifest, and removes files of an older version. Returns the number of
/// files. The manifest of an installation that fails half way lists what it wrote, too.
fn place(files: &[(PathBuf, Content)], to: &Destination) -> Result<usize> {
    let old = read_manifest(&to.folder)?.unwrap_or_default();
    let new: BTreeSet<PathBuf> =
        files.iter().map(|(path, _)| path.clone()).chain([MANIFEST.into()]).collect();
    let mut folders = old.folders;
    fs::create_dir_all(&to.folder)
        .with_context(|| format!("cannot create {}", to.folder.display()))?;
    for path in &new {
        make_folders(&to.folder, path, &mut folders)?;
    }
    let all = Manifest { files: old.files.union(&new).cloned().collect(), folders };
    write(&to.folder, Path::new(MANIFEST), &Content::Text(all.text()))?;
    for (path, content) in files {
        write(&to.folder, path, content)?;
    }
    for stale in old.files.difference(&new) {
        remove(&to.folder.join(stale))?;
    }
    let exact = Manifest { files: new, folders: all.folders };
    write(&to.folder, Path::new(MANIFEST), &Content::Text(exact.text()))?;
    Ok(exact.files.len())
}

/// Makes the folders above `path`, and notes those that are new.
fn make_folders(prefix: &Path, path: &Path, made: &mut BTreeSet<PathBuf>) -> Result<()> {
    let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
    above.pop();
    for folder in above.into_iter().rev() {
        match fs::create_dir(prefix.join(folder)) {
            Ok(()) => {
                made.insert(folder.to_owned());
            }
            Err(_) if prefix.join(folder).is_dir() => {}
            Err(error) => {
                let place = prefix.join(folder);
                return Err(error).with_context(|| format!("cannot create {}", place.display()));
            }
        }
    }
    Ok(())
}

/// Writes one file beside its place and renames it.
fn write(prefix: &Path, path: &Path, content: &Content) -> Result<()> {
    let place = prefix.join(path);
    let name = place.file_name().context("a file has a name")?.to_string_lossy().into_owned();
    let beside = place.with_file_name(format!(".{name}.{}", std::process::id()));
    let set_mode = |mode| fs::set_permissions(&beside, fs::Permissions::from_mode(mode));
    let written = match content {
        Content::File { from, mode } => fs::copy(from, &beside).and_then(|_| set_mode(*mode)),
        Content::Text(text) => fs::write(&beside, text).and_then(|()| set_mode(0o644)),
        Content::Link(target) => symlink(target, &beside),
    };
    let placed = written.and_then(|()| fs::rename(&beside, &place));
    if placed.is_err() {
        let _ = fs::remove_file(&beside);
    }
    placed.with_context(|| format!("cannot write {}", place.display()))
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// What an installation consists of, relative to its prefix.
#[derive(Debug, Default, PartialEq, Eq)]
struct Manifest {
    files: BTreeSet<PathBuf>,
    /// Folders that the installation made.
    folders: BTreeSet<PathBuf>,
}

impl Manifest {
    fn text(&self) -> String {
        let files = self.files.iter().map(|path| format!("{}\n", path.display()));
        files.chain(self.folders.iter().map(|path| format!("{}/\n", path.display()))).collect()
    }
}

/// Reads the manifest of an installation. `None` if there is none.
fn read_manifest(prefix: &Path) -> Result<Option<Manifest>> {
    let path = prefix.join(MANIFEST);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let mut manifest = Manifest::default();
    for line in text.lines() {
        let listed = Path::new(line);
        let is_within = listed.components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(
            is_within && !line.is_empty(),
            "{}: '{line}' is not a path below the prefix; nothing was removed",
            path.display()
        );
        match line.strip_suffix('/') {
            Some(folder) => manifest.folders.insert(folder.into()),
            None => manifest.files.insert(listed.to_owned()),
        };
    }
    Ok(Some(manifest))
}

/// Removes the files of an installation, and the folders that it made and that are empty.
pub fn uninstall(to: &To) -> Result<()> {
    let folder = Destination::new(to, Path::new("lib"))?.folder;
    let Some(manifest) = read_manifest(&folder)? else {
        bail!("no vramp is installed in {}: it has no {MANIFEST}", folder.display());
    };
    // The manifest last, so that what remains after an error can be removed by another try.
    for path in manifest.files.iter().filter(|path| **path != Path::new(MANIFEST)) {
        remove(&folder.join(path))?;
    }
    remove(&folder.join(MANIFEST))?;
    for made in manifest.folders.iter().rev() {
        // Folders that others have put files into stay.
        let _ = fs::remove_dir(folder.join(made));
    }
    println!("vramp is removed from {}: {} files", folder.display(), manifest.files.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of its own that is removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("vramp-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        fn to(&self, prefix: &str) -> To {
            To { prefix: self.0.join(prefix), destdir: None }
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn destination(to: &To) -> Destination {
        Destination::new(to, Path::new("lib/x86_64-linux-gnu")).unwrap()
    }

    /// Installs a library of a version that is made of words.
    fn installed(folder: &Folder, to: &To, version: Version) -> BTreeSet<String> {
        for name in ["built.so", "built.a"] {
            fs::write(folder.0.join(name), format!("{name} {version}")).unwrap();
        }
        let artifacts =
            Artifacts { shared: folder.0.join("built.so"), archive: folder.0.join("built.a") };
        let to = destination(to);
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        place(&files(root, version, &to, &artifacts).unwrap(), &to).unwrap();
        listed(&to.folder)
    }

    /// Every file and link below a folder.
    fn listed(folder: &Path) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut open = vec![folder.to_owned()];
        while let Some(next) = open.pop() {
            for entry in fs::read_dir(&next).into_iter().flatten() {
                let entry = entry.unwrap();
                match entry.file_type().unwrap().is_dir() {
                    true => open.push(entry.path()),
                    false => {
                        let path = entry.path();
                        let path = path.strip_prefix(folder).unwrap();
                        found.insert(path.to_str().unwrap().to_owned());
                    }
                }
            }
        }
        found
    }

    const FIRST: Version = Version { major: 0, minor: 1, patch: 0 };
    const NEXT: Version = Version { major: 0, minor: 2, patch: 5 };

    #[test]
    fn an_installation_is_complete_repeatable_and_replaced_by_the_next_version() {
        let folder = Folder::new("installed");
        let to = folder.to("usr");
        let first = installed(&folder, &to, FIRST);
        assert_eq!(installed(&folder, &to, FIRST), first);
        let lib = folder.0.join("usr/lib/x86_64-linux-gnu");
        let link = |name: &str| fs::read_link(lib.join(name)).unwrap();
        assert_eq!(link("libvramp.so"), Path::new("libvramp.so.0.1"));
        assert_eq!(link("libvramp.so.0.1"), Path::new("libvramp.so.0.1.0"));
        assert_eq!(fs::read_to_string(lib.join("libvramp.so")).unwrap(), "built.so 0.1.0");
        let pc = fs::read_to_string(lib.join("pkgconfig/vramp.pc")).unwrap();
        assert!(pc.starts_with("prefix=${pcfiledir}/../../..\n"), "{pc}");
        assert!(pc.contains("Version: 0.1.0\n") && !pc.contains('@'), "{pc}");
        let config = fs::read_to_string(lib.join("cmake/vramp/vrampConfig.cmake")).unwrap();
        assert!(config.contains("${CMAKE_CURRENT_LIST_DIR}/../../../..\""), "{config}");
        assert!(!config.contains('@') && !config.contains(folder.0.to_str().unwrap()));
        // A program that runs on the old library has it open.
        let old = fs::File::open(lib.join("libvramp.so.0.1.0")).unwrap();
        let next = installed(&folder, &to, NEXT);
        assert_eq!(std::io::read_to_string(old).unwrap(), "built.so 0.1.0");
        assert_eq!(next.len(), first.len());
        assert!(next.iter().all(|path| !path.contains(".so.0.1")), "{next:?}");
        assert_eq!(fs::read_to_string(lib.join("libvramp.so")).unwrap(), "built.so 0.2.5");
    }

    #[test]
    fn what_is_uninstalled_leaves_the_files_of_others_and_nothing_else() {
        let folder = Folder::new("uninstalled");
        let to = folder.to("usr");
        let other = folder.0.join("usr/include/other.h");
        fs::create_dir_all(other.parent().unwrap()).unwrap();
        fs::write(&other, "").unwrap();
        installed(&folder, &to, FIRST);
        uninstall(&to).unwrap();
        assert_eq!(listed(&folder.0.join("usr")), ["include/other.h".to_owned()].into());
        let left: Vec<_> = fs::read_dir(folder.0.join("usr")).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        let again = uninstall(&to).unwrap_err().to_string();
        assert!(again.contains("no vramp is installed"), "{again}");
    }

    #[test]
    fn a_manifest_that_leads_out_of_the_prefix_removes_nothing() {
        let folder = Folder::new("manifest");
        let to = folder.to("usr");
        installed(&folder, &to, FIRST);
        let manifest = folder.0.join("usr").join(MANIFEST);
        for line in ["../built.so", "/etc/nothing", ""] {
            fs::write(&manifest, format!("include/vramp.h\n{line}\n")).unwrap();
            assert!(uninstall(&to).is_err(), "{line}");
            assert!(folder.0.join("usr/include/vramp.h").exists());
        }
    }

    #[test]
    fn a_destdir_comes_before_the_prefix() {
        let folder = Folder::new("destdir");
        let to = To { prefix: "/opt/vramp".into(), destdir: Some(folder.0.join("package")) };
        assert_eq!(destination(&to).folder, folder.0.join("package/opt/vramp"));
        let relative = To { prefix: "opt".into(), destdir: Some(folder.0.clone()) };
        assert!(Destination::new(&relative, Path::new("lib")).is_err());
    }

    #[test]
    fn a_place_that_cannot_be_written_is_found_before_anything_is_built_and_is_named() {
        let folder = Folder::new("refused");
        fs::write(folder.0.join("file"), "").unwrap();
        for prefix in ["file", "file/below"] {
            let error = format!("{:#}", destination(&folder.to(prefix)).check().unwrap_err());
            assert!(error.contains("/file is a file") && error.contains("--prefix"), "{error}");
        }
        // No user may create files there.
        let to = To { prefix: "/proc/vramp".into(), destdir: None };
        let error = format!("{:#}", destination(&to).check().unwrap_err());
        assert!(error.contains("/proc cannot be written"), "{error}");
        assert!(destination(&folder.to("new/usr")).check().is_ok());
        assert_eq!(listed(&folder.0), ["file".to_owned()].into());
        for libdir in ["", "/lib", "../lib", "lib/.."] {
            assert!(Destination::new(&folder.to("usr"), Path::new(libdir)).is_err(), "{libdir}");
        }
    }
}
