//! Runs Debian's unmodified RDMA programs with the library: their own checks, their configuration,
//! and what `iwarp stat` and captures show.

use crate::common;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns a port that is probably free, or `None` if `host` cannot be used.
fn free_port(host: &str) -> Option<u16> {
    let socket = std::net::TcpListener::bind((host, 0)).ok()?;
    Some(socket.local_addr().unwrap().port())
}

fn start(folder: &common::Folder, program: &str, args: &[&str]) -> Child {
    Command::new(program)
        .args(args)
        .env("LD_LIBRARY_PATH", &folder.0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for a program. Returns its exit code and output. After the timeout it is killed, and the
/// code is -1.
fn finish(mut child: Child) -> (i32, String) {
    let deadline = Instant::now() + TIMEOUT;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut text = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    (status.code().unwrap_or(-1), text)
}

/// Starts a server and runs its client. If the client's output contains `refused`, runs it again,
/// because the server may not listen yet. Returns the last output of both.
fn run_server_and_client(
    folder: &common::Folder,
    server: (&str, &[&str]),
    client: (&str, &[&str]),
    refused: &str,
) -> (String, String) {
    let mut running = start(folder, server.0, server.1);
    let deadline = Instant::now() + TIMEOUT;
    let (code, text) = loop {
        let (code, text) = finish(start(folder, client.0, client.1));
        let early = code != 0 && text.contains(refused);
        if !early || Instant::now() > deadline || running.try_wait().unwrap().is_some() {
            break (code, text);
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    if code != 0 {
        let _ = running.kill();
    }
    let (server_code, server_text) = finish(running);
    assert_eq!(
        (code, server_code),
        (0, 0),
        "client:\n{text}\nserver:\n{server_text}"
    );
    (text, server_text)
}

#[test]
fn rping_over_ipv4_and_ipv6() {
    if !common::installed("rping") {
        return;
    }
    let folder = common::Folder::new("rping");
    for host in ["127.0.0.1", "::1"] {
        let Some(port) = free_port(host) else {
            assert_eq!(host, "::1", "no port on the IPv4 loopback");
            continue;
        };
        for own_qp in [false, true] {
            let port = port.to_string();
            let mut args = vec!["-a", host, "-p", &port, "-C", "10", "-v", "-V"];
            if own_qp {
                args.push("-q");
            }
            let (s, c) = ([&["-s"], &args[..]].concat(), [&["-c"], &args[..]].concat());
            let (client, _) =
                run_server_and_client(&folder, ("rping", &s), ("rping", &c), "REJECTED");
            let pings = client
                .lines()
                .filter(|l| l.starts_with("ping data: rdma-ping-"))
                .count();
            assert_eq!(pings, 10, "{client}");
        }
    }
}

/// `iwarp stat` finds the program by its process ID.
#[test]
fn unmodified_program_answers_iwarp_stat() {
    if !common::installed("rping") {
        return;
    }
    let folder = common::Folder::new("asked");
    let port = free_port("127.0.0.1").unwrap().to_string();
    let args = ["-a", "127.0.0.1", "-p", &port];
    let mut server = start(&folder, "rping", &[&["-s"], &args[..]].concat());
    let mut request = iwarp::stat::Question::default();
    request.pid = Some(server.id());
    let query = || {
        let reply = request.ask().unwrap().pop()?;
        String::from_utf8(reply.document.ok()?).ok()
    };
    let mut client: Option<Child> = None;
    let deadline = Instant::now() + TIMEOUT;
    let reply = loop {
        let reply = query().unwrap_or_default();
        // RTS shows that the program uses this library and is connected to the client.
        if reply.contains("\"state\":\"RTS\"") || Instant::now() > deadline {
            break reply;
        }
        // If the client has exited, the server was not listening yet.
        let has_exited = |c: &mut Child| c.try_wait().unwrap().is_some();
        if client.as_mut().is_none_or(has_exited) {
            client = Some(start(&folder, "rping", &[&["-c"], &args[..]].concat()));
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    for child in client.iter_mut().chain([&mut server]) {
        let _ = child.kill();
        let _ = child.wait();
    }
    let command = format!("\"command\":\"rping -s -a 127.0.0.1 -p {port}\"");
    for part in [&command[..], "\"local\":\"127.0.0.1:", "\"tcp_rtt_us\":"] {
        assert!(reply.contains(part), "{part} in {reply}");
    }
}

/// The capture of `IWARP_CAPTURE` is complete when the program exits.
#[test]
fn program_traffic_is_captured() {
    if !common::installed("rping") {
        return;
    }
    let folder = common::Folder::new("recorded");
    let file = folder.0.join("rping.pcapng");
    let port = free_port("127.0.0.1").unwrap().to_string();
    let command = format!(
        "IWARP_CAPTURE={} exec rping -c -a 127.0.0.1 -p {port} -C 3 -v",
        file.display()
    );
    run_server_and_client(
        &folder,
        ("rping", &["-s", "-a", "127.0.0.1", "-p", &port, "-C", "3"]),
        ("sh", &["-c", &command]),
        "REJECTED",
    );
    let captured = std::fs::read(&file).unwrap();
    for ping in 0..3 {
        let text = format!("rdma-ping-{ping}: ");
        let found = captured.windows(text.len()).any(|w| w == text.as_bytes());
        assert!(found, "ping {ping} is not among {} octets", captured.len());
    }
}

/// Programs may listen on the loopback address even if no device has it, as with hardware.
#[test]
fn loopback_bind_needs_no_device() {
    if !common::installed("rping") {
        return;
    }
    let folder = common::Folder::new("nowhere");
    let port = free_port("127.0.0.1").unwrap();
    let command = format!("IWARP_BIND=192.0.2.77 exec rping -s -a 127.0.0.1 -p {port} -C 1");
    let mut server = start(&folder, "sh", &["-c", &command]);
    let deadline = Instant::now() + TIMEOUT;
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline && server.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(10));
    }
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn ucmatose_moves_data_on_many_connections() {
    if !common::installed("ucmatose") {
        return;
    }
    let folder = common::Folder::new("ucmatose");
    let port = free_port("127.0.0.1").unwrap().to_string();
    let (client, server) = run_server_and_client(
        &folder,
        ("ucmatose", &["-p", &port, "-c", "10", "-m"]),
        (
            "ucmatose",
            &[
                "-s",
                "127.0.0.1",
                "-p",
                &port,
                "-c",
                "10",
                "-m",
                "-C",
                "10",
                "-S",
                "4096",
            ],
        ),
        "REJECTED",
    );
    for text in [client, server] {
        assert!(text.contains("return status 0"), "{text}");
    }
}

#[test]
fn device_is_listed_as_rnic() {
    if !common::installed("ibv_devinfo") {
        return;
    }
    let folder = common::Folder::new("devinfo");
    let (code, text) = finish(start(&folder, "ibv_devinfo", &["-v"]));
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("iWARP (1)") && text.contains("PORT_ACTIVE"),
        "{text}"
    );
}

/// C programs have no log, so an invalid setting is reported once on standard error.
#[test]
fn invalid_setting_is_reported_once() {
    if !common::installed("ibv_devinfo") {
        return;
    }
    let folder = common::Folder::new("settings");
    for (name, value) in [
        ("IWARP_CRC", "maybe"),
        ("IWARP_MSS", "x"),
        ("IWARP_BIND", "lo,no-such-interface"),
        ("IWARP_DEVICE_NAME", "a/b"),
        ("IWARP_CAPTURE", "/nonexistent/file.pcapng"),
    ] {
        let command = format!("{name}={value} exec ibv_devinfo -v");
        let (_, text) = finish(start(&folder, "sh", &["-c", &command]));
        let lines = text.lines().filter(|l| l.starts_with("iwarp: "));
        let lines: Vec<_> = lines.filter(|l| l.contains(value)).collect();
        let names_variable = name == "IWARP_CAPTURE" || lines.iter().all(|l| l.contains(name));
        assert!(lines.len() == 1 && names_variable, "{name}={value}: {text}");
    }
}
