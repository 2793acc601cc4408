//! Wireshark must decode our captures into the same FPDUs as our own decoder, without malformed
//! frames and bad CRCs.

use crate::common::capture;
use crate::common::{Scratch, noise, serve, str, succeed};
use iwarp::verbs::cm::{ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    Bind, CompletionQueue, Context, Counters, Cqe, MemoryRegion, ProtectionDomain, QpInitAttr,
    RecvWr, RemoteMemory, SendOp, SendWr, Stag, WcStatus, WindowType,
};
use iwarp::{Access, Config, Device, ReceiverNotReady};
use iwarp_proto::crc32c;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// Copies a file of 64 MiB with `iwarp cp`, captures the first 4 MiB, and checks the capture.
fn copy(markers: bool) {
    let t = Scratch::new();
    let dir = t.sub("served");
    let data = noise(64 << 20);
    let (source, file) = (t.path("source"), t.path("run.pcapng"));
    fs::write(&source, &data).unwrap();
    let mut serve_args = vec![
        "cp",
        "serve",
        str(&dir),
        "--writable",
        "--bind",
        "127.0.0.1",
        "-p",
        "0",
        "-q",
    ];
    // Wireshark can follow markers only if both directions have them.
    let more: &[&str] = if markers { &["--markers"] } else { &[] };
    serve_args.extend(more);
    let (_server, at) = serve(&serve_args);
    let port = at.port().to_string();
    let mut args = vec![
        "cp",
        "-p",
        &port,
        "--crc",
        "on",
        str(&source),
        "127.0.0.1:copy",
    ];
    args.extend(["--capture", str(&file), "--capture-bytes", "4M"]);
    args.extend(more);
    let out = succeed(&args);
    assert!(out.contains("equal at both ends"), "{out}");
    assert!(fs::read(dir.join("copy")).unwrap() == data);
    let len = fs::metadata(&file).unwrap().len();
    assert!((3 << 20..=4 << 20).contains(&len), "{len}");
    let Some(decoded) = capture::check(&file, markers, true, true) else {
        return;
    };
    assert!(decoded.octets > 3 << 20, "{}", decoded.octets);
    // Opcode 0 is RDMA Write, opcode 3 is Send.
    assert!(
        decoded.opcodes().into_iter().eq([0, 3]),
        "{:?}",
        decoded.opcodes()
    );
    println!(
        "{} FPDUs, {} of them not decodable by tshark",
        decoded.fpdus.values().map(Vec::len).sum::<usize>(),
        decoded.beyond_tshark
    );
}

#[test]
fn copy_with_crc() {
    copy(false);
}

#[test]
fn copy_with_crc_and_markers() {
    copy(true);
}

const SIZE: usize = 200_000;
const WAIT: Option<Duration> = Some(Duration::from_secs(20));

/// Binds a memory window to a region and returns its STag. A peer cannot invalidate a region.
fn bind(
    ctx: &Context,
    pd: &ProtectionDomain,
    qp: &iwarp::runtime::QueuePair,
    mr: &MemoryRegion,
) -> Stag {
    let mw_stag = ctx.allocate_window(WindowType::Type2, pd.number()).unwrap();
    let bind = Bind {
        mw_stag,
        new_stag: mw_stag.with_key(mw_stag.key() ^ 1),
        mr_stag: Stag(mr.lkey()),
        addr: mr.remote().addr,
        len: 64,
        access: Access::REMOTE_WRITE,
    };
    let wr = SendWr::new(99, SendOp::Bind(bind), &[]);
    qp.post_send(&[wr.signaled()]).unwrap();
    bind.new_stag
}

fn next_completion(cq: &CompletionQueue) -> Cqe {
    let mut done = [Cqe::default()];
    cq.wait(&mut done, WAIT).unwrap();
    done[0]
}

/// Messages that the server of [`every_opcode`] receives.
const RECEIVES: u64 = 8;

