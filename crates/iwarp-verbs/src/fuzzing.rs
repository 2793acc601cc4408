//! The fuzzer of the C interface: creates objects and posts lists of requests with arbitrary values
//! in their structures. Only `cargo xtask fuzz` compiles it, with `--cfg fuzzing`.
//!
//! Pointers follow the manual pages, because no library can check them. Everything else comes from
//! the input. Each request must complete at most once, and only registered memory may change.

use crate::abi::verbs::value::*;
use crate::abi::verbs::*;
use crate::cq::{completion, queue as cq};
use crate::device::{gid, list, query};
use crate::domain::{ah, pd};
use crate::lifecycle::{self, create, destroy, modify};
use crate::memory::{device_memory, mr, mw};
use crate::open;
use crate::post::{receive, send};
use crate::srq::queue as srq;
use std::collections::HashSet;
use std::ffi::{c_int, c_uint};
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// Size of the test memory, and offset and length of the registered part.
const ARENA: usize = 32 << 10;
const REGISTERED: (usize, usize) = (8 << 10, 16 << 10);
/// All rights except on-demand.
const ALL_RIGHTS: c_int = 0x1f;
/// The Q_Key of the datagram queue pair.
const QKEY: u32 = 7;
const COMMANDS_MAX: usize = 64;
const LIST_MAX: usize = 40;

struct Shared {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    gid: [u8; 16],
}

// SAFETY: all threads may use the C interface's objects.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    // SAFETY: the arguments are as the manual pages require.
    SHARED.get_or_init(|| unsafe {
        let mut count = 0;
        let list = list::ibv_get_device_list(&mut count);
        assert!(count > 0, "no device");
        let context = open::ibv_open_device(*list);
        assert!(!context.is_null(), "the device cannot be opened");
        list::ibv_free_device_list(list);
        let mut gid = [0; 16];
        assert_eq!(gid::ibv_query_gid(context, 1, 0, &mut gid), 0);
        let pd = pd::ibv_alloc_pd(context);
        Shared { context, pd, gid }
    })
}

/// The unread input; reads return zeros at its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn octets<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let (head, rest) = self.0.split_at(N.min(self.0.len()));
        out[..head.len()].copy_from_slice(head);
        self.0 = rest;
        out
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.octets())
    }

    /// Returns a number, mostly below `usual`.
    fn u32(&mut self, usual: u32) -> u32 {
        match self.u8() {
            255 => u32::from_le_bytes(self.octets()),
            254 => u32::MAX - u32::from(self.u8()),
            n => u32::from(n) % usual.max(1),
        }
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.octets())
    }
}

struct World<'a> {
    input: Input<'a>,
    arena: Vec<u8>,
    mr: *mut ibv_mr,
    cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    /// The destination of datagrams: this device.
    ah: *mut ibv_ah,
    /// `wr_id`s of outstanding requests.
    posted: HashSet<u64>,
    last_wr_id: u64,
}

/// Runs one input.
pub fn verbs(data: &[u8]) {
    // SAFETY: the pointers are to living objects and to memory that is freed after them.
    unsafe {
        let Some(mut world) = World::new(data) else {
            return;
        };
        for _ in 0..COMMANDS_MAX {
            if world.input.0.is_empty() {
                break;
            }
            world.command();
        }
        world.destroy();
    }
}

