//! Tests of datagrams to multicast groups.

use super::*;

/// Returns the GID of an IPv4 group. Linux has no route for IPv6 groups on the loopback interface.
fn group(last: u8) -> [u8; 16] {
    gid(&format!("239.255.79.{last}"))
}

/// Returns two queue pairs that are attached to these groups. They have a Q_Key of this process, so
/// that they do not receive datagrams of other users of the groups on this host.
fn attached(groups: &[[u8; 16]]) -> [End; 2] {
    let ends = [(); 2].map(|()| End::new("127.0.0.1"));
    for end in &ends {
        end.qp.set_qkey(ends[0].qp.num());
        groups
            .iter()
            .for_each(|group| end.qp.attach_group(*group).unwrap());
    }
    ends
}

/// Sends to a group, or only to `to`.
fn send(from: &End, to: &End, group: Option<[u8; 16]>, octets: &[u8]) {
    let pieces = [octets];
    let wr = UdSendWr {
        to: UdAddress::new(from.gid, group.unwrap_or(to.gid), 0, 1).unwrap(),
        remote_qkey: to.qp.qkey(),
        ..request(to, &pieces)
    };
    from.qp.post_send(&[wr]).unwrap();
}

#[test]
fn group_reaches_attached_qps() {
    // The Q_Key depends on the process, so that another run of the test on this host does not
    // interfere.
    let [.., high, low] = std::process::id().to_be_bytes();
    let group = [
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 255, high, low,
    ];
    let ends: Vec<_> = (0..3).map(|_| End::new("127.0.0.1")).collect();
    for end in &ends {
        end.receive(0, 100);
    }
    for end in &ends[..2] {
        end.qp.attach_group(group).unwrap();
        end.qp.attach_group(group).unwrap();
    }
    let pieces: [&[u8]; 1] = [b"to all"];
    let wr = UdSendWr {
        to: UdAddress::new(ends[0].gid, group, 0, 1).unwrap(),
        remote_qp: MULTICAST_QP,
        ..request(&ends[0], &pieces)
    };
    // The sender is attached, too, and receives the datagram.
    ends[0].qp.post_send(&[wr]).unwrap();
    for end in &ends[..2] {
        let got = end.next();
        let sender = ends[0].qp.num();
        assert_eq!((got.byte_len as usize, got.src_qp()), (GRH + 6, sender));
        let octets = end.octets(0, GRH + 6);
        assert_eq!(octets[GRH..], *b"to all");
        assert_eq!(octets[36..40], group[12..]);
    }
    // If the sender blocks its own datagrams, the other queue pair still receives them.
    ends[0].qp.set_block_self_multicast(true);
    ends.iter().take(2).for_each(|end| end.receive(0, 100));
    ends[0].qp.post_send(&[wr]).unwrap();
    assert_eq!(ends[1].next().byte_len as usize, GRH + 6);
    ends[0].poll_until(|end| end.qp.drops().own == 1);
    // A queue pair that is not attached receives no datagram of the group: the first to arrive is a
    // later one.
    ends[1].qp.detach_group(group).unwrap();
    assert!(ends[1].qp.detach_group(group).is_err());
    ends[1].receive(1, 100);
    ends[0].qp.post_send(&[wr]).unwrap();
    for end in &ends[1..] {
        ends[0].send_to(end, b"you");
        assert_eq!(end.next().byte_len as usize, GRH + 3);
    }
}

#[test]
fn groups_have_limits() {
    let a = End::new("127.0.0.1");
    let group = |n: u8| [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 255, 78, n];
    assert!(a.qp.attach_group(a.gid).is_err(), "no group");
    for n in 0..32 {
        a.qp.attach_group(group(n)).unwrap();
    }
    assert!(a.qp.attach_group(group(32)).is_err());
    a.qp.detach_group(group(9)).unwrap();
    a.qp.attach_group(group(32)).unwrap();
}

#[test]
fn loopback_off_still_receives_others() {
    let [a, b] = attached(&[group(1)]);
    a.qp.set_block_self_multicast(true);
    (0..3).for_each(|slot| a.receive(slot, 100));
    send(&b, &a, Some(group(1)), b"another's");
    assert_eq!(a.next().byte_len as usize, GRH + 9);
    send(&a, &a, Some(group(1)), b"own");
    a.poll_until(|a| a.qp.drops().own == 1);
    send(&a, &a, None, b"to itself alone");
    assert_eq!(a.next().byte_len as usize, GRH + 15);
    send(&a, &a, Some(group(1)), b"own");
    a.poll_until(|a| a.qp.drops().own == 2);
}

#[test]
fn left_group_keeps_other_groups() {
    let [a, b] = attached(&[group(2), group(3), group(4)]);
    for (slot, left) in [(0, 2), (1, 4)] {
        a.receive(slot, 100);
        a.qp.detach_group(group(left)).unwrap();
        send(&b, &a, Some(group(left)), b"nobody");
        send(&b, &a, Some(group(3)), b"heard");
        assert_eq!(a.next().byte_len as usize, GRH + 5);
    }
}
