"""Lesson 4: the client sends a message, and the server answers. It talks to ../c/message, too.

usage: message.py            waits for one client on port 7471
       message.py HOST       sends a message to the server on HOST
"""

import sys

from pyverbs.cmid import ConnParam

from lesson import PORT, endpoint, succeeded

SIZE = 256


def say(peer, region, text):
    region.write(text, len(text))
    peer.post_send(region, length=len(text))
    succeeded(peer.get_send_comp())
    print('sent     ', text)


def hear(peer, region):
    length = succeeded(peer.get_recv_comp()).byte_len
    text = region.read(length, 0).decode()
    print('received ', text)
    return text


def main():
    host = sys.argv[1] if len(sys.argv) > 1 else None
    peer = endpoint(host)
    if not host:
        listener = peer
        listener.listen()
        print('waiting on port', PORT, flush=True)
        peer = listener.get_request()
    inbox, outbox = peer.reg_msgs(SIZE), peer.reg_msgs(SIZE)
    # Before the connection exists, so that no message can come too early.
    peer.post_recv(inbox)
    if host:
        peer.connect(ConnParam())
        say(peer, outbox, 'hello from Python')
        hear(peer, inbox)
        peer.disconnect()
    else:
        peer.accept(ConnParam())
        say(peer, outbox, f"you said '{hear(peer, inbox)}'")
    inbox.close()
    outbox.close()
    peer.close()


main()
