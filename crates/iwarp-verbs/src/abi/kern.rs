//! Conversions between the kernel's structures (`rdma/ib_user_verbs.h`, `rdma/ib_user_sa.h`) and
//! the public verbs structures. Nothing in this project calls the exported functions; they are
//! exported for rdma-core's librdmacm.
#![allow(non_camel_case_types, reason = "C names")]

use super::verbs::*;
use std::ffi::c_int;

#[repr(C)]
pub(crate) struct ib_user_path_rec {
    dgid: [u8; 16],
    sgid: [u8; 16],
    dlid: u16,
    slid: u16,
    raw_traffic: u32,
    flow_label: u32,
    reversible: u32,
    mtu: u32,
    pkey: u16,
    hop_limit: u8,
    traffic_class: u8,
    numb_path: u8,
    sl: u8,
    mtu_selector: u8,
    rate_selector: u8,
    rate: u8,
    packet_life_time_selector: u8,
    packet_life_time: u8,
    preference: u8,
}

#[repr(C)]
pub(crate) struct ib_uverbs_ah_attr {
    dgid: [u8; 16],
    flow_label: u32,
    sgid_index: u8,
    hop_limit: u8,
    traffic_class: u8,
    reserved: u8,
    dlid: u16,
    sl: u8,
    src_path_bits: u8,
    static_rate: u8,
    is_global: u8,
    port_num: u8,
    reserved2: u8,
}

#[repr(C)]
pub(crate) struct ib_uverbs_qp_attr {
    qp_attr_mask: u32,
    qp_state: u32,
    cur_qp_state: u32,
    path_mtu: u32,
    path_mig_state: u32,
    qkey: u32,
    rq_psn: u32,
    sq_psn: u32,
    dest_qp_num: u32,
    qp_access_flags: u32,
    ah_attr: ib_uverbs_ah_attr,
    alt_ah_attr: ib_uverbs_ah_attr,
    cap: ibv_qp_cap,
    pkey_index: u16,
    alt_pkey_index: u16,
    en_sqd_async_notify: u8,
    sq_draining: u8,
    max_rd_atomic: u8,
    max_dest_rd_atomic: u8,
    min_rnr_timer: u8,
    port_num: u8,
    timeout: u8,
    retry_cnt: u8,
    rnr_retry: u8,
    alt_port_num: u8,
    alt_timeout: u8,
    reserved: [u8; 5],
}

const _: () = assert!(size_of::<ib_user_path_rec>() == 64);
const _: () = assert!(size_of::<ib_uverbs_ah_attr>() == 32);
const _: () = assert!(size_of::<ib_uverbs_qp_attr>() == 144);

const fn gid_words(gid: [u8; 16]) -> [u64; 2] {
    // SAFETY: any 16 bytes are two valid integers.
    unsafe { std::mem::transmute::<[u8; 16], [u64; 2]>(gid) }
}

pub(crate) const fn gid_octets(gid: [u64; 2]) -> [u8; 16] {
    // SAFETY: two integers are 16 bytes.
    unsafe { std::mem::transmute::<[u64; 2], [u8; 16]>(gid) }
}

const fn ah_attr(from: &ib_uverbs_ah_attr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: gid_words(from.dgid),
            flow_label: from.flow_label,
            sgid_index: from.sgid_index,
            hop_limit: from.hop_limit,
            traffic_class: from.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global,
        port_num: from.port_num,
    }
}

pub(crate) unsafe extern "C" fn ibv_copy_ah_attr_from_kern(
    to: *mut ibv_ah_attr,
    from: *const ib_uverbs_ah_attr,
) {
    *to = ah_attr(&*from);
}

pub(crate) unsafe extern "C" fn ibv_copy_qp_attr_from_kern(
    to: *mut ibv_qp_attr,
    from: *const ib_uverbs_qp_attr,
) {
    let f = &*from;
    *to = ibv_qp_attr {
        qp_state: f.qp_state,
        cur_qp_state: f.cur_qp_state,
        path_mtu: f.path_mtu,
        path_mig_state: f.path_mig_state,
        qkey: f.qkey,
        rq_psn: f.rq_psn,
        sq_psn: f.sq_psn,
        dest_qp_num: f.dest_qp_num,
        qp_access_flags: f.qp_access_flags,
        cap: f.cap,
        ah_attr: ah_attr(&f.ah_attr),
        alt_ah_attr: ah_attr(&f.alt_ah_attr),
        pkey_index: f.pkey_index,
        alt_pkey_index: f.alt_pkey_index,
        en_sqd_async_notify: f.en_sqd_async_notify,
        sq_draining: f.sq_draining,
        max_rd_atomic: f.max_rd_atomic,
        max_dest_rd_atomic: f.max_dest_rd_atomic,
        min_rnr_timer: f.min_rnr_timer,
        port_num: f.port_num,
        timeout: f.timeout,
        retry_cnt: f.retry_cnt,
        rnr_retry: f.rnr_retry,
        alt_port_num: f.alt_port_num,
        alt_timeout: f.alt_timeout,
        rate_limit: 0,
    };
}

