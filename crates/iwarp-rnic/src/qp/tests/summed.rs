//! Each sent octet is read for the CRC only once, however a message is sent. Tests count the octets
//! that are *summed*: passed to a CRC function.
#![allow(unsafe_code)]

use super::harness::*;
use crate::limits::SUM_COPY_MIN;
use crate::memory::Crc32c;
use crate::qp::*;
use crate::{Access, SendFlags, SendOp, SendWr, Sge};
use iwarp_proto::crc32c;
use iwarp_proto::mpa::framing::{CRC_LEN, MarkerClock, decode_fpdu};
use std::cell::Cell;
use std::vec;
use std::vec::Vec;

std::thread_local! {
    static SUMMED: Cell<u64> = const { Cell::new(0) };
    /// Octets that were summed in place.
    static IN_PLACE: Cell<u64> = const { Cell::new(0) };
    /// Octets that were summed while they were copied.
    static COPYING: Cell<u64> = const { Cell::new(0) };
}

fn counting(crc: u32, octets: &[u8]) -> u32 {
    SUMMED.set(SUMMED.get() + octets.len() as u64);
    crc32c::append(crc, octets)
}

/// # Safety
/// Like [`SharedCrc32cFn`](crate::memory::SharedCrc32cFn). One thread runs these tests, so nobody
/// changes the octets.
unsafe fn counting_in_place(crc: u32, from: *const u8, len: usize) -> Option<u32> {
    IN_PLACE.set(IN_PLACE.get() + len as u64);
    // SAFETY: guaranteed by the caller: the octets are readable.
    Some(counting(crc, unsafe {
        core::slice::from_raw_parts(from, len)
    }))
}

/// # Safety
/// Like [`CopyingCrc32cFn`](crate::memory::CopyingCrc32cFn). One thread runs these tests, so nobody
/// changes the octets.
unsafe fn counting_and_copying(crc: u32, from: *const u8, to: *mut u8, len: usize) -> Option<u32> {
    COPYING.set(COPYING.get() + len as u64);
    // SAFETY: guaranteed by the caller: the octets are readable, and `to` has room for them.
    let octets = unsafe {
        to.copy_from_nonoverlapping(from, len);
        core::slice::from_raw_parts(to, len)
    };
    Some(counting(crc, octets))
}

/// The CRC functions, and whether they sum in place, and while copying.
const CRCS: [(Crc32c, bool, bool); 3] = [
    (COPIED_CRC, false, false),
    (IN_PLACE_CRC, true, false),
    (COPYING_CRC, true, true),
];

const COPIED_CRC: Crc32c = Crc32c::new(counting);
// SAFETY: the function reads only the given bytes.
const IN_PLACE_CRC: Crc32c = unsafe { COPIED_CRC.with_shared(counting_in_place) };
// SAFETY: the function reads and writes only the given bytes.
const COPYING_CRC: Crc32c = unsafe { IN_PLACE_CRC.with_copying(counting_and_copying) };

/// Shorter messages are summed after the copy.
const SHORT: u64 = SUM_COPY_MIN as u64;

/// Sends everything, and checks that each octet covered by a CRC is summed once. Returns how many
/// octets were summed in place.
fn assert_summed_once(rig: &mut Rig, crc32c: Crc32c) -> u64 {
    SUMMED.set(0);
    IN_PLACE.set(0);
    COPYING.set(0);
    let before = *rig.qp.counters();
    let mut octets = Vec::new();
    while rig.qp.wants_tx() {
        let mut env = Env {
            memory: &rig.table,
            crc32c,
            host: &mut rig.host,
        };
        assert_eq!(rig.qp.tx_fill(&mut rig.plan, &mut env), TxFill::Ready);
        octets.extend(rig.write_some(1 << 20));
    }
    let fpdus = rig.qp.counters().tx_fpdus - before.tx_fpdus;
    assert!(fpdus > 0);
    let covered = octets.len() as u64 - fpdus * CRC_LEN as u64;
    assert_eq!(SUMMED.get(), covered, "of {fpdus} FPDUs");
    // Decoding checks the CRCs.
    let (mut at, mut clock, mut ulpdu) = (0, MarkerClock::new(), vec![0; 65_536]);
    while at < octets.len() {
        at += decode_fpdu(&octets[at..], &rig.options, &mut clock, &mut ulpdu)
            .unwrap()
            .consumed;
    }
    IN_PLACE.get()
}

