//! Ownership of windows, and the release of their regions when they are invalidated.

use super::harness::*;
use crate::memory::{AccessError, Accessor, MemoryError, WindowType};
use crate::{Access, Bind, FastRegister, SendOp};
use iwarp_proto::ddp::Stag;

fn window(rig: &mut Rig, ty: WindowType) -> Stag {
    let random = rig.random();
    rig.table.allocate_window(ty, PD, random).unwrap()
}

fn bind(mw: Stag, mr: &Mr) -> Bind {
    Bind {
        mw_stag: mw,
        new_stag: mw,
        mr_stag: Stag(mr.stag),
        addr: mr.at,
        len: u64::from(mr.len),
        access: Access::REMOTE_WRITE | Access::REMOTE_READ,
    }
}

#[test]
fn region_is_free_after_last_window() {
    type End = fn(&mut Rig, Stag, &Mr);
    let ends: [(WindowType, End); 6] = [
        (WindowType::Type2, |rig, mw, _| {
            rig.post(9, SendOp::LocalInvalidate { stag: mw }, &[]);
            assert!(rig.sent().is_empty());
        }),
        (WindowType::Type2, |rig, mw, _| {
            rig.recv(1, &[]);
            let _ = rig.rx_ulpdu(&send_inv(mw.0, &[]));
            assert_eq!(rig.host.recvs.len(), 1);
        }),
        (WindowType::Type2, |rig, mw, _| {
            rig.table.deallocate_window(mw).unwrap();
        }),
        (WindowType::Type1, |rig, mw, _| {
            rig.table.deallocate_window(mw).unwrap();
        }),
        (WindowType::Type1, |rig, mw, mr| {
            let nothing = Bind {
                len: 0,
                ..bind(mw, mr)
            };
            let accessor = rig.qp.accessor();
            rig.table.bind(&nothing, accessor).unwrap();
        }),
        (WindowType::Type1, |rig, mw, _| {
            let (other, accessor) = (rig.mr(8, ALL), rig.qp.accessor());
            rig.table.bind(&bind(mw, &other), accessor).unwrap();
            let busy = rig.table.deregister(Stag(other.stag));
            assert_eq!(busy.unwrap_err(), MemoryError::Busy);
        }),
    ];
    for (ty, end) in ends {
        let mut rig = Rig::new();
        let (mr, accessor) = (rig.mr(64, ALL), rig.qp.accessor());
        let (first, second) = (window(&mut rig, ty), window(&mut rig, ty));
        for mw in [first, second] {
            rig.table.bind(&bind(mw, &mr), accessor).unwrap();
        }
        for mw in [second, first] {
            let busy = rig.table.deregister(Stag(mr.stag));
            assert_eq!(busy.unwrap_err(), MemoryError::Busy);
            end(&mut rig, mw, &mr);
            let access = rig
                .table
                .permits((mw, mr.at, 1), Access::REMOTE_READ, accessor);
            // The window may have been bound to other memory.
            let errors = [AccessError::InvalidStag, AccessError::BaseOrBounds];
            assert!(errors.contains(&access.unwrap_err()));
            if mw == second && ty == WindowType::Type2 {
                // Each message of the peer is the first message of a new stream.
                rig.qp
                    .modify(crate::qp::State::Reset, &mut rig.host)
                    .unwrap();
                rig.qp.stream_gone(&mut rig.host);
                rig.host = TestHost::default();
                rig.start(STREAM);
            }
        }
        assert!(rig.table.deregister(Stag(mr.stag)).is_ok(), "{ty:?}");
    }
}

/// Removed entries are not counted, and their slots are reused.
#[test]
fn table_counts_entries() {
    let mut rig = Rig::new();
    assert!(rig.table.is_empty());
    let (mr, accessor) = (rig.mr(64, ALL), rig.qp.accessor());
    let windows = [WindowType::Type1, WindowType::Type2].map(|ty| window(&mut rig, ty));
    assert_eq!((rig.table.len(), rig.table.is_empty()), (3, false));
    rig.table.bind(&bind(windows[0], &mr), accessor).unwrap();
    for (mw, left) in windows.into_iter().zip([2, 1]) {
        assert!(rig.table.info(mw).is_some());
        assert_eq!(rig.table.deallocate_window(mw), Ok(()));
        assert_eq!((rig.table.info(mw), rig.table.len()), (None, left));
        let repeated = rig.table.deallocate_window(mw);
        assert_eq!(repeated, Err(MemoryError::NoSuchStag));
        let refused = rig.table.bind(&bind(mw, &mr), accessor);
        assert_eq!(refused, Err(MemoryError::NoSuchStag));
    }
    let region = rig.table.deallocate_window(Stag(mr.stag));
    assert_eq!(region, Err(MemoryError::NoSuchStag));
    assert!(rig.table.deregister(Stag(mr.stag)).is_ok());
    assert!(rig.table.is_empty());
}

