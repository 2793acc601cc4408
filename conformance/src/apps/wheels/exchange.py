"""What the test programs of this folder share: contents, and files for what both ends must know."""

import ctypes
import os
import random
import sys
import time

LIMIT_S = 60


def noise(seed, size):
    """Returns `size` bytes that depend on the seed."""
    return random.Random(seed).randbytes(size)


class Memory:
    """Memory whose address is known, filled with `content`."""

    def __init__(self, content):
        self.size = len(content)
        self._buffer = ctypes.create_string_buffer(content, self.size)
        self.address = ctypes.addressof(self._buffer)

    def content(self):
        return self._buffer.raw

    def check(self, wanted, what):
        """Ends the program unless the memory has the wanted content."""
        found = self.content()
        if found != wanted:
            at = next(i for i in range(self.size) if found[i] != wanted[i])
            sys.exit(f"{what}: wrong at byte {at} of {self.size}")
        print(f"{what}: correct", flush=True)


def publish(name, content):
    """Writes a file that appears whole."""
    with open(name + ".new", "wb") as file:
        file.write(content)
    os.rename(name + ".new", name)


def await_file(name):
    """Returns the content of a file that the other end publishes."""
    wait_until(lambda: os.path.exists(name), f"no {name}")
    with open(name, "rb") as file:
        return file.read()


def wait_until(condition, problem):
    """Ends the program if the condition does not become true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(problem)
        time.sleep(0.002)
