//! `iwarp run`, `iwarp env` and `iwarp unpack`: run a verbs program on the software RNIC.
//!
//! `LD_LIBRARY_PATH` makes the program and its children load our library under the names
//! `libibverbs.so.1` and `librdmacm.so.1`. An audit library (`LD_AUDIT`) redirects programs that
//! find their libraries in other ways. All other settings are `IWARP_*` variables.
//! `iwarp run` replaces itself with the program (`exec`), so signals, exit code and terminal are
//! the program's own.

mod bundle;
mod check;
mod cover;
mod elf;
mod fault;
mod inspect;
mod library;
mod missing;
mod sysfs;
mod trial;
mod unpack;

pub(crate) use unpack::UnpackArgs;

use clap::{Args, ValueEnum};
use fault::FaultOption;
use iwarp::{Config, Device, Face, Networks};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::units;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use sysfs::Shown;
pub(crate) use trial::try_loading;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl Switch {
    const fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// The settings of all three subcommands.
#[derive(Debug, Args)]
pub(crate) struct Settings {
    /// Prefix of the device names [default: iwarp, which gives iwarp0, iwarp1 …]
    #[arg(long, value_name = "NAME", value_parser = stem)]
    device_name: Option<String>,
    /// Present the devices to programs as iWARP NICs or as RoCE NICs. The wire is iWARP in both
    /// cases [default: rnic]
    #[arg(long = "as", value_name = "rnic|roce", value_parser = face)]
    face: Option<Face>,
    /// Offer only these addresses or interfaces as devices (comma-separated)
    #[arg(long, value_name = "ADDR|IFACE")]
    bind: Option<String>,
    /// Request CRCs; they are used if either peer requests them [default: on]
    #[arg(long, value_enum)]
    crc: Option<Switch>,
    /// Request MPA markers from peers [default: off]
    #[arg(long, value_enum)]
    markers: Option<Switch>,
    /// MPA revision to connect with [default: 2, falling back to 1]
    #[arg(long, value_name = "1|2", value_parser = clap::value_parser!(u8).range(1..=2))]
    mpa_rev: Option<u8>,
    /// Time in ms that a Send waits for the receiver to post a receive before the connection ends.
    /// 0 ends it immediately [default: 2000]
    #[arg(long, value_name = "MS")]
    rnr_timeout: Option<u64>,
    /// Complete Sends and Writes when the peer has placed them, as on InfiniBand
    #[arg(long)]
    placed: bool,
    /// Record all connections in this pcapng file; %p in the name becomes the process ID
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Stop recording at this size, for example 4M
    #[arg(long, value_name = "SIZE", requires = "capture", value_parser = units::parse_size)]
    capture_bytes: Option<u64>,
    /// Print counters to stderr when a process ends
    #[arg(long)]
    stats: bool,
    /// Accept only peers in these networks where the program listens, for example
    /// 10.0.0.0/8,2001:db8::/32 [default: all]
    #[arg(long, value_name = "LIST", value_parser = allow)]
    allow: Option<String>,
    /// Inject faults to test how the program handles them, for example 'reset,bytes=64K';
    /// `--fault help` lists them. Can be repeated
    #[arg(long, value_name = "SPEC", value_parser = fault::parse)]
    fault: Vec<FaultOption>,
    /// Carry the program's ordinary TCP sockets over RDMA (rsockets)
    #[arg(long)]
    rsockets: bool,
}

impl Settings {
    /// Returns the face that the program will see.
    fn face(&self) -> Face {
        self.face.unwrap_or_else(|| Config::from_env().face)
    }

    /// Returns the variables to set, in a fixed order. `command` is the path at which programs find
    /// this command.
    fn variables(
        &self,
        libs: &library::Libraries,
        command: &Path,
    ) -> Result<Vec<(&'static str, OsString)>> {
        let mut vars: Vec<(&'static str, OsString)> = Vec::new();
        let mut preloaded = Vec::new();
        match &libs.verbs {
            library::Verbs::Folder(dir) => vars.push((
                "LD_LIBRARY_PATH",
                joined([dir], inherited("LD_LIBRARY_PATH")),
            )),
            library::Verbs::Memory { files, .. } => preloaded.extend(files),
        }
        audit(&mut vars, libs);
        if self.rsockets {
            preloaded.push(libs.preloads.rsockets.as_ref().ok_or_else(|| {
                Error::failed(
                    "librspreload.so is not beside the other library: build it with \
                     `cargo build --release -p iwarp-rspreload`",
                )
            })?);
        }
        preload(&mut vars, preloaded);
        vars.extend(netlink(libs, command));
        let mut set = |name, value: Option<OsString>| vars.extend(value.map(|v| (name, v)));
        let text = |v: Option<String>| v.map(OsString::from);
        set("IWARP_DEVICE_NAME", text(self.device_name.clone()));
        set("IWARP_AS", text(self.face.map(|f| f.name().into())));
        set("IWARP_BIND", text(self.bind.clone()));
        set("IWARP_CRC", text(self.crc.map(|s| s.name().into())));
        set("IWARP_MARKERS", text(self.markers.map(|s| s.name().into())));
        set("IWARP_MPA_REV", text(self.mpa_rev.map(|r| r.to_string())));
        set(
            "IWARP_RNR_TIMEOUT_MS",
            text(self.rnr_timeout.map(|t| t.to_string())),
        );
        // The program may change its directory before it opens a device.
        let capture = self.capture.as_ref().map(std::path::absolute).transpose();
        let capture =
            capture.map_err(|e| Error::failed(format!("the capture file's path: {e}")))?;
        set("IWARP_CAPTURE", capture.map(PathBuf::into_os_string));
        set(
            "IWARP_CAPTURE_BYTES",
            text(self.capture_bytes.map(|n| n.to_string())),
        );
        set("IWARP_PLACED", self.placed.then(|| "on".into()));
        set("IWARP_STATS", self.stats.then(|| "1".into()));
        set("IWARP_ALLOW", text(self.allow.clone()));
        set(
            "IWARP_FAULT",
            fault::joined_spec(&self.fault)?.map(Into::into),
        );
        Ok(vars)
    }
}

/// Validates the list: the program could not report an invalid list and would accept no peer.
fn allow(text: &str) -> std::result::Result<String, String> {
    let parsed = text.parse::<Networks>().map_err(|e| e.to_string());
    parsed.map(|_| text.to_owned())
}

fn face(text: &str) -> std::result::Result<Face, String> {
    Face::named(text).ok_or_else(|| "neither rnic nor roce".to_owned())
}

fn stem(text: &str) -> std::result::Result<String, String> {
    if Device::is_stem(text) {
        return Ok(text.to_owned());
    }
    Err("letters, digits, '_', '-' and '.', at most 48 of them".to_owned())
}

/// Returns a variable of this process, if it has a value.
fn inherited(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|v| !v.is_empty())
}

/// Adds libraries that the loader loads before the program.
fn preload<'a>(
    vars: &mut Vec<(&'static str, OsString)>,
    files: impl IntoIterator<Item = &'a PathBuf>,
) {
    let mut files = files.into_iter().peekable();
    if files.peek().is_none() {
        return;
    }
    let at = vars.iter().position(|v| v.0 == "LD_PRELOAD");
    let rest = at.map(|at| vars.remove(at).1);
    let rest = rest.or_else(|| inherited("LD_PRELOAD"));
    vars.push(("LD_PRELOAD", joined(files, rest)));
}

/// Adds the audit library, in place of one from an outer `iwarp run`.
fn audit(vars: &mut Vec<(&'static str, OsString)>, libs: &library::Libraries) {
    const LIST: &str = "LD_AUDIT";
    // In `LD_AUDIT`, a colon separates paths.
    let own = libs
        .audit
        .as_ref()
        .filter(|file| !file.as_os_str().as_encoded_bytes().contains(&b':'));
    let inherited_list = inherited(LIST);
    let others = inherited_list.as_ref().map(|list| {
        let entries = list.as_encoded_bytes().split(|octet| *octet == b':');
        let others = entries
            .map(OsStr::from_bytes)
            .filter(|entry| !is_audit(Path::new(entry)));
        others.collect::<Vec<_>>().join(OsStr::new(":"))
    });
    let others = others.filter(|others| !others.is_empty());
    if own.is_some() || inherited_list.is_some() {
        vars.push((LIST, joined(own, others)));
    }
    // Libraries in memory have no folder in which the audit library could find them.
    let target = match &libs.verbs {
        library::Verbs::Memory {
            files: [first, _], ..
        } => Some(first.as_os_str().to_owned()),
        library::Verbs::Folder(_) => {
            inherited(iwarp_audit::TARGET_VARIABLE).map(|_| OsString::new())
        }
    };
    vars.extend(target.map(|target| (iwarp_audit::TARGET_VARIABLE, target)));
    if own.is_none() {
        return;
    }
    // When a program ends, valgrind makes glibc free the memory that the loader allocated for the
    // audit library. The loader does not use malloc for it, so valgrind would report invalid frees.
    prepend_setting(vars, "VALGRIND_OPTS", "--run-libc-freeres=no", " ");
    // With an audit library, glibc sizes the static thread-local storage before it knows the
    // program's libraries. Libraries that need such storage (jemalloc, for example) would then have
    // only 512 bytes. The storage is taken from each thread's stack, which has at least 16 KiB.
    prepend_setting(
        vars,
        "GLIBC_TUNABLES",
        "glibc.rtld.optional_static_tls=8192",
        ":",
    );
}

/// Puts a setting in front of the settings in a variable. Of two settings with one name the last
/// applies, so users can override ours.
fn prepend_setting(
    vars: &mut Vec<(&'static str, OsString)>,
    name: &'static str,
    setting: &str,
    separator: &str,
) {
    let current = inherited(name).unwrap_or_default();
    if current.as_encoded_bytes().starts_with(setting.as_bytes()) {
        return;
    }
    let settings = [OsStr::new(setting), &current];
    let settings = settings.into_iter().filter(|text| !text.is_empty());
    let settings: Vec<_> = settings.collect();
    vars.push((name, settings.join(OsStr::new(separator))));
}

/// Returns the variables that make iproute2's `rdma` show our devices. The first tells the audit
/// library to load a preload library; the second tells the preload library to start this command.
fn netlink(libs: &library::Libraries, command: &Path) -> Vec<(&'static str, OsString)> {
    let Some(library) = libs.audit.as_ref().and(libs.preloads.paths.as_ref()) else {
        return Vec::new();
    };
    vec![
        (iwarp_audit::PRELOAD_VARIABLE, library.into()),
        ("IWARP_NETLINK", command.into()),
    ]
}

/// Returns the path of this command.
fn own_path() -> Result<PathBuf> {
    std::env::current_exe().context("looking for this command's own file")
}

/// Returns `true` if an entry of `LD_AUDIT` is our audit library, in a folder or in memory.
fn is_audit(entry: &Path) -> bool {
    entry.ends_with(iwarp_audit::FILE_NAME)
        || (entry.starts_with("/proc") && entry.parent().is_some_and(|dir| dir.ends_with("fd")))
}

/// Returns a path list with `first` in front.
fn joined<'a>(first: impl IntoIterator<Item = &'a PathBuf>, rest: Option<OsString>) -> OsString {
    let paths = first.into_iter().map(|path| path.as_os_str().to_owned());
    let all: Vec<OsString> = paths.chain(rest).collect();
    all.join(OsStr::new(":"))
}

/// Arguments of `iwarp run`.
#[derive(Debug, Args)]
#[command(override_usage = "iwarp run [OPTIONS] [--] PROGRAM [ARGUMENTS]
       iwarp run --check [OPTIONS] [--] PROGRAM
       iwarp run --fault help")]
#[command(after_help = "EXAMPLES:
  iwarp run -- rping -s -a 127.0.0.1 -C 10 -v
  iwarp run --stats -- ib_write_bw -R -d iwarp0
  iwarp run --capture trace.pcapng -- qperf HOST -cm1 rc_bw
  iwarp run --rsockets -- iperf3 -s
  iwarp run --fault 'seed=7;status=REM_ACCESS_ERR,op=write,nth=100' -- ib_write_bw -R -d iwarp0 HOST
  iwarp run --as roce -- ucx_perftest -d iwarp1:1 -x rc_verbs -t am_lat

Static and setuid programs cannot load the libraries.")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    settings: Settings,
    /// Show the devices in /sys/class/infiniband and /dev/infiniband, for programs that read these
    /// folders themselves. `--as roce` implies it where the machine allows it
    #[arg(long)]
    sysfs: bool,
    /// Print which libraries the program would load, and from where, instead of running it. Fails
    /// if they are not iwarp's
    #[arg(long)]
    check: bool,
    /// The program and its arguments
    #[arg(
        required_unless_present = "fault",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM ARGS"
    )]
    command: Vec<OsString>,
}

