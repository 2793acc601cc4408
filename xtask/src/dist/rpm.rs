//! Writes the RPM package, with nfpm.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use xtask::context::Context;
use xtask::layout::{self, File, Source};
use xtask::process::Log;

use super::build::Programs;
use super::platform::{GLIBC, Platform};
use super::tools::Tools;
use super::{Release, contents};
use crate::deb::{self, source};

/// The folder with the scripts that RPM runs.
const PACKAGING: &str = "packaging/rpm";
/// Folders that every system has. All others are removed with the package, if they are empty.
const STANDARD: [&str; 12] = [
    "",
    "etc",
    "etc/default",
    "usr",
    "usr/bin",
    "usr/lib",
    "usr/lib/systemd",
    "usr/lib/systemd/system",
    "usr/share",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/man/man1",
];
/// Each script, by nfpm's name.
const SCRIPTS: [&str; 3] = ["postinstall", "preremove", "postremove"];

/// Writes the package of these programs and returns its path.
///
/// # Errors
/// If a file cannot be read, or if nfpm fails.
pub(super) fn build(
    context: &Context,
    log: &mut Log,
    tools: &Tools,
    release: &Release,
    programs: &Programs,
) -> Result<PathBuf> {
    let dir = contents::folder(context, "rpm")?;
    let mut files = layout::files(context, &programs.built)?;
    for file in &mut files {
        file.to = Path::new("usr").join(&file.to);
    }
    files.extend(deb::service_and_documents(context)?);
    let documents = Path::new(deb::DOCUMENTS);
    files.extend(contents::licences(context, &dir, documents)?);
    let changes = "CHANGELOG.md";
    files.push(File::copy(
        context.root.join(changes),
        documents.join(changes),
    ));
    let settings = settings(context, release, programs, &files)?;
    let config = dir.join("nfpm.json");
    fs::write(&config, serde_json::to_string_pretty(&settings)?)?;
    let package = file(release, programs.platform);
    log.run(
        tools
            .program("nfpm")
            .env("SOURCE_DATE_EPOCH", &release.epoch)
            .args(["package", "--packager", "rpm", "--config"])
            .arg(&config)
            .arg("--target")
            .arg(&package),
    )?;
    Ok(package)
}

/// Returns the path of a platform's package.
pub(super) fn file(release: &Release, platform: &Platform) -> PathBuf {
    let name = format!("iwarp-{}-1.{}.rpm", release.version, platform.name);
    release.output.join(name)
}

/// Returns nfpm's settings. JSON is valid YAML.
fn settings(
    context: &Context,
    release: &Release,
    programs: &Programs,
    files: &[File],
) -> Result<Value> {
    let control = fs::read_to_string(context.root.join(deb::PACKAGING).join("control"))?;
    let time = release.rfc3339()?;
    let folders = folders(files).into_iter().map(|path| {
        let info = json!({ "mode": 0o755, "mtime": time });
        Ok(json!({ "dst": Path::new("/").join(path), "type": "dir", "file_info": info }))
    });
    let contents = folders.chain(files.iter().map(|file| content(file, &time)));
    let script = |name: &&str| {
        let file = context.root.join(PACKAGING).join(format!("{name}.sh"));
        ((*name).to_owned(), json!(file))
    };
    let scripts: serde_json::Map<String, Value> = SCRIPTS.iter().map(script).collect();
    Ok(json!({
        "name": source::NAME,
        "arch": programs.platform.debian,
        "version": release.version,
        "version_schema": "none",
        "release": "1",
        "maintainer": field(&control, "Maintainer")?,
        "homepage": field(&control, "Homepage")?,
        "description": description(&control)?,
        "license": "MIT OR Apache-2.0",
        "mtime": time,
        "depends": [
            format!("libc.so.6(GLIBC_{GLIBC})(64bit)"),
            "libgcc_s.so.1()(64bit)",
        ],
        "scripts": scripts,
        "rpm": {
            "summary": field(&control, "Description")?,
            "group": "Applications/Internet",
            "buildhost": "localhost",
            "compression": "xz",
        },
        "contents": contents.collect::<Result<Vec<_>>>()?,
    }))
}

/// Returns the folders that the package creates. RPM removes only those that it lists.
fn folders(files: &[File]) -> BTreeSet<&Path> {
    let parents = files.iter().flat_map(|file| file.to.ancestors().skip(1));
    parents
        .filter(|path| !STANDARD.iter().any(|standard| *path == Path::new(standard)))
        .collect()
}

/// Returns nfpm's entry for a file.
fn content(file: &File, time: &str) -> Result<Value> {
    let to = Path::new("/").join(&file.to);
    let info = json!({ "mode": file.mode, "mtime": time, "owner": "root", "group": "root" });
    Ok(match &file.source {
        Source::Link(name) => json!({
            "src": name, "dst": to, "type": "symlink", "file_info": { "mtime": time },
        }),
        Source::Copy(from) if file.to == Path::new(deb::SETTINGS) => json!({
            "src": from, "dst": to, "type": "config|noreplace", "file_info": info,
        }),
        Source::Copy(from) => {
            if !from.is_file() {
                bail!("there is no {}", from.display());
            }
            json!({ "src": from, "dst": to, "file_info": info })
        }
    })
}

/// Returns a field of Debian's control file, which describes the package for all distributions.
fn field<'a>(control: &'a str, name: &str) -> Result<&'a str> {
    let line = control.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|rest| rest.strip_prefix(": "));
    value.with_context(|| format!("the control file has no {name}"))
}

/// Returns the long description of the control file, without its indentation.
fn description(control: &str) -> Result<String> {
    let lines: Vec<&str> = control
        .lines()
        .skip_while(|line| !line.starts_with("Description: "))
        .skip(1)
        .map_while(|line| line.strip_prefix(' '))
        .map(|line| if line == "." { "" } else { line })
        .collect();
    if lines.is_empty() {
        bail!("the control file has no long description");
    }
    Ok(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTROL: &str = "Source: a\nHomepage: https://a\n\nPackage: a\n\
                           Description: short\n one\n .\n two\nX: y\n";

    #[test]
    fn control_file_describes_package() {
        assert_eq!(field(CONTROL, "Homepage").unwrap(), "https://a");
        assert!(field(CONTROL, "Home").is_err());
        assert_eq!(description(CONTROL).unwrap(), "one\n\ntwo");
        assert!(description("Description: short\n").is_err());
    }

    #[test]
    fn own_folders_are_listed() {
        let files = ["usr/bin/a", "usr/lib/a/b/c", "usr/lib/a/d"].map(|to| File::copy("", to));
        let found: Vec<_> = folders(&files).into_iter().collect();
        assert_eq!(found, [Path::new("usr/lib/a"), Path::new("usr/lib/a/b")]);
    }

    #[test]
    fn settings_file_is_kept_on_upgrade() {
        let file = File::copy("/from", deb::SETTINGS);
        assert_eq!(content(&file, "").unwrap()["type"], "config|noreplace");
        let link = File {
            source: Source::Link("a.so.1"),
            ..File::copy("", "usr/lib/b.so.1")
        };
        let link = content(&link, "").unwrap();
        assert_eq!(
            (&link["type"], &link["src"]),
            (&json!("symlink"), &json!("a.so.1"))
        );
        assert!(content(&File::copy("/no/such/file", "usr/x"), "").is_err());
    }
}
