//! Compares the table with a second implementation of the same rules, which parses a list of
//! changes and attributes.

use super::*;

const STATES: [State; 7] = [Reset, Init, Rtr, Rts, Sqd, Sqe, Error];
const TYPES: [(c_uint, &str); 5] = [
    (QPT_UD, "ud"),
    (QPT_UC, "uc"),
    (QPT_RC, "rc"),
    (QPT_XRC_SEND, "ini"),
    (QPT_XRC_RECV, "tgt"),
];

/// Change, types, required attributes, optional attributes, as in the Linux kernel's documentation
/// and `ibv_modify_qp(3)`.
const LIST: &str = "
init-to-init      ud          ;                                  ; pkey port qkey
init-to-init      uc,rc,ini,tgt ;                                ; pkey port access
reset-to-init     ud          ; pkey port qkey                   ;
reset-to-init     uc,rc,ini,tgt ; pkey port access               ;
init-to-rtr       ud          ;                                  ; pkey qkey
init-to-rtr       uc,ini      ; av mtu qpn rq_psn                ; access pkey
init-to-rtr       rc,tgt      ; av mtu qpn rq_psn dest_rd min_rnr ; access pkey
rtr-to-rts        ud          ; sq_psn                           ; cur qkey
rtr-to-rts        uc          ; sq_psn                           ; cur access migration
rtr-to-rts        rc          ; timeout retry rnr sq_psn rd      ; cur access min_rnr migration
rtr-to-rts        ini         ; timeout retry rnr sq_psn rd      ; cur access migration
rtr-to-rts        tgt         ; timeout sq_psn                   ; cur access min_rnr migration
rts-to-rts        ud          ;                                  ; cur qkey
rts-to-rts        uc,ini      ;                                  ; cur access migration
rts-to-rts        rc,tgt      ;                                  ; cur access migration min_rnr
rts-to-sqd        ud,uc,rc,ini,tgt ;                             ; notify
sqd-to-rts        ud          ;                                  ; cur qkey
sqd-to-rts        uc,ini      ;                                  ; cur access migration
sqd-to-rts        rc,tgt      ;                                  ; cur access migration min_rnr
sqd-to-sqd        ud          ;                                  ; pkey qkey
sqd-to-sqd        uc          ;                                  ; av access pkey migration
sqd-to-sqd        rc          ; ; port av timeout retry rnr rd dest_rd access pkey min_rnr migration
sqd-to-sqd        ini         ; ; port av timeout retry rnr rd access pkey migration
sqd-to-sqd        tgt         ; ; port av timeout dest_rd access pkey min_rnr migration
sqe-to-rts        ud          ;                                  ; cur qkey
sqe-to-rts        uc          ;                                  ; cur access
sqe-to-rts        rc,ini,tgt  ;                                  ;
";

fn bits(words: &str) -> c_uint {
    let bit = |word| match word {
        "cur" => 1,
        "notify" => 2,
        "access" => 3,
        "pkey" => 4,
        "port" => 5,
        "qkey" => 6,
        "av" => 7,
        "mtu" => 8,
        "timeout" => 9,
        "retry" => 10,
        "rnr" => 11,
        "rq_psn" => 12,
        "rd" => 13,
        "min_rnr" => 15,
        "sq_psn" => 16,
        "dest_rd" => 17,
        "migration" => 18,
        "qpn" => 20,
        other => panic!("no attribute is called {other}"),
    };
    words.split_whitespace().map(|word| 1 << bit(word)).sum()
}

fn name(state: State) -> &'static str {
    ["reset", "init", "rtr", "rts", "sqd", "sqe", "error"][STATES
        .iter()
        .position(|s| *s == state)
        .expect("all states are listed")]
}

