//! Tests of the parser with valid and invalid specifications.

use super::*;
use proptest::prelude::*;

fn parsed(text: &str) -> Spec {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn single_rule(text: &str) -> Rule {
    let mut rules = parsed(text).rules;
    assert_eq!(rules.len(), 1, "{text}");
    rules.remove(0)
}

/// Returns the error, and the part of the specification that it marks.
fn error_of(text: &str) -> (Mistake, &str) {
    let e = text.parse::<Spec>().expect_err(text);
    (e.mistake().clone(), &text[e.at()])
}

#[test]
fn specification_has_rules_and_globals() {
    let spec = parsed(" seed=7 ; reset,bytes=64K,qp=2 ;; delay=20ms , p=10% ; log=/tmp/a b.log;");
    assert_eq!(spec.seed, Some(7));
    assert_eq!(spec.log.as_deref(), Some("/tmp/a b.log".as_ref()));
    let [reset, delay] = &spec.rules[..] else {
        panic!("{spec:?}");
    };
    assert_eq!(reset.kind, Kind::Reset);
    let size = 64 << 10;
    assert_eq!(
        reset.when,
        When::Bytes(Span {
            least: size,
            most: size
        })
    );
    assert_eq!(reset.select.qp, Some(QpFilter::Ordinal(2)));
    assert_eq!(reset.times, Some(1));
    assert_eq!(delay.kind, Kind::Delay(20_000_000));
    assert!(matches!(delay.when, When::Chance(_)));
    assert_eq!(delay.times, None);
}

#[test]
fn each_fault_has_its_value() {
    use iwarp_rnic::WcStatus;
    for (text, kind) in [
        ("refuse", Kind::Refuse),
        ("unreachable", Kind::Unreachable),
        ("reset", Kind::Reset),
        ("close", Kind::Close),
        ("delay=250us", Kind::Delay(250_000)),
        ("slow=1M", Kind::Slow(1 << 20)),
        ("stall", Kind::Stall(u64::MAX)),
        ("stall=2s", Kind::Stall(2_000_000_000)),
        ("crc", Kind::Crc),
        ("rnr=500ms", Kind::Rnr(500_000_000)),
        (
            "status=REM_ACCESS_ERR",
            Kind::Status(WcStatus::RemoteAccess),
        ),
        ("status=IBV_WC_GENERAL_ERR", Kind::Status(WcStatus::General)),
        ("remote-access", Kind::RemoteAccess),
        ("cq-overflow", Kind::CqOverflow),
        ("post", Kind::Post),
        (
            "create=mr",
            Kind::Create(Object {
                name: "mr",
                errno: libc::ENOMEM,
            }),
        ),
        (
            "create=channel,errno=EMFILE",
            Kind::Create(Object {
                name: "channel",
                errno: libc::EMFILE,
            }),
        ),
        ("event=PORT_ERR", Kind::Event(Event::PortError)),
        ("event=IBV_EVENT_QP_FATAL", Kind::Event(Event::QpFatal)),
        ("port-down", Kind::PortDown(u64::MAX)),
    ] {
        assert_eq!(single_rule(text).kind, kind, "{text}");
        // The text in the log is a valid specification.
        assert_eq!(single_rule(&kind.to_string()).kind, kind, "{kind}");
    }
}

#[test]
fn rule_frequency_defaults() {
    for (text, times) in [
        ("reset", Some(1)),
        ("reset,nth=3", Some(1)),
        ("reset,every=3", None),
        ("reset,p=0.5", None),
        ("reset,p=0.5,times=4", Some(4)),
        ("refuse", None),
        ("refuse,nth=2", Some(1)),
        ("refuse,times=2", Some(2)),
        ("slow=1K", None),
    ] {
        assert_eq!(single_rule(text).times, times, "{text}");
    }
}

#[test]
fn errors_have_cause_and_position() {
    use Mistake::{
        Excludes, NeedlessValue, NoRule, NoValue, Twice, UnknownKey, UnknownKind, Value,
    };
    let kind = |m: &Mistake| std::mem::discriminant(m);
    let key = UnknownKey {
        key: String::new(),
        known: Vec::new(),
    };
    for (text, want, place) in [
        ("", NoRule, ""),
        ("seed=1", NoRule, "seed=1"),
        ("reste,nth=1", UnknownKind(String::new()), "reste"),
        ("reset;crc;Reset", UnknownKind(String::new()), "Reset"),
        ("reset=1", NeedlessValue, "1"),
        ("status", NoValue(""), "status"),
        ("status=", NoValue(""), "status"),
        ("status=SUCCESS", Value(""), "SUCCESS"),
        ("delay=20", Value(""), "20"),
        ("delay=-2ms", Value(""), "-2ms"),
        ("reset,nth", NoValue(""), "nth"),
        ("reset,nth=0", Value(""), "0"),
        ("reset,nth=5..2", Value(""), "5..2"),
        ("reset,nth=1,nth=2", Twice, "nth"),
        ("reset,nth=1,p=0.5", Excludes("nth", "p"), "p"),
        ("reset,p=1.5", Value(""), "1.5"),
        ("reset,p=nan", Value(""), "nan"),
        ("reset,p=1e-3", Value(""), "1e-3"),
        ("reset, bytes = 12 X", Value(""), "12 X"),
        (
            "reset,bytes=99999999999999999999",
            Value(""),
            "99999999999999999999",
        ),
        ("reset,bytes=99999999999999G", Value(""), "99999999999999G"),
        ("reset,op=sned", Value(""), "sned"),
        ("reset,peer=1.2.3", Value(""), "1.2.3"),
        ("reset,peer=1.2.3.4/33", Value(""), "1.2.3.4/33"),
        ("reset,dir=up", Value(""), "up"),
        ("reset,errno=EIO", key.clone(), "errno"),
        ("create=mr,errno=EWHAT", Value(""), "EWHAT"),
        ("create=mr,qp=1", key.clone(), "qp"),
        ("create=ah", Value(""), "ah"),
        ("remote-access,op=send", Value(""), "send"),
        ("seed=1;seed=2;crc", Twice, "seed"),
        ("log=;crc", NoValue(""), "log"),
        ("reset,", key, ""),
    ] {
        let (found, at) = error_of(text);
        assert_eq!(kind(&found), kind(&want), "{text}: {found:?}");
        if let Excludes(..) = want {
            assert_eq!(found, want);
        }
        assert_eq!(at, place, "{text}: {found:?}");
    }
}

#[test]
fn error_marks_its_position() {
    let e = "crc;deläy=x,p=1".parse::<Spec>().unwrap_err();
    let text = e.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("'deläy'"), "{text}");
    assert_eq!(lines[1], "  crc;deläy=x,p=1");
    assert_eq!(lines[2], "      ^^^^^");
}

