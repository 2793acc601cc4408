//! The step `deny`: licences and sources of everything that is linked, without network and without a tool to install.
//!
//! It reads `deny.toml`, so that cargo-deny, where it is there, checks against the same lists. The advisory database
//! needs the network and is not part of this step.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use xtask::context::{Context, find_program};
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::{Log, cargo};

/// What `deny.toml` allows.
struct Rules {
    licences: BTreeSet<String>,
    registries: BTreeSet<String>,
    banned: BTreeSet<String>,
}

impl Rules {
    fn parse(text: &str) -> Result<Self> {
        let table: toml::Table = text.parse().context("deny.toml")?;
        let list = |section: &str, key: &str| -> Result<BTreeSet<String>> {
            let array = table
                .get(section)
                .and_then(|section| section.get(key))
                .and_then(toml::Value::as_array);
            let array = array.with_context(|| format!("deny.toml has no list {section}.{key}"))?;
            // An entry is a name, or a table that names a crate.
            let name = |entry: &toml::Value| {
                entry
                    .as_str()
                    .or_else(|| entry.get("crate")?.as_str())
                    .map(str::to_owned)
            };
            Ok(array.iter().filter_map(name).collect())
        };
        Ok(Self {
            licences: list("licenses", "allow")?,
            registries: list("sources", "allow-registry")?,
            banned: list("bans", "deny")?,
        })
    }

    /// What is wrong with a package of `cargo metadata`.
    fn complaints(&self, package: &Value) -> Vec<String> {
        let field = |name: &str| package.get(name).and_then(Value::as_str);
        let name = field("name").unwrap_or_default();
        let mut out = Vec::new();
        if self.banned.contains(name) {
            out.push("is banned".to_owned());
        }
        match field("license") {
            None => out.push("names no licence".to_owned()),
            Some(licence) => match allowed(licence, &self.licences) {
                Ok(true) => {}
                Ok(false) => out.push(format!("has the licence {licence}, which is not allowed")),
                Err(error) => out.push(format!(
                    "has the licence {licence:?}, which is no SPDX expression: {error}"
                )),
            },
        }
        // Packages of the workspace have no source.
        if let Some(source) = field("source") {
            let known = source
                .strip_prefix("registry+")
                .is_some_and(|url| self.registries.contains(url));
            if !known {
                out.push(format!("comes from {source}, which is not allowed"));
            }
        }
        out.into_iter()
            .map(|text| format!("{name} {}: {text}", field("version").unwrap_or_default()))
            .collect()
    }
}

/// Whether an SPDX expression can be satisfied by allowed licences.
///
/// # Errors
/// When it is not an SPDX expression.
fn allowed(expression: &str, licences: &BTreeSet<String>) -> Result<bool> {
    // Old packages write a slash for OR.
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let mut parser = Parser {
        words: spaced.split_whitespace().collect(),
        at: 0,
        licences,
    };
    let result = parser.any()?;
    match parser.next() {
        None => Ok(result),
        Some(word) => bail!("unexpected {word}"),
    }
}

struct Parser<'a> {
    words: Vec<&'a str>,
    at: usize,
    licences: &'a BTreeSet<String>,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.at).copied()
    }

    fn next(&mut self) -> Option<&'a str> {
        let word = self.peek()?;
        self.at += 1;
        Some(word)
    }

    fn any(&mut self) -> Result<bool> {
        let mut result = self.all()?;
        while self.peek() == Some("OR") {
            self.at += 1;
            result |= self.all()?;
        }
        Ok(result)
    }

    fn all(&mut self) -> Result<bool> {
        let mut result = self.one()?;
        while self.peek() == Some("AND") {
            self.at += 1;
            result &= self.one()?;
        }
        Ok(result)
    }

    fn one(&mut self) -> Result<bool> {
        match self.next() {
            Some("(") => {
                let result = self.any()?;
                if self.next() != Some(")") {
                    bail!("a parenthesis is not closed");
                }
                Ok(result)
            }
            None | Some(")" | "OR" | "AND" | "WITH") => bail!("a licence is missing"),
            Some(licence) if self.peek() == Some("WITH") => {
                self.at += 1;
                let exception = self.next().context("an exception is missing")?;
                // An exception only permits more, so the plain licence will do.
                let whole = format!("{licence} WITH {exception}");
                Ok(self.licences.contains(&whole) || self.licences.contains(licence))
            }
            Some(licence) => Ok(self.licences.contains(licence)),
        }
    }
}