impl<'a> World<'a> {
    unsafe fn new(data: &'a [u8]) -> Option<Self> {
        let Shared { context, pd, .. } = *shared();
        let mut arena = vec![0x5a; ARENA];
        let start = arena.as_mut_ptr().add(REGISTERED.0);
        let mut input = Input(data);
        let mr = mr::ibv_reg_mr(pd, start.cast(), REGISTERED.1, ALL_RIGHTS);
        let cq = cq::ibv_create_cq(context, 200, null_mut(), null_mut(), 0);
        assert!(!mr.is_null() && !cq.is_null());
        let flags = input.u8();
        let mut srq = null_mut();
        if flags & 1 != 0 {
            let mut init: ibv_srq_init_attr = zeroed();
            init.attr.max_wr = input.u32(20);
            init.attr.max_sge = input.u32(5);
            init.attr.srq_limit = input.u32(5);
            srq = srq::ibv_create_srq(pd, &mut init);
        }
        let mut init: ibv_qp_init_attr = zeroed();
        (init.send_cq, init.recv_cq, init.srq) = (cq, cq, srq);
        init.cap = ibv_qp_cap {
            max_send_wr: input.u32(40),
            max_recv_wr: input.u32(40),
            max_send_sge: input.u32(6),
            max_recv_sge: input.u32(6),
            max_inline_data: input.u32(200),
        };
        init.qp_type = match flags >> 1 & 7 {
            0..=4 => QPT_RC,
            5 => QPT_UC,
            6 => QPT_UD,
            _ => input.u32(12),
        };
        init.sq_sig_all = c_int::from(flags >> 4 & 1);
        let qp = create::ibv_create_qp(pd, &mut init);
        let mut world = Self {
            input,
            arena,
            mr,
            cq,
            srq,
            qp,
            mw: null_mut(),
            ah: null_mut(),
            posted: HashSet::new(),
            last_wr_id: 0,
        };
        if qp.is_null() {
            world.destroy();
            return None;
        }
        if flags & 0x20 == 0 {
            world.connect();
        }
        Some(world)
    }

    /// Connects the queue pair with itself.
    unsafe fn connect(&mut self) {
        let mut attr: ibv_qp_attr = zeroed();
        let modify = |attr: &mut ibv_qp_attr, state, mask: c_uint| {
            attr.qp_state = state;
            modify::ibv_modify_qp(self.qp, attr, (mask | QP_STATE) as c_int)
        };
        let is_ud = (*self.qp).qp_type == QPT_UD;
        (attr.port_num, attr.qkey) = (1, QKEY);
        attr.qp_access_flags = ALL_RIGHTS as c_uint;
        let init = QP_PKEY_INDEX | QP_PORT | if is_ud { QP_QKEY } else { QP_ACCESS_FLAGS };
        modify(&mut attr, QPS_INIT, init);
        attr.path_mtu = 3;
        attr.dest_qp_num = (*self.qp).qp_num;
        attr.max_dest_rd_atomic = 4;
        attr.max_rd_atomic = 4;
        attr.ah_attr = ah_attr(&mut Input(&[]));
        (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 7, 0);
        if is_ud {
            self.ah = ah::ibv_create_ah(shared().pd, &mut attr.ah_attr);
        }
        let reliable = (*self.qp).qp_type == QPT_RC;
        let rtr = QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
        let rtr = match (is_ud, reliable) {
            (true, _) => 0,
            (_, true) => rtr | QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER,
            _ => rtr,
        };
        modify(&mut attr, QPS_RTR, rtr);
        let rts = match reliable {
            true => QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN | QP_MAX_QP_RD_ATOMIC,
            false => QP_SQ_PSN,
        };
        modify(&mut attr, QPS_RTS, rts);
    }

    unsafe fn command(&mut self) {
        match self.input.u8() % 16 {
            0..=4 => self.post_send(),
            5..=7 => self.post_recv(),
            8 => self.modify(),
            9 => self.queries(),
            10 => self.window(),
            11 => self.regions(),
            12 => self.other_objects(),
            13 => {
                let solicited = c_int::from(self.input.u8());
                let _ = cq::req_notify_cq(self.cq, solicited);
            }
            _ => self.poll(),
        }
    }

    /// Returns elements, mostly inside the registered part. Elements of inline data are always
    /// inside the arena, because the library reads them.
    unsafe fn sges(&mut self, inline: bool) -> Vec<ibv_sge> {
        let count = self.input.u8() % 8;
        (0..count)
            .map(|_| {
                let offset = usize::from(u16::from_le_bytes(self.input.octets())) % ARENA;
                let mut sge = ibv_sge {
                    addr: self.arena.as_ptr().add(offset) as u64,
                    length: self.input.u32(250),
                    lkey: (*self.mr).lkey,
                };
                match self.input.u8() {
                    _ if inline => sge.length = sge.length.min((ARENA - offset) as u32),
                    0 => sge.addr = self.input.u64(),
                    1 => sge.lkey = self.input.u32(u32::MAX),
                    _ => {}
                }
                sge
            })
            .collect()
    }

