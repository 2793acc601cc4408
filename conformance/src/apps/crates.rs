//! Unmodified tests and examples of RDMA crates from crates.io, with our devices as iWARP and as
//! RoCE NICs.
//!
//! The versions of the crates are pinned, and those of dependencies by the crates' lock files.
//! Cargo downloads and builds the crates when the case runs. If crates.io is unreachable, the case
//! is skipped. All tests must pass, except those in `crates.txt`, which must fail as listed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use xtask::context::Context;
use xtask::process::cargo;

use crate::case::{Case, Verdict};

use super::crates_examples as examples;
use super::crates_known::{Known, known};
use super::crates_view::{Face, View};
use super::stage::{Stage, WIRE, WIRE_V4};

/// Time limit of a case in seconds, including the build.
const LIMIT_S: u64 = 1800;
/// Time limit of a single test, in seconds.
const TEST_LIMIT_S: &str = "60";
/// All crates need the headers. Their build scripts call cmake and, through bindgen, libclang.
const NEEDS: &[&str] = &["libibverbs-dev", "librdmacm-dev", "libclang-dev", "cmake"];

/// Runs a crate's examples; the map contains their executables by name. Returns the number of
/// examples.
type Examples = fn(&Stage, View, &BTreeMap<String, String>) -> Result<usize>;

struct Published {
    name: &'static str,
    version: &'static str,
    features: &'static str,
    /// Test files and tests that do not run.
    excluded: &'static [&'static str],
    /// The kinds of NIC that our devices present.
    faces: &'static [Face],
    /// The address or interface to which the devices are limited.
    bind: Option<&'static str>,
    examples: Examples,
}

const BOTH: &[Face] = &[Face::Rnic, Face::Roce];

pub(super) fn cases() -> Vec<Case<Stage>> {
    let all = [
        Published {
            name: "sideway",
            version: "0.4.3",
            features: "",
            // `compiletest` compares the compiler's messages.
            excluded: &["compiletest"],
            // The tests need a device with an address that is not link-local.
            faces: BOTH,
            bind: Some(WIRE_V4),
            examples: examples::sideway,
        },
        Published {
            name: "ibverbs",
            version: "0.9.2",
            features: "",
            excluded: &[],
            faces: BOTH,
            bind: None,
            examples: examples::ibverbs,
        },
        Published {
            name: "async-rdma",
            version: "0.5.0",
            features: "cm,raw,exp",
            // The first test has a time-out of 100 ms, which is too short on a busy machine. The
            // second waits for ever (see `crates.txt`).
            excluded: &[
                "rmr_timeout::timeout_check::main",
                "imm::write_with_imm::main",
            ],
            // The crate uses GID 1 of the last device. Without `bind`, that is a device with only a
            // link-local address.
            faces: BOTH,
            bind: Some(WIRE),
            examples: examples::async_rdma,
        },
    ];
    all.into_iter()
        .map(|published| {
            let faces = match published.faces {
                [one] => format!("`--as {}`", one.name()),
                _ => "both faces".to_owned(),
            };
            let what = format!("{}: its tests and examples, {faces}", published.version);
            Case::new(published.name, what, move |stage| check(stage, &published))
                .needs(NEEDS)
                .wire()
                .long()
                .limit(LIMIT_S)
        })
        .collect()
}

fn check(stage: &Stage, published: &Published) -> Result<Verdict> {
    let Some(source) = download(stage, published)? else {
        return Ok(Verdict::skipped("crates.io is unreachable"));
    };
    let built = build(stage, published, &source)?;
    let mut note = String::new();
    for &face in published.faces {
        let view = View {
            face,
            bind: published.bind,
        };
        let (passed, failed) = run_tests(stage, published, view, &source, &built.tests)?;
        let examples = (published.examples)(stage, view, &built.examples)?;
        let name = face.name();
        let _ = write!(
            note,
            "{name}: {passed} tests passed, {failed} failed as expected, \
             {examples} examples passed; "
        );
    }
    Ok(Verdict::passed(note.trim_end_matches("; ")))
}

