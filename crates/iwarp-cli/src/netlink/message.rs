//! The netlink format: headers, attributes, and datagrams. See netlink(7).

/// Header length: total length, type, flags, sequence number and port, in host byte order.
const HEADER_LEN: usize = 16;
/// Attribute header length: length and type.
const ATTRIBUTE_LEN: usize = 4;
/// Longest datagram that is sent. `rdma` reads into 8 KiB or more.
pub(super) const DATAGRAM_MAX: usize = 4096;

/// `NLMSG_ERROR`: an error or an acknowledgement.
const ERROR: u16 = 2;
/// `NLMSG_DONE`: end of a dump.
const DONE: u16 = 3;
/// `NLM_F_ACK`: the sender wants an acknowledgement.
const ACKNOWLEDGE: u16 = 4;
/// `NLM_F_DUMP`: all objects are requested.
const DUMP: u16 = 0x300;
/// `NLM_F_MULTI`: the message is one of several.
const MULTI: u16 = 2;
/// `NLA_F_NESTED`: the attribute contains attributes.
const NESTED: u16 = 1 << 15;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request<'a> {
    pub(super) kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
    octets: &'a [u8],
}

impl<'a> Request<'a> {
    /// Splits a datagram into requests; stops at the first malformed one.
    pub(super) fn all(mut datagram: &'a [u8]) -> Vec<Self> {
        let mut requests = Vec::new();
        while let Some(header) = datagram.first_chunk::<HEADER_LEN>() {
            let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| header[at + i]));
            let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
            let len = word(0) as usize;
            let Some(octets) = datagram.get(..len).filter(|_| len >= HEADER_LEN) else {
                break;
            };
            requests.push(Self {
                kind: half(4),
                flags: half(6),
                sequence: word(8),
                port: word(12),
                octets,
            });
            datagram = datagram.get(aligned(len)..).unwrap_or_default();
        }
        requests
    }

    pub(super) const fn is_dump(&self) -> bool {
        self.flags & DUMP == DUMP
    }

    /// Returns a 32-bit attribute.
    pub(super) fn number(&self, wanted: u16) -> Option<u32> {
        let mut rest = self.octets.get(HEADER_LEN..)?;
        while let Some([a, b, c, d]) = rest.first_chunk::<ATTRIBUTE_LEN>() {
            let len = usize::from(u16::from_ne_bytes([*a, *b]));
            let value = rest.get(ATTRIBUTE_LEN..len)?;
            if u16::from_ne_bytes([*c, *d]) & !NESTED == wanted {
                return value.try_into().ok().map(u32::from_ne_bytes);
            }
            rest = rest.get(aligned(len)..).unwrap_or_default();
        }
        None
    }
}

const fn aligned(len: usize) -> usize {
    len.next_multiple_of(4)
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    /// Adds an attribute. A value that is too long is omitted.
    pub(super) fn octets(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        if let Ok(len) = u16::try_from(ATTRIBUTE_LEN + value.len()) {
            self.0.extend(len.to_ne_bytes());
            self.0.extend(kind.to_ne_bytes());
            self.0.extend(value);
            self.0.resize(aligned(self.0.len()), 0);
        }
        self
    }

    pub(super) fn byte(&mut self, kind: u16, value: u8) -> &mut Self {
        self.octets(kind, &[value])
    }

    pub(super) fn word(&mut self, kind: u16, value: u32) -> &mut Self {
        self.octets(kind, &value.to_ne_bytes())
    }

    pub(super) fn long(&mut self, kind: u16, value: u64) -> &mut Self {
        self.octets(kind, &value.to_ne_bytes())
    }

    /// Adds a NUL-terminated string.
    pub(super) fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        self.octets(kind, &[value.as_bytes(), &[0]].concat())
    }

    pub(super) fn nested(&mut self, kind: u16, inner: &Self) -> &mut Self {
        self.octets(kind | NESTED, &inner.0)
    }

    /// Returns the length in bytes.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// The datagrams that answer a request.
#[derive(Debug)]
pub(super) struct Reply<'a> {
    request: Request<'a>,
    datagrams: Vec<Vec<u8>>,
}

impl<'a> Reply<'a> {
    pub(super) fn new(request: Request<'a>) -> Self {
        Self {
            request,
            datagrams: Vec::new(),
        }
    }

    fn push(&mut self, kind: u16, flags: u16, body: &[u8]) {
        let len = HEADER_LEN + body.len();
        let mut message = Vec::with_capacity(aligned(len));
        message.extend((len as u32).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.request.sequence.to_ne_bytes());
        message.extend(self.request.port.to_ne_bytes());
        message.extend(body);
        message.resize(aligned(len), 0);
        match self.datagrams.last_mut() {
            Some(last) if last.len() + message.len() <= DATAGRAM_MAX => last.extend(message),
            _ => self.datagrams.push(message),
        }
    }