    const fn next_wr_id(&mut self) -> u64 {
        self.last_wr_id += 1;
        self.last_wr_id
    }

    unsafe fn send_request(&mut self) -> (ibv_send_wr, Vec<ibv_sge>) {
        let flags = c_uint::from(self.input.u8());
        let mut sges = self.sges(flags & SEND_INLINE != 0);
        let mut wr: ibv_send_wr = zeroed();
        wr.wr_id = self.next_wr_id();
        wr.sg_list = sges.as_mut_ptr();
        wr.num_sge = sges.len() as c_int;
        if flags & SEND_INLINE == 0 && self.input.u8() == 255 {
            // An invalid count: the list is not read.
            wr.num_sge = [-1, c_int::MIN, 1000, c_int::MAX][sges.len() % 4];
        }
        wr.opcode = self.input.u32(16);
        wr.send_flags = flags;
        wr.imm_data = self.input.u32(u32::MAX);
        match (*self.qp).qp_type {
            QPT_UD => self.datagram_target(&mut wr),
            _ => self.target(&mut wr),
        }
        if wr.opcode == 8 {
            // The manual page requires a window.
            if self.mw.is_null() {
                wr.opcode = 2;
            } else {
                wr.bind_mw.mw = self.mw;
                wr.bind_mw.rkey = self.input.u32(u32::MAX);
                wr.bind_mw.bind_info = self.bind_info();
            }
        }
        (wr, sges)
    }

    /// Sets the remote address, which is in this process.
    unsafe fn target(&mut self, wr: &mut ibv_send_wr) {
        let offset = u64::from(u16::from_le_bytes(self.input.octets())) % ARENA as u64;
        let mut remote = (self.arena.as_ptr() as u64 + offset, (*self.mr).rkey);
        match self.input.u8() {
            0 => remote.0 = self.input.u64(),
            1 => remote.1 = self.input.u32(u32::MAX),
            2 if !self.mw.is_null() => remote.1 = (*self.mw).rkey,
            _ => {}
        }
        if matches!(wr.opcode, 5 | 6 | 15) && !offset.is_multiple_of(8) {
            remote.0 &= !7;
        }
        wr.wr.atomic = atomic_target {
            remote_addr: remote.0,
            compare_add: self.input.u64(),
            swap: self.input.u64(),
            rkey: remote.1,
        };
        if !matches!(wr.opcode, 5 | 6) {
            wr.wr.rdma = rdma_target {
                remote_addr: remote.0,
                rkey: remote.1,
            };
        }
    }

    /// Sets the destination, mostly the queue pair itself. Nothing is sent to other devices.
    unsafe fn datagram_target(&mut self, wr: &mut ibv_send_wr) {
        wr.wr.ud = zeroed();
        wr.wr.ud.ah = self.ah;
        wr.wr.ud.remote_qpn = match self.input.u8() {
            0 => self.input.u32(u32::MAX),
            _ => (*self.qp).qp_num,
        };
        wr.wr.ud.remote_qkey = match self.input.u8() {
            0 => self.input.u32(u32::MAX),
            _ => QKEY,
        };
    }

    unsafe fn post_send(&mut self) {
        let count = usize::from(self.input.u8()) % LIST_MAX + 1;
        let mut lists = Vec::new();
        let mut wrs = Vec::new();
        for _ in 0..count {
            let (wr, sges) = self.send_request();
            lists.push(sges);
            wrs.push(wr);
        }
        if (*self.qp).qp_type == QPT_UD && self.ah.is_null() {
            return;
        }
        for i in 1..wrs.len() {
            wrs[i - 1].next = &raw mut wrs[i];
        }
        let mut bad = null_mut();
        let result = send::post_send(self.qp, wrs.as_mut_ptr(), &mut bad);
        let ids: Vec<u64> = wrs.iter().map(|wr| wr.wr_id).collect();
        self.record_posted(&ids, result, posted_count(&wrs, bad));
    }

