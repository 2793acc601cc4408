//! Tests of the tag list by itself: which buffer a message matches, and the validity of handles.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::vec::Vec;

fn sge(len: u32) -> Sge {
    Sge {
        addr: 0x1000,
        len,
        lkey: 7,
    }
}

fn buffer(wr_id: u64, tag: u64, mask: u64, sges: &[Sge]) -> TaggedBuffer<'_> {
    TaggedBuffer {
        wr_id,
        tag,
        mask,
        sges,
    }
}

fn header(operation: Operation, tag: u64) -> Option<Tmh> {
    Some(Tmh {
        operation,
        app_ctx: 5,
        tag,
    })
}

fn receive_storage() -> TakenRecv {
    TakenRecv::new(MAX_TAG_SGE).unwrap()
}

/// Passes an eager message of `len` octets after its header.
fn eager(list: &mut TagList, tag: u64, len: u32, taken: &mut TakenRecv) -> Arrival {
    list.arrive(1, (header(Operation::Eager, tag), None), len, true, taken)
}

fn request(list: &mut TagList, qp_num: u32, tag: u64, len: u32) -> Arrival {
    let rvh = Rvh {
        va: 0x2000,
        rkey: 9,
        len,
    };
    let headers = (header(Operation::Rendezvous, tag), Some(rvh));
    list.arrive(qp_num, headers, 16, true, &mut receive_storage())
}

#[test]
fn oldest_matching_buffer_is_taken() {
    let mut list = TagList::new(4).unwrap();
    let mut taken = receive_storage();
    let (low, all) = (0xff, u64::MAX);
    for (wr_id, tag, mask) in [(1, 5, all), (2, 6, low), (3, 6, all), (4, 5, low)] {
        list.add(&buffer(wr_id, tag, mask, &[sge(8)])).unwrap();
    }
    // The mask applies to the message's tag, not to the buffer's.
    for (tag, wr_id) in [(0x106, 2), (6, 3), (0x105, 4), (5, 1)] {
        assert_eq!(eager(&mut list, tag, 8, &mut taken), Arrival::Eager);
        assert_eq!((taken.wr_id, taken.len), (wr_id, 8));
    }
    assert_eq!(eager(&mut list, 5, 8, &mut taken), Arrival::Unexpected);
}

#[test]
fn buffer_elements_are_limited() {
    let mut list = TagList::new(2).unwrap();
    let sges = [sge(8); MAX_TAG_SGE as usize + 1];
    let too_many = list.add(&buffer(1, 5, u64::MAX, &sges));
    assert_eq!(too_many, Err(TagError::Invalid));
    // Each buffer has its own elements.
    let sges = [0x2000, 0x3000].map(|addr| {
        let mut sges = sges[..MAX_TAG_SGE as usize].to_vec();
        sges.iter_mut().for_each(|sge| sge.addr = addr);
        sges
    });
    for (wr_id, sges) in (2..).zip(&sges) {
        assert!(list.add(&buffer(wr_id, 5, u64::MAX, sges)).is_ok());
    }
    for (wr_id, sges) in (2..).zip(&sges) {
        let mut taken = receive_storage();
        let len = 8 * MAX_TAG_SGE;
        assert_eq!(eager(&mut list, 5, len, &mut taken), Arrival::Eager);
        assert_eq!((taken.wr_id, taken.sges()), (wr_id, &sges[..]));
    }
}

#[test]
fn untagged_message_takes_no_buffer() {
    let mut list = TagList::new(1).unwrap();
    list.add(&buffer(1, 0, 0, &[sge(64)])).unwrap();
    let mut taken = receive_storage();
    for operation in [Operation::NoTag, Operation::Finish, Operation::Other(9)] {
        let headers = (header(operation, 0), None);
        let arrival = list.arrive(1, headers, 8, true, &mut taken);
        assert_eq!(arrival, Arrival::NoTag, "{operation:?}");
    }
    assert_eq!(
        list.arrive(1, (None, None), 0, true, &mut taken),
        Arrival::NoTag
    );
    // A request without its second header.
    let headers = (header(Operation::Rendezvous, 0), None);
    assert_eq!(
        list.arrive(1, headers, 15, true, &mut taken),
        Arrival::NoTag
    );
    assert!(list.is_synchronized());
    assert_eq!(eager(&mut list, 0, 64, &mut taken), Arrival::Eager);
}

