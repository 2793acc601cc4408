//! Tests of settings from code, from the environment, and from both.

use super::*;

fn lookup(vars: &[(&str, &str)]) -> (Config, Vec<String>) {
    Config::default().with_lookup(|name| {
        let var = vars.iter().find(|v| v.0 == name)?;
        Some(var.1.into())
    })
}

/// Settings from code; each differs from its default.
fn other() -> Config {
    Config {
        crc: false,
        markers: true,
        mpa_revision: 1,
        peer_to_peer: false,
        receiver_not_ready: ReceiverNotReady::Terminate,
        connect_timeout: Duration::from_secs(101),
        handshake_timeout: Duration::from_secs(102),
        answer_timeout: Duration::from_secs(103),
        speak_first: None,
        linger: Duration::from_secs(104),
        peer_timeout: None,
        progress_threads: 61,
        capture: Some("other.pcapng".into()),
        capture_bytes: Some(105),
        mss: Some(1001),
        align: Alignment::On,
        busy_poll: Duration::from_micros(106),
        snapshot: false,
        memory_guard: false,
        port_mapper: Some(107),
        placed: true,
        stats: true,
        face: Face::Roce,
        admission: Admission {
            peers: "192.0.2.0/24".parse().unwrap(),
            half_open: 108,
            half_open_per_address: 109,
            connections: 110,
        },
        fault: Some("reset".parse().unwrap()),
    }
}

/// A variable, a value, and the change of the settings that it causes.
type Row = (&'static str, &'static str, fn(&mut Config));

/// Each variable, usually with two values, so that one of them is not the default.
const ROWS: &[Row] = &[
    ("IWARP_CRC", "on", |c| c.crc = true),
    ("IWARP_CRC", "no", |c| c.crc = false),
    ("IWARP_MARKERS", "yes", |c| c.markers = true),
    ("IWARP_MARKERS", "off", |c| c.markers = false),
    ("IWARP_SNAPSHOT", "1", |c| c.snapshot = true),
    ("IWARP_SNAPSHOT", "0", |c| c.snapshot = false),
    ("IWARP_MEMORY_GUARD", "on", |c| c.memory_guard = true),
    ("IWARP_MEMORY_GUARD", "off", |c| c.memory_guard = false),
    ("IWARP_PLACED", "true", |c| c.placed = true),
    ("IWARP_PLACED", "false", |c| c.placed = false),
    ("IWARP_STATS", "on", |c| c.stats = true),
    ("IWARP_STATS", "off", |c| c.stats = false),
    ("IWARP_PEER_TO_PEER", "on", |c| c.peer_to_peer = true),
    ("IWARP_PEER_TO_PEER", "off", |c| c.peer_to_peer = false),
    ("IWARP_MPA_REV", "1", |c| c.mpa_revision = 1),
    ("IWARP_MPA_REV", "2", |c| c.mpa_revision = 2),
    ("IWARP_RNR_TIMEOUT_MS", "0", |c| {
        c.receiver_not_ready = ReceiverNotReady::Terminate;
    }),
    ("IWARP_RNR_TIMEOUT_MS", "7", |c| {
        c.receiver_not_ready = ReceiverNotReady::Hold(Duration::from_millis(7));
    }),
    ("IWARP_CONNECT_TIMEOUT_MS", "8", |c| {
        c.connect_timeout = Duration::from_millis(8);
    }),
    ("IWARP_CONNECT_TIMEOUT_MS", "0", |c| {
        c.connect_timeout = Duration::from_millis(1);
    }),
    ("IWARP_MPA_TIMEOUT_MS", "9", |c| {
        c.handshake_timeout = Duration::from_millis(9);
    }),
    ("IWARP_ANSWER_TIMEOUT_MS", "10", |c| {
        c.answer_timeout = Duration::from_millis(10);
    }),
    ("IWARP_LINGER_MS", "11", |c| {
        c.linger = Duration::from_millis(11)
    }),
    ("IWARP_SPEAK_FIRST_MS", "0", |c| c.speak_first = None),
    ("IWARP_SPEAK_FIRST_MS", "12", |c| {
        c.speak_first = Some(Duration::from_millis(12));
    }),
    ("IWARP_PEER_TIMEOUT_S", "0", |c| c.peer_timeout = None),
    ("IWARP_PEER_TIMEOUT_S", "13", |c| {
        c.peer_timeout = Some(Duration::from_secs(13));
    }),
    ("IWARP_BUSY_POLL_US", "0", |c| c.busy_poll = Duration::ZERO),
    ("IWARP_BUSY_POLL_US", "14", |c| {
        c.busy_poll = Duration::from_micros(14);
    }),
    ("IWARP_PROGRESS_THREADS", "15", |c| c.progress_threads = 15),
    ("IWARP_CAPTURE", "a.pcapng", |c| {
        c.capture = Some("a.pcapng".into())
    }),
    ("IWARP_CAPTURE_BYTES", "16", |c| c.capture_bytes = Some(16)),
    ("IWARP_MSS", "1400", |c| c.mss = Some(1400)),
    ("IWARP_ALIGN", "auto", |c| c.align = Alignment::Auto),
    ("IWARP_ALIGN", "on", |c| c.align = Alignment::On),
    ("IWARP_ALIGN", "off", |c| c.align = Alignment::Off),
    ("IWARP_PORT_MAPPER", "off", |c| c.port_mapper = None),
    ("IWARP_PORT_MAPPER", "on", |c| c.port_mapper = Some(3935)),
    ("IWARP_PORT_MAPPER", "17", |c| c.port_mapper = Some(17)),
    ("IWARP_AS", "rnic", |c| c.face = Face::Rnic),
    ("IWARP_AS", "roce", |c| c.face = Face::Roce),
    ("IWARP_ALLOW", "10.0.0.0/8", |c| {
        c.admission.peers = "10.0.0.0/8".parse().unwrap();
    }),
    ("IWARP_HALF_OPEN", "18", |c| c.admission.half_open = 18),
    ("IWARP_HALF_OPEN_PER_ADDRESS", "19", |c| {
        c.admission.half_open_per_address = 19;
    }),
    ("IWARP_CONNECTIONS", "20", |c| c.admission.connections = 20),
    ("IWARP_FAULT", "crc", |c| {
        c.fault = Some("crc".parse().unwrap())
    }),
];