    unsafe fn post_recv(&mut self) {
        let count = usize::from(self.input.u8()) % LIST_MAX + 1;
        let mut lists = Vec::new();
        let mut wrs = Vec::new();
        for _ in 0..count {
            let mut sges = self.sges(false);
            wrs.push(ibv_recv_wr {
                wr_id: self.next_wr_id(),
                next: null_mut(),
                sg_list: sges.as_mut_ptr(),
                num_sge: sges.len() as c_int,
            });
            lists.push(sges);
        }
        for i in 1..wrs.len() {
            wrs[i - 1].next = &raw mut wrs[i];
        }
        let mut bad = null_mut();
        let result = match self.srq.is_null() {
            true => receive::post_recv(self.qp, wrs.as_mut_ptr(), &mut bad),
            false => receive::post_srq_recv(self.srq, wrs.as_mut_ptr(), &mut bad),
        };
        let ids: Vec<u64> = wrs.iter().map(|wr| wr.wr_id).collect();
        self.record_posted(&ids, result, posted_count(&wrs, bad));
    }

    /// Records the first `posted` requests as posted. Posting fails exactly if one was refused.
    fn record_posted(&mut self, ids: &[u64], result: c_int, posted: Option<usize>) {
        let posted = posted.expect("the refused request is in the list");
        assert!(
            (result == 0) == (posted == ids.len()),
            "{result}, {posted} of {}",
            ids.len()
        );
        self.posted.extend(&ids[..posted]);
    }

    /// Polls completions: each request completes at most once, and only if it was posted.
    unsafe fn poll(&mut self) {
        for _ in 0..8 {
            let mut wcs: [ibv_wc; 16] = zeroed();
            let n = completion::poll_cq(self.cq, 16, wcs.as_mut_ptr());
            if n <= 0 {
                return;
            }
            for wc in &wcs[..n as usize] {
                assert!(
                    self.posted.remove(&wc.wr_id),
                    "{} completed twice, or was not posted",
                    wc.wr_id
                );
                assert_eq!(wc.qp_num, (*self.qp).qp_num);
            }
        }
    }

    unsafe fn modify(&mut self) {
        let i = &mut self.input;
        let mut attr: ibv_qp_attr = zeroed();
        attr.qp_state = i.u32(8);
        attr.cur_qp_state = i.u32(8);
        attr.path_mtu = i.u32(7);
        attr.qkey = i.u32(9);
        attr.rq_psn = i.u32(9);
        attr.sq_psn = i.u32(9);
        attr.dest_qp_num = i.u32(9);
        attr.qp_access_flags = i.u32(64);
        attr.pkey_index = u16::from(i.u8());
        attr.max_rd_atomic = i.u8();
        attr.max_dest_rd_atomic = i.u8();
        attr.min_rnr_timer = i.u8();
        attr.port_num = i.u8() % 4;
        attr.timeout = i.u8();
        attr.retry_cnt = i.u8();
        attr.rnr_retry = i.u8();
        attr.ah_attr = ah_attr(i);
        let mask = u32::from_le_bytes(i.octets());
        let mask = if mask & 1 << 31 == 0 {
            mask & 0x1f_ffff
        } else {
            mask
        };
        let _ = modify::ibv_modify_qp(self.qp, &mut attr, mask as c_int);
    }

