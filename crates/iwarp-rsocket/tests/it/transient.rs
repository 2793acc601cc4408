//! Test of `connect` after an attempt that failed for lack of memory or descriptors.

use crate::common::{Rs, alone_with, listener};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;

#[test]
fn connect_works_after_transient_failure() {
    // The last rule is for the second client. It does not count the queue pair that the rule before
    // it refused, and the first connection creates two.
    let rules = "create=mr,nth=1,errno=ENOMEM;create=cq,nth=1,errno=EMFILE;\
                 create=qp,nth=1,errno=ENOMEM;create=qp,nth=3,errno=EMFILE";
    // The failures affect the whole process.
    alone_with(
        "connect_works_after_transient_failure",
        &[("IWARP_FAULT", rules)],
        || {
            let (l, address) = listener(|_| {});
            let unbound: &[i32] = &[libc::ENOMEM, libc::EMFILE, libc::ENOMEM];
            for (is_bound, failures) in [(false, unbound), (true, &[libc::EMFILE])] {
                let client = Rs::new();
                if is_bound {
                    rs::bind(client.0, "127.0.0.1:0".parse().unwrap()).unwrap();
                }
                let local = rs::local_address(client.0).unwrap();
                for errno in failures {
                    assert_eq!(rs::connect(client.0, address), Err(Errno(*errno)));
                }
                rs::connect(client.0, address).unwrap();
                let (server, peer) = rs::accept(l.0).unwrap();
                let server = Rs(server);
                if is_bound {
                    assert_eq!(peer, Some(local));
                }
                client.send_all(b"works");
                assert_eq!(server.recv_n(5), b"works");
            }
        },
    );
}
