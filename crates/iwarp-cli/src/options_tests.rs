//! Every option of the command: alone, with others, in the wrong role (client or server), and after
//! another subcommand. A new option needs rows in [`LINES`].

use super::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// Arguments of `iwarp`, and a part of the expected usage error. It is empty if they are valid.
const LINES: &[(&str, &str)] = &[
    ("ping h -p 7 -C 3 -i 0.5 -S 16 -v -V -d", ""),
    ("ping h --port 7 --count 1 --interval 10 --size 65536", ""),
    ("ping h --verbose --validate --debug", ""),
    ("ping h --count 0", "--count"),
    ("ping h --interval 10.1", "--interval"),
    ("ping h --interval NaN", "--interval"),
    ("ping h --size 15", "--size"),
    ("ping h --size 65537", "--size"),
    (
        "ping h --port 0",
        "--port 0 is valid with 'iwarp ping serve' only",
    ),
    (
        "ping h --bind ::1",
        "--bind is valid with 'iwarp ping serve' only",
    ),
    ("ping h --max-clients 2", "--max-clients is valid with"),
    (
        "ping h --max-per-address 2",
        "--max-per-address is valid with",
    ),
    (
        "ping h --allow ::/0",
        "--allow is valid with 'iwarp ping serve' only",
    ),
    ("ping serve --port 0 --count 2 --verbose --debug", ""),
    ("ping serve --bind ::1 --max-clients 1 --allow ::1", ""),
    ("ping serve --max-per-address 4096", ""),
    ("ping serve --max-per-address 4097", "--max-per-address"),
    ("ping serve --max-clients 0", "--max-clients"),
    ("ping serve --allow 10.0.0.1/8", "--allow"),
    ("ping serve --bind host", "--bind"),
    ("ping serve --interval 1", "--interval is not valid with"),
    (
        "ping serve --size 64",
        "--size is not valid with 'iwarp ping serve'",
    ),
    ("ping serve --validate", "--validate is not valid with"),
    (
        "cp a h:b --port 1 --crc on --markers --no-resume -q -vv",
        "",
    ),
    ("cp h:b a --crc off --quiet --verbose --secret-file k", ""),
    ("cp a h:b --capture x --capture-bytes 4M", ""),
    ("cp a h:b --capture-bytes 4M", "--capture"),
    ("cp a h:b --crc yes", "--crc"),
    (
        "cp a h:b --port 0",
        "--port 0 is valid with 'iwarp cp serve' only",
    ),
    (
        "cp a h:b --bind ::1",
        "--bind is valid with 'iwarp cp serve' only",
    ),
    ("cp a h:b --writable", "--writable is valid with"),
    ("cp a h:b --overwrite", "--overwrite is valid with"),
    ("cp a h:b --anonymous", "--anonymous is valid with"),
    ("cp a h:b --memory 1M", "--memory is valid with"),
    ("cp a h:b --max-clients 2", "--max-clients is valid with"),
    (
        "cp a h:b --max-per-address 2",
        "--max-per-address is valid with",
    ),
    ("cp a h:b --allow ::/0", "--allow is valid with"),
    (
        "cp serve d --port 0 --crc off --markers --quiet --verbose",
        "",
    ),
    ("cp serve d --capture x --capture-bytes 1", ""),
    (
        "cp serve d --bind :: --anonymous --writable --overwrite",
        "",
    ),
    ("cp serve d --memory 1M --max-clients 2", ""),
    ("cp serve d --max-per-address 2 --allow ::1", ""),
    ("cp serve d --no-resume", "--no-resume is not valid with"),
    ("cp serve d --anonymous --secret-file k", "--secret-file"),
    ("cp serve d --secret-file k --bind ::", ""),
    ("perf --quick --op write,read --size 4,1M --iters 9", ""),
    (
        "perf --seconds 0.001 --rounds 1 --qps 2 --depth 9 --no-pin",
        "",
    ),
    (
        "perf --crc on --markers --poll spin --json - --plot p -v",
        "",
    ),
    ("perf --iters 1 --seconds 1", "--seconds"),
    ("perf --quick --size 0", "--size must be between"),
    ("perf --op all", "--op"),
    ("perf --poll never", "--poll"),
    ("perf --crc both", "--crc"),
    ("perf --rounds 0", "--rounds"),
    ("perf --qps 0", "--qps"),
    ("perf --depth 0", "--depth"),
    ("perf --seconds 3601", "--seconds"),
    ("perf --iters 0", "--iters"),
    ("perf --verbose --no-pin --markers --json f --plot g", ""),
    ("perf --quick connect h", "--quick"),
    ("perf --json f serve", "--json"),
    (
        "perf connect h --quick --op send --size 8 --iters 9 --rounds 2",
        "",
    ),
    (
        "perf connect h:1 --seconds 1 --qps 1 --depth 1 --crc off",
        "",
    ),
    ("perf connect h --markers --poll event --no-pin", ""),
    ("perf connect h --json f --plot g --verbose", ""),
    ("perf connect h --size 1G", "--size must be between"),
    ("perf connect h --bind ::", "--bind"),
    ("perf connect h --memory 1M", "--memory"),
    ("perf serve --bind [::1]:7 --memory 1M --verbose", ""),
    (
        "perf serve --max-clients 2 --max-per-address 1 --allow ::1",
        "",
    ),
    ("perf serve --memory 1X", "--memory"),
    ("perf serve --bind", "--bind"),
    ("perf serve --max-clients 0", "--max-clients"),
    ("perf serve --max-per-address 0", "--max-per-address"),
    ("perf serve --allow host", "--allow"),
    ("perf serve --quick", "--quick"),
    ("stat 7 --json --watch --directory d", ""),
    ("stat --openmetrics --directory d", ""),
    ("stat --watch=0.1 --json", ""),
    ("stat --watch=0.05", "--watch"),
    ("stat --openmetrics --watch", "--watch"),
    ("stat --openmetrics --json", "--json"),
    ("stat --watch 0", "PID"),
    ("stat --pid 1,2 --peer ::1 --sort rtt --watch", ""),
    ("stat --pid 0", "--pid"),
    ("stat 7 --pid 8", "--pid"),
    ("stat --peer host", "--peer"),
    ("stat --sort colour", "--sort"),
    ("stat --sort sent --json", "--sort"),
    ("stat --prometheus 7", ""),
    ("stat --prometheus --json", "--json"),
    ("stat --prometheus --openmetrics", "--openmetrics"),
    ("stat --schema", ""),
    ("stat --schema --json", "--schema"),
    (
        "stat serve --bind ::1 --max-queue-pairs 0 --directory d",
        "",
    ),
    (
        "stat serve --max-clients 2 --max-per-address 2 --allow ::1",
        "",
    ),
    ("stat serve --bind host", "--bind"),
    ("stat serve --max-queue-pairs x", "--max-queue-pairs"),
    ("stat serve --max-clients 0", "--max-clients"),
    ("stat serve --max-per-address 0", "--max-per-address"),
    ("stat serve --allow h", "--allow"),
    ("stat serve --directory", "--directory"),
    ("doctor", ""),
    ("doctor --json", "--json"),
    ("devices --verbose --json", ""),
    ("devices --json", ""),
    ("devices --watch", "--watch"),
    ("run --sysfs --placed --stats --rsockets -- p --crc x", ""),
    ("run --device-name a --as roce --bind lo --crc off p", ""),
    ("run --markers on --mpa-rev 1 --rnr-timeout 0 p", ""),
    ("run --capture x --capture-bytes 1 --allow ::1 p", ""),
    ("run --fault crc --fault reset p", ""),
    ("run --check --as roce p", ""),
    ("run --check", "PROGRAM"),
    ("run --capture-bytes 1 p", "--capture"),
    ("run --mpa-rev 3 p", "--mpa-rev"),
    ("run --markers yes p", "--markers"),
    ("run --rnr-timeout -1 p", "--rnr-timeout"),
    ("run --allow 10.0.0.1/8 p", "--allow"),
    ("run --stats", "PROGRAM"),
    ("run --sysfs --rsockets", "PROGRAM"),
    ("run --placed --device-name a/b p", "--device-name"),
    ("run --as ib p", "--as"),
    ("run --bind", "--bind"),
    ("run --crc auto p", "--crc"),
    ("run --capture", "--capture"),
    ("run --fault nonsense p", "--fault"),
    ("env --placed --stats --rsockets --fault crc", ""),
    ("env --device-name a --as rnic --bind lo --crc on", ""),
    ("env --markers off --mpa-rev 2 --rnr-timeout 1", ""),
    ("env --capture x --capture-bytes 1 --allow ::1", ""),
    ("env --sysfs", "--sysfs"),
    ("env p", "p"),
    ("unpack d --placed --stats --rsockets --fault crc", ""),
    ("unpack d --device-name a --as rnic --bind lo --crc on", ""),
    ("unpack d --markers off --mpa-rev 2 --rnr-timeout 1", ""),
    ("unpack d --capture x --capture-bytes 1 --allow ::1", ""),
    ("unpack", "DIR"),
    ("unpack d --sysfs", "--sysfs"),
    ("-v ping h", ""),
    ("--log-format json devices", ""),
    ("--log-format xml devices", "--log-format"),
    ("--verbose perf -v", ""),
    ("ping h --json", "--json"),
];

