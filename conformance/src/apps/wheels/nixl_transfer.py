"""Two NIXL agents, in separate processes: a Read, and a Write with a notification."""

import sys

from nixl import nixl_agent, nixl_agent_config

from exchange import Memory, await_file, noise, publish, wait_until

SIZES = [1, 4096, 65537, 8 << 20]
DONE = b"written"


def content(seed):
    return [noise(seed * 10 + i, size) for i, size in enumerate(SIZES)]


def open_agent(name, contents):
    """Returns an agent, its memory and the descriptors of the registered memory."""
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = [Memory(part) for part in contents]
    regions = [(part.address, part.size, 0, "") for part in memory]
    agent.register_memory(agent.get_reg_descs(regions, "DRAM"))
    descriptors = agent.get_xfer_descs([region[:3] for region in regions], "DRAM")
    return agent, memory, descriptors


def target():
    agent, memory, descriptors = open_agent("target", content(1))
    publish("descriptors", agent.get_serialized_descs(descriptors))
    publish("metadata", agent.get_agent_metadata())
    notified = []

    def is_notified():
        notified.extend(agent.get_new_notifs().get("initiator", []))
        return DONE in notified

    wait_until(is_notified, "the notification did not arrive")
    for part, wanted in zip(memory, content(2)):
        part.check(wanted, f"written, {part.size}")
    publish("checked", b"")
    await_file("ended")


def transfer(agent, operation, local, remote, notification=b""):
    handle = agent.initialize_xfer(operation, local, remote, "target", notification)
    state = [agent.transfer(handle)]

    def is_done():
        if state[0] == "PROC":
            state[0] = agent.check_xfer_state(handle)
        return state[0] != "PROC"

    wait_until(is_done, f"{operation} does not complete")
    if state[0] != "DONE":
        sys.exit(f"{operation}: {state[0]}")
    agent.release_xfer_handle(handle)


def initiator():
    agent, memory, local = open_agent("initiator", [bytes(size) for size in SIZES])
    metadata = await_file("metadata")
    agent.add_remote_agent(metadata)
    remote = agent.deserialize_descs(await_file("descriptors"))
    transfer(agent, "READ", local, remote)
    for part, wanted in zip(memory, content(1)):
        part.check(wanted, f"read, {part.size}")
    sources = [Memory(part) for part in content(2)]
    regions = [(part.address, part.size, 0, "") for part in sources]
    agent.register_memory(agent.get_reg_descs(regions, "DRAM"))
    source = agent.get_xfer_descs([region[:3] for region in regions], "DRAM")
    transfer(agent, "WRITE", source, remote, DONE)
    await_file("checked")
    agent.remove_remote_agent("target")
    publish("ended", b"")


{"target": target, "initiator": initiator}[sys.argv[1]]()