/// Downloads the crate and its dependencies. Returns the directory of a copy of its source, or
/// `None` if crates.io is unreachable.
///
/// The copy is in the case's directory, because below the target directory cargo would treat it as
/// part of our workspace.
fn download(stage: &Stage, published: &Published) -> Result<Option<PathBuf>> {
    let id = format!("{}@{}", published.name, published.version);
    // `cargo info` also unpacks the source.
    if !succeeds(cargo(stage.dir()).args(["info", "--quiet", &id]))? {
        return Ok(None);
    }
    let folder = format!("{}-{}", published.name, published.version);
    let source = stage.dir().join("source");
    let copy = [unpacked(&folder)?, source.clone()];
    if !succeeds(Command::new("cp").arg("-r").args(copy))? {
        bail!("cannot copy the source of {id}");
    }
    let fetched = succeeds(cargo(&source).args(["fetch", "--quiet", "--locked"]))?;
    Ok(fetched.then_some(source))
}

fn succeeds(command: &mut Command) -> Result<bool> {
    let program = command.get_program().to_owned();
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    Ok(status
        .with_context(|| format!("cannot start {}", program.display()))?
        .success())
}

fn unpacked(folder: &str) -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(std::env::home_dir()?.join(".cargo")))
        .context("neither CARGO_HOME nor the home directory is known")?;
    let registries = home.join("registry/src");
    for registry in std::fs::read_dir(&registries)? {
        let path = registry?.path().join(folder);
        if path.is_dir() {
            return Ok(path);
        }
    }
    bail!(
        "{folder} is not in cargo's registry directory {}",
        registries.display()
    )
}

/// The paths of the executables in the case's directory, by name.
#[derive(Default)]
struct Built {
    tests: BTreeMap<String, String>,
    examples: BTreeMap<String, String>,
}

/// Builds the tests and examples. All cases share a target directory.
fn build(stage: &Stage, published: &Published, source: &Path) -> Result<Built> {
    let target = Context::new(false, false)?.target.join("crates");
    let output = cargo(source)
        .env("CARGO_TARGET_DIR", target)
        // Some crates turn warnings of newer compilers into errors.
        .env("RUSTFLAGS", "--cap-lints=allow")
        .args(["test", "--no-run", "--locked", "--quiet"])
        .args(["--message-format=json", "--features", published.features])
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{} does not build: {said}", published.name);
    }
    let mut built = Built::default();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let Some((kind, name, file)) = executable(&message) else {
            continue;
        };
        let own = stage.dir().join(format!("{kind}-{name}"));
        std::fs::copy(file, &own)?;
        let all = if kind == "example" {
            &mut built.examples
        } else {
            &mut built.tests
        };
        all.insert(name.to_owned(), own.display().to_string());
    }
    built
        .tests
        .retain(|name, _| !published.excluded.contains(&name.as_str()));
    Ok(built)
}

/// Returns the kind, name and path of the executable that a message of cargo reports.
fn executable(message: &Value) -> Option<(&str, &str, &str)> {
    let target = &message["target"];
    let kind = target["kind"][0].as_str()?;
    Some((
        kind,
        target["name"].as_str()?,
        message["executable"].as_str()?,
    ))
}

/// Runs each test in a separate process. Returns the numbers of passed tests and of known failures.
fn run_tests(
    stage: &Stage,
    published: &Published,
    view: View,
    source: &Path,
    executables: &BTreeMap<String, String>,
) -> Result<(usize, usize)> {
    let mut results = BTreeMap::new();
    for (file, path) in executables {
        let list = stage.start_with(
            &view.options(),
            None,
            &[],
            &[path, "--list", "--format=terse"],
        )?;
        for name in names(&list.success()?) {
            let test = format!("{file}::{name}");
            if published.excluded.contains(&test.as_str()) {
                continue;
            }
            let words = ["timeout", TEST_LIMIT_S, path, "--exact", name];
            let root = [("CARGO_MANIFEST_DIR", source.to_str().unwrap_or_default())];
            let ended = stage
                .start_with(&view.options(), None, &root, &words)?
                .wait();
            results.insert(test, failure(ended));
        }
    }
    compare(&known(published.name, view.face), &results)
}

fn names(list: &str) -> impl Iterator<Item = &str> {
    list.lines().filter_map(|line| line.strip_suffix(": test"))
}

/// Returns the output of a test that did not pass, and `None` if it passed.
fn failure(ended: Result<(i32, String)>) -> Option<String> {
    match ended {
        // An ignored test does not count as passed.
        Ok((0, said)) if said.contains("test result: ok. 1 passed") => None,
        Ok((code, said)) => Some(format!("exit code {code}: {said}")),
        Err(error) => Some(error.to_string()),
    }
}

