//! The administrator's file `/etc/rdma/rsocket/preload_config`, which selects the sockets that
//! become rsockets.
//!
//! A line has four words: the beginning of a program's name, a domain (`INET`, `INET6`), a type
//! (`STREAM`, `DGRAM`) and a protocol (`TCP`, `UDP`). `*` matches any value. The words may have the
//! prefixes `AF_`, `PF_`, `SOCK_` and `IPPROTO_`, and are not case-sensitive. A line that begins
//! with `#` is a comment. If the file has no valid line, every suitable socket becomes an rsocket.

use libc::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

const PATH: &str = "/etc/rdma/rsocket/preload_config";

#[derive(Debug, PartialEq, Eq)]
struct Rule {
    program: Option<String>,
    domain: Option<c_int>,
    ty: Option<c_int>,
    protocol: Option<c_int>,
}

/// Parses a word. Returns `Some(None)` if any value matches, and `None` if the word is unknown.
fn parse_word(word: &str, prefixes: &[&str], names: &[(&str, c_int)]) -> Option<Option<c_int>> {
    if word == "*" {
        return Some(None);
    }
    let word = word.to_ascii_uppercase();
    let name = prefixes.iter().find_map(|prefix| word.strip_prefix(prefix));
    let name = name.unwrap_or(&word);
    let known = names.iter().find(|(known, _)| *known == name);
    known.map(|(_, value)| Some(*value))
}

impl Rule {
    fn parse(line: &str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let mut words = line.split_whitespace();
        let mut next = || words.next();
        let (program, domain, ty, protocol) = (next()?, next()?, next()?, next()?);
        // The InfiniBand domain is valid, but matches no socket of this library.
        let domains = [
            ("INET", libc::AF_INET),
            ("INET6", libc::AF_INET6),
            ("IB", 27),
        ];
        let types = [("STREAM", libc::SOCK_STREAM), ("DGRAM", libc::SOCK_DGRAM)];
        let protocols = [("TCP", libc::IPPROTO_TCP), ("UDP", libc::IPPROTO_UDP)];
        Some(Self {
            program: (program != "*").then(|| program.to_ascii_lowercase()),
            domain: parse_word(domain, &["AF_", "PF_"], &domains)?,
            ty: parse_word(ty, &["SOCK_"], &types)?,
            protocol: parse_word(protocol, &["IPPROTO_"], &protocols)?,
        })
    }

    fn matches_socket(&self, program: &str, domain: c_int, ty: c_int, protocol: c_int) -> bool {
        let matches = |wanted: Option<c_int>, value| wanted.is_none_or(|wanted| wanted == value);
        let program = program.to_ascii_lowercase();
        let prefix = self.program.as_ref();
        prefix.is_none_or(|name| program.starts_with(name.as_str()))
            && matches(self.domain, domain)
            && matches(self.ty, ty)
            && matches(self.protocol, protocol)
    }
}

fn rules(text: &str) -> Vec<Rule> {
    text.lines().filter_map(Rule::parse).collect()
}

fn is_selected(rules: &[Rule], program: &str, domain: c_int, ty: c_int, protocol: c_int) -> bool {
    let protocol = match (protocol, ty) {
        (0, libc::SOCK_STREAM) => libc::IPPROTO_TCP,
        (0, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
        (protocol, _) => protocol,
    };
    let matches_socket = |rule: &Rule| rule.matches_socket(program, domain, ty, protocol);
    rules.is_empty() || rules.iter().any(matches_socket)
}

struct Config {
    rules: Vec<Rule>,
    program: String,
}

fn config() -> &'static Config {
    static CONFIG: AtomicPtr<Config> = AtomicPtr::new(null_mut());
    // SAFETY: null, or a value that is never freed.
    if let Some(known) = unsafe { CONFIG.load(Ordering::Acquire).as_ref() } {
        return known;
    }
    // Several threads may read the file at the same time. A lock would avoid that, but it could
    // stay locked in a forked child.
    let text = std::fs::read_to_string(PATH).unwrap_or_default();
    let program = std::env::args_os().next().unwrap_or_default();
    let program = std::path::Path::new(&program).file_name();
    let program = program.map(|name| name.to_string_lossy().into_owned());
    let read = Box::leak(Box::new(Config {
        rules: rules(&text),
        program: program.unwrap_or_default(),
    }));
    CONFIG.store(read, Ordering::Release);
    read
}

/// Returns `true` if sockets of this kind become rsockets in this program.
pub(crate) fn selects(domain: c_int, ty: c_int, protocol: c_int) -> bool {
    let config = config();
    is_selected(&config.rules, &config.program, domain, ty, protocol)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INET: c_int = libc::AF_INET;
    const STREAM: c_int = libc::SOCK_STREAM;

    #[test]
    fn invalid_lines_are_skipped() {
        let text = "# program domain type protocol\n\
                    iperf * * *\n* inet6 sock_stream ipproto_tcp trailing\n\
                    two words\nx INET SEQPACKET *\nx INET * ICMP\nx UNIX * *\n\n";
        let any = Rule {
            program: Some("iperf".into()),
            domain: None,
            ty: None,
            protocol: None,
        };
        let all = Rule {
            program: None,
            domain: Some(libc::AF_INET6),
            ty: Some(STREAM),
            protocol: Some(libc::IPPROTO_TCP),
        };
        assert_eq!(rules(text), [any, all]);
    }

    #[test]
    fn sockets_need_matching_rule() {
        let decide = |text: &str, program, domain, ty, protocol| {
            is_selected(&rules(text), program, domain, ty, protocol)
        };
        assert!(decide("", "nc", INET, STREAM, 0));
        assert!(decide("# nothing\n", "nc", INET, STREAM, 0));
        // A rule contains the beginning of the name.
        assert!(decide("IPERF * * *", "iperf3", INET, STREAM, 0));
        assert!(!decide("iperf3 * * *", "iperf", INET, STREAM, 0));
        assert!(!decide("iperf * * *", "nc", INET, STREAM, 0));
        assert!(decide("* INET STREAM TCP", "nc", INET, STREAM, 0));
        assert!(!decide("* INET6 * *", "nc", INET, STREAM, 0));
        assert!(!decide("* * DGRAM *", "nc", INET, STREAM, 0));
        assert!(!decide("* * * UDP", "nc", INET, STREAM, 0));
        assert!(decide("a * * *\nn * * *", "nc", INET, STREAM, 6));
    }
}
