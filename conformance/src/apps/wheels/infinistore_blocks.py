"""InfiniStore's server, and a client that writes blocks, reads them back and checks them."""

import asyncio
import sys

import infinistore

from exchange import Memory, noise

BLOCK = 64 << 10
BLOCKS = 256


def server(device, port):
    """Serves until killed. The server program of the wheel would need root."""
    import uvloop

    config = infinistore.ServerConfig(
        manage_port=1,
        service_port=int(port),
        dev_name=device,
        link_type=infinistore.LINK_ETHERNET,
        prealloc_size=1,
        minimal_allocate_size=16,
    )
    config.verify()
    loop = uvloop.new_event_loop()
    infinistore.register_server(loop, config)
    loop.run_forever()


def connect(device, port):
    config = infinistore.ClientConfig(
        connection_type=infinistore.TYPE_RDMA,
        host_addr="127.0.0.1",
        service_port=int(port),
        dev_name=device,
        link_type=infinistore.LINK_ETHERNET,
    )
    connection = infinistore.InfinityConnection(config)
    connection.connect()
    return connection


def client(device, port):
    content = noise(1, BLOCK * BLOCKS)
    blocks = [(f"block {i}", i * BLOCK) for i in range(BLOCKS)]
    writer = connect(device, port)
    source = Memory(content)
    writer.register_mr(source.address, source.size)
    asyncio.run(writer.rdma_write_cache_async(blocks, BLOCK, source.address))
    reader = connect(device, port)
    copy = Memory(bytes(len(content)))
    reader.register_mr(copy.address, copy.size)
    # Read the blocks in reverse order.
    backwards = [(name, (BLOCKS - 1) * BLOCK - offset) for name, offset in blocks]
    asyncio.run(reader.rdma_read_cache_async(backwards, BLOCK, copy.address))
    wanted = b"".join(content[at : at + BLOCK] for _, at in reversed(blocks))
    copy.check(wanted, "read")
    if reader.check_exist("no such block"):
        sys.exit("a block that was not written exists")
    if reader.delete_keys([blocks[0][0]]) != 1 or reader.check_exist(blocks[0][0]):
        sys.exit("a deleted block exists")
    writer.close()
    reader.close()


{"server": server, "client": client}[sys.argv[1]](*sys.argv[2:])
