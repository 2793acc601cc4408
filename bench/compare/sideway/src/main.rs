//! The compared programs with sideway, which exchanges queue pair numbers over TCP and polls.

use anyhow::Context as _;
use harness::{Job, Role, Work, role, sum};
use serde::{Deserialize, Serialize};
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::{AddressHandleAttribute, Gid};
use sideway::ibverbs::completion::{ExtendedCompletionQueue, GenericCompletionQueue};
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::device_context::Mtu;
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{
    ExtendedQueuePair, PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState,
    SetScatterGatherEntry, WorkRequestFlags,
};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;

/// Requests in flight.
const DEPTH: usize = 8;
/// Numbers of work requests; receives have the numbers of their slots.
const SENT: u64 = 100;

/// What a peer needs to know of an end and of the end's memory.
#[derive(Deserialize, Serialize)]
struct Address {
    qp_number: u32,
    gid: Gid,
    memory: u64,
    key: u32,
}

/// A vector that is registered while it exists.
struct Memory {
    region: Arc<MemoryRegion>,
    octets: Vec<u8>,
}

impl Memory {
    fn new(pd: &Arc<ProtectionDomain>, octets: Vec<u8>) -> anyhow::Result<Self> {
        let access = AccessFlags::LocalWrite | AccessFlags::RemoteRead;
        // SAFETY: the vector is freed after the region, and does not move.
        let region = unsafe { pd.reg_mr(octets.as_ptr() as usize, octets.len(), access) }?;
        Ok(Self { region, octets })
    }
}

/// A connected queue pair.
struct End {
    qp: ExtendedQueuePair,
    cq: Arc<ExtendedCompletionQueue>,
    peer: Address,
    inbox: Memory,
    out: Memory,
}

fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            job.listening(listener.local_addr()?);
            let end = End::connect(&job, DEPTH, &listener.accept()?.0)?;
            serve(&job, end)
        }
        Role::Client(job, server) => {
            let end = End::connect(&job, 1, &TcpStream::connect(server)?)?;
            request(job, end)
        }
    }
}

/// Connects a queue pair to the peer's.
fn move_to_rts(qp: &mut ExtendedQueuePair, peer: &Address) -> anyhow::Result<()> {
    let mut attributes = QueuePairAttribute::new();
    attributes
        .setup_state(QueuePairState::Init)
        .setup_pkey_index(0)
        .setup_port(1)
        .setup_access_flags(AccessFlags::LocalWrite | AccessFlags::RemoteRead);
    qp.modify(&attributes)?;
    let mut address = AddressHandleAttribute::new();
    address
        .setup_port(1)
        .setup_grh_src_gid_index(0)
        .setup_grh_dest_gid(&peer.gid)
        .setup_grh_hop_limit(1);
    let mut attributes = QueuePairAttribute::new();
    attributes
        .setup_state(QueuePairState::ReadyToReceive)
        .setup_path_mtu(Mtu::Mtu1024)
        .setup_dest_qp_num(peer.qp_number)
        .setup_rq_psn(0)
        .setup_max_dest_read_atomic(1)
        .setup_min_rnr_timer(12)
        .setup_address_vector(&address);
    qp.modify(&attributes)?;
    let mut attributes = QueuePairAttribute::new();
    attributes
        .setup_state(QueuePairState::ReadyToSend)
        .setup_sq_psn(0)
        .setup_timeout(12)
        .setup_retry_cnt(7)
        .setup_rnr_retry(7)
        .setup_max_read_atomic(1);
    qp.modify(&attributes)?;
    Ok(())
}

impl End {
    /// Creates a queue pair and memory for so many messages, and connects it.
    fn connect(job: &Job, slots: usize, stream: &TcpStream) -> anyhow::Result<Self> {
        let context = DeviceList::new()?
            .iter()
            .next()
            .context("no device")?
            .open()?;
        let pd = context.alloc_pd()?;
        let cq = context
            .create_cq_builder()
            .setup_cqe(2 * DEPTH as u32)
            .build_ex()?;
        let handle = GenericCompletionQueue::from(cq.clone());
        let mut qp = pd
            .create_qp_builder()
            .setup_send_cq(handle.clone())
            .setup_recv_cq(handle)
            .setup_max_send_wr(DEPTH as u32)
            .setup_max_recv_wr(DEPTH as u32)
            .build_ex()?;
        let inbox = Memory::new(&pd, vec![0; slots * job.size])?;
        let out = Memory::new(&pd, job.payload())?;
        let own = Address {
            qp_number: qp.qp_number(),
            gid: context.query_gid(1, 0)?,
            memory: out.octets.as_ptr() as u64,
            key: out.region.rkey(),
        };
        serde_json::to_writer(stream, &own)?;
        let mut answers = serde_json::Deserializer::from_reader(stream).into_iter();
        let peer: Address = answers.next().context("no answer")??;
        move_to_rts(&mut qp, &peer)?;
        Ok(Self {
            qp,
            cq,
            peer,
            inbox,
            out,
        })
    }