/// Serves the client of [`every_opcode`]. Returns the counters of its connection.
fn serve_every_opcode(ctx: &Context, listener: &ListeningId) -> Counters {
    let pd = ProtectionDomain::new(ctx);
    let cq = ctx.create_cq(64, None).unwrap();
    let access = Access::all() - Access::ZERO_BASED;
    let memory = pd.reg_mr(SIZE, access).unwrap();
    let request = listener.accept(WAIT).unwrap();
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
    let sink = pd.reg_mr(SIZE, Access::LOCAL_WRITE).unwrap();
    for wr_id in 0..RECEIVES {
        let sges = &[sink.sge(..).unwrap()];
        qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
    }
    let parameters = ConnectionParameters {
        private_data: memory.remote().to_bytes().to_vec(),
        ..ConnectionParameters::default()
    };
    let connection = request.accept(qp, &parameters).unwrap();
    // The Send contains the STags of the windows. It is posted after the Binds, so the windows are
    // bound when it arrives.
    let windows = [(); 2].map(|()| bind(ctx, &pd, &connection, &memory));
    let stags = windows.map(|window| window.0.to_be_bytes()).concat();
    connection
        .post_send(&[SendWr::inline(99, &[&stags])])
        .unwrap();
    for _ in windows {
        let done = next_completion(&cq);
        assert_eq!((done.wr_id, done.status), (99, WcStatus::Success));
    }
    for _ in 0..RECEIVES {
        let done = next_completion(&cq);
        let fault = connection.fault();
        assert_eq!(done.status, WcStatus::Success, "{done:?}, {fault:?}");
    }
    // The client's last request is a protection violation, so the connection ends with an error.
    let end = connection.wait_disconnected(WAIT).unwrap_err();
    assert!(matches!(end, iwarp::Error::ConnectionLost(_)), "{end}");
    for window in windows {
        ctx.deallocate_window(window).unwrap();
    }
    connection.counters()
}

/// Posts every operation once, and then a Read outside of the server's memory, which ends the
/// connection. `window` returns the STag of a window.
fn request_every_opcode(
    connection: &iwarp::runtime::QueuePair,
    cq: &CompletionQueue,
    local: &MemoryRegion,
    memory: RemoteMemory,
    window: impl Fn(usize) -> u32,
) {
    let (remote_addr, rkey) = (memory.addr, memory.rkey);
    let (large, small, word) = (
        [local.sge(..SIZE - 1).unwrap()],
        [local.sge(3..104).unwrap()],
        [local.sge(8..16).unwrap()],
    );
    let write_imm = SendOp::WriteImm {
        remote_addr,
        rkey,
        imm: 7,
    };
    let swap = SendOp::CmpSwap {
        remote_addr,
        rkey,
        compare: 1,
        swap: 2,
        compare_mask: u64::MAX,
        swap_mask: u64::MAX,
    };
    let invalidate = |i: usize| SendOp::SendInv(window(i));
    for wr in [
        SendWr::write(0, remote_addr, rkey, &large),
        SendWr::read(0, remote_addr, rkey, &large),
        SendWr::write(0, remote_addr, rkey, &[]),
        SendWr::read(0, remote_addr, rkey, &[]),
        SendWr::send(0, &large),
        SendWr::send(0, &small).solicited(),
        SendWr::new(0, invalidate(0), &small),
        SendWr::new(0, invalidate(1), &small).solicited(),
        SendWr::new(0, SendOp::SendImm(5), &small),
        SendWr::new(0, SendOp::SendImm(6), &[]).solicited(),
        SendWr::new(0, write_imm, &small),
        SendWr::new(0, write_imm, &large).solicited(),
        SendWr::fetch_add(0, remote_addr, rkey, 3, &word),
        SendWr::new(0, swap, &word),
    ] {
        connection.post_send(&[wr.signaled()]).unwrap();
        let done = next_completion(cq);
        assert_eq!(done.status, WcStatus::Success, "{:?}", wr.op);
    }
    // This Read is outside the region, so the server answers with a Terminate.
    let outside = SendWr::read(0, remote_addr + SIZE as u64, rkey, &small);
    connection.post_send(&[outside.signaled()]).unwrap();
    assert_eq!(next_completion(cq).status, WcStatus::RemoteAccess);
}