    unsafe fn queries(&mut self) {
        let context = shared().context;
        let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
        let mask = self.input.u32(u32::MAX) as c_int;
        assert_eq!(
            lifecycle::query::ibv_query_qp(self.qp, &mut attr, mask, &mut init),
            0
        );
        let mut gid = [0; 16];
        let (port, index) = (self.input.u8(), self.input.u32(300) as c_int);
        let _ = gid::ibv_query_gid(context, port, index, &mut gid);
        let mut device: ibv_device_attr_ex = zeroed();
        let size = self.input.u32(500) as usize % (size_of::<ibv_device_attr_ex>() + 1);
        let _ = query::query_device_ex(context, null(), &mut device, size);
        let mut port_attr: ibv_port_attr = zeroed();
        let size = self.input.u32(60) as usize % (size_of::<ibv_port_attr>() + 1);
        let _ = query::query_port(context, self.input.u8(), &mut port_attr, size);
        if !self.srq.is_null() {
            let mut attr: ibv_srq_attr = zeroed();
            assert_eq!(srq::ibv_query_srq(self.srq, &mut attr), 0);
            (attr.max_wr, attr.srq_limit) = (self.input.u32(40), self.input.u32(40));
            let mask = self.input.u32(8) as c_int;
            let _ = srq::ibv_modify_srq(self.srq, &mut attr, mask);
        }
    }

    unsafe fn bind_info(&mut self) -> ibv_mw_bind_info {
        let offset = u64::from(u16::from_le_bytes(self.input.octets())) % ARENA as u64;
        ibv_mw_bind_info {
            mr: self.mr,
            addr: self.arena.as_ptr() as u64 + offset,
            length: u64::from(self.input.u32(250)),
            mw_access_flags: self.input.u32(64),
        }
    }

    unsafe fn window(&mut self) {
        if self.mw.is_null() {
            self.mw = mw::alloc_mw(shared().pd, self.input.u32(4));
            return;
        }
        let mut bind = ibv_mw_bind {
            wr_id: self.next_wr_id(),
            send_flags: self.input.u32(16),
            bind_info: self.bind_info(),
        };
        if (*self.qp).qp_type == QPT_RC && send::bind_mw(self.qp, self.mw, &mut bind) == 0 {
            self.posted.insert(bind.wr_id);
        }
    }

    /// Registers further regions inside the registered memory, with any rights and addresses, and
    /// changes them.
    unsafe fn regions(&mut self) {
        let pd = shared().pd;
        let offset = usize::from(u16::from_le_bytes(self.input.octets())) % REGISTERED.1;
        let len = (self.input.u32(4000) as usize).min(REGISTERED.1 - offset);
        let addr = self.arena.as_mut_ptr().add(REGISTERED.0 + offset);
        let (iova, access) = (self.input.u64(), self.input.u32(u32::MAX));
        let mr = mr::ibv_reg_mr_iova2(pd, addr.cast(), len, iova, access);
        if mr.is_null() {
            return;
        }
        let flags = self.input.u32(16) as c_int;
        let access = self.input.u32(u32::MAX) as c_int;
        let _ = mr::ibv_rereg_mr(mr, flags & 5, pd, addr.cast(), len, access);
        let mut sge = ibv_sge {
            addr: addr as u64,
            length: len as u32,
            lkey: (*mr).lkey,
        };
        let _ = mr::advise_mr(pd, self.input.u32(4), self.input.u32(3), &mut sge, 1);
        assert_eq!(mr::ibv_dereg_mr(mr), 0);
    }