fn rig(markers: bool, emss: u32, snapshot: bool) -> Rig {
    let config = QpConfig {
        snapshot,
        ..QpConfig::default()
    };
    let stream = StreamConfig {
        markers_tx: markers,
        markers_rx: markers,
        emss,
        ..STREAM
    };
    Rig::with(config, stream)
}

#[test]
fn sent_octets_are_summed_once() {
    let long = 200_000;
    for (markers, emss, snapshot) in [
        (false, 1460, false),
        (false, 65_000, false),
        (false, 65_000, true),
        (true, 1460, false),
        (true, 65_000, false),
    ] {
        // Messages of one element and of two: small, of one segment, and of several segments.
        for lens in [
            &[64][..],
            &[40, 24],
            &[3000],
            &[1, 30_000],
            &[long],
            &[100_000, long - 1],
            &[],
        ] {
            let write = SendOp::Write {
                remote_addr: 0,
                rkey: 7,
            };
            for op in [SendOp::Send, write] {
                for (crc32c, in_place_crc, copying) in CRCS {
                    let mut rig = rig(markers, emss, snapshot);
                    let mr = rig.mr(long, Access::LOCAL_WRITE);
                    let sges: Vec<Sge> = lens.iter().map(|len| mr.part(0, *len)).collect();
                    rig.post(1, op, &sges);
                    let in_place = assert_summed_once(&mut rig, crc32c);
                    let total: u64 = lens.iter().map(|len| u64::from(*len)).sum();
                    assert_eq!(rig.qp.counters().tx_payload, total);
                    // Long segments that are not copied are summed in place if possible.
                    let refers = emss > 2048 && !markers && !snapshot && total > 2048;
                    let minimum = total.saturating_sub(2048);
                    match refers && in_place_crc {
                        true => assert!(
                            (minimum..=total).contains(&in_place),
                            "{in_place} of {lens:?}"
                        ),
                        false => assert_eq!(in_place, 0, "{lens:?}"),
                    }
                    // A copied message of one element is summed while copying, except for the last
                    // segment, which may be too short.
                    let copies = copying && !markers && lens.len() == 1;
                    let while_copying = COPYING.get();
                    match copies && !refers && total >= SHORT {
                        true => assert!(
                            (total - SHORT..=total).contains(&while_copying),
                            "{while_copying} of {lens:?}"
                        ),
                        false => assert!(while_copying <= 2048, "{while_copying} of {lens:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn inline_data_are_summed_once() {
    for markers in [false, true] {
        let mut rig = rig(markers, 1460, false);
        let mr = rig.mr(4096, Access::LOCAL_WRITE);
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::INLINE,
            sges: &[],
            inline: &[&[1, 2, 3], &[4; 40]],
        };
        rig.qp.post_send(&wr, &mut rig.host).unwrap();
        rig.post(2, SendOp::SendImm(9), &[mr.part(0, 9)]);
        let read = SendOp::Read {
            remote_addr: 0,
            rkey: 7,
        };
        rig.post(3, read, &[mr.part(0, 10), mr.part(0, 10)]);
        assert_summed_once(&mut rig, IN_PLACE_CRC);
    }
}

#[test]
fn responses_are_summed_once() {
    let cases = [(false, 1460), (false, 65_000), (true, 1460)];
    for ((markers, emss), (crc32c, _, copying)) in
        cases.into_iter().flat_map(|c| CRCS.map(|crc| (c, crc)))
    {
        for len in [8, 5000, 150_000] {
            let mut rig = rig(markers, emss, false);
            let mr = rig.mr(150_000, ALL);
            let body = read_request(9, len, mr.stag, mr.at);
            let ulpdu = untagged(
                iwarp_proto::rdmap::Opcode::READ_REQUEST,
                1,
                1,
                0,
                true,
                &body,
            );
            assert_eq!(rig.rx_ulpdu(&ulpdu), RxStatus::Ok);
            // The source of a Read may change, so it is copied.
            assert_eq!(assert_summed_once(&mut rig, crc32c), 0);
            assert_eq!(rig.qp.counters().tx_payload, u64::from(len));
            let minimum = match markers || !copying || len < SUM_COPY_MIN {
                true => 0,
                false => u64::from(len) - SHORT,
            };
            assert!(COPYING.get() >= minimum, "{} of {len}", COPYING.get());
        }
    }
}
