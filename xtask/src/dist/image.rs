//! Writes the container image for all platforms, as an OCI archive, without a daemon.
//!
//! The image contains only the statically linked command and its libraries, no distribution. Its
//! main use is to put the libraries into a folder of another container: `iwarp unpack`. See the
//! OCI image format specification: a layout is a folder in which each file is named by its SHA-256.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use xtask::context::Context;
use xtask::layout::{self, File};
use xtask::process::Log;

use super::build::Programs;
use super::platform::Platform;
use super::{Release, contents};
use crate::deb::output;

/// The registry's name of the image.
pub(super) const NAME: &str = "ghcr.io/iwarp-rs/iwarp";
/// The user of the image, who has no rights.
const USER: u32 = 1000;
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Writes the image of these programs, and returns its path.
///
/// # Errors
/// If a file cannot be read or written, or if `tar`, `gzip` or `sha256sum` fails.
pub(super) fn build(
    context: &Context,
    log: &mut Log,
    release: &Release,
    all: &[Programs],
) -> Result<PathBuf> {
    let dir = contents::folder(context, "image")?;
    let layout = Layout::create(dir.join("layout"))?;
    let mut manifests = Vec::new();
    for programs in all {
        let root = dir.join(programs.platform.name);
        fill(context, programs, &dir, &root)?;
        manifests.push(manifest(log, release, programs.platform, &layout, &root)?);
    }
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
    let mut index = layout.put_json(INDEX, &index)?;
    index["annotations"] = json!({
        "org.opencontainers.image.ref.name": release.version,
        "io.containerd.image.name": format!("{NAME}:{}", release.version),
    });
    let top = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [index] });
    fs::write(layout.dir.join("index.json"), top.to_string())?;
    fs::write(
        layout.dir.join("oci-layout"),
        json!({ "imageLayoutVersion": "1.0.0" }).to_string(),
    )?;
    let archive = file(release);
    log.run(tar(release, "--create", &layout.dir, &archive).arg("."))?;
    fs::remove_dir_all(dir)?;
    Ok(archive)
}

/// Returns the path of the archive.
pub(super) fn file(release: &Release) -> PathBuf {
    release
        .output
        .join(format!("iwarp-{}-oci.tar", release.version))
}

/// Creates the file system of an image. `dir` is a folder for other files.
fn fill(context: &Context, programs: &Programs, dir: &Path, root: &Path) -> Result<()> {
    let mut files = vec![File::program(&programs.portable, layout::COMMAND)];
    files.extend(layout::libraries(&programs.built));
    files.extend(contents::licences(
        context,
        dir,
        Path::new("share/doc/iwarp"),
    )?);
    layout::put(&files, &root.join("usr"))?;
    for dir in ["etc", "tmp"] {
        fs::create_dir_all(root.join(dir))?;
    }
    let users = format!("root:x:0:0:root:/:/\niwarp:x:{USER}:{USER}:iwarp:/tmp:/\n");
    fs::write(root.join("etc/passwd"), users)?;
    fs::write(
        root.join("etc/group"),
        format!("root:x:0:\niwarp:x:{USER}:\n"),
    )?;
    Ok(())
}

/// Adds the image of one platform to the layout, and returns its descriptor.
fn manifest(
    log: &mut Log,
    release: &Release,
    platform: &Platform,
    layout: &Layout,
    root: &Path,
) -> Result<Value> {
    let file = root.with_extension("tar");
    // All users may write there, as on every system.
    let temporary = "./tmp";
    log.run(tar(release, "--create", root, &file).args(["--exclude", temporary, "."]))?;
    log.run(tar(release, "--append", root, &file).args(["--mode=1777", temporary]))?;
    let uncompressed = sha256(&file)?;
    log.run(Command::new("gzip").args(["-n", "-9", "-f"]).arg(&file))?;
    let layer = layout.put_file(LAYER, &file.with_extension("tar.gz"))?;
    let time = release.rfc3339()?;
    let config = layout.put_json(
        CONFIG,
        &json!({
            "created": time,
            "architecture": platform.debian,
            "os": "linux",
            "config": {
                "User": format!("{USER}:{USER}"),
                "Env": ["PATH=/usr/bin"],
                "Entrypoint": ["/usr/bin/iwarp"],
                "Cmd": ["--help"],
                "WorkingDir": "/",
                "Labels": labels(release),
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{uncompressed}")] },
            "history": [{ "created": time, "created_by": "cargo xtask dist" }],
        }),
    )?;
    let mut descriptor = layout.put_json(
        MANIFEST,
        &json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config,
            "layers": [layer],
            "annotations": labels(release),
        }),
    )?;
    descriptor["platform"] = json!({ "architecture": platform.debian, "os": "linux" });
    Ok(descriptor)
}

fn labels(release: &Release) -> Value {
    let repository = env!("CARGO_PKG_HOMEPAGE");
    json!({
        "org.opencontainers.image.title": "iwarp",
        "org.opencontainers.image.description": "RDMA over plain TCP in user space (iWARP)",
        "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
        "org.opencontainers.image.source": repository,
        "org.opencontainers.image.version": release.version,
    })
}

/// Returns the command that archives files of a folder, which the caller adds. Names, owners and
/// times are the same on all machines, and so are permissions unless the caller sets others.
fn tar(release: &Release, action: &str, dir: &Path, to: &Path) -> Command {
    let mut command = Command::new("tar");
    command
        .arg(action)
        .args(["--sort=name", "--format=ustar", "--owner=0", "--group=0"])
        .args(["--numeric-owner", "--mode=u+rw,go-w,a+rX"])
        .arg(format!("--mtime=@{}", release.epoch))
        .arg("--file")
        .arg(to)
        .arg("--directory")
        .arg(dir);
    command
}

/// An OCI layout.
struct Layout {
    dir: PathBuf,
}

impl Layout {
    fn create(dir: PathBuf) -> Result<Self> {
        fs::create_dir_all(dir.join("blobs/sha256"))?;
        Ok(Self { dir })
    }

    /// Adds a JSON document and returns its descriptor.
    fn put_json(&self, media_type: &str, document: &Value) -> Result<Value> {
        let file = self.dir.join("blobs/new");
        fs::write(&file, document.to_string())?;
        self.put_file(media_type, &file)
    }

    /// Moves a file into the layout and returns its descriptor.
    fn put_file(&self, media_type: &str, file: &Path) -> Result<Value> {
        let sum = sha256(file)?;
        let size = fs::metadata(file)?.len();
        fs::rename(file, self.dir.join("blobs/sha256").join(&sum))?;
        Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{sum}"), "size": size }))
    }
}

fn sha256(file: &Path) -> Result<String> {
    let text = output(Command::new("sha256sum").arg(file))?;
    let sum = text.split_whitespace().next();
    Ok(sum.context("sha256sum printed nothing")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blobs_are_named_by_checksum() {
        let dir = std::env::temp_dir().join(format!("xtask-image-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let layout = Layout::create(dir.clone()).unwrap();
        let descriptor = layout.put_json(CONFIG, &json!({})).unwrap();
        // The SHA-256 of "{}".
        let sum = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a";
        assert_eq!(descriptor["digest"], format!("sha256:{sum}"));
        assert_eq!(descriptor["size"], 2);
        assert_eq!(fs::read(dir.join("blobs/sha256").join(sum)).unwrap(), b"{}");
        fs::remove_dir_all(dir).unwrap();
    }
}