fn with(base: Config, name: &str, value: &str) -> (Config, Vec<String>) {
    base.with_lookup(|asked| (asked == name).then(|| value.into()))
}

#[test]
fn variable_changes_only_its_setting() {
    for &(name, value, change) in ROWS {
        for base in [Config::default(), other()] {
            let mut want = base.clone();
            change(&mut want);
            assert_eq!(with(base, name, value), (want, vec![]), "{name}={value}");
        }
    }
}

#[test]
fn every_variable_has_a_row() {
    let asked = RefCell::new(std::collections::BTreeSet::new());
    let _ = Config::default().with_lookup(|name| {
        asked.borrow_mut().insert(name.to_owned());
        None
    });
    let rows = ROWS.iter().map(|row| row.0.to_owned()).collect();
    assert_eq!(*asked.borrow(), rows);
}

#[test]
fn unset_and_empty_variables_keep_settings() {
    assert_eq!(other().with_lookup(|_| None), (other(), vec![]));
    assert_eq!(other().with_lookup(|_| Some("".into())), (other(), vec![]));
}

/// The warning contains the value that remains in effect.
#[test]
fn wrong_values_keep_settings() {
    for (name, used) in [
        ("IWARP_CRC", "it is off"),
        ("IWARP_MARKERS", "it is on"),
        ("IWARP_MPA_REV", "ignored"),
        ("IWARP_RNR_TIMEOUT_MS", "ignored"),
        ("IWARP_LINGER_MS", "ignored"),
        ("IWARP_SPEAK_FIRST_MS", "ignored"),
        ("IWARP_CAPTURE_BYTES", "ignored"),
        ("IWARP_MSS", "ignored"),
        ("IWARP_ALIGN", "it is on"),
        ("IWARP_PORT_MAPPER", "it is 107"),
        ("IWARP_AS", "it is roce"),
        ("IWARP_HALF_OPEN", "ignored"),
    ] {
        let (c, complaints) = with(other(), name, "nonsense");
        assert_eq!(c, other(), "{name}");
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].ends_with(used), "{complaints:?}");
    }
    let (c, complaints) = with(other(), "IWARP_MPA_REV", "3");
    assert_eq!(c, other());
    assert!(complaints[0].ends_with("it is 1"), "{complaints:?}");
    let (c, complaints) = with(other(), "IWARP_FAULT", "nonsense");
    let want = Config {
        fault: None,
        ..other()
    };
    assert_eq!(c, want);
    assert!(
        complaints[0].contains("no faults are injected"),
        "{complaints:?}"
    );
}