/// Uses every operation once between two ends in this process, and ends with a Terminate.
fn every_opcode(ip: &str, markers: bool, crc: bool, file: &Path) {
    let mut config = Config::default();
    config.crc = crc;
    config.markers = markers;
    config.capture = Some(file.to_path_buf());
    // Smaller than loopback's segments, so that large messages have several segments.
    config.mss = Some(9000);
    let ip = ip.parse().unwrap();
    let ctx = Context::open(&Device::by_address(ip).unwrap(), config).unwrap();
    let listener = ListeningId::bind(&ctx, SocketAddr::new(ip, 0)).unwrap();
    let address = listener.local_addr();
    let server = std::thread::spawn({
        let ctx = ctx.clone();
        move || serve_every_opcode(&ctx, &listener)
    });

    let pd = ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(64, None).unwrap();
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
    let stags = pd.reg_mr(8, Access::LOCAL_WRITE).unwrap();
    let sges = &[stags.sge(..).unwrap()];
    qp.post_recv(&[RecvWr { wr_id: 0, sges }]).unwrap();
    let connection = Connector::new(&ctx).connect(address, qp).unwrap();
    let memory = RemoteMemory::from_bytes(connection.private_data()).unwrap();
    assert_eq!(next_completion(&cq).status, WcStatus::Success);
    let stags = stags.to_vec(..).unwrap();
    let window = |i: usize| u32::from_be_bytes(stags[4 * i..][..4].try_into().unwrap());
    let local = pd.reg_mr(SIZE, Access::LOCAL_WRITE).unwrap();
    local.write_at(0, &noise(SIZE)).unwrap();
    request_every_opcode(&connection, &cq, &local, memory, window);
    drop(connection);
    let counters = server.join().unwrap();
    assert_eq!((counters.terminates_sent, counters.crc_errors), (1, 0));
    ctx.flush_capture().unwrap();
}

#[test]
fn every_opcode_is_decoded() {
    for ip in ["127.0.0.1", "::1"] {
        for markers in [false, true] {
            for crc in [true, false] {
                let t = Scratch::new();
                let file = t.path("run.pcapng");
                every_opcode(ip, markers, crc, &file);
                println!("{ip} markers {markers} CRC {crc}");
                let Some(decoded) = capture::check(&file, markers, crc, false) else {
                    return;
                };
                let opcodes = decoded.opcodes();
                assert!(opcodes.iter().copied().eq(0..=11), "{opcodes:?}");
            }
        }
    }
}

/// A request that violates a rule.
struct Violation {
    name: &'static str,
    /// The client's access to the server's memory.
    access: Access,
    /// Length of the server's receive, if it posts one.
    receive: Option<usize>,
    /// Posts the request, given the client's queue pair and memory, and the server's memory.
    post: fn(&iwarp::runtime::QueuePair, &MemoryRegion, RemoteMemory),
    /// Layer, type and code of the Terminate that answers the request.
    terminate: [u8; 3],
}