    fn post_receive(&mut self, slot: usize, place: Range<usize>) -> anyhow::Result<()> {
        let start = self.inbox.octets[place.clone()].as_mut_ptr() as u64;
        let mut guard = self.qp.start_post_recv();
        let receive = guard.construct_wr(slot as u64);
        // SAFETY: the program does not use the slot until the receive is completed.
        unsafe { receive.setup_sge(self.inbox.region.lkey(), start, place.len() as u32) };
        Ok(guard.post()?)
    }

    /// Sends from a place of `out`, or of the received messages.
    fn post_send(&mut self, received: bool, place: Range<usize>) -> anyhow::Result<()> {
        let memory = if received { &self.inbox } else { &self.out };
        let mut guard = self.qp.start_post_send();
        let send = guard
            .construct_wr(SENT, WorkRequestFlags::Signaled)
            .setup_send();
        let start = memory.octets[place.clone()].as_ptr() as u64;
        // SAFETY: the program does not change the place until the Send is completed.
        unsafe { send.setup_sge(memory.region.lkey(), start, place.len() as u32) };
        Ok(guard.post()?)
    }

    /// Reads the peer's `out` into the first slot.
    fn post_read(&mut self) -> anyhow::Result<()> {
        let mut guard = self.qp.start_post_send();
        let read = guard
            .construct_wr(SENT, WorkRequestFlags::Signaled)
            .setup_read(self.peer.key, self.peer.memory);
        let length = self.out.octets.len() as u32;
        let start = self.inbox.octets.as_mut_ptr() as u64;
        // SAFETY: the program does not use the slot until the Read is completed.
        unsafe { read.setup_sge(self.inbox.region.lkey(), start, length) };
        Ok(guard.post()?)
    }

    /// Polls for a completion and returns its number.
    fn completed(&self) -> anyhow::Result<u64> {
        loop {
            if let Ok(mut completions) = self.cq.start_poll()
                && let Some(completion) = completions.next()
            {
                anyhow::ensure!(completion.status() == 0, "status {}", completion.status());
                return Ok(completion.wr_id());
            }
        }
    }
}

fn serve(job: &Job, mut end: End) -> anyhow::Result<()> {
    let place = |slot: usize| slot * job.size..(slot + 1) * job.size;
    for slot in 0..DEPTH {
        end.post_receive(slot, place(slot))?;
    }
    let mut total = 0;
    for _ in 0..if job.work == Work::Get {
        0
    } else {
        job.messages()
    } {
        let slot = end.completed()? as usize;
        if job.work == Work::Echo {
            end.post_send(true, place(slot))?;
            anyhow::ensure!(end.completed()? == SENT, "another message");
        } else {
            total += sum(&end.inbox.octets[place(slot)]);
        }
        end.post_receive(slot, place(slot))?;
    }
    if job.work == Work::Bulk {
        end.out.octets[..8].copy_from_slice(&total.to_le_bytes());
        end.post_send(false, 0..8)?;
    }
    loop {
        end.completed()?;
    }
}

fn request(job: Job, mut end: End) -> anyhow::Result<()> {
    let mut window = DEPTH;
    if job.work == Work::Bulk {
        end.post_receive(0, 0..8)?;
    }
    for _ in job.rounds() {
        match job.work {
            Work::Echo => {
                end.post_receive(0, 0..job.size)?;
                end.post_send(false, 0..job.size)?;
                anyhow::ensure!(end.completed()? != end.completed()?, "a completion twice");
                job.check(&end.inbox.octets);
            }
            Work::Get => {
                end.post_read()?;
                end.completed()?;
                job.check(&end.inbox.octets);
            }
            Work::Bulk => {
                if window == 0 {
                    anyhow::ensure!(end.completed()? == SENT, "an early reply");
                    window += 1;
                }
                end.post_send(false, 0..job.size)?;
                window -= 1;
            }
        }
    }
    while job.work == Work::Bulk && end.completed()? == SENT {}
    let total = end
        .inbox
        .octets
        .first_chunk()
        .copied()
        .context("eight octets")?;
    job.done(Some(u64::from_le_bytes(total)))
}