#[test]
fn relative_log_file_is_resolved() {
    let spec = parsed("crc;log = a.log;reset").logging_in("/var/tmp".as_ref());
    assert_eq!(spec.log.as_deref(), Some("/var/tmp/a.log".as_ref()));
    assert_eq!(parsed(&spec.to_string()).log, spec.log);
    assert_eq!(parsed(&spec.to_string()).rules, spec.rules);
    let absolute = parsed("crc;log=/b.log").logging_in("/var/tmp".as_ref());
    assert_eq!(absolute.log.as_deref(), Some("/b.log".as_ref()));
    assert_eq!(parsed("crc").logging_in("/x".as_ref()), parsed("crc"));
}

#[test]
fn peer_filter_matches_network_and_port() {
    let matches = |filter: &str, peer: &str| {
        let rule = single_rule(&format!("reset,peer={filter}"));
        rule.select.peer.unwrap().matches(peer.parse().unwrap())
    };
    assert!(matches("192.0.2.7", "192.0.2.7:1"));
    assert!(matches("192.0.2.7", "[::ffff:192.0.2.7]:1"));
    assert!(!matches("192.0.2.7", "192.0.2.8:1"));
    assert!(matches("192.0.2.0/24", "192.0.2.8:1"));
    assert!(!matches("192.0.2.0/24", "192.0.3.8:1"));
    assert!(matches("0.0.0.0/0", "192.0.3.8:1"));
    assert!(!matches("0.0.0.0/0", "[2001:db8::1]:1"));
    assert!(matches("192.0.2.7:5", "192.0.2.7:5"));
    assert!(!matches("192.0.2.7:5", "192.0.2.7:6"));
    assert!(matches("[2001:db8::1]:5", "[2001:db8::1]:5"));
    assert!(matches("2001:db8::/32", "[2001:db8:7::1]:5"));
    assert!(!matches("2001:db8::/32", "[2001:db9::1]:5"));
}