/// Arguments of `iwarp env`.
#[derive(Debug, Args)]
#[command(override_usage = "eval \"$(iwarp env [OPTIONS])\"")]
#[command(after_help = "EXAMPLES:
  eval \"$(iwarp env)\"; rping -c -a 192.0.2.7
  eval \"$(iwarp env --crc off --stats)\"")]
pub(crate) struct EnvArgs {
    #[command(flatten)]
    settings: Settings,
}

/// Replaces this process with the program.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    if fault::wants_help(&args.settings.fault) {
        fault::print_help();
        return Ok(());
    }
    let Some((program, rest)) = args.command.split_first() else {
        return Err(Error::usage("no program given (see `iwarp run --help`)"));
    };
    // clap takes an unknown option as the program's name; most likely the option is misspelt.
    if program.as_encoded_bytes().starts_with(b"-") {
        return Err(Error::usage(format!(
            "'{}' is neither an option of `iwarp run` (see `iwarp run --help`) nor a program",
            Path::new(program).display()
        )));
    }
    let libs = library::find(false)?;
    let mut vars = args.settings.variables(&libs, &own_path()?)?;
    if args.check {
        return check::report(&args.command, &libs, &vars);
    }
    let found = inspect::Program::find(&args.command);
    if let Some(obstacle) = found.and_then(|found| found.obstacle()) {
        let name = Path::new(program).display();
        let text = format!("{name} cannot load iwarp's libraries: {obstacle}");
        eprintln!("iwarp: {}", iwarp_cli_common::text::printable(&text));
    }
    // Identifies the program to the library, which warns if the program ends without opening a
    // device. Preloaded libraries are also in programs that need no device, so do not warn there.
    if !args.settings.rsockets && matches!(libs.verbs, library::Verbs::Folder(_)) {
        vars.push(("IWARP_RUN", std::process::id().to_string().into()));
    }
    let face = args.settings.face();
    // Programs for RoCE NICs often read these folders; programs for iWARP NICs rarely do.
    if args.sysfs || face == Face::Roce {
        let paths = libs.preloads.paths.as_ref();
        match sysfs::show(&devices(&vars)?, face, paths.is_some()) {
            Ok(Shown::Mounted) => {}
            Ok(Shown::Copied(tree)) => {
                vars.push(("IWARP_PATHS", tree.into()));
                preload(&mut vars, paths);
            }
            Err(e) if args.sysfs => return Err(e),
            // Most programs do not need these folders.
            Err(e) => tracing::warn!("{e}"),
        }
    }
    let error = Command::new(program).args(rest).envs(vars).exec();
    let code = match error.kind() {
        std::io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    let program = Path::new(program).display();
    Err(Error::Program(
        format!("cannot run {program}: {error}"),
        code,
    ))
}