fn parse(line: &str) -> std::result::Result<Cli, String> {
    let words = std::iter::once("iwarp").chain(line.split_whitespace());
    Cli::try_parse_from(words).map_err(|e| e.to_string())
}

/// Parses the line and validates the options, without running the subcommand.
fn check(line: &str) -> std::result::Result<(), String> {
    let checked = match parse(line)?.command {
        Command::Ping(a) => a.check(),
        Command::Cp(a) => a.check(),
        Command::Perf(a) => a.check(),
        _ => Ok(()),
    };
    checked.map_err(|e| e.to_string())
}

#[test]
fn options_are_accepted_where_they_belong() {
    for (line, error) in LINES {
        match (check(line), error.is_empty()) {
            (Ok(()), true) => {}
            (Err(e), false) => assert!(e.contains(error), "{line}: {e}"),
            (outcome, _) => panic!("{line}: {outcome:?}"),
        }
    }
}

/// Collects the long options of a command and of its subcommands.
fn options(command: &clap::Command, path: &str, into: &mut Vec<(String, String)>) {
    for argument in command.get_arguments().filter(|a| !a.is_hide_set()) {
        if let Some(long) = argument.get_long() {
            into.push((path.to_owned(), format!("--{long}")));
        }
    }
    for inner in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        options(inner, format!("{path} {}", inner.get_name()).trim(), into);
    }
}

