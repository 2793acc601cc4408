//! The contents of the answers: devices, ports, and resources of the processes that use the
//! library.
//!
//! The devices are those that programs with the same environment see. The resources come from the
//! processes' statistics ([`iwarp::stat`]), so only processes that this user may query are counted.
//! The statistics count completion queues and memory regions but do not list them, so those lists
//! are empty.

use super::message::{Attributes, DATAGRAM_MAX, Reply, Request};
use crate::stat::{ProcessStats, QueuePair, all_processes};
use iwarp::{Config, Device, Face};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Constants of `rdma/rdma_netlink.h`.
mod nldev {
    /// `RDMA_NL_NLDEV`. The type of a request consists of this number and the command.
    pub(super) const CLIENT: u16 = 5 << 10;
    pub(super) const GET: u16 = CLIENT | 1;
    pub(super) const PORT_GET: u16 = CLIENT | 5;
    pub(super) const SYS_GET: u16 = CLIENT | 6;
    pub(super) const RES_GET: u16 = CLIENT | 9;
    pub(super) const RES_QP_GET: u16 = CLIENT | 10;
    pub(super) const RES_CM_ID_GET: u16 = CLIENT | 11;
    pub(super) const RES_CQ_GET: u16 = CLIENT | 12;
    pub(super) const RES_MR_GET: u16 = CLIENT | 13;
    pub(super) const RES_PD_GET: u16 = CLIENT | 14;
    pub(super) const RES_CTX_GET: u16 = CLIENT | 22;
    pub(super) const RES_SRQ_GET: u16 = CLIENT | 23;

    pub(super) const DEV_INDEX: u16 = 1;
    pub(super) const DEV_NAME: u16 = 2;
    pub(super) const PORT_INDEX: u16 = 3;
    pub(super) const FW_VERSION: u16 = 5;
    pub(super) const NODE_GUID: u16 = 6;
    pub(super) const SYS_IMAGE_GUID: u16 = 7;
    pub(super) const PORT_STATE: u16 = 12;
    pub(super) const PORT_PHYS_STATE: u16 = 13;
    pub(super) const NODE_TYPE: u16 = 14;
    pub(super) const SUMMARY: u16 = 15;
    pub(super) const SUMMARY_ENTRY: u16 = 16;
    pub(super) const SUMMARY_NAME: u16 = 17;
    pub(super) const SUMMARY_CURRENT: u16 = 18;
    pub(super) const QP: u16 = 19;
    pub(super) const QP_ENTRY: u16 = 20;
    pub(super) const LOCAL_QPN: u16 = 21;
    pub(super) const SQ_PSN: u16 = 24;
    pub(super) const TYPE: u16 = 26;
    pub(super) const STATE: u16 = 27;
    pub(super) const PROCESS: u16 = 28;
    pub(super) const CM_ID: u16 = 30;
    pub(super) const CM_ID_ENTRY: u16 = 31;
    pub(super) const PORT_SPACE: u16 = 32;
    pub(super) const SOURCE: u16 = 33;
    pub(super) const DESTINATION: u16 = 34;
    pub(super) const USE_COUNT: u16 = 38;
    pub(super) const PD: u16 = 46;
    pub(super) const PD_ENTRY: u16 = 47;
    pub(super) const NETDEV_INDEX: u16 = 50;
    pub(super) const NETDEV_NAME: u16 = 51;
    pub(super) const PD_NUMBER: u16 = 60;
    pub(super) const NETNS_MODE: u16 = 66;
    pub(super) const PROTOCOL: u16 = 67;
    pub(super) const COPY_ON_FORK: u16 = 93;
}

/// `enum ib_port_state` and `enum ib_port_phys_state`.
const ACTIVE: u8 = 4;
const LINK_UP: u8 = 5;
/// `RDMA_NODE_IB_CA` and `RDMA_NODE_RNIC`.
const CHANNEL_ADAPTER: u8 = 1;
const RNIC: u8 = 4;
/// The only port of a device.
const PORT: u32 = 1;
/// `IB_QPT_RC`.
const RELIABLE: u8 = 2;
/// State of a connected CM identifier, and the port space of TCP.
const CONNECTED: u8 = 5;
const TCP: u32 = 0x0106;
/// Tables are split at this length, so that each message fits a datagram.
const TABLE_MAX: usize = DATAGRAM_MAX / 2;

