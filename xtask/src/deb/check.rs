//! Checks a built package: its files, their permissions, and its control file.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};
use xtask::context::{Context, find_program};
use xtask::documents;
use xtask::process::Log;

use super::{DOCUMENTS, PACKAGING, SCRIPTS, output};

/// Files that the package must contain, besides a manual page for each subcommand.
const WANTED: &[&str] = &[
    "/usr/bin/iwarp",
    "/usr/lib/iwarp/libibverbs.so.1",
    "/usr/lib/iwarp/librspreload.so",
    "/usr/lib/iwarp/libiwarp_paths.so",
    "/usr/lib/iwarp/libiwarp_audit.so",
    "/usr/lib/systemd/system/iwarp-cp.service",
    "/etc/default/iwarp-cp",
    "/usr/share/bash-completion/completions/iwarp",
    "/usr/share/zsh/vendor-completions/_iwarp",
    "/usr/share/fish/vendor_completions.d/iwarp.fish",
    "/usr/share/man/man1/iwarp.1.gz",
    "/usr/share/man/man7/iwarp.7.gz",
    "/usr/share/doc/iwarp/docs/learn/README.md",
    "/usr/share/doc/iwarp/examples/c/message.c",
    "/usr/share/doc/iwarp/copyright",
    "/usr/share/doc/iwarp/changelog.gz",
    "/usr/share/doc/iwarp/changelog.Debian.gz",
    "/usr/share/doc/iwarp/third-party-licences.gz",
    "/usr/share/doc/iwarp/README.md",
];
/// The folders that may contain files of the package.
const FOLDERS: &[&str] = &[
    "/usr/bin/",
    "/usr/lib/iwarp/",
    "/usr/lib/systemd/system/",
    "/usr/share/",
    "/etc/default/",
];
/// Fields that the control file must have.
const FIELDS: &[&str] = &[
    "Package",
    "Version",
    "Architecture",
    "Maintainer",
    "Installed-Size",
    "Depends",
    "Section",
    "Priority",
    "Homepage",
    "Description",
];
/// The highest accepted exposure of the service, in tenths. `systemd-analyze security` rates it
/// from 0 (all protections) to 10. A service that needs the network cannot have 0.
const EXPOSURE_MAX: &str = "15";

/// A file of the package, as `dpkg-deb --contents` lists it.
#[derive(Debug)]
struct Entry<'a> {
    mode: &'a str,
    owner: &'a str,
    path: &'a str,
    link: Option<&'a str>,
}

impl<'a> Entry<'a> {
    /// Parses a line like `-rw-r--r-- root/root  1234 2026-01-01 00:00 ./usr/…`. A link is followed
    /// by ` -> TARGET`.
    fn parse(line: &'a str) -> Option<Self> {
        let (mode, rest) = line.split_once(' ')?;
        let (owner, _) = rest.trim_start().split_once(' ')?;
        let (_, path) = line.split_once(" .")?;
        let (path, link) = match path.split_once(" -> ") {
            Some((path, link)) => (path, Some(link)),
            None => (path, None),
        };
        Some(Self {
            mode,
            owner,
            path,
            link,
        })
    }

    /// Returns what is wrong with the entry, if anything.
    fn defect(&self) -> Option<String> {
        let program = self.path == "/usr/bin/iwarp";
        let mode = match (self.mode.chars().next(), program) {
            (Some('d'), _) => "drwxr-xr-x",
            (Some('l'), _) => "lrwxrwxrwx",
            (_, true) => "-rwxr-xr-x",
            _ => "-rw-r--r--",
        };
        if self.owner != "root/root" || self.mode != mode {
            let Self { path, owner, .. } = self;
            return Some(format!("{path} has owner {owner} and mode {}", self.mode));
        }
        let file = !self.mode.starts_with('d');
        let misplaced = file && !FOLDERS.iter().any(|folder| self.path.starts_with(folder));
        misplaced.then(|| format!("{} is in a wrong folder", self.path))
    }
}