/// Each option must be in at least two rows, one of them with a valid line.
#[test]
fn every_option_has_two_rows() {
    let short: BTreeMap<&str, &str> = [("-q", "--quiet"), ("-v", "--verbose")].into();
    let mut all = Vec::new();
    options(&Cli::command(), "", &mut all);
    assert!(all.len() > 90, "{}", all.len());
    all.retain(|(path, option)| {
        let rows = LINES.iter().filter(|(line, _)| {
            let mut words = line.split_whitespace();
            path.split_whitespace()
                .all(|name| words.next() == Some(name))
                && words.any(|word| {
                    let word = word.split('=').next().unwrap_or(word);
                    short.get(word).unwrap_or(&word) == option
                })
        });
        let rows: Vec<_> = rows.collect();
        // `env` and `unpack` share the options of `run`, and `perf connect` those of `perf`, so one
        // row is enough. `--verbose` is never refused.
        let shares_options = ["env", "unpack", "perf connect"].contains(&path.as_str());
        let wanted = if shares_options || option == "--verbose" {
            1
        } else {
            2
        };
        rows.len() < wanted || rows.iter().all(|(_, error)| !error.is_empty())
    });
    assert!(all.is_empty(), "rows are missing for {all:?}");
}

#[test]
fn verbose_options_add_up() {
    for (line, level) in [
        ("ping h", 0),
        ("ping h -v", 0),
        ("ping h -d", 2),
        ("-v ping h -d", 3),
        ("-vv devices -v", 2),
        ("cp a h:b -v", 1),
        ("-v cp serve d -v", 2),
        ("perf -vv", 2),
        ("perf serve -v", 1),
        ("-v perf connect h -vv", 3),
        ("stat", 0),
        ("-v run p -v", 1),
    ] {
        assert_eq!(parse(line).unwrap().log_level(), level, "{line}");
    }
}

/// Pauses of `iwarp ping` in ms if each answer takes 100 ms.
#[test]
fn ping_pauses_between_pings_only() {
    for (line, pauses) in [
        ("ping h", &[900, 900, 900, 900][..]),
        ("ping h -C 1", &[]),
        ("ping h -C 3", &[0, 0]),
        ("ping h -C 1 -i 5", &[]),
        ("ping h -C 2 -i 5", &[4900]),
        ("ping h -i 0.05 -C 3", &[0, 0]),
        ("ping h -i 0", &[0, 0, 0, 0]),
    ] {
        let Command::Ping(args) = parse(line).unwrap().command else {
            panic!("{line}");
        };
        let answered = Duration::from_millis(100);
        let all = (0..4).map_while(|number| args.pause(number, answered));
        let all: Vec<u128> = all.map(|pause| pause.as_millis()).collect();
        assert_eq!(all, pauses, "{line}");
    }
}