/// The parser accepts each name in the help text, and the help text describes each fault.
#[test]
fn help_lists_all_faults() {
    let help = Spec::help();
    let words = |begin: &str| {
        let line = help.lines().find_map(|line| line.strip_prefix(begin));
        let line = line.unwrap_or_else(|| panic!("no {begin}"));
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    for status in words("STATUS: ") {
        parsed(&format!("status={status}"));
    }
    for event in words("EVENT: ") {
        parsed(&format!("event={event}"));
    }
    for errno in words("ERRNO: ") {
        for object in words("OBJECT: ") {
            parsed(&format!("create={object},errno={errno}"));
        }
    }
    let (_, examples) = help.split_once("options:\n\n").unwrap();
    for example in examples.lines().take_while(|line| !line.is_empty()) {
        parsed(example.split_whitespace().next().unwrap());
    }
    for kind in &kinds::KINDS {
        assert!(
            help.contains(&format!("\n  {}", kind.name)),
            "{}",
            kind.name
        );
    }
}

proptest! {
    /// Random texts do not panic, and each error can be formatted.
    #[test]
    fn random_text_does_not_panic(text in "[a-z=,;.0-9 \u{e4}-]{0,40}|\\PC{0,20}") {
        if let Err(e) = text.parse::<Spec>() {
            prop_assert!(e.to_string().contains('^'));
            let at = e.at();
            prop_assert!(text.get(at).is_some());
        }
    }

    #[test]
    fn random_fragments_do_not_panic(pieces in proptest::collection::vec(prop_oneof![
        Just("reset"), Just("crc"), Just("delay=1ms"), Just(",nth=2"), Just(",p=1"), Just(";"),
        Just("seed=1"), Just(",bytes=1..2K"), Just(",time=1s..2s"), Just(",peer=::1"), Just("="),
    ], 0..12)) {
        let text: String = pieces.concat();
        match text.parse::<Spec>() {
            Ok(spec) => prop_assert!(!spec.rules.is_empty()),
            Err(e) => prop_assert!(text.get(e.at()).is_some()),
        }
    }

    /// The chosen value is within the range for every seed.
    #[test]
    fn choice_is_within_range(a: u64, b: u64, random: u64) {
        let span = Span { least: a.min(b), most: a.max(b) };
        let chosen = span.choose(random);
        prop_assert!((span.least..=span.most).contains(&chosen));
    }
}

#[test]
fn chance_has_given_probability() {
    let matches = |p: &str, random| match single_rule(&format!("reset,p={p}")).when {
        When::Chance(chance) => chance.matches(random),
        other => panic!("{other:?}"),
    };
    assert!(matches("1", u64::MAX) && matches("100%", u64::MAX));
    assert!(!matches("0", 0));
    assert!(matches("0.5", u64::MAX / 2 - (1 << 20)) && !matches("0.5", u64::MAX / 2 + (1 << 20)));
}
