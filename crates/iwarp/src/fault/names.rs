//! The names of statuses, events and errors in `ibv_poll_cq(3)`, `ibv_get_async_event(3)` and
//! `errno(3)`.

use iwarp_rnic::WcStatus;

/// Completion statuses, without the prefix `IBV_WC_`. Those of reliable datagrams are missing,
/// because no device supports them.
pub(super) const STATUSES: [(&str, WcStatus); 15] = [
    ("LOC_LEN_ERR", WcStatus::LocalLength),
    ("LOC_QP_OP_ERR", WcStatus::LocalQpOperation),
    ("LOC_PROT_ERR", WcStatus::LocalProtection),
    ("WR_FLUSH_ERR", WcStatus::Flushed),
    ("MW_BIND_ERR", WcStatus::MwBind),
    ("BAD_RESP_ERR", WcStatus::BadResponse),
    ("LOC_ACCESS_ERR", WcStatus::LocalAccess),
    ("REM_INV_REQ_ERR", WcStatus::RemoteInvalidRequest),
    ("REM_ACCESS_ERR", WcStatus::RemoteAccess),
    ("REM_OP_ERR", WcStatus::RemoteOperation),
    ("RETRY_EXC_ERR", WcStatus::TransportRetryExceeded),
    ("RNR_RETRY_EXC_ERR", WcStatus::ReceiverNotReady),
    ("FATAL_ERR", WcStatus::Fatal),
    ("RESP_TIMEOUT_ERR", WcStatus::ResponseTimeout),
    ("GENERAL_ERR", WcStatus::General),
];

/// An asynchronous event that can be injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The queue pair's stream breaks.
    QpFatal,
    /// The peer is reported to have violated the protocol.
    QpRequestError,
    /// The peer is reported to have accessed memory without permission.
    QpAccessError,
    CommunicationEstablished,
    SqDrained,
    LastWqeReached,
    /// Affects the queue pair's shared receive queue, if it has one.
    SrqLimitReached,
    PortActive,
    PortError,
    LidChange,
    PkeyChange,
    SmChange,
    ClientReregister,
    GidChange,
    DeviceFatal,
}

impl Event {
    /// Returns `true` if the event concerns the device or its port.
    pub(crate) const fn is_of_device(self) -> bool {
        matches!(
            self,
            Self::PortActive
                | Self::PortError
                | Self::LidChange
                | Self::PkeyChange
                | Self::SmChange
                | Self::ClientReregister
                | Self::GidChange
                | Self::DeviceFatal
        )
    }
}

/// Events, without the prefix `IBV_EVENT_`.
pub(super) const EVENTS: [(&str, Event); 15] = [
    ("QP_FATAL", Event::QpFatal),
    ("QP_REQ_ERR", Event::QpRequestError),
    ("QP_ACCESS_ERR", Event::QpAccessError),
    ("COMM_EST", Event::CommunicationEstablished),
    ("SQ_DRAINED", Event::SqDrained),
    ("QP_LAST_WQE_REACHED", Event::LastWqeReached),
    ("SRQ_LIMIT_REACHED", Event::SrqLimitReached),
    ("PORT_ACTIVE", Event::PortActive),
    ("PORT_ERR", Event::PortError),
    ("LID_CHANGE", Event::LidChange),
    ("PKEY_CHANGE", Event::PkeyChange),
    ("SM_CHANGE", Event::SmChange),
    ("CLIENT_REREGISTER", Event::ClientReregister),
    ("GID_CHANGE", Event::GidChange),
    ("DEVICE_FATAL", Event::DeviceFatal),
];

/// Errors that creation of an object may return.
pub(super) const ERRNOS: [(&str, i32); 13] = [
    ("ENOMEM", libc::ENOMEM),
    ("EINVAL", libc::EINVAL),
    ("EAGAIN", libc::EAGAIN),
    ("EPERM", libc::EPERM),
    ("EACCES", libc::EACCES),
    ("EMFILE", libc::EMFILE),
    ("ENFILE", libc::ENFILE),
    ("ENODEV", libc::ENODEV),
    ("EBUSY", libc::EBUSY),
    ("ENOSPC", libc::ENOSPC),
    ("EIO", libc::EIO),
    ("EFAULT", libc::EFAULT),
    ("EOPNOTSUPP", libc::EOPNOTSUPP),
];

/// Returns the value of a name, which may have the C prefix.
pub(super) fn find<T: Copy>(table: &[(&str, T)], prefix: &str, name: &str) -> Option<T> {
    let name = name.strip_prefix(prefix).unwrap_or(name);
    table.iter().find(|row| row.0 == name).map(|row| row.1)
}

pub(crate) fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> &'static str {
    table
        .iter()
        .find(|row| row.1 == *value)
        .map_or("?", |row| row.0)
}

pub(crate) fn status(status: WcStatus) -> &'static str {
    name_of(&STATUSES, &status)
}

pub(crate) fn event(event: Event) -> &'static str {
    name_of(&EVENTS, &event)
}

pub(crate) fn errno(errno: i32) -> &'static str {
    name_of(&ERRNOS, &errno)
}