pub(super) fn datagrams(request: &[u8]) -> Vec<Vec<u8>> {
    let all = Request::all(request).into_iter();
    all.flat_map(|request| {
        let mut reply = Reply::new(request);
        let result = answer(&request, &mut reply);
        reply.end(result)
    })
    .collect()
}

fn answer(request: &Request<'_>, reply: &mut Reply<'_>) -> Result<(), Errno> {
    if request.kind == nldev::SYS_GET {
        // Devices are visible in all network namespaces; registered memory is copied on fork.
        let mut system = Attributes::default();
        system
            .byte(nldev::NETNS_MODE, 1)
            .byte(nldev::COPY_ON_FORK, 1);
        reply.message(&system);
        return Ok(());
    }
    let is_known = matches!(
        request.kind,
        nldev::GET | nldev::PORT_GET | nldev::RES_GET
            ..=nldev::RES_PD_GET | nldev::RES_CTX_GET | nldev::RES_SRQ_GET
    );
    if !is_known {
        return Err(Errno::OPNOTSUPP);
    }
    let variable = |name| std::env::var(name).unwrap_or_default();
    let devices = Device::list_as(&variable("IWARP_DEVICE_NAME"), &variable("IWARP_BIND"))
        .map_err(|_| Errno::IO)?;
    let index = request.number(nldev::DEV_INDEX);
    let chosen = |device: &&Device| index.is_none_or(|index| index == device.index);
    let mut chosen = devices.iter().filter(chosen).peekable();
    if chosen.peek().is_none() && index.is_some() {
        return Err(Errno::NODEV);
    }
    let face = Config::from_env().face;
    let port = request.number(nldev::PORT_INDEX).unwrap_or(PORT);
    if request.kind == nldev::PORT_GET && port != PORT {
        return Err(Errno::INVAL);
    }
    let stats = match request.kind {
        nldev::GET | nldev::PORT_GET => Vec::new(),
        _ => all_processes().map_err(|_| Errno::IO)?,
    };
    for device in chosen {
        match request.kind {
            nldev::GET => reply.message(&about_device(device, face)),
            nldev::PORT_GET => reply.message(&about_port(device)),
            nldev::RES_GET => reply.message(&summary(device, &stats)),
            _ => objects(request, device, &stats, reply)?,
        }
    }
    Ok(())
}

/// Starts a message with the device's index and name.
fn head(device: &Device) -> Attributes {
    let mut head = Attributes::default();
    head.word(nldev::DEV_INDEX, device.index)
        .text(nldev::DEV_NAME, &device.name);
    head
}

fn about_device(device: &Device, face: Face) -> Attributes {
    let (node, protocol) = match face {
        Face::Rnic => (RNIC, "iw"),
        Face::Roce => (CHANNEL_ADAPTER, "roce"),
    };
    let mut about = head(device);
    about
        // In an answer about a device, this attribute is the number of its ports.
        .word(nldev::PORT_INDEX, PORT)
        .text(nldev::FW_VERSION, env!("CARGO_PKG_VERSION"))
        .long(nldev::NODE_GUID, device.guid)
        .long(nldev::SYS_IMAGE_GUID, device.guid)
        .byte(nldev::NODE_TYPE, node)
        .text(nldev::PROTOCOL, protocol);
    about
}

fn about_port(device: &Device) -> Attributes {
    let mut about = head(device);
    about
        .word(nldev::PORT_INDEX, PORT)
        .byte(nldev::PORT_STATE, ACTIVE)
        .byte(nldev::PORT_PHYS_STATE, LINK_UP);
    // Ask the kernel for the index, not /sys: it may show the interfaces of another network
    // namespace.
    let index = device.interface_index();
    if index != 0 {
        about
            .word(nldev::NETDEV_INDEX, index)
            .text(nldev::NETDEV_NAME, &device.interface);
    }
    about
}