/// Checks all packages that the lock file resolves to on this platform.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    let rules = Rules::parse(&files::read(&context.root, "deny.toml")?)?;
    let output = cargo(&context.root)
        .args([
            "metadata",
            "--format-version",
            "1",
            "--all-features",
            "--filter-platform",
            &host()?,
        ])
        .output()?;
    if !output.status.success() {
        log.line(String::from_utf8_lossy(&output.stderr));
        bail!("cargo metadata failed");
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let empty = Vec::new();
    let packages = metadata["packages"].as_array().unwrap_or(&empty);
    if packages.is_empty() {
        bail!("cargo metadata lists no packages");
    }
    let complaints: Vec<String> = packages
        .iter()
        .flat_map(|package| rules.complaints(package))
        .collect();
    for complaint in &complaints {
        log.line(complaint);
    }
    if !complaints.is_empty() {
        bail!("{} packages break deny.toml", complaints.len());
    }
    log.say(format!(
        "{} packages have allowed licences and sources",
        packages.len()
    ));
    if find_program("cargo-deny").is_some() {
        log.run(cargo(&context.root).args([
            "deny",
            "--offline",
            "check",
            "licenses",
            "bans",
            "sources",
        ]))?;
        log.say("cargo-deny agrees");
    }
    Ok(Outcome::Passed)
}

/// The platform that rustc builds for by default.
fn host() -> Result<String> {
    let output = std::process::Command::new("rustc")
        .arg("-vV")
        .output()
        .context("cannot start rustc")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const RULES: &str = "\
        [licenses]\nallow = [\"MIT\", \"Apache-2.0\", \"A WITH B\"]\n\
        [sources]\nallow-registry = [\"https://example.org/index\"]\n\
        [bans]\ndeny = [{ crate = \"bad\" }, \"worse\"]\n";

    fn check(expression: &str) -> Option<bool> {
        allowed(expression, &Rules::parse(RULES).unwrap().licences).ok()
    }

    #[test]
    fn expressions_are_evaluated() {
        for good in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0 OR MIT",
            "MIT/GPL-3.0",
            "(MIT OR GPL-3.0) AND Apache-2.0",
            "A WITH B",
            "MIT WITH C",
            "GPL-3.0 AND LGPL-3.0 OR MIT",
        ] {
            assert_eq!(check(good), Some(true), "{good}");
        }
        for bad in [
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "A",
            "A WITH C",
            "MIT AND (GPL-3.0 OR LGPL-3.0)",
        ] {
            assert_eq!(check(bad), Some(false), "{bad}");
        }
        for broken in [
            "",
            "MIT OR",
            "(MIT",
            "MIT)",
            "MIT Apache-2.0",
            "A WITH",
            "AND",
        ] {
            assert_eq!(check(broken), None, "{broken}");
        }
    }

    #[test]
    fn packages_are_judged_by_name_licence_and_source() {
        let rules = Rules::parse(RULES).unwrap();
        let count = |name: &str, licence: Value, source: Value| {
            let package =
                json!({"name": name, "version": "1.0.0", "license": licence, "source": source});
            rules.complaints(&package).len()
        };
        let registry = json!("registry+https://example.org/index");
        assert_eq!(count("good", json!("MIT"), registry.clone()), 0);
        assert_eq!(count("own", json!("MIT"), Value::Null), 0);
        assert_eq!(count("bad", json!("MIT"), registry.clone()), 1);
        assert_eq!(count("worse", json!("MIT"), registry.clone()), 1);
        assert_eq!(count("none", Value::Null, registry), 1);
        assert_eq!(
            count("git", json!("MIT"), json!("git+https://example.org/x")),
            1
        );
    }

    #[test]
    fn the_real_file_is_read() {
        let context = Context::new(true, false).unwrap();
        let rules = Rules::parse(&files::read(&context.root, "deny.toml").unwrap()).unwrap();
        assert!(
            rules.licences.contains("MIT")
                && !rules.registries.is_empty()
                && !rules.banned.is_empty()
        );
        assert!(Rules::parse("[licenses]\n").is_err());
    }
}
