//! The compared programs with ibverbs, which exchanges queue pair numbers over TCP and polls. Its
//! queue pairs send and receive only, so values are fetched by a message and its reply.

use anyhow::Context as _;
use harness::{Job, Role, Work, role, sum};
use ibverbs::{CompletionQueue, MemoryRegion, PreparedQueuePair, QueuePair, ibv_qp_type};
use std::net::{TcpListener, TcpStream};

/// Requests in flight.
const DEPTH: usize = 8;
/// Numbers of work requests; receives have the numbers of their slots.
const SENT: u64 = 100;

fn main() -> anyhow::Result<()> {
    let role = role();
    let devices = ibverbs::devices()?;
    let context = devices.iter().next().context("no device")?.open()?;
    let cq = context.create_cq(2 * DEPTH as i32, 0)?;
    let pd = context.alloc_pd()?;
    let qp = pd
        .create_qp(&cq, &cq, ibv_qp_type::IBV_QPT_RC)
        .set_gid_index(0)
        .set_max_send_wr(DEPTH as u32)
        .set_max_recv_wr(DEPTH as u32)
        .set_rnr_retry(7)
        .build()?;
    match role {
        Role::Server(job) => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            job.listening(listener.local_addr()?);
            let qp = connect(qp, &listener.accept()?.0)?;
            let (out, inbox) = (pd.allocate(job.size)?, pd.allocate(DEPTH * job.size)?);
            serve(&job, &cq, qp, out, inbox)
        }
        Role::Client(job, server) => {
            let qp = connect(qp, &TcpStream::connect(server)?)?;
            let (out, inbox) = (pd.allocate(job.size)?, pd.allocate(job.size)?);
            request(job, &cq, qp, out, inbox)
        }
    }
}

fn connect<'a>(qp: PreparedQueuePair<'a>, peer: &TcpStream) -> anyhow::Result<QueuePair<'a>> {
    serde_json::to_writer(peer, &qp.endpoint())?;
    let mut answers = serde_json::Deserializer::from_reader(peer).into_iter();
    Ok(qp.handshake(answers.next().context("no answer")??)?)
}

/// Polls for a completion and returns its number.
fn completed(cq: &CompletionQueue<'_>) -> anyhow::Result<u64> {
    let mut completions = [ibverbs::ibv_wc::default()];
    loop {
        if let [completion] = cq.poll(&mut completions)? {
            anyhow::ensure!(completion.is_valid(), "{:?}", completion.error());
            return Ok(completion.wr_id());
        }
    }
}

fn serve(
    job: &Job,
    cq: &CompletionQueue<'_>,
    mut qp: QueuePair<'_>,
    mut out: MemoryRegion<u8>,
    mut inbox: MemoryRegion<u8>,
) -> anyhow::Result<()> {
    out.copy_from_slice(&job.payload());
    let place = |slot: usize| slot * job.size..(slot + 1) * job.size;
    for slot in 0..DEPTH {
        // SAFETY: the region lives as long as the queue pair, and its slot is not used until then.
        unsafe { qp.post_receive(&mut inbox, place(slot), slot as u64) }?;
    }
    let mut total = 0;
    for _ in 0..job.messages() {
        let slot = completed(cq)? as usize;
        match job.work {
            // SAFETY: the slot is not used until the message is sent.
            Work::Echo => unsafe { qp.post_send(&mut inbox, place(slot), SENT) }?,
            // SAFETY: the region is not changed.
            Work::Get => unsafe { qp.post_send(&mut out, .., SENT) }?,
            Work::Bulk => total += sum(&inbox[place(slot)]),
        }
        if job.work != Work::Bulk {
            anyhow::ensure!(completed(cq)? == SENT, "another message");
        }
        // SAFETY: as above.
        unsafe { qp.post_receive(&mut inbox, place(slot), slot as u64) }?;
    }
    out[..8].copy_from_slice(&total.to_le_bytes());
    if job.work == Work::Bulk {
        // SAFETY: the region is not used until the process ends.
        unsafe { qp.post_send(&mut out, ..8, SENT) }?;
    }
    loop {
        completed(cq)?;
    }
}

fn request(
    job: Job,
    cq: &CompletionQueue<'_>,
    mut qp: QueuePair<'_>,
    mut out: MemoryRegion<u8>,
    mut inbox: MemoryRegion<u8>,
) -> anyhow::Result<()> {
    out.copy_from_slice(&job.payload());
    let mut window = DEPTH;
    if job.work == Work::Bulk {
        // SAFETY: the region lives as long as the queue pair, and is not used until then.
        unsafe { qp.post_receive(&mut inbox, .., 0) }?;
    }
    for _ in job.rounds() {
        if job.work == Work::Bulk {
            if window == 0 {
                anyhow::ensure!(completed(cq)? == SENT, "an early reply");
                window += 1;
            }
            // SAFETY: the region is not changed.
            unsafe { qp.post_send(&mut out, .., SENT) }?;
            window -= 1;
            continue;
        }
        let length = if job.work == Work::Get { 8 } else { job.size };
        // SAFETY: both regions are not used until both requests are completed.
        unsafe { qp.post_receive(&mut inbox, .., 0) }?;
        // SAFETY: as above.
        unsafe { qp.post_send(&mut out, ..length, SENT) }?;
        anyhow::ensure!(completed(cq)? != completed(cq)?, "a completion twice");
        job.check(&inbox);
    }
    while job.work == Work::Bulk && completed(cq)? == SENT {}
    let total = inbox.first_chunk().copied().context("eight octets")?;
    job.done(Some(u64::from_le_bytes(total)))
}