/// Checks a package. `command` is a build of its command that runs on this machine.
///
/// # Errors
/// Lists everything that is wrong with the package.
pub(super) fn run(context: &Context, log: &mut Log, package: &Path, command: &Path) -> Result<()> {
    let ask = |option: &str| {
        let mut command = Command::new("dpkg-deb");
        command.arg(option).arg(package);
        command
    };
    let contents = output(&mut ask("--contents"))?;
    let control = output(&mut ask("--field"))?;
    let mut found = files(&contents);
    found.extend(fields(&control));

    let unpacked = context.target.join("deb/unpacked");
    let _ = std::fs::remove_dir_all(&unpacked);
    log.run(
        Command::new("dpkg-deb")
            .arg("--raw-extract")
            .arg(package)
            .arg(&unpacked),
    )?;
    found.extend(pages(&contents, command)?);
    found.extend(documents::dead_links_below(&unpacked.join(DOCUMENTS))?);
    log.run(Command::new("md5sum").current_dir(&unpacked).args([
        "--check",
        "--quiet",
        "DEBIAN/md5sums",
    ]))?;
    if std::fs::read_to_string(unpacked.join("DEBIAN/conffiles"))? != "/etc/default/iwarp-cp\n" {
        found.push("/etc/default/iwarp-cp is not a conffile".into());
    }
    for script in SCRIPTS {
        log.run(
            Command::new("sh")
                .arg("-n")
                .arg(unpacked.join("DEBIAN").join(script)),
        )?;
    }
    if !found.is_empty() {
        bail!("{}", found.join("\n"));
    }
    unit(context, log)?;
    lintian(log, package)
}

/// Returns what is wrong with the list of files.
fn files(contents: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut entries = Vec::new();
    for line in contents.lines() {
        match Entry::parse(line) {
            Some(entry) => entries.push(entry),
            None => found.push(format!("dpkg-deb listed an unknown line: {line:?}")),
        }
    }
    found.extend(entries.iter().filter_map(Entry::defect));
    for path in WANTED {
        if !entries.iter().any(|entry| entry.path == *path) {
            found.push(format!("there is no {path}"));
        }
    }
    // The second name must be a link. With two files, a process that loads both names would have
    // two engines that do not know each other's objects.
    let link = entries
        .iter()
        .find(|entry| entry.path == "/usr/lib/iwarp/librdmacm.so.1")
        .and_then(|entry| entry.link);
    if link != Some("libibverbs.so.1") {
        found.push("librdmacm.so.1 is not a link to libibverbs.so.1".into());
    }
    found
}

/// Returns which fields are missing in the control file.
fn fields(control: &str) -> Vec<String> {
    let value = |name: &str| {
        let line = control.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.strip_prefix(": "))
    };
    let mut found: Vec<String> = FIELDS
        .iter()
        .filter(|name| value(name).is_none_or(|value| value.trim().is_empty()))
        .map(|name| format!("the control file has no {name}"))
        .collect();
    if !value("Depends").is_some_and(|value| value.contains("libc6 (>= ")) {
        found.push("the control file does not name the version of libc6".into());
    }
    found
}

/// Returns the manual pages that are missing for subcommands in the command's help.
fn pages(contents: &str, command: &Path) -> Result<Vec<String>> {
    let help = output(Command::new(command).arg("--help"))?;
    let names: Vec<&str> = subcommands(&help).collect();
    if names.is_empty() {
        bail!("the help of the command lists no subcommands: {help}");
    }
    Ok(names
        .into_iter()
        .filter(|name| *name != "help")
        .map(|name| format!("/usr/share/man/man1/iwarp-{name}.1.gz"))
        .filter(|page| !contents.lines().any(|line| line.ends_with(page.as_str())))
        .map(|page| format!("there is no {page}"))
        .collect())
}

/// Returns the names in the list of commands of a help text.
fn subcommands(help: &str) -> impl Iterator<Item = &str> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| line.starts_with("  "))
        // Continued descriptions are indented further.
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
}

/// Checks the unit's protections with `systemd-analyze`, if that is installed.
fn unit(context: &Context, log: &mut Log) -> Result<()> {
    if find_program("systemd-analyze").is_none() {
        log.say("systemd-analyze is not installed, so the unit was not checked");
        return Ok(());
    }
    let unit = context.root.join(PACKAGING).join("iwarp-cp.service");
    let threshold = format!("--threshold={EXPOSURE_MAX}");
    let verdict = log.run_and_read(
        Command::new("systemd-analyze")
            .args(["security", "--no-pager", "--offline=yes", &threshold])
            .arg(&unit),
    )?;
    let overall = verdict.lines().find(|line| line.contains("Overall"));
    log.say(
        overall
            .unwrap_or("the unit was checked")
            .trim_start_matches("→ "),
    );
    Ok(())
}

