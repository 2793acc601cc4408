//! Messages of protocols above iWARP: rsockets, port mapper, `iwarp ping`, and tag-matching
//! headers.

use iwarp_proto::tag_matching::{Rvh, Tmh};

use super::print;
use crate::{ping, portmap, rsocket};

/// The input as rsocket private data, as a message, and as entries of the two directories.
pub fn rsockets(data: &[u8]) {
    match rsocket::Hello::decode(data) {
        Ok(hello) => {
            print(&hello);
            assert!(hello.credits > 0 && hello.buffer.len > 0 && hello.directory.len >= 2);
            // Encoding rounds the number of mappings; rounding again must not change it.
            assert_eq!(rsocket::round_mappings(hello.mappings), hello.mappings);
            assert_eq!(rsocket::Hello::decode(&hello.encode()), Ok(hello));
        }
        Err(error) => print(&error),
    }
    if let Some(octets) = data.first_chunk() {
        let message = rsocket::Message::decode(*octets);
        print(&message);
        assert_eq!(rsocket::Message::decode(message.encode()), message);
    }
    if let Some(octets) = data.first_chunk() {
        let window = rsocket::Window::from_native(octets);
        assert_eq!(window.to_native(), *octets);
    }
    if let Some(octets) = data.first_chunk() {
        let mapping = rsocket::Mapping::from_native(octets);
        assert_eq!(mapping.to_native(), *octets);
        for offset in [0, mapping.offset, u64::MAX, mapping.window.addr] {
            let inside = mapping.find(offset);
            assert!(inside.is_none_or(|at| at < u64::from(mapping.window.len)));
        }
    }
}

/// A port mapper message.
pub fn portmap(data: &[u8]) {
    let Some(message) = portmap::Message::parse(data) else {
        return;
    };
    print(&message);
    let octets = message.octets();
    assert!(octets.len() <= portmap::REQUEST_LEN);
    // Both addresses have the IP version in the first octet, so encoding loses nothing.
    assert_eq!(portmap::Message::parse(&octets), Some(message));
}

/// A buffer description from a peer of `iwarp ping`, and the text in the buffer.
pub fn ping(data: &[u8]) {
    if let Some(octets) = data.first_chunk() {
        let info = ping::Info::decode(*octets);
        print(&info);
        assert_eq!(info.encode(), *octets);
    }
    let text = ping::printable(data);
    let is_harmless = |c: char| !c.is_control() && !matches!(c, '\u{202a}'..='\u{202e}');
    assert!(text.chars().all(is_harmless), "{text:?}");
    assert_eq!(
        crate::text::printable(&text),
        text,
        "`printable` changes its own output"
    );
}

/// The headers of a tag-matched message.
pub fn tags(data: &[u8]) {
    if let Some(tmh) = Tmh::parse(data) {
        print(&tmh);
        assert_eq!(Tmh::parse(&tmh.octets()), Some(tmh));
    }
    if let Some(rvh) = Rvh::parse(data) {
        print(&rvh);
    }
}