    /// Adds a message with attributes; its type is that of the request.
    pub(super) fn message(&mut self, attributes: &Attributes) {
        let flags = if self.request.is_dump() { MULTI } else { 0 };
        self.push(self.request.kind, flags, &attributes.0);
    }

    /// Ends the answer: with an error, with the end of a dump, or with an acknowledgement if the
    /// request wants one.
    pub(super) fn end(mut self, result: Result<(), rustix::io::Errno>) -> Vec<Vec<u8>> {
        let code = result.map_or_else(|error| -error.raw_os_error(), |()| 0);
        if result.is_ok() && self.request.is_dump() {
            self.push(DONE, MULTI, &0i32.to_ne_bytes());
        } else if result.is_err() || self.request.flags & ACKNOWLEDGE != 0 {
            let header = self.request.octets.get(..HEADER_LEN).unwrap_or_default();
            let body = [&code.to_ne_bytes(), header].concat();
            // The acknowledgement is a separate datagram, because readers stop at the end of a
            // datagram.
            self.datagrams.push(Vec::new());
            self.push(ERROR, 0, &body);
        }
        self.datagrams
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Writes a request with 32-bit attributes.
    pub(in crate::netlink) fn request(kind: u16, flags: u16, numbers: &[(u16, u32)]) -> Vec<u8> {
        let mut attributes = Attributes::default();
        for (kind, value) in numbers {
            attributes.word(*kind, *value);
        }
        let mut octets = Vec::new();
        octets.extend((16 + attributes.0.len() as u32).to_ne_bytes());
        octets.extend(kind.to_ne_bytes());
        octets.extend(flags.to_ne_bytes());
        octets.extend(7u32.to_ne_bytes());
        octets.extend(9u32.to_ne_bytes());
        octets.extend(attributes.0);
        octets
    }

    #[test]
    fn requests_are_split_and_read() {
        let one = request(0x1401, 5, &[(1, 4), (3, 1)]);
        let two = [one.clone(), request(0x1405, 0x305, &[])].concat();
        let all = Request::all(&two);
        assert_eq!(all.len(), 2);
        assert_eq!(
            (all[0].kind, all[0].is_dump(), all[1].is_dump()),
            (0x1401, false, true)
        );
        assert_eq!(
            (all[0].number(1), all[0].number(3), all[0].number(2)),
            (Some(4), Some(1), None)
        );
        // No truncation of the datagram causes a panic.
        for len in 0..one.len() {
            assert_eq!(Request::all(&one[..len]), []);
        }
        // Nor does a wrong length of an attribute or of the message.
        let mut damaged = one.clone();
        for len in 0..=u8::MAX {
            damaged[16] = len;
            let _ = Request::all(&damaged)[0].number(3);
        }
        damaged[0] = 3;
        assert_eq!(Request::all(&damaged), []);
    }

    #[test]
    fn attributes_are_padded() {
        let mut inner = Attributes::default();
        inner.text(18, "qp").byte(14, 4);
        assert_eq!(
            inner.0[..8],
            [&7u16.to_ne_bytes()[..], &18u16.to_ne_bytes(), b"qp\0\0"].concat()
        );
        assert_eq!(inner.len(), 16);
        let mut outer = Attributes::default();
        outer.nested(16, &inner).octets(1, &vec![0; 70000]);
        assert_eq!(outer.len(), 20);
        assert_eq!(outer.0[..2], 20u16.to_ne_bytes());
    }

    #[test]
    fn answers_end_as_in_netlink() {
        let kind = |datagram: &[u8]| u16::from_ne_bytes([datagram[4], datagram[5]]);
        for (flags, result, wanted) in [
            (0x305, Ok(()), Some((DONE, 0))),
            (0x005, Ok(()), Some((ERROR, 0))),
            (0x001, Ok(()), None),
            (0x001, Err(rustix::io::Errno::NODEV), Some((ERROR, -19))),
            (0x305, Err(rustix::io::Errno::NODEV), Some((ERROR, -19))),
        ] {
            let octets = request(0x1401, flags, &[]);
            let request = Request::all(&octets)[0];
            let datagrams = Reply::new(request).end(result);
            let last = datagrams.last().map(|last| {
                let code = i32::from_ne_bytes([16, 17, 18, 19].map(|at| last[at]));
                assert_eq!(last[8..12], 7u32.to_ne_bytes());
                (kind(last), code)
            });
            assert_eq!(last, wanted, "{flags:#x}");
        }
        let octets = request(0x1401, 0x305, &[]);
        // Messages of some of these lengths fill datagrams exactly.
        for len in 20..100 {
            let mut reply = Reply::new(Request::all(&octets)[0]);
            for _ in 0..DATAGRAM_MAX / 16 {
                reply.message(Attributes::default().text(2, &"x".repeat(len)));
            }
            let datagrams = reply.end(Ok(()));
            assert!(datagrams.len() > 2 && datagrams.iter().all(|d| d.len() <= DATAGRAM_MAX));
        }
    }
}