    unsafe fn other_objects(&mut self) {
        let Shared { context, pd, .. } = *shared();
        match self.input.u8() % 4 {
            0 => {
                let mut attr: ibv_cq_init_attr_ex = zeroed();
                attr.cqe = self.input.u32(100);
                attr.comp_vector = self.input.u32(3);
                attr.wc_flags = u64::from(self.input.u32(u32::MAX));
                attr.comp_mask = self.input.u32(4);
                attr.flags = self.input.u32(4);
                attr.parent_domain = pd;
                let cq: *mut ibv_cq = cq::create_cq_ex(context, &mut attr).cast();
                if !cq.is_null() {
                    let _ = cq::ibv_resize_cq(cq, self.input.u32(300) as c_int);
                    assert_eq!(cq::ibv_destroy_cq(cq), 0);
                }
            }
            1 => {
                let mut attr = ah_attr(&mut self.input);
                let handle = ah::ibv_create_ah(pd, &mut attr);
                if !handle.is_null() {
                    assert_eq!(ah::ibv_destroy_ah(handle), 0);
                }
            }
            2 => {
                let mut attr: ibv_alloc_dm_attr = zeroed();
                attr.length = self.input.u32(5000) as usize % (1 << 20);
                attr.log_align_req = self.input.u32(24);
                let dm = device_memory::alloc_dm(context, &mut attr);
                if !dm.is_null() {
                    let (offset, len) = (self.input.u64(), self.input.u32(4000) as usize);
                    let access = self.input.u32(128);
                    let mr = mr::reg_dm_mr(pd, dm, offset, len, access);
                    if !mr.is_null() {
                        assert_eq!(mr::ibv_dereg_mr(mr), 0);
                    }
                    assert_eq!(device_memory::free_dm(dm), 0);
                }
            }
            _ => {
                let mut attr: ibv_qp_init_attr_ex = zeroed();
                (attr.send_cq, attr.recv_cq, attr.pd) = (self.cq, self.cq, pd);
                attr.cap.max_send_wr = self.input.u32(10);
                attr.cap.max_send_sge = self.input.u32(5);
                attr.qp_type = self.input.u32(12);
                attr.comp_mask = self.input.u32(128) & !2;
                attr.create_flags = self.input.u32(8);
                attr.send_ops_flags = u64::from(self.input.u32(u32::MAX));
                let qp = create::create_qp_ex(context, &mut attr);
                if !qp.is_null() {
                    assert_eq!(destroy::ibv_destroy_qp(qp), 0);
                }
            }
        }
    }

    /// Destroys all objects, and checks that memory outside the registered part is unchanged.
    unsafe fn destroy(mut self) {
        if !self.qp.is_null() {
            self.poll();
            assert_eq!(destroy::ibv_destroy_qp(self.qp), 0);
        }
        if !self.ah.is_null() {
            assert_eq!(ah::ibv_destroy_ah(self.ah), 0);
        }
        if !self.mw.is_null() {
            assert_eq!(mw::dealloc_mw(self.mw), 0);
        }
        if !self.srq.is_null() {
            assert_eq!(srq::ibv_destroy_srq(self.srq), 0);
        }
        assert_eq!(cq::ibv_destroy_cq(self.cq), 0);
        assert_eq!(mr::ibv_dereg_mr(self.mr), 0);
        let (from, len) = REGISTERED;
        let outside = self.arena[..from].iter().chain(&self.arena[from + len..]);
        assert!(
            outside.copied().all(|octet| octet == 0x5a),
            "memory that was not registered has changed"
        );
    }
}

/// Returns the number of requests in front of `bad`, or of all if it is NULL. Returns `None` if
/// `bad` is not in the list.
fn posted_count<T>(list: &[T], bad: *const T) -> Option<usize> {
    match bad.is_null() {
        true => Some(list.len()),
        false => list.iter().position(|wr| std::ptr::eq(wr, bad)),
    }
}

/// Returns an address, which is often this device's.
fn ah_attr(input: &mut Input<'_>) -> ibv_ah_attr {
    // SAFETY: a structure of numbers.
    let mut attr: ibv_ah_attr = unsafe { zeroed() };
    let flags = input.u8();
    let gid: [u8; 16] = if flags & 1 == 0 {
        shared().gid
    } else {
        input.octets()
    };
    let [high, low] =
        [0, 8].map(|offset| u64::from_ne_bytes(std::array::from_fn(|i| gid[offset + i])));
    attr.grh.dgid = [high, low];
    attr.is_global = u8::from(flags & 2 == 0);
    attr.port_num = if flags & 4 == 0 { 1 } else { input.u8() };
    attr.grh.sgid_index = if flags & 8 == 0 { 0 } else { input.u8() };
    attr.grh.hop_limit = 1;
    if flags & 16 != 0 {
        (attr.dlid, attr.sl, attr.static_rate) = (u16::from(input.u8()), input.u8(), input.u8());
    }
    attr
}