/// The first error in this order is returned, because it determines the code of the Terminate.
#[test]
fn refusal_reasons_have_order() {
    let mut rig = Rig::new();
    let (mr, accessor) = (rig.mr(64, Access::REMOTE_READ), rig.qp.accessor());
    let foreign = Accessor {
        pd: accessor.pd + 1,
        ..accessor
    };
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    let cases = [
        (mr.stag ^ 1, foreign, write, 65, AccessError::InvalidStag),
        (mr.stag, foreign, write, 65, AccessError::NotAssociated),
        (mr.stag, foreign, read, 65, AccessError::NotAssociated),
        (mr.stag, accessor, write, 65, AccessError::AccessDenied),
        (
            mr.stag,
            accessor,
            read | write,
            64,
            AccessError::AccessDenied,
        ),
        (mr.stag, accessor, read, 65, AccessError::BaseOrBounds),
    ];
    for (stag, accessor, right, len, error) in cases {
        let access = rig.table.permits((Stag(stag), mr.at, len), right, accessor);
        assert_eq!(access, Err(error));
        let access = rig.table.check(Stag(stag), mr.at, len, right, accessor);
        assert_eq!(access.err(), Some(error));
    }
}

#[test]
fn invalid_registrations_are_refused() {
    let mut rig = Rig::new();
    let register = |rig: &mut Rig, iova, access| {
        let (range, random) = (rig.range(64), rig.random());
        rig.table.register(range, iova, PD, access, random)
    };
    let outside = Err(MemoryError::OutOfRange);
    assert_eq!(register(&mut rig, u64::MAX - 62, ALL), outside);
    assert!(register(&mut rig, u64::MAX - 64, ALL).is_ok());
    let zero_based = ALL | Access::ZERO_BASED;
    assert!(register(&mut rig, u64::MAX, zero_based).is_ok());
    for right in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        assert_eq!(register(&mut rig, 0, right), Err(MemoryError::BadAccess));
        let (range, random) = (rig.range(64), rig.random());
        let stag = rig.table.allocate_fast(range, PD, random).unwrap();
        let mut fast = FastRegister {
            new_stag: stag,
            offset: 0,
            len: 64,
            iova: 0,
            access: right,
            pages: None,
        };
        let refused = rig.table.fast_register(&fast, PD);
        assert_eq!(refused, Err(MemoryError::BadAccess));
        fast.access |= Access::LOCAL_WRITE;
        for iova in [u64::MAX - 62, u64::MAX] {
            fast.iova = iova;
            let refused = rig.table.fast_register(&fast, PD);
            assert_eq!(refused, Err(MemoryError::OutOfRange));
        }
        fast.iova = u64::MAX - 64;
        for (offset, len) in [(1, 64), (64, 1), (u64::MAX, 2), (0, 65)] {
            (fast.offset, fast.len) = (offset, len);
            let refused = rig.table.fast_register(&fast, PD);
            assert_eq!(refused, Err(MemoryError::OutOfRange));
        }
        (fast.offset, fast.len) = (4, 60);
        assert_eq!(rig.table.fast_register(&fast, PD), Ok(()));
    }
}