const VIOLATIONS: &[Violation] = &[
    Violation {
        name: "Write with a wrong key",
        access: Access::REMOTE_WRITE,
        receive: None,
        post: |qp, memory, to| write(qp, memory, to.addr, to.rkey ^ 1),
        terminate: [1, 1, 0],
    },
    Violation {
        name: "Write beyond the end",
        access: Access::REMOTE_WRITE,
        receive: None,
        post: |qp, memory, to| write(qp, memory, to.addr + 1, to.rkey),
        terminate: [1, 1, 1],
    },
    Violation {
        name: "Write without permission",
        access: Access::REMOTE_READ,
        receive: None,
        post: |qp, memory, to| write(qp, memory, to.addr, to.rkey),
        terminate: [0, 1, 2],
    },
    Violation {
        name: "Read with a wrong key",
        access: Access::REMOTE_READ,
        receive: None,
        post: |qp, memory, to| read(qp, memory, to.addr, to.rkey ^ 1),
        terminate: [0, 1, 0],
    },
    Violation {
        name: "Read beyond the end",
        access: Access::REMOTE_READ,
        receive: None,
        post: |qp, memory, to| read(qp, memory, to.addr + 1, to.rkey),
        terminate: [0, 1, 1],
    },
    Violation {
        name: "Read without permission",
        access: Access::REMOTE_WRITE,
        receive: None,
        post: |qp, memory, to| read(qp, memory, to.addr, to.rkey),
        terminate: [0, 1, 2],
    },
    Violation {
        name: "Send without a receive",
        access: Access::REMOTE_WRITE,
        receive: None,
        post: |qp, memory, _| send(qp, memory),
        terminate: [1, 2, 2],
    },
    Violation {
        name: "Send that is too long",
        access: Access::REMOTE_WRITE,
        receive: Some(MESSAGE_LEN - 1),
        post: |qp, memory, _| send(qp, memory),
        terminate: [1, 2, 5],
    },
];

/// Length of the server's memory and of each message, in bytes.
const MESSAGE_LEN: usize = 64;

fn post(qp: &iwarp::runtime::QueuePair, wr: SendWr<'_>) {
    qp.post_send(&[wr.signaled()]).unwrap();
}

fn write(qp: &iwarp::runtime::QueuePair, memory: &MemoryRegion, addr: u64, rkey: u32) {
    post(qp, SendWr::write(0, addr, rkey, &[memory.sge(..).unwrap()]));
}

fn read(qp: &iwarp::runtime::QueuePair, memory: &MemoryRegion, addr: u64, rkey: u32) {
    post(qp, SendWr::read(0, addr, rkey, &[memory.sge(..).unwrap()]));
}

fn send(qp: &iwarp::runtime::QueuePair, memory: &MemoryRegion) {
    post(qp, SendWr::send(0, &[memory.sge(..).unwrap()]));
}

fn recorded(file: &Path) -> Context {
    let mut config = Config::default();
    config.capture = Some(file.to_path_buf());
    config.receiver_not_ready = ReceiverNotReady::Terminate;
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    Context::open(&device, config).unwrap()
}

/// Returns layer, type and code of the Terminate messages that tshark finds, or `None` if tshark is
/// not installed.
fn terminates(file: &Path) -> Option<Vec<[u8; 3]>> {
    let words = ["-Y", "iwarp_rdma.terminate", "-T", "fields"];
    let fields = [
        "term_layer",
        "term_etype_rdma",
        "term_etype_ddp",
        "term_etype_llp",
        "term_errcode_rdma",
        "term_errcode_ddp_tagged",
        "term_errcode_ddp_untagged",
        "term_errcode_llp",
    ]
    .map(|field| ["-e".to_owned(), format!("iwarp_rdma.{field}")])
    .concat();
    let mut args = words.to_vec();
    args.extend(fields.iter().map(String::as_str));
    let text = capture::tshark(file, &args)?;
    let numbers = |line: &str| -> Vec<u8> {
        let cells = line.split('\t').filter(|cell| !cell.is_empty());
        cells
            .map(|cell| u8::from_str_radix(cell.trim_start_matches("0x"), 16).expect(cell))
            .collect()
    };
    Some(
        text.lines()
            .map(|line| {
                numbers(line)
                    .try_into()
                    .expect("a layer, a type and a code")
            })
            .collect(),
    )
}