#[test]
fn buffers_wait_for_synchronization() {
    let mut list = TagList::new(4).unwrap();
    let mut taken = receive_storage();
    list.add(&buffer(1, 1, u64::MAX, &[sge(8)])).unwrap();
    assert_eq!(eager(&mut list, 2, 8, &mut taken), Arrival::Unexpected);
    assert!(!list.is_synchronized());
    // An unexpected message precedes this buffer, so the buffer must not be matched yet.
    list.add(&buffer(2, 2, u64::MAX, &[sge(8)])).unwrap();
    assert_eq!(eager(&mut list, 2, 8, &mut taken), Arrival::Unexpected);
    // A buffer that was posted before is matched nevertheless.
    assert_eq!(eager(&mut list, 1, 8, &mut taken), Arrival::Eager);
    list.synchronize(1);
    assert_eq!(eager(&mut list, 2, 8, &mut taken), Arrival::Unexpected);
    list.synchronize(3);
    assert!(list.is_synchronized());
    assert_eq!(eager(&mut list, 2, 8, &mut taken), Arrival::Eager);
    assert_eq!(taken.wr_id, 2);
}

#[test]
fn handles_are_valid_for_one_use() {
    let mut list = TagList::new(2).unwrap();
    let mut taken = receive_storage();
    let first = list.add(&buffer(1, 1, u64::MAX, &[])).unwrap();
    let second = list.add(&buffer(2, 2, u64::MAX, &[])).unwrap();
    assert_eq!(list.add(&buffer(3, 3, u64::MAX, &[])), Err(TagError::Full));
    assert_eq!(
        list.add(&buffer(3, 3, u64::MAX, &[sge(1); 5])),
        Err(TagError::Invalid)
    );
    assert_eq!(list.remove(first), Ok(()));
    assert_eq!(list.remove(first), Err(TagError::Gone));
    let third = list.add(&buffer(3, 3, u64::MAX, &[])).unwrap();
    assert_ne!(first, third);
    assert_eq!(list.remove(first), Err(TagError::Gone));
    // A message consumes the second buffer.
    assert_eq!(eager(&mut list, 2, 0, &mut taken), Arrival::Eager);
    assert_eq!(list.remove(second), Err(TagError::Gone));
    assert_eq!(list.remove(500), Err(TagError::Invalid));
    assert_eq!(list.end_read(third), None, "no Read is in progress");
    assert_eq!(list.remove(third), Ok(()));
}

#[test]
fn too_long_message_removes_buffer() {
    let mut list = TagList::new(2).unwrap();
    list.add(&buffer(1, 1, u64::MAX, &[sge(8), sge(8)]))
        .unwrap();
    assert_eq!(
        eager(&mut list, 1, 17, &mut receive_storage()),
        Arrival::TooLong(1)
    );
    list.add(&buffer(2, 1, u64::MAX, &[sge(8), sge(8)]))
        .unwrap();
    assert_eq!(request(&mut list, 1, 1, u32::MAX), Arrival::TooLong(2));
    assert_eq!(list.next_read(1, &mut receive_storage()), None);
    assert!(list.is_synchronized());
    // Both entries are free again.
    for wr_id in 3..5 {
        list.add(&buffer(wr_id, 1, u64::MAX, &[sge(8)])).unwrap();
    }
    assert_eq!(list.add(&buffer(5, 1, 0, &[])), Err(TagError::Full));
}