#[test]
fn environment_changes_defaults() {
    let (c, complaints) = lookup(&[
        ("IWARP_CRC", "off"),
        ("IWARP_MPA_REV", "1"),
        ("IWARP_RNR_TIMEOUT_MS", "0"),
        ("IWARP_SPEAK_FIRST_MS", "0"),
        ("IWARP_CAPTURE", ""),
        ("IWARP_MARKERS", ""),
        ("IWARP_MSS", "1400"),
        ("IWARP_ALIGN", "off"),
        ("IWARP_PORT_MAPPER", "on"),
        ("IWARP_BUSY_POLL_US", "70"),
        ("IWARP_PROGRESS_THREADS", "3"),
        ("IWARP_PEER_TIMEOUT_S", "0"),
        ("IWARP_CONNECT_TIMEOUT_MS", "0"),
        ("IWARP_MPA_TIMEOUT_MS", "2"),
        ("IWARP_ANSWER_TIMEOUT_MS", "3"),
        ("IWARP_LINGER_MS", "4"),
        ("IWARP_AS", "roce"),
        ("IWARP_ALLOW", "10.0.0.0/8,::1"),
        ("IWARP_HALF_OPEN", "5"),
        ("IWARP_HALF_OPEN_PER_ADDRESS", "6"),
        ("IWARP_CONNECTIONS", "7"),
    ]);
    let want = Config {
        crc: false,
        mpa_revision: 1,
        receiver_not_ready: ReceiverNotReady::Terminate,
        speak_first: None,
        mss: Some(1400),
        align: Alignment::Off,
        port_mapper: Some(3935),
        busy_poll: Duration::from_micros(70),
        progress_threads: 3,
        peer_timeout: None,
        connect_timeout: Duration::from_millis(1),
        handshake_timeout: Duration::from_millis(2),
        answer_timeout: Duration::from_millis(3),
        linger: Duration::from_millis(4),
        face: Face::Roce,
        admission: Admission {
            peers: "10.0.0.0/8,::1".parse().unwrap(),
            half_open: 5,
            half_open_per_address: 6,
            connections: 7,
        },
        ..Config::default()
    };
    assert_eq!((c, complaints), (want, vec![]));
}

#[test]
fn invalid_values_are_reported() {
    for (name, value) in [
        ("IWARP_CRC", "maybe"),
        ("IWARP_MARKERS", "ON"),
        ("IWARP_SNAPSHOT", "2"),
        ("IWARP_MEMORY_GUARD", "never"),
        ("IWARP_PLACED", "x"),
        ("IWARP_STATS", "x"),
        ("IWARP_PEER_TO_PEER", "x"),
        ("IWARP_MPA_REV", "3"),
        ("IWARP_MPA_REV", "0"),
        ("IWARP_RNR_TIMEOUT_MS", "-1"),
        ("IWARP_CONNECT_TIMEOUT_MS", "5s"),
        ("IWARP_MPA_TIMEOUT_MS", "5s"),
        ("IWARP_ANSWER_TIMEOUT_MS", "1m"),
        ("IWARP_SPEAK_FIRST_MS", "x"),
        ("IWARP_LINGER_MS", "1.5"),
        ("IWARP_PEER_TIMEOUT_S", "1m"),
        ("IWARP_BUSY_POLL_US", "x"),
        ("IWARP_PROGRESS_THREADS", "all"),
        ("IWARP_CAPTURE_BYTES", "4M"),
        ("IWARP_ALIGN", "yes"),
        ("IWARP_PORT_MAPPER", "99999"),
        ("IWARP_MSS", "x"),
        ("IWARP_AS", "ib"),
        ("IWARP_HALF_OPEN", "x"),
        ("IWARP_HALF_OPEN_PER_ADDRESS", "1k"),
        ("IWARP_CONNECTIONS", "-1"),
    ] {
        let (c, complaints) = lookup(&[(name, value)]);
        assert_eq!(c, Config::default(), "{name}={value}");
        let [complaint] = &complaints[..] else {
            panic!("{name}={value}: {complaints:?}")
        };
        assert!(complaint.starts_with(&format!("{name}={value}: ")));
    }
}

#[test]
fn invalid_peer_list_admits_no_peer() {
    for value in ["10.0.0.0/8,10.1.2.3/8", "everybody", "10.0.0.0/8,"] {
        let (c, complaints) = lookup(&[("IWARP_ALLOW", value)]);
        assert_eq!(c.admission.peers, Networks::NONE, "{value}");
        assert!(
            complaints[0].contains("no peer is let in"),
            "{complaints:?}"
        );
    }
}

#[test]
fn out_of_range_values_are_clamped() {
    let (c, complaints) = lookup(&[
        ("IWARP_BUSY_POLL_US", "7000"),
        ("IWARP_MSS", "1"),
        ("IWARP_PEER_TIMEOUT_S", "99999"),
        ("IWARP_CONNECTIONS", "0"),
    ]);
    assert_eq!(c.peer_timeout, Some(Duration::from_secs(32_767)));
    assert_eq!(c.busy_poll, Duration::from_millis(1));
    assert_eq!(c.mss, Some(128));
    assert_eq!(c.admission.connections, 1);
    assert_eq!(complaints.len(), 4, "{complaints:?}");
    assert!(complaints.contains(&"IWARP_BUSY_POLL_US=7000: from 0 to 1000; it is 1000".to_owned()));
}