/// Runs lintian, Debian's check of packages, if it is installed. Errors fail the check; warnings
/// only go to the log.
fn lintian(log: &mut Log, package: &Path) -> Result<()> {
    if find_program("lintian").is_none() {
        return Ok(());
    }
    let verdict = log.run_and_read(
        Command::new("lintian")
            .args([
                "--allow-root",
                "--fail-on",
                "error",
                "--tag-display-limit",
                "0",
            ])
            .arg(package),
    )?;
    let count = |start: &str| {
        verdict
            .lines()
            .filter(|line| line.starts_with(start))
            .count()
    };
    log.say(format!("lintian: no errors, {} warnings", count("W:")));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a listing without defects.
    fn good() -> String {
        let mut text = String::from("drwxr-xr-x root/root         0 2026-01-01 00:00 ./\n");
        for path in WANTED {
            let mode = if *path == "/usr/bin/iwarp" {
                "-rwxr-xr-x"
            } else {
                "-rw-r--r--"
            };
            text += &format!("{mode} root/root      1234 2026-01-01 00:00 .{path}\n");
        }
        text + "lrwxrwxrwx root/root         0 2026-01-01 00:00 \
                ./usr/lib/iwarp/librdmacm.so.1 -> libibverbs.so.1\n"
    }

    #[test]
    fn each_listing_fault_is_named() {
        assert_eq!(files(&good()), Vec::<String>::new());
        for (from, to, word) in [
            ("-rwxr-xr-x root/root", "-rwsr-xr-x root/root", "-rws"),
            ("-rwxr-xr-x root/root", "-rwxr-xr-x ann/ann", "ann/ann"),
            ("-rw-r--r--", "-rw-rw-r--", "-rw-rw-r--"),
            ("drwxr-xr-x", "drwxrwxr-x", "drwxrwxr-x"),
            (" -> libibverbs.so.1", " -> libibverbs.so", "librdmacm"),
            (
                "./usr/share/man/man1/iwarp.1.gz",
                "./usr/share/man/iwarp.1.gz",
                "man1/iwarp.1.gz",
            ),
            (
                "./usr/lib/iwarp/librspreload.so",
                "./usr/lib/librspreload.so",
                "wrong folder",
            ),
        ] {
            let found = files(&good().replacen(from, to, 1));
            assert!(
                found.iter().any(|text| text.contains(word)),
                "{to}: {found:?}"
            );
        }
    }

    #[test]
    fn each_missing_field_is_named() {
        let good: String = FIELDS
            .iter()
            .map(|name| match *name {
                "Depends" => "Depends: libc6 (>= 2.34)\n".to_owned(),
                _ => format!("{name}: x\n"),
            })
            .collect();
        assert!(fields(&good).is_empty());
        assert_eq!(
            fields(&good.replace("Homepage: x", "Homepage: ")),
            ["the control file has no Homepage"]
        );
        assert_eq!(fields(&good.replace("libc6 (>= 2.34)", "libm6")).len(), 1);
    }

    /// `iwarp stat` cannot see the private folders that systemd creates for the service. So the
    /// socket for statistics is in another folder, which `docs/packaging.md` names.
    #[test]
    fn service_statistics_match_document() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap();
        let unit = read("packaging/debian/iwarp-cp.service");
        let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key));
        let folder = value("Environment=IWARP_STAT=%t/").expect("a folder for the socket");
        assert_eq!(value("RuntimeDirectory="), Some(folder));
        let command = format!("`sudo iwarp stat --directory /run/{folder}`");
        assert!(read("docs/packaging.md").contains(&command), "{command}");
    }

    #[test]
    fn subcommands_are_read_from_help() {
        let help = "About\n\nUsage: x\n\nCommands:\n  perf  Measure\n        more\n\
                    \x20 help  Print\n\n\
                    Options:\n  -v  Log\n";
        assert_eq!(subcommands(help).collect::<Vec<_>>(), ["perf", "help"]);
    }
}
