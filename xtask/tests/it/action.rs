//! Tests of the scripts of `action.yml`: which arguments they refuse, and which commands they run.
//! Small scripts replace `apt-get`, `sudo` and `curl`, so nothing is installed or downloaded.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with the replacement programs and with packages. Dropping the value removes it.
struct Runner(PathBuf);

impl Runner {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("xtask-action-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("bin")).unwrap();
        let runner = Self(dir.canonicalize().unwrap());
        // The scripts find only these programs of the machine. In particular, they find no cargo.
        let tools = "bash chmod cp dirname env grep id mkdir mv realpath sha256sum uname";
        for tool in tools.split(' ') {
            symlink(
                Path::new("/usr/bin").join(tool),
                runner.0.join("bin").join(tool),
            )
            .unwrap();
        }
        // `apt-get` and `curl` write their arguments to the file `calls`.
        runner.program("apt-get", "echo \"apt-get $*\" >> \"$RUNNER_TEMP/calls\"");
        runner.program("sudo", "exec \"$@\"");
        runner.program(
            "curl",
            "echo \"curl $*\" >> \"$RUNNER_TEMP/calls\"; echo fetched > \"$RUNNER_TEMP/iwarp.deb\"",
        );
        runner
    }

    fn program(&self, name: &str, text: &str) {
        let file = self.0.join("bin").join(name);
        fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn run(&self, script: &str, variables: &[(&str, &str)]) -> Output {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/action");
        let path = self.0.join("bin");
        Command::new("bash")
            .arg(scripts.join(script))
            .current_dir(&self.0)
            .env_clear()
            .env("PATH", path)
            .env("RUNNER_TEMP", &self.0)
            .env("SHA256", "")
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.0.join("calls")).unwrap_or_default()
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(output: &Output) -> String {
    let streams = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&streams).into_owned()
}

/// Returns the SHA-256 of "fetched\n".
fn checksum(runner: &Runner) -> String {
    fs::write(runner.0.join("same"), "fetched\n").unwrap();
    let output = Command::new("sha256sum")
        .arg(runner.0.join("same"))
        .output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.split(' ').next().unwrap().to_owned()
}

#[test]
fn package_is_installed_by_path() {
    let runner = Runner::new("path");
    fs::create_dir(runner.0.join("a b")).unwrap();
    fs::write(runner.0.join("a b/iwarp_1_amd64.deb"), "x").unwrap();
    let output = runner.run("package.sh", &[("PACKAGE", "a b/iwarp_*.deb")]);
    assert!(output.status.success(), "{}", text(&output));
    let end = format!("{}/a b/iwarp_1_amd64.deb\n", runner.0.display());
    let calls = runner.calls();
    assert!(
        calls.contains("apt-get install --yes") && calls.ends_with(&end),
        "{calls}"
    );
}

#[test]
fn patterns_and_addresses_are_checked() {
    let runner = Runner::new("refused");
    for file in ["1.deb", "2.deb"] {
        fs::write(runner.0.join(file), "x").unwrap();
    }
    for (package, word) in [
        ("*.deb", "names 2 files"),
        ("none/*.deb", "names 0 files"),
        ("http://example.org/iwarp.deb", "not an https address"),
    ] {
        let output = runner.run("package.sh", &[("PACKAGE", package)]);
        assert_eq!(output.status.code(), Some(1), "{package}");
        assert!(text(&output).contains(word), "{}", text(&output));
    }
    assert_eq!(runner.calls(), "");
}

#[test]
fn download_checksum_is_checked_first() {
    let runner = Runner::new("sum");
    let address = ("PACKAGE", "https://example.org/iwarp.deb");
    let wrong = "0".repeat(64);
    let output = runner.run("package.sh", &[address, ("SHA256", &wrong)]);
    assert!(!output.status.success());
    assert!(!runner.calls().contains("apt-get"), "{}", runner.calls());
    let right = checksum(&runner);
    let output = runner.run("package.sh", &[address, ("SHA256", &right)]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(
        runner.calls().contains("apt-get install"),
        "{}",
        runner.calls()
    );
    // Without a checksum the package is installed, and the job's log has a warning.
    let output = runner.run("package.sh", &[address]);
    assert!(output.status.success() && text(&output).contains("::warning::sha256 is not set"));
}

#[test]
fn build_is_installed_into_prefix() {
    let runner = Runner::new("build");
    let paths = runner.0.join("paths");
    let path_file = paths.to_str().unwrap();
    let output = runner.run(
        "build.sh",
        &[("PREFIX", "relative"), ("GITHUB_PATH", path_file)],
    );
    assert!(
        text(&output).contains("not an absolute path"),
        "{}",
        text(&output)
    );
    let output = runner.run("build.sh", &[("GITHUB_PATH", path_file)]);
    assert!(
        text(&output).contains("there is no cargo"),
        "{}",
        text(&output)
    );
    runner.program(
        "cargo",
        "echo \"cargo $* in $PWD\" >> \"$RUNNER_TEMP/calls\"",
    );
    let output = runner.run("build.sh", &[("GITHUB_PATH", path_file)]);
    assert!(output.status.success(), "{}", text(&output));
    let prefix = runner.0.join("iwarp");
    let calls = runner.calls();
    let call = format!(
        "cargo --locked xtask install --prefix {} in ",
        prefix.display()
    );
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    assert!(calls.starts_with(&call), "{calls}");
    assert!(
        calls.trim_end().ends_with(root.to_str().unwrap()),
        "{calls}"
    );
    assert_eq!(
        fs::read_to_string(paths).unwrap(),
        format!("{}/bin\n", prefix.display())
    );
}

/// Makes `curl` copy the file that the last part of the address names from the folder `release`.
fn serve_release(runner: &Runner) {
    fs::create_dir(runner.0.join("release")).unwrap();
    runner.program(
        "curl",
        "for a; do case $a in https:*) from=${a##*/};; esac; done
         echo \"curl $*\" >> \"$RUNNER_TEMP/calls\"
         cp \"$RUNNER_TEMP/release/$from\" \"$from\"",
    );
}

const REPOSITORY: (&str, &str) = ("REPOSITORY", "https://example.org/iwarp");

#[test]
fn bundle_of_own_version_is_downloaded() {
    let runner = Runner::new("download");
    serve_release(&runner);
    let file = format!("iwarp-linux-{}", std::env::consts::ARCH);
    let sum = checksum(&runner);
    fs::write(runner.0.join("release").join(&file), "fetched\n").unwrap();
    let sums = runner.0.join("release/SHA256SUMS");
    fs::write(&sums, format!("{sum}  {file}\n{sum}  {file}.deb\n")).unwrap();
    let paths = runner.0.join("paths");
    let path = ("GITHUB_PATH", paths.to_str().unwrap());
    let output = runner.run("download.sh", &[REPOSITORY, ("VERSION", ""), path]);
    assert!(output.status.success(), "{}", text(&output));
    let folder = runner.0.join("iwarp/bin");
    assert_eq!(fs::read(folder.join("iwarp")).unwrap(), b"fetched\n");
    let mode = fs::metadata(folder.join("iwarp")).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o755);
    let added = fs::read_to_string(&paths).unwrap();
    assert_eq!(added, format!("{}\n", folder.display()));
    let address = format!(
        "https://example.org/iwarp/releases/download/v{}/{file}\n",
        env!("CARGO_PKG_VERSION")
    );
    assert!(runner.calls().contains(&address), "{}", runner.calls());
}

#[test]
fn damaged_download_is_refused() {
    let runner = Runner::new("damaged");
    serve_release(&runner);
    let path = ("GITHUB_PATH", "/dev/null");
    let run = |sha256: &str| {
        let variables = [REPOSITORY, ("VERSION", "v9"), path, ("SHA256", sha256)];
        runner.run("download.sh", &variables)
    };
    let output = run("");
    assert!(text(&output).contains("::error::"), "{}", text(&output));
    let file = format!("iwarp-linux-{}", std::env::consts::ARCH);
    fs::write(runner.0.join("release").join(&file), "fetched\n").unwrap();
    let wrong = "0".repeat(64);
    let sums = runner.0.join("release/SHA256SUMS");
    fs::write(&sums, format!("{wrong}  {file}\n")).unwrap();
    for sum in ["", &wrong] {
        let output = run(sum);
        assert!(!output.status.success(), "{}", text(&output));
        assert!(!runner.0.join("iwarp/bin/iwarp").exists());
    }
    // The given checksum has precedence over the list.
    let right = checksum(&runner);
    let output = run(&right);
    assert!(output.status.success(), "{}", text(&output));
    assert!(
        runner.calls().contains("/download/v9/"),
        "{}",
        runner.calls()
    );
    fs::write(&sums, format!("{right}  another\n")).unwrap();
    assert!(text(&run("")).contains("has no iwarp-linux"));
}