#[test]
fn rendezvous_are_read_in_order() {
    let mut list = TagList::new(4).unwrap();
    for wr_id in 0..4 {
        list.add(&buffer(wr_id, 0, 0, &[sge(10), sge(10)])).unwrap();
    }
    for (qp_num, len) in [(1, 12), (2, 20), (1, 3), (1, 0)] {
        assert!(matches!(
            request(&mut list, qp_num, 7, len),
            Arrival::Rendezvous(_)
        ));
    }
    let mut sink = receive_storage();
    let mut handles = Vec::new();
    for (len, expected) in [(12, &[10, 2][..]), (3, &[3, 0]), (0, &[0, 0])] {
        let read = list.next_read(1, &mut sink).unwrap();
        assert_eq!((read.source.len, sink.len), (len, u64::from(len)));
        let lens: Vec<u32> = sink.sges().iter().map(|sge| sge.len).collect();
        assert_eq!(lens, expected);
        handles.push(read.handle);
    }
    assert_eq!(list.next_read(1, &mut sink), None);
    // A buffer that is being read into cannot be removed.
    assert_eq!(list.remove(handles[0]), Err(TagError::Gone));
    let done = list.end_read(handles[0]).unwrap();
    assert_eq!((done.wr_id, done.len, done.request.tag), (0, 12, 7));
    assert_eq!(done.request.app_ctx, 5);
    assert_eq!(list.end_read(handles[0]), None);
    list.forget(1);
    assert_eq!(list.end_read(handles[1]), None);
    assert_eq!(
        list.next_read(2, &mut sink).map(|read| read.source.len),
        Some(20)
    );
}

#[test]
fn rendezvous_without_reads_is_for_program() {
    let mut list = TagList::new(1).unwrap();
    list.add(&buffer(1, 7, u64::MAX, &[sge(8)])).unwrap();
    let headers = (header(Operation::Rendezvous, 7), Some(Rvh::default()));
    let arrival = list.arrive(1, headers, 16, false, &mut receive_storage());
    assert_eq!(arrival, Arrival::Unexpected);
    assert!(!list.is_synchronized());
}

#[derive(Debug, Clone)]
enum Op {
    Add(u64, u64),
    Remove(usize),
    Eager(u64),
    Request(u32, u64),
    Read(u32),
    End(usize),
    Forget(u32),
    Synchronize,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0u64..4, prop_oneof![Just(3u64), Just(1), Just(0)])
            .prop_map(|(tag, mask)| Op::Add(tag & mask, mask)),
        1 => (0usize..20).prop_map(Op::Remove),
        2 => (0u64..4).prop_map(Op::Eager),
        2 => (0u32..2, 0u64..4).prop_map(|(qp, tag)| Op::Request(qp, tag)),
        2 => (0u32..2).prop_map(Op::Read),
        2 => (0usize..20).prop_map(Op::End),
        1 => (0u32..2).prop_map(Op::Forget),
        1 => Just(Op::Synchronize),
    ]
}

/// A simple model of the list.
#[derive(Default)]
struct Model {
    /// Handle, `wr_id`, tag, mask, and whether it waits.
    posted: Vec<(u32, u64, u64, u64, bool)>,
    /// Queue pair and `wr_id`.
    matched: VecDeque<(u32, u64)>,
    /// Queue pair, `wr_id` and handle.
    reading: Vec<(u32, u64, u32)>,
    unexpected: u32,
    handled: u32,
}

impl Model {
    fn take(&mut self, tag: u64) -> Option<u64> {
        let fits = |b: &&(u32, u64, u64, u64, bool)| !b.4 && tag & b.3 == b.2;
        let found = self.posted.iter().find(fits).map(|b| b.1);
        match found {
            Some(wr_id) => self.posted.retain(|b| b.1 != wr_id),
            None => self.unexpected += 1,
        }
        found
    }

    fn used(&self) -> usize {
        self.posted.len() + self.matched.len() + self.reading.len()
    }
}

/// Capacity of the list that is compared with the model.
const ROOM: usize = 5;

/// A list, its model, and the handles of all buffers that were added.
struct Compared {
    list: TagList,
    model: Model,
    handles: Vec<u32>,
    taken: TakenRecv,
}

