"""Lesson 5: writes into the memory of the server ../c/one_sided, and reads it.

usage: one_sided.py HOST
"""

import struct
import sys

from pyverbs.cmid import ConnParam

from lesson import endpoint, succeeded

SIZE = 256
OFFER = struct.Struct('>QQI')  # address, length and rkey, big-endian


def read(peer, region, address, rkey):
    peer.post_read(region, SIZE, address, rkey)
    succeeded(peer.get_send_comp())
    print('read  ', repr(region.read(SIZE, 0).rstrip(b'\0').decode()))


def message(peer, region):
    """Sends a message, at whose content the server does not look."""
    peer.post_send(region, length=1)
    succeeded(peer.get_send_comp())


def main():
    if len(sys.argv) != 2:
        raise SystemExit('usage: one_sided.py HOST')
    peer = endpoint(sys.argv[1])
    inbox = peer.reg_msgs(OFFER.size)
    local = peer.reg_write(SIZE)  # iWARP cards need the right of remote write for a Read
    peer.post_recv(inbox)
    peer.connect(ConnParam(depth=1))
    message(peer, local)  # On iWARP, the end that accepts may not send first.
    succeeded(peer.get_recv_comp())
    address, _, rkey = OFFER.unpack(inbox.read(OFFER.size, 0))
    print(f'the server offers its memory with the rkey {rkey:#010x}')

    read(peer, local, address, rkey)
    text = 'Python was here'
    local.write(text.ljust(SIZE, '\0'), SIZE)
    peer.post_write(local, SIZE, address, rkey)
    succeeded(peer.get_send_comp())
    print('wrote ', repr(text))
    read(peer, local, address, rkey)
    message(peer, local)  # the goodbye
    peer.disconnect()
    inbox.close()
    local.close()
    peer.close()


main()
