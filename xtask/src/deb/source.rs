//! Creates the folder in which dpkg-buildpackage works: `debian/` with the files of the repository
//! and a changelog.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;
use xtask::context::Context;
use xtask::layout::{self, File};
use xtask::process::cargo;

use super::{PACKAGING, SCRIPTS, output};

pub(crate) const NAME: &str = "iwarp";
/// The Debian revision, which counts packages of the same upstream version.
const REVISION: &str = "1";

/// The folder in which the package is built, and the values that Debian's tools need.
pub(super) struct Folder {
    /// The folder that contains `debian/`. The package is written to its parent folder.
    pub(super) path: PathBuf,
    /// Name and address from `DEBFULLNAME` and `DEBEMAIL`. If it is `None`, the maintainer in the
    /// control file applies.
    pub(super) maintainer: Option<String>,
    /// Time of the last commit, in seconds since 1970. No file in the package is newer, so that the
    /// build is reproducible.
    pub(super) epoch: String,
}

impl Folder {
    /// Creates the folder below `dir`, whose earlier contents are removed.
    pub(super) fn create(context: &Context, dir: &Path) -> Result<Self> {
        let _ = fs::remove_dir_all(dir);
        let path = dir.join(NAME);
        let own = |name: &str| context.root.join(PACKAGING).join(name);
        let mut files = vec![
            File::copy(own("control"), "debian/control"),
            File::program(own("rules"), "debian/rules"),
        ];
        for script in SCRIPTS {
            let name = format!("{NAME}.{script}");
            files.push(File::copy(own(&name), Path::new("debian").join(&name)));
        }
        layout::put(&files, &path)?;
        let name = std::env::var("DEBFULLNAME").ok();
        let mail = std::env::var("DEBEMAIL").ok();
        let maintainer = name
            .zip(mail)
            .map(|(name, mail)| format!("{name} <{mail}>"));
        let folder = Self {
            path,
            maintainer,
            epoch: epoch(context)?,
        };
        fs::write(
            folder.path.join("debian/changelog"),
            folder.changelog(context)?,
        )?;
        Ok(folder)
    }

    /// Returns the Debian changelog, which names the version and the time of the last commit.
    fn changelog(&self, context: &Context) -> Result<String> {
        let maintainer = match &self.maintainer {
            Some(maintainer) => maintainer.clone(),
            None => {
                let control = fs::read_to_string(self.path.join("debian/control"))?;
                let mut lines = control.lines();
                let field = lines.find_map(|line| line.strip_prefix("Maintainer: "));
                field
                    .context("the control file has no maintainer")?
                    .to_owned()
            }
        };
        let mut date = Command::new("date");
        date.args(["--utc", "--rfc-email", &format!("--date=@{}", self.epoch)]);
        Ok(format!(
            "{NAME} ({}-{REVISION}) unstable; urgency=medium\n\n  \
             * See changelog.gz for what is new in this version.\n\n -- {maintainer}  {}\n",
            version(context)?,
            output(date.env("LC_ALL", "C"))?.trim()
        ))
    }
}

/// Returns the version of the command.
///
/// # Errors
/// If cargo fails.
pub(crate) fn version(context: &Context) -> Result<String> {
    let metadata =
        output(cargo(&context.root).args(["metadata", "--no-deps", "--format-version=1"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata")?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let command = packages.find(|package| package["name"] == "iwarp-cli");
    let version = command.and_then(|command| command["version"].as_str());
    Ok(version.context("there is no crate iwarp-cli")?.to_owned())
}

/// Returns `SOURCE_DATE_EPOCH` if it is set, and otherwise the time of the last commit.
///
/// # Errors
/// If git fails, as in a tree without history.
pub(crate) fn epoch(context: &Context) -> Result<String> {
    if let Ok(epoch) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(epoch);
    }
    let mut git = Command::new("git");
    git.current_dir(&context.root);
    Ok(output(git.args(["log", "-1", "--format=%ct"]))?
        .trim()
        .to_owned())
}
