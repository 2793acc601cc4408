"""Two endpoints of DLSlime, in separate processes: all operations that endpoints support."""

import json
import sys

import dlslime

from exchange import Memory, await_file, noise, publish

SIZE = (8 << 20) + 4096
QPS = 2
IMMEDIATE = 0x1234


def open_endpoint(name, other, device, content):
    """Returns a connected endpoint, its memory, and the keys of the memory at both ends."""
    endpoint = dlslime.RDMAEndpoint(device, 1, "auto", QPS)
    memory = Memory(content)
    own = endpoint.register_memory_region("memory", memory.address, 0, memory.size)
    info = {"endpoint": endpoint.endpoint_info(), "memory": endpoint.mr_info()}
    publish(name, json.dumps(info).encode())
    info = json.loads(await_file(other))
    endpoint.connect(info["endpoint"])
    remote = endpoint.register_remote_memory_region("memory", info["memory"]["memory"])
    worker = dlslime.RDMAWorker(device, 0)
    worker.add_endpoint(endpoint)
    worker.start()
    publish(name + ".ready", b"")
    await_file(other + ".ready")
    return endpoint, worker, memory, own, remote


def succeed(future, what):
    code = future.wait()
    if code != 0:
        sys.exit(f"{what}: {code}")


def target(device):
    endpoint, worker, memory, _, _ = open_endpoint("target", "initiator", device, noise(1, SIZE))
    await_file("written")
    memory.check(noise(2, SIZE), "written")
    future = endpoint.imm_recv()
    publish("checked", b"")
    succeed(future, "immediate")
    if future.imm_data() != IMMEDIATE:
        sys.exit(f"immediate data {future.imm_data():#x}")
    memory.check(noise(3, SIZE), "written with immediate data")
    future = endpoint.recv((memory.address, 0, SIZE))
    publish("receives", b"")
    succeed(future, "receive")
    memory.check(noise(4, SIZE), "received")
    publish("received", b"")
    await_file("ended")
    worker.stop()


def initiator(device):
    opened = open_endpoint("initiator", "target", device, bytes(SIZE))
    endpoint, worker, memory, own, remote = opened
    whole = [(own, remote, 0, 0, SIZE)]
    succeed(endpoint.read(whole), "read")
    memory.check(noise(1, SIZE), "read")
    sources = {seed: Memory(noise(seed, SIZE)) for seed in (2, 3, 4)}
    keys = {
        seed: endpoint.register_memory_region(f"source {seed}", part.address, 0, part.size)
        for seed, part in sources.items()
    }
    succeed(endpoint.write([(keys[2], remote, 0, 0, SIZE)]), "write")
    publish("written", b"")
    await_file("checked")
    succeed(endpoint.write_with_imm([(keys[3], remote, 0, 0, SIZE)], IMMEDIATE), "write_with_imm")
    await_file("receives")
    succeed(endpoint.send((sources[4].address, 0, SIZE)), "send")
    await_file("received")
    publish("ended", b"")
    worker.stop()


{"target": target, "initiator": initiator}[sys.argv[1]](*sys.argv[2:])
