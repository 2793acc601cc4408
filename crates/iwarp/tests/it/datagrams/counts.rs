//! Attributes and counters of datagram queue pairs and their device.

use super::*;
use iwarp_rnic::counters::Counters;

/// Returns the non-zero counters and their names.
fn counted(counters: &Counters) -> Vec<(&'static str, u64)> {
    let all = counters.named().into_iter();
    all.filter(|(_, value)| *value != 0).collect()
}

#[test]
fn counters_count_datagrams() {
    let ctx = context("127.0.0.1");
    let (a, b) = (End::on(&ctx, None), End::on(&ctx, None));
    b.receive(0, 100);
    b.receive(1, 100);
    for octets in [&b"one"[..], b"seven77", b"unheard", b"too"] {
        let pieces = [octets];
        let wr = UdSendWr {
            flags: SendFlags::INLINE | SendFlags::SIGNALED,
            ..request(&b, &pieces)
        };
        a.qp.post_send(&[wr]).unwrap();
    }
    for end in [&a, &a, &a, &a, &b, &b] {
        assert_eq!(end.next().status, WcStatus::Success);
    }
    b.poll_until(|b| b.qp.drops().no_receive == 2);
    // Each datagram has a header of 32 octets.
    let sent = 3 + 7 + 7 + 3;
    let tx = [
        ("tx_bytes", sent + 4 * 32),
        ("tx_fpdus", 4),
        ("tx_messages", 4),
        ("tx_payload", sent),
        ("completions", 4),
    ];
    let rx = [
        ("rx_bytes", sent + 4 * 32),
        ("rx_fpdus", 2),
        ("rx_messages", 2),
        ("rx_payload", 3 + 7),
        ("receiver_not_ready", 2),
        ("completions", 2),
    ];
    assert_eq!(counted(&a.qp.counters()), tx);
    assert_eq!(counted(&b.qp.counters()), rx);
    // The device's counters include destroyed queue pairs.
    let both = [
        ("tx_bytes", sent + 4 * 32),
        ("rx_bytes", sent + 4 * 32),
        ("tx_fpdus", 4),
        ("rx_fpdus", 2),
        ("tx_messages", 4),
        ("rx_messages", 2),
        ("tx_payload", sent),
        ("rx_payload", 3 + 7),
        ("receiver_not_ready", 2),
        ("completions", 6),
    ];
    assert_eq!(counted(&ctx.counters()), both);
    a.qp.destroy();
    assert_eq!(counted(&ctx.counters()), both);
    drop((a, b));
    // A thread of the engine may still use a destroyed queue pair.
    let start = Instant::now();
    while counted(&ctx.counters()) != both {
        assert!(start.elapsed() < TIMEOUT, "{:?}", ctx.counters());
        std::thread::yield_now();
    }
}

#[test]
fn wrong_checksums_are_counted() {
    let b = End::new("127.0.0.1");
    b.receive(0, 100);
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to: SocketAddr = ([127, 0, 0, 1], b.qp.num() as u16).into();
    let header = Header {
        destination: b.qp.num(),
        source: u32::from(stranger.local_addr().unwrap().port()),
        qkey: QKEY,
        immediate: None,
        solicited: false,
        sequence: 5,
    };
    for len in 1..3 {
        let mut datagram = vec![0x77; HEADER_LEN + len];
        header.seal(append, &mut datagram).unwrap();
        datagram[HEADER_LEN] ^= 1;
        stranger.send_to(&datagram, to).unwrap();
    }
    b.poll_until(|b| b.qp.drops().crc == 2);
    assert_eq!(
        counted(&b.qp.counters()),
        [("rx_bytes", 2 * 32 + 1 + 2), ("crc_errors", 2)]
    );
}

#[test]
fn qp_reports_its_attributes() {
    let ctx = context("127.0.0.1");
    let cq = ctx.create_cq(16, None).unwrap();
    let pds = [(); 3].map(|()| ctx.allocate_pd());
    let qps = pds.map(|pd| ctx.create_ud_qp(&attributes(pd, &cq)).unwrap());
    assert_eq!(qps.each_ref().map(UdQueuePair::pd), pds);
    for (index, qp) in qps.iter().enumerate() {
        assert_eq!((qp.user_data(), qp.qkey()), (0, 0));
        qp.set_user_data(70 + index as u64);
        qp.set_qkey(90 + index as u32);
        assert!(format!("{qp:?}").contains(&qp.num().to_string()));
        assert!(qp.is_same(&qp.clone()) && !qp.is_same(&qps[(index + 1) % 3]));
    }
    assert_eq!(qps.each_ref().map(UdQueuePair::user_data), [70, 71, 72]);
    assert_eq!(qps.each_ref().map(UdQueuePair::qkey), [90, 91, 92]);
}