#[test]
fn every_terminate_is_decoded() {
    let t = Scratch::new();
    let file = t.path("run.pcapng");
    let ctx = recorded(&file);
    for violation in VIOLATIONS {
        let listener = ListeningId::bind(&ctx, SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr();
        let server = std::thread::spawn({
            let ctx = ctx.clone();
            move || {
                let pd = ProtectionDomain::new(&ctx);
                let cq = ctx.create_cq(8, None).unwrap();
                let memory = pd
                    .reg_mr(MESSAGE_LEN, violation.access | Access::LOCAL_WRITE)
                    .unwrap();
                let request = listener.accept(WAIT).unwrap();
                let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
                if let Some(len) = violation.receive {
                    let sges = &[memory.sge(..len).unwrap()];
                    qp.post_recv(&[RecvWr { wr_id: 0, sges }]).unwrap();
                }
                let parameters = ConnectionParameters {
                    private_data: memory.remote().to_bytes().to_vec(),
                    ..ConnectionParameters::default()
                };
                let connection = request.accept(qp, &parameters).unwrap();
                let _ = connection.wait_disconnected(WAIT);
                // The Terminate may be counted after the end of the connection is reported.
                let sent = || connection.counters().terminates_sent;
                let start = Instant::now();
                while sent() == 0 && Some(start.elapsed()) < WAIT {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sent()
            }
        });
        let pd = ProtectionDomain::new(&ctx);
        let cq = ctx.create_cq(8, None).unwrap();
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
        let connection = Connector::new(&ctx).connect(address, qp).unwrap();
        let remote = RemoteMemory::from_bytes(connection.private_data()).unwrap();
        let local = pd.reg_mr(MESSAGE_LEN, Access::LOCAL_WRITE).unwrap();
        (violation.post)(&connection, &local, remote);
        let _ = connection.wait_disconnected(WAIT);
        drop(connection);
        assert_eq!(server.join().unwrap(), 1, "{}", violation.name);
    }
    ctx.flush_capture().unwrap();
    let Some(seen) = terminates(&file) else {
        return;
    };
    assert!(seen.into_iter().eq(VIOLATIONS.iter().map(|o| o.terminate)));
    let text = capture::tshark(&file, &["-V", "-Y", "iwarp_mpa.fpdu"]).expect("ran before");
    // Three FPDUs per connection: the RTR message of the set-up, the request, and the Terminate.
    assert_eq!(text.matches("(Good CRC32)").count(), 3 * VIOLATIONS.len());
    assert!(!text.contains("Malformed") && !text.contains("Bad CRC32"));
}

/// Causes a Terminate of the MPA layer: a plain TCP socket sends an FPDU with a wrong CRC.
#[test]
fn mpa_terminate_is_decoded() {
    let t = Scratch::new();
    let file = t.path("run.pcapng");
    let ctx = recorded(&file);
    let listener = ListeningId::bind(&ctx, SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let mut peer = TcpStream::connect(listener.local_addr()).unwrap();
    peer.set_read_timeout(WAIT).unwrap();
    // Revision 1 with CRCs and without private data.
    peer.write_all(b"MPA ID Req Frame\x40\x01\0\0").unwrap();
    let pd = ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
    let request = listener.accept(WAIT).unwrap();
    let connection = request
        .accept(qp, &ConnectionParameters::default())
        .unwrap();
    let mut reply = [0; 20];
    peer.read_exact(&mut reply).unwrap();
    // A zero-length Write to STag 1 with its CRC, and then the same Write with a wrong CRC.
    let header = [0, 14, 0xc1, 0x40, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let crc = crc32c::append(0, &header).to_le_bytes();
    for crc in [crc, crc.map(|octet| !octet)] {
        peer.write_all(&[header.as_slice(), &crc].concat()).unwrap();
    }
    let mut rest = Vec::new();
    peer.read_to_end(&mut rest).unwrap();
    drop(peer);
    let _ = connection.wait_disconnected(WAIT);
    assert_eq!(connection.counters().crc_errors, 1);
    drop(connection);
    ctx.flush_capture().unwrap();
    if let Some(seen) = terminates(&file) {
        assert_eq!(seen, [[2, 0, 2]]);
    }
}