pub(crate) unsafe extern "C" fn ibv_copy_path_rec_from_kern(
    to: *mut ibv_sa_path_rec,
    from: *const ib_user_path_rec,
) {
    let f = &*from;
    *to = ibv_sa_path_rec {
        dgid: gid_words(f.dgid),
        sgid: gid_words(f.sgid),
        dlid: f.dlid,
        slid: f.slid,
        raw_traffic: f.raw_traffic as c_int,
        flow_label: f.flow_label,
        hop_limit: f.hop_limit,
        traffic_class: f.traffic_class,
        reversible: f.reversible as c_int,
        numb_path: f.numb_path,
        pkey: f.pkey,
        sl: f.sl,
        mtu_selector: f.mtu_selector,
        mtu: f.mtu as u8,
        rate_selector: f.rate_selector,
        rate: f.rate,
        packet_life_time_selector: f.packet_life_time_selector,
        packet_life_time: f.packet_life_time,
        preference: f.preference,
    };
}

pub(crate) unsafe extern "C" fn ibv_copy_path_rec_to_kern(
    to: *mut ib_user_path_rec,
    from: *const ibv_sa_path_rec,
) {
    let f = &*from;
    *to = ib_user_path_rec {
        dgid: gid_octets(f.dgid),
        sgid: gid_octets(f.sgid),
        dlid: f.dlid,
        slid: f.slid,
        raw_traffic: f.raw_traffic as u32,
        flow_label: f.flow_label,
        reversible: f.reversible as u32,
        mtu: u32::from(f.mtu),
        pkey: f.pkey,
        hop_limit: f.hop_limit,
        traffic_class: f.traffic_class,
        numb_path: f.numb_path,
        sl: f.sl,
        mtu_selector: f.mtu_selector,
        rate_selector: f.rate_selector,
        rate: f.rate,
        packet_life_time_selector: f.packet_life_time_selector,
        packet_life_time: f.packet_life_time,
        preference: f.preference,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distinct_bytes<T>() -> T {
        // SAFETY: the tests use structures of integers only, so any bytes are valid.
        unsafe {
            let mut value: T = std::mem::zeroed();
            let bytes = (&raw mut value).cast::<u8>();
            for i in 0..size_of::<T>() {
                bytes.add(i).write(i as u8 + 1);
            }
            value
        }
    }

    #[test]
    fn path_record_round_trips() {
        let mut kernel: ib_user_path_rec = distinct_bytes();
        // The public structure has only one byte for the MTU, so use a value that fits.
        kernel.mtu = 4;
        // SAFETY: both pointers are to live structures.
        let (path, back) = unsafe {
            let mut path: ibv_sa_path_rec = std::mem::zeroed();
            let mut back: ib_user_path_rec = std::mem::zeroed();
            ibv_copy_path_rec_from_kern(&raw mut path, &raw const kernel);
            ibv_copy_path_rec_to_kern(&raw mut back, &raw const path);
            (path, back)
        };
        assert_eq!((path.mtu, path.sl, path.pkey), (4, kernel.sl, kernel.pkey));
        assert_eq!(gid_octets(path.sgid), kernel.sgid);
        assert_eq!(gid_octets(path.dgid), kernel.dgid);
        // SAFETY: structures of integers without padding.
        let bytes = |p: &ib_user_path_rec| unsafe { std::mem::transmute_copy::<_, [u8; 64]>(p) };
        assert_eq!(bytes(&back), bytes(&kernel));
    }

    #[test]
    fn attributes_copy_field_by_field() {
        let kernel: ib_uverbs_qp_attr = distinct_bytes();
        // SAFETY: both pointers are to live structures.
        let to = unsafe {
            let mut to: ibv_qp_attr = std::mem::zeroed();
            ibv_copy_qp_attr_from_kern(&raw mut to, &raw const kernel);
            to
        };
        let byte_fields = |a: &ibv_qp_attr| {
            [
                a.min_rnr_timer,
                a.port_num,
                a.timeout,
                a.retry_cnt,
                a.rnr_retry,
                a.max_rd_atomic,
                a.max_dest_rd_atomic,
            ]
        };
        let k = &kernel;
        let expected = [
            k.min_rnr_timer,
            k.port_num,
            k.timeout,
            k.retry_cnt,
            k.rnr_retry,
            k.max_rd_atomic,
            k.max_dest_rd_atomic,
        ];
        assert_eq!(byte_fields(&to), expected);
        assert_eq!(
            (to.qp_state, to.rq_psn, to.sq_psn, to.dest_qp_num),
            (k.qp_state, k.rq_psn, k.sq_psn, k.dest_qp_num)
        );
        assert_eq!(gid_octets(to.ah_attr.grh.dgid), k.ah_attr.dgid);
        assert_eq!(to.alt_ah_attr.grh.hop_limit, k.alt_ah_attr.hop_limit);
    }
}