/// Returns the queue pairs of a device, each with its process ID.
fn queue_pairs<'a>(
    device: &'a Device,
    stats: &'a [ProcessStats],
) -> impl Iterator<Item = (u32, &'a QueuePair)> {
    stats.iter().flat_map(|one| {
        let own = one.document.queue_pairs.iter();
        own.filter(|qp| qp.device == device.name)
            .map(|qp| (one.pid, qp))
    })
}

/// Returns the protection domains that queue pairs use, and how many use each. The key is the
/// process ID and the number of the protection domain.
fn domains(device: &Device, stats: &[ProcessStats]) -> BTreeMap<(u32, u32), u64> {
    let mut domains = BTreeMap::new();
    for (process, qp) in queue_pairs(device, stats) {
        *domains.entry((process, qp.pd)).or_default() += 1;
    }
    domains
}

fn summary(device: &Device, stats: &[ProcessStats]) -> Attributes {
    let figures = || {
        let all = stats.iter().flat_map(|one| &one.document.devices);
        all.filter(|figures| figures.name == device.name)
    };
    let connected = queue_pairs(device, stats).filter(|(_, qp)| is_managed(qp));
    let mut table = Attributes::default();
    for (name, current) in [
        ("pd", domains(device, stats).len() as u64),
        ("cq", figures().map(|f| f.completion_queues).sum()),
        ("qp", queue_pairs(device, stats).count() as u64),
        ("cm_id", connected.count() as u64),
        ("mr", figures().map(|f| f.registrations).sum()),
        ("ctx", figures().map(|f| f.opened).sum()),
    ] {
        let mut entry = Attributes::default();
        entry
            .text(nldev::SUMMARY_NAME, name)
            .long(nldev::SUMMARY_CURRENT, current);
        table.nested(nldev::SUMMARY_ENTRY, &entry);
    }
    let mut summary = head(device);
    summary.nested(nldev::SUMMARY, &table);
    summary
}

/// Returns `true` if the connection manager connected the queue pair.
fn is_managed(qp: &QueuePair) -> bool {
    qp.kind == "cm" && qp.connection.is_some()
}

/// Answers a request for objects: lists all objects of a kind, or a single queue pair.
fn objects(
    request: &Request<'_>,
    device: &Device,
    stats: &[ProcessStats],
    reply: &mut Reply<'_>,
) -> Result<(), Errno> {
    let (table, entry, all): (u16, u16, Vec<Attributes>) = match request.kind {
        nldev::RES_QP_GET if !request.is_dump() => {
            let wanted = request.number(nldev::LOCAL_QPN).ok_or(Errno::INVAL)?;
            let mut all = queue_pairs(device, stats);
            let found = all
                .find(|(_, qp)| qp.number == wanted)
                .ok_or(Errno::NOENT)?;
            let mut attributes = head(device);
            about_queue_pair(found.0, found.1, &mut attributes);
            reply.message(&attributes);
            return Ok(());
        }
        _ if !request.is_dump() => return Err(Errno::OPNOTSUPP),
        nldev::RES_QP_GET => {
            let all = queue_pairs(device, stats).map(|(process, qp)| {
                let mut entry = Attributes::default();
                about_queue_pair(process, qp, &mut entry);
                entry
            });
            (nldev::QP, nldev::QP_ENTRY, all.collect())
        }
        nldev::RES_CM_ID_GET => {
            let all = queue_pairs(device, stats).filter(|(_, qp)| is_managed(qp));
            let all = all.map(|(process, qp)| about_identifier(process, qp));
            (nldev::CM_ID, nldev::CM_ID_ENTRY, all.collect())
        }
        nldev::RES_PD_GET => {
            let all = domains(device, stats).into_iter();
            let all = all.map(|((process, domain), uses)| {
                let mut entry = Attributes::default();
                entry
                    .long(nldev::USE_COUNT, uses)
                    .word(nldev::PD_NUMBER, domain)
                    .word(nldev::PROCESS, process);
                entry
            });
            (nldev::PD, nldev::PD_ENTRY, all.collect())
        }
        nldev::RES_CQ_GET | nldev::RES_MR_GET | nldev::RES_CTX_GET | nldev::RES_SRQ_GET => {
            return Ok(());
        }
        _ => return Err(Errno::OPNOTSUPP),
    };
    let mut part = Attributes::default();
    let mut send = |part: &mut Attributes| {
        let mut message = head(device);
        message.nested(table, &std::mem::take(part));
        reply.message(&message);
    };
    for one in &all {
        part.nested(entry, one);
        if part.len() >= TABLE_MAX {
            send(&mut part);
        }
    }
    if part.len() > 0 {
        send(&mut part);
    }
    Ok(())
}

