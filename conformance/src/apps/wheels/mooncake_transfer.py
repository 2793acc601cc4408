"""Two transfer engines of Mooncake, in separate processes: batches of Reads and Writes."""

import sys

from mooncake.engine import TransferEngine

from exchange import Memory, await_file, noise, publish

SIZES = [1, 4096, 65537, 8 << 20]


def content(seed):
    return [noise(seed * 10 + i, size) for i, size in enumerate(SIZES)]


def open_engine(address, device, contents):
    engine = TransferEngine()
    if engine.initialize(address, "P2PHANDSHAKE", "rdma", device) != 0:
        sys.exit("cannot initialize the engine")
    memory = [Memory(part) for part in contents]
    for part in memory:
        register(engine, part)
    return engine, memory


def register(engine, part):
    if engine.register_memory(part.address, part.size) != 0:
        sys.exit("cannot register memory")


def target(address, device):
    engine, memory = open_engine(address, device, content(1))
    parts = " ".join(str(part.address) for part in memory)
    publish("target", f"{address}:{engine.get_rpc_port()} {parts}".encode())
    await_file("written")
    for part, wanted in zip(memory, content(2)):
        part.check(wanted, f"written, {part.size}")
    publish("checked", b"")
    await_file("ended")


def initiator(address, device):
    engine, memory = open_engine(address, device, [bytes(size) for size in SIZES])
    name, *remote = await_file("target").decode().split()
    remote = [int(word) for word in remote]
    local = [part.address for part in memory]
    if engine.batch_transfer_sync_read(name, local, remote, SIZES) != 0:
        sys.exit("the Read failed")
    for part, wanted in zip(memory, content(1)):
        part.check(wanted, f"read, {part.size}")
    sources = [Memory(part) for part in content(2)]
    for part in sources:
        register(engine, part)
    local = [part.address for part in sources]
    if engine.batch_transfer_sync_write(name, local, remote, SIZES) != 0:
        sys.exit("the Write failed")
    publish("written", b"")
    await_file("checked")
    publish("ended", b"")


{"target": target, "initiator": initiator}[sys.argv[1]](*sys.argv[2:])