/// Returns the devices that the program will see.
fn devices(vars: &[(&str, OsString)]) -> Result<Vec<Device>> {
    let value = |name: &str| {
        let set = vars.iter().find(|v| v.0 == name).map(|v| v.1.clone());
        let value = set.or_else(|| std::env::var_os(name)).unwrap_or_default();
        value.to_string_lossy().into_owned()
    };
    Device::list_as(&value("IWARP_DEVICE_NAME"), &value("IWARP_BIND"))
        .context("cannot list the network interfaces")
}

/// Prints the variables that `run` would set, for `eval`.
pub(crate) fn env(args: &EnvArgs) -> Result<()> {
    if fault::wants_help(&args.settings.fault) {
        fault::print_help();
        return Ok(());
    }
    let libs = library::find(true)?;
    for (name, value) in args.settings.variables(&libs, &own_path()?)? {
        let value = value.to_string_lossy().replace('\'', r"'\''");
        iwarp_cli_common::out::line(format_args!("export {name}='{value}'"));
    }
    Ok(())
}

/// Writes command, libraries and devices into a folder, and prints the variables that use them.
pub(crate) fn unpack(args: &UnpackArgs) -> Result<()> {
    if fault::wants_help(&args.settings.fault) {
        fault::print_help();
        return Ok(());
    }
    unpack::run(args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    const COMMAND: &str = "/bin/iwarp";

    #[derive(Parser)]
    struct Run {
        #[command(flatten)]
        args: RunArgs,
    }

    #[test]
    fn options_become_variables() {
        let line = [
            "iwarp",
            "--crc",
            "off",
            "--as",
            "roce",
            "--stats",
            "--capture",
            "/x/y.pcapng",
            "--",
            "prog",
            "-v",
            "--crc",
            "on",
        ];
        let run = Run::parse_from(line);
        assert_eq!(run.args.command, ["prog", "-v", "--crc", "on"]);
        let libs = library::Libraries {
            verbs: library::Verbs::Folder("/lib/iwarp".into()),
            audit: Some("/lib/iwarp/libiwarp_audit.so".into()),
            preloads: library::Preloads::default(),
        };
        let vars = run
            .args
            .settings
            .variables(&libs, Path::new(COMMAND))
            .unwrap();
        let get = |n: &str| {
            vars.iter()
                .find(|v| v.0 == n)
                .map(|v| v.1.to_str().unwrap())
        };
        assert!(get("LD_LIBRARY_PATH").unwrap().starts_with("/lib/iwarp"));
        assert_eq!(get("LD_AUDIT"), Some("/lib/iwarp/libiwarp_audit.so"));
        let tunables = get("GLIBC_TUNABLES").unwrap();
        assert!(tunables.starts_with("glibc.rtld.optional_static_tls="));
        assert_eq!(get("IWARP_CRC"), Some("off"));
        assert_eq!(get("IWARP_AS"), Some("roce"));
        assert_eq!(get("IWARP_STATS"), Some("1"));
        assert_eq!(get("IWARP_CAPTURE"), Some("/x/y.pcapng"));
        assert_eq!(get("IWARP_MARKERS"), None);
    }

    /// Each option sets its variable, alone and together with all other options.
    #[test]
    fn options_set_their_variables_together() {
        let here = std::env::current_dir().unwrap();
        let trace = here
            .join("a.pcapng")
            .into_os_string()
            .into_string()
            .unwrap();
        let rows: [(&[&str], &str, &str); 13] = [
            (&["--device-name", "siw"], "IWARP_DEVICE_NAME", "siw"),
            (&["--as", "rnic"], "IWARP_AS", "rnic"),
            (&["--bind", "lo,::1"], "IWARP_BIND", "lo,::1"),
            (&["--crc", "on"], "IWARP_CRC", "on"),
            (&["--markers", "off"], "IWARP_MARKERS", "off"),
            (&["--mpa-rev", "1"], "IWARP_MPA_REV", "1"),
            (&["--rnr-timeout", "0"], "IWARP_RNR_TIMEOUT_MS", "0"),
            (&["--capture", "a.pcapng"], "IWARP_CAPTURE", &trace),
            (
                &["--capture", "a.pcapng", "--capture-bytes", "4K"],
                "IWARP_CAPTURE_BYTES",
                "4096",
            ),
            (&["--placed"], "IWARP_PLACED", "on"),
            (&["--stats"], "IWARP_STATS", "1"),
            (&["--allow", "::1"], "IWARP_ALLOW", "::1"),
            (&["--fault", "reset,nth=2"], "IWARP_FAULT", "reset,nth=2"),
        ];
        let libs = library::Libraries {
            verbs: library::Verbs::Folder("/lib/iwarp".into()),
            audit: None,
            preloads: library::Preloads::default(),
        };
        let set = |options: &[&str]| {
            let line = [&["iwarp"], options, &["--", "prog"]].concat();
            Run::parse_from(line)
                .args
                .settings
                .variables(&libs, Path::new(COMMAND))
                .unwrap()
        };
        let base = set(&[]);
        let mut all = Vec::new();
        for (options, name, value) in rows {
            let alone = set(options);
            assert!(alone.contains(&(name, value.into())), "{alone:?}");
            let others = 1 + usize::from(name == "IWARP_CAPTURE_BYTES");
            assert_eq!(alone.len(), base.len() + others, "{alone:?}");
            all.extend(
                options
                    .iter()
                    .filter(|o| !all.contains(*o))
                    .copied()
                    .collect::<Vec<_>>(),
            );
        }
        let together = set(&all);
        assert_eq!(together.len(), base.len() + rows.len(), "{together:?}");
        for (_, name, value) in rows {
            assert!(
                together.contains(&(name, value.into())),
                "{name}: {together:?}"
            );
        }
    }

    /// Added libraries come before existing ones, and none is lost.
    #[test]
    fn libraries_are_preloaded_together() {
        let mut vars = vec![("IWARP_CRC", OsString::from("on"))];
        let files = ["/lib/a.so", "/lib/b.so", "/lib/c.so"].map(PathBuf::from);
        preload(&mut vars, &files[..0]);
        assert_eq!(vars.len(), 1);
        preload(&mut vars, &files[1..]);
        preload(&mut vars, &files[..1]);
        let set: Vec<_> = vars.iter().filter(|v| v.0 == "LD_PRELOAD").collect();
        let [(_, value)] = set[..] else {
            panic!("{vars:?}");
        };
        let value = value.to_str().unwrap();
        let rest = value.strip_prefix("/lib/a.so:/lib/b.so:/lib/c.so").unwrap();
        let before = inherited("LD_PRELOAD").map(|v| format!(":{}", v.display()));
        assert_eq!(rest, before.unwrap_or_default());
    }

    #[test]
    fn values_are_checked_before_start() {
        let parse = |option: &str, value: &str| {
            Run::try_parse_from(["iwarp", "--capture", "x", option, value, "--", "prog"])
        };
        for bad in ["a/b", "../x", "my dev", ""] {
            assert!(parse("--device-name", bad).is_err(), "{bad}");
        }
        assert!(parse("--device-name", "siw").is_ok());
        assert!(parse("--as", "ib").is_err());
        let run = parse("--capture-bytes", "4M").ok().unwrap();
        assert_eq!(run.args.settings.capture_bytes, Some(4 << 20));
        assert!(parse("--capture-bytes", "4X").is_err());
    }

    #[test]
    fn faults_are_checked_and_joined() {
        let with = |specs: &[&str]| {
            let options = specs.iter().flat_map(|spec| ["--fault", *spec]);
            let line = ["iwarp"].into_iter().chain(options).chain(["--", "prog"]);
            Run::try_parse_from(line)
        };
        let libs = library::Libraries {
            verbs: library::Verbs::Folder("/lib/iwarp".into()),
            audit: Some("/lib/iwarp/libiwarp_audit.so".into()),
            preloads: library::Preloads::default(),
        };
        let run = with(&["seed=1;reset,nth=2", "crc;log=a.log"]).ok().unwrap();
        let vars = run
            .args
            .settings
            .variables(&libs, Path::new(COMMAND))
            .unwrap();
        let fault = vars.iter().find(|v| v.0 == "IWARP_FAULT").unwrap();
        let here = std::env::current_dir().unwrap();
        let want = format!(
            "seed=1;reset,nth=2;crc;log={}",
            here.join("a.log").display()
        );
        assert_eq!(fault.1.to_str(), Some(&want[..]));
        let e = with(&["reset,nth=0"]).err().unwrap().to_string();
        assert!(e.contains("--fault") && e.contains("  ^\n"), "{e}");
        // Each `--fault` is valid, but not both together: the seed is given twice.
        let twice = with(&["seed=1;crc", "seed=2;crc"]).ok().unwrap();
        assert!(
            twice
                .args
                .settings
                .variables(&libs, Path::new(COMMAND))
                .is_err()
        );
        assert!(with(&["help"]).is_ok_and(|run| fault::wants_help(&run.args.settings.fault)));
    }

    #[test]
    fn rsockets_need_their_library() {
        let run = Run::parse_from(["iwarp", "--rsockets", "--", "prog"]);
        let libs = library::Libraries {
            verbs: library::Verbs::Folder("/lib/iwarp".into()),
            audit: Some("/lib/iwarp/libiwarp_audit.so".into()),
            preloads: library::Preloads::default(),
        };
        assert!(
            run.args
                .settings
                .variables(&libs, Path::new(COMMAND))
                .is_err()
        );
    }
}