fn about_queue_pair(process: u32, qp: &QueuePair, entry: &mut Attributes) {
    // `enum ib_qp_state`.
    let names = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE"];
    let state = names.iter().position(|name| *name == qp.state);
    entry
        .word(nldev::PORT_INDEX, PORT)
        .word(nldev::LOCAL_QPN, qp.number)
        // iWARP has no packet sequence numbers, but `rdma` requires the attribute.
        .word(nldev::SQ_PSN, 0)
        .byte(nldev::TYPE, RELIABLE)
        .byte(nldev::STATE, state.unwrap_or(names.len()) as u8)
        .word(nldev::PD_NUMBER, qp.pd)
        .word(nldev::PROCESS, process);
}

fn about_identifier(process: u32, qp: &QueuePair) -> Attributes {
    let mut entry = Attributes::default();
    entry
        .word(nldev::PORT_INDEX, PORT)
        .word(nldev::LOCAL_QPN, qp.number)
        .byte(nldev::TYPE, RELIABLE)
        .byte(nldev::STATE, CONNECTED)
        .word(nldev::PORT_SPACE, TCP)
        .word(nldev::PROCESS, process);
    if let Some(connection) = &qp.connection {
        for (kind, text) in [
            (nldev::SOURCE, &connection.local),
            (nldev::DESTINATION, &connection.peer),
        ] {
            if let Ok(address) = text.parse() {
                entry.octets(kind, &socket_address(address));
            }
        }
    }
    entry
}

/// Returns the bytes of a `struct sockaddr_in` or `sockaddr_in6`.
fn socket_address(address: SocketAddr) -> Vec<u8> {
    // Linux's `AF_INET` and `AF_INET6`.
    let family: u16 = if address.is_ipv4() { 2 } else { 10 };
    let mut octets = family.to_ne_bytes().to_vec();
    octets.extend(address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            octets.extend(v4.ip().octets());
            octets.extend([0; 8]);
        }
        SocketAddr::V6(v6) => {
            octets.extend(v6.flowinfo().to_be_bytes());
            octets.extend(v6.ip().octets());
            octets.extend(v6.scope_id().to_ne_bytes());
        }
    }
    octets
}

#[cfg(test)]
mod tests {
    use super::super::message::tests::request;
    use super::*;

    const DUMP: u16 = 0x305;

    fn kinds(octets: &[u8]) -> Vec<u16> {
        let datagrams = datagrams(octets);
        let all = datagrams.iter().flat_map(|datagram| Request::all(datagram));
        all.map(|message| message.kind).collect()
    }

    fn lo() -> Device {
        Device::by_address("127.0.0.1".parse().unwrap()).unwrap()
    }

