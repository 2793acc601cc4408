//! Which datagrams to multicast groups are heard.

use super::*;

/// IPv4 alone: Linux has no route for groups of IPv6 on the loopback interface.
fn group(last: u8) -> [u8; 16] {
    gid(&format!("239.255.79.{last}"))
}

/// Two queue pairs that are attached to these groups, with a key of their own: whoever else uses the groups on this host is not heard.
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

/// Sends to a group, or to `to` alone.
fn send(from: &End, to: &End, group: Option<[u8; 16]>, octets: &[u8]) {
    let pieces = [octets];
    let wr = UdSendWr {
        to: UdAddress::new(from.gid, group.unwrap_or(to.gid), 0, 1).unwrap(),
        remote_qkey: to.qp.qkey(),
        ..request(to, &pieces)
    };
    from.qp.post_send(&[wr]).unwrap();
}

/// What it does not want is its own datagrams to groups, and nothing else.
#[test]
fn who_is_deaf_to_itself_hears_others() {
    let [a, b] = attached(&[group(1)]);
    a.qp.set_deaf_to_itself(true);
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
fn who_leaves_a_group_hears_the_others() {
    let [a, b] = attached(&[group(2), group(3), group(4)]);
    for (slot, left) in [(0, 2), (1, 4)] {
        a.receive(slot, 100);
        a.qp.detach_group(group(left)).unwrap();
        send(&b, &a, Some(group(left)), b"nobody");
        send(&b, &a, Some(group(3)), b"heard");
        assert_eq!(a.next().byte_len as usize, GRH + 5);
    }
}
