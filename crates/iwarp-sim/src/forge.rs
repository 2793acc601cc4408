//! Sends a forged FPDU ([`Forgery`]) on a connection.

use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, encode_fpdu};
use iwarp_rnic::SendOp;
use iwarp_rnic::qp::Rtr;

use crate::forgery::Forgery;
use crate::world::{Event, World};

impl World {
    /// Sends a forged FPDU from endpoint `e`, after everything that it has already sent.
    pub fn forge(&mut self, e: usize, forgery: Forgery) {
        let ep = &self.eps[e];
        let messages = ep.ops.iter().map(|op| match op.op {
            SendOp::Send | SendOp::SendInv(_) | SendOp::WriteImm { .. } => 1,
            // Immediate data are a separate message.
            SendOp::SendImm(_) => 2,
            _ => 0,
        });
        let rtr = u32::from(ep.stream.rtr == Some(Rtr::Send));
        let next_msn = 1 + rtr + messages.sum::<u32>();
        let options = FpduOptions {
            markers: ep.stream.markers_tx,
            crc: ep.stream.crc.then_some(iwarp_proto::crc32c::append as _),
        };
        let ulpdu = forgery.ulpdu(next_msn);
        let mut clock = MarkerClock::at(self.pipes[e].written());
        let mut octets = [0; 64];
        let Ok(len) = encode_fpdu(&ulpdu, &options, &mut clock, &mut octets) else {
            self.fail(|| format!("endpoint {e}: {forgery:?} does not fit into an FPDU"));
            return;
        };
        self.log(|| format!("ep {e}: forged FPDU: {forgery:?}"));
        let mut arrivals = Vec::new();
        let written = self.pipes[e].write(self.now, &octets[..len], |at| arrivals.push(at));
        if written < len {
            self.fail(|| format!("endpoint {e}: an empty pipe has no room"));
        }
        for at in arrivals {
            self.at(at, Event::Readable(e ^ 1));
        }
    }
}