    #[test]
    fn devices_and_ports_are_answered() {
        let index = lo().index;
        let dump = kinds(&request(nldev::GET, DUMP, &[]));
        assert_eq!(dump.last(), Some(&3));
        assert!(dump.len() > 1 && dump[0] == nldev::GET);
        let one = request(nldev::GET, 5, &[(nldev::DEV_INDEX, index)]);
        assert_eq!(kinds(&one), [nldev::GET, 2]);
        let port = [(nldev::DEV_INDEX, index), (nldev::PORT_INDEX, 1)];
        assert_eq!(
            kinds(&request(nldev::PORT_GET, 5, &port)),
            [nldev::PORT_GET, 2]
        );
        let octets = datagrams(&request(nldev::PORT_GET, 5, &port)).concat();
        assert!(octets.windows(3).any(|name| name == b"lo\0"));
    }

    #[test]
    fn bad_requests_get_errors() {
        let code = |octets: &[u8]| {
            let all = datagrams(octets);
            i32::from_ne_bytes([16, 17, 18, 19].map(|at| all[0][at]))
        };
        for (kind, flags, attributes, error) in [
            (nldev::GET, 5, vec![(nldev::DEV_INDEX, 9999)], Errno::NODEV),
            (
                nldev::PORT_GET,
                5,
                vec![(nldev::PORT_INDEX, 2)],
                Errno::INVAL,
            ),
            (nldev::CLIENT | 3, 5, vec![], Errno::OPNOTSUPP),
            (nldev::RES_QP_GET, 5, vec![], Errno::INVAL),
            (nldev::RES_CQ_GET, 5, vec![], Errno::OPNOTSUPP),
        ] {
            let octets = request(kind, flags, &attributes);
            assert_eq!(code(&octets), -error.raw_os_error(), "{kind:#x}");
        }
    }

    #[test]
    fn resources_belong_to_the_device() {
        let lo = lo();
        let document = format!(
            r#"{{"format":1,"process":{{}},"devices":[{{"name":"{0}","completion_queues":3}}],
                "queue_pairs":[{{"device":"{0}","number":5,"state":"RTS","kind":"cm","pd":1,
                "connection":{{"local":"127.0.0.1:7","peer":"[::1]:8"}}}},
                {{"device":"{0}","number":6,"state":"ERR","pd":1}},{{"device":"other"}}]}}"#,
            lo.name
        );
        let stats = [ProcessStats::read(Some(7), 0, document.as_bytes()).unwrap()];
        assert_eq!(queue_pairs(&lo, &stats).count(), 2);
        assert_eq!(domains(&lo, &stats), BTreeMap::from([((7, 1), 2)]));
        let octets = request(nldev::RES_QP_GET, 5, &[(nldev::LOCAL_QPN, 6)]);
        let request = Request::all(&octets)[0];
        let mut reply = Reply::new(request);
        assert_eq!(objects(&request, &lo, &stats, &mut reply), Ok(()));
        let datagrams = reply.end(Ok(()));
        let answer = Request::all(&datagrams[0])[0];
        assert_eq!(answer.number(nldev::LOCAL_QPN), Some(6));
        assert_eq!(answer.number(nldev::PROCESS), Some(7));
        let identifier = about_identifier(7, &stats[0].document.queue_pairs[0]);
        assert!(identifier.len() > 60);
        let v4 = socket_address("127.0.0.1:7".parse().unwrap());
        assert_eq!(v4[2..8], [0, 7, 127, 0, 0, 1]);
        assert_eq!(
            (v4.len(), socket_address("[::1]:8".parse().unwrap()).len()),
            (16, 28)
        );
    }

    /// Large lists are split into several tables.
    #[test]
    fn many_queue_pairs_fill_several_messages() {
        let lo = lo();
        let mut qp = QueuePair::default();
        qp.device.clone_from(&lo.name);
        let mut one = ProcessStats::default();
        one.document.queue_pairs = vec![qp; 500];
        let octets = request(nldev::RES_QP_GET, DUMP, &[]);
        let request = Request::all(&octets)[0];
        let mut reply = Reply::new(request);
        assert_eq!(objects(&request, &lo, &[one], &mut reply), Ok(()));
        let datagrams = reply.end(Ok(()));
        assert!(datagrams.len() > 5 && datagrams.iter().all(|d| d.len() <= DATAGRAM_MAX));
    }
}