#[test]
fn window_types_differ_in_scope() {
    let mut rig = Rig::new();
    let (mr, accessor) = (rig.mr(64, ALL), rig.qp.accessor());
    let other = Accessor {
        qp: accessor.qp + 1,
        ..accessor
    };
    let foreign = Accessor {
        pd: accessor.pd + 1,
        ..accessor
    };
    for ty in [WindowType::Type1, WindowType::Type2] {
        let mw = window(&mut rig, ty);
        rig.table.bind(&bind(mw, &mr), accessor).unwrap();
        for right in [Access::REMOTE_READ, Access::REMOTE_WRITE] {
            let access = |accessor| rig.table.permits((mw, mr.at, 64), right, accessor);
            assert_eq!(access(accessor), Ok(()));
            let refused = Err(AccessError::NotAssociated);
            assert_eq!(access(foreign), refused);
            let is_bound_to_qp = ty == WindowType::Type2;
            assert_eq!(access(other), if is_bound_to_qp { refused } else { Ok(()) });
            // The key of a zero-length access is not checked.
            let nothing = rig.table.permits((mw, mr.at, 0), right, foreign);
            assert_eq!(nothing, Ok(()));
        }
        let atomic = rig
            .table
            .permits((mw, mr.at, 8), Access::REMOTE_ATOMIC, accessor);
        assert_eq!(atomic, Err(AccessError::AccessDenied));
        for (at, len) in [
            (mr.at, 65),
            (mr.at + 63, 2),
            (mr.at - 1, 1),
            (mr.at + 64, 1),
        ] {
            let outside = rig
                .table
                .permits((mw, at, len), Access::REMOTE_READ, accessor);
            assert_eq!(outside, Err(AccessError::BaseOrBounds), "{at} {len}");
        }
        let wraps = rig
            .table
            .permits((mw, u64::MAX, 2), Access::REMOTE_READ, accessor);
        assert_eq!(wraps, Err(AccessError::ToWrap));
    }
}

/// Owner, range and rights depend on the last bind only.
#[test]
fn window_keeps_nothing_of_earlier_bind() {
    for ty in [WindowType::Type1, WindowType::Type2] {
        let mut rig = Rig::new();
        let (before, mr) = (rig.mr(64, ALL), rig.mr(64, ALL));
        let first = rig.qp.accessor();
        let second = Accessor {
            qp: first.qp + 1,
            ..first
        };
        let mw = window(&mut rig, ty);
        let zero_based = Bind {
            access: ALL | Access::ZERO_BASED,
            ..bind(mw, &before)
        };
        rig.table.bind(&zero_based, first).unwrap();
        let used = rig.table.permits((mw, 0, 64), ALL & Access::REMOTE, first);
        assert_eq!(used, Ok(()));
        if ty == WindowType::Type2 {
            assert_eq!(rig.table.invalidate(mw, first, true), Ok(true));
        }
        let rebound = mw.with_key(mw.key().wrapping_add(1));
        let less = Bind {
            new_stag: rebound,
            addr: mr.at + 8,
            len: 16,
            access: Access::REMOTE_READ,
            ..bind(mw, &mr)
        };
        rig.table.bind(&less, second).unwrap();
        let permits =
            |stag, at, len, right, accessor| rig.table.permits((stag, at, len), right, accessor);
        let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
        let (begin, outside) = (mr.at + 8, Err(AccessError::BaseOrBounds));
        assert_eq!(permits(rebound, begin, 16, read, second), Ok(()));
        assert_eq!(permits(rebound, begin, 17, read, second), outside);
        assert_eq!(permits(rebound, begin - 1, 1, read, second), outside);
        assert_eq!(permits(rebound, 0, 1, read, second), outside);
        let denied = Err(AccessError::AccessDenied);
        assert_eq!(permits(rebound, begin, 1, write, second), denied);
        let invalid = Err(AccessError::InvalidStag);
        assert_eq!(permits(mw, begin, 1, read, second), invalid);
        let not_owner = match ty {
            WindowType::Type1 => Ok(()),
            WindowType::Type2 => Err(AccessError::NotAssociated),
        };
        assert_eq!(permits(rebound, begin, 1, read, first), not_owner);
        // The region of the first bind is free.
        assert!(rig.table.deregister(Stag(before.stag)).is_ok());
        let busy = rig.table.deregister(Stag(mr.stag));
        assert_eq!(busy.unwrap_err(), MemoryError::Busy);
        if ty == WindowType::Type2 {
            let not_owner = rig.table.invalidate(rebound, first, true);
            assert_eq!(not_owner, Err(AccessError::NotAssociated));
            assert_eq!(rig.table.invalidate(rebound, second, true), Ok(true));
        }
    }
}