fn in_list(kind: &str, from: State, to: State) -> Option<(c_uint, c_uint)> {
    if matches!(to, Reset | Error) {
        return (from != Reset || to != Error).then_some((0, 0));
    }
    let change = format!("{}-to-{}", name(from), name(to));
    LIST.trim().lines().find_map(|line| {
        let (head, attributes) = line.split_once(';')?;
        let (name, types) = head.trim().split_once(' ')?;
        let (required, optional) = attributes.split_once(';')?;
        let same = name == change && types.trim().split(',').any(|t| t == kind);
        same.then(|| (bits(required), bits(optional)))
    })
}

fn expected(face: Face, kind: &str, from: State, to: Option<State>, mask: c_uint) -> bool {
    let lenient = face == Face::Rnic && kind == "rc";
    let next = to.unwrap_or(from);
    let row = match (from, next) {
        (Reset, Error) if face == Face::Rnic => Some((0, 0)),
        (Rtr, Rtr) if lenient && to.is_none() => in_list(kind, Rts, Rts),
        _ => in_list(kind, from, next),
    };
    let Some((required, optional)) = row else {
        return false;
    };
    let mut allowed = 1 | required | optional;
    if lenient {
        allowed |= 1 << 3;
    }
    let cur_fits = mask & 2 == 0 || [Rtr, Rts, Sqd, Sqe].contains(&from);
    cur_fits && mask & !allowed == 0 && (lenient || mask & required == required)
}

/// Bits are independent of each other, so flipping up to two bits of valid masks is enough.
#[test]
fn table_matches_list_for_every_call() {
    let (mut calls, mut allowed) = (0, 0);
    for face in [Face::Rnic, Face::Roce] {
        for (qp_type, kind) in TYPES {
            for from in STATES {
                for to in STATES.map(Some).into_iter().chain([None]) {
                    let state = c_uint::from(to.is_some());
                    let base = in_list(kind, from, to.unwrap_or(from));
                    let (required, optional) = base.unwrap_or_default();
                    for valid in [required, required | optional, 0] {
                        for bit in 0..=25 {
                            for other in 0..=25 {
                                let flipped = valid ^ (1 << bit) ^ (1 << other);
                                let mask = flipped & !1 | state;
                                let ok = check(face, qp_type, from, to, mask) == Ok(());
                                let want = expected(face, kind, from, to, mask);
                                assert_eq!(ok, want, "{face:?} {kind} {from:?} {to:?} {mask:#x}");
                                calls += 1;
                                allowed += usize::from(ok);
                            }
                        }
                    }
                }
            }
        }
    }
    // Neither the list nor the table is empty.
    assert!(
        allowed > 10_000 && calls > 10 * allowed,
        "{allowed} of {calls}"
    );
}

/// Programs such as perftest pass the same mask to both ends.
#[test]
fn xrc_mask_drops_other_ends_attributes() {
    let to_rtr = QP_STATE | PATH | RESPONDER;
    let to_rts = QP_STATE | QP_SQ_PSN | QP_TIMEOUT | REQUESTER;
    for face in [Face::Rnic, Face::Roce] {
        for qp_type in [QPT_RC, QPT_XRC_SEND, QPT_XRC_RECV] {
            for (from, to, mask) in [(Init, Rtr, to_rtr), (Rtr, Rts, to_rts)] {
                let mask = relevant(qp_type, mask);
                assert_eq!(check(face, qp_type, from, Some(to), mask), Ok(()));
            }
        }
    }
    assert_eq!(relevant(QPT_UC, to_rtr), to_rtr);
}

#[test]
fn unknown_attributes_are_unsupported() {
    for face in [Face::Rnic, Face::Roce] {
        for bit in 21..32 {
            let mask = 1 | 1 << bit;
            assert_eq!(check(face, QPT_RC, Rts, Some(Rts), mask), Err(UNSUPPORTED));
        }
    }
    // Connections have no Q_Key, sizes cannot change, and the alternate path is not supported.
    for bit in [6, 14, 19] {
        let refused = check(Face::Rnic, QPT_RC, Rts, Some(Rts), 1 | 1 << bit);
        assert_eq!(refused, Err(EINVAL));
    }
}