/// Shortens an output: returns the line with the location of a panic and the next line, or the last
/// line.
fn panic_or_last_line(said: &str) -> String {
    let mut lines = said
        .lines()
        .skip_while(|line| !line.contains("panicked at"));
    match (lines.next(), lines.next()) {
        (Some(place), Some(reason)) => format!("{place} {reason}"),
        _ => said.lines().last().unwrap_or_default().to_owned(),
    }
}

/// Compares all results with the known failures. Returns the numbers of passed tests and of known
/// failures.
///
/// Fails if a test fails that is not listed, or a listed test fails in another way, passes, or does
/// not exist.
fn compare(known: &[Known], results: &BTreeMap<String, Option<String>>) -> Result<(usize, usize)> {
    let mut wrong = Vec::new();
    for row in known {
        match results.get(row.test) {
            None => wrong.push(format!("the listed test {} does not exist", row.test)),
            Some(None) => wrong.push(format!(
                "{} passes now: remove it from crates.txt",
                row.test
            )),
            Some(Some(said)) if !said.contains(row.says) => {
                wrong.push(format!(
                    "{} does not print {:?}: {}",
                    row.test,
                    row.says,
                    panic_or_last_line(said)
                ));
            }
            Some(Some(_)) => {}
        }
    }
    for (test, failure) in results {
        if let Some(said) = failure
            && known.iter().all(|row| row.test != test)
        {
            wrong.push(format!("{test}: {}", panic_or_last_line(said)));
        }
    }
    if !wrong.is_empty() {
        bail!(
            "{} unexpected test results: {}",
            wrong.len(),
            wrong.join("; ")
        );
    }
    let passed = results.len() - known.len();
    if passed == 0 {
        bail!("no test passed");
    }
    Ok((passed, known.len()))
}

#[cfg(test)]
mod tests {
    use super::super::crates_known;
    use super::*;

    const KNOWN: [Known; 1] = [Known {
        test: "lib::b",
        says: "not so",
    }];

    fn results(all: &[(&str, Option<&str>)]) -> BTreeMap<String, Option<String>> {
        let owned =
            |(name, said): &(&str, Option<&str>)| (name.to_string(), said.map(String::from));
        all.iter().map(owned).collect()
    }

    #[test]
    fn only_known_failures_may_fail() {
        let good = results(&[("lib::a", None), ("lib::b", Some("it is not so"))]);
        assert_eq!(compare(&KNOWN, &good).unwrap(), (1, 1));
        let bad: [&[(&str, Option<&str>)]; 5] = [
            &[("lib::a", None)],
            &[("lib::a", None), ("lib::b", None)],
            &[("lib::a", None), ("lib::b", Some("something else"))],
            &[
                ("lib::a", Some("it is not so")),
                ("lib::b", Some("it is not so")),
            ],
            &[("lib::b", Some("it is not so"))],
        ];
        for rows in bad {
            assert!(compare(&KNOWN, &results(rows)).is_err(), "{rows:?}");
        }
    }

    #[test]
    fn ignored_tests_do_not_pass() {
        let ok = "test result: ok. 1 passed; 0 failed";
        assert_eq!(failure(Ok((0, ok.into()))), None);
        for (code, said) in [
            (101, ok),
            (0, "test result: ok. 0 passed; 0 failed; 1 ignored"),
            (0, ""),
        ] {
            assert!(failure(Ok((code, said.into()))).is_some(), "{code} {said}");
        }
        assert!(failure(Err(anyhow::anyhow!("signal 11"))).is_some());
        let list = "a::b: test\nc: benchmark\nd: test\n";
        assert_eq!(names(list).collect::<Vec<_>>(), ["a::b", "d"]);
    }

    #[test]
    fn cargo_messages_name_executables() {
        let text = r#"{"reason":"compiler-artifact","target":{"kind":["example"],"name":"x"},
            "executable":"/x"}"#;
        let message = serde_json::from_str(text).unwrap();
        assert_eq!(executable(&message), Some(("example", "x", "/x")));
        let none = text.replace("\"/x\"", "null");
        assert_eq!(executable(&serde_json::from_str(&none).unwrap()), None);
    }

    #[test]
    fn listed_failures_have_all_cells() {
        let cases = cases();
        let names: Vec<_> = cases.iter().map(Case::program).collect();
        for row in crates_known::rows() {
            let [name, faces, test, says, why] = crates_known::cells(row).expect(row);
            assert!(names.contains(&name), "{row}");
            assert!(["rnic", "roce", "rnic roce"].contains(&faces), "{row}");
            assert!(
                test.contains("::") && !says.is_empty() && !why.is_empty(),
                "{row}"
            );
        }
    }
}