impl Compared {
    /// Performs an operation on both, and compares the results.
    fn perform(&mut self, wr_id: u64, op: Op) {
        match op {
            Op::Add(tag, mask) => self.add(wr_id, tag, mask),
            Op::Remove(i) => self.remove(i),
            Op::Eager(tag) => {
                let arrival = eager(&mut self.list, tag, 8, &mut self.taken);
                match self.model.take(tag) {
                    Some(wr_id) => {
                        assert_eq!((arrival, self.taken.wr_id), (Arrival::Eager, wr_id));
                    }
                    None => assert_eq!(arrival, Arrival::Unexpected),
                }
            }
            Op::Request(qp, tag) => {
                let arrival = request(&mut self.list, qp, tag, 8);
                match self.model.take(tag) {
                    Some(wr_id) => {
                        assert_eq!(arrival, Arrival::Rendezvous(wr_id));
                        self.model.matched.push_back((qp, wr_id));
                    }
                    None => assert_eq!(arrival, Arrival::Unexpected),
                }
            }
            Op::Read(qp) => self.read(qp),
            Op::End(i) => self.end(i),
            Op::Forget(qp) => {
                self.list.forget(qp);
                self.model.matched.retain(|m| m.0 != qp);
                self.model.reading.retain(|r| r.0 != qp);
            }
            Op::Synchronize => {
                self.list.synchronize(self.model.unexpected);
                self.model.handled = self.model.unexpected;
                for posted in &mut self.model.posted {
                    posted.4 = false;
                }
            }
        }
    }

    fn add(&mut self, wr_id: u64, tag: u64, mask: u64) {
        let added = self.list.add(&buffer(wr_id, tag, mask, &[sge(8)]));
        assert_eq!(added.is_ok(), self.model.used() < ROOM);
        if let Ok(handle) = added {
            assert!(!self.handles.contains(&handle));
            self.handles.push(handle);
            let waits = self.model.handled != self.model.unexpected;
            self.model.posted.push((handle, wr_id, tag, mask, waits));
        }
    }

    fn remove(&mut self, i: usize) {
        let Some(handle) = self.handles.get(i).copied() else {
            return;
        };
        let is_posted = self.model.posted.iter().any(|b| b.0 == handle);
        let expected = if is_posted {
            Ok(())
        } else {
            Err(TagError::Gone)
        };
        assert_eq!(self.list.remove(handle), expected);
        self.model.posted.retain(|b| b.0 != handle);
    }

    fn read(&mut self, qp: u32) {
        let read = self.list.next_read(qp, &mut self.taken);
        let at = self.model.matched.iter().position(|m| m.0 == qp);
        let expected = at.and_then(|at| self.model.matched.remove(at));
        assert_eq!(read.map(|_| self.taken.wr_id), expected.map(|m| m.1));
        if let (Some(read), Some((qp, wr_id))) = (read, expected) {
            self.model.reading.push((qp, wr_id, read.handle));
        }
    }

    fn end(&mut self, i: usize) {
        let Some(handle) = self.handles.get(i).copied() else {
            return;
        };
        let reading = &mut self.model.reading;
        let expected = reading.iter().find(|r| r.2 == handle).map(|r| r.1);
        let ended = self.list.end_read(handle).map(|done| done.wr_id);
        assert_eq!(ended, expected);
        reading.retain(|r| r.2 != handle);
    }
}

proptest! {
    #[test]
    fn list_matches_simple_model(ops in proptest::collection::vec(op(), 0..120)) {
        let mut compared = Compared {
            list: TagList::new(ROOM as u32).unwrap(),
            model: Model::default(),
            handles: Vec::new(),
            taken: receive_storage(),
        };
        for (wr_id, op) in (0u64..).zip(ops) {
            compared.perform(wr_id, op);
            let model = &compared.model;
            let is_synchronized = model.handled == model.unexpected;
            assert_eq!(compared.list.is_synchronized(), is_synchronized);
        }
    }
}

/// The number of rendezvous wraps.
#[test]
fn rendezvous_order_survives_wrap() {
    for before in [0, u32::MAX - 2, u32::MAX - 1, u32::MAX] {
        let mut list = TagList::new(4).unwrap();
        list.rendezvous = before;
        // The requests match the buffers from last to first.
        for tag in 0..4 {
            list.add(&buffer(tag, tag, u64::MAX, &[sge(64)])).unwrap();
        }
        for tag in [3, 2, 1, 0] {
            assert_eq!(request(&mut list, 1, tag, 8), Arrival::Rendezvous(tag));
        }
        for wr_id in [3, 2, 1, 0] {
            let mut sink = receive_storage();
            assert!(list.next_read(1, &mut sink).is_some());
            assert_eq!(sink.wr_id, wr_id, "after {before}");
        }
    }
}
