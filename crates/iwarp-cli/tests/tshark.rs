//! What we send, seen by Wireshark: recordings of our own decode without a malformed frame, with every CRC good and every
//! octet accounted for, and to the same FPDUs as with our own decoder.

#[path = "common/capture.rs"]
mod capture;
mod common;

use common::{Scratch, noise, serve, str, succeed};
use iwarp::cm::{ConnectionParameters, Connector, Listener};
use iwarp::{
    Access, Bind, CompletionQueue, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain,
    RecvWr, RemoteMemory, SendOp, SendWr, WcStatus, WindowType,
};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// A file of 64 MiB through `iwarp cp`; the first 4 MB of it are recorded.
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
    // RDMA Writes and Sends, and the zero-length Write of the set-up.
    assert!(
        decoded.opcodes().into_iter().eq([0, 3]),
        "{:?}",
        decoded.opcodes()
    );
    println!(
        "{} FPDUs, {} of them beyond tshark",
        decoded.fpdus.values().map(Vec::len).sum::<usize>(),
        decoded.beyond_tshark
    );
}

#[test]
fn a_copy_with_crc() {
    copy(false);
}

#[test]
fn a_copy_with_crc_and_markers() {
    copy(true);
}

const SIZE: usize = 200_000;
const WAIT: Option<Duration> = Some(Duration::from_secs(20));

/// Binds a memory window to a region; only windows can be invalidated by the peer.
fn bind(
    ctx: &Context,
    pd: &ProtectionDomain,
    qp: &iwarp::raw::QueuePair,
    mr: &MemoryRegion,
) -> u32 {
    let mw_stag = ctx.allocate_window(WindowType::Type2, pd.number()).unwrap();
    let bind = Bind {
        mw_stag,
        new_stag: mw_stag ^ 1,
        mr_stag: mr.lkey(),
        addr: mr.remote().addr,
        len: 64,
        access: Access::REMOTE_WRITE,
    };
    let wr = SendWr::new(99, SendOp::Bind(bind), &[]);
    qp.post_send(&[wr.signaled()]).unwrap();
    bind.new_stag
}

fn next(cq: &CompletionQueue) -> Cqe {
    let mut done = [Cqe::default()];
    cq.wait(&mut done, WAIT).unwrap();
    done[0]
}

/// Uses every operation once, both ends in this process, and ends with a Terminate.
fn every_opcode(ip: &str, markers: bool, crc: bool, file: &Path) {
    let mut config = Config::default();
    config.crc = crc;
    config.markers = markers;
    config.capture = Some(file.to_path_buf());
    // So that messages have several segments even on loopback.
    config.mss = Some(9000);
    let device = Device::by_address(ip.parse().unwrap()).unwrap();
    let ctx = Context::open(&device, config).unwrap();
    let listener = Listener::bind(&ctx, SocketAddr::new(device.ip, 0)).unwrap();
    let address = listener.local_addr();
    let receives = 8;
    let server = std::thread::spawn({
        let ctx = ctx.clone();
        move || {
            let pd = ProtectionDomain::new(&ctx);
            let cq = ctx.create_cq(64, None).unwrap();
            let access = Access::all() - Access::ZERO_BASED;
            let memory = pd.allocate(SIZE, access).unwrap();
            let request = listener.accept(WAIT).unwrap();
            let qp = pd.queue_pair().build(&cq, &cq).unwrap();
            let sink = pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap();
            for wr_id in 0..receives {
                let sges = &[sink.sge(..).unwrap()];
                qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
            }
            let parameters = ConnectionParameters {
                private_data: memory.remote().to_bytes().to_vec(),
                ..ConnectionParameters::default()
            };
            let connection = request.accept(qp, &parameters).unwrap();
            // The client hears of the windows when they are bound: in the completion's order, a Send later.
            let windows = [(); 2].map(|()| bind(&ctx, &pd, &connection, &memory));
            let told = windows.map(u32::to_be_bytes).concat();
            connection
                .post_send(&[SendWr::inline(99, &[&told])])
                .unwrap();
            for _ in windows {
                let done = next(&cq);
                assert_eq!((done.wr_id, done.status), (99, WcStatus::Success));
            }
            for _ in 0..receives {
                let done = next(&cq);
                let fault = connection.fault();
                assert_eq!(done.status, WcStatus::Success, "{done:?}, {fault:?}");
            }
            // The client's last request is an offence.
            let end = connection.wait_disconnected(WAIT).unwrap_err();
            assert!(matches!(end, iwarp::Error::ConnectionLost(_)), "{end}");
            for window in windows {
                ctx.deallocate_window(window).unwrap();
            }
            connection.counters()
        }
    });

    let pd = ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(64, None).unwrap();
    let qp = pd.queue_pair().build(&cq, &cq).unwrap();
    let told = pd.allocate(8, Access::LOCAL_WRITE).unwrap();
    let sges = &[told.sge(..).unwrap()];
    qp.post_recv(&[RecvWr { wr_id: 0, sges }]).unwrap();
    let connection = Connector::new(&ctx).connect(address, qp).unwrap();
    let memory = RemoteMemory::from_bytes(connection.private_data()).unwrap();
    assert_eq!((next(&cq).status, told.len()), (WcStatus::Success, 8));
    let told = told.to_vec(..).unwrap();
    let window = |i: usize| u32::from_be_bytes(told[4 * i..][..4].try_into().unwrap());
    let local = pd.allocate(SIZE, Access::LOCAL_WRITE).unwrap();
    local.write_at(0, &noise(SIZE)).unwrap();
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
        let done = next(&cq);
        assert_eq!(done.status, WcStatus::Success, "{:?}", wr.op);
    }
    // Outside the region: the server answers by a Terminate.
    let outside = SendWr::read(0, remote_addr + SIZE as u64, rkey, &small);
    connection.post_send(&[outside.signaled()]).unwrap();
    assert_eq!(next(&cq).status, WcStatus::RemoteAccess);
    drop(connection);
    let counters = server.join().unwrap();
    assert_eq!((counters.terminates_sent, counters.crc_errors), (1, 0));
    ctx.flush_capture().unwrap();
}

#[test]
fn every_opcode_in_every_kind_of_stream() {
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
